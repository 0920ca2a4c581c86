"""Tests of a training step: the order in which learners accumulate and step, and the mini-batches of a config."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlsys.config.algorithm import AlgorithmConfig, CurationConfig, GaeAdvantage, ReturnsAdvantage
from rlsys.config.schema import CriticConfig, RunConfig, TrainerConfig
from rlsys.data.trajectory import Floats, Group, Sample
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.pipeline.scheduler import DropReason
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn, learning, make_scheduler, mini_batches
from tests.support.trajectories import question, rewarded, trajectory

Event = tuple[str, int]


class OneAtATimePipeline:
    """A pipeline that scores one group at a time, when the learner asks for it."""

    def __init__(self, made: Sequence[Group], events: list[Event]) -> None:
        self._made, self._events = list(made), events

    async def take(self, most: int, *_stages: str) -> list[Group]:
        assert most >= 1
        self._events.append(("scored", 1))
        return [self._made.pop(0)]

    def close_step(self) -> None:
        self._events.append(("closed", len(self._made)))


class LoggingLearner:
    """Stands in for the learner, whose calls it logs, and for the devices, which are always ready."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.seen: list[str] = []

    def fills_micro_batches(self, _: Sequence[Sample]) -> bool:
        return True

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> Sequence[Floats] | None:
        self.seen += [sample.trajectory.question_uid for sample in samples]
        self._events.append(("accumulated the last" if last else "accumulated", len(samples)))
        return None

    async def apply(self) -> Mapping[str, float]:
        self._events.append(("applied", len(self.seen)))
        return {"lr": 1.0}

    async def onload(self, *names: str) -> None: ...


def run(cut: MiniBatches) -> list[Event]:
    """Train a step on groups of one sample each; return the events in order."""
    events: list[Event] = []
    learner, one = LoggingLearner(events), trajectory(range(3), [False, True, True])
    uids = [f"q:{number}" for number in range(sum(cut.sizes))]
    made = [Group(question(n), (rewarded(replace(one, question_uid=uid), 1.0),)) for n, uid in enumerate(uids)]
    pipeline = cast(RolloutPipeline, cast(Any, OneAtATimePipeline(made, events)))
    trained, updates = asyncio.run(learn(pipeline, {"critic": learner}, learner, cut))
    assert [group.question.uid for group in trained] == uids == learner.seen
    assert updates == [{"critic/lr": 1.0}] * len(cut.sizes)
    return events


def test_mini_batch_is_stepped_on_once_its_last_group_has_come() -> None:
    one = ("scored", 1)
    assert run(MiniBatches([2, 1])) == [
        *(one, ("accumulated", 1), one, ("accumulated the last", 1), ("applied", 2)),
        *(one, ("accumulated the last", 1), ("applied", 3)),
        ("closed", 0),
    ]


def test_critic_does_not_step_before_the_last_score_of_the_step() -> None:
    """One version of the critic computes all values of a step, also with several mini-batches."""
    events = run(MiniBatches([3, 3], scored_first=True))
    first_step = events.index(("applied", 3))
    assert events[:first_step].count(("scored", 1)) == 6
    assert ("scored", 1) not in events[first_step:]
    assert events[-3:] == [("accumulated the last", 3), ("applied", 6), ("closed", 0)]


async def test_actor_and_critic_learn_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    class WaitingLearner(LoggingLearner):
        async def accumulate(self, *_: Any) -> None:
            await both.wait()

    group = Group(question(1), (rewarded(trajectory(), 1.0),))
    pipeline = cast(RolloutPipeline, cast(Any, OneAtATimePipeline([group], [])))
    learners = {"actor": WaitingLearner([]), "critic": WaitingLearner([])}
    await asyncio.wait_for(learn(pipeline, learners, learners["actor"], MiniBatches([1])), 600)


def test_trained_groups_have_the_old_logprobs_that_training_returned() -> None:
    class OwnLogprobs(LoggingLearner):
        async def accumulate(self, samples: Sequence[Sample], last: bool) -> Sequence[Floats]:
            await super().accumulate(samples, last)
            return [np.full(3, len(self.seen) + number, np.float32) for number, _ in enumerate(samples)]

    pairs = [(rewarded(trajectory(), 1.0), rewarded(trajectory(), 0.0)) for _ in range(2)]
    pipeline: Any = OneAtATimePipeline([Group(question(n), pair) for n, pair in enumerate(pairs)], [])
    pipeline.scheduler = SimpleNamespace(version=7)
    learners = {"actor": OwnLogprobs([]), "critic": LoggingLearner([])}
    trained, _ = asyncio.run(learn(pipeline, learners, learners["actor"], MiniBatches([2])))
    found = [sample for group in trained for sample in group.samples]
    assert [None if one.old_logprobs is None else one.old_logprobs.tolist() for one in found] == [
        [number] * 3 for number in (2.0, 3.0, 4.0, 5.0)
    ]
    assert {one.scored_version for one in found} == {7}


@hypothesis_settings(max_examples=50)
@given(st.integers(1, 2000), st.data())
def test_mini_batches_share_all_groups_and_the_larger_ones_are_spread_out(groups: int, data: Any) -> None:
    count = data.draw(st.integers(1, groups))
    config = RunConfig(trainer=TrainerConfig(prompts_per_step=groups, mini_batches=count))
    sizes = mini_batches(config).sizes
    assert (len(sizes), sum(sizes)) == (count, groups)
    assert {*sizes} <= {groups // count, -(-groups // count)}
    # The first n mini-batches together have n / count of the groups, rounded down.
    for number, taken in enumerate(accumulate(sizes), start=1):
        assert taken <= Fraction(number * groups, count) < taken + 1


def test_critic_learns_alone_during_its_warm_up() -> None:
    critic = CriticConfig(warmup_steps=2)
    config = RunConfig(algorithm=AlgorithmConfig(advantage=GaeAdvantage(whiten=False)), critic=critic)
    assert [learning(config, step) for step in (2, 3)] == [("critic",), ("actor", "critic")]
    assert learning(RunConfig(critic=critic), 1) == ("actor",)


@pytest.mark.parametrize(("groups", "share", "most"), [(100, 0.29, 29), (50, 0.58, 29), (100, 1.15, 115), (3, 0.5, 1)])
def test_groups_without_spread_are_replaced_up_to_the_exact_share(groups: int, share: float, most: int) -> None:
    curation = CurationConfig(drop_no_spread=True, max_replaced=share)
    config = RunConfig(trainer=TrainerConfig(prompts_per_step=groups), algorithm=AlgorithmConfig(curation=curation))
    scheduler = make_scheduler(config)
    for number in range(groups + most):
        group = scheduler.admit(question(number))
        if reason := scheduler.finish_rolling(group, 0, has_spread=False):
            scheduler.drop(group, reason)
    assert scheduler.dropped == {DropReason.no_spread: most}


@pytest.mark.parametrize(
    ("advantage", "updates", "whole", "scored_first"),
    [
        (GaeAdvantage(whiten=False), 2, False, True),
        (GaeAdvantage(), 1, True, False),
        (ReturnsAdvantage(), 2, False, False),
    ],
)
def test_only_a_critic_of_several_mini_batches_waits_for_the_last_score(
    advantage: GaeAdvantage | ReturnsAdvantage, updates: int, whole: bool, scored_first: bool
) -> None:
    trainer = TrainerConfig(prompts_per_step=4, mini_batches=updates)
    cut = mini_batches(RunConfig(algorithm=AlgorithmConfig(advantage=advantage), trainer=trainer))
    assert (cut.whole is not None, cut.scored_first) == (whole, scored_first)
