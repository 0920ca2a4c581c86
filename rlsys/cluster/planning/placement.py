"""Placement: which device ranks each group has, and whether groups, model and machines fit together so. Pure.

A group's ranks are read from text such as "0-3" or "0-1,4"; they are distinct, and their order is the order of its
worker ranks. A critic that is not placed lives on the actor's ranks.

Memory is compared with the plan's estimate of what is on a device at the same time: all groups that share it where
they work side by side; where they take turns (collocated), those that are there together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from rlsys.config.derived import megatron_groups, needs_server
from rlsys.config.problems import Problem
from rlsys.config.schema import Device, Mode, Packing, ParallelConfig, RunConfig, SyncMode
from rlsys.errors import UserError
from rlsys.weights.weight_map import Architecture

GROUPS = ("actor", "inference", "rollout")
CRITIC = "critic"
ROLLOUT = "rollout"
USABLE = 0.9  # Of a device's memory; the rest is for the driver's context, communication buffers and fragmentation.
_PART = re.compile(r"(\d+)(?:-(\d+))?")

Ranks = Mapping[str, Sequence[int]]


def parse_ranks(text: str, key: str) -> tuple[int, ...]:
    """Read device ranks; `key` names the setting in the error's sentence."""
    ranks: list[int] = []
    for part in str(text).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UserError(f'{key}="{text}" is not a list of ranks: write e.g. "0-3" or "0,2-3".')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f'{key}="{text}" counts down from {first} to {last}: write "{last}-{first}".')
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise UserError(f'{key}="{text}" names a rank twice: name each rank once.')
    return tuple(ranks)


def parse_placement(placement: Mapping[str, str], with_critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Ranks of every group; all must be placed but the critic, where there is one, and no other."""
    groups = (*GROUPS, CRITIC)
    if unknown := sorted(set(placement) - set(groups)):
        raise UserError(f"cluster.placement.{unknown[0]} is not a group: the groups are {', '.join(groups)}.")
    if missing := [group for group in GROUPS if group not in placement]:
        raise UserError(f"cluster.placement.{missing[0]} is missing: give the group's device ranks.")
    if CRITIC in placement and not with_critic:
        raise UserError(
            "cluster.placement.critic is given but algorithm.baseline is not critic: leave it out, or set "
            "algorithm.baseline=critic."
        )
    placed = (group for group in groups if group in placement)
    ranks = {group: parse_ranks(placement[group], f"cluster.placement.{group}") for group in placed}
    if with_critic:
        ranks.setdefault(CRITIC, ranks["actor"])
    return ranks


def overlaps(ranks: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, list[int]]]:
    """Pairs of groups that share devices, with the shared ranks.

    A critic on all of the actor's ranks and no other is as one group with it.
    """
    together = CRITIC in ranks and set(ranks[CRITIC]) == set(ranks["actor"])
    apart = sorted(set(ranks) - {CRITIC} if together else ranks)
    shared = ((a, b, sorted(set(ranks[a]) & set(ranks[b]))) for a, b in combinations(apart, 2))
    return [(a, b, both) for a, b, both in shared if both]


def machine_problems(config: RunConfig, ranks: Ranks) -> Iterator[Problem]:
    """Refuse a placement that the machines and their devices do not have room for."""
    cluster = config.cluster
    if cluster.devices_per_node is None:
        if cluster.nodes > 1:
            yield Problem(
                "cluster.devices_per_node",
                f"cluster.nodes={cluster.nodes} says nothing of how many devices each has: set cluster.devices_per_node.",
            )
        return
    have = cluster.nodes * cluster.devices_per_node
    highest = max(rank for held in ranks.values() for rank in held)
    if highest >= have:
        yield Problem(
            "cluster.placement",
            f"cluster.placement names rank {highest}, but cluster.nodes={cluster.nodes} of cluster.devices_per_node="
            f"{cluster.devices_per_node} have ranks 0 to {have - 1}: place the groups on those, or give more machines.",
        )
    yield from _engines_within(config, ranks[ROLLOUT], cluster.devices_per_node)
    yield from _reach(config, ranks, cluster.devices_per_node)


def launch_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse, without `rlsys launch`, settings that it alone makes true: the run would silently be another one."""
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.address is None:
        yield Problem(
            "cluster.address",
            f"cluster.nodes={cluster.nodes} and cluster.address is null: start the run with `rlsys launch` on every "
            "machine, or give the address of a Ray cluster that has them.",
        )
    if cluster.search.nodes and config.search.url is None and needs_server(config.search):
        yield Problem(
            "cluster.search.nodes",
            f"cluster.search.nodes={cluster.search.nodes} and search.url is null: servers are started there by `rlsys "
            "launch` alone; start the run with it, give search.url of a running one, or set cluster.search.nodes=[].",
        )


def memory_problems(config: RunConfig, plan: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse groups that do not fit the memory of a device, as `make_plan` estimates it."""
    have = config.cluster.device_memory_gib
    if have is None:
        return
    names, needed = fullest_device(config, plan)
    if needed > have * USABLE:
        smaller = " and ".join("rollout.engine.tp" if name == ROLLOUT else f"{name}.parallel.tp" for name in names)
        budgets = [f"{name}.micro_batch_tokens" for name in names if name != ROLLOUT]
        yield Problem(
            "cluster.device_memory_gib",
            f"{' and '.join(names)} would take about {needed:.1f} GiB of one device, more than {USABLE:.0%} of "
            f"cluster.device_memory_gib={have:g}: raise {smaller}, or lower "
            f"{' and '.join(budgets) or 'rollout.engine.memory_fraction'}.",
        )


def fullest_device(config: RunConfig, plan: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """The groups that take most of one device at the same time, and how much that is in GiB."""
    groups = plan["groups"]
    sizes = {name: group["memory_gib_per_rank"] for name, group in groups.items()}
    ranks = {rank for group in groups.values() for rank in group["ranks"]}
    together = {
        tuple(name for name in turn if rank in groups.get(name, {"ranks": ()})["ranks"])
        for rank in ranks
        for turn in _turns(config)
    }
    return max(((names, sum(sizes[name] for name in names)) for names in together), key=lambda pair: pair[1])


def _turns(config: RunConfig) -> tuple[tuple[str, ...], ...]:
    """Groups that are on their devices at the same time."""
    if config.cluster.mode is not Mode.collocated:
        return (("actor", "inference", CRITIC, ROLLOUT),)
    # The actor hands its weights to the inference group while both are there; what learns, learns together.
    return ((ROLLOUT,), ("actor", "inference"), ("actor", CRITIC), ("inference", CRITIC))


def _engines_within(config: RunConfig, rollout: Sequence[int], per_node: int) -> Iterator[Problem]:
    """Every engine lies on one machine."""
    tp, held = config.rollout.engine.tp, sorted(rollout)
    for start in range(0, len(held) - len(held) % max(tp, 1), max(tp, 1)):
        machines = {rank // per_node for rank in held[start : start + tp]}
        if len(machines) > 1:
            yield Problem(
                "cluster.placement.rollout",
                f"cluster.placement.rollout puts one engine of rollout.engine.tp={tp} on ranks {held[start]} to "
                f"{held[start + tp - 1]}, which are on {len(machines)} machines of cluster.devices_per_node={per_node}: "
                "an engine lies on one; change the placement or rollout.engine.tp.",
            )
            return


def _reach(config: RunConfig, ranks: Ranks, per_node: int) -> Iterator[Problem]:
    """Weights get from the ranks of the actor that send them to everybody in the way that is chosen.

    Its first rank sends; with `ipc` so does the first rank of every pipeline stage.
    """
    mode = config.cluster.sync_mode
    if mode not in (SyncMode.tensor, SyncMode.ipc):
        return
    actor, stages = ranks["actor"], config.actor.parallel.pp if mode is SyncMode.ipc else 1
    senders = actor[:: max(1, len(actor) // max(1, stages))]
    concerned = {"actor": senders, "inference": ranks["inference"], "rollout": ranks["rollout"]}
    home = actor[0] // per_node
    away = [name for name, held in concerned.items() if any(rank // per_node != home for rank in held)]
    if away:
        way = "host memory" if mode is SyncMode.tensor else "device memory"
        yield Problem(
            "cluster.sync_mode",
            f"cluster.sync_mode={mode} hands weights on through the {way} of one machine, but cluster.placement puts "
            f"{' and '.join(away)} on others than the actor's first rank: use {way_across(config)}.",
        )


def way_across(config: RunConfig) -> str:
    """The setting by which weights get to other machines."""
    if config.cluster.mode is Mode.collocated and config.cluster.device is Device.gpu:
        # NCCL refuses a group that has two members on one GPU.
        return "cluster.sync_mode=disk, with an output_dir that all machines share"
    return "cluster.sync_mode=broadcast"


def search_node_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse search servers on machines that are not there, or without an index."""
    wanted = config.cluster.search.nodes
    beyond = [name for name in wanted if name.isdigit() and int(name) >= config.cluster.nodes]
    if beyond:
        yield Problem(
            "cluster.search.nodes",
            f"cluster.search.nodes names machine {beyond[0]}, but cluster.nodes={config.cluster.nodes} are numbered from "
            "0: name one of them, or another machine by its host name.",
        )
    if wanted and config.search.index is None and needs_server(config.search):
        yield Problem(
            "cluster.search.nodes",
            f"cluster.search.nodes={wanted} are to serve an index and search.index is null: give its folder.",
        )


def ipc_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse to hand device memory on where there are no devices."""
    if config.cluster.sync_mode is SyncMode.ipc and config.cluster.device is Device.cpu:
        yield Problem(
            "cluster.sync_mode",
            "cluster.sync_mode=ipc hands GPU memory on, and cluster.device=cpu has none: use cluster.sync_mode=tensor.",
        )


def parallel_problems(group: str, parallel: ParallelConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """Refuse ways to cut this model over a Megatron group of `world` ranks."""
    key = f"{group}.parallel"
    if min(parallel.tp, parallel.pp, parallel.cp, parallel.ep) < 1:
        return
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world % model_ranks:
        yield Problem(
            f"cluster.placement.{group}",
            f"cluster.placement.{group} has {world} ranks, which {key} tp*pp*cp = {parallel.tp}*{parallel.pp}*"
            f"{parallel.cp} = {model_ranks} does not divide: change the placement or the parallel sizes.",
        )
    elif world // parallel.pp % parallel.ep:
        yield Problem(
            f"{key}.ep",
            f"{key}.ep={parallel.ep} does not divide the {world // parallel.pp} ranks of a pipeline stage: lower it, or "
            "give the group more ranks.",
        )
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        yield Problem(
            f"{key}.ep",
            f"{key}.ep={parallel.ep} spreads experts, and the model has {model.experts or 'none'}: set a divisor of "
            "their number, or 1.",
        )
    if model.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"{key}.tp", f"{key}.tp={parallel.tp} of a model with experts needs {key}.sequence_parallel=true: set it."
        )
    if parallel.sequence_parallel and parallel.tp == 1:
        yield Problem(
            f"{key}.sequence_parallel",
            f"{key}.sequence_parallel=true needs tp above 1: set it to false, or raise {key}.tp.",
        )
    yield from _stages(f"{key}.pp", parallel, model.layers)
    if model.heads % parallel.tp:
        yield Problem(
            f"{key}.tp",
            f"{key}.tp={parallel.tp} does not divide the model's {model.heads} attention heads: choose a divisor.",
        )
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        yield Problem(
            f"{key}.tp",
            f"{key}.tp={parallel.tp} neither divides the model's {model.kv_heads} key/value heads nor is a multiple of "
            "them: choose another.",
        )


def context_problems(config: RunConfig, group: str) -> Iterator[Problem]:
    """Refuse context parallelism without packed rows that hold an episode."""
    settings = megatron_groups(config)[group]
    cp, tp = settings.parallel.cp, settings.parallel.tp
    if cp == 1:
        return
    if settings.packing is Packing.padded:
        yield Problem(
            f"{group}.packing",
            f"{group}.parallel.cp={cp} cuts packed sequences alone, and {group}.packing is padded: set it to packed.",
        )
    multiple = 2 * cp * (tp if settings.parallel.sequence_parallel else 1)
    needed = -(-config.task.max_total_tokens // multiple) * multiple
    if settings.micro_batch_tokens < needed:
        yield Problem(
            f"{group}.micro_batch_tokens",
            f"{group}.micro_batch_tokens={settings.micro_batch_tokens} cannot hold one episode, which "
            f"{group}.parallel.cp={cp} rounds up to {needed} tokens: raise it to that at least.",
        )


def _stages(key: str, parallel: ParallelConfig, layers: int) -> Iterator[Problem]:
    if parallel.pp_layers is not None:
        if len(parallel.pp_layers) != parallel.pp or sum(parallel.pp_layers) != layers:
            yield Problem(
                f"{key}_layers",
                f"{key}_layers={parallel.pp_layers} must hold {parallel.pp} numbers (pp) that sum to the "
                f"model's {layers} layers.",
            )
        elif min(parallel.pp_layers) < 1:
            yield Problem(f"{key}_layers", f"{key}_layers={parallel.pp_layers}: every stage needs at least one layer.")
    elif layers % parallel.pp:
        yield Problem(key, f"{key}={parallel.pp} does not divide the model's {layers} layers: set {key}_layers.")


def engine_problems(config: RunConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """Refuse ways to cut `world` ranks into engines of this model."""
    tp, aside = config.rollout.engine.tp, config.eval.engines
    if tp < 1:
        return
    if aside is not None and config.cluster.mode is Mode.collocated:
        yield Problem(
            "eval.engines",
            f"eval.engines={aside} sets engines aside while others work, but with cluster.mode=collocated all take turns: "
            "set eval.engines to null.",
        )
    elif aside is not None and aside >= world // tp:
        yield Problem(
            "eval.engines",
            f"eval.engines={aside} leaves none of the {world // tp} engines for rollouts: lower it, add engines, or set it "
            "to null to evaluate between steps.",
        )
    if world % tp:
        yield Problem(
            "cluster.placement.rollout",
            f"cluster.placement.rollout has {world} ranks, which rollout.engine.tp={tp} does not divide: "
            "change one of them.",
        )
    elif model.heads % tp:
        yield Problem("rollout.engine.tp", f"rollout.engine.tp={tp} does not divide the model's {model.heads} heads.")
    if config.cluster.device is Device.cpu and tp > 1:
        yield Problem(
            "rollout.engine.tp",
            f"rollout.engine.tp={tp}: an engine on a CPU runs with tp=1; add ranks for more engines instead.",
        )
    if config.task.max_total_tokens > model.max_positions:
        yield Problem(
            "task.max_total_tokens",
            f"task.max_total_tokens={config.task.max_total_tokens} is above the model's {model.max_positions} positions: "
            "lower it.",
        )
