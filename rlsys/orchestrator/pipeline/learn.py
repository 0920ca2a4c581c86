"""The learners' side of a step: gradients accumulate as groups arrive, one optimiser step a mini-batch.

Actor and critic learn side by side from the same groups. Invariants: every learner accumulates every group taken
once; each optimiser step is taken on as many groups as its mini-batch has. Where scores depend on a learner (a critic's values),
no optimiser step is taken before all groups of the step are scored: within a step all scores are of the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.data.group import Group, Sample
from rlsys.observe import status
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.pipeline.workers import Devices, LearnerGroup


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """The cut of a step into optimiser steps."""

    sizes: Sequence[int]
    """Groups of each, in order; their sum is the scheduler's `groups_per_step`."""
    whole: Callable[[Sequence[Group]], list[Group]] | None = None
    """What has to be worked out over a whole mini-batch, for which training then waits; None if nothing has."""
    scored_first: bool = False
    """No optimiser step comes before the step's last score."""


async def learn(
    pipeline: RolloutPipeline, learners: Mapping[str, LearnerGroup], devices: Devices, cut: MiniBatches
) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Train one step; returns its groups and the statistics of each optimiser step.

    `learners` are those that learn in this step, at least one, by the names of their groups; the name and a slash
    stand before that of each statistic.
    """
    supply = _Supply(pipeline, sum(cut.sizes), tuple(learners))
    trained: list[Group] = []
    updates: list[Mapping[str, float]] = []
    for size in cut.sizes:
        missing = size
        while missing > 0:
            groups = await _worth_a_call(supply, [*learners.values()], missing, cut)
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
        if cut.scored_first:
            await supply.fill()
        status.show("updates the weights", *learners)
        updates.append(await _apply(learners))
    pipeline.close_step()
    status.show("waits for weight sync", *learners)
    return trained, updates


class _Supply:
    """The scored groups of one step."""

    def __init__(self, pipeline: RolloutPipeline, groups: int, learners: Sequence[str]) -> None:
        self._pipeline, self._missing, self._learners = pipeline, groups, learners
        self._held: list[Group] = []

    async def take(self, most: int) -> list[Group]:
        """At least one group, at most `most`, which is at least 1; waits for the first."""
        if self._held:
            taken, self._held = self._held[:most], self._held[most:]
            return taken
        return await self._from_pipeline(most)

    async def fill(self) -> None:
        """Wait until the step's last group is scored."""
        while self._missing:
            self._held += await self._from_pipeline(self._missing)

    async def _from_pipeline(self, most: int) -> list[Group]:
        groups = await self._pipeline.take(most, *self._learners)
        self._missing -= len(groups)
        return groups


async def _apply(learners: Mapping[str, LearnerGroup]) -> dict[str, float]:
    """One optimiser step of each; their statistics under full names."""
    async with asyncio.TaskGroup() as tasks:
        applied = {name: tasks.create_task(learner.apply()) for name, learner in learners.items()}
    return {f"{name}/{key}": value for name, task in applied.items() for key, value in task.result().items()}


async def _worth_a_call(
    supply: _Supply, learners: Sequence[LearnerGroup], missing: int, cut: MiniBatches
) -> list[Group]:
    """Groups for one call: enough to fill every learner, or all that the mini-batch still lacks."""
    held: list[Group] = []
    samples: list[Sample] = []
    while len(held) < missing:
        more = await supply.take(missing - len(held))
        held += more
        samples += [sample for group in more for sample in group.samples]
        if cut.whole is None and all(learner.enough(samples) for learner in learners):
            break
    return held if cut.whole is None else cut.whole(held)
