"""Faults that are planted in rlsys one at a time, and the tests that catch them."""
