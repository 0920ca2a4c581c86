"""What was found out about a large file, kept beside it, so that it is found out once.

A sidecar is a file of a header and arrays: `corpus.jsonl.offsets` next to `corpus.jsonl`. Where that folder
cannot be written it is kept in `$XDG_CACHE_HOME/rlsys` or `~/.cache/rlsys`; where that fails too it lives in
memory, and a warning says so.

Invariants:
- A sidecar is used only for the file that it was made of, as far as `Stamp` can tell, and by the version of
  the code that made it; else it is made again. A change that keeps size and modification time and misses
  every sampled block is not seen: those who need certainty hash the file.
- A sidecar is used only whole: arrays and facts are checked against a checksum when it is opened (a tenth of
  a second for 21 million rows), so one that was truncated or damaged is made again.
- Under its name there is never half a sidecar: it is written under another name and renamed. Processes that
  make the same one at once each write their own; the last rename stays.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from rlsys.errors import UserError

HEADER_BYTES = 4096
"""Where the arrays begin; whole pages, so that they lie aligned in memory."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_BLOCK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """By what a file is known again without reading all of it."""

    size: int
    mtime_ns: int
    sample: str
    """Hash of 16 blocks of 4 KiB from its beginning to its end, in hex; all of a file of up to 64 KiB."""

    @classmethod
    def of(cls, file: BinaryIO) -> Stamp:
        """The stamp of an open file, whose position stays."""
        status = os.fstat(file.fileno())
        last = max(0, status.st_size - _SAMPLE_BYTES)
        digest = xxhash.xxh3_64()
        for place in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * place // (_SAMPLES - 1)))
        return cls(status.st_size, status.st_mtime_ns, digest.hexdigest())


class ArrayWriter:
    """Takes the arrays of a sidecar one after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = xxhash.xxh3_64()

    def write(self, array: NDArray[Any]) -> None:
        """Append the elements of `array`."""
        block = np.ascontiguousarray(array).view(np.uint8).data
        self._file.write(block)
        self.digest.update(block)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one kind of sidecar is made."""

    suffix: str
    version: int
    """To be raised when `make` would write something else for the same file."""
    make: Callable[[BinaryIO, ArrayWriter], Mapping[str, Any]]
    """Reads the file, writes arrays, returns facts: small JSON values. May raise UserError."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """An open sidecar."""

    path: Path | None
    """None for one in memory."""
    facts: Mapping[str, Any]
    data: mmap.mmap
    """Header and arrays."""


def open_sidecar(source: BinaryIO, path: Path, recipe: Recipe) -> Sidecar:
    """The sidecar of the file `source`, opened from `path`; made, and kept where possible, if there is none.

    Raises UserError when the file changes while it is read.
    """
    stamp = Stamp.of(source)
    places = _places(path, recipe.suffix)
    for place in places:
        if (found := _load(place, stamp, recipe)) is not None:
            return found
    for place in places:
        try:
            with _replacing(place, os.fstat(source.fileno()).st_mode & 0o666) as file:
                return Sidecar(place, *_fill(file, source, path, stamp, recipe))
        except OSError as error:
            logger.debug("no sidecar at %s: %s", place, error)
    logger.warning(
        "%s is read through each time it is opened: what is found cannot be written to %s; make one of "
        "these folders writable",
        path,
        " or ".join(str(place.parent) for place in places),
    )
    with open(os.memfd_create(recipe.suffix), "w+b", buffering=0) as file:
        return Sidecar(None, *_fill(file, source, path, stamp, recipe))


def _places(path: Path, suffix: str) -> list[Path]:
    """Where the sidecar may lie, best first."""
    resolved = path.resolve()
    beside = resolved.with_name(f"{resolved.name}.{suffix}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = f"{resolved.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(resolved))}.{suffix}"
    return [beside, cache / "rlsys" / name] if cache.is_absolute() else [beside]


def _load(place: Path, stamp: Stamp, recipe: Recipe) -> Sidecar | None:
    """The sidecar at `place`; None if there is none, if it is damaged or if it is of another file or
    version."""
    try:
        with place.open("rb", buffering=0) as file:
            header = orjson.loads(file.read(HEADER_BYTES))
            if header["version"] != recipe.version or header["source"] != asdict(stamp):
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


def _fill(
    file: BinaryIO, source: BinaryIO, path: Path, stamp: Stamp, recipe: Recipe
) -> tuple[Mapping[str, Any], mmap.mmap]:
    """Write a sidecar to `file`; its facts and itself, mapped."""
    file.seek(HEADER_BYTES)
    writer = ArrayWriter(file)
    source.seek(0)
    facts = recipe.make(source, writer)
    if Stamp.of(source) != stamp:
        raise UserError(f"{path} changed while it was read: open it again when it is complete")
    writer.digest.update(orjson.dumps(facts))
    header = {"version": recipe.version, "source": asdict(stamp), "facts": facts}
    file.seek(0)
    file.write(orjson.dumps(header | {"xxh3": writer.digest.hexdigest()}).ljust(HEADER_BYTES - 1) + b"\n")
    return facts, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
