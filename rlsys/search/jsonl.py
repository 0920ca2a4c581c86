"""A jsonl file as an array of objects that is read in place.

Contract: UTF-8, one JSON object a line; row r is line r + 1. Blank lines at the end are no rows; a blank line
elsewhere is a row, which is refused, because row numbers are line numbers. The file is memory-mapped and
where its rows lie is kept in a sidecar (`rlsys.search.sidecar`), so that the first open reads the file once
and later ones do not, whatever its size. To replace a file that is open somewhere, rename another one over
it: those who have it open then keep the old one. What they see of one that is written over is not defined;
that it shrank is noticed.

Rows are read together: the system is first told all the pages that a fetch needs, and only then are they
touched. Disk reads so overlap, and read no more than was asked for, where touching a page of a map that is
not in memory waits for that page and for a stretch of the file around it that nobody wants.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError
from rlsys.search.sidecar import HEADER_BYTES, ArrayWriter, Recipe, Sidecar, open_sidecar

OnBytes = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""

_SCAN_BYTES = 1 << 22
_NEWLINE = ord("\n")
_OFFSET = np.dtype("<i8")
_FOREIGN = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it first with `gzip -dk`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it first with `zstd -dk`"),
    b"BZh": ("compressed by bzip2", "decompress it first with `bzip2 -dk`"),
    b"\xfd7zXZ": ("compressed by xz", "decompress it first with `xz -dk`"),
    b"PK\x03\x04": ("a zip archive", "unpack it first with `unzip`"),
    b"PAR1": (
        "a parquet file",
        "write it as jsonl first, with `datasets.Dataset.from_parquet(...).to_json(...)`",
    ),
    b"ARROW1": (
        "an Arrow file",
        "write it as jsonl first, with `datasets.Dataset.from_file(...).to_json(...)`",
    ),
}
"""First bytes of what people give for jsonl: what it is, and what to do."""


def opened(path: Path, what: str) -> FileIO:
    """The file at `path`, unbuffered. Raises UserError, which calls it `what`, if it cannot be read."""
    if not path.is_file():
        raise UserError(f"{what} {path} is not a file: give a jsonl file")
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read ({error.strerror}): check its permissions") from None


class JsonLines:
    """An open file of `len(lines)` rows; safe to read from several threads."""

    def __init__(self, path: Path, what: str, data: mmap.mmap, sidecar: Sidecar) -> None:
        self.path = path
        self.checksum: str = sidecar.facts["sha256"]
        """SHA-256 of the whole file, in hex, from when it was last read through; see `verify`."""
        self._what = what
        self._data = data
        self._sidecar = sidecar
        self._offsets = np.frombuffer(sidecar.data, dtype=_OFFSET, count=sidecar.facts["rows"] + 1, offset=HEADER_BYTES)

    @classmethod
    def open(cls, path: Path, what: str, progress: OnBytes | None = None) -> JsonLines:
        """Map `path` and find its rows; they are parsed, and refused, only when they are fetched.

        `what` is what errors call the file. `progress` is called while a file is read through that was not
        open before. Raises UserError for a file that is missing, empty or of another format.
        """
        with opened(path, what) as file:
            return cls.read(file, path, what, progress)

    @classmethod
    def read(cls, file: BinaryIO, path: Path, what: str, progress: OnBytes | None = None) -> JsonLines:
        """As `open`, of a file that was opened from `path` and may be closed afterwards."""
        _refuse_foreign(f"{what} {path}", os.pread(file.fileno(), 8, 0))
        size = os.fstat(file.fileno()).st_size

        def make(source: BinaryIO, out: ArrayWriter) -> Mapping[str, Any]:
            return _scan(source, out, f"{what} {path}", size, progress)

        sidecar = open_sidecar(file, path, Recipe("offsets", 1, make))
        return cls(path, what, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), sidecar)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def where(self, row: int) -> str:
        """What errors call a row."""
        return f"{self._what} {self.path} line {row + 1}"

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The objects of `rows`, in that order.

        Each is a dict of its own, which the caller may change; what is nested in a row that was asked for
        twice is shared between its two dicts.

        Raises UserError with the line number of a row that is no JSON object, IndexError for a row that is
        not there, RunError if the file shrank under us.
        """
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        if not wanted.size:
            return []
        if wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"{self._what} {self.path} has {len(self)} rows, asked for {wanted[[0, -1]]}")
        places = HEADER_BYTES + wanted * _OFFSET.itemsize
        _prefetch(self._sidecar.data, places, places + 2 * _OFFSET.itemsize)
        starts, ends = self._offsets[wanted], self._offsets[wanted + 1]
        if self._data.size() < ends[-1]:
            raise RunError(f"{self._what} {self.path} was truncated while it was open: restore it and start again")
        _prefetch(self._data, starts, ends)
        bounds = zip(wanted.tolist(), starts.tolist(), ends.tolist(), strict=True)
        parsed = {row: self._parse(row, start, end) for row, start, end in bounds}
        return [dict(parsed[int(row)]) for row in rows]

    def verify(self) -> None:
        """Read all of the file. Raises UserError if it is not the one that `checksum` belongs to."""
        with opened(self.path, self._what) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.checksum:
            kept = self._sidecar.path
            remedy = "open it again" if kept is None else f"delete {kept}"
            raise UserError(
                f"{self._what} {self.path} has SHA-256 {found}, not {self.checksum} as when it was last "
                f"read through: restore it, or {remedy} to take it as it is"
            )

    def _parse(self, row: int, start: int, end: int) -> dict[str, Any]:
        try:
            parsed = orjson.loads(self._data[start:end])
        except orjson.JSONDecodeError as error:
            raise UserError(f"{self.where(row)} is not JSON ({error}): write one JSON object a line") from None
        if not isinstance(parsed, dict):
            raise UserError(f"{self.where(row)} is not an object: write one JSON object a line")
        return parsed


def _prefetch(data: mmap.mmap, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Start reading the pages of all [start, end), which ascend; waits for none of them."""
    firsts, lasts = starts // mmap.PAGESIZE, (ends - 1) // mmap.PAGESIZE
    apart = np.flatnonzero(firsts[1:] > lasts[:-1] + 1)
    runs = zip(firsts[np.r_[0, apart + 1]].tolist(), lasts[np.r_[apart, -1]].tolist(), strict=True)
    for first, last in runs:
        data.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, (last - first + 1) * mmap.PAGESIZE)


def _refuse_foreign(name: str, head: bytes) -> None:
    for magic, (kind, remedy) in _FOREIGN.items():
        if head.startswith(magic):
            raise UserError(f"{name} is {kind}, and only jsonl can be read in place: {remedy}")


def _scan(source: BinaryIO, out: ArrayWriter, name: str, size: int, progress: OnBytes | None) -> Mapping[str, Any]:
    """Write where each row starts, with the end of the last one appended ([rows + 1]).

    A line's end is written once text is seen behind it; those that wait at the end are of blank lines, but
    for the first, which ends the last row.
    """
    digest = hashlib.sha256()
    done, text_end, rows = 0, 0, 1
    waiting = np.empty(0, dtype=_OFFSET)
    out.write(np.zeros(1, dtype=_OFFSET))
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(digest.update, b"")
        while block := source.read(min(_SCAN_BYTES, size - done)):
            hashing.result()
            hashing = pool.submit(digest.update, block)
            newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE)
            waiting = np.concatenate([waiting, newlines.astype(_OFFSET) + (done + 1)])
            if text := len(block.rstrip()):
                text_end = done + text
            settled = int(np.searchsorted(waiting, text_end))
            out.write(waiting[:settled])
            waiting, rows, done = waiting[settled:], rows + settled, done + len(block)
            if progress is not None:
                progress(done, size)
    if not text_end:
        raise UserError(f"{name} is empty: it needs one JSON object a line")
    out.write(waiting[:1] if waiting.size else np.array([done], dtype=_OFFSET))
    return {"rows": rows, "sha256": digest.hexdigest()}
