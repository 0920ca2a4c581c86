"""Runs that are killed and resumed: over seeded interleavings, and worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Trajectory
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState, RolloutPipeline
from rlsys.orchestrator.pipeline.scheduler import PromptGroupState, Reason, SchedulerState, StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.orchestrator.pipeline.bare import Bare
from tests.orchestrator.pipeline.planted import PLANTED_IN_RESUMING
from tests.orchestrator.pipeline.simulation import Parts, Simulation, State, breach_of, simulate_lives
from tests.orchestrator.pipeline.watched import Property
from tests.support.trajectories import question, rewarded, same, trajectory
from tests.support.virtual_time import run_virtually

SEEDS, THROUGH_A_FILE = 250, 5
"""Seeds of a block, of which the first is always run; every fifth state goes through a file."""


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 8))])
def test_every_property_holds_over_all_lives_of_a_run(block: int, tmp_path: Path) -> None:
    """On a failure, `simulate_lives(seed)` is the run again. `python -m bench.interleavings` takes more seeds."""

    def through_a_file(state: State) -> State:
        save_values(tmp_path / "state.npz", state)
        return load_values(tmp_path / "state.npz", State)

    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        try:
            if seed % THROUGH_A_FILE:
                simulate_lives(seed)
            else:
                simulate_lives(seed, through=through_a_file)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(("broken", "parts"), PLANTED_IN_RESUMING.values(), ids=PLANTED_IN_RESUMING)
def test_a_bug_planted_on_purpose_is_found_out(broken: Property, parts: Parts) -> None:
    """The property is seen to be broken within 1,000 seeds."""
    assert broken in (breach_of(simulate_lives, seed, parts) for seed in range(1000))


def test_the_state_of_what_has_resumed_a_state_is_that_state(tmp_path: Path) -> None:
    """Also after it went through a file. What is saved has something of everything."""
    seen: set[str] = set()
    for seed in range(60):
        for life in simulate_lives(seed)[:-1]:
            assert life.saved is not None
            state = life.saved.state
            save_values(tmp_path / "state.npz", state)
            loaded = load_values(tmp_path / "state.npz", State)
            assert same(loaded, state)
            assert same(Simulation(life.script, Parts(), replace(life.saved, state=loaded)).state(), state)
            found = {
                **{name: getattr(state.pipeline, name) for name in ("losses", "begun", "rolled", "scored")},
                **{name: getattr(state.pipeline.scheduler, name) for name in ("rolling", "ready", "replaced")},
                "given_back": state.prompts.given_back,
            }
            seen |= {name for name, value in found.items() if value}
    assert seen == {"losses", "begun", "rolled", "scored", "rolling", "ready", "replaced", "given_back"}


class Slow(Bare):
    """Groups take as long as a test says; what is asked of the engines is written down."""

    capacity = 9

    def __init__(self, roll_s: dict[int, float]) -> None:
        self.roll_s = roll_s
        self.asked: list[tuple[int, tuple[EpisodeProgress, ...]]] = []

    async def run_group(
        self, asked: Question, prompt_group: int, begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        self.asked.append((prompt_group, tuple(begun)))
        await asyncio.sleep(self.roll_s.get(prompt_group, 0))
        return [trajectory(uid=asked.uid, version=self.version, sample=prompt_group)]


def one_of(uid: str, prompt_group: int) -> Trajectory:
    """An episode of which an engine has told."""
    return trajectory((7, 8, 9), uid=uid, sample=prompt_group)


def resumed(**prompt_groups: Any) -> PipelineState:
    """A run of some steps, now at version 3, with 9 prompt groups so far."""
    books = {"rolling": (), "ready": (), "dropped": {}} | prompt_groups.pop("scheduler", {})
    scheduler = SchedulerState(version=3, published=3, admitted=9, replaced=0, **books)
    return PipelineState(scheduler, **{"losses": {}, "begun": {}, "rolled": {}, "scored": {}} | prompt_groups)


def of(number: int, oldest: int = 3) -> PromptGroupState:
    """A prompt group that is saved."""
    return PromptGroupState(number, question(number), oldest)


def group(number: int, version: int = 3) -> Group:
    """A group of that prompt_group."""
    return Group(question(number), (rewarded(trajectory(version=version), 0.0),))


def test_groups_under_way_go_on_before_anything_new() -> None:
    """Prompt groups 5 and 8 roll, 5 with an episode; 6 waits for its scores, 4 can be taken. Places are four, and one to spare."""
    state = resumed(
        scheduler={"rolling": (of(5), of(8)), "ready": (of(4), of(6))},
        begun={5: (one_of("q:5", 5),)},
        rolled={6: group(6)},
        scored={4: group(4)},
    )
    workers = Slow({5: 1, 8: 1, 9: 1})
    workers.version = 3
    scheduler = StalenessScheduler(groups_per_step=4, max_staleness=0, oversample=1.25)

    async def live(pipeline: RolloutPipeline) -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            groups, _ = await learn(pipeline, {"actor": workers}, workers, MiniBatches([4]))
            pipeline.stop()
        return [one.question.uid for one in groups]

    assert run_virtually(live(workers.pipeline(scheduler, state)[0])) == ["q:4", "q:6", "q:5", "q:8"]
    assert [(prompt_group, len(begun)) for prompt_group, begun in workers.asked] == [(5, 1), (8, 0), (9, 0)]
    assert (scheduler.version, [*scheduler.dropped]) == (4, [Reason.surplus])


def test_the_oldest_scored_group_is_taken_first() -> None:
    """Also where a newer one was scored before it."""
    state = resumed(scheduler={"ready": (of(6), of(5, oldest=2))}, rolled={6: group(6), 5: group(5, version=2)})
    pipeline, _ = Bare().pipeline(StalenessScheduler(groups_per_step=1, max_staleness=1), state)

    async def live() -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await asyncio.sleep(1)
            taken = await pipeline.take(1)
            pipeline.stop()
        return taken

    assert [one.question.uid for one in run_virtually(live())] == ["q:5"]


def test_a_group_that_was_dropped_after_it_was_scored_is_passed_over() -> None:
    """Two groups have the places of two steps until an older one is rolled: the last of them to be ready goes."""
    state = resumed(
        scheduler={"rolling": (of(4, oldest=2),), "ready": (of(6), of(5))}, scored={5: group(5), 6: group(6)}
    )
    workers = Slow({4: 1})
    workers.version = 2
    pipeline, _ = workers.pipeline(StalenessScheduler(groups_per_step=1, max_staleness=1), state)

    async def live() -> list[str]:
        trained = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await asyncio.sleep(2)
            for _ in range(2):
                trained += [one.question.uid for one in await pipeline.take(1)]
                pipeline.close_step()
            pipeline.stop()
        return trained

    assert run_virtually(live()) == ["q:4", "q:6"]
    assert pipeline.scheduler.dropped[Reason.surplus] == 1


def test_a_run_that_is_given_fewer_steps_drops_what_it_has_no_place_for() -> None:
    state = resumed(scheduler={"ready": (of(4), of(5), of(6))}, scored={n: group(n) for n in (4, 5, 6)})
    workers = Bare()
    pipeline, prompts = workers.pipeline(StalenessScheduler(groups_per_step=2, max_staleness=1, steps=4), state)

    async def begin() -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await asyncio.sleep(1)
            given_back = [one.uid for one in prompts.state().given_back]
            pipeline.stop()
        return given_back

    assert run_virtually(begin()) == ["q:6"]
