"""Tests of downloads from a local server that speaks the Hub's protocol, with dropped, corrupted and changed files."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlsys.apps.data.download import Downloader, Hub, Target
from rlsys.errors import Code, RunError
from tests.support.fake_hub import TOKEN, FakeHub, running
from tests.support.refusals import refused

PARTS = {f"a/set/part_a{letter}": random.Random(letter).randbytes(size) for letter, size in (("a", 3000), ("b", 1000))}
WHOLE = b"".join(PARTS.values())
FILES = {**PARTS, "a/set/README.md": b"small"}


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with running(FakeHub(dict(FILES), small={"a/set/README.md"})) as hub:
        yield hub


class DownloadBench:
    """A downloader that records its pauses without waiting, and a folder with a space in its name."""

    def __init__(self, fake: FakeHub, tmp_path: Path) -> None:
        self.hub = Hub(fake.url, TOKEN)
        self.folder = tmp_path / "save here"
        self.waits: list[float] = []
        self.downloader = Downloader(self.folder, self.hub, sleep=self.waits.append)
        self.target = Target("joined.index", self.hub.find("a/set", ["part_*"]))
        self.path = self.folder / "joined.index"
        self.told = 0

    def advance(self, count: int) -> None:
        self.told += count

    def fetch(self) -> bytes:
        self.told = 0
        path = self.downloader.fetch(self.target, self.advance)
        assert path == self.path
        return path.read_bytes()


@pytest.fixture
def bench(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DownloadBench:
    """A bench with small blocks; huggingface_hub does not pause either."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    return DownloadBench(fake, tmp_path)


def test_pieces_are_joined_and_checked(fake: FakeHub, bench: DownloadBench) -> None:
    assert bench.downloader.missing(bench.target) == 4000
    assert bench.fetch() == WHOLE
    assert (bench.told, bench.downloader.missing(bench.target), bench.waits) == (4000, 0, [])
    assert sorted(path.name for path in bench.folder.iterdir()) == [".downloads", "joined.index"]
    assert fake.authorised == [True, True]


def test_a_download_continues_after_a_dropped_connection(fake: FakeHub, bench: DownloadBench) -> None:
    fake.faults = [100, 200, None, 400]
    assert bench.fetch() == WHOLE
    assert [asked for _, asked in fake.asked] == ["", "bytes=100-", "bytes=300-", "", "bytes=400-"]
    assert (bench.told, bench.waits) == (4000, [])


def test_a_new_process_continues_an_unfinished_download(fake: FakeHub, bench: DownloadBench, tmp_path: Path) -> None:
    fake.faults = [None, 100, *["503"] * 6]
    with pytest.raises(RunError, match="503"):
        bench.fetch()
    assert len(bench.waits) == 5
    assert not bench.path.exists()
    fake.asked.clear()
    again = DownloadBench(fake, tmp_path)
    assert again.downloader.missing(again.target) == 900
    assert again.fetch() == WHOLE
    assert fake.asked == [("a/set/part_ab", "bytes=100-")]
    assert again.told == 4000


@pytest.mark.parametrize("faults", [["corrupt"], [100, "no ranges"], [100, "shifted"]])
def test_a_corrupted_body_or_wrong_range_is_downloaded_again(
    fake: FakeHub, bench: DownloadBench, faults: list[object]
) -> None:
    fake.faults = faults
    assert bench.fetch() == WHOLE
    assert bench.told == 4000


@pytest.mark.parametrize("content", [WHOLE[:-1], b"!" + WHOLE[1:]])
def test_an_existing_file_is_checked_and_not_overwritten(fake: FakeHub, bench: DownloadBench, content: bytes) -> None:
    bench.folder.mkdir()
    bench.path.write_bytes(content)
    with refused("exists", bench.path):
        bench.fetch()
    assert bench.path.read_bytes() == content
    bench.path.write_bytes(WHOLE)
    assert bench.fetch() == WHOLE
    assert fake.asked == []


@pytest.mark.parametrize(
    ("dataset", "pattern", "revision", "code"),
    [
        ("a/none", "part_aa", "main", "not_found"),
        ("a/set", "*.bin", "main", "not_found"),
        ("a/set", "part_aa", "v9", "not_found"),
        ("a b", "part_aa", "main", "malformed"),
    ],
)
def test_an_unknown_data_set_file_or_revision_is_refused(
    bench: DownloadBench, dataset: str, pattern: str, revision: str, code: Code
) -> None:
    with refused(code) as caught:
        bench.hub.find(dataset, [pattern], revision)
    assert caught.value.key.startswith(dataset)
