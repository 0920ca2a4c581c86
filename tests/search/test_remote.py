from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.folder import REMOTE
from rlsys.search.index.remote import Patience, RemoteRetriever, build_remote
from rlsys.search.server.command import open_retriever
from tests.search.fake_elastic import FakeElastic, bm25, running
from tests.support.hostile import answer_of_child, hostile_server
from tests.support.ports import free_port

VERSIONS = {"elasticsearch": "9.1.0", "opensearch": "3.2.0"}
PATIENCE = Patience(timeout_s=10, retries=3, backoff_s=0.001)
ROWS = 2300
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
    assert steps == [("load", 0, ROWS), ("load", 1000, ROWS), ("load", 2000, ROWS), ("load", ROWS, ROWS)]
    retriever = open_retriever(tmp_path / "out")
    queries = ["passage 17", "cat", "zebra", "dog 2299 cat"]
    found = retriever.find(retriever.prepare(queries), 4)
    for query, hits in zip(queries, found, strict=True):
        scores = bm25({str(row): text["contents"] for row, text in enumerate(texts)}, query, 0.9, 0.4)
        best = sorted(scores, key=lambda row: (-scores[row], int(row)))[:4]
        assert [(hit.score, hit.document) for hit in hits] == [(scores[r], texts[int(r)]) for r in best]
    assert [len(hits) for hits in found] == [4, 4, 0, 4]
    assert retriever.find(retriever.prepare([]), 3) == []
    assert (
        retriever.describe().items()
        >= {
            "kind": fake.distribution,
            "passages": ROWS,
            "corpus_sha256": corpus.checksum,
            "index": "wiki",
            "server_version": fake.version,
        }.items()
    )
    retriever.close()


def test_the_index_is_made_as_anserini_has_it(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake, k1=1.2, b=0.75)
    made = fake.indices["wiki"]
    assert made["settings"]["similarity"]["default"] == {"type": "BM25", "k1": 1.2, "b": 0.75}
    assert made["settings"]["number_of_shards"] == 1
    assert made["mappings"]["properties"]["contents"] == {"type": "text", "analyzer": "english"}
    assert made["mappings"]["dynamic"] is False


def test_many_batches_wait_for_the_server_at_once(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    assert retriever.parallel == 8
    with ThreadPoolExecutor(retriever.parallel) as pool:
        found = list(pool.map(lambda row: retriever.find([f"passage {row}"], 1), range(32)))
    assert [hits[0][0].document["id"] for hits in found] == [f"p{row}" for row in range(32)]
    assert sum("_msearch" in request for request in fake.requests) == 32
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
    fake.die_after = 1500
    with pytest.raises(RunError, match=r"answered 500: disaster: the disk is on fire"):
        load(corpus, tmp_path / "out", fake)
    assert not (tmp_path / "out").exists()
    fake.die_after = None
    assert load(corpus, tmp_path / "out", fake)
    assert fake.written[1500:] == [str(row) for row in range(1000, ROWS)]
    assert RemoteRetriever.open(tmp_path / "out", patience=PATIENCE).describe()["passages"] == ROWS
    assert not list(tmp_path.glob(".*"))


def test_rejected_documents_and_lost_connections_are_tried_again(
    fake: FakeElastic, corpus: Corpus, tmp_path: Path
) -> None:
    fake.reject_items, fake.drop, fake.unavailable = 1300, 1, 1
    assert load(corpus, tmp_path / "out", fake)
    assert sorted(fake.written, key=int) == [str(row) for row in range(ROWS)]
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    fake.drop, fake.unavailable = 1, 1
    assert retriever.find(["passage 5"], 1)[0][0].document["id"] == "p5"
    fake.drop = 100
    with pytest.raises(RunError, match="gave no answer"):
        retriever.find(["passage 5"], 1)


def test_a_document_that_is_refused_is_named(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    fake.poison = "1234"
    with pytest.raises(RunError, match=r"refused 1 of 1000 passages .* row 1234 with status 400"):
        load(corpus, tmp_path / "out", fake)


def test_an_index_of_other_things_is_not_touched(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    before = dict(fake.documents["wiki"])
    with pytest.raises(UserError, match="does not hold this corpus with these settings"):
        load(corpus, tmp_path / "new", fake, k1=2.0)
    fake.indices["wiki"]["mappings"].pop("_meta")
    with pytest.raises(UserError, match="does not hold this corpus"):
        load(corpus, tmp_path / "new", fake)
    assert fake.documents["wiki"] == before
    with pytest.raises(UserError, match="has changed since"):
        RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)


def test_documents_of_others_are_noticed(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    fake.documents["wiki"]["stray"] = {"contents": "stray", "rlsys_row": 0}
    with pytest.raises(UserError, match="has changed since"):
        RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    with pytest.raises(RunError, match=f"holds {ROWS + 1} passages after {ROWS} were loaded"):
        load(corpus, tmp_path / "out", fake)


def test_a_search_that_fails_says_why(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    retriever = RemoteRetriever.open(tmp_path / "out", patience=PATIENCE)
    with pytest.raises(RunError, match="answered 400: too_many_clauses: boom"):
        retriever.find(["cat", "boom"], 1)
    fake.indices.clear()
    with pytest.raises(UserError, match="has no index 'wiki'"):
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
    with pytest.raises(UserError, match=r"refused the credentials \(401, security_exception"):
        load(corpus, tmp_path / "out", fake)
    monkeypatch.setenv("RLSYS_SEARCH_USER", "me")
    with pytest.raises(UserError, match="belong together"):
        load(corpus, tmp_path / "out", fake)
    monkeypatch.setenv("RLSYS_SEARCH_PASSWORD", "secret")
    assert load(corpus, tmp_path / "out", fake)
    assert "secret" not in (tmp_path / "out" / "manifest.json").read_text()
    monkeypatch.setenv("RLSYS_SEARCH_API_KEY", "key")
    with pytest.raises(UserError, match="are both set"):
        load(corpus, tmp_path / "out", fake)


@pytest.mark.parametrize("kind", REMOTE)
def test_an_api_key_is_for_elasticsearch(
    kind: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSYS_SEARCH_API_KEY", "a2V5")
    with running(FakeElastic(kind, VERSIONS[kind], authorization="ApiKey a2V5")) as fake:
        if kind == "elasticsearch":
            assert load(corpus, tmp_path / "out", fake)
        else:
            with pytest.raises(UserError, match="OpenSearch takes no API key"):
                load(corpus, tmp_path / "out", fake)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("wiki.example", "is not the URL of a server"),
        ("http://wiki.example", "is not the URL of a server"),
        ("http://wiki.example:port", "is not the URL of a server"),
        ("ftp://wiki.example:21", "is not the URL of a server"),
        ("https://me:secret@wiki.example:9200", "the URL of wiki.example holds credentials"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, reason: str, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        build_remote(corpus, tmp_path / "out", url, "wiki", patience=PATIENCE)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_server_that_is_not_there_is_named(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=f"{kind} at {url} gave no answer"):
        build_remote(corpus, tmp_path / "out", url, "wiki", kind, patience=PATIENCE)


def test_a_server_of_the_other_kind_or_version_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with (
        running(FakeElastic("opensearch", "3.2.0")) as opensearch,
        pytest.raises(UserError, match="is not elasticsearch"),
    ):
        build_remote(corpus, tmp_path / "out", opensearch.url, "wiki", "elasticsearch", patience=PATIENCE)
    with running(FakeElastic("elasticsearch", "8.19.0")) as old:
        with pytest.raises(UserError, match="is not opensearch"):
            build_remote(corpus, tmp_path / "out", old.url, "wiki", "opensearch", patience=PATIENCE)
        with pytest.raises(UserError, match=r"pip install 'elasticsearch<9'"):
            build_remote(corpus, tmp_path / "out", old.url, "wiki", "elasticsearch", patience=PATIENCE)
    with pytest.raises(UserError, match="engine 'solr' is unknown"):
        build_remote(corpus, tmp_path / "out", old.url, "wiki", "solr")


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [("elasticsearch", "elasticsearch", "elasticsearch"), ("opensearch", "opensearchpy", "opensearch-py")],
)
def test_a_missing_client_is_named(
    kind: str, module: str, package: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        build_remote(corpus, tmp_path / "out", "http://127.0.0.1:9200", "wiki", kind)


def test_a_manifest_that_is_not_whole_is_refused(fake: FakeElastic, corpus: Corpus, tmp_path: Path) -> None:
    load(corpus, tmp_path / "out", fake)
    path = tmp_path / "out" / "manifest.json"
    values = json.loads(path.read_text())
    for changed, reason in [
        ({**values, "kind": "bm25"}, "of kind 'bm25', not elasticsearch or opensearch"),
        ({key: values[key] for key in values if key != "url"}, "does not hold its keys"),
    ]:
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=reason):
            RemoteRetriever.open(tmp_path / "out")
