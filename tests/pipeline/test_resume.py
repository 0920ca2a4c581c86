"""Runs that are killed and resumed: over seeded interleavings, and worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.data.group import Group, Sample, Scores
from rlsys.data.question import Question
from rlsys.data.source import SourceState
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.pipeline.flow import Flow, FlowState
from rlsys.orchestrator.pipeline.learn import MiniBatches, learn
from rlsys.orchestrator.pipeline.ledger import Ledger, LedgerState, Reason, TicketState
from rlsys.orchestrator.pipeline.routing import GroupLost, Loss
from rlsys.rollout.agent.begun import Begun
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.pipeline.bare import Bare
from tests.pipeline.build import question, rewarded, same, trajectory
from tests.pipeline.planted import PLANTED_IN_RESUMING
from tests.pipeline.simulation import Parts, Simulation, State, simulate_lives
from tests.pipeline.virtual_time import run_virtually
from tests.pipeline.watched import Breach, Property

SEEDS, BLOCKS, THROUGH_A_FILE = 2_000, 4, 5


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_property_holds_over_all_lives_of_a_run(block: int, tmp_path: Path) -> None:
    """On a failure, `simulate_lives(seed)` is the run again. `python -m bench.interleavings` takes more seeds."""

    def through_a_file(state: State) -> State:
        save_values(tmp_path / "state.npz", state)
        return load_values(tmp_path / "state.npz", State)

    for seed in range(block, SEEDS, BLOCKS):
        try:
            if seed % THROUGH_A_FILE:
                simulate_lives(seed)
            else:
                simulate_lives(seed, through=through_a_file)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(("broken", "parts"), PLANTED_IN_RESUMING)
def test_a_bug_planted_on_purpose_is_found_out(broken: Property, parts: Parts) -> None:
    """The property is seen to be broken within 1,000 seeds."""
    assert broken in (_breach(seed, parts) for seed in range(1000))


def _breach(seed: int, parts: Parts) -> Property | None:
    try:
        simulate_lives(seed, parts)
    except Breach as breach:
        return breach.broken
    return None


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
                **{name: getattr(state.flow, name) for name in ("losses", "begun", "rolled", "scored")},
                **{name: getattr(state.flow.ledger, name) for name in ("rolling", "ready", "replaced")},
                "given_back": state.prompts.given_back,
            }
            seen |= {name for name, value in found.items() if value}
    assert seen == {"losses", "begun", "rolled", "scored", "rolling", "ready", "replaced", "given_back"}


class Slow(Bare):
    """Each stage takes as long as a test says, on what it says; what is asked of the engines is written down."""

    capacity = 9

    def __init__(self, roll_s: dict[int, float], reward_s: float = 0, score_s: float = 0) -> None:
        self.roll_s, self.reward_s, self.score_s = roll_s, reward_s, score_s
        self.asked: list[tuple[int, tuple[Begun, ...]]] = []

    async def run_group(self, asked: Question, ticket: int, begun: Sequence[Begun] = ()) -> list[Trajectory]:
        self.asked.append((ticket, tuple(begun)))
        await asyncio.sleep(self.roll_s.get(ticket, 0))
        return [trajectory(uid=asked.uid, version=self.version, sample=ticket)]

    async def reward(self, asked: Question, trajectories: Sequence[Trajectory]) -> Group:
        await asyncio.sleep(self.reward_s)
        return await super().reward(asked, trajectories)

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        await asyncio.sleep(self.score_s)
        return await super().compute(samples)


def state_at(time: float, workers: Bare, ledger: Ledger, begun: dict[int, tuple[Begun, ...]]) -> FlowState:
    """What a flow has under way at a time, after which it is stopped; `begun` is of any time before."""

    async def live() -> FlowState:
        flow, _ = workers.flow(ledger)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await asyncio.sleep(time)
            state = flow.state(begun)
            flow.stop()
        return state

    return run_virtually(live())


def one_of(uid: str, ticket: int) -> Trajectory:
    """An episode of which an engine has told."""
    return trajectory((7, 8, 9), uid=uid, sample=ticket)


def test_each_group_is_saved_as_what_it_is_by_now() -> None:
    """Ticket 0 takes 9 s to roll, 1 has rolled at 1 s, is rewarded at 3 s, and scored at 5 s."""
    begun = {0: (one_of("q:0", 0),), 1: (one_of("q:1", 1),), 7: (one_of("q:7", 7),)}

    def at(time: float) -> FlowState:
        return state_at(time, Slow({0: 9, 1: 1}, 2, 2), Ledger(groups_per_step=2, max_staleness=0), begun)

    rolling, rewarded_now, scoring, scored = at(0.5), at(2), at(4), at(6)
    assert {number: one[0].tokens.tolist() for number, one in rolling.begun.items()} == {
        0: [7, 8, 9],
        1: [7, 8, 9],
    }
    assert {number: one[0].tokens.tolist() for number, one in rewarded_now.begun.items()} == {
        0: [7, 8, 9],
        1: [1, 2],
    }
    for state in (rolling, rewarded_now):
        assert ([one.number for one in state.ledger.rolling], state.ledger.ready) == ([0, 1], ())
    for state in (scoring, scored):
        assert [*state.begun] == [one.number for one in state.ledger.rolling] == [0]
        assert [one.number for one in state.ledger.ready] == [1]
    assert ([*scoring.rolled], [*scoring.scored]) == ([1], [])
    assert ([*scored.rolled], [*scored.scored]) == ([], [1])
    assert scoring.rolled[1].samples[0].old_logprobs is None
    assert scored.scored[1].samples[0].old_logprobs is not None


def test_the_state_is_not_touched_by_what_comes_after() -> None:
    async def live() -> tuple[FlowState, SourceState]:
        flow, prompts = Slow({0: 5, 1: 5, 2: 1}).flow(Ledger(groups_per_step=2, max_staleness=1))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await asyncio.sleep(2)
            states = flow.state({}), prompts.state()
            assert [len(states[0].ledger.rolling), len(states[0].scored)] == [2, 2]
            flow.ledger.drop(flow.ledger.outstanding[0], Reason.lost)
            await asyncio.sleep(20)
            flow.stop()
        return states

    before, prompts = run_virtually(live())
    assert [len(before.ledger.rolling), len(before.scored), len(before.ledger.dropped)] == [2, 2, 0]
    assert prompts.given_back == ()


def test_in_the_middle_of_a_step_there_is_no_state() -> None:
    async def take_one() -> None:
        flow, _ = Bare().flow(Ledger(groups_per_step=2, max_staleness=0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await flow.take(1)
            with pytest.raises(RuntimeError, match="step 0 was asked for after it had taken 1"):
                flow.state({})
            flow.stop()

    run_virtually(take_one())


def resumed(**tickets: Any) -> FlowState:
    """A run of some steps, now at version 3, with 9 tickets so far."""
    books = {"rolling": (), "ready": (), "dropped": {}} | tickets.pop("ledger", {})
    ledger = LedgerState(version=3, published=3, admitted=9, replaced=0, **books)
    return FlowState(ledger, **{"losses": {}, "begun": {}, "rolled": {}, "scored": {}} | tickets)


def of(number: int, oldest: int = 3) -> TicketState:
    """A ticket that is saved."""
    return TicketState(number, question(number), oldest)


def group(number: int, version: int = 3) -> Group:
    """A group of that ticket."""
    return Group(question(number), (rewarded(trajectory(version=version), 0.0),))


def test_what_was_under_way_goes_on_before_anything_new() -> None:
    """Tickets 5 and 8 roll, 5 with an episode; 6 waits for its scores, 4 can be taken. Places are four, and one to spare."""
    state = resumed(
        ledger={"rolling": (of(5), of(8)), "ready": (of(4), of(6))},
        begun={5: (one_of("q:5", 5),)},
        rolled={6: group(6)},
        scored={4: group(4)},
    )
    workers = Slow({5: 1, 8: 1, 9: 1})
    workers.version = 3
    ledger = Ledger(groups_per_step=4, max_staleness=0, oversample=1.25)

    async def live(flow: Flow) -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            groups, _ = await learn(flow, {"actor": workers}, workers, MiniBatches([4]), lambda _: None)
            flow.stop()
        return [one.question.uid for one in groups]

    assert run_virtually(live(workers.flow(ledger, state)[0])) == ["q:4", "q:6", "q:5", "q:8"]
    assert [(ticket, len(begun)) for ticket, begun in workers.asked] == [(5, 1), (8, 0), (9, 0)]
    assert (ledger.version, [*ledger.dropped]) == (4, [Reason.surplus])


def test_a_run_that_is_given_fewer_steps_drops_what_it_has_no_place_for() -> None:
    state = resumed(ledger={"ready": (of(4), of(5), of(6))}, scored={n: group(n) for n in (4, 5, 6)})
    workers = Bare()
    flow, prompts = workers.flow(Ledger(groups_per_step=2, max_staleness=1, steps=4), state)

    async def begin() -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await asyncio.sleep(1)
            given_back = [one.uid for one in prompts.state().given_back]
            flow.stop()
        return given_back

    assert run_virtually(begin()) == ["q:6"]


def test_a_question_that_was_lost_twice_is_not_given_back_a_third_time() -> None:
    class Losing(Slow):
        async def run_group(self, asked: Question, *goes_on: Any) -> list[Trajectory]:
            if asked.uid == "q:8":
                raise GroupLost(asked.uid, Loss.timeout, "again")
            return await super().run_group(asked, *goes_on)

    workers = Losing({9: 5})
    flow, prompts = workers.flow(
        Ledger(groups_per_step=1, max_staleness=0), resumed(ledger={"rolling": (of(8),)}, losses={"q:8": 2})
    )

    async def begin() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await asyncio.sleep(1)
            assert prompts.state().given_back == ()
            assert flow.state({}).losses == {"q:8": 3}
            flow.stop()

    run_virtually(begin())
