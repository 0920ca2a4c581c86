"""Indexes on a server: loaded once and whole, searched as asked, refused in a sentence when they cannot be."""

from __future__ import annotations

import base64
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import Code, RunError
from rlsys.search.corpus import Corpus
from rlsys.search.index import remote
from rlsys.search.index.folder import REMOTE
from rlsys.search.index.remote import Patience, RemoteRetriever, build_remote
from rlsys.search.server.command import open_retriever
from tests.search.fake_elastic import FakeElastic, bm25, running
from tests.support.hostile import answer_of_child, hostile_server
from tests.support.refusals import refused

VERSIONS = {"elasticsearch": "9.1.0", "opensearch": "3.2.0"}
PATIENCE = Patience(timeout_s=60, retries=3, backoff_s=0.001)
ROWS = 230
"""More than two of the blocks that are sent."""

CONNECTS = """
import sys
from rlsys.search.index.remote import EngineClient, Patience

kind, url, *answers = sys.argv[1:]
seen, before = {}, peak_mib()
for answer in answers:
    try:
        EngineClient(kind, f"{url}/{answer}", patience=Patience(timeout_s=60.0, retries=0))
    except Exception as error:
        seen[answer] = [type(error).__name__, len(str(error))]
print(json.dumps([seen, peak_mib() - before]))
"""


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "USER", "PASSWORD", "CA_CERTS"):
        monkeypatch.delenv(f"RLSYS_SEARCH_{name}", raising=False)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BLOCK_ROWS", 100)


@pytest.fixture(params=list(VERSIONS))
def fake(request: pytest.FixtureRequest) -> Iterator[FakeElastic]:
    with running(FakeElastic(request.param, VERSIONS[request.param])) as server:
        yield server


@pytest.fixture(scope="session")
def texts() -> list[dict[str, Any]]:
    return [
        {"id": f"p{row}", "contents": f"passage {row} " + "cat " * (row % 3) + "dog", "url": f"u{row}"}
        for row in range(ROWS)
    ]


@pytest.fixture
def corpus(texts: list[dict[str, Any]], tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return Corpus.open(path)


def load(corpus: Corpus, out: Path, fake: FakeElastic, **options: Any) -> bool:
    options = {"patience": PATIENCE} | options
    return build_remote(corpus, out, fake.url, "wiki", fake.distribution, **options)


def test_hits_are_the_passages_that_bm25_ranks_first(
    fake: FakeElastic, corpus: Corpus, texts: list[dict[str, Any]], tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    assert load(corpus, tmp_path / "out", fake, progress=lambda *step: steps.append(step))
    assert steps == [("load", 0, ROWS), ("load", 100, ROWS), ("load", 200, ROWS), ("load", ROWS, ROWS)]
    retriever = open_retriever(tmp_path / "out")
    queries = ["passage 17", "cat", "zebra", "dog 229 cat"]
    found = retriever.find(retriever.prepare(queries), 4)
    for query, hits in zip(queries, found, strict=True):
        scores = bm25({str(row): text["contents"] for row, text in enumerate(texts)}, query, 0.9, 0.4)
        best = sorted(scores, key=lambda row: (-scores[row], int(row)))[:4]
        assert [(hit.score, hit.document) for hit in hits] == [(scores[r], texts[int(r)]) for r in best]
    assert [len(hits) for hits in found] == [4, 4, 0, 4]
    assert retriever.find(retriever.prepare([]), 3) == []
    described = retriever.describe()
    assert (described["kind"], described["passages"], described["corpus_sha256"]) == (
        *(fake.distribution, ROWS),
        corpus.checksum,
    )
    retriever.close()


def test_loading_twice_sends_once(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    assert load(corpus, tmp_path / "out", fake)
    assert not load(corpus, tmp_path / "out", fake)
    assert len(fake.written) == ROWS
    assert load(corpus, tmp_path / "other", fake)  # the folder alone is new
    shutil.rmtree(tmp_path / "other")
    fake.indices.clear()
    assert load(corpus, tmp_path / "out", fake)  # what the folder promises is gone
    assert len(fake.documents["wiki"]) == ROWS
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json"]


def test_a_load_that_was_ended_continues(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    fake.die_after = 150
    with pytest.raises(RunError, match=fake.url):
        load(corpus, tmp_path / "out", fake)
    assert not (tmp_path / "out").exists()
    fake.die_after = None
    assert load(corpus, tmp_path / "out", fake)
    assert fake.written[150:] == [str(row) for row in range(100, ROWS)]
    assert RemoteRetriever.open(tmp_path / "out", patience=PATIENCE).describe()["passages"] == ROWS
    assert not list(tmp_path.glob(".*"))


def test_rejected_documents_and_lost_connections_are_tried_again(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path
) -> None:
    fake.reject_items, fake.drop, fake.unavailable = 130, 1, 1
    assert load(corpus, tmp_path / "out", fake)
    assert sorted(fake.written, key=int) == [str(row) for row in range(ROWS)]
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    fake.drop, fake.unavailable = 1, 1
    assert retriever.find(["passage 5"], 1)[0][0].document["id"] == "p5"
    fake.drop = 100
    with pytest.raises(RunError, match=fake.url):
        retriever.find(["passage 5"], 1)


def test_an_index_of_other_things_is_neither_touched_nor_searched(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path
) -> None:
    load(corpus, tmp_path / "out", fake)
    before = dict(fake.documents["wiki"])
    with refused("exists", "wiki"):
        load(corpus, tmp_path / "new", fake, k1=2.0)
    fake.documents["wiki"]["stray"] = {"contents": "stray", "rlsys_row": 0}
    with refused("mismatch", "wiki"):
        RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    with pytest.raises(RunError, match=str(ROWS + 1)):
        load(corpus, tmp_path / "out", fake)
    del fake.documents["wiki"]["stray"]
    fake.indices["wiki"]["mappings"].pop("_meta")
    with refused("exists", "wiki"):
        load(corpus, tmp_path / "new", fake)
    with refused("mismatch", "wiki"):
        RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    assert fake.documents["wiki"] == before


def test_a_search_that_fails_says_why(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    with pytest.raises(RunError, match="too_many_clauses"):
        retriever.find(["cat", "boom"], 1)
    fake.indices.clear()
    with refused("not_found", "wiki"):
        retriever.find(["cat"], 1)


@pytest.mark.parametrize("kind", REMOTE)
def test_an_answer_that_is_too_large_or_compressed_is_a_sentence(kind: str) -> None:
    with hostile_server() as hostile:
        seen, grown_mib = answer_of_child(CONNECTS, kind, hostile.url, "bomb", "body", "line", "deep")
    assert set(seen) == {"bomb", "body", "line", "deep"}
    for error, chars in seen.values():
        assert error == "RunError"
        assert chars < 1500
    assert grown_mib < 400


def test_credentials_come_from_the_environment(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.authorization = "Basic " + base64.b64encode(b"me:secret").decode()
    with refused("denied", fake.url):
        load(corpus, tmp_path / "out", fake)
    monkeypatch.setenv("RLSYS_SEARCH_USER", "me")
    with refused("missing", "RLSYS_SEARCH_PASSWORD"):
        load(corpus, tmp_path / "out", fake)
    monkeypatch.setenv("RLSYS_SEARCH_PASSWORD", "secret")
    assert load(corpus, tmp_path / "out", fake)
    assert "secret" not in (tmp_path / "out" / "manifest.json").read_text()
    monkeypatch.setenv("RLSYS_SEARCH_API_KEY", "key")
    with refused("conflict", "RLSYS_SEARCH_API_KEY"):
        load(corpus, tmp_path / "out", fake)
    for name in ("USER", "PASSWORD"):
        monkeypatch.delenv(f"RLSYS_SEARCH_{name}")
    fake.authorization = "ApiKey key"
    if fake.distribution == "elasticsearch":
        assert not load(corpus, tmp_path / "out", fake)
    else:
        with refused("unsupported", "RLSYS_SEARCH_API_KEY"):
            load(corpus, tmp_path / "out", fake)


@pytest.mark.parametrize(
    ("url", "code", "key"),
    [
        ("http://wiki.example", "malformed", None),
        ("http://wiki.example:port", "malformed", None),
        ("ftp://wiki.example:21", "malformed", None),
        ("http://[", "malformed", None),
        ("https://me:secret@wiki.example:9200", "unsupported", "wiki.example:9200"),
        ("https://me:secret@wiki.example", "unsupported", "wiki.example"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_its_password_not_repeated(
    url: str, code: Code, key: str | None, corpus: Corpus, tmp_path: Path
) -> None:
    with refused(code, key or url) as caught:
        build_remote(corpus, tmp_path / "out", url, "wiki", patience=PATIENCE)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_server_that_is_not_there_is_named(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    with socket.socket() as deaf:  # bound, so that nobody else listens at its port, and not listening itself
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(RunError, match=url):
            build_remote(corpus, tmp_path / "out", url, "wiki", kind, patience=PATIENCE)


def test_a_server_of_the_other_kind_or_version_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    def build(server: FakeElastic, engine: str) -> bool:
        return build_remote(corpus, tmp_path / "out", server.url, "wiki", engine, patience=PATIENCE)

    with running(FakeElastic("opensearch", "3.2.0")) as opensearch, refused("mismatch", opensearch.url):
        build(opensearch, "elasticsearch")
    with running(FakeElastic("elasticsearch", "8.19.0")) as old:
        for engine in REMOTE:
            with refused("mismatch", old.url):
                build(old, engine)
        with refused("unknown", "engine"):
            build(old, "solr")
