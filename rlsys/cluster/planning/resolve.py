"""Resolves a run's plan: groups, ranks, parallel sizes, memory, and the estimated seconds of a step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import DEVICE
from rlsys.cluster.planning.host import host_memory
from rlsys.cluster.planning.memory import GIB, checkpoint_bytes, count_parameters, group_memory
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config import derived
from rlsys.config.algorithm import PolicyGradientLoss
from rlsys.config.derived import has_critic, megatron_groups, scoring_forwards
from rlsys.config.schema import Device, Mode, RunConfig
from rlsys.weights.weight_map import Architecture, read_architecture

_SIZES = ("tp", "pp", "cp", "ep", "dp", "engines")


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Return the resolved plan of `config` as plain data."""
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    model = read_architecture(config.model.path, config.model.family)
    trainer, algorithm = config.trainer, config.algorithm
    sizes = derived.mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches)
    names = sorted(megatron_groups(config), key=("actor", "inference", "critic").index)
    groups = {name: _group(config, model, name, ranks[name]) for name in (*names, "rollout")}
    return {
        "name": config.name,
        "device": str(config.cluster.device),
        "world_size": len({rank for name in groups for rank in ranks[name]}),
        "groups": groups,
        "model": {"path": config.model.path, "parameters": count_parameters(model), "dtype": str(config.model.dtype)},
        "batch": {
            "prompts_per_step": trainer.prompts_per_step,
            "episodes_per_step": trainer.prompts_per_step * algorithm.n_samples,
            "episodes_per_update": sorted({size * algorithm.n_samples for size in sizes}),
            "updates": trainer.steps * trainer.mini_batches,
        },
        "schedule": {
            "kind": trainer.schedule.kind,
            "max_staleness": derived.max_staleness(config),
            "overlap": overlap(config),
        },
        "token_mode": str(config.task.token_mode),
        "search": _search(config),
        "seconds": _seconds(config, model) if config.cluster.device is Device.gpu else {},
        "host_gib": _host_gib(config, model),
        "checkpoint_gib": checkpoint_bytes(config, model) / GIB,
        "notes": list(notes_on(config)),
    }


def notes_on(config: RunConfig) -> Iterator[str]:
    """Yield one warning for each setting that works but is probably a mistake."""
    algorithm, mini_batches, placement = config.algorithm, config.trainer.mini_batches, config.cluster.placement
    if not scoring_forwards(algorithm):
        ranks = parse_placement(placement, has_critic(algorithm))
        if {*ranks.pop("inference")} - {rank for held in ranks.values() for rank in held}:
            yield (
                f"algorithm.old_logprobs={algorithm.old_logprobs} without a reference policy leaves devices of "
                f"cluster.placement.inference={placement['inference']} unused: give them to rollout or actor, and name a "
                "rank of theirs here."
            )
    if isinstance(algorithm.policy_loss, PolicyGradientLoss) and mini_batches > 1:
        yield (
            f"algorithm.policy_loss.kind=policy_gradient has no ratio, so with trainer.mini_batches={mini_batches} all but the "
            "first optimiser step of a step treat off-policy samples as on-policy: set it to 1."
        )


def render_plan(plan: dict[str, Any]) -> str:
    """Format the plan as lines of text."""
    model, batch = plan["model"], plan["batch"]
    lines = [
        f"{plan['name']}: {plan['world_size']} {plan['device']} ranks",
        f"  model      {model['path']}, {model['parameters']:,} parameters, {model['dtype']}",
        f"  step       {batch['prompts_per_step']} prompts, {batch['episodes_per_step']} episodes, "
        f"{' or '.join(map(str, batch['episodes_per_update']))} per optimiser step",
        f"  schedule   {plan['schedule']['kind']}, staleness at most {plan['schedule']['max_staleness']}: "
        f"{plan['schedule']['overlap']}",
        f"  tokens     {plan['token_mode']}",
        f"  search     {plan['search']}",
    ]
    if seconds := plan["seconds"]:
        stages = ", ".join(f"{stage} {seconds[stage]:.0f} s" for stage in ("rollout", "inference", "training"))
        lines.append(
            f"  time       about {seconds['step']:.0f} s per step on {seconds['device']}, an estimate: {stages}"
        )
    needs = ", ".join(f"{part} {size:.3g}" for part, size in plan["host_gib"].items())
    lines.append(f"  host       GiB of the fullest machine: {needs}")
    lines.append(f"  checkpoint {plan['checkpoint_gib']:.3g} GiB each")
    for name, group in plan["groups"].items():
        sizes = ", ".join(f"{key} {value}" for key, value in group.items() if key in _SIZES)
        ranks = ",".join(map(str, group["ranks"]))
        lines.append(f"  {name:10} ranks {ranks}: {sizes}, about {group['memory_gib_per_rank']:.3g} GiB each")
        parts = (f"{part} {size:.3g}" for part, size in group["memory_gib"].items())
        lines.append(f"  {'':10} peak GiB of each part: {', '.join(parts)}")
    return "\n".join([*lines, *(f"  note       {note}" for note in plan["notes"])])


def overlap(config: RunConfig) -> str:
    """Describe which stages run at the same time."""
    algorithm = config.algorithm
    if config.cluster.mode is Mode.colocated:
        frees = "" if config.cluster.device is Device.gpu else "; an engine on a CPU frees no memory while it sleeps"
        return f"stages run one after another on the same devices{frees}"
    if config.trainer.schedule.kind == "sequential":
        return "no stages overlap"
    across = "across steps" if derived.max_staleness(config) else "within a step"
    overlapping = f"rollout, log-probs and training overlap {across}"
    if not derived.needs_whole_mini_batch(algorithm):
        return overlapping
    return (
        f"{overlapping}; training waits for whole mini-batches, because algorithm.advantage compares all their tokens"
    )


def _seconds(config: RunConfig, model: Architecture) -> dict[str, Any]:
    """Return the estimated seconds of each stage and of a step, with the kind of device."""
    stages = StepCost(config, model).stages()
    rounded = {stage: round(seconds, 2) for stage, seconds in asdict(stages).items()}
    return {"device": DEVICE, **rounded, "step": round(stages.of_step(config.cluster.mode), 2)}


def _host_gib(config: RunConfig, model: Architecture) -> dict[str, float]:
    """Return the host memory of the fullest machine by part, without parts that it does not need."""
    return {part: size / GIB for part, size in asdict(host_memory(config, model)).items() if size}


def _search(config: RunConfig) -> str:
    search = config.search
    if not search.enabled:
        return "none"
    if not derived.needs_server(search):
        return f"replayed from {search.cassette.path}"
    if search.url is None:
        return f"started by the run on {search.index}"
    return ", ".join([search.url, *search.replicas])


def _group(config: RunConfig, model: Architecture, name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return a group's ranks, parallel sizes, and peak memory of one rank, in total and by part.

    The parts peak at different times, so they can sum to more than the total.
    """
    if name == "rollout":
        tp = config.rollout.engine.tp
        sizes = {"engines": len(ranks) // tp, "tp": tp}
    else:
        parallel = megatron_groups(config)[name].parallel
        sizes = {size: getattr(parallel, size) for size in ("tp", "pp", "cp", "ep")}
        sizes["dp"] = len(ranks) // (parallel.tp * parallel.pp * parallel.cp)
    memory = group_memory(config, model, name)
    parts = {part: round(size / GIB, 4) for part, size in memory.parts.items()}
    return {"ranks": list(ranks), **sizes, "memory_gib_per_rank": round(memory.total / GIB, 4), "memory_gib": parts}
