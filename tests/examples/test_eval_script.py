"""The evaluation script, run as a user runs it: from elsewhere, in paths with spaces, with everything wrong at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.paths import PROJECT

SCRIPT = PROJECT / "examples" / "searchr1" / "run_main_searchr1_single_eval.sh"
POLICY = PROJECT / "examples" / "searchr1" / "tiny" / "policy"
DEAD = "http://127.0.0.1:9"


def run(*arguments: str | Path, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env=kept | {"PYTHON": python, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def write_questions(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"Where is {name}?", "golden_answers": ["Mali"]} for name in ("Bamako", "Gao")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_help_says_how_it_is_used(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run_main_searchr1_single_eval.sh [CONFIG]" in done.stdout
    assert "--baseline" in done.stdout


def test_help_needs_no_environment_and_no_bash(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), "--help"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "run_main_searchr1_single_eval.sh [CONFIG]" in done.stdout
    assert done.stderr.startswith("PYTHON=/bin/false lacks what rlsys needs")


def test_all_that_is_missing_is_said_in_one_go(tmp_path: Path) -> None:
    done = run(
        "searchr1_tiny_cpu",
        "--data",
        "nq",
        "popqa",
        "--data-dir",
        "none",
        "--model",
        "no model",
        f"search.url={DEAD}",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    data, model, search = done.stderr.splitlines()
    assert "`rlsys data prepare nq --out none && rlsys data prepare popqa --out none`" in data
    assert model.startswith("--model no model is not a folder")
    assert search.startswith(f"the search server at search.url={DEAD} does not answer")


def test_a_dead_server_alone_is_a_failed_run(tmp_path: Path) -> None:
    write_questions(tmp_path / "own.jsonl")
    done = run("searchr1_tiny_cpu", "--data", "own.jsonl", "--model", POLICY, f"search.url={DEAD}", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nope",), "--config-name nope: there is no"),
        (("folder/nope.yaml",), "folder/nope.yaml does not exist"),
        (("searchr1_tiny_cpu", "trainer.stepz=1"), "trainer.stepz is not a key"),
        (
            ("searchr1_tiny_cpu", "--baseline", "best"),
            "--baseline best is not known: give one of none, direct",
        ),
        (("searchr1_tiny_cpu", "nq"), '"nq" is not a setting'),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert named in line


def test_an_interpreter_without_rlsys_is_named(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, python=str(tmp_path / "no python"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"PYTHON={tmp_path / 'no python'} lacks what rlsys needs")


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
    with tiny.search_server() as server:
        done = run(
            *(
                "./mine.yaml",
                "--engine",
                "transformers",
                "--model",
                POLICY,
                "--limit",
                "2",
                "--out",
                "my out",
            ),
            *(
                f"search.url={server.url}",
                "--data-dir",
                "sets",
                "--data",
                "own questions.jsonl",
                "nq",
                "popqa",
            ),
            *("task.max_total_tokens=2048", "task.max_prompt_tokens=1024"),
            cwd=here,
        )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("NQ", "PopQA"))] == [
        ["NQ", "2"],
        ["PopQA", "2"],
    ]
    results = json.loads((here / "my out" / "results.json").read_text())
    assert list(results["sets"]) == [str(here / "own questions.jsonl"), "nq", "popqa"]
    assert results["settings"]["config"]["name"] == "mine"
    assert len((here / "my out" / "answers.jsonl").read_text().splitlines()) == 6
    again = run(
        "./mine.yaml",
        "--model",
        POLICY,
        "--baseline",
        "direct",
        "--data",
        "own questions.jsonl",
        "--out",
        "my out",
        cwd=here,
    )
    assert again.returncode == 2
    assert "holds the results of an evaluation already" in again.stderr
