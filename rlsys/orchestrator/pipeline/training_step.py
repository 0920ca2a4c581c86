"""Trains one step: accumulates gradients as groups arrive and takes one optimiser step per mini-batch.

Actor and critic learn in parallel from the same groups.

Invariants:
- Every learner accumulates every group of the step exactly once.
- Each optimiser step covers exactly the groups of its mini-batch.
- With a critic and several mini-batches, all groups of a step are scored before its first optimiser step, so one critic
  version computes all values of the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import floor, inf
from typing import Protocol

from rlsys.config.derived import has_critic, max_staleness, max_wait, mini_batch_sizes, needs_whole_mini_batch
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Floats, Group, Sample, value_mask
from rlsys.observe import status
from rlsys.orchestrator.pipeline.grouping import over_mini_batch
from rlsys.orchestrator.pipeline.rollout_pipeline import Devices, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.schedule_policy import make_policy
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler

MOST_SCORED_GROUPS = 32
"""Most prompt groups that are scored at a time in steps of up to 512 prompts; of larger steps, a sixteenth. Where scoring is
the slowest stage, more groups wait after every score batch; without a bound the batches would double, and the actor would
train the last one with nothing beside it. With a smaller bound, a large scoring group would have too few sequences a rank.
"""


class LearnerGroup(Protocol):
    """Worker group that learns: the actor or the critic."""

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        """Return True if a call with `samples` keeps every rank and pipeline stage busy."""

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> Sequence[Floats] | None:
        """Add the gradient of `samples`; `last` marks the final call before `apply`.

        Returns the old log-probs [seq] of `samples` if training computes them, else None.
        """

    async def apply(self) -> Mapping[str, float]:
        """Take one optimiser step; return the statistics of the samples accumulated for it."""


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """Division of a step into mini-batches."""

    sizes: Sequence[int]
    """Groups in each mini-batch, in order; their sum is the scheduler's `groups_per_step`."""
    whole: Callable[[Sequence[Group]], list[Group]] | None = None
    """Computation that needs all groups of a mini-batch before they can be trained; None if there is none."""
    scored_first: bool = False
    """True if all groups of the step must be scored before its first optimiser step."""


def make_scheduler(config: RunConfig) -> StalenessScheduler:
    curation, groups = config.algorithm.curation, config.trainer.prompts_per_step
    # Exact decimal: 0.29 x 100 groups are 29; the product of floats is less.
    replaced = floor(Fraction(str(curation.max_replaced)) * groups) if curation.drop_no_spread else 0
    return StalenessScheduler(
        groups,
        max_staleness(config),
        oversample=curation.oversample,
        max_replaced=replaced,
        steps=config.trainer.steps,
        max_wait=max_wait(config),
        policy=make_policy(config),
    )


def score_batch_size(config: RunConfig) -> ScoreBatchSize:
    """Return the batch size of the score loop.

    The `sequential` schedule scores the whole step at once, when all rollouts have ended or been aborted. Other
    schedules score the groups that are rewarded so far: at most a sixteenth of the step, or `MOST_SCORED_GROUPS` if that is
    more, and never more than the largest mini-batch.
    """
    trainer = config.trainer
    if trainer.schedule.kind == "sequential":
        return ScoreBatchSize(inf, trainer.prompts_per_step)
    largest = max(mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches))
    return ScoreBatchSize(1, min(largest, max(MOST_SCORED_GROUPS, trainer.prompts_per_step // 16)))


def mini_batches(config: RunConfig) -> MiniBatches:
    trainer, algorithm = config.trainer, config.algorithm
    whole = partial(over_mini_batch, config=algorithm, mask_of=value_mask(config.compat))
    return MiniBatches(
        sizes=mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches),
        whole=whole if needs_whole_mini_batch(algorithm) else None,
        scored_first=has_critic(algorithm) and trainer.mini_batches > 1,
    )


def learning(config: RunConfig, step: int) -> tuple[str, ...]:
    """Return the worker groups that learn in `step` (counted from 1): only the critic during the critic's warm-up."""
    if not has_critic(config.algorithm):
        return ("actor",)
    return ("critic",) if step <= config.critic.warmup_steps else ("actor", "critic")


async def learn(
    pipeline: RolloutPipeline, learners: Mapping[str, LearnerGroup], devices: Devices, cut: MiniBatches
) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Train one step; return its prompt groups and the statistics of each optimiser step.

    `learners`: name -> worker group that learns in this step; at least one. The statistics are named `GROUP/NAME`.
    """
    total = sum(cut.sizes)
    held: list[Group] = []
    trained: list[Group] = []
    updates: list[Mapping[str, float]] = []

    async def take(most: int) -> list[Group]:
        """Return 1 to `most` scored groups, blocking until the first arrives; `most` is at least 1."""
        if not held:
            return await pipeline.take(most, *learners)
        taken = held[:most]
        del held[:most]
        return taken

    for size in cut.sizes:
        missing = size
        while missing > 0:
            groups = await _worth_a_call(take, [*learners.values()], missing, cut)
            status.show("waits for its devices", *learners)
            await devices.onload(*learners)
            status.show(f"trains on {status.count(len(groups), 'group')}", *learners)
            samples = [sample for group in groups for sample in group.samples]
            last = len(groups) == missing
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(learner.accumulate(samples, last)) for learner in learners.values()]
            computed = [found for call in calls if (found := call.result()) is not None]
            trained += _with_old_logprobs(groups, computed[0], pipeline.scheduler.version) if computed else groups
            missing -= len(groups)
        while cut.scored_first and (unscored := total - len(trained) - len(held)):
            held += await pipeline.take(unscored, *learners)
        status.show("updates the weights", *learners)
        async with asyncio.TaskGroup() as tasks:
            applied = {name: tasks.create_task(learner.apply()) for name, learner in learners.items()}
        updates.append(
            {f"{name}/{key}": value for name, task in applied.items() for key, value in task.result().items()}
        )
    pipeline.close_step()
    status.show("waits for weight sync", *learners)
    return trained, updates


def _with_old_logprobs(groups: Sequence[Group], logprobs: Sequence[Floats], version: int) -> list[Group]:
    """Return `groups` with the old log-probs of all their samples, in order, which `version` computed."""
    found = iter(logprobs)
    return [
        replace(
            group,
            samples=tuple(
                replace(sample, old_logprobs=next(found), scored_version=version) for sample in group.samples
            ),
        )
        for group in groups
    ]


async def _worth_a_call(
    take: Callable[[int], Awaitable[list[Group]]], learners: Sequence[LearnerGroup], missing: int, cut: MiniBatches
) -> list[Group]:
    """Collect prompt groups for one `accumulate`: enough to keep every learner busy, or the rest of the mini-batch."""
    held: list[Group] = []
    samples: list[Sample] = []
    while len(held) < missing:
        more = await take(missing - len(held))
        held += more
        samples += [sample for group in more for sample in group.samples]
        if cut.whole is None and all(learner.fills_micro_batches(samples) for learner in learners):
            break
    return held if cut.whole is None else cut.whole(held)
