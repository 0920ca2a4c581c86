from __future__ import annotations

import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import RunError, UserError
from rlsys.search import corpus as corpus_module
from rlsys.search.corpus import Corpus

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def row(number: int, text: str) -> str:
    return json.dumps({"id": number, "contents": text}, ensure_ascii=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A corpus of 2000 rows in a folder of its own; more than the blocks that a stamp samples."""
    folder = tmp_path / "data"
    folder.mkdir()
    texts = random.Random(0)
    lines = [row(number, "é" * texts.randrange(200)) for number in range(2000)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "corpus.jsonl"


def reference(path: Path) -> list[Any]:
    """The rows, by reading every line."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def assert_is_file(corpus: Corpus, path: Path) -> None:
    assert corpus.fetch(range(len(corpus))) == reference(path)
    assert corpus.checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def scans(path: Path) -> bool:
    """Whether opening the corpus reads all of it; what comes must be right in any case."""
    with patch.object(corpus_module, "_write_offsets", wraps=corpus_module._write_offsets) as scanning:
        assert_is_file(Corpus.open(path), path)
    return scanning.called


def test_rows_are_lines_in_any_order(corpus_path: Path, passages: list[dict[str, Any]]) -> None:
    corpus = Corpus.open(corpus_path)
    assert len(corpus) == len(passages)
    assert corpus.path == corpus_path
    assert corpus.fetch([]) == []
    assert corpus.fetch([199, 0, 7, 7]) == [passages[row] for row in (199, 0, 7, 7)]
    assert [p for chunk in corpus.chunks(64) for p in chunk] == passages
    assert corpus.checksum == hashlib.sha256(corpus_path.read_bytes()).hexdigest()


@pytest.mark.parametrize("missing", [-1, 200])
def test_a_row_that_is_not_there_is_no_other_row(corpus_path: Path, missing: int) -> None:
    with pytest.raises(IndexError, match="has 200 rows"):
        Corpus.open(corpus_path).fetch([3, missing])


def test_the_caller_may_change_what_it_gets(corpus_path: Path, passages: list[dict[str, Any]]) -> None:
    corpus = Corpus.open(corpus_path)
    first, second = corpus.fetch([5, 5])
    first["contents"] = "changed"
    assert second == corpus.fetch([5])[0] == passages[5]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(TEXT | st.integers(1, 500).map("ü".__mul__), min_size=1, max_size=10),
    block=st.sampled_from([1, 7, 64, 1000]),
    newline=st.sampled_from(["\n", "\r\n"]),
    tail=st.lists(st.sampled_from(["\n", "\r\n", "  \n", "\t"]), max_size=4).map("".join),
)
def test_any_lines_survive_whatever_the_scan_block(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, newline: str, tail: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "corpus.jsonl"
    raw = newline.join(row(*item) for item in enumerate(texts)) + tail
    path.write_bytes(raw.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_SCAN_BYTES", block)
        first = Corpus.open(path)
    for corpus in (first, Corpus.open(path)):
        assert corpus.fetch(range(len(corpus))) == [
            {"id": number, "contents": text} for number, text in enumerate(texts)
        ]
        assert corpus.checksum == hashlib.sha256(raw.encode()).hexdigest()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "is not JSON"),
        ("", "is not JSON"),
        ('{"id": "1", "contents": "\\ud800"}', "is not JSON"),
        ('["1", "text"]', "is not an object"),
        ('{"id": "1"}', "`contents`"),
        ('{"id": "1", "contents": 5}', "`contents`"),
        ('{"contents": "text"}', "`id`"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "fine"}\n' + line + '\n{"id": "2", "contents": "fine"}\n')
    corpus = Corpus.open(path)
    assert [p["id"] for p in corpus.fetch([0, 2])] == ["0", "2"]
    with pytest.raises(UserError, match=f"line 2 .*{reason}"):
        corpus.fetch([0, 1])


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        Corpus.open(tmp_path / "none.jsonl")
    for name, text in (("empty.jsonl", ""), ("blank.jsonl", "\n \r\n\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="is empty"):
            Corpus.open(tmp_path / name)


def test_other_formats_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(row(0, "text").encode()))
    with pytest.raises(UserError, match=r"compressed by gzip.*gzip -dk"):
        Corpus.open(tmp_path / "corpus.jsonl.gz")
    pyarrow.parquet.write_table(pa.table({"id": ["0"], "contents": ["text"]}), tmp_path / "corpus.parquet")
    with pytest.raises(UserError, match=r"parquet.*to_json"):
        Corpus.open(tmp_path / "corpus.parquet")


def test_a_file_is_read_through_once(path: Path) -> None:
    assert scans(path)
    assert not scans(path)
    assert sorted(item.name for item in path.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.offsets"]


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(row(2000, "more") + "\n")


def replace_in_place(path: Path) -> None:
    """Other rows of the same size, later."""
    path.write_bytes(path.read_bytes().replace(b'"id": 1000,', b'"id":  999,'))
    os.utime(path, (2e9, 2e9))


def replace_and_keep_the_time(path: Path) -> None:
    """Another file of the same size and time, as `cp -p` may leave."""
    before = path.stat()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(reversed(lines)), encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("change", [append, replace_in_place, replace_and_keep_the_time])
def test_a_changed_file_is_read_again(path: Path, change: Callable[[Path], None]) -> None:
    assert scans(path)
    change(path)
    assert scans(path)
    assert not scans(path)


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 8000), bit=st.integers(0, 7))
def test_a_damaged_sidecar_is_never_trusted(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
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


def test_a_folder_that_cannot_be_written_is_left_for_the_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_name("corpus.jsonl.offsets").mkdir()  # keeps root out too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert scans(path)
    assert not scans(path)
    assert len(list((tmp_path / "cache" / "rlsys").iterdir())) == 1
    assert sorted(item.name for item in path.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.offsets"]


def test_without_any_folder_it_is_kept_in_memory_and_said_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.with_name("corpus.jsonl.offsets").mkdir()
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING)
    assert scans(path)
    (record,) = [item for item in caplog.records if item.levelno >= logging.WARNING]
    assert "make one of these folders writable" in record.getMessage()
    assert scans(path)


def open_and_hash(path: Path, start: Any, results: Any) -> None:
    start.wait()
    corpus = Corpus.open(path)
    results.put((len(corpus), corpus.checksum, corpus.fetch([1999])))


def test_processes_that_open_first_at_once_do_not_disturb_each_other(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=open_and_hash, args=(path, start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    expected = (2000, hashlib.sha256(path.read_bytes()).hexdigest(), reference(path)[1999:])
    assert [results.get(timeout=60) for _ in workers] == [expected] * 3
    for worker in workers:
        worker.join()
    assert not scans(path)
    assert sorted(item.name for item in path.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.offsets"]


def test_threads_share_a_corpus(path: Path) -> None:
    corpus, expected = Corpus.open(path), reference(path)
    draws = [random.Random(seed).choices(range(2000), k=300) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for rows, found in zip(draws, pool.map(corpus.fetch, draws), strict=True):
            assert found == [expected[row] for row in rows]


def test_a_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    scan = corpus_module._write_offsets

    def scan_of_a_growing_file(*given: Any) -> Any:
        append(path)
        return scan(*given)

    growing = patch.object(corpus_module, "_write_offsets", scan_of_a_growing_file)
    with growing, pytest.raises(UserError, match="changed while it was read"):
        Corpus.open(path)
    assert [item.name for item in path.parent.iterdir()] == ["corpus.jsonl"]


def test_a_file_that_shrinks_while_it_is_open_stops_the_run_and_not_the_process(path: Path) -> None:
    corpus = Corpus.open(path)
    os.truncate(path, 100)
    with pytest.raises(RunError, match="truncated while it was open"):
        corpus.fetch([1999])
