"""Progress of groups that are not returned yet, wherever they are."""

from __future__ import annotations

import asyncio

from rlsys.orchestrator.engine_pool import IN_FLIGHT_TIMEOUT_S
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.groups.engines import SAMPLES, Engines, make, settle, taking
from tests.support.trajectories import question, trajectory
from tests.support.virtual_time import now, virtually


def ended(number: int, *samples: int) -> tuple[EpisodeProgress, ...]:
    return tuple(trajectory(uid=f"q:{number}", sample=sample) for sample in samples)


def what(begun: dict[int, tuple[EpisodeProgress, ...]]) -> dict[int, list[tuple[str, int]]]:
    """By prompt group: question and sample of each episode."""
    return {prompt_group: [(one.question_uid, one.sample) for one in found] for prompt_group, found in begun.items()}


@virtually
async def test_engines_tell_of_what_runs_and_what_waits_keeps_what_it_had() -> None:
    engines = Engines(1, taking(run_group=10))
    group, _ = make(engines, slots=2 * SAMPLES)
    given = {0: (), 1: ended(1, 2), 2: ended(2, 1, 3), 3: ()}
    asked = [
        asyncio.ensure_future(group.run_group(question(number), 70 + number, begun)) for number, begun in given.items()
    ]
    evaluation = asyncio.ensure_future(group.answer(question(9)))
    await asyncio.sleep(1)
    assert what(await group.in_flight()) == {
        70: [("q:0", 0)],
        71: [("q:1", 0), ("q:1", 2)],
        72: [("q:2", 1), ("q:2", 3)],  # in line
    }
    await asyncio.sleep(10)
    assert what(await group.in_flight()) == {
        72: [("q:2", 0), ("q:2", 1), ("q:2", 3)],
        73: [("q:3", 0)],
    }
    await asyncio.gather(*asked, evaluation)
    assert await group.in_flight() == {}


@virtually
async def test_an_engine_that_dies_or_does_not_answer_costs_only_what_was_begun_on_it() -> None:
    engines = Engines(3, taking(run_group=200))
    group, _ = make(engines)
    asked = [asyncio.ensure_future(group.run_group(question(number), number, ended(number, 3))) for number in range(3)]
    await settle()
    engines.die(0)
    engines.ranks[2].silent = True
    found = what(await group.in_flight())
    # Engine 0's group has moved to engine 1 meanwhile, which was asked before.
    assert found == {0: [("q:0", 3)], 1: [("q:1", 0), ("q:1", 3)], 2: [("q:2", 3)]}
    assert now() == IN_FLIGHT_TIMEOUT_S
    given = [begun for worker in engines.ranks for key, begun in worker.begun.items() if key.startswith("q:0")]
    assert [[one.sample for one in begun] for begun in given] == [[3], [3]], "the second engine is given the same"
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)
