"""Held-out questions and their scores, with and without the quirks of Search-R1's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config.schema import CompatConfig, RunConfig, TaskConfig
from rlsys.errors import UserError
from rlsys.orchestrator.evaluation.heldout import heldout_questions, heldout_score
from tests.support.written_episodes import episode, question, task_of


def config(path: Path, **compat: object) -> RunConfig:
    return RunConfig(task=TaskConfig(eval_path=str(path)), compat=CompatConfig(**compat))  # type: ignore[arg-type]


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"Q{number}?"}], "reward_model": {"ground_truth": {"target": ["a"]}}}
        for number in range(7)
    ]
    file = tmp_path / "heldout.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_all_questions_are_asked(seven: Path) -> None:
    assert len(heldout_questions(config(seven))) == 7


@pytest.mark.parametrize(("batch", "asked"), [(1, 7), (2, 6), (7, 7)])
def test_the_rest_after_the_last_whole_batch_is_left_out(seven: Path, batch: int, asked: int) -> None:
    assert len(heldout_questions(config(seven, validation_batch=batch))) == asked


def test_a_batch_that_leaves_nothing_is_refused(seven: Path) -> None:
    with pytest.raises(UserError, match="validation_batch"):
        heldout_questions(config(seven, validation_batch=8))


@pytest.mark.parametrize(
    ("written", "gold", "plain", "quirky"),
    [
        ("<answer>Bamako</answer>", "Bamako", 1.0, 1.0),
        ("I do not know.", "Beijing", 0.0, 1.0),
        ("<answer>Bamako</answer>", "Beijing", 0.0, 0.0),
    ],
)
def test_the_prompts_example_counts_only_under_the_quirk(
    seven: Path, written: str, gold: str, plain: float, quirky: float
) -> None:
    """An episode without an answer has "given" the prompt's example where the whole text is read."""
    prompt = "put it between <answer> and </answer>, like <answer> Beijing </answer>. Question: ...?"
    asked, done = question(gold, prompt=prompt), episode(written, task=task_of(max_turns=0))
    assert heldout_score(config(seven))(done, asked).em == plain
    assert heldout_score(config(seven, answer_over_prompt=True))(done, asked).em == quirky


def test_an_answer_after_a_call_of_a_tool_counts(seven: Path) -> None:
    asked = config(seven)
    asked.task.tools = ["rlsys.rollout.tools.calculator.Calculator"]
    given = episode(("<calculator>3 + 4</calculator>", "7"), "<answer>7</answer>", tools={"calculator": "calculator"})
    assert heldout_score(asked)(given, question("7")).em == 1.0
