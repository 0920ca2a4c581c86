"""Computes the hours of a whole run from the seconds of a step: evaluations, checkpoints and failures. Pure."""

from __future__ import annotations

from math import inf
from statistics import fmean

from rlsys.apps.planner.costs import Costs
from rlsys.apps.planner.estimate import generation_s
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import SPEEDS
from rlsys.cluster.planning.memory import BYTES, checkpoint_bytes, group_memory
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import InferenceConfig, RunConfig
from rlsys.weights.weight_map import Architecture

_DRAWN = 32
"""Prompt groups whose lengths an evaluation is computed with."""


def whole_run(
    config: RunConfig,
    model: Architecture,
    device: str,
    costs: Costs,
    workload: Workload,
    step_s: float,
    devices: int,
) -> dict[str, float]:
    """Return the hours of each part of a run of `trainer.steps` steps on `devices` devices, by its name.

    A failure costs the restart and half of the steps between two checkpoints; infinite if failures come faster than that.
    """
    steps, every = config.trainer.steps, config.checkpoint.interval
    # Before the first step, after the last one, and in between.
    evaluations = 2 + ((steps - 1) // config.eval.interval if config.eval.interval else 0)
    aside = config.eval.engines is not None
    checkpoints = 1 + ((steps - 1) // every if every else 0)
    parts = {
        "steps": steps * step_s,
        "evaluations": (2 if aside else evaluations) * evaluation_s(config, costs, workload),
        "checkpoints": checkpoints * checkpoint_s(config, model, device, workload),
    }
    useful = sum(parts.values())
    lost = workload.failures / 1000 * devices / 3600 * (workload.restart_s + (every or steps) * step_s / 2)
    parts["failures"] = useful * lost / (1 - lost) if lost < 1 else inf
    return {name: seconds / 3600 for name, seconds in parts.items()}


def evaluation_s(config: RunConfig, costs: Costs, workload: Workload) -> float:
    """Return the seconds of an evaluation on all engines, by formula."""
    samples, questions = config.eval.samples, config.eval.limit or workload.eval_questions
    groups = (workload.group(config, 1, number, config.algorithm.n_samples) for number in range(_DRAWN))
    drawn = [one for group in groups for one in group]
    lengths = sorted(one.generated for one in drawn)
    given = fmean(one.tokens - one.generated for one in drawn)
    engines = len(parse_placement(config.cluster.placement, has_critic(config.algorithm))["rollout"])
    share = questions * samples / (engines // config.rollout.engine.tp)
    waits = fmean(sum(turn.tool_s for turn in one.turns) for one in drawn)
    return generation_s(costs.engine, lengths, given, share) + waits


def checkpoint_s(config: RunConfig, model: Architecture, device: str, workload: Workload) -> float:
    """Return the seconds for which training waits for a checkpoint: the copy to the host, and unless
    `checkpoint.background` the write."""
    staged = 0.0
    for name, settings in megatron_groups(config).items():
        if not isinstance(settings, InferenceConfig):
            parts = group_memory(config, model, name).parts
            trained = parts["gradients"] / 4 * BYTES[config.model.dtype]
            staged = max(staged, trained + parts["optimizer"])
    rate = workload.disk_gb_s * 1e9 * config.cluster.nodes
    copied = staged / SPEEDS[device].host
    if config.checkpoint.background:
        return copied
    return copied + (checkpoint_bytes(config, model) / rate if rate else inf)
