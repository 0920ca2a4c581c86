"""Results of searches, made of texts."""

from __future__ import annotations

from rlsys.search.retrieval import Passage, SearchResult


def result_of(*contents: str, error: str = "") -> SearchResult:
    """Passages of these `contents`, or an error."""
    return SearchResult(tuple(Passage("", text, 0.0) for text in contents), error)
