"""The learners' side of a step: gradients accumulate as groups arrive, one optimiser step a mini-batch.

Actor and critic learn side by side from the same groups. Invariants: every learner accumulates every group taken
once; each optimiser step is taken on as many groups as its mini-batch has. Where scores depend on a learner (a critic's values),
no optimiser step is taken before all groups of the step are scored: within a step all scores are of the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, inf
from typing import Protocol

from rlsys.config.derived import has_critic, max_staleness, mini_batch_sizes, needs_whole_mini_batch
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Group, Sample
from rlsys.observe import status
from rlsys.orchestrator.pipeline.grouping import over_mini_batch
from rlsys.orchestrator.pipeline.rollout_pipeline import Devices, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler


class LearnerGroup(Protocol):
    """The actor, or the critic."""

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Whether `samples` are worth a call: they keep every rank and pipeline stage busy."""

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:
        """Add the gradient of `samples`; with the `last` of an optimiser step, `apply` comes next."""

    async def apply(self) -> Mapping[str, float]:
        """Take one optimiser step; the statistics of what was accumulated for it."""


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """The cut of a step into optimiser steps."""

    sizes: Sequence[int]
    """Groups of each, in order; their sum is the scheduler's `groups_per_step`."""
    whole: Callable[[Sequence[Group]], list[Group]] | None = None
    """What has to be worked out over a whole mini-batch, for which training then waits; None if nothing has."""
    scored_first: bool = False
    """No optimiser step comes before the step's last score."""


def make_scheduler(config: RunConfig) -> StalenessScheduler:
    """The scheduler of a run that begins."""
    curation, groups = config.algorithm.curation, config.trainer.prompts_per_step
    replaced = floor(curation.max_replaced * groups) if curation.drop_no_spread else 0
    return StalenessScheduler(groups, max_staleness(config), curation.oversample, replaced, config.trainer.steps)


def score_batch_size(config: RunConfig) -> ScoreBatchSize:
    """Portions of the log-prob stage: what is there, up to the largest mini-batch.

    In sequence it gets the whole step, once all rollouts have ended, aborted ones included.
    """
    trainer = config.trainer
    if trainer.schedule.kind == "sequential":
        return ScoreBatchSize(inf, trainer.prompts_per_step)
    return ScoreBatchSize(1, max(mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches)))


def mini_batches(config: RunConfig) -> MiniBatches:
    """The cut of a step into optimiser steps that `config` asks for."""
    trainer, algorithm = config.trainer, config.algorithm
    return MiniBatches(
        sizes=mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches),
        whole=partial(over_mini_batch, config=algorithm) if needs_whole_mini_batch(algorithm) else None,
        scored_first=has_critic(algorithm) and trainer.mini_batches > 1,
    )


def learning(config: RunConfig, step: int) -> tuple[str, ...]:
    """Groups that learn in `step`, counted from 1: while the critic warms up, it alone."""
    if not has_critic(config.algorithm):
        return ("actor",)
    return ("critic",) if step <= config.critic.warmup_steps else ("actor", "critic")


async def learn(
    pipeline: RolloutPipeline, learners: Mapping[str, LearnerGroup], devices: Devices, cut: MiniBatches
) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Train one step; returns its groups and the statistics of each optimiser step.

    `learners` are those that learn in this step, at least one, by the names of their groups; the name and a slash
    stand before that of each statistic.
    """
    total = sum(cut.sizes)
    held: list[Group] = []
    trained: list[Group] = []
    updates: list[Mapping[str, float]] = []

    async def take(most: int) -> list[Group]:
        """At least one scored group, at most `most`, which is at least 1; waits for the first."""
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
            await devices.need(*learners)
            status.show(f"trains on {status.count(len(groups), 'group')}", *learners)
            samples = [sample for group in groups for sample in group.samples]
            last = len(groups) == missing
            async with asyncio.TaskGroup() as tasks:
                for learner in learners.values():
                    tasks.create_task(learner.accumulate(samples, last))
            trained += groups
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


async def _worth_a_call(
    take: Callable[[int], Awaitable[list[Group]]], learners: Sequence[LearnerGroup], missing: int, cut: MiniBatches
) -> list[Group]:
    """Groups for one call: enough to fill every learner, or all that the mini-batch still lacks."""
    held: list[Group] = []
    samples: list[Sample] = []
    while len(held) < missing:
        more = await take(missing - len(held))
        held += more
        samples += [sample for group in more for sample in group.samples]
        if cut.whole is None and all(learner.enough(samples) for learner in learners):
            break
    return held if cut.whole is None else cut.whole(held)
