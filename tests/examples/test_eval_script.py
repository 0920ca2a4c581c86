"""The evaluation script, run as a user runs it: from elsewhere, and in paths with spaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.paths import PROJECT
from tests.support.tiny_models import POLICY

SCRIPT = PROJECT / "examples" / "searchr1" / "run_main_searchr1_single_eval.sh"
DEAD = "http://127.0.0.1:9"


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env=kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def write_questions(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"Where is {name}?", "golden_answers": ["Mali"]} for name in ("Bamako", "Gao")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_help_needs_no_environment_and_no_bash(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), "--help"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "run_main_searchr1_single_eval.sh [CONFIG]" in done.stdout
    assert done.stderr.startswith("PYTHON=/bin/false")


def test_every_missing_thing_is_named_at_once(tmp_path: Path) -> None:
    flags = ("--data", "nq", "popqa", "--data-dir", "none", "--model", "no model", f"search.url={DEAD}")
    done = run("searchr1_tiny_cpu", *flags, cwd=tmp_path)
    assert done.returncode == 2
    data, model, search = done.stderr.splitlines()
    assert "`rlsys data prepare nq --out none && rlsys data prepare popqa --out none`" in data
    assert model.startswith("--model no model")
    assert DEAD in search
    assert search.endswith("[not_found]")


@pytest.mark.slow
def test_it_evaluates_from_anywhere_with_a_config_of_ones_own(tmp_path: Path) -> None:
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
    with tiny.search_server() as server:
        where = ("--model", POLICY, "--out", "my out", f"search.url={server.url}")
        done = run("./mine.yaml", *where, *data, *flags.split(), cwd=here)
    assert done.returncode == 0, done.stderr
    shown = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("NQ", "PopQA"))]
    assert shown == [["NQ", "2"], ["PopQA", "2"]]
    results = json.loads((here / "my out" / "results.json").read_text())
    assert list(results["sets"]) == [str(here / "own questions.jsonl"), "nq", "popqa"]
    assert results["settings"]["config"]["name"] == "mine"
    assert len((here / "my out" / "answers.jsonl").read_text().splitlines()) == 6
