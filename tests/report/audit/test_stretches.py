"""Stretches of one text that is cut in two ways, against cuts drawn at random."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.report.token_audit import CutPlace, Stretch, place_of, spans_of, stretches

LENGTH = 12
CUTS = st.sets(st.integers(1, LENGTH - 1))


def spans(cuts: set[int], start: int = 0, end: int = LENGTH) -> list[tuple[int, int]]:
    return list(pairwise([start, *sorted(cut for cut in cuts if start < cut < end), end]))


@given(CUTS, CUTS, st.integers(0, LENGTH - 1), st.integers(1, LENGTH), st.booleans())
@settings(max_examples=50)
def test_stretches_end_where_both_ways_have_a_cut(
    ours: set[int], theirs: set[int], start: int, length: int, beyond: bool
) -> None:
    """Of a turn within a longer text, the second way going across its edges where it has no cut there."""
    end = min(LENGTH, start + length)
    again = [one for one in spans(theirs) if one[1] > start and one[0] < end]
    drawn = spans(ours, start, LENGTH if beyond else end)
    drawn = [one for one in drawn if one[0] < end]
    found = stretches(drawn, again, (start, end))
    edges = {0, LENGTH, *theirs}
    wanted = sorted({start, end} | {cut for cut in ours & theirs if start < cut < end})
    assert [one.span for one in found] == list(pairwise(wanted))
    assert [one.drawn for one in found] == ranges(drawn, wanted)
    assert [one.again for one in found] == ranges(again, wanted)
    for one in found:
        left, right = one.span
        inside = all(at in edges for at in one.span) and (right < end or drawn[-1][1] == end)
        assert one.whole == inside
        known = {start, *ours} | ({end} if drawn[-1][1] == end else set())
        assert set(one.disputed) == {at for at in range(left, right + 1) if (at in known) != (at in edges)}


def ranges(tokens: list[tuple[int, int]], wanted: list[int]) -> list[tuple[int, int]]:
    """Indices of the tokens that begin in each part; one that begins before the first belongs to it."""
    counts = [0, *(sum(one[0] < at for one in tokens) for at in wanted[1:])]
    return list(pairwise(counts))


def test_there_is_no_cut_within_a_character() -> None:
    """Its tokens have one span, as a tokenizer gives them, or an empty piece, as their texts do."""
    assert spans_of(["a", "", "é", "b", ""], 3) == [(3, 4), (4, 5), (4, 5), (5, 6), (6, 6)]
    found = stretches([(0, 1), (1, 2), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)], (0, 3))
    assert [one.drawn for one in found] == [(0, 1), (1, 3), (3, 4)]
    assert [one.again for one in found] == [(0, 1), (1, 2), (2, 3)]


def test_there_is_no_cut_where_white_space_is_of_both_neighbours() -> None:
    found = stretches([(0, 2), (2, 5)], [(0, 3), (2, 5)], (0, 5))
    assert [(one.drawn, one.again) for one in found] == [((0, 2), (0, 2))]


@pytest.mark.parametrize(
    ("text", "cut", "place"),
    [
        ("say <search>x", 4, CutPlace.TAG),
        ("say <search>x", 12, CutPlace.TAG),
        ("say <search>x", 2, CutPlace.OTHER),
        ("say <search>x", 3, CutPlace.SPACE),
        ("a < b > c d e", 5, CutPlace.SPACE),
        ("in 1066 and", 5, CutPlace.DIGIT),
        ("née", 1, CutPlace.UNICODE),
        ("é 1", 2, CutPlace.DIGIT),
        ("a\n\nb", 2, CutPlace.SPACE),
    ],
)
def test_a_place_is_what_stands_beside_the_cut(text: str, cut: int, place: CutPlace) -> None:
    assert place_of(text, Stretch((0, len(text)), (0, 1), (0, 2), True, (cut,))) is place


def test_without_a_cut_the_place_is_what_the_tokens_say() -> None:
    assert place_of("a\ufffd", Stretch((1, 2), (0, 1), (0, 3), True, ())) is CutPlace.BROKEN
    assert place_of("é", Stretch((0, 1), (0, 1), (0, 2), True, ())) is CutPlace.UNICODE


def test_a_turn_without_text_has_no_stretch() -> None:
    assert stretches([], [(0, 3)], (2, 2)) == []
