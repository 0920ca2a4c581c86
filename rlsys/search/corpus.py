"""Large jsonl files that are read in place: a corpus, one passage a line.

Contract: UTF-8, one JSON object a line; row r is line r + 1. Blank lines at the end are no rows; a blank line elsewhere
is a row, which is refused, because row numbers are line numbers. To replace a file that is open somewhere, rename
another one over it: those who have it open then keep the old one. What they see of one that is written over is not
defined; that it shrank is noticed. A line of a corpus has an `id` (string or integer) and a string `contents`, any
other field is handed on.

The file is memory-mapped. Rows are read together: the system is first told all the pages that a fetch needs, and only
then are they touched. Disk reads so overlap, and read no more than was asked for, where touching a page of a map that
is not in memory waits for that page and for a stretch of the file around it that nobody wants.

Where the rows lie is kept in a sidecar, so that only the first open reads the whole file: a header and arrays, in
`corpus.jsonl.offsets` next to `corpus.jsonl`, else in `$XDG_CACHE_HOME/rlsys` or `~/.cache/rlsys`, else in memory, with
a warning. Invariants: it is used only for the file that it was made of, as far as size, time and a sample can tell
(those who need certainty hash the file), and only whole, which a checksum tells in a tenth of a second for 21 million
rows; else it is made again. Under its name there is never half a sidecar: it is written under another name and renamed,
and of processes that make the same one at once the last rename stays.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError

OnBytes = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""
HEADER_BYTES = 4096
"""Where a sidecar's arrays begin; whole pages, so that they lie aligned in memory."""
_VERSION = 1
"""Of sidecars; to be raised when one would hold something else for the same file."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_BLOCK_BYTES = 1 << 20
_SCAN_BYTES = 1 << 22
_NEWLINE = ord("\n")
_OFFSET = np.dtype("<i8")
_FOREIGN = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it first with `gzip -dk`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it first with `zstd -dk`"),
    b"BZh": ("compressed by bzip2", "decompress it first with `bzip2 -dk`"),
    b"\xfd7zXZ": ("compressed by xz", "decompress it first with `xz -dk`"),
    b"PK\x03\x04": ("a zip archive", "unpack it first with `unzip`"),
    b"PAR1": ("a parquet file", "write it as jsonl first, with `datasets.Dataset.from_parquet(...).to_json(...)`"),
    b"ARROW1": ("an Arrow file", "write it as jsonl first, with `datasets.Dataset.from_file(...).to_json(...)`"),
}
"""First bytes of files that people give for jsonl: their kind, and what to do."""
logger = logging.getLogger(__name__)


class JsonLines:
    """An open jsonl file of `len(lines)` rows; safe to read from several threads."""

    what: ClassVar[str] = "jsonl file"
    """Word for the file in errors."""

    def __init__(self, path: Path, data: mmap.mmap, sidecar: Sidecar) -> None:
        self.path = path
        """The file, as it was given."""
        self.checksum: str = sidecar.facts["sha256"]
        """SHA-256 of the whole file, in hex, from when it was last read through; see `verify`."""
        self._data = data
        self._sidecar = sidecar
        self._offsets = np.frombuffer(sidecar.data, dtype=_OFFSET, count=sidecar.facts["rows"] + 1, offset=HEADER_BYTES)

    @classmethod
    def open(cls, path: str | Path, progress: OnBytes | None = None) -> Self:
        """Map `path` and find its rows; they are parsed, and refused, only when they are fetched.

        A file that was not open before is read through once, while `progress` is called with (bytes read, bytes in
        all). Raises UserError for a file that is missing, empty, compressed or of another format.
        """
        with cls.open_file(Path(path)) as file:
            return cls.read(file, Path(path), progress)

    @classmethod
    def open_file(cls, path: Path) -> FileIO:
        """The file at `path`, unbuffered. Raises UserError if it cannot be read."""
        if not path.is_file():
            raise UserError(f"{cls.what} {path} is not a file: give a jsonl file")
        try:
            return path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"{cls.what} {path} cannot be read ({error.strerror}): check its permissions") from None

    @classmethod
    def read(cls, file: BinaryIO, path: Path, progress: OnBytes | None = None) -> Self:
        """As `open`, of a file that was opened from `path` and may be closed afterwards."""
        name, head = f"{cls.what} {path}", os.pread(file.fileno(), 8, 0)
        for magic, (kind, remedy) in _FOREIGN.items():
            if head.startswith(magic):
                raise UserError(f"{name} is {kind}, and only jsonl can be read in place: {remedy}")
        size = os.fstat(file.fileno()).st_size
        sidecar = open_sidecar(
            file, path, "offsets", lambda source, write: _write_offsets(source, write, name, size, progress)
        )
        return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), sidecar)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def where(self, row: int) -> str:
        """The words for a row in errors."""
        return f"{self.what} {self.path} line {row + 1}"

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The objects of `rows`, in that order, read together: ask for all that are needed in one call.

        Each is a dict of its own, which the caller may change; what is nested in a row that was asked for twice is
        shared between its two dicts.

        Raises UserError with the line number of a bad row, IndexError for a row that is not there, RunError if the file
        shrank while it was open.
        """
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        if not wanted.size:
            return []
        if wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"{self.what} {self.path} has {len(self)} rows, asked for {wanted[[0, -1]]}")
        places = HEADER_BYTES + wanted * _OFFSET.itemsize
        _prefetch(self._sidecar.data, places, places + 2 * _OFFSET.itemsize)
        starts, ends = self._offsets[wanted], self._offsets[wanted + 1]
        if self._data.size() < ends[-1]:
            raise RunError(f"{self.what} {self.path} was truncated while it was open: restore it and start again")
        _prefetch(self._data, starts, ends)
        bounds = zip(wanted.tolist(), starts.tolist(), ends.tolist(), strict=True)
        parsed = {row: self._parse(row, start, end) for row, start, end in bounds}
        return [dict(parsed[int(row)]) for row in rows]

    def chunks(self, rows: int) -> Iterator[list[dict[str, Any]]]:
        """All objects in file order, `rows` at a time."""
        for first in range(0, len(self), rows):
            yield self.fetch(range(first, min(first + rows, len(self))))

    def verify(self) -> None:
        """Read all of the file, a second a GB. Raises UserError if it is not the one that `checksum` belongs to.

        `open` knows a file by its size, time and some blocks; this is for those who need to be certain.
        """
        with self.open_file(self.path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.checksum:
            kept = self._sidecar.path
            remedy = "open it again" if kept is None else f"delete {kept}"
            raise UserError(
                f"{self.what} {self.path} has SHA-256 {found}, not {self.checksum} as when it was last "
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


class Corpus(JsonLines):
    """An open corpus of `len(corpus)` passages; safe to read from several threads."""

    what = "corpus"

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The passages of `rows`: see `JsonLines.fetch`."""
        passages = super().fetch(rows)
        for row, passage in zip(rows, passages, strict=True):
            if not isinstance(passage.get("contents"), str):
                raise UserError(f"{self.where(row)} has no text in `contents`: it must be a string")
            if not isinstance(passage.get("id"), str | int):
                raise UserError(f"{self.where(row)} has no `id`: it must be a string or an integer")
        return passages


def _prefetch(data: mmap.mmap, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Start reading the pages of all [start, end), which ascend; waits for none of them."""
    firsts, lasts = starts // mmap.PAGESIZE, (ends - 1) // mmap.PAGESIZE
    apart = np.flatnonzero(firsts[1:] > lasts[:-1] + 1)
    runs = zip(firsts[np.r_[0, apart + 1]].tolist(), lasts[np.r_[apart, -1]].tolist(), strict=True)
    for first, last in runs:
        data.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, (last - first + 1) * mmap.PAGESIZE)


def _write_offsets(
    source: BinaryIO, write: OnArray, name: str, size: int, progress: OnBytes | None
) -> Mapping[str, Any]:
    """Write where each row starts, with the end of the last one appended ([rows + 1]).

    A line's end is written once text is seen behind it; those that wait at the end are of blank lines, but for the
    first, which ends the last row.
    """
    digest = hashlib.sha256()
    done, text_end, rows = 0, 0, 1
    waiting = np.empty(0, dtype=_OFFSET)
    write(np.zeros(1, dtype=_OFFSET))
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
            write(waiting[:settled])
            waiting, rows, done = waiting[settled:], rows + settled, done + len(block)
            if progress is not None:
                progress(done, size)
    if not text_end:
        raise UserError(f"{name} is empty: it needs one JSON object a line")
    write(waiting[:1] if waiting.size else np.array([done], dtype=_OFFSET))
    return {"rows": rows, "sha256": digest.hexdigest()}


class Sidecar(NamedTuple):
    """An open sidecar."""

    path: Path | None
    """None for one in memory."""
    facts: Mapping[str, Any]
    data: mmap.mmap
    """Header and arrays."""


OnArray = Callable[[NDArray[Any]], None]
"""Appends the elements of an array to a sidecar."""
Make = Callable[[BinaryIO, OnArray], Mapping[str, Any]]
"""Reads the file, writes arrays, returns facts: small JSON values. May raise UserError."""


def open_sidecar(source: BinaryIO, path: Path, suffix: str, make: Make) -> Sidecar:
    """The sidecar of the file `source`, opened from `path`; made, and kept where possible, if there is none.

    Raises UserError when the file changes while it is read.
    """
    stamp = _stamp(source)
    resolved = path.resolve()
    places = [resolved.with_name(f"{resolved.name}.{suffix}")]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if cache.is_absolute():
        name = f"{resolved.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(resolved))}.{suffix}"
        places.append(cache / "rlsys" / name)
    for place in places:
        if (sidecar := _load(place, stamp)) is not None:
            return sidecar
    for place in places:
        try:
            with _replacing(place, os.fstat(source.fileno()).st_mode & 0o666) as file:
                return _fill(file, source, path, stamp, make)._replace(path=place)
        except OSError as error:
            logger.debug("no sidecar at %s: %s", place, error)
    logger.warning(
        "%s is read through each time it is opened: what is found cannot be written to %s; make one of "
        "these folders writable",
        path,
        " or ".join(str(place.parent) for place in places),
    )
    with open(os.memfd_create(suffix), "w+b", buffering=0) as file:
        return _fill(file, source, path, stamp, make)


def _stamp(file: BinaryIO) -> dict[str, Any]:
    """Facts by which an open file is known again without reading all of it; its position stays.

    The sample is a hash of 16 blocks of 4 KiB from its beginning to its end; all of a file of up to 64 KiB.
    """
    status = os.fstat(file.fileno())
    last = max(0, status.st_size - _SAMPLE_BYTES)
    digest = xxhash.xxh3_64()
    for place in range(_SAMPLES):
        digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * place // (_SAMPLES - 1)))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sample": digest.hexdigest()}


def _load(place: Path, stamp: Mapping[str, Any]) -> Sidecar | None:
    """The sidecar at `place`; None if there is none, if it is damaged or if it is of another file or version."""
    try:
        with place.open("rb", buffering=0) as file:
            header = orjson.loads(file.read(HEADER_BYTES))
            if header["version"] != _VERSION or header["source"] != stamp:
                return None
            digest = xxhash.xxh3_64()
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            digest.update(orjson.dumps(header["facts"]))
            if digest.hexdigest() != header["xxh3"]:
                return None
            return Sidecar(place, header["facts"], mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _replacing(place: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file that takes the name `place` if all goes well, and leaves nothing behind if not."""
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with open(descriptor, "w+b", buffering=0) as file:
            yield file
            os.fchmod(descriptor, mode)
            os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _fill(file: BinaryIO, source: BinaryIO, path: Path, stamp: Mapping[str, Any], make: Make) -> Sidecar:
    """Write a sidecar to `file`, and map it."""
    digest = xxhash.xxh3_64()

    def write(array: NDArray[Any]) -> None:
        block = np.ascontiguousarray(array).view(np.uint8).data
        file.write(block)
        digest.update(block)

    file.seek(HEADER_BYTES)
    source.seek(0)
    facts = make(source, write)
    if _stamp(source) != stamp:
        raise UserError(f"{path} changed while it was read: open it again when it is complete")
    digest.update(orjson.dumps(facts))
    header = {"version": _VERSION, "source": stamp, "facts": facts, "xxh3": digest.hexdigest()}
    file.seek(0)
    file.write(orjson.dumps(header).ljust(HEADER_BYTES - 1) + b"\n")
    return Sidecar(None, facts, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
