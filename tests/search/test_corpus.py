"""Tests of the corpus: random access by row, and offsets that are used only for the file that they were made from."""

import gzip
import hashlib
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import Code, RunError
from rlsys.search import corpus as corpus_module
from rlsys.search.corpus import Corpus
from tests.support.jsonl import read_rows
from tests.support.refusals import refused

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def row(number: int, text: str) -> str:
    return json.dumps({"id": number, "contents": text}, ensure_ascii=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A corpus of 2000 rows in its own folder, larger than the blocks that a stamp samples."""
    folder = tmp_path / "data"
    folder.mkdir()
    texts = random.Random(0)
    lines = [row(number, "é" * texts.randrange(200)) for number in range(2000)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "corpus.jsonl"


def names_beside(path: Path) -> list[str]:
    return sorted(item.name for item in path.parent.iterdir())


def assert_is_file(corpus: Corpus, path: Path) -> None:
    assert corpus.fetch(range(len(corpus))) == read_rows(path)
    assert corpus.checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def scans(path: Path) -> bool:
    """Open the corpus and check its rows; return True if opening scanned the whole file."""
    with patch.object(corpus_module, "_write_offsets", wraps=corpus_module._write_offsets) as scanning:
        assert_is_file(Corpus.open(path), path)
    return scanning.called


def test_rows_come_in_the_requested_order_as_independent_copies(path: Path) -> None:
    corpus, rows = Corpus.open(path), read_rows(path)
    assert corpus.fetch([]) == []
    first, *others = corpus.fetch([199, 0, 7, 7, 199])
    first["contents"] = "changed"
    assert others == [rows[number] for number in (0, 7, 7, 199)]
    assert [row for chunk in corpus.chunks(64) for row in chunk] == rows
    for missing in (-1, 2000):
        with pytest.raises(IndexError):
            corpus.fetch([3, missing])


@settings(max_examples=40)
@given(
    texts=st.lists(TEXT | st.integers(1, 500).map("ü".__mul__), min_size=1, max_size=10),
    block=st.sampled_from([1, 7, 64, 1000]),
    newline=st.sampled_from(["\n", "\r\n"]),
    tail=st.lists(st.sampled_from(["\n", "\r\n", "  \n", "\t"]), max_size=4).map("".join),
)
def test_any_text_and_newline_is_read_for_any_scan_block(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, newline: str, tail: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "corpus.jsonl"
    raw = newline.join(row(*item) for item in enumerate(texts)) + tail
    path.write_bytes(raw.encode())
    with patch.object(corpus_module, "_SCAN_BYTES", block):
        first = Corpus.open(path)
    for corpus in (first, Corpus.open(path)):
        assert corpus.fetch(range(len(corpus))) == [{"id": at, "contents": text} for at, text in enumerate(texts)]
        assert corpus.checksum == hashlib.sha256(raw.encode()).hexdigest()


@pytest.mark.parametrize("line", ['{"id": "1", "contents": "\\ud800"}', '{"id": "1", "contents": 5}', "{}"])
def test_a_bad_row_is_named_by_its_line_when_it_is_fetched(tmp_path: Path, line: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "fine"}\n' + line + '\n{"id": "2", "contents": "fine"}\n')
    corpus = Corpus.open(path)
    assert [passage["id"] for passage in corpus.fetch([0, 2])] == ["0", "2"]
    with refused("malformed", path) as caught:
        corpus.fetch([0, 1])
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "not_found"),
        (b"\n \r\n\n", "empty"),
        (gzip.compress(b"{}", mtime=0), "unsupported"),
        (b"PAR1\x15\x04", "unsupported"),
    ],
)
def test_missing_empty_and_foreign_files_are_refused(tmp_path: Path, content: bytes | None, code: Code) -> None:
    path = tmp_path / "corpus"
    if content is not None:
        path.write_bytes(content)
    with refused(code, path):
        Corpus.open(path)


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(row(2000, "more") + "\n")


def replace_and_keep_the_time(path: Path) -> None:
    """Replace the file by another one of the same size and time, as `cp -p` may do."""
    before = path.stat()
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [append, replace_and_keep_the_time])
def test_a_changed_file_is_read_again(path: Path, change: Callable[[Path], None]) -> None:
    assert scans(path)
    assert not scans(path)
    change(path)
    assert scans(path)
    assert not scans(path)
    assert names_beside(path) == ["corpus.jsonl", "corpus.jsonl.offsets"]


@settings(max_examples=40)
@given(place=st.integers(0, 8000), bit=st.integers(0, 7))
def test_a_damaged_offsets_file_is_never_used(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "corpus.jsonl"
    path.write_text("".join(row(number, "text") + "\n" for number in range(500)))
    assert scans(path)
    sidecar = path.with_name("corpus.jsonl.offsets")
    whole = sidecar.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    sidecar.write_bytes(damaged)
    scans(path)
    sidecar.write_bytes(whole[:place])
    assert scans(path)
    assert sidecar.read_bytes() == whole


def test_offsets_go_to_the_cache_or_memory_when_the_folder_is_not_writable(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        said = [one for one in caplog.records if one.name == corpus_module.__name__]
        return [one.levelname for one in said if one.levelno >= logging.WARNING]

    path.with_name("corpus.jsonl.offsets").mkdir()  # a folder stops root too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert scans(path)
    assert not scans(path)
    assert len(list((tmp_path / "cache" / "rlsys").iterdir())) == 1
    assert not warnings()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scans(path)
    assert warnings() == ["WARNING"]
    assert scans(path)
    assert names_beside(path) == ["corpus.jsonl", "corpus.jsonl.offsets"]


def test_a_file_that_changes_while_it_is_scanned_is_refused(path: Path) -> None:
    scan = corpus_module._write_offsets

    def scan_later(*given: Any) -> Any:
        append(path)
        return scan(*given)

    with patch.object(corpus_module, "_write_offsets", scan_later), refused("in_use", path):
        Corpus.open(path)
    assert names_beside(path) == ["corpus.jsonl"]


def test_a_file_that_shrinks_while_it_is_open_raises_a_run_error(path: Path) -> None:
    corpus = Corpus.open(path)
    os.truncate(path, 100)
    with pytest.raises(RunError, match=path.name):
        corpus.fetch([1999])
