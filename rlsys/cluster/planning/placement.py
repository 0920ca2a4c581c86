"""Placement: which device ranks each group has, whether groups, model and machines fit together so, and its bundles. Pure.

A group's ranks are read from text such as "0-3" or "0-1,4"; they are distinct, and their order is the order of its
worker ranks. A critic that is not placed lives on the actor's ranks.

A bundle is what one machine reserves as a whole. Ranks that one process holds together are in one bundle, and so are all
processes that hold one of its ranks; ranks that nothing ties together are apart. On several machines of known size it is
all that is held of one machine. Bundles stand in the order of their lowest ranks, so groups lie as the placement says.
Ray itself chooses the device of a bundle that a process gets a share of. Where a bundle has several that are shared, two
processes could land on the same one: its slots are `pinned`, their devices are named, and Ray is asked for none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import floor
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
RESOLUTION = 10_000  # Ray counts devices in ten-thousandths, and rounds: 6 x 1/6 would be more than 1.
_PART = re.compile(r"(\d+)(?:-(\d+))?")

Ranks = tuple[int, ...]


def parse_ranks(text: str, key: str) -> Ranks:
    """Read device ranks; `key` names the setting in the error's sentence."""
    ranks: list[int] = []
    for part in str(text).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f'{key}="{text}" is not a list of ranks: write e.g. "0-3" or "0,2-3".', code="malformed", key=key
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(
                f'{key}="{text}" counts down from {first} to {last}: write "{last}-{first}".', code="malformed", key=key
            )
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise UserError(f'{key}="{text}" names a rank twice: name each rank once.', code="malformed", key=key)
    return tuple(ranks)


def parse_placement(placement: Mapping[str, str], with_critic: bool = False) -> dict[str, Ranks]:
    """Ranks of every group; all must be placed but the critic, where there is one, and no other."""
    groups = (*GROUPS, CRITIC)
    if unknown := sorted(set(placement) - set(groups)):
        key = f"cluster.placement.{unknown[0]}"
        raise UserError(f"{key} is not a group: the groups are {', '.join(groups)}.", code="unknown", key=key)
    if missing := [group for group in GROUPS if group not in placement]:
        key = f"cluster.placement.{missing[0]}"
        raise UserError(f"{key} is missing: give the group's device ranks.", code="missing", key=key)
    if CRITIC in placement and not with_critic:
        raise UserError(
            "cluster.placement.critic is given but algorithm.baseline is not critic: leave it out, or set "
            "algorithm.baseline=critic.",
            code="conflict",
            key="cluster.placement.critic",
        )
    placed = (group for group in groups if group in placement)
    ranks = {group: parse_ranks(placement[group], f"cluster.placement.{group}") for group in placed}
    if with_critic:
        ranks.setdefault(CRITIC, ranks["actor"])
    return ranks


def overlaps(ranks: Mapping[str, Ranks]) -> list[tuple[str, str, list[int]]]:
    """Pairs of groups that share devices, with the shared ranks.

    A critic on all of the actor's ranks and no other is as one group with it.
    """
    together = CRITIC in ranks and set(ranks[CRITIC]) == set(ranks["actor"])
    apart = sorted(set(ranks) - {CRITIC} if together else ranks)
    shared = ((a, b, sorted(set(ranks[a]) & set(ranks[b]))) for a, b in combinations(apart, 2))
    return [(a, b, both) for a, b, both in shared if both]


def machine_problems(config: RunConfig, ranks: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
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
        yield Problem.of(
            f"cluster.placement names rank {highest}, but cluster.nodes={cluster.nodes} of cluster.devices_per_node="
            f"{cluster.devices_per_node} have ranks 0 to {have - 1}: place the groups on those, or give more machines."
        )
    tp, held, per_node = max(config.rollout.engine.tp, 1), sorted(ranks[ROLLOUT]), cluster.devices_per_node
    for start in range(0, len(held) - len(held) % tp, tp):
        machines = {rank // per_node for rank in held[start : start + tp]}
        if len(machines) > 1:
            yield Problem.of(
                f"cluster.placement.rollout puts one engine of rollout.engine.tp={tp} on ranks {held[start]} to "
                f"{held[start + tp - 1]}, which are on {len(machines)} machines of cluster.devices_per_node={per_node}: "
                "an engine lies on one; change the placement or rollout.engine.tp."
            )
            break
    yield from _reach(config, ranks, per_node)


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
        yield Problem.of(
            f"cluster.search.nodes={cluster.search.nodes} and search.url is null: servers are started there by `rlsys "
            "launch` alone; start the run with it, give search.url of a running one, or set cluster.search.nodes=[]."
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
    turns: tuple[tuple[str, ...], ...] = (
        ("actor", "inference", CRITIC, ROLLOUT),
    )  # Groups that are on their devices at the same time.
    if config.cluster.mode is Mode.collocated:
        # The actor hands its weights to the inference group while both are there; what learns, learns together.
        turns = ((ROLLOUT,), ("actor", "inference"), ("actor", CRITIC), ("inference", CRITIC))
    together = {
        tuple(name for name in turn if name in groups and rank in groups[name]["ranks"])
        for rank in ranks
        for turn in turns
    }
    return max(((names, sum(sizes[name] for name in names)) for names in together), key=lambda pair: pair[1])


def _reach(config: RunConfig, ranks: Mapping[str, Sequence[int]], per_node: int) -> Iterator[Problem]:
    """Refuse a way for weights that does not get from the actor's sending ranks to everybody."""
    mode = config.cluster.sync_mode
    if mode not in (SyncMode.tensor, SyncMode.ipc):
        return
    # Its first rank sends; with `ipc` so does the first rank of every pipeline stage.
    actor, stages = ranks["actor"], config.actor.parallel.pp if mode is SyncMode.ipc else 1
    senders = actor[:: max(1, len(actor) // max(1, stages))]
    concerned = {"actor": senders, "inference": ranks["inference"], "rollout": ranks["rollout"]}
    home = actor[0] // per_node
    away = [name for name, held in concerned.items() if any(rank // per_node != home for rank in held)]
    if away:
        way = "host memory" if mode is SyncMode.tensor else "device memory"
        yield Problem.of(
            f"cluster.sync_mode={mode} hands weights on through the {way} of one machine, but cluster.placement puts "
            f"{' and '.join(away)} on others than the actor's first rank: use {way_across(config)}."
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
        yield Problem.of(
            f"cluster.search.nodes names machine {beyond[0]}, but cluster.nodes={config.cluster.nodes} are numbered from "
            "0: name one of them, or another machine by its host name."
        )
    if wanted and config.search.index is None and needs_server(config.search):
        yield Problem.of(
            f"cluster.search.nodes={wanted} are to serve an index and search.index is null: give its folder."
        )


def ipc_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse to hand device memory on where there are no devices."""
    if config.cluster.sync_mode is SyncMode.ipc and config.cluster.device is Device.cpu:
        yield Problem.of(
            "cluster.sync_mode=ipc hands GPU memory on, and cluster.device=cpu has none: use cluster.sync_mode=tensor."
        )


def parallel_problems(group: str, parallel: ParallelConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """Refuse ways to cut this model over a Megatron group of `world` ranks."""
    key = f"{group}.parallel"
    if min(parallel.tp, parallel.pp, parallel.cp, parallel.ep) < 1:
        return
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world % model_ranks:
        yield Problem.of(
            f"cluster.placement.{group} has {world} ranks, which {key} tp*pp*cp = {parallel.tp}*{parallel.pp}*"
            f"{parallel.cp} = {model_ranks} does not divide: change the placement or the parallel sizes."
        )
    elif world // parallel.pp % parallel.ep:
        yield Problem.of(
            f"{key}.ep={parallel.ep} does not divide the {world // parallel.pp} ranks of a pipeline stage: lower it, or "
            "give the group more ranks."
        )
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        yield Problem.of(
            f"{key}.ep={parallel.ep} spreads experts, and the model has {model.experts or 'none'}: set a divisor of "
            "their number, or 1."
        )
    if model.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield Problem.of(f"{key}.tp={parallel.tp} of a model with experts needs {key}.sequence_parallel=true: set it.")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield Problem.of(f"{key}.sequence_parallel=true needs tp above 1: set it to false, or raise {key}.tp.")
    if parallel.pp_layers is not None:
        if len(parallel.pp_layers) != parallel.pp or sum(parallel.pp_layers) != model.layers:
            yield Problem.of(
                f"{key}.pp_layers={parallel.pp_layers} must hold {parallel.pp} numbers (pp) that sum to the "
                f"model's {model.layers} layers."
            )
        elif min(parallel.pp_layers) < 1:
            yield Problem.of(f"{key}.pp_layers={parallel.pp_layers}: every stage needs at least one layer.")
    elif model.layers % parallel.pp:
        yield Problem.of(
            f"{key}.pp={parallel.pp} does not divide the model's {model.layers} layers: set {key}.pp_layers."
        )
    if model.heads % parallel.tp:
        yield Problem.of(
            f"{key}.tp={parallel.tp} does not divide the model's {model.heads} attention heads: choose a divisor."
        )
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        yield Problem.of(
            f"{key}.tp={parallel.tp} neither divides the model's {model.kv_heads} key/value heads nor is a multiple of "
            "them: choose another."
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
        yield Problem.of(
            f"{group}.micro_batch_tokens={settings.micro_batch_tokens} cannot hold one episode, which "
            f"{group}.parallel.cp={cp} rounds up to {needed} tokens: raise it to that at least."
        )


def engine_problems(config: RunConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """Refuse ways to cut `world` ranks into engines of this model."""
    tp, aside = config.rollout.engine.tp, config.eval.engines
    if tp < 1:
        return
    if aside is not None and config.cluster.mode is Mode.collocated:
        yield Problem.of(
            f"eval.engines={aside} sets engines aside while others work, but with cluster.mode=collocated all take turns: "
            "set eval.engines to null."
        )
    elif aside is not None and aside >= world // tp:
        yield Problem.of(
            f"eval.engines={aside} leaves none of the {world // tp} engines for rollouts: lower it, add engines, or set it "
            "to null to evaluate between steps."
        )
    if world % tp:
        yield Problem.of(
            f"cluster.placement.rollout has {world} ranks, which rollout.engine.tp={tp} does not divide: "
            "change one of them."
        )
    elif model.heads % tp:
        yield Problem.of(f"rollout.engine.tp={tp} does not divide the model's {model.heads} heads.")
    if config.cluster.device is Device.cpu and tp > 1:
        yield Problem.of(
            f"rollout.engine.tp={tp}: an engine on a CPU runs with tp=1; add ranks for more engines instead."
        )
    if config.task.max_total_tokens > model.max_positions:
        yield Problem.of(
            f"task.max_total_tokens={config.task.max_total_tokens} is above the model's {model.max_positions} positions: "
            "lower it."
        )


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The devices of one worker process."""

    bundle: int
    devices: tuple[int, ...]  # Which of the bundle's devices it works on, from 0.
    share: float  # Devices that it takes up; those of all slots of a bundle sum to the bundle's size, or just below.
    pinned: bool  # Whether its devices must be named, because Ray could choose others.


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """Bundles, and the slots of every group in the order of its worker ranks."""

    sizes: tuple[int, ...]  # Devices of each bundle.
    machines: tuple[int, ...] | None
    """Number of each bundle's machine, which no other bundle is on; None where any machine may have it."""
    slots: Mapping[str, tuple[DeviceSlot, ...]]


def plan_bundles(holdings: Mapping[str, Sequence[Ranks]], per_machine: int | None = None) -> BundlePlan:
    """Plan slots for processes that hold the device ranks `holdings[group][process]`, shared or not.

    With `per_machine` devices, ranks 0 to `per_machine` - 1 are the first machine's, and so on; what one process
    holds must lie on one machine then.
    """
    held = [ranks for processes in holdings.values() for ranks in processes]
    holders = Counter(rank for ranks in held for rank in ranks)
    if per_machine is None:
        # The finest partition in which each of `held` lies within one part.
        parts: list[set[int]] = []
        for ranks in held:
            touched = [part for part in parts if part & set(ranks)]
            parts = [part for part in parts if part not in touched] + [set(ranks).union(*touched)]
        bundles = sorted(tuple(sorted(part)) for part in parts)
    else:
        bundles = [tuple(here) for _, here in groupby(sorted(holders), lambda rank: rank // per_machine)]
    bundle_of = {rank: number for number, ranks in enumerate(bundles) for rank in ranks}

    def slot(ranks: Ranks) -> DeviceSlot:
        number = bundle_of[ranks[0]]
        bundle = bundles[number]
        devices = tuple(bundle.index(rank) for rank in ranks)
        share = floor(sum(1 / holders[rank] for rank in ranks) * RESOLUTION) / RESOLUTION
        return DeviceSlot(number, devices, share, len(bundle) > 1 and any(holders[rank] > 1 for rank in bundle))

    on = None if per_machine is None else tuple(ranks[0] // per_machine for ranks in bundles)
    slots = {group: tuple(map(slot, processes)) for group, processes in holdings.items()}
    return BundlePlan(tuple(map(len, bundles)), on, slots)
