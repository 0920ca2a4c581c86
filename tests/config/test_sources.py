"""Tests of `task.sources`: composition, refusals by key and code, and what a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.compose import as_dict, differences, load_config
from rlsys.config.derived import heldout_files, task_of, train_files
from rlsys.config.schema import RunConfig
from rlsys.errors import Code
from rlsys.orchestrator.validate import find_problems, validate
from tests.support.refusals import refused

TinyRun = Callable[..., RunConfig]
CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"
NO_FILE = ("task.train_path=null", "task.eval_path=null")


@pytest.fixture
def mixed(tiny_run: TinyRun, tmp_path: Path) -> TinyRun:
    """Composes the tiny run with two sources and further overrides; `one` has held-out questions."""
    file = tmp_path / "questions.jsonl"
    sources = f"task.sources={{one: {{train_path: {file}, eval_path: {file}}}, two: {{train_path: {file}}}}}"
    return lambda *overrides: tiny_run(*NO_FILE, sources, *overrides)


def test_the_tiny_world_by_hops_composes() -> None:
    """Its files need not be here; all else is sound."""
    config = load_config("searchr1_tiny_cpu", ["task=tiny_world_by_hops"])
    assert [file.source for file in train_files(config.task)] == ["one_hop", "two_hops"]
    assert [file.source for file in heldout_files(config.task)] == ["one_hop", "two_hops"]
    keys = {file.key for file in (*train_files(config.task), *heldout_files(config.task))}
    assert {problem.key for problem in find_problems(config)} - keys <= {"search.index"}
    assert [task_of(config.task, name).max_turns for name in config.task.sources] == [2, 3]


def test_a_source_is_changed_by_one_key_and_has_what_it_does_not_name_from_the_task(mixed: TinyRun) -> None:
    own = f"task.sources.two={{tools: [{CALCULATOR}], max_turns: 1, max_total_tokens: 900, reward: {{my.term: 2}}}}"
    config = mixed("task.sources.two.weight=3", own, "search.enabled=true")
    one, two = (task_of(config.task, name) for name in ("one", "two"))
    assert one == config.task == task_of(config.task, "")
    assert (two.max_turns, two.max_total_tokens, two.max_turn_tokens) == (1, 900, config.task.max_turn_tokens)
    assert [tool.kind for tool in two.tools] == [CALCULATOR]
    assert config.task.sources["two"].weight == 3.0
    assert config.task.sources["two"].reward == {"my.term": 2.0}


def test_unknown_keys_of_sources_and_missing_files_are_refused(mixed: TinyRun) -> None:
    with refused("unknown", "task.sources.two.wait"):
        mixed("task.sources.two.wait=3")
    with refused("wrong_type", "task.sources.two.max_turns"):
        mixed("task.sources.two.max_turns=many")
    with refused("missing", "task.sources.three.train_path"):
        mixed("task.sources.three.weight=1")


SPOILT: dict[str, tuple[str, Code]] = {
    "task.train_path=a.jsonl": ("task.train_path", "conflict"),
    "task.eval_path=a.jsonl": ("task.eval_path", "conflict"),
    "task.sources.one.eval_path=null": ("task.sources", "missing"),
    "task.sources.two.train_path=none.jsonl": ("task.sources.two.train_path", "not_found"),
    "task.sources.two.weight=0": ("task.sources.two.weight", "out_of_range"),
    "task.sources.two.weight=-1": ("task.sources.two.weight", "out_of_range"),
    "task.sources.two.max_turns=9": ("task.sources.two.max_turns", "out_of_range"),
    "task.sources.two.max_total_tokens=9999": ("task.sources.two.max_total_tokens", "out_of_range"),
    "task.sources.two.max_total_tokens=99": ("task.sources.two.max_total_tokens", "conflict"),
    "task.sources.two.tools=[pages]": ("search.pages", "missing"),
    f"task.sources.two.tools=[{CALCULATOR}, {CALCULATOR}]": ("task.sources.two.tools", "conflict"),
    "task.sources.two={tools: [pages], search: false}|search.pages=pyproject.toml|task.agent.invalid_message=No.": (
        "task.sources.two.search",
        "conflict",
    ),
    "task.sources.two.search=false": ("task.agent.invalid_message", "conflict"),
    "task.sources.two.reward={no_term: 1}": ("task.sources.two.reward.no_term", "unknown"),
    "task.curriculum={easy_threshold: 0.3, hard_threshold: 0.3}": ("task.curriculum.hard_threshold", "conflict"),
    "task.curriculum.factor=0": ("task.curriculum.factor", "out_of_range"),
    "task.curriculum.window=0": ("task.curriculum.window", "out_of_range"),
    "checkpoint.may_differ=[task.source]": ("checkpoint.may_differ", "unknown"),
}


@pytest.mark.parametrize(("overrides", "found"), SPOILT.items(), ids=SPOILT)
def test_each_problem_is_refused_by_key_and_code(mixed: TinyRun, overrides: str, found: tuple[str, Code]) -> None:
    problems = [(problem.key, problem.code) for problem in find_problems(mixed(*overrides.split("|")))]
    assert problems == [found]


NO_SEARCH = ("search.enabled=false", "search.index=null", "task.agent.invalid_message=Answer.")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("task.sources.two.search=true", ("task.sources.two.search", "conflict")),
        ("task.sources.two.tools=[pages]", ("task.sources.two.tools", "conflict")),
    ],
)
def test_a_source_that_needs_search_is_refused_where_there_is_none(
    mixed: TinyRun, override: str, found: tuple[str, Code]
) -> None:
    validate(mixed(*NO_SEARCH))
    problems = [(problem.key, problem.code) for problem in find_problems(mixed(*NO_SEARCH, override))]
    assert problems == [found]


def test_one_file_and_no_file_are_told_apart(tiny_run: TinyRun, mixed: TinyRun) -> None:
    validate(mixed())
    validate(mixed(f"task.sources.two.tools=[{CALCULATOR}]", "task.curriculum.easy_threshold=0.9"))
    missing = [(problem.key, problem.code) for problem in find_problems(tiny_run(*NO_FILE))]
    assert missing == [("task.train_path", "missing"), ("task.eval_path", "missing")]
    alone = [(problem.key, problem.code) for problem in find_problems(tiny_run("task.curriculum.easy_threshold=0.9"))]
    assert alone == [("task.curriculum", "conflict")]
    name = "task.sources={1st: {train_path: pyproject.toml, eval_path: pyproject.toml}}"
    assert [(problem.key, problem.code) for problem in find_problems(tiny_run(*NO_FILE, name))] == [
        ("task.sources", "malformed")
    ]


def test_a_resumed_run_may_move_the_files_of_sources_and_change_nothing_else(mixed: TinyRun) -> None:
    before: dict[str, Any] = as_dict(mixed())
    moved = mixed("task.sources.one={train_path: elsewhere.jsonl, eval_path: null}")
    assert differences(before, moved) == []
    changed = mixed("task.sources.one.weight=2", "task.sources.two.max_turns=1", "task.curriculum.window=3")
    keys = {change.key for change in differences(before, changed)}
    assert keys == {"task.sources.one.weight", "task.sources.two.max_turns", "task.curriculum.window"}
