"""Parses the placement of groups on device ranks, checks it against model and machines, and plans Ray bundles. Pure.

A group's ranks are text such as "0-3" or "0-1,4". The ranks are distinct, and their order is the order of the group's
worker ranks. A critic without a placement uses the actor's ranks.

A bundle is a set of devices that Ray reserves on one machine. Device ranks of one process share a bundle, and so do
processes with a common rank; unrelated ranks get separate bundles:

    actor "0-1" with two processes, rollout "0-1" with one engine: one bundle, {0, 1};
    actor "0-1" with two processes, rollout "2-3" with two engines: four bundles, {0}, {1}, {2}, {3}.

With several machines of known size, a bundle is all placed ranks of one machine. Bundles are sorted by their lowest rank,
which keeps the order of the placement.

Ray itself picks the device for a process that reserves a share of a bundle. If processes share a device in a bundle
of several devices, two of them could get the same device. Slots of such a bundle are `pinned`: they reserve nothing
from Ray, and CUDA_VISIBLE_DEVICES names their devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import floor
from typing import Any

from rlsys.config.derived import chosen_layers, megatron_groups, needs_server, scores_with_policy
from rlsys.config.problems import conflict
from rlsys.config.schema import Device, Layers, Mode, Packing, ParallelConfig, RunConfig, SglangConfig, SyncMode
from rlsys.errors import UserError
from rlsys.rollout.kinds import attention_problems, capability_problems, engine_class, reserved_tokens
from rlsys.weights.weight_map import Architecture, rules_of

GROUPS = ("actor", "inference", "rollout")
CRITIC = "critic"
ROLLOUT = "rollout"
USABLE = 0.9  # Usable share of device memory; the rest is for workspaces of libraries and fragmentation.
RESOLUTION = 10_000  # Ray rounds device shares to 1/10000, so six shares of 1/6 would exceed 1.
_OF_PUSH = ("parameters", "gradients", "optimizer", "reference", "runtime", "weight_sync")
"""Parts of a Megatron group's memory while weights are pushed."""
_PART = re.compile(r"(\d+)(?:-(\d+))?")

Ranks = tuple[int, ...]


def parse_ranks(text: str, key: str) -> Ranks:
    """Parse device ranks. Raises UserError for malformed text; its message names the config key `key`."""
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
    """Parse the ranks of every group. Raises UserError for missing or unknown groups.

    A critic is allowed only `with_critic`, and defaults to the actor's ranks.
    """
    groups = (*GROUPS, CRITIC)
    if unknown := sorted(set(placement) - set(groups)):
        key = f"cluster.placement.{unknown[0]}"
        raise UserError(f"{key} is not a group: the groups are {', '.join(groups)}.", code="unknown", key=key)
    if missing := [group for group in GROUPS if group not in placement]:
        key = f"cluster.placement.{missing[0]}"
        raise UserError(f"{key} is missing: give the group's device ranks.", code="missing", key=key)
    if CRITIC in placement and not with_critic:
        raise UserError(
            "cluster.placement.critic is given, but algorithm.advantage has no critic: leave it out, or set "
            "algorithm.advantage.kind=gae.",
            code="conflict",
            key="cluster.placement.critic",
        )
    placed = (group for group in groups if group in placement)
    ranks = {group: parse_ranks(placement[group], f"cluster.placement.{group}") for group in placed}
    if with_critic:
        ranks.setdefault(CRITIC, ranks["actor"])
    return ranks


def overlaps(ranks: Mapping[str, Ranks]) -> list[tuple[str, str, list[int]]]:
    """Return the pairs of groups that share devices, with the shared ranks.

    A critic on exactly the actor's ranks counts as one group with the actor.
    """
    together = CRITIC in ranks and set(ranks[CRITIC]) == set(ranks["actor"])
    apart = sorted(set(ranks) - {CRITIC} if together else ranks)
    shared = ((a, b, sorted(set(ranks[a]) & set(ranks[b]))) for a, b in combinations(apart, 2))
    return [(a, b, both) for a, b, both in shared if both]


def machine_problems(config: RunConfig, ranks: Mapping[str, Sequence[int]]) -> Iterator[UserError]:
    """Yield problems of a placement that does not fit the machines and their devices."""
    cluster = config.cluster
    if cluster.devices_per_node is None:
        if cluster.nodes > 1:
            yield UserError(
                f"cluster.nodes={cluster.nodes} needs the number of devices per machine: set cluster.devices_per_node.",
                code="conflict",
                key="cluster.devices_per_node",
            )
        return
    have = cluster.nodes * cluster.devices_per_node
    highest = max(rank for held in ranks.values() for rank in held)
    if highest >= have:
        yield conflict(
            f"cluster.placement names rank {highest}, but cluster.nodes={cluster.nodes} with cluster.devices_per_node="
            f"{cluster.devices_per_node} has ranks 0 to {have - 1}: place the groups on those, or use more machines."
        )
    tp, held, per_node = max(config.rollout.engine.tp, 1), sorted(ranks[ROLLOUT]), cluster.devices_per_node
    for start in range(0, len(held) - len(held) % tp, tp):
        machines = {rank // per_node for rank in held[start : start + tp]}
        if len(machines) > 1:
            yield conflict(
                f"cluster.placement.rollout puts one engine of rollout.engine.tp={tp} on ranks {held[start]} to "
                f"{held[start + tp - 1]}, which are on {len(machines)} machines with cluster.devices_per_node={per_node}: "
                "an engine must be on one machine; change the placement or rollout.engine.tp."
            )
            break
    yield from _reach(config, ranks, per_node)


def launch_problems(config: RunConfig) -> Iterator[UserError]:
    """Yield problems of settings that only `rlsys launch` implements, for a run started without it.

    Such a run would otherwise silently ignore these settings.
    """
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.address is None:
        yield UserError(
            f"cluster.nodes={cluster.nodes} but cluster.address is null: start the run with `rlsys launch` on every "
            "machine, or set cluster.address to a Ray cluster of these machines.",
            code="conflict",
            key="cluster.address",
        )
    if cluster.max_engines is not None and cluster.address is None:
        yield UserError(
            f"cluster.max_engines={cluster.max_engines} but cluster.address is null: more engines join by themselves only "
            "in a Ray cluster; start the run with `rlsys launch`, set cluster.address, or set cluster.max_engines=null.",
            code="conflict",
            key="cluster.max_engines",
        )
    if cluster.search.nodes and config.search.url is None and needs_server(config.search):
        yield conflict(
            f"cluster.search.nodes={cluster.search.nodes} but search.url is null: only `rlsys launch` starts servers "
            "there; start the run with it, set search.url to a running server, or set cluster.search.nodes=[]."
        )


def memory_problems(config: RunConfig, plan: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield a problem if groups do not fit device memory, by the estimate of `make_plan`."""
    have = config.cluster.device_memory_gib
    if have is None:
        return
    names, needed = fullest_device(config, plan)
    if needed > have * USABLE:
        yield UserError(
            f"{' and '.join(names)} would take about {needed:.1f} GiB of one device, more than {USABLE:.0%} of "
            f"cluster.device_memory_gib={have:g}: {memory_fix(config, names)}.",
            code="conflict",
            key="cluster.device_memory_gib",
        )


def memory_fix(config: RunConfig, names: Sequence[str]) -> str:
    """Return the settings that lower the memory of the groups `names` on a device, cheapest first."""
    fixes = ["set model.recompute=true"] if {"actor", CRITIC} & {*names} and not config.model.recompute else []
    fixes += [f"lower {name}.micro_batch_tokens or raise {name}.parallel.tp" for name in names if name != ROLLOUT]
    if ROLLOUT in names:
        engine = engine_class(config.rollout.engine)
        splits = engine.capabilities.max_tp.get(config.cluster.device, 0) > config.rollout.engine.tp
        fixes.append(engine.memory_fix(config.rollout.engine) + (" or raise rollout.engine.tp" if splits else ""))
    return "; or ".join(fixes)


def fullest_device(config: RunConfig, plan: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """Return the groups with the largest combined memory on one device at one time, and that memory in GiB.

    Groups that have left a colocated device still hold their `runtime` there, and an engine that sleeps its `graphs`.
    """
    groups = plan["groups"]
    full = {name: group["memory_gib_per_rank"] for name, group in groups.items()}
    # Groups that are on a device at the same time, and what each of them needs there.
    turns: list[tuple[Sequence[str], dict[str, float]]] = [(("actor", "inference", CRITIC, ROLLOUT), full)]
    away = dict.fromkeys(groups, 0.0)
    if config.cluster.mode is Mode.colocated:
        parts = {name: group["memory_gib"] for name, group in groups.items()}
        away = {name: sizes.get("runtime", 0.0) + sizes.get("graphs", 0.0) for name, sizes in parts.items()}
        pushing = {name: sum(sizes.get(part, 0.0) for part in _OF_PUSH) for name, sizes in parts.items()}
        turns = [((ROLLOUT,), full), (("inference", CRITIC), full), (("actor", CRITIC), full)]
        turns += [(("actor", "inference"), pushing)]
    found: dict[tuple[str, ...], float] = {}
    for rank in {rank for group in groups.values() for rank in group["ranks"]}:
        here = [name for name in groups if rank in groups[name]["ranks"]]
        for turn, needs in turns:
            names = tuple(name for name in turn if name in here)
            found[names] = sum(needs[name] if name in names else away[name] for name in here)
    return max(found.items(), key=lambda pair: pair[1])


def _reach(config: RunConfig, ranks: Mapping[str, Sequence[int]], per_node: int) -> Iterator[UserError]:
    """Yield a problem if `cluster.sync_mode` cannot carry weights to every group, because some groups are on other
    machines."""
    mode = config.cluster.sync_mode
    if mode not in (SyncMode.tensor, SyncMode.ipc):
        return
    # The actor's first rank sends; with `ipc`, so does the first rank of every pipeline stage.
    actor, stages = ranks["actor"], config.actor.parallel.pp if mode is SyncMode.ipc else 1
    senders = actor[:: max(1, len(actor) // max(1, stages))]
    concerned = {"actor": senders, "rollout": ranks["rollout"]}
    if scores_with_policy(config.algorithm):
        concerned["inference"] = ranks["inference"]
    home = actor[0] // per_node
    away = [name for name, held in concerned.items() if any(rank // per_node != home for rank in held)]
    if away:
        way = "host memory" if mode is SyncMode.tensor else "device memory"
        yield conflict(
            f"cluster.sync_mode={mode} moves weights through the {way} of one machine, but cluster.placement puts "
            f"{' and '.join(away)} on other machines than the actor's first rank: use {way_across(config)}."
        )


def way_across(config: RunConfig) -> str:
    """Return the `cluster.sync_mode` setting that moves weights between machines."""
    if config.cluster.mode is Mode.colocated and config.cluster.device is Device.gpu:
        # NCCL does not support two members of a group on one GPU.
        return "cluster.sync_mode=disk, with an output_dir that all machines share"
    return "cluster.sync_mode=broadcast"


def search_node_problems(config: RunConfig) -> Iterator[UserError]:
    """Yield problems of search servers on machines outside the run, or without an index."""
    wanted = config.cluster.search.nodes
    beyond = [name for name in wanted if name.isdigit() and int(name) >= config.cluster.nodes]
    if beyond:
        yield conflict(
            f"cluster.search.nodes names machine {beyond[0]}, but the machines of cluster.nodes={config.cluster.nodes} are "
            "numbered from 0: name one of them, or another machine by its host name."
        )
    if wanted and config.search.index is None and needs_server(config.search):
        yield conflict(
            f"cluster.search.nodes={wanted} serves an index, but search.index is null: set search.index to its folder."
        )


def ipc_problems(config: RunConfig) -> Iterator[UserError]:
    """Yield a problem for `cluster.sync_mode=ipc` without GPUs."""
    if config.cluster.sync_mode is SyncMode.ipc and config.cluster.device is Device.cpu:
        yield conflict(
            "cluster.sync_mode=ipc shares GPU memory, but cluster.device=cpu has none: use cluster.sync_mode=tensor."
        )


def parallel_problems(group: str, parallel: ParallelConfig, world: int, model: Architecture) -> Iterator[UserError]:
    """Yield problems of parallel sizes that do not fit the model or a Megatron group of `world` ranks."""
    key = f"{group}.parallel"
    if min(parallel.tp, parallel.pp, parallel.cp, parallel.ep) < 1:
        return
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world % model_ranks:
        yield conflict(
            f"cluster.placement.{group} has {world} ranks, which is not a multiple of {key} tp*pp*cp = {parallel.tp}*"
            f"{parallel.pp}*{parallel.cp} = {model_ranks}: change the placement or the parallel sizes."
        )
    elif world // parallel.pp % parallel.ep:
        yield conflict(
            f"{key}.ep={parallel.ep} does not divide the {world // parallel.pp} ranks of a pipeline stage: lower it, or "
            "give the group more ranks."
        )
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        yield conflict(
            f"{key}.ep={parallel.ep} distributes experts, but the model has {model.experts or 'none'}: set it to a divisor "
            "of their number, or to 1."
        )
    if model.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield conflict(f"{key}.tp={parallel.tp} of a model with experts needs {key}.sequence_parallel=true: set it.")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield conflict(f"{key}.sequence_parallel=true needs tp above 1: set it to false, or raise {key}.tp.")
    if parallel.pp_layers is not None:
        if len(parallel.pp_layers) != parallel.pp or sum(parallel.pp_layers) != model.layers:
            yield conflict(
                f"{key}.pp_layers={parallel.pp_layers} must hold {parallel.pp} numbers (pp) that sum to the "
                f"model's {model.layers} layers."
            )
        elif min(parallel.pp_layers) < 1:
            yield conflict(f"{key}.pp_layers={parallel.pp_layers}: every stage needs at least one layer.")
    elif model.layers % parallel.pp:
        yield conflict(
            f"{key}.pp={parallel.pp} does not divide the model's {model.layers} layers: set {key}.pp_layers."
        )
    first = parallel.pp_layers[0] if parallel.pp_layers else model.layers // parallel.pp
    # A stage without experts could not be saved: Megatron's optimiser of experts reads its step from a parameter.
    if 0 < first <= model.dense_layers:
        yield conflict(
            f"{key}.pp={parallel.pp} gives the first stage {first} layers, but the layers with experts begin after "
            f"{model.dense_layers}: give it more in {key}.pp_layers, or lower {key}.pp."
        )
    yield from _tp_problems(f"{key}.tp", parallel.tp, model)


def _tp_problems(key: str, tp: int, model: Architecture, *, cuts_experts: bool = False) -> Iterator[UserError]:
    """Yield problems of the sizes that tensor parallelism divides evenly."""
    sizes = {"attention heads": model.heads}
    if model.dense_layers or not model.experts:
        sizes["columns of an MLP"] = model.ffn
    if model.shared_experts:
        sizes["columns of the shared experts"] = model.shared_experts * model.expert_ffn
    if cuts_experts and model.experts:
        sizes["columns of an expert"] = model.expert_ffn
    for name, size in sizes.items():
        if size % tp:
            yield conflict(f"{key}={tp} does not divide the model's {size} {name}: choose a divisor.")
    if model.kv_heads % tp and tp % model.kv_heads:
        yield conflict(
            f"{key}={tp} is neither a divisor nor a multiple of the model's {model.kv_heads} key/value heads: choose "
            "another value."
        )


def context_problems(config: RunConfig, group: str, model: Architecture) -> Iterator[UserError]:
    """Yield problems of context parallelism: it needs packed rows that hold a whole episode, and attention to all tokens
    in Transformer Engine's layers.
    """
    settings = megatron_groups(config)[group]
    cp, tp = settings.parallel.cp, settings.parallel.tp
    if cp == 1:
        return
    if settings.packing is Packing.padded:
        yield UserError(
            f"{group}.parallel.cp={cp} needs packed sequences, but {group}.packing is padded: set it to packed.",
            code="conflict",
            key=f"{group}.packing",
        )
    within = model.window or config.task.max_total_tokens
    if within < config.task.max_total_tokens and chosen_layers(config) is Layers.te:
        yield conflict(
            f"{group}.parallel.cp={cp} spreads sequences, and Transformer Engine's layers cannot attend within the model's "
            f"window of {within} tokens then: set it to 1, or use model.layers=local."
        )
    multiple = 2 * cp * (tp if settings.parallel.sequence_parallel else 1)
    needed = -(-config.task.max_total_tokens // multiple) * multiple
    if settings.micro_batch_tokens < needed:
        yield conflict(
            f"{group}.micro_batch_tokens={settings.micro_batch_tokens} cannot hold one episode, which "
            f"{group}.parallel.cp={cp} pads to {needed} tokens: raise it to at least {needed}."
        )


def engine_problems(config: RunConfig, world: int, model: Architecture) -> Iterator[UserError]:
    """Yield problems of engines of this model on `world` ranks."""
    tp = config.rollout.engine.tp
    if tp < 1:
        return
    yield from _engine_number_problems(config, world // tp)
    if world % tp:
        yield conflict(
            f"cluster.placement.rollout has {world} ranks, which is not a multiple of rollout.engine.tp={tp}: change one "
            "of them."
        )
    else:
        yield from _tp_problems("rollout.engine.tp", tp, model, cuts_experts=True)
    yield from capability_problems(config)
    engine = config.rollout.engine
    if isinstance(engine, SglangConfig) and any(rule.stack for rule in rules_of(model)):
        yield conflict(
            "rollout.engine.kind=sglang takes all experts of a layer of this model as one tensor, which the weight sync "
            "does not send: set it to transformers."
        )
    yield from attention_problems(config, model)
    # SGLang's model of a family may attend to all tokens, so its tokens would be those of another policy.
    limited = isinstance(engine, SglangConfig) and not model.sglang_window
    reserved = reserved_tokens(engine)
    less = f" less the {reserved} that {engine.kind} reserves" if reserved else ""
    longest = model.max_positions - reserved
    most = min(longest, model.window or longest) if limited else longest
    if config.task.max_total_tokens > most:
        window = f"{most} tokens of sliding window, which SGLang does not apply"
        limit = f"{model.max_positions} positions{less}" if most == longest else window
        yield conflict(f"task.max_total_tokens={config.task.max_total_tokens} is above the model's {limit}: lower it.")
    room = engine.kv_cache_tokens if isinstance(engine, SglangConfig) else None
    if room is not None and room - reserved < config.task.max_total_tokens:
        yield conflict(
            f"rollout.engine.kv_cache_tokens={room}{less} cannot hold one episode of task.max_total_tokens="
            f"{config.task.max_total_tokens}: raise it, or lower task.max_total_tokens."
        )


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """Devices of one worker process."""

    bundle: int
    devices: tuple[int, ...]  # Indices of its devices within the bundle, from 0.
    share: float  # Devices reserved from Ray; the shares of all slots of a bundle sum to at most its size.
    pinned: bool  # True: name its devices explicitly, since Ray could choose others.


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """Bundles, and the slots of every group in worker rank order."""

    sizes: tuple[int, ...]  # Number of devices of each bundle.
    machines: tuple[int, ...] | None
    """Machine index of each bundle, one bundle per machine; None if a bundle may be on any machine."""
    slots: Mapping[str, tuple[DeviceSlot, ...]]


def _engine_number_problems(config: RunConfig, engines: int) -> Iterator[UserError]:
    """Yield problems of the numbers of engines for evaluation and in all, in a run that starts with `engines`."""
    aside, most = config.eval.engines, config.cluster.max_engines
    if aside is not None and config.cluster.mode is Mode.colocated:
        yield conflict(
            f"eval.engines={aside} reserves engines for evaluation during training, but with cluster.mode=colocated "
            "the engines sleep during training: set eval.engines to null."
        )
    elif aside is not None and aside >= engines:
        yield conflict(
            f"eval.engines={aside} leaves none of the {engines} engines for rollouts: lower it, add engines, or set it "
            "to null to evaluate between steps."
        )
    if most is not None and config.cluster.mode is Mode.colocated:
        yield conflict(
            f"cluster.max_engines={most} lets more engines join, but with cluster.mode=colocated each device belongs to all "
            "groups: set cluster.max_engines to null."
        )
    elif most is not None and most < engines:
        yield conflict(
            f"cluster.max_engines={most} is below the {engines} engines of cluster.placement.rollout: raise it, or set "
            "it to null."
        )


def plan_bundles(holdings: Mapping[str, Sequence[Ranks]], per_machine: int | None = None) -> BundlePlan:
    """Plan bundles and slots for processes that hold the device ranks `holdings[group][process]`.

    With `per_machine`, device rank r is on machine r // per_machine, and all ranks of one process must be on one machine.
    """
    held = [ranks for processes in holdings.values() for ranks in processes]
    holders = Counter(rank for ranks in held for rank in ranks)
    if per_machine is None:
        # Connected components: ranks that one process holds end up in the same part.
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
