"""The learner's side of a step: gradients accumulate as groups arrive, one optimiser step a mini-batch.

Invariants: every group taken is accumulated once; each optimiser step is taken on `groups_per_update` groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsys.pipeline.flow import Flow
from rlsys.pipeline.group import Group, Sample
from rlsys.pipeline.grouping import scale_by_batch
from rlsys.pipeline.workers import Devices, Learner, Say


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """How a step is cut into optimiser steps. `updates` x `groups_per_update` is the ledger's `groups_per_step`."""

    updates: int
    groups_per_update: int
    whole: bool
    """Advantages need the whole mini-batch, so training waits for it."""


async def learn(
    flow: Flow, learner: Learner, devices: Devices, cut: MiniBatches, say: Say
) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Train one step; returns its groups and the statistics of each optimiser step."""
    trained: list[Group] = []
    updates: list[Mapping[str, float]] = []
    for update in range(1, cut.updates + 1):
        while (missing := update * cut.groups_per_update - len(trained)) > 0:
            say("waits for log-probs")
            groups = await _worth_a_call(flow, learner, missing, cut.whole)
            say(f"trains on {len(groups)} groups")
            await devices.need("actor")
            await learner.accumulate([sample for group in groups for sample in group.samples])
            trained += groups
        updates.append(await learner.apply())
    flow.close_step()
    return trained, updates


async def _worth_a_call(flow: Flow, learner: Learner, missing: int, whole: bool) -> list[Group]:
    """Groups for one call: enough to fill the learner, or all that the mini-batch still lacks."""
    held: list[Group] = []
    samples: list[Sample] = []
    while len(held) < missing:
        more = await flow.take(missing - len(held))
        held += more
        samples += [sample for group in more for sample in group.samples]
        if not whole and learner.enough(samples):
            break
    return scale_by_batch(held) if whole else held
