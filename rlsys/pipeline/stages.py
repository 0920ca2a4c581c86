"""The stages of a step, each a coroutine between two channels: generate, score, train.

A stage forwards a group as soon as it has it, so the later stages work while the earlier ones still
do. Invariants: every question becomes one group; every group is scored once and trained once; an
optimiser step is taken after each `groups_per_update` groups, and once more for a rest. A stage that
fails raises; who runs the stages together ends the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlsys.agent.trajectory import Trajectory
from rlsys.data.question import Question
from rlsys.pipeline.channel import Channel, ChannelClosed
from rlsys.pipeline.group import Group, Sample

Floats = NDArray[np.float32]
Say = Callable[[str], None]
"""Tells people what a stage does or waits for."""


class Generator(Protocol):
    """The rollout group, as a stage sees it."""

    @property
    def capacity(self) -> int:
        """Groups that may be generated at a time."""

    async def run_group(self, question: Question) -> list[Trajectory]:
        """All episodes of one question."""


class Scorer(Protocol):
    """The inference group, as a stage sees it."""

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        """Log-probs of the policy and of the reference, [seq] each, in the order of `samples`."""


class Learner(Protocol):
    """The actor, as a stage sees it."""

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add the gradient of `samples`."""

    async def apply(self) -> Mapping[str, float]:
        """Take one optimiser step; the statistics of what was accumulated for it."""


async def generate(
    questions: Sequence[Question],
    generator: Generator,
    judge: Callable[[Question, Sequence[Trajectory]], Group],
    out: Channel[Group],
    say: Say,
) -> None:
    """Run the episodes of `questions`, `generator.capacity` groups at a time, and close `out`.

    A runner takes the next question only when its last group is in the channel: back-pressure.
    """
    waiting = iter(questions)
    done = 0

    async def run() -> None:
        nonlocal done
        for question in waiting:
            group = judge(question, await generator.run_group(question))
            done += 1
            say(f"{done}/{len(questions)} groups")
            await out.put(group)

    say(f"0/{len(questions)} groups")
    async with asyncio.TaskGroup() as runners:
        for _ in range(min(generator.capacity, len(questions))):
            runners.create_task(run())
    await out.close()
    say("done, waits for new weights")


async def recompute(inbox: Channel[Group], scorer: Scorer, out: Channel[Group], say: Say) -> None:
    """Attach recomputed log-probs to every group, and close `out` after the last."""
    while True:
        say("waits for rollouts")
        try:
            groups = await inbox.get_some(inbox.capacity)
        except ChannelClosed:
            break
        say(f"scores {len(groups)} groups")
        samples = [sample for group in groups for sample in group.samples]
        found = iter(await scorer.compute(samples))
        for group in groups:
            scored = tuple(sample.with_logprobs(*next(found)) for sample in group.samples)
            await out.put(Group(group.question, scored))
    await out.close()
    say("done, waits for new weights")


async def learn(
    inbox: Channel[Group], learner: Learner, groups_per_update: int, say: Say
) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Train on every group; returns the groups and the statistics of each optimiser step."""
    trained: list[Group] = []
    updates: list[Mapping[str, float]] = []
    pending = 0
    while True:
        say("waits for log-probs")
        try:
            groups = await inbox.get_some(groups_per_update - pending)
        except ChannelClosed:
            break
        say(f"trains on {len(groups)} groups")
        await learner.accumulate([sample for group in groups for sample in group.samples])
        trained += groups
        pending += len(groups)
        if pending == groups_per_update:
            updates.append(await learner.apply())
            pending = 0
    if pending:
        updates.append(await learner.apply())
    return trained, updates
