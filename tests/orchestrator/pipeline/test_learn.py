"""When the learners of a step accumulate and step, by what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from rlsys.config.algorithm import AdvantageBaseline, AlgorithmConfig
from rlsys.config.schema import RunConfig, TrainerConfig
from rlsys.data.trajectory import Group, Sample
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn, mini_batches
from tests.orchestrator.pipeline.build import question, rewarded, trajectory

Event = tuple[str, int]


def groups(count: int) -> list[Group]:
    one = trajectory(range(3), [False, True, True])
    return [
        Group(question(number), (rewarded(replace(one, question_uid=question(number).uid), 1.0),))
        for number in range(count)
    ]


class OneAtATime:
    """A pipeline in which groups are scored one after the other, each when it is waited for."""

    def __init__(self, made: Sequence[Group], events: list[Event]) -> None:
        self._made, self._events = list(made), events

    async def take(self, most: int, *_stages: str) -> list[Group]:
        assert most >= 1
        self._events.append(("scored", 1))
        return [self._made.pop(0)]

    def close_step(self) -> None:
        self._events.append(("closed", len(self._made)))


class Logged:
    """A learner that writes down what it is told."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.seen: list[str] = []

    def enough(self, _: Sequence[Sample]) -> bool:
        return True

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:
        self.seen += [sample.trajectory.question_uid for sample in samples]
        self._events.append(("accumulated the last" if last else "accumulated", len(samples)))

    async def apply(self) -> Mapping[str, float]:
        self._events.append(("applied", len(self.seen)))
        return {"lr": 1.0}


class Everywhere:
    async def need(self, *names: str) -> None: ...


def run(cut: MiniBatches) -> tuple[list[Event], Logged]:
    events: list[Event] = []
    learner = Logged(events)
    made = groups(sum(cut.sizes))
    pipeline = cast(RolloutPipeline, cast(Any, OneAtATime(made, events)))
    trained, updates = asyncio.run(learn(pipeline, {"critic": learner}, Everywhere(), cut))
    assert [group.question.uid for group in trained] == [group.question.uid for group in made] == learner.seen
    assert updates == [{"critic/lr": 1.0}] * len(cut.sizes)
    return events, learner


def test_a_step_is_taken_as_soon_as_its_mini_batch_is_there() -> None:
    events, _ = run(MiniBatches([2, 2]))
    one_update = [("scored", 1), ("accumulated", 1), ("scored", 1), ("accumulated the last", 1)]
    assert events == [*one_update, ("applied", 2), *one_update, ("applied", 4), ("closed", 0)]


def test_each_mini_batch_has_as_many_groups_as_its_size_says() -> None:
    events, _ = run(MiniBatches([2, 1, 3]))
    assert [count for name, count in events if name == "applied"] == [2, 3, 6]
    assert [name for name, _ in events].count("accumulated the last") == 3


def test_what_scores_does_not_step_before_the_last_score() -> None:
    """Else values of the second mini-batch would be of one critic or the other, by who is faster."""
    events, _ = run(MiniBatches([3, 3], scored_first=True))
    first_step = events.index(("applied", 3))
    assert events[:first_step].count(("scored", 1)) == 6
    assert ("scored", 1) not in events[first_step:]
    assert events[-3:] == [("accumulated the last", 3), ("applied", 6), ("closed", 0)]
    assert events[first_step - 4] == ("accumulated the last", 1)


@pytest.mark.parametrize(
    ("baseline", "updates", "waits"), [("critic", 2, True), ("critic", 1, False), ("group", 2, False)]
)
def test_who_waits_for_the_last_score(baseline: str, updates: int, waits: bool) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(baseline=AdvantageBaseline(baseline)),
        trainer=TrainerConfig(prompts_per_step=4, mini_batches=updates),
    )
    assert mini_batches(config).scored_first == waits
