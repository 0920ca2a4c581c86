"""A gzip file to the one file that is in it, in bounded memory.

Contract: what is packed may itself be a tar archive of one regular file (wiki-18.jsonl.gz is one, its name
notwithstanding); then that file is what comes out. The output appears whole or not at all.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO

from rlsys.data.transfer import Advance
from rlsys.errors import RunError

_BLOCK = 1 << 22
_TAR_MARK, _TAR_MARK_AT = b"ustar", 257


def unpack(archive: Path, out: Path, advance: Advance) -> None:
    """Unpack `archive` to `out`; `advance` is told of the packed bytes as they are read.

    Raises RunError if the archive is damaged or a tar archive in it holds anything but one file.
    """
    part = out.with_name(f"{out.name}.unpacking")
    try:
        with archive.open("rb") as packed, part.open("wb") as file:
            with gzip.GzipFile(fileobj=packed, mode="rb") as plain:
                _copy(plain, file, archive, _Meter(packed, advance))
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as problem:
        raise RunError(f"{archive} is damaged ({problem}): delete it and download it again") from problem
    finally:
        part.unlink(missing_ok=True)


class _Meter:
    """Tells how much further `packed` has been read since it last told."""

    def __init__(self, packed: IO[bytes], advance: Advance) -> None:
        self._packed = packed
        self._advance = advance
        self._told = 0

    def tell(self) -> None:
        now = self._packed.tell()
        self._advance(now - self._told)
        self._told = now


def _copy(plain: gzip.GzipFile, file: IO[bytes], archive: Path, meter: _Meter) -> None:
    head = plain.read(_TAR_MARK_AT + len(_TAR_MARK))
    plain.seek(0)
    if not head.endswith(_TAR_MARK):
        _pour(plain, file, meter)
        return
    copied = 0
    with tarfile.open(fileobj=plain, mode="r|") as members:
        for member in members:
            content = members.extractfile(member) if member.isfile() else None
            if content is not None:
                _pour(content, file, meter)
                copied += 1
    if copied != 1:
        raise RunError(f"{archive} holds {copied} files where one was expected: unpack it by hand")
    # gzip compares its checksum only where it is read to the end, behind the last member.
    while plain.read(_BLOCK):
        meter.tell()


def _pour(source: IO[bytes] | gzip.GzipFile, file: IO[bytes], meter: _Meter) -> None:
    while block := source.read(_BLOCK):
        file.write(block)
        meter.tell()
