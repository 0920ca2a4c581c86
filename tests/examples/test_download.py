"""Tests of download.py against a local server that speaks the Hub's protocol, and of unpacking archives."""

import gzip
import io
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.searchr1 import download
from examples.searchr1.unpack import unpack
from rlsys.apps.data.download import Hub
from rlsys.errors import RunError
from tests.support.fake_hub import FakeHub, running
from tests.support.paths import PROJECT

CORPUS = b'{"id": "0", "contents": "a"}\n' * 1000
PARTS = [random.Random(seed).randbytes(2000) for seed in range(2)]
FILES = {
    "PeterJinGo/wiki-18-e5-index/part_aa": PARTS[0],
    "PeterJinGo/wiki-18-e5-index/part_ab": PARTS[1],
    "PeterJinGo/wiki-18-e5-index/README.md": b"no part",
    "PeterJinGo/wiki-18-bm25-index/bm25/segments_1": b"",
    "inclusionAI/ASearcher-Local-Knowledge/wiki_corpus.jsonl": CORPUS,
    "inclusionAI/ASearcher-Local-Knowledge/wiki_webpages.jsonl": CORPUS,
}
NAME = "wiki 18.jsonl.gz"
CONTENT = b'{"id": 1}\n' + random.Random(0).randbytes(100_000) * 3
Download = Callable[..., None]


def tar_of(*contents: bytes) -> bytes:
    """Return an archive of a folder with `contents` as files, like wiki-18.jsonl.gz."""
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


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    files = FILES | {"PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz": gzip.compress(tar_of(CORPUS))}
    with running(FakeHub(files, small={"PeterJinGo/wiki-18-bm25-index/bm25/segments_1"})) as hub:
        yield hub


@pytest.fixture
def fetch(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """Function that runs the script with flags, within this process."""
    monkeypatch.setattr(download, "Hub", lambda: Hub(fake.url))
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> None:
        monkeypatch.setattr("sys.argv", ["download.py", "--save_path", "save here", *flags])
        download.main()

    return run


def files(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "save here"
    paths = (path for path in folder.rglob("*") if path.is_file() and ".downloads" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_default_downloads_the_flat_index_and_the_corpus(fake: FakeHub, fetch: Download, tmp_path: Path) -> None:
    """A dry run writes nothing; the corpus is unpacked and its archive removed; connections drop meanwhile."""
    fetch("--dry_run")
    assert (files(tmp_path), fake.asked) == ({}, [])
    fake.faults = [100, None, 500]
    fetch()
    assert files(tmp_path) == {"e5_Flat.index": PARTS[0] + PARTS[1], "wiki-18.jsonl": CORPUS}
    asked = len(fake.asked)
    fetch()
    assert len(fake.asked) == asked


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(content)
    return folder / NAME


@pytest.mark.parametrize("plain", [CONTENT, tar_of(CONTENT), b"short"])
def test_the_single_file_of_an_archive_is_unpacked(tmp_path: Path, plain: bytes) -> None:
    archive = write(tmp_path, gzip.compress(plain, mtime=0))
    told: list[int] = []
    unpack(archive, tmp_path / "out", told.append)
    assert (tmp_path / "out").read_bytes() == (CONTENT if len(plain) > 10 else plain)
    assert sum(told) <= archive.stat().st_size


@pytest.mark.parametrize(
    "damaged",
    [
        gzip.compress(CONTENT, mtime=0)[:-50],
        gzip.compress(tar_of(CONTENT), mtime=0)[:-8] + b"\0" * 8,
        gzip.compress(tar_of(CONTENT)[:200_000], mtime=0),
        b"no gzip",
        gzip.compress(tar_of(b"a", b"b"), mtime=0),
        gzip.compress(tar_of(), mtime=0),
        b"",
    ],
)
def test_a_damaged_archive_leaves_no_output(tmp_path: Path, damaged: bytes) -> None:
    archive = write(tmp_path, damaged)
    with pytest.raises(RunError, match=re.escape(str(archive))):
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
for folder in map(Path, sys.argv[1:]):
    try:
        unpack(folder / "wiki 18.jsonl.gz", folder / "out", lambda count: None)
    except RunError as refused:
        print(str(refused).replace("\\n", " "))
"""
"""Program that may write files of at most 128 MiB and take at most 512 MiB of memory."""


def header(kind: bytes, size: int, **pax: str) -> bytes:
    member = tarfile.TarInfo("some.jsonl")
    member.type, member.size, member.pax_headers = kind, size, pax
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def with_zeros(head: bytes, mebibytes: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(mebibytes):
            file.write(bytes(1 << 20))
    return packed.getvalue()


ATTACKS: dict[str, Callable[[], bytes]] = {
    "sparse": lambda: gzip.compress(
        header(tarfile.REGTYPE, 0, **{"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}) + bytes(1024)
    ),
    "long header": lambda: with_zeros(header(tarfile.GNUTYPE_LONGNAME, 1 << 29), 512),
    "many folders": lambda: gzip.compress(header(tarfile.DIRTYPE, 0) * (1 << 15)),
    "a file of zeros": lambda: with_zeros(header(tarfile.REGTYPE, 160 << 20), 160),
}


def test_an_archive_that_would_exhaust_disk_or_memory_is_refused(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, attack()).parent for name, attack in ATTACKS.items()]
    command = [sys.executable, "-c", ATTACK, *map(str, folders)]
    child = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    refused = child.stdout.splitlines()
    assert [str(folder) in line for folder, line in zip(folders, refused, strict=True)] == [True] * len(ATTACKS)
    assert all([path.name for path in folder.iterdir()] == [NAME] for folder in folders)
