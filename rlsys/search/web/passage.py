"""The passage of a page that fits a query best."""

from __future__ import annotations

import bm25s
import numpy as np


def best_passage(text: str, query: str, words: int) -> str | None:
    """The passage of `text` with the highest BM25 score for `query`; None where no word of it occurs.

    Passages are whole paragraphs (lines), as many as fit into `words` words; a longer paragraph is cut. The
    statistics of BM25 are those of the page alone. Words are found by blanks, so a text in a script without
    them has one passage a paragraph and seldom a match.
    """
    found = passages(text, words)
    terms = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)[0]
    if not found or not terms:
        return None
    ranking = bm25s.BM25()
    ranking.index(bm25s.tokenize(found, stopwords="en", show_progress=False), show_progress=False)
    scores = ranking.get_scores(list(terms))
    best = int(np.argmax(scores))
    return found[best] if scores[best] > 0 else None


def passages(text: str, words: int) -> list[str]:
    """`text` in order, in passages of at most `words` words that end where paragraphs do, where possible."""
    found: list[str] = []
    lines: list[str] = []
    used = 0
    for paragraph in text.splitlines():
        tokens = paragraph.split()
        for start in range(0, len(tokens), words):
            part = tokens[start : start + words]
            if used + len(part) > words:
                found.append("\n".join(lines))
                lines, used = [], 0
            lines.append(" ".join(part))
            used += len(part)
    return [*found, "\n".join(lines)] if lines else found
