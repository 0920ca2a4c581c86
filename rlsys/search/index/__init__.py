"""Indexes: built, opened and searched."""
