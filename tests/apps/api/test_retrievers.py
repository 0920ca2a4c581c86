"""Tests of retrievers: their indexes, their servers, and wrong arguments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlsys.apps.api import BM25Retriever, DenseRetriever, HttpRetriever, WebSearch
from rlsys.errors import Code
from rlsys.search.server.command import open_retriever
from tests.support.jsonl import read_rows
from tests.support.processes import descendants_with, is_gone
from tests.support.refusals import refused
from tests.support.waiting import HANG_S

DOCUMENTS: list[str | dict[str, Any]] = [
    {"id": "ke", "title": "Kenya", "text": "Kenya: capital Nairobi."},
    "Mali: capital Bamako.",
]


def test_documents_are_indexed_and_found(tmp_path: Path) -> None:
    bm25 = BM25Retriever.from_documents(DOCUMENTS, tmp_path / "index", top_k=1)
    with bm25.serving(tmp_path) as settings:
        assert (settings["search.index"], settings["search.topk"]) == (str(bm25.index_path), 1)
    retriever = open_retriever(bm25.index_path)
    (kenya,), (mali,) = retriever.find(retriever.prepare(["capital of Kenya", "Bamako"]), 1)
    assert kenya.document["id"] == "ke"
    assert "Bamako" in mali.document["contents"]
    retriever.close()


def test_documents_are_chunked_and_an_existing_index_is_reused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("one two three four five six seven")
    index = tmp_path / "index"
    retriever = BM25Retriever.from_documents(tmp_path / "docs", index, chunk_size=3)
    passages = read_rows(index / "corpus.jsonl")
    assert [row["id"] for row in passages] == ["a.txt#1", "a.txt#2", "a.txt#3"]
    made = (index / "manifest.json").stat().st_mtime_ns
    assert BM25Retriever.from_documents([tmp_path / "docs" / "a.txt"], index, chunk_size=3) == retriever
    assert (index / "manifest.json").stat().st_mtime_ns == made
    beside = tmp_path / "index.passages.jsonl"
    before = beside.read_bytes()
    with refused("mismatch", index):
        BM25Retriever.from_documents(["something else"], index)
    assert beside.read_bytes() == before
    with refused("mismatch", index):
        DenseRetriever.from_documents(tmp_path / "docs", index, chunk_size=3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "docs", "index", "index.passages.jsonl", "index.passages.jsonl.offsets",
    }  # fmt: skip


def test_a_dense_index_is_opened_only_with_its_encoder(tmp_path: Path) -> None:
    retriever = DenseRetriever.from_documents(DOCUMENTS, tmp_path / "index", top_k=2)
    for same in (retriever, DenseRetriever(tmp_path / "index", "minilm", top_k=2)):
        with same.serving(tmp_path) as settings:
            assert settings == {
                "search.index": str(tmp_path / "index"), "search.url": None, "search.replicas": [], "search.topk": 2,
            }  # fmt: skip
    with pytest.warns(UserWarning, match="chunk_size=512 only has an effect in from_documents") as caught:
        DenseRetriever(tmp_path / "index", "minilm", chunk_size=512)
    assert caught[0].filename == __file__
    with refused("mismatch", tmp_path / "index"):
        BM25Retriever(tmp_path / "index")
    (tmp_path / "index" / "manifest.json").write_text('{"format": 2, "kind": "dense"}')
    with DenseRetriever(tmp_path / "index").serving(tmp_path) as settings:
        assert settings["search.url"] is None, "the run's server names the damage"


@pytest.mark.parametrize(
    ("code", "key", "make"),
    [
        ("out_of_range", "top_k", lambda _: HttpRetriever("http://localhost:8000", top_k=0)),
        ("wrong_type", "replicas", lambda _: HttpRetriever("http://a:1", replicas="http://b:1")),
        ("malformed", "device", lambda index: DenseRetriever.from_documents(DOCUMENTS, index, device="gpu0")),
        ("out_of_range", "chunk_size", lambda index: BM25Retriever.from_documents(DOCUMENTS, index, chunk_size="x")),
        ("wrong_type", "documents", lambda index: BM25Retriever.from_documents(7, index)),
        ("wrong_type", "document 2", lambda index: BM25Retriever.from_documents(["a", 2], index)),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    code: Code, key: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    with refused(code, key):
        make(tmp_path / "index")
    assert not list(tmp_path.iterdir())


def test_the_web_search_server_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.apps.api.retrievers._START_TIMEOUT_S", HANG_S)
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    monkeypatch.setenv("RLSYS_SEARCH_TOKEN", "secret")
    with WebSearch("serper", endpoint="http://127.0.0.1:9", top_k=2).serving(tmp_path) as settings:
        assert (settings["search.token_env"], settings["search.topk"]) == ("RLSYS_SEARCH_TOKEN", 2)
        assert httpx.get(f"{settings['search.url']}/health", timeout=600).status_code == 200
        (server,) = descendants_with("search", "web", "serper")
    assert is_gone(server)
