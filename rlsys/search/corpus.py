"""A corpus: one passage a line, read in place.

Contract: a UTF-8 jsonl file; each line is an object with an `id` (string or integer) and a string
`contents`, any other field is handed on; row r of an index is line r + 1. The file is memory-mapped, so
a corpus larger than memory opens with one sequential read, which finds the lines and the checksum.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rlsys.errors import UserError

_SCAN_BYTES = 1 << 24
_NEWLINE = ord("\n")


class Corpus:
    """An open corpus of `len(corpus)` passages; safe to read from several threads."""

    def __init__(self, path: Path, data: mmap.mmap, starts: NDArray[np.int64], checksum: str) -> None:
        self.path = path
        self.checksum = checksum
        """SHA-256 of the whole file, in hex."""
        self._data = data
        self._starts = starts

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Map `path` and find its lines; rows are parsed, and refused, only when they are fetched.

        Raises UserError for a file that is missing or empty.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"corpus {path} is not a file: give a jsonl file of passages")
        if path.stat().st_size == 0:
            raise UserError(f"corpus {path} is empty: it needs one passage a line")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        starts, checksum = _scan(data)
        return cls(path, data, starts, checksum)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The passages of `rows`, in that order. Raises UserError with the line number of a bad row."""
        return [self._parse(int(row)) for row in rows]

    def chunks(self, rows: int) -> Iterator[list[dict[str, Any]]]:
        """All passages in file order, `rows` at a time."""
        for first in range(0, len(self), rows):
            yield self.fetch(range(first, min(first + rows, len(self))))

    def _parse(self, row: int) -> dict[str, Any]:
        where = f"corpus {self.path} line {row + 1}"
        try:
            passage = orjson.loads(self._data[self._starts[row] : self._starts[row + 1]])
        except orjson.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON ({error}): write one passage a line") from None
        if not isinstance(passage, dict):
            raise UserError(f"{where} is not an object: write {{'id': ..., 'contents': ...}}")
        if not isinstance(passage.get("contents"), str):
            raise UserError(f"{where} has no text in `contents`: it must be a string")
        if not isinstance(passage.get("id"), str | int):
            raise UserError(f"{where} has no `id`: it must be a string or an integer")
        return passage


def _scan(data: mmap.mmap) -> tuple[NDArray[np.int64], str]:
    """Where each line starts, with the end of the last one appended ([rows + 1]), and the checksum."""
    digest = hashlib.sha256()
    ends: list[NDArray[np.int64]] = []
    for offset in range(0, len(data), _SCAN_BYTES):
        block = data[offset : offset + _SCAN_BYTES]
        digest.update(block)
        newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE)
        ends.append(newlines.astype(np.int64) + offset + 1)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
    if starts[-1] != len(data):
        starts = np.append(starts, len(data))
    return starts, digest.hexdigest()
