"""download.py, run as a user runs it, against a local server that speaks the Hub's protocol."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub, running
from tests.support.paths import PROJECT

SCRIPT = PROJECT / "examples" / "searchr1" / "download.py"
CORPUS = b'{"id": "0", "contents": "a"}\n' * 1000
PARTS = [random.Random(seed).randbytes(2000) for seed in range(3)]


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
    files = {
        "PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz": tar_gz(CORPUS),
        "PeterJinGo/wiki-18-e5-index/part_aa": PARTS[0],
        "PeterJinGo/wiki-18-e5-index/part_ab": PARTS[1],
        "PeterJinGo/wiki-18-e5-index-HNSW64/part_ab": PARTS[1],
        "PeterJinGo/wiki-18-e5-index-HNSW64/part_aa": PARTS[0],
        "PeterJinGo/wiki-18-e5-index-HNSW64/part_ac": PARTS[2],
        "PeterJinGo/wiki-18-e5-index-HNSW64/README.md": b"no part",
        "PeterJinGo/wiki-18-bm25-index/bm25/segments_1": b"",
        "PeterJinGo/wiki-18-bm25-index/bm25/_0.fdt": PARTS[2],
        "inclusionAI/ASearcher-Local-Knowledge/wiki_corpus.jsonl": CORPUS,
        "inclusionAI/ASearcher-Local-Knowledge/wiki_webpages.jsonl": CORPUS,
    }
    with running(FakeHub(files, small={"PeterJinGo/wiki-18-bm25-index/bm25/segments_1"})) as hub:
        yield hub


def run(fake: FakeHub, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--save_path", "save here", *flags],
        cwd=tmp_path,
        env=kept | {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def files(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "save here"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".downloads" not in path.parts
    }


def test_by_default_the_flat_index_and_the_corpus(fake: FakeHub, tmp_path: Path) -> None:
    """Dropped connections on the way; the corpus comes out of its archive, which goes; a second run fetches nothing."""
    fake.faults = [100, None, 500]
    done = run(fake, tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == {"e5_Flat.index": PARTS[0] + PARTS[1], "wiki-18.jsonl": CORPUS}
    asked = len(fake.asked)
    again = run(fake, tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(fake.asked) == asked


def test_everything_else(fake: FakeHub, tmp_path: Path) -> None:
    done = run(fake, tmp_path, "--what", "wiki18-e5-hnsw64", "wiki18-bm25", "asearcher-corpus")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == {
        "bm25/_0.fdt": PARTS[2],
        "bm25/segments_1": b"",
        "e5_HNSW64.index": b"".join(PARTS),
        "wiki_corpus.jsonl": CORPUS,
        "wiki_webpages.jsonl": CORPUS,
    }


def test_a_dry_run_says_and_writes_nothing(fake: FakeHub, tmp_path: Path) -> None:
    told = run(fake, tmp_path, "--dry_run")
    assert told.returncode == 0, told.stderr
    for word in ("wiki-18.jsonl", "part_aa, part_ab", "unpack"):
        assert word in told.stdout
    assert not (tmp_path / "save here").exists()
    assert fake.asked == []


def test_mistakes_are_told_in_one_sentence(fake: FakeHub, tmp_path: Path) -> None:
    for flags, status, message in (
        (("--what", "wikipedia"), 2, "invalid choice: 'wikipedia'"),
        (("--revision", "v9"), 2, "has no revision 'v9'"),
    ):
        failed = run(fake, tmp_path, *flags)
        assert (failed.returncode, message in failed.stderr) == (status, True), failed.stderr
        assert "Traceback" not in failed.stderr
    fake.faults = ["corrupt", "corrupt"]
    failed = run(fake, tmp_path)
    assert (failed.returncode, "arrived twice with a wrong checksum" in failed.stderr) == (1, True)
    assert "Traceback" not in failed.stderr
    fake.gated = True
    assert "is gated: ask for access" in run(fake, tmp_path).stderr


def test_a_damaged_archive_is_told(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz"] = gzip.compress(CORPUS)[:-9]
    failed = run(fake, tmp_path, "--what", "wiki18-corpus")
    assert (failed.returncode, "is damaged" in failed.stderr) == (1, True), failed.stderr
    assert list(files(tmp_path)) == ["wiki-18.jsonl.gz"]
