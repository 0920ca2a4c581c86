"""Where texts are cut: properties over random texts, and cuts worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.search.ingest import CutQuality, chunk_text, cut, find_cuts, find_words

LETTERS = st.text(st.sampled_from("abC.,!?)\"'1-éß中。かダ#"), min_size=1, max_size=6)
GAPS = st.sampled_from([" ", " ", "\n", "\n\n", " \n \n", "\t", "\u00a0"])
TEXTS = st.lists(st.tuples(LETTERS, GAPS), max_size=60).map(lambda parts: "".join(a + b for a, b in parts))


def sizes(data: st.DataObject) -> tuple[int, int]:
    size = data.draw(st.integers(1, 12))
    return size, data.draw(st.integers(0, size - 1))


@given(TEXTS, st.data())
def test_chunks_are_slices_of_bounded_size_and_words_are_all_of_the_text(text: str, data: st.DataObject) -> None:
    size, overlap = sizes(data)
    assert "".join(text[word.start : word.end] for word in find_words(text)) == "".join(text.split())
    position = 0
    for chunk in chunk_text(text, size=size, overlap=overlap):
        assert chunk == chunk.strip() != ""
        assert 1 <= len(find_words(chunk)) <= size
        position = text.index(chunk, position)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(CutQuality)), max_size=40), st.data())
def test_costs_and_overlaps_are_bounded(places: list[tuple[int, CutQuality]], data: st.DataObject) -> None:
    size, overlap = sizes(data)
    costs, cuts = [cost for cost, _ in places], [place for _, place in places]
    chunks = cut(costs, cuts, size=size, overlap=overlap)
    assert [word for chunk in chunks for word in range(chunk.fresh, chunk.end)] == list(range(len(costs)))
    for chunk in chunks:
        assert sum(costs[chunk.first : chunk.end]) <= size or chunk.end - chunk.first == 1
        assert sum(costs[chunk.first : chunk.fresh]) <= overlap
    assert all(earlier.first < later.first for earlier, later in pairwise(chunks))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 8))
def test_a_sentence_that_fits_is_never_cut(lengths: list[int], overlap: int) -> None:
    sentences = [" ".join(["Word"] * length) + "." for length in lengths]
    for chunk in chunk_text(" ".join(sentences), size=9, overlap=overlap):
        assert chunk.endswith(".")


def test_paragraphs_before_sentences_before_words() -> None:
    text = "One two three. Four five six.\n\nSeven eight. Nine ten eleven twelve thirteen fourteen fifteen."
    last = "Nine ten eleven twelve thirteen fourteen fifteen."
    assert chunk_text(text, size=8) == ["One two three. Four five six.", "Seven eight.", last]
    pieces = [
        "One two three.",
        "Four five six.",
        "Seven eight.",
        "Nine ten eleven twelve",
        "thirteen fourteen fifteen.",
    ]
    assert chunk_text(text, size=4) == pieces


def test_overlap_starts_at_a_sentence_where_one_is_in_reach() -> None:
    text = "A b c d. E f. G h i j. K l."
    assert chunk_text(text, size=6, overlap=3) == ["A b c d. E f.", "E f. G h i j.", "h i j. K l."]
    assert chunk_text("a b c d e f g h i", size=4, overlap=2) == ["a b c d", "c d e f", "e f g h", "g h i"]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("He met Dr. Who there.", 0),
        ("In the U.S. Army now.", 0),
        ("It went ... on and on.", 0),
        ('He said "Go." Then left.', 1),
        ("Really?! Yes it is.", 1),
        ("Ends here… Then on.", 1),
    ],
)
def test_points_that_end_a_sentence_within_a_text(text: str, sentences: int) -> None:
    assert find_cuts(text, find_words(text))[:-1].count(CutQuality.SENTENCE) == sentences


def test_lists_are_cut_between_items_and_chinese_and_japanese_between_characters() -> None:
    assert chunk_text("- one two\n- three four\n- five six", size=7) == ["- one two\n- three four", "- five six"]
    assert chunk_text("我住在北京。你住在東京。", size=5) == ["我住在北京。", "你住在東京。"]
    assert [len(find_words(text)) for text in ("北京 Beijing", "カタカナ", "한국어 단어")] == [3, 4, 2]


def test_code_stays_whole_where_it_fits_and_is_cut_at_lines_where_not() -> None:
    code = "a = 1\n\nb = 2"
    text = f"Some words. More of them.\n\n{code}\n\nAnd then."
    begin = text.index(code)
    chunks = chunk_text(text, size=9, code=[(begin, begin + len(code))])
    assert chunks == ["Some words. More of them.", f"{code}\n\nAnd then."]
    assert chunk_text(code, size=4, code=[(0, len(code))]) == ["a = 1", "b = 2"]
    assert chunk_text("a.b C. D\ne", size=3, code=[(0, 10)]) == ["a.b C. D", "e"], "no sentences in code"
