"""`rlsys doctor --for CONFIG`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.searchr1.tiny.demo import prepare_world
from rlsys.apps.cli.main import app
from rlsys.errors import UserError


def test_the_tiny_run_can_run_here_and_not_without_its_questions(tmp_path: Path) -> None:
    prepare_world(Console(quiet=True))
    words = ["doctor", "--for", "searchr1_tiny_cpu", "--json", f"output_dir={tmp_path}"]
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.stdout
    assert json.loads(good.stdout)["right"]
    bad = CliRunner().invoke(app, [*words, "task.eval_path=none.jsonl", "cluster.nodes=0"])
    assert bad.exit_code == 2
    wrong = [one["what"] for one in json.loads(bad.stdout)["findings"] if one["state"] == "wrong"]
    assert wrong == ["cluster.nodes", "task.eval_path"]
    assert list(tmp_path.iterdir()) == [], "nothing is begun"


@pytest.mark.parametrize("words", [["--json"], ["--launched"], ["--for", "searchr1_tiny_cpu", "--strict"]])
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | UserError)
