"""Tests of schedules from outside of rlsys, used by config alone: the real scheduler, pipeline and learner's loop."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.extend import schedule as example
from rlsys.config.derived import max_staleness, max_wait, on_update
from rlsys.config.schema import OnUpdate
from rlsys.errors import Code, UserError
from rlsys.orchestrator.pipeline.training_step import make_scheduler
from rlsys.orchestrator.validate import find_problems
from tests.extensions.scheduled_run import KEY, PROMPTS, STEPS, assert_named, config_of, run
from tests.support.refusals import refused

TOYS = "tests.extensions.schedule_toys"
DEMO_FILES = {"model.path", "search.index", "task.train_path", "task.eval_path"}
"""Keys of files that only a machine with the demo has."""


def test_schedule_named_in_the_config_decides_within_the_bounds() -> None:
    together, alone = run(config_of(f"{TOYS}.InPairs"))[0], run(config_of(f"{TOYS}.InPairs", TOGETHER))[0]
    built_in = run(config_of("async"))[0]
    assert (alone.most_running, together.most_running, built_in.most_running) == (1, 2, 4)
    assert built_in.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    numbers = [number for step in together.trained for number in step]
    assert len(numbers) == len({*numbers}) == STEPS * PROMPTS
    assert numbers != sorted(numbers), "later admissions go first"


TOGETHER = "trainer.schedule.together=1"


def test_bounds_of_a_schedule_are_keys_of_the_config() -> None:
    config = config_of(f"{TOYS}.InPairs", "trainer.schedule.max_staleness=3", "trainer.schedule.max_wait=2")
    assert (max_staleness(config), max_wait(config), on_update(config)) == (3, 2, OnUpdate.finish)
    assert make_scheduler(config).max_staleness == 3


@pytest.mark.parametrize("kind", ["Never", "RefusesLater", "Fails"])
def test_bad_choice_ends_the_run_with_a_sentence_that_names_the_schedule(kind: str) -> None:
    assert_named(f"{TOYS}.{kind}")


SPOILT: dict[str, tuple[Code, str]] = {
    f"{TOYS}.WithoutPriority": ("user_code", KEY),
    f"{TOYS}.WithoutView": ("user_code", KEY),
    f"{TOYS}.CannotBegin": ("user_code", KEY),
    f"{TOYS}.NOT_A_CLASS": ("user_code", KEY),
    f"{TOYS}.StalenessInWords": ("out_of_range", "trainer.schedule.max_staleness"),
    f"{TOYS}.UpdateInWords": ("wrong_type", "trainer.schedule.on_update"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_component_that_is_no_schedule_is_refused_before_anything_starts(kind: str) -> None:
    try:
        problem: Any = next(find_problems(config_of(kind)))
    except UserError as error:
        problem = error
    assert (problem.code, problem.key) == SPOILT[kind]
    assert getattr(problem, "sentence", str(problem)).count(KEY) <= 1, "one sentence is not part of another"


def test_bounds_that_contradict_are_refused() -> None:
    wait = "trainer.schedule.max_wait"
    for kind in (f"{TOYS}.InPairs", "bounded_wait"):
        bounds = ("trainer.schedule.max_staleness=2", f"{wait}=2")
        assert (wait, "conflict") in {(one.key, one.code) for one in find_problems(config_of(kind, *bounds))}
    with refused("out_of_range", "trainer.schedule.max_staleness"):
        max_staleness(config_of(f"{TOYS}.InPairs", "trainer.schedule.max_staleness=-1"))
    colocated = find_problems(config_of(f"{TOYS}.InPairs", "cluster=one_slot"))
    assert (KEY, "conflict") in {(one.key, one.code) for one in colocated}


def test_episodes_continue_across_an_update_of_a_schedule_without_the_parameter() -> None:
    assert on_update(config_of(f"{TOYS}.WithoutUpdate")) is OnUpdate["continue"]


def test_example_works_once_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(example.__file__, tmp_path / "copied_schedule.py")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of("copied_schedule.NewestFirst", "trainer.schedule.most_ready=8")
    assert max_staleness(config) == 2
    assert {one.key for one in find_problems(config)} <= DEMO_FILES
    newest, oldest = run(config)[0], run(config_of("async", "trainer.schedule.max_staleness=2"))[0]
    assert newest.trained != oldest.trained
    with refused("out_of_range", "trainer.schedule.most_ready"):
        config_of("copied_schedule.NewestFirst", "trainer.schedule.most_ready=0")
