"""Tests of search backends from outside of rlsys, built and served by name: results, folders, and bad components."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.extend import search_backend as example
from rlsys.apps.cli.search import app
from rlsys.config.schema import SearchConfig
from rlsys.errors import Code, RunError
from rlsys.orchestrator.search_server import serving
from rlsys.orchestrator.validate import find_problems
from rlsys.search.client import SearchClient
from rlsys.search.corpus import Corpus
from rlsys.search.index.make import make_index, recipe
from rlsys.search.server.command import open_retriever, serve_index
from tests.extensions.search_toys import Letters
from tests.search.gated import in_process
from tests.support.composed import composed
from tests.support.refusals import refused

TOYS = "tests.extensions.search_toys"
KIND = f"{TOYS}.Letters"
WORDS = ["oak and ash", "beech", "a willow by the brook", "an elm", "quince, fig and plum", "yew", "larch; pine"]
QUERIES = ["which tree is by the water", "yes", "jazz", "plum"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"p{row}", "contents": f'"{words}"\n{words}'} for row, words in enumerate(WORDS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def built(corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """Builds an index of a toy with settings in text, and returns its folder."""

    def build(toy: str = "Letters", **settings: str) -> Path:
        kind = toy if "." in toy else f"{TOYS}.{toy}"
        assert make_index(kind, corpus, tmp_path / "index", recipe(kind, settings))
        return tmp_path / "index"

    return build


def reference(query: str, topk: int, scale: float) -> list[tuple[str, float]]:
    """Return the ids and scores of the best passages, by Python's sets."""
    shared = [scale * len({*filter(str.isalpha, query.lower())} & {*words}) for words in WORDS]
    best = sorted(range(len(WORDS)), key=lambda row: (-shared[row], row))[:topk]
    return [(f"p{row}", shared[row]) for row in best]


async def test_real_server_answers_with_the_backends_passages(built: Callable[..., Path]) -> None:
    retriever = open_retriever(built(scale="0.5"), KIND)
    async with in_process(retriever) as client:
        body = {"queries": QUERIES, "topk": 4, "return_scores": True}
        answer = (await client.post("/retrieve", json=body)).json()["result"]
        health = (await client.get("/health")).json()
    found = [[(hit["document"]["id"], hit["score"]) for hit in hits] for hits in answer]
    assert found == [reference(query, 4, 0.5) for query in QUERIES]
    assert (health["kind"], health["passages"]) == (KIND, len(WORDS))
    assert health["settings"] == {"scale": 0.5, "measure": "shared"}
    before = Letters.closed
    retriever.close()
    assert Letters.closed == before + 1


def test_index_folder_records_the_settings_and_is_built_once(
    built: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    folder = built(measure="jaccard")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["kind"] == KIND
    assert manifest["settings"] == {"scale": 1.0, "measure": "jaccard"}
    assert manifest["corpus_sha256"] == Corpus.open(corpus).checksum
    (hits,) = open_retriever(folder, KIND).find(["yew"], 1)
    assert (hits[0].document["id"], hits[0].score) == ("p5", 1.0)
    for settings, again in (({"measure": "jaccard"}, False), ({"scale": 2}, True)):
        assert make_index(KIND, corpus, tmp_path / "index", recipe(KIND, settings)) is again
    with refused("exists"):
        make_index("bm25", corpus, folder, replace=False)


def test_kind_that_nothing_knows_is_refused(built: Callable[..., Path], corpus: Path) -> None:
    folder = built()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": "sparse"}))
    with refused("unsupported", folder):
        open_retriever(folder)
    with refused("unknown", "kind"):
        make_index("sparse", corpus, folder, recipe("sparse", {}))


async def test_run_serves_the_index_by_config_alone(built: Callable[..., Path], tmp_path: Path) -> None:
    config = SearchConfig(index=str(built()), index_kind=KIND, topk=2)
    with serving(config, 1, tmp_path) as search:
        search.wait_healthy()
        async with SearchClient(search.search.url or "", topk=2) as client:
            found = await client.search("plum")
    assert [passage.id for passage in found.passages] == [one for one, _ in reference("plum", 2, 1.0)]


def test_folder_is_opened_only_with_the_kind_that_the_user_names(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder names any module; its code must not run. `planted` would leave a file behind."""
    folder, ran = built(), tmp_path / "ran"
    (tmp_path / "planted.py").write_text(f"open({str(ran)!r}, 'w'); from {TOYS} import Letters as Thing")
    monkeypatch.syspath_prepend(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": "planted.Thing"}))
    with refused("unsafe", folder):
        open_retriever(folder)
    for named in (KIND, "dense", "planted.Other"):
        with refused("mismatch", folder):
            open_retriever(folder, named)
    with refused("unsafe", folder):
        serve_index([str(folder), "--port", "0"])
    with serving(SearchConfig(index=str(folder)), 1, tmp_path) as search, pytest.raises(RunError):
        search.wait_healthy()
    assert "planted" not in sys.modules
    assert not ran.exists()
    open_retriever(folder, "planted.Thing").close()
    assert ran.exists()


def test_index_of_a_run_is_checked_before_the_start(
    built: Callable[..., Path],
) -> None:
    folder = built(scale="0.5")

    def problems(*overrides: str) -> set[tuple[str, Code]]:
        config = composed(f"search.index={folder}", *overrides)
        return {(one.key, one.code) for one in find_problems(config) if one.key.startswith("search")}

    named = f"search.index_kind={KIND}"
    assert problems(named) == set()
    assert problems() == {("search.index", "unsafe")}
    assert problems("search.url=http://there:8000") == set(), "another machine has the index"
    assert problems("search.index_kind=no_such.Thing") == {("search.index_kind", "mismatch")}
    manifest = json.loads((folder / "manifest.json").read_text())
    spoilt: dict[Code, Any] = {"out_of_range": {"scale": -1}, "malformed": 3, "unknown": {"size": 1}}
    for code, settings in spoilt.items():
        (folder / "manifest.json").write_text(json.dumps(manifest | {"settings": settings}))
        assert problems(named) == {("search.index_kind", code)}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": "no_such.Thing"}))
    assert problems("search.index_kind=no_such.Thing") == {("search.index_kind", "user_code")}
    (folder / "manifest.json").write_text("{}")
    assert problems() == {("search.index", "unsupported")}


@pytest.mark.parametrize(
    ("toy", "settings", "code", "key"),
    [
        ("Letters", {"scale": "0"}, "out_of_range", "scale"),
        ("Letters", {"scale": "nan"}, "wrong_type", "scale"),
        ("Letters", {"measure": "cosine"}, "wrong_type", "measure"),
        ("Answers", {}, "missing", "answer"),
        ("WithoutSearch", {}, "user_code", "kind"),
        ("SearchWithoutTopk", {}, "user_code", "kind"),
        ("FailsToBuild", {}, "user_code", "kind"),
        ("ExitsInBuild", {}, "user_code", "kind"),
        ("FailsToOpen", {}, "user_code", "kind"),
        ("ForgetsPassages", {}, "mismatch", "kind"),
    ],
)
def test_component_that_is_no_backend_is_refused_and_leaves_no_index(
    built: Callable[..., Path], tmp_path: Path, toy: str, settings: dict[str, str], code: Code, key: str
) -> None:
    with refused(code, key) as caught:
        built(toy, **settings)
    assert toy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    "answer",
    [
        *("[[9, 1.0]]", "[[-1, 1.0]]", "[[0.5, 1.0]]", '["a"]', "[[0, NaN]]", '[[0, "high"]]', "[[0, 1.0], [0, 0.5]]"),
        *("[[0, 1.0], [1, 2.0]]", "[[0, 1], [1, 1], [2, 1], [3, 1], [4, 1]]", "7", "null"),
    ],
)
async def test_wrong_result_is_an_error_that_names_the_backend(built: Callable[..., Path], answer: str) -> None:
    """The server refuses the search, and stays."""
    retriever = open_retriever(built("Answers", answer=answer), f"{TOYS}.Answers")
    with pytest.raises(RunError, match="Answers"):
        retriever.find(["a"], 4)
    async with in_process(retriever) as client:
        assert (await client.post("/retrieve", json={"queries": ["a"], "topk": 4})).status_code >= 500
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("toy", ["AnswersOnce", "FailsToSearch", "ExitsInSearch"])
def test_failing_search_is_an_error_that_names_the_backend(built: Callable[..., Path], toy: str) -> None:
    with pytest.raises(RunError, match=toy):
        open_retriever(built(toy), f"{TOYS}.{toy}").find(["a", "b"], 2)


def test_example_works_once_it_is_copied(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(example.__file__, tmp_path / "copied_backend.py")
    monkeypatch.syspath_prepend(tmp_path)
    kind, out = "copied_backend.HashedWords", tmp_path / "mine"
    command = ["index", str(corpus), str(out), "--kind", kind]
    assert CliRunner().invoke(app, [*command, "--set", "dimension=4096"]).exit_code == 0
    (hits,) = open_retriever(out, kind).find(["a willow, or an elm"], 2)
    assert {hit.document["id"] for hit in hits} == {"p2", "p3"}
    spoilt: dict[Code, str] = {"out_of_range": "dimension=0", "malformed": "dimension"}
    for code, wrong in spoilt.items():
        with refused(code):
            CliRunner().invoke(app, [*command, "--set", wrong], catch_exceptions=False)
    with refused("conflict", "--set"):
        CliRunner().invoke(app, [*command[:3], "--kind", "bm25", "--set", "k1=1"], catch_exceptions=False)
