"""Tests of indexes on Elasticsearch and OpenSearch, against a fake of their REST API."""

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlsys.errors import Code, RunError
from rlsys.search.corpus import Corpus
from rlsys.search.index import remote
from rlsys.search.index.folder import REMOTE
from rlsys.search.index.remote import Patience, RemoteRetriever, build_remote
from rlsys.search.server.command import open_retriever
from tests.support.refusals import refused
from tests.support.serving import serving

VERSIONS = {"elasticsearch": "9.1.0", "opensearch": "3.2.0"}
PATIENCE = Patience(timeout_s=60, retries=3, backoff_s=0.001)
ROWS = 230
"""More rows than two blocks of a bulk load have."""


class FakeElastic:
    """Fake of the REST API of Elasticsearch and OpenSearch; a document's score is its number of query words."""

    def __init__(self, kind: str) -> None:
        self.kind, self.version, self.url = kind, VERSIONS[kind], ""
        self.authorization: str | None = None
        self.busy = 0  # number of requests to answer with 503
        self.crowded = 0  # number of documents to answer with 429
        self.compresses = False
        self.room = 10**6  # once this many documents are written, bulk requests are answered with 500
        self.indices: dict[str, Any] = {}
        self.documents: dict[str, dict[str, Any]] = {}
        self.written: list[str] = []

    def app(self) -> Starlette:
        async def respond(request: Request) -> Response:
            status, answer = self.answer(request, await request.body())
            headers = {"X-Elastic-Product": "Elasticsearch"} if self.kind == "elasticsearch" else {}
            body = json.dumps(answer if status < 300 else {"error": answer, "status": status}).encode()
            if self.compresses:
                body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
            return Response(body, status, headers, "application/json")

        return Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "PUT", "POST"])])

    def answer(self, request: Request, body: bytes) -> tuple[int, Any]:
        """Return the status, and the answer or an error's cause."""
        if self.authorization is not None and request.headers.get("authorization") != self.authorization:
            return 401, {"type": "security_exception", "reason": "unable to authenticate"}
        spoken = re.search(r"compatible-with=(\d+)", request.headers.get("accept", ""))
        if spoken and self.kind == "elasticsearch" and spoken[1] != self.version.split(".")[0]:
            return 400, {"type": "media_type_header_exception", "reason": "Invalid media-type value"}
        if self.busy:
            self.busy -= 1
            return 503, {"type": "unavailable", "reason": "come back later"}
        name, *action = request.url.path.strip("/").split("/")
        lines = [json.loads(line) for line in body.splitlines()]
        if not name:
            number = {"number": self.version}
            return 200, {"version": number if self.kind == "elasticsearch" else number | {"distribution": self.kind}}
        if name == "_bulk":
            return self.bulk(lines)
        if request.method == "PUT" and not action:
            self.indices[name], self.documents[name] = lines[0], {}
        if name not in self.indices:
            return 404, {"type": "index_not_found_exception", "reason": f"no such index [{name}]"}
        answers = {
            "_mapping": lambda: {name: {"mappings": self.indices[name]["mappings"]}},
            "_count": lambda: {"count": len(self.documents[name])},
            "_msearch": lambda: {"responses": [self.search(name, asked) for asked in lines[1::2]]},
        }
        return 200, answers.get("/".join(action), lambda: {"acknowledged": True})()

    def bulk(self, lines: list[Any]) -> tuple[int, Any]:
        if len(self.written) >= self.room:
            return 500, {"type": "disaster", "reason": "the disk is on fire"}
        items = []
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            named = action["index"]
            if self.crowded:
                self.crowded -= 1
                cause = {"type": "rejected_execution_exception", "reason": "come back later"}
                items.append({"index": named | {"status": 429, "error": cause}})
                continue
            self.documents[named["_index"]][named["_id"]] = source
            self.written.append(named["_id"])
            items.append({"index": {"status": 201}})
        return 200, {"errors": any("error" in item["index"] for item in items), "items": items}

    def search(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        query = asked["query"]["match"]["contents"].split()
        if "boom" in query:
            return {"status": 400, "error": {"type": "too_many_clauses", "reason": "boom"}}
        assert asked["sort"] == [{"_score": "desc"}, {"rlsys_row": "asc"}]
        scored = [(sum(map(doc["contents"].split().count, query)), doc) for doc in self.documents[name].values()]
        best = sorted(scored, key=lambda pair: (-pair[0], pair[1]["rlsys_row"]))[: asked["size"]]
        hidden = asked["_source"]["excludes"]
        hits = [
            {"_score": score, "_source": {k: v for k, v in doc.items() if k not in hidden}}
            for score, doc in best
            if score
        ]
        return {"status": 200, "hits": {"hits": hits}}


@pytest.fixture(autouse=True)
def _no_credentials_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "USER", "PASSWORD", "CA_CERTS"):
        monkeypatch.delenv(f"RLSYS_SEARCH_{name}", raising=False)
    monkeypatch.setattr(remote, "_BLOCK_ROWS", 100)


@pytest.fixture(params=list(VERSIONS))
def fake(request: pytest.FixtureRequest) -> Iterator[FakeElastic]:
    server = FakeElastic(request.param)
    with serving(server.app()) as server.url:
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


def load(corpus: Corpus, out: Path, fake: FakeElastic, kind: str | None = None, **options: Any) -> bool:
    return build_remote(corpus, out, fake.url, "wiki", kind or fake.kind, patience=PATIENCE, **options)


def test_hits_are_passages_ordered_by_score_and_row(
    fake: FakeElastic, corpus: Corpus, texts: list[Any], tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    assert load(corpus, tmp_path / "out", fake, progress=lambda *step: steps.append(step))
    assert steps == [("load", 0, ROWS), ("load", 100, ROWS), ("load", 200, ROWS), ("load", ROWS, ROWS)]
    assert fake.indices["wiki"]["settings"]["similarity"]["default"] == {"type": "BM25", "k1": 0.9, "b": 0.4}
    retriever = open_retriever(tmp_path / "out")
    found = retriever.find(retriever.prepare(["passage 17", "cat", "zebra"]), 3)
    assert [[(hit.score, hit.document) for hit in hits] for hits in found] == [
        [(2.0, texts[17]), (1.0, texts[0]), (1.0, texts[1])],
        [(2.0, texts[row]) for row in (2, 5, 8)],
        [],
    ]
    assert retriever.find(retriever.prepare([]), 3) == []
    expected = {"kind": fake.kind, "passages": ROWS, "corpus_sha256": corpus.checksum}
    assert expected.items() <= dict(retriever.describe()).items()
    with pytest.raises(RunError, match="too_many_clauses"):
        retriever.find(["cat", "boom"], 1)
    fake.indices.clear()
    with refused("not_found", "wiki"):
        retriever.find(["cat"], 1)
    retriever.close()


def test_an_interrupted_load_continues_and_a_repeated_one_sends_nothing(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fake.room = 100
    with pytest.raises(RunError, match=fake.url):
        load(corpus, out, fake)
    assert not out.exists()
    fake.room, fake.busy = 10**6, 1  # a request that finds the server busy is repeated
    assert load(corpus, out, fake)
    assert fake.written == [str(row) for row in range(ROWS)]
    assert not load(corpus, out, fake)
    assert len(fake.written) == ROWS
    fake.indices.clear()
    assert load(corpus, out, fake)  # the server has lost the index
    assert len(fake.documents["wiki"]) == ROWS
    assert [path.name for path in tmp_path.glob("*out*/*")] == ["manifest.json"]


def test_an_index_of_other_content_is_refused_and_left_unchanged(
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
    with refused("mismatch", "wiki"):
        RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    assert fake.documents["wiki"] == before


def test_credentials_come_from_the_environment(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: Code, key: str) -> None:
        with refused(code, key):
            load(corpus, tmp_path / "out", fake)

    fake.authorization = "Basic " + base64.b64encode(b"me:secret").decode()
    refuse("denied", fake.url)
    monkeypatch.setenv("RLSYS_SEARCH_USER", "me")
    refuse("missing", "RLSYS_SEARCH_PASSWORD")
    monkeypatch.setenv("RLSYS_SEARCH_PASSWORD", "secret")
    assert load(corpus, tmp_path / "out", fake)
    assert "secret" not in (tmp_path / "out" / "manifest.json").read_text()
    monkeypatch.setenv("RLSYS_SEARCH_API_KEY", "key")
    refuse("conflict", "RLSYS_SEARCH_API_KEY")
    monkeypatch.delenv("RLSYS_SEARCH_USER")
    monkeypatch.delenv("RLSYS_SEARCH_PASSWORD")
    fake.authorization = "ApiKey key"
    if fake.kind == "elasticsearch":
        assert not load(corpus, tmp_path / "out", fake)
    else:
        refuse("unsupported", "RLSYS_SEARCH_API_KEY")


def test_documents_answered_with_429_are_sent_again_a_few_times(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path
) -> None:
    fake.crowded = 250  # Twice for the first block of 100, and once more for half of it.
    assert load(corpus, tmp_path / "out", fake)
    assert sorted(fake.written, key=int) == [str(row) for row in range(ROWS)]
    fake.indices.clear()
    fake.crowded = before = 10**6
    with pytest.raises(RunError, match=fake.url):
        load(corpus, tmp_path / "out", fake)
    assert before - fake.crowded == 100 * (1 + PATIENCE.retries)


def test_a_wrong_url_is_refused_without_repeating_its_password(corpus: Corpus, tmp_path: Path) -> None:
    for url in ("ftp://wiki.example:21", "http://wiki.example", "http://["):
        with refused("malformed", url):
            build_remote(corpus, tmp_path / "out", url, "wiki")
    with refused("unsupported", "wiki.example") as caught:
        build_remote(corpus, tmp_path / "out", "https://me:secret@wiki.example", "wiki")
    assert "secret" not in str(caught.value)


def test_a_server_of_the_other_kind_or_version_is_refused(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    (other,) = set(REMOTE) - {fake.kind}
    with refused("mismatch", fake.url):
        load(corpus, tmp_path / "out", fake, other)
    fake.version = "8.19.0"
    with refused("mismatch", fake.url):
        load(corpus, tmp_path / "out", fake, "elasticsearch")


def test_an_answer_that_is_compressed_or_beyond_the_limit_is_an_error(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(corpus, tmp_path / "out", fake)
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    (hits,) = retriever.find(["dog"], 100)
    assert len(hits) == 100
    monkeypatch.setattr(remote, "_MAX_ANSWER_BYTES", 5000)
    assert len(retriever.find(["dog"], 1)[0]) == 1
    with pytest.raises(RunError, match=fake.url):
        retriever.find(["dog"], 100)
    fake.compresses = True
    with pytest.raises(RunError, match=fake.url):
        retriever.find(["dog"], 1)
    retriever.close()
