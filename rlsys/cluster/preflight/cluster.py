"""The machines together: Ray, ports, and what cannot be seen of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.cluster.preflight.finding import Finding, ok, unknown, wrong
from rlsys.cluster.preflight.probes import Probes, RayCluster, Unseen
from rlsys.cluster.role import DEFAULT_PORT as RAY_PORT
from rlsys.config.schema import Device, RunConfig

_RESOURCE = {Device.cpu: "CPU", Device.gpu: "GPU"}
RAY = "Ray"


def look_at_ray(config: RunConfig, probes: Probes) -> RayCluster | Unseen | None:
    """The cluster that the run joins, or why it cannot; None where it starts its own."""
    if config.cluster.address is None:
        return None
    try:
        return probes.ray(config.cluster.address)
    except Unseen as problem:
        return problem


def machines(config: RunConfig, seen: RayCluster | Unseen | None) -> int:
    """How many may take part."""
    return max(config.cluster.nodes, len(seen.nodes) if isinstance(seen, RayCluster) else 1)


def devices_here(config: RunConfig, ranks: int, seen: RayCluster | Unseen | None, probes: Probes) -> int:
    """How many of the run's `ranks` devices this machine is to give."""
    if isinstance(seen, RayCluster):
        own = {address for addresses in probes.interfaces().values() for address in addresses}
        mine = [node.resources for node in seen.nodes if node.address in own]
        return min(ranks, int(sum(node.get(_RESOURCE[config.cluster.device], 0) for node in mine)))
    per_node = config.cluster.devices_per_node
    return ranks if config.cluster.nodes == 1 or per_node is None else min(ranks, per_node)


def ray_findings(config: RunConfig, ranks: int, seen: RayCluster | Unseen | None, probes: Probes) -> Iterator[Finding]:
    """Of the cluster that the run joins, or of the one that it starts; `ranks` devices are to be there."""
    cluster = config.cluster
    if seen is None:
        if cluster.nodes == 1:
            yield ok(RAY, "the run starts its own on this machine")
        elif probes.port_is_free(RAY_PORT):
            yield unknown(
                RAY,
                f"cluster.address is null, and {cluster.nodes} machines are wanted",
                "start on all of them with `rlsys launch`, or give cluster.address of a running cluster",
            )
        else:
            yield wrong(
                RAY,
                f"port {RAY_PORT}, which the head of a cluster takes, is taken on this machine",
                "end what runs there (`ray stop`), or give its address as cluster.address",
            )
        return
    if isinstance(seen, Unseen):
        yield wrong(
            RAY,
            f"cluster.address={cluster.address}: {seen}",
            "start it with `ray start --head` or `rlsys launch`, or set cluster.address=null",
        )
        return
    yield _nodes(config, seen)
    yield _devices(config, seen, ranks)


def elsewhere(others: int) -> Iterator[Finding]:
    """What nobody has looked at, of so many other machines."""
    if others:
        yield unknown(
            f"{others} other machine{'s' if others > 1 else ''}",
            "their GPUs, driver, versions, disk, and whether they have model and output_dir under the same paths",
            "run the same command on each",
        )


def _nodes(config: RunConfig, seen: RayCluster) -> Finding:
    wanted = config.cluster.nodes
    found = f"{len(seen.nodes)} of {wanted} machines at {config.cluster.address}"
    if len(seen.nodes) >= wanted:
        return ok(RAY, found)
    there = ", ".join(node.address for node in seen.nodes)
    return wrong(RAY, f"{found}: {there}", f"run `ray start --address={config.cluster.address}` on those missing")


def _devices(config: RunConfig, seen: RayCluster, ranks: int) -> Finding:
    kind = _RESOURCE[config.cluster.device]
    what = f"Ray's {kind}s"
    total = sum(int(node.resources.get(kind, 0)) for node in seen.nodes)
    free = int(seen.free.get(kind, 0))
    if total < ranks:
        each = ", ".join(f"{node.address} {int(node.resources.get(kind, 0))}" for node in seen.nodes)
        flag = f"--num-{kind.lower()}s"
        return wrong(
            what,
            f"{total} of {ranks}: {each}",
            f"join more machines, start Ray with {flag}, or place the groups on fewer",
        )
    if free < ranks:
        return wrong(
            what,
            f"{total}, of which {free} are free and {ranks} are wanted",
            "end the job that holds them (`ray list placement-groups` names it)",
        )
    short = _short_of(config, seen, kind)
    if short:
        return wrong(
            what,
            f"{short} has fewer than cluster.devices_per_node={config.cluster.devices_per_node}",
            "look at CUDA_VISIBLE_DEVICES there, or lower cluster.devices_per_node",
        )
    return ok(what, f"{free} free, {ranks} wanted")


def _short_of(config: RunConfig, seen: RayCluster, kind: str) -> str:
    """The first machine that lacks devices, where as many machines as there are must have all of theirs."""
    per_node = config.cluster.devices_per_node
    if per_node is None or len(seen.nodes) > config.cluster.nodes:
        return ""
    lacking = [node.address for node in seen.nodes if node.resources.get(kind, 0) < per_node]
    return lacking[0] if lacking else ""
