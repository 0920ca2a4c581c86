"""Unpacking, against archives made by the standard library."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path

import pytest

from rlsys.data.unpack import unpack
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


@pytest.mark.parametrize("plain", [CONTENT, tar_of(CONTENT), b"", b"short"])
def test_one_file_comes_out(tmp_path: Path, plain: bytes) -> None:
    archive = write(tmp_path, gzip.compress(plain))
    told: list[int] = []
    unpack(archive, tmp_path / "out", told.append)
    assert (tmp_path / "out").read_bytes() == (CONTENT if len(plain) > 10 else plain)
    assert sum(told) <= archive.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", archive.name]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (gzip.compress(CONTENT)[:-50], "is damaged"),
        (gzip.compress(CONTENT)[:-8] + b"\0" * 8, "is damaged"),
        (gzip.compress(tar_of(CONTENT))[:-8] + b"\0" * 8, "is damaged"),
        (gzip.compress(tar_of(CONTENT)[:200_000]), "is damaged"),
        (b"no gzip", "is damaged"),
        (gzip.compress(tar_of(b"a", b"b")), "holds 2 files where one was expected"),
    ],
)
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, damaged: bytes, message: str) -> None:
    archive = write(tmp_path, damaged)
    with pytest.raises(RunError, match=message):
        unpack(archive, tmp_path / "out", [].append)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]
