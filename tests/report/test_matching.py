"""Tokens that two ways of cutting a text have in common."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlsys.report.drift import SHORT, matched_pairs

TOKENS = st.lists(st.integers(0, 5), max_size=30)


@given(TOKENS, TOKENS, st.integers(0, 3))
def test_pairs_are_of_equal_tokens_in_the_order_of_both(first: list[int], second: list[int], times: int) -> None:
    """Repeated, so that they are long too."""
    first, second = first * 4**times, second * 4**times
    pairs = sorted(matched_pairs(first, second))
    assert all(first[a] == second[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert len(list(matched_pairs(first, first))) == len(first)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans())
def test_long_texts_of_which_some_words_are_cut_otherwise(words: list[int], swapped: bool) -> None:
    """Token 0 is a word that the other side has in two tokens, -1 and -2; between them are others, each once."""
    known, drawn, trained = 1, list[int](), list[int]()
    for word in words * 8:
        same = list(range(known, known + word))
        known += word
        drawn += [*same, 0]
        trained += [*same, -1, -2]
    if swapped:
        drawn, trained = trained, drawn
    assert len(list(matched_pairs(drawn, trained))) == known - 1


def test_endless_repetition_takes_no_time() -> None:
    """Longest common runs of these would take hours."""
    first, second = [1, 2] * 2000, [1, 2, 3] * 1300
    assert len(list(matched_pairs(first, second))) < SHORT
    assert len(list(matched_pairs([*first, 9, 8], [*first, 7]))) == len(first)
    assert len(list(matched_pairs([9, 8, *first], [7, *first]))) == len(first)
