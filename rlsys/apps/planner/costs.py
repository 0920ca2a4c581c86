"""Gathers the seconds of all work of a run, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsys.apps.planner.cores import Cores
from rlsys.cluster.planning.work import CallCosts, EngineCosts, HardwareCosts, SyncCosts


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of all work of a run, and where they come from."""

    engine: EngineCosts
    calls: Mapping[str, CallCosts]
    """Megatron group -> its calls: training of actor and critic, log-probs of inference; `values` of a critic."""
    sync: SyncCosts
    switches: Mapping[str, tuple[float, float]]
    """Colocated group -> seconds in which it leaves its devices and comes back."""
    reward_s: float
    step_s: float
    peak: float
    """Operations per second of the actor's devices, by data sheet; 0 if unknown."""
    source: Mapping[str, str]
    """Part of the costs -> where its numbers come from."""
    cores: Cores | None = None
    """Cores that all workers share; None if each has devices of its own."""


def by_formula(work: HardwareCosts, source: str) -> Costs:
    """Return the costs that `work` derives; `source` tells where its reached shares come from."""
    return Costs(
        engine=work.engine(),
        calls=work.calls(),
        sync=work.sync(),
        switches=work.switches(),
        reward_s=0.0,
        step_s=work.reached.step_s,
        peak=len(work.ranks["actor"]) * work.speed.flops,
        source={"speeds": f"data sheet: {work.speed.source}", "shares of them": source},
    )
