"""Pieces of text by kind, whatever parts the text comes in."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.chat.conversation import Kind, Segments

TAGS = {"think": Kind.thought, "search": Kind.search, "answer": Kind.answer}
BITS = st.sampled_from(
    ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<", ">", "</", "a", "b", "<b>", "<thin"]
)


def pieces(parts: list[str]) -> list[tuple[Kind, str]]:
    """The pieces of all `parts`, with neighbours of one kind as one piece."""
    segments = Segments(TAGS)
    found = [piece for part in parts for piece in segments.feed(part)]
    found += segments.end()
    assert all(text for _, text in found)
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(found, key=lambda piece: piece[0])]


def test_a_tag_counts_to_what_it_opens_and_closes() -> None:
    text = "so <think>hm < 3</think>\n<search> q </search>tail<answer>x"
    assert pieces([text]) == [
        (Kind.text, "so "),
        (Kind.thought, "<think>hm < 3</think>"),
        (Kind.text, "\n"),
        (Kind.search, "<search> q </search>"),
        (Kind.text, "tail"),
        (Kind.answer, "<answer>x"),
    ]


@settings(max_examples=50)
@given(st.lists(BITS, max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=8))
def test_the_pieces_do_not_depend_on_the_cuts_of_the_text(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(places)]
    assert pieces(parts) == pieces(list(text)) == pieces([text])
    assert "".join(piece for _, piece in pieces(parts)) == text


def test_only_an_end_that_may_become_a_tag_is_held_back() -> None:
    segments = Segments(TAGS)
    assert list(segments.feed("a <sea")) == [(Kind.text, "a ")]
    assert list(segments.feed("ring")) == [(Kind.text, "<searing")]
    assert list(segments.feed("</")) == []
    assert list(segments.end()) == [(Kind.text, "</")]
