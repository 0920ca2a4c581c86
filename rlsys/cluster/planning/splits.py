"""Finds the split of a run's devices that gives the shortest step, by the estimates of `cost`. Pure.

In a disaggregated run the actor has the first devices, then inference, then rollout; without an inference group, actor and
rollout have all devices. A colocated run has one split, all groups on all devices. A split is legal if

- it uses every device of the machines, and a disaggregated run has at least two engines, because it survives the death
  of an engine only if there is another;
- parallel sizes and engines pass the checks of `placement`, and engines start at a multiple of their size;
- every group fits into device memory by the plan's estimate, with recomputed activations or without.

Parallel sizes are powers of two. A critic has the actor's devices and parallel sizes. All other settings stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from math import inf

from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import DEVICE
from rlsys.cluster.planning.memory import GIB, group_memory
from rlsys.cluster.planning.placement import USABLE, context_problems, engine_problems, parallel_problems
from rlsys.config.derived import has_critic, megatron_groups, scoring_forwards
from rlsys.config.schema import Device, Mode, ParallelConfig, RunConfig
from rlsys.weights.weight_map import Architecture

NEAR = 0.2
"""Relative difference between two estimates of a step that counts as a tie: about the median error of predictions of
published runs (docs/planning.md)."""
_SIZES = (1, 2, 4, 8)
_CONTEXT_SIZES = (1, 2)

Choice = tuple[float, RunConfig]
"""Seconds of a stage, and the config with the devices and sizes of its groups."""


def faster_split(config: RunConfig, model: Architecture) -> str | None:
    """Return a sentence with the settings of a split whose step is shorter by more than `NEAR`; None if there is none.

    None also for a config without GPUs or without a statement of its machines.
    """
    cluster, mode = config.cluster, config.cluster.mode
    stated = cluster.device is Device.gpu and cluster.devices_per_node and cluster.device_memory_gib
    split = fastest_split(config, model) if stated else None
    if split is None:
        return None
    now, then = (StepCost(one, model).stages().of_step(mode) for one in (config, split))
    if now <= then * (1 + NEAR):
        return None
    changed = " ".join(
        f"{key}={value}" for key, value in settings_of(split).items() if settings_of(config)[key] != value
    )
    return f"a step would take about {then:.0f} instead of {now:.0f} s on {DEVICE}, by estimate, with {changed}"


def fastest_split(config: RunConfig, model: Architecture) -> RunConfig | None:
    """Return `config` with the legal split that gives the shortest step; None if no split is legal.

    Of splits with equal steps, returns the one with the shortest sum of stages. `config` must state its devices and
    their memory.
    """
    devices, colocated = config.cluster.nodes * (config.cluster.devices_per_node or 0), _is_colocated(config)
    scoring = scoring_groups(config)

    @cache
    def training(count: int) -> Choice:
        groups = ("actor", "critic") if has_critic(config.algorithm) else ("actor",)
        return _shortest(training_choices(config, model, count), model, StepCost.training_s, groups)

    @cache
    def inference(first: int, count: int) -> Choice:
        return _shortest(inference_choices(config, model, first, count), model, StepCost.inference_s, scoring)

    @cache
    def rollout(first: int) -> Choice:
        return _shortest(
            rollout_choices(config, model, first, devices - first), model, StepCost.rollout_s, ("rollout",)
        )

    if colocated:
        choices = training(devices), inference(0, devices), rollout(0)
        return joined(*(choice[1] for choice in choices)) if all(choice[0] < inf for choice in choices) else None
    best: tuple[float, float, RunConfig | None] = (inf, inf, None)
    for actors, scorers in product(range(1, devices), range(1, devices) if scoring else (0,)):
        if actors + scorers >= devices or max(training(actors)[0], rollout(actors + scorers)[0]) > best[0]:
            continue  # Inference, of which there is a choice for each pair, cannot make this split the fastest.
        choices = training(actors), inference(actors, scorers), rollout(actors + scorers)
        seconds = [choice[0] for choice in choices]
        if (max(seconds), sum(seconds)) < best[:2]:
            best = max(seconds), sum(seconds), joined(*(choice[1] for choice in choices))
    return best[2]


def _shortest(
    candidates: Iterable[RunConfig], model: Architecture, seconds: Callable[[StepCost], float], groups: Iterable[str]
) -> Choice:
    """Return the candidate with the shortest stage among those whose `groups` fit on a device together."""
    timed = sorted(((seconds(StepCost(one, model)), one) for one in candidates), key=lambda pair: pair[0])
    groups = tuple(groups)
    return next(((taken, one) for taken, one in timed if fits(one, model, groups)), (inf, RunConfig()))


def fits(config: RunConfig, model: Architecture, groups: Iterable[str]) -> bool:
    """Return True if `groups` fit on a device together."""
    room = USABLE * (config.cluster.device_memory_gib or inf) * GIB
    return sum(group_memory(config, model, group).total for group in groups) <= room


def training_choices(config: RunConfig, model: Architecture, count: int) -> Iterator[RunConfig]:
    """Yield the config with each legal way to train on the first `count` devices."""
    for parallel, recompute in product(_parallel_sizes(model, count), (False, True)):
        one = replace(
            _placed(config, "actor", 0, count),
            model=replace(config.model, recompute=recompute),
            actor=replace(config.actor, parallel=parallel),
            critic=replace(config.critic, parallel=parallel),
        )
        if not any(context_problems(one, "actor", model)):
            yield one


def scoring_groups(config: RunConfig) -> tuple[str, ...]:
    """Return `("inference",)`; an empty tuple for a run without an inference group, which has nothing to compute."""
    return ("inference",) if scoring_forwards(config.algorithm) else ()


def inference_choices(config: RunConfig, model: Architecture, first: int, count: int) -> Iterator[RunConfig]:
    """Yield the config with each legal way to score on `count` devices from `first` on.

    Without an inference group, yields one config: its key names these devices if `count` is positive, as in a colocated
    run, else rank 0, which is the actor's.
    """
    if not scoring_groups(config):
        yield _placed(config, "inference", first, count) if count else _placed(config, "inference", 0, 1)
        return
    for parallel in _parallel_sizes(model, count):
        one = _placed(config, "inference", first, count)
        one = replace(one, inference=replace(config.inference, parallel=parallel))
        if not any(context_problems(one, "inference", model)):
            yield one


def rollout_choices(config: RunConfig, model: Architecture, first: int, count: int) -> Iterator[RunConfig]:
    """Yield the config with each legal size of the engines on `count` devices from `first` on."""
    fewest = 1 if _is_colocated(config) else 2
    for tp in _SIZES:
        engine = replace(config.rollout.engine, tp=tp)
        one = replace(_placed(config, "rollout", first, count), rollout=replace(config.rollout, engine=engine))
        if first % tp == 0 and count // tp >= fewest and not any(engine_problems(one, count, model)):
            yield one


def _parallel_sizes(model: Architecture, count: int) -> Iterator[ParallelConfig]:
    """Yield the legal parallel sizes of a Megatron group of `count` devices."""
    for tp, pp, cp, ep in product(_SIZES, _SIZES, _CONTEXT_SIZES, _SIZES if model.experts else (1,)):
        parallel = ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=tp > 1)
        if not any(parallel_problems("actor", parallel, count, model)):
            yield parallel


def _placed(config: RunConfig, group: str, first: int, count: int) -> RunConfig:
    """Return the config with the group on `count` devices from `first` on, and the critic on the actor's."""
    placement = {name: ranks for name, ranks in config.cluster.placement.items() if name != "critic"}
    held = str(first) if count == 1 else f"{first}-{first + count - 1}"
    return replace(config, cluster=replace(config.cluster, placement={**placement, group: held}))


def joined(training: RunConfig, inference: RunConfig, rollout: RunConfig) -> RunConfig:
    """Return the config with the choices of all stages."""
    owners = {"actor": training, "inference": inference, "rollout": rollout}
    placement = {group: owner.cluster.placement[group] for group, owner in owners.items()}
    cluster = replace(training.cluster, placement=placement)
    return replace(training, cluster=cluster, inference=inference.inference, rollout=rollout.rollout)


def _is_colocated(config: RunConfig) -> bool:
    return config.cluster.mode is Mode.colocated


def settings_of(config: RunConfig) -> dict[str, str]:
    """Return the settings that a split determines, as overrides of a command line."""
    placement = ", ".join(f"{group}: '{ranks}'" for group, ranks in config.cluster.placement.items())
    sizes = {
        f"{group}.parallel.{size}": "null" if value is None else str(value).lower()
        for group, settings in megatron_groups(config).items()
        for size, value in asdict(settings.parallel).items()
    }
    return {
        "cluster.placement": f'"{{{placement}}}"',
        "model.recompute": str(config.model.recompute).lower(),
        "rollout.engine.tp": str(config.rollout.engine.tp),
        **sizes,
    }
