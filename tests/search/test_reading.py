"""Tests of reading pages: windows cover a page without gaps, and every place of a text is found."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlsys.search.reading import find, window, words

TEXT = st.lists(st.sampled_from(["a", "B", "ab.", "(c)", "日本", "x" * 9, "ß"]), max_size=300).map(" ".join)


@given(TEXT, st.integers(12, 60))
def test_windows_one_after_the_other_are_the_whole_page(page: str, most: int) -> None:
    start, total, read = 0, len(page.split()), []
    while start < total:
        above, _, text = window(page, words, "words", start=start, most=most).partition("\n")
        found = re.fullmatch(r"words (\d+) to (\d+) of (\d+):", above)
        assert found is not None
        begin, end, of = map(int, found.groups())
        assert (begin, of) == (start, total)
        assert start < end <= start + most
        assert text.split() == page.split()[begin:end]
        assert len(words(f"{above}\n{text}")) <= most
        read += text.split()
        start = end
    assert read == page.split()
    with pytest.raises(ValueError, match=str(total)):
        window(page, words, "words", start=max(total, 1), most=most)


@given(TEXT, st.sampled_from(["a", "ab", "(C)", "a  b", "a\nB", "日本", "no"]), st.integers(0, 50))
@example("c a b A B", "a  b", 1)  # The text ends in another word than it begins in.
def test_every_place_of_a_text_is_found_once(page: str, text: str, start: int) -> None:
    units = words(page)
    after = units[start][0] if start < len(units) else len(page)
    flat = re.sub(r"\s+", " ", text).lower()
    lowered = page.lower()  # As long as the page: no character of TEXT changes its length.
    places, at = [], lowered.find(flat, after)
    while at >= 0:
        places.append(sum(begin <= at for begin, _ in units) - 1)
        at = lowered.find(flat, at + len(flat))
    found = find(page, words, "words", text=text, start=start, most=10**6)
    assert [int(place) for place in re.findall(r"^words (\d+): \.\.\. ", found, re.MULTILINE)] == places


def test_places_that_do_not_fit_are_counted_and_can_be_asked_for() -> None:
    page = " ".join(f"w{row}" if row % 50 else "needle" for row in range(1000))
    seen, start = [], 0
    while True:
        found = find(page, words, "words", text="NEEDLE", start=start, most=60)
        seen += [int(place) for place in re.findall(r"^words (\d+): ", found, re.MULTILINE)]
        more = re.search(r"(\d+) more from words (\d+) on\.$", found)
        if more is None:
            break
        assert int(more[1]) + len(seen) == 20
        start = int(more[2])
    assert seen == list(range(0, 1000, 50))
    assert find(page, words, "words", text="none", start=0, most=60) == ""
