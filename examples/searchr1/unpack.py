"""A gzip file to the one file that is in it, in bounded memory and disk space.

Contract: what is packed may itself be a tar archive of one regular file (wiki-18.jsonl.gz is one, its name
notwithstanding); then that file is what comes out. The output appears whole or not at all. An archive is refused
where it holds nothing, has a sparse file, or grows to more than 100 times its size (from 64 MiB on; text grows to 20
times at most).
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO

from rlsys.apps.data.download import Advance
from rlsys.errors import RunError

_BLOCK = 1 << 22
_TAR_MARK, _TAR_MARK_AT = b"ustar", 257
_GROWTH, _ALWAYS_ALLOWED = 100, 1 << 26
_AROUND_BYTES = 1 << 15
"""Most bytes of a tar archive before its file, and between its file and its end: `tarfile` holds headers in memory,
and needs time that grows with the square of their length."""


def unpack(archive: Path, out: Path, advance: Advance) -> None:
    """Unpack `archive` to `out`; `advance` is told of the packed bytes as they are read.

    Raises RunError if the archive is damaged, empty or too large, if a tar archive in it holds anything but one file,
    or if `out` cannot be written.
    """
    part = out.with_name(f"{out.name}.unpacking")
    try:
        with archive.open("rb") as packed, part.open("wb") as file:
            with gzip.GzipFile(fileobj=packed, mode="rb") as plain:
                copied = _copy(_Content(archive, plain, packed, advance), file)
            file.flush()
            os.fsync(file.fileno())
        if not copied:
            raise RunError(f"{archive} holds nothing: delete it and download it again")
        part.replace(out)
    except (EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError, gzip.BadGzipFile) as problem:
        raise RunError(f"{archive} is damaged ({problem}): delete it and download it again") from problem
    except OSError as problem:
        raise RunError(
            f"{archive} could not be unpacked to {out} ({problem.strerror or problem}): check the free "
            "space and the permissions of both"
        ) from problem
    finally:
        part.unlink(missing_ok=True)


class _Content:
    """The content of `archive`, unpacked as it is read, and no more of it than is allowed."""

    def __init__(self, archive: Path, plain: gzip.GzipFile, packed: IO[bytes], advance: Advance) -> None:
        self.archive = archive
        self._plain, self._packed, self._advance = plain, packed, advance
        self._told = 0
        self._most = max(_ALWAYS_ALLOWED, archive.stat().st_size * _GROWTH)
        self._until = self._most

    def begins_as_tar(self) -> bool:
        """True for a tar archive; the stream is read from its start again."""
        head = self._plain.read(_TAR_MARK_AT + len(_TAR_MARK))
        self._plain.seek(0)
        return head.endswith(_TAR_MARK)

    def allow(self, more: int | None = None) -> None:
        """From now on, allow as many bytes more; None allows all that the size of the archive does."""
        self._until = self._most if more is None else self._plain.tell() + more

    def read(self, size: int = _BLOCK) -> bytes:
        """The next bytes. Raises RunError where more than allowed have been read."""
        block = self._plain.read(min(size, _BLOCK))
        if self._plain.tell() > self._until:
            raise RunError(
                f"{self.archive} holds far more than a file of its size should: delete it, or unpack it by hand "
                "if you trust it"
            )
        now = self._packed.tell()
        self._advance(now - self._told)
        self._told = now
        return block


def _copy(content: _Content, file: IO[bytes]) -> int:
    """Copy the one file of `content` to `file`. Returns its bytes."""
    if not content.begins_as_tar():
        return _pour(content, file)
    copied = None
    content.allow(_AROUND_BYTES)
    with tarfile.open(fileobj=content, mode="r|") as members:  # type: ignore[call-overload]
        while member := members.next():
            if not member.isfile():
                continue
            if copied is not None:
                raise RunError(f"{content.archive} holds more than one file: unpack it by hand")
            if member.issparse():
                raise RunError(
                    f"{content.archive} holds the sparse file {member.name[:100]!r}, which can fill the disk: "
                    "unpack it by hand if you trust it"
                )
            content.allow()
            copied = _pour(members.extractfile(member), file)
            content.allow(_AROUND_BYTES)
    if copied is None:
        raise RunError(f"{content.archive} holds no file: unpack it by hand")
    # gzip compares its checksum only where it is read to the end, behind the last member.
    content.allow()
    while content.read():
        pass
    return copied


def _pour(source: IO[bytes] | _Content | None, file: IO[bytes]) -> int:
    """Copy all of `source` to `file`. Returns the number of bytes."""
    copied = 0
    while source and (block := source.read(_BLOCK)):
        copied += file.write(block)
    return copied
