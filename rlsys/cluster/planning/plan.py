"""Resolves the plan of a run: groups, ranks, worlds and an estimate of memory. Pure."""

from __future__ import annotations

from typing import Any

from rlsys.cluster.planning.memory import GIB, count_parameters, group_memory
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.algorithm import AdvantageBaseline
from rlsys.config.derived import (
    has_critic,
    max_staleness,
    megatron_groups,
    mini_batch_sizes,
    needs_server,
    needs_whole_mini_batch,
    runs_ahead,
)
from rlsys.config.problems import algorithm_notes
from rlsys.config.schema import Device, Mode, RunConfig, Schedule, SearchConfig
from rlsys.weights.weight_map import Architecture, read_architecture

_SIZES = ("tp", "pp", "cp", "ep", "dp", "engines")


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Everything that the config settles, as plain data."""
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    model = read_architecture(config.model.path)
    trainer, algorithm = config.trainer, config.algorithm
    sizes = mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches)
    groups: dict[str, Any] = {
        name: {"ranks": list(ranks[name]), **_sizes(config, ranks[name], name), **_memory(config, model, name)}
        for name in ("actor", "inference", "critic", "rollout")
        if name in ranks
    }
    return {
        "name": config.name,
        "device": str(config.cluster.device),
        "world_size": len({rank for held in ranks.values() for rank in held}),
        "groups": groups,
        "model": {"path": config.model.path, "parameters": count_parameters(model), "dtype": str(config.model.dtype)},
        "batch": {
            "prompts_per_step": trainer.prompts_per_step,
            "episodes_per_step": trainer.prompts_per_step * algorithm.n_samples,
            "episodes_per_update": sorted({size * algorithm.n_samples for size in sizes}),
            "updates": trainer.steps * trainer.mini_batches,
        },
        "schedule": {
            "kind": str(trainer.schedule.kind),
            "max_staleness": max_staleness(config),
            "overlap": overlap(config),
        },
        "token_mode": str(config.task.token_mode),
        "search": _search(config.search),
        "notes": list(algorithm_notes(config)),
    }


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as lines of text."""
    model, batch = plan["model"], plan["batch"]
    lines = [
        f"{plan['name']}: {plan['world_size']} {plan['device']} ranks",
        f"  model      {model['path']}, {model['parameters']:,} parameters, {model['dtype']}",
        f"  step       {batch['prompts_per_step']} prompts, {batch['episodes_per_step']} episodes, "
        f"{' or '.join(map(str, batch['episodes_per_update']))} to an optimiser step",
        f"  schedule   {plan['schedule']['kind']}, staleness at most {plan['schedule']['max_staleness']}: "
        f"{plan['schedule']['overlap']}",
        f"  tokens     {plan['token_mode']}",
        f"  search     {plan['search']}",
    ]
    for name, group in plan["groups"].items():
        sizes = ", ".join(f"{key} {value}" for key, value in group.items() if key in _SIZES)
        ranks = ",".join(map(str, group["ranks"]))
        lines.append(f"  {name:10} ranks {ranks}: {sizes}, about {group['memory_gib_per_rank']:.3g} GiB each")
        parts = (f"{part} {size:.3g}" for part, size in group["memory_gib"].items())
        lines.append(f"  {'':10} of GiB at their fullest: {', '.join(parts)}")
    return "\n".join([*lines, *(f"  note       {note}" for note in plan["notes"])])


def overlap(config: RunConfig) -> str:
    """Which stages run at the same time."""
    kind, algorithm = config.trainer.schedule.kind, config.algorithm
    if config.cluster.mode is Mode.collocated:
        frees = "" if config.cluster.device is Device.gpu else "; an engine on a CPU frees nothing while it sleeps"
        return f"stages take turns on the same devices{frees}"
    if kind is Schedule.sequential:
        return "no stages overlap"
    overlapping = f"rollout, log-probs and training overlap {'across steps' if runs_ahead(config) else 'within a step'}"
    if not needs_whole_mini_batch(algorithm):
        return overlapping
    batch = algorithm.baseline is AdvantageBaseline.batch
    because = "algorithm.baseline=batch" if batch else f"algorithm.advantage_scale={algorithm.advantage_scale}"
    return f"{overlapping}; training waits for whole mini-batches, because {because}"


def _search(search: SearchConfig) -> str:
    if not search.enabled:
        return "none"
    if not needs_server(search):
        return f"played from {search.cassette.path}"
    if search.url is None:
        return f"started by the run on {search.index}"
    return ", ".join([search.url, *search.replicas])


def _sizes(config: RunConfig, ranks: tuple[int, ...], name: str) -> dict[str, int]:
    if name == "rollout":
        tp = config.rollout.engine.tp
        return {"engines": len(ranks) // tp, "tp": tp}
    parallel = megatron_groups(config)[name].parallel
    dp = len(ranks) // (parallel.tp * parallel.pp * parallel.cp)
    return {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep, "dp": dp}


def _memory(config: RunConfig, model: Architecture, name: str) -> dict[str, Any]:
    """Memory of one rank of the group: at its fullest, and by parts, which are not all there at once."""
    memory = group_memory(config, model, name)
    parts = {part: round(size / GIB, 4) for part, size in memory.parts.items()}
    return {"memory_gib_per_rank": round(memory.total / GIB, 4), "memory_gib": parts}
