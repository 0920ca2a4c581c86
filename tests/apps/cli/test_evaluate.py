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
from tests.support.paths import PROJECT

POLICY = PROJECT / "examples" / "searchr1" / "tiny" / "policy"
Eval = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path) -> Eval:
    """What an evaluation without searches is refused for."""
    app = typer.Typer()
    app.command()(evaluate.command)
    # A question that is only in a prompt, which a baseline cannot ask.
    row = {
        "prompt": [{"role": "user", "content": "Who?"}],
        "reward_model": {"ground_truth": {"target": ["I"]}},
    }
    (tmp_path / "own.jsonl").write_text(json.dumps({"data_source": "own", **row}) + "\n")

    def run(*arguments: object, model: Path = POLICY) -> str:
        flags = [
            "-c",
            "searchr1_tiny_cpu",
            "--data",
            tmp_path / "own.jsonl",
            "--baseline",
            "direct",
            "--model",
            model,
        ]
        outcome = CliRunner().invoke(app, [str(one) for one in (*flags, f"output_dir={tmp_path}", *arguments)])
        assert isinstance(outcome.exception, UserError), outcome.output
        return str(outcome.exception)

    return run


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--samples", "0"), "eval.samples=0 must be at least 1."),
        (("--samples", "3"), "eval.samples=3 greedy answers would all be the same"),
        (("--temperature", "-1"), "eval.temperature=-1.0 must not be negative."),
        (("--samples", "3", "eval.samples=1"), "eval.samples=3 greedy"),
        (("--temperature", "1", "compat.sampled_validation=true"), "eval.temperature=1 contradicts"),
    ],
)
def test_a_flag_is_held_to_the_rules_of_its_key(refused: Eval, flags: tuple[str, ...], sentence: str) -> None:
    assert refused(*flags).startswith(sentence)


def test_after_a_failure_only_a_folder_that_was_made_here_goes(refused: Eval, tmp_path: Path) -> None:
    mine, made = tmp_path / "mine", tmp_path / "made"
    mine.mkdir()
    for out in (mine, made):
        assert "has its text only inside a prompt" in refused("--out", out)
    assert mine.is_dir()
    assert not made.exists()
    before = set(tmp_path.iterdir())
    refused()
    assert set(tmp_path.iterdir()) == before


def test_a_file_is_no_folder_to_write_to(refused: Eval, tmp_path: Path) -> None:
    assert refused("--out", tmp_path / "own.jsonl").endswith("(File exists): give another folder.")
