"""`rlsys eval` from the command line: its flags are the config's keys, and it takes away only what it has made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlsys.apps.cli import evaluate
from rlsys.errors import UserError
from tests.support.tiny_models import POLICY

Eval = Callable[..., UserError]


@pytest.fixture
def problem(tmp_path: Path) -> Eval:
    """The error of an evaluation without searches, whose question stands only in a prompt."""
    app = typer.Typer()
    app.command()(evaluate.command)
    row = {"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": {"target": ["I"]}}}
    (tmp_path / "own.jsonl").write_text(json.dumps({"data_source": "own", **row}) + "\n")
    data = ("--data", tmp_path / "own.jsonl", f"output_dir={tmp_path}")

    def run(*arguments: object) -> UserError:
        flags = ["-c", "searchr1_tiny_cpu", "--baseline", "direct", "--model", POLICY, *data, *arguments]
        outcome = CliRunner().invoke(app, [str(one) for one in flags])
        assert isinstance(outcome.exception, UserError), outcome.output
        return outcome.exception

    return run


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--samples", "0"), "eval.samples"),
        (("--samples", "3", "eval.samples=1"), "eval.samples"),
        (("--temperature", "1", "compat.sampled_validation=true"), "eval.temperature"),
    ],
)
def test_a_flag_is_held_to_the_rules_of_its_key(problem: Eval, flags: tuple[str, ...], key: str) -> None:
    assert problem(*flags).key == key


def test_after_a_failure_only_a_folder_that_was_made_here_goes(problem: Eval, tmp_path: Path) -> None:
    mine, made = tmp_path / "mine", tmp_path / "made"
    mine.mkdir()
    for out in (mine, made):
        assert problem("--out", out).key == "--baseline"
    assert mine.is_dir()
    assert not made.exists()
    before = set(tmp_path.iterdir())
    problem()
    assert set(tmp_path.iterdir()) == before


def test_results_that_are_there_and_a_file_are_not_written_over(problem: Eval, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    for out, code in ((tmp_path / "own.jsonl", "denied"), (tmp_path, "exists")):
        refusal = problem("--out", out)
        assert (refusal.code, refusal.key) == (code, "--out")
    assert (tmp_path / "results.json").read_text() == "{}"
