"""Which tokens two ways of cutting one text have in common, in the time of the text's length. Pure.

Of drawn tokens only ids are kept, so this goes by ids: what both begin and end with is matched, then what occurs once in
either ("patience diff"), and again between two such places. Short pieces that are left are matched by their longest
common runs; that takes the cube of their length, so long ones without a place of their own are left unmatched: the
middle of an endless repetition, cut otherwise at both ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

SHORT = 64
"""Tokens of either side that are matched by their longest common runs."""
ROUNDS = 8
"""Of looking for tokens that occur once; each takes the length of the text."""

Pair = tuple[int, int]
"""Index into the one and into the other."""


def matched_pairs(first: Sequence[int], second: Sequence[int]) -> Iterator[Pair]:
    """Pairs of equal tokens, in no order; sorted by either index they are so by the other, and no index comes twice."""
    waiting = [(0, len(first), 0, len(second), ROUNDS)]
    while waiting:
        a, a_end, b, b_end, rounds = waiting.pop()
        while a < a_end and b < b_end and first[a] == second[b]:
            yield a, b
            a, b = a + 1, b + 1
        while a < a_end and b < b_end and first[a_end - 1] == second[b_end - 1]:
            a_end, b_end = a_end - 1, b_end - 1
            yield a_end, b_end
        if a == a_end or b == b_end:
            continue
        if max(a_end - a, b_end - b) <= SHORT:
            matcher = SequenceMatcher(None, first[a:a_end], second[b:b_end], autojunk=False)
            for block in matcher.get_matching_blocks():
                yield from ((a + block.a + at, b + block.b + at) for at in range(block.size))
            continue
        anchors = [(a + i, b + j) for i, j in _anchors(first[a:a_end], second[b:b_end])] if rounds else []
        if anchors:
            yield from anchors
            edges = [(a - 1, b - 1), *anchors, (a_end, b_end)]
            waiting += [(i + 1, k, j + 1, m, rounds - 1) for (i, j), (k, m) in pairwise(edges)]


def _anchors(first: Sequence[int], second: Sequence[int]) -> list[Pair]:
    """The longest rising chain of the tokens that occur once in either."""
    places = _once(second)
    pairs = [(at, places[token]) for token, at in _once(first).items() if token in places]
    lowest: list[int] = []  # Of chains of 1, 2, ... pairs, the least last place in `second`.
    ends: list[int] = []  # The pair it is of.
    before: list[int] = []  # Of each pair, the one before it in its chain.
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(lowest, place)
        before.append(ends[length - 1] if length else -1)
        lowest[length : length + 1] = [place]
        ends[length : length + 1] = [number]
    chain, at = [], ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _once(tokens: Sequence[int]) -> dict[int, int]:
    """Tokens that occur once -> where, in order."""
    counts = Counter(tokens)
    return {token: at for at, token in enumerate(tokens) if counts[token] == 1}
