"""Unpacks a gzip file that holds one file, with bounded memory and disk space.

Contract: the content may itself be a tar archive of one regular file, as in wiki-18.jsonl.gz; then that file is
unpacked. The output appears complete or not at all. An archive is refused if it is empty, has a sparse file, or grows
to more than 100 times its size (from 64 MiB on; text grows to at most 20 times).
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
"""Maximum number of bytes in a tar archive before its file, and between its file and its end. `tarfile` holds headers
in memory and needs time quadratic in their length."""


def unpack(archive: Path, out: Path, advance: Advance) -> None:
    """Unpack `archive` to `out`, calling `advance` with the number of packed bytes read.

    Raises RunError if the archive is damaged, empty or too large, if a tar archive in it does not hold exactly one
    file, or if `out` cannot be written.
    """
    part = out.with_name(f"{out.name}.unpacking")
    try:
        with archive.open("rb") as packed, part.open("wb") as file:
            with gzip.GzipFile(fileobj=packed, mode="rb") as plain:
                copied = _copy(_Content(archive, plain, packed, advance), file)
            file.flush()
            os.fsync(file.fileno())
        if not copied:
            raise RunError(f"{archive} is empty: delete it and download it again")
        part.replace(out)
    except (EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError, gzip.BadGzipFile) as problem:
        raise RunError(f"{archive} is damaged ({problem}): delete it and download it again") from problem
    except OSError as problem:
        raise RunError(
            f"{archive} could not be unpacked to {out} ({problem.strerror or problem}): check the free space and the "
            "permissions of both"
        ) from problem
    finally:
        part.unlink(missing_ok=True)


class _Content:
    """Content of `archive`, unpacked while it is read, up to an allowed size."""

    def __init__(self, archive: Path, plain: gzip.GzipFile, packed: IO[bytes], advance: Advance) -> None:
        self.archive = archive
        self._plain, self._packed, self._advance = plain, packed, advance
        self._told = 0
        self._most = max(_ALWAYS_ALLOWED, archive.stat().st_size * _GROWTH)
        self._until = self._most

    def begins_as_tar(self) -> bool:
        """True for a tar archive; rewinds the stream."""
        head = self._plain.read(_TAR_MARK_AT + len(_TAR_MARK))
        self._plain.seek(0)
        return head.endswith(_TAR_MARK)

    def allow(self, more: int | None = None) -> None:
        """Allow `more` bytes from here; None allows the limit that follows from the archive's size."""
        self._until = self._most if more is None else self._plain.tell() + more

    def read(self, size: int = _BLOCK) -> bytes:
        """Read the next bytes. Raises RunError if more than the allowed bytes have been read."""
        block = self._plain.read(min(size, _BLOCK))
        if self._plain.tell() > self._until:
            raise RunError(
                f"{self.archive} unpacks to far more than its size suggests: delete it, or unpack it by hand if you "
                "trust it"
            )
        now = self._packed.tell()
        self._advance(now - self._told)
        self._told = now
        return block


def _copy(content: _Content, file: IO[bytes]) -> int:
    """Copy the only file in `content` to `file`. Returns the number of bytes."""
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
                    f"{content.archive} holds the sparse file {member.name[:100]!r}, which may fill the disk: unpack "
                    "it by hand if you trust it"
                )
            content.allow()
            copied = _pour(members.extractfile(member), file)
            content.allow(_AROUND_BYTES)
    if copied is None:
        raise RunError(f"{content.archive} holds no file: unpack it by hand")
    # gzip compares the checksum only if the content is read to its end, past the last member.
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
