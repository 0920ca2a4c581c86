"""The text of each token, so that all of them joined are the text of the whole.

Contract: `len(pieces) == len(ids)` and `"".join(pieces) == decode(ids)`, whatever the tokenizer does. A character of
several tokens is in the last of them. Tokens of a tokenizer whose text depends on what stands before (SentencePiece leaves
out the first space) are decoded after those; where even this does not add up, all of the text is the first token's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_BROKEN = "\ufffd"
"""What a tokenizer shows for bytes that are no character, or not yet."""
_MOST_PENDING = 16
"""Tokens that are looked at as one character. UTF-8 has four bytes at most: what is longer is none."""


class Pieces:
    """Cuts texts of one tokenizer into the pieces of their tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> tuple[str, ...]:
        """[len(ids)] pieces."""
        if not ids:
            return ()
        whole = self._decode(ids)
        for cut in (self._each_alone, self._each_after_another):
            pieces = tuple(cut(ids))
            if "".join(pieces) == whole:
                return pieces
        return (whole, *("" for _ in ids[1:]))

    def _each_alone(self, ids: Sequence[int]) -> Iterator[str]:
        """Each token by itself, but runs of such as are parts of characters together."""
        run: list[int] = []
        for token in ids:
            if _BROKEN in (text := self._text(token)):
                run.append(token)
                continue
            yield from self._characters(run)
            run = []
            yield text
        yield from self._characters(run)

    def _characters(self, run: Sequence[int]) -> Iterator[str]:
        """Cut where no character is split, a long run of what is none too."""
        start = 0
        for end in range(1, len(run) + 1):
            text = self._decode(run[start:end])
            waits = text.endswith(_BROKEN) and end < len(run)
            if waits and (end - start < _MOST_PENDING or not self._decode(run[start : end + 1]).startswith(text)):
                yield ""
            else:
                yield text
                start = end

    def _each_after_another(self, ids: Sequence[int]) -> Iterator[str]:
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[before:end])
            if end < len(ids) and text.endswith(_BROKEN) and end - start < _MOST_PENDING:
                yield ""
                continue
            yield text[len(self._decode(ids[before:start])) :]
            before, start = start, end

    def _text(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._decode([token])
        return self._alone[token]
