"""Unpacking, against archives made by the standard library."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.searchr1.unpack import unpack
from rlsys.errors import RunError

CONTENT = b'{"id": 1}\n' + random.Random(0).randbytes(100_000) * 3


def tar_of(*contents: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        folder = tarfile.TarInfo("some")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"some/{number}.jsonl")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def write(folder: Path, content: bytes) -> Path:
    path = folder / "wiki 18.jsonl.gz"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("plain", [CONTENT, tar_of(CONTENT), b"short"])
def test_one_file_comes_out(tmp_path: Path, plain: bytes) -> None:
    archive = write(tmp_path, gzip.compress(plain, mtime=0))
    told: list[int] = []
    unpack(archive, tmp_path / "out", told.append)
    assert (tmp_path / "out").read_bytes() == (CONTENT if len(plain) > 10 else plain)
    assert sum(told) <= archive.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", archive.name]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (gzip.compress(CONTENT, mtime=0)[:-50], "is damaged"),
        (gzip.compress(CONTENT, mtime=0)[:-8] + b"\0" * 8, "is damaged"),
        (gzip.compress(tar_of(CONTENT), mtime=0)[:-8] + b"\0" * 8, "is damaged"),
        (gzip.compress(tar_of(CONTENT)[:200_000], mtime=0), "is damaged"),
        (b"no gzip", "is damaged"),
        (gzip.compress(tar_of(b"a", b"b"), mtime=0), "holds more than one file"),
        (gzip.compress(tar_of(), mtime=0), "holds no file"),
        (gzip.compress(tar_of(b""), mtime=0), "holds nothing"),
        (gzip.compress(b"", mtime=0), "holds nothing"),
        (b"", "holds nothing"),
    ],
)
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, damaged: bytes, message: str) -> None:
    archive = write(tmp_path, damaged)
    with pytest.raises(RunError, match=message):
        unpack(archive, tmp_path / "out", list[int]().append)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


ATTACK = """
import resource, signal, sys
from pathlib import Path
from examples.searchr1.unpack import unpack
from rlsys.errors import RunError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 27, 1 << 27))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
try:
    unpack(Path(sys.argv[1]), Path(sys.argv[2]), lambda count: None)
except RunError as refused:
    print(refused)
"""
"""May write 128 MiB and take 512 MiB of memory."""


def header(kind: bytes, size: int, **pax: str) -> bytes:
    member = tarfile.TarInfo("some.jsonl")
    member.type, member.size, member.pax_headers = kind, size, pax
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def old_sparse(size: int) -> bytes:
    head = bytearray(header(tarfile.GNUTYPE_SPARSE, 0))
    head[386:410] = b"00000000000 " * 2
    head[483:495] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return gzip.compress(bytes(head) + bytes(1024), mtime=0)


def with_zeros(head: bytes, mebibytes: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(mebibytes):
            file.write(bytes(1 << 20))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (lambda: old_sparse(1 << 40), "sparse"),
        (
            lambda: gzip.compress(
                header(tarfile.REGTYPE, 0, **{"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}) + bytes(1024)
            ),
            "sparse",
        ),
        (lambda: with_zeros(header(tarfile.XHDTYPE, 1 << 29), 512), "far more"),
        (lambda: with_zeros(header(tarfile.GNUTYPE_LONGNAME, 1 << 29), 512), "far more"),
        (lambda: gzip.compress(header(tarfile.XHDTYPE, 0) * 4096), "far more|damaged"),
        (lambda: gzip.compress(header(tarfile.DIRTYPE, 0) * (1 << 15)), "far more"),
        (lambda: with_zeros(b"", 160), "far more"),
        (lambda: with_zeros(header(tarfile.REGTYPE, 160 << 20), 160), "far more"),
    ],
)
def test_an_archive_that_would_fill_the_disk_or_the_memory_is_refused(
    tmp_path: Path, attack: Callable[[], bytes], message: str
) -> None:
    archive = write(tmp_path, attack())
    child = subprocess.run(
        [sys.executable, "-c", ATTACK, archive, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert any(part in child.stdout for part in message.split("|"))
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


def test_a_file_that_grows_a_little_is_no_attack(tmp_path: Path) -> None:
    plain = bytes(50 << 20)
    unpack(write(tmp_path, gzip.compress(plain, 1)), tmp_path / "out", list[int]().append)
    assert (tmp_path / "out").stat().st_size == len(plain)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="could not be unpacked"):
        unpack(write(tmp_path, gzip.compress(CONTENT, mtime=0)), tmp_path / "none" / "out", list[int]().append)
