"""Whether what is placed fits the machines that the config names: their number, their devices, their memory. Pure.

Memory is compared with the plan's estimate of what is on a device at the same time: all groups that share it where
they work side by side; where they take turns (collocated), those that are there together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.cluster.planning.placement import CRITIC
from rlsys.config.derived import needs_server
from rlsys.config.problems import Problem
from rlsys.config.schema import Device, Mode, RunConfig, SyncMode

USABLE = 0.9
"""Of a device's memory; the rest is for the driver's context, communication buffers and fragmentation."""

ROLLOUT = "rollout"

Ranks = Mapping[str, Sequence[int]]


def machine_problems(config: RunConfig, ranks: Ranks) -> Iterator[Problem]:
    """What does not fit the number of machines and of their devices."""
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
    yield from _engines_within(config, ranks["rollout"], cluster.devices_per_node)
    yield from _reach(config, ranks, cluster.devices_per_node)


def launch_problems(config: RunConfig) -> Iterator[Problem]:
    """What `rlsys launch` settles before it trains; without it a run would silently be another one."""
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
    """What does not fit the memory of a device, as `make_plan` estimates it."""
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
    """Which groups are on their devices at the same time."""
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
    """Search servers are started where there are machines, with an index."""
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
    """Device memory is handed on where there are devices."""
    if config.cluster.sync_mode is SyncMode.ipc and config.cluster.device is Device.cpu:
        yield Problem(
            "cluster.sync_mode",
            "cluster.sync_mode=ipc hands GPU memory on, and cluster.device=cpu has none: use cluster.sync_mode=tensor.",
        )
