"""Builds, opens and searches indexes: dense, BM25, hybrid and remote."""
