"""Tests of evaluations during a run, on a real engine pool with scripted engines: deaths, lost answers, late engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now
from rlsys.config.schema import EvalConfig, RunConfig
from rlsys.orchestrator.evaluation.heldout import Evaluation
from rlsys.orchestrator.evaluator import ATTEMPTS, Evaluator
from rlsys.orchestrator.membership import NoEngineLeft
from tests.orchestrator.groups.engines import NEVER, Engines, make, taking
from tests.support.scheduled import NoSearch
from tests.support.trajectories import question
from tests.support.virtual_time import virtually

QUESTIONS = [question(number) for number in range(4)]
EVALUATION_S = 60.0


def evaluator(engines: Engines) -> tuple[Evaluator, list[Evaluation]]:
    """Return an evaluator with a pool of `engines`, and the evaluations that it records."""
    recorded: list[Evaluation] = []
    log: Any = SimpleNamespace(evaluation=recorded.append)
    config = RunConfig(eval=EvalConfig(engines=1))
    pool, _ = make(engines)
    return Evaluator(config, log, NoSearch(), pool, QUESTIONS, lambda _: None, set()), recorded  # type: ignore[arg-type]


@pytest.mark.parametrize("dies", [False, True])
@virtually
async def test_evaluation_on_all_engines_waits_for_the_one_that_is_set_aside(dies: bool) -> None:
    engines = Engines(2, taking(answer=EVALUATION_S))
    one, recorded = evaluator(engines)
    async with asyncio.TaskGroup() as background:
        await one.evaluate_aside(1, background)
        (idle,) = {0, 1} - one._engines.engines.members.aside
        if dies:
            engines.die(idle)
            await one._engines.load_bucket(0)  # The pool notices the death.
            assert one._engines.capacity == 0
        await one.evaluate(2)
    assert [evaluation.step for evaluation in recorded] == [1, 2]
    assert now() == 2 * EVALUATION_S


@pytest.mark.parametrize("losses", [ATTEMPTS - 1, ATTEMPTS])
@virtually
async def test_lost_answer_is_asked_for_again_before_the_evaluation_is_cancelled(losses: int) -> None:
    asked = 0

    def seconds(method: str, args: tuple[Any, ...]) -> float:
        nonlocal asked
        if method != "answer" or args[0].uid != QUESTIONS[2].uid:
            return 1.0
        asked += 1
        return NEVER if asked <= losses else 1.0

    for aside in (False, True):
        asked = 0
        one, recorded = evaluator(Engines(3, seconds))
        async with asyncio.TaskGroup() as background:
            await (one.evaluate_aside(5, background) if aside else one.evaluate(5))
        assert asked == ATTEMPTS
        assert [len(found.answered) for found in recorded] == ([] if losses == ATTEMPTS else [len(QUESTIONS)])
        assert one._engines.capacity == 3 * (8 // 4), "all engines roll out again"


@virtually
async def test_evaluation_without_a_living_engine_ends_the_run() -> None:
    engines = Engines(1)
    one, _ = evaluator(engines)
    engines.die(0)
    with pytest.raises(ExceptionGroup) as found:
        await one.evaluate(1)
    assert isinstance(found.value.exceptions[0], NoEngineLeft)
