"""A corpus: one passage a line, read in place.

Contract: a jsonl file (`rlsys.search.jsonl`); each line is an object with an `id` (string or integer) and a
string `contents`, any other field is handed on; row r of an index is line r + 1. A corpus larger than memory
opens in no time but for the first, and gives passages in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.jsonl import JsonLines, OnBytes


class Corpus:
    """An open corpus of `len(corpus)` passages; safe to read from several threads."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    @classmethod
    def open(cls, path: str | Path, progress: OnBytes | None = None) -> Corpus:
        """Map `path` and find its lines; rows are parsed, and refused, only when they are fetched.

        A file that was not open before is read through once, while `progress` is called with (bytes read,
        bytes in all). Raises UserError for a file that is missing, empty, compressed or of another format.
        """
        return cls(JsonLines.open(Path(path), "corpus", progress))

    @property
    def path(self) -> Path:
        """The file, as it was given."""
        return self._lines.path

    @property
    def checksum(self) -> str:
        """SHA-256 of the whole file, in hex, from when it was last read through; see `verify`."""
        return self._lines.checksum

    def __len__(self) -> int:
        return len(self._lines)

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The passages of `rows`, in that order, read together: ask for all that are needed in one call.

        Each is a dict of its own, which the caller may change; what is nested in a row that was asked for
        twice is shared between its two dicts.

        Raises UserError with the line number of a bad row, IndexError for a row that is not there, RunError
        if the file shrank while it was open.
        """
        passages = self._lines.fetch(rows)
        for row, passage in zip(rows, passages, strict=True):
            if not isinstance(passage.get("contents"), str):
                raise UserError(f"{self._lines.where(row)} has no text in `contents`: it must be a string")
            if not isinstance(passage.get("id"), str | int):
                raise UserError(f"{self._lines.where(row)} has no `id`: it must be a string or an integer")
        return passages

    def chunks(self, rows: int) -> Iterator[list[dict[str, Any]]]:
        """All passages in file order, `rows` at a time."""
        for first in range(0, len(self), rows):
            yield self.fetch(range(first, min(first + rows, len(self))))

    def verify(self) -> None:
        """Read all of the file, a second a GB. Raises UserError if it is not the one that `checksum` belongs
        to.

        `open` knows a file by its size, time and some blocks; this is for those who need to be certain.
        """
        self._lines.verify()
