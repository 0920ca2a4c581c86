"""Faults that are planted in rlsys on purpose, one at a time, and the tests that catch them."""
