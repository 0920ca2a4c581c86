"""The text of each token: joined it is the text of all, for real tokenizers and any tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.observe.kept import Pieces

Decode = Callable[[Sequence[int]], str]


def byte_level(ids: Sequence[int]) -> str:
    """A token a byte, as byte-level BPE has for what it knows no word for."""
    return bytes(ids).decode("utf-8", "replace")


def sentence_pieces(ids: Sequence[int]) -> str:
    """Words, of which the first has lost its space."""
    return "".join(f" w{one}" for one in ids).removeprefix(" ")


def awkward(ids: Sequence[int]) -> str:
    """Nothing adds up."""
    return f"{len(ids)}:{sum(ids)}"


@given(st.lists(st.integers(0, 255), max_size=60))
@pytest.mark.parametrize("decode", [byte_level, sentence_pieces, awkward])
def test_joined_they_are_the_whole(decode: Decode, ids: list[int]) -> None:
    pieces = Pieces(decode)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == (decode(ids) if ids else "")


@given(st.text(max_size=40))
def test_a_character_is_in_the_last_of_its_tokens(text: str) -> None:
    ids = list(text.encode("utf-8", "replace"))
    whole = bytes(ids).decode()
    expected = [part for char in whole for part in [*[""] * (len(char.encode()) - 1), char]]
    if "\ufffd" not in whole:
        assert list(Pieces(byte_level)(ids)) == expected


def test_words_of_a_tokenizer_that_drops_the_first_space() -> None:
    assert Pieces(sentence_pieces)([1, 2, 3]) == ("w1", " w2", " w3")


def test_what_is_no_text_has_its_pieces_too() -> None:
    """A policy that babbles bytes: thousands of them, each shown near where it stands."""
    ids = [0xF0] * 3000 + list("€".encode())
    pieces = Pieces(byte_level)(ids)
    assert "".join(pieces) == byte_level(ids)
    assert max(map(len, pieces)) <= 20
    assert pieces[-1].endswith("€")
