"""download.py against a local server that speaks the Hub's protocol."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.searchr1 import download
from rlsys.apps.data.download import Hub
from rlsys.errors import RunError
from tests.support.fake_hub import FakeHub, running
from tests.support.refusals import refused

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
Download = Callable[..., None]


def tar_gz(content: bytes) -> bytes:
    """As wiki-18.jsonl.gz is made: a tar archive of one file in some folder, under a name that hides it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("data00/somewhere/wiki_dump.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    files = FILES | {"PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz": tar_gz(CORPUS)}
    with running(FakeHub(files, small={"PeterJinGo/wiki-18-bm25-index/bm25/segments_1"})) as hub:
        yield hub


@pytest.fixture
def fetch(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """The script with these flags, in this process."""
    monkeypatch.setattr(download, "Hub", lambda: Hub(fake.url))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> None:
        monkeypatch.setattr("sys.argv", ["download.py", "--save_path", "save here", *flags])
        download.main()

    return run


def files(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "save here"
    paths = (path for path in folder.rglob("*") if path.is_file() and ".downloads" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_by_default_the_flat_index_and_the_corpus(fake: FakeHub, fetch: Download, tmp_path: Path) -> None:
    """A dry run writes nothing; dropped connections on the way; the corpus comes out of its archive, which goes."""
    fetch("--dry_run")
    assert (files(tmp_path), fake.asked) == ({}, [])
    fake.faults = [100, None, 500]
    fetch()
    assert files(tmp_path) == {"e5_Flat.index": PARTS[0] + PARTS[1], "wiki-18.jsonl": CORPUS}
    asked = len(fake.asked)
    fetch()
    assert len(fake.asked) == asked


def test_files_of_other_sets_keep_their_names(fetch: Download, tmp_path: Path) -> None:
    fetch("--what", "wiki18-bm25", "asearcher-corpus")
    assert files(tmp_path) == {"bm25/segments_1": b"", "wiki_corpus.jsonl": CORPUS, "wiki_webpages.jsonl": CORPUS}


def test_an_unknown_revision_and_a_damaged_archive_are_refused(fake: FakeHub, fetch: Download, tmp_path: Path) -> None:
    with refused("not_found"):
        fetch("--revision", "v9")
    fake.files["PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz"] = gzip.compress(CORPUS)[:-9]
    with pytest.raises(RunError, match=r"wiki-18\.jsonl\.gz"):
        fetch("--what", "wiki18-corpus")
    assert list(files(tmp_path)) == ["wiki-18.jsonl.gz"]
