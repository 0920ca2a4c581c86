"""Faults against every process of a real run, and the checks that nothing hangs, is lost or is left over."""
