"""Tests of downloads from a local server that speaks the Hub's protocol, with dropped, corrupted and changed files."""

import fcntl
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.apps.data.download import Downloader, Hub, Target, require_space
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
    """A bench with small blocks, whose downloads neither pause before a retry nor time out on a busy machine."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 600)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    return DownloadBench(fake, tmp_path)


def test_pieces_are_joined_and_checked(fake: FakeHub, bench: DownloadBench) -> None:
    assert bench.downloader.missing(bench.target) == 4000
    assert bench.fetch() == WHOLE
    assert (bench.told, bench.downloader.missing(bench.target), bench.waits) == (4000, 0, [])
    assert sorted(path.name for path in bench.folder.iterdir()) == [".downloads", "joined.index"]
    assert fake.authorised == [True, True]


def test_small_files_are_checked_by_their_git_checksum(fake: FakeHub, bench: DownloadBench) -> None:
    target = Target("docs/README.md", bench.hub.find("a/set", ["README.md"]))
    assert bench.downloader.fetch(target, bench.advance).read_bytes() == b"small"
    (bench.folder / "docs" / "README.md").unlink()
    fake.files["a/set/README.md"] = b"smell"
    with pytest.raises(RunError, match="README"):
        bench.downloader.fetch(target, bench.advance)


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


def test_a_body_that_is_corrupted_twice_is_given_up(fake: FakeHub, bench: DownloadBench) -> None:
    fake.faults = ["corrupt"] * 2
    with pytest.raises(RunError, match="part_aa"):
        bench.fetch()
    assert (len(fake.asked), bench.path.exists()) == (2, False)
    assert bench.downloader.missing(bench.target) == 4000
    assert bench.fetch() == WHOLE


def test_a_forbidden_file_is_not_tried_again(fake: FakeHub, bench: DownloadBench) -> None:
    fake.faults = ["403"]
    with refused("denied", bench.target.pieces[0].url):
        bench.fetch()
    assert (len(fake.asked), bench.waits) == (1, [])


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


def test_a_second_download_to_a_folder_is_refused(fake: FakeHub, bench: DownloadBench) -> None:
    (bench.folder / ".downloads").mkdir(parents=True)
    with (bench.folder / ".downloads" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="save here"):
            bench.fetch()
    assert fake.asked == []
    assert bench.fetch() == WHOLE


def test_too_little_space_and_an_unwritable_folder_are_refused(tmp_path: Path, bench: DownloadBench) -> None:
    require_space(tmp_path / "not" / "there yet", 1)
    with refused("no_room", tmp_path / "not"):
        require_space(tmp_path / "not", 10**30)
    bench.folder.write_text("a file")
    with refused("denied", bench.folder):
        bench.fetch()


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


def test_gated_sets_and_missing_checksums_are_refused(
    fake: FakeHub, bench: DownloadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gate(self: Any, *_: str) -> None:
        self._answer(401, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})

    with monkeypatch.context() as patch:
        patch.setattr("tests.support.fake_hub._Handler._resolve", gate)
        with refused("denied", "a/set"):
            bench.hub.find("a/set", ["part_aa"])
    monkeypatch.setattr(fake, "checksum", lambda _: "none")
    with refused("malformed"):
        bench.hub.find("a/set", ["part_aa"])
