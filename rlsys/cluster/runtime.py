"""Ray for the length of a run: started or joined on entry, left on exit, nothing stays behind.

A local Ray is this run's own and ends with it, also after an exception or Ctrl-C. A cluster at an
address is joined and left; only the run's own actors end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.cluster.auth import require_token
from rlsys.cluster.connecting import connect
from rlsys.cluster.folders import ray_folder, rays_own
from rlsys.cluster.machines import Machine, machines
from rlsys.cluster.offspring import adopt_orphans, descendants, end
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError, UserError

LOOK_S = 0.5
"""Between two looks for machines that are not there yet."""
SLIVER = 0.001
"""Of the resource that every machine has of its own: enough to be there."""
RESOURCE = {Device.cpu: "CPU", Device.gpu: "GPU"}


@contextlib.contextmanager
def ray_runtime(
    cluster: ClusterConfig, bundle_sizes: Sequence[int], on: Sequence[int] | None = None
) -> Iterator[PlacementGroup]:
    """Join or start Ray and reserve bundles of that many devices each, every bundle on one machine.

    `on` says on which, by their numbers in the order of `machines`, counting those alone that have devices for the
    largest bundle; None leaves it to Ray. Raises RunError if the cluster has too few in time.
    """
    with _joined(cluster) if cluster.address is not None else _local(cluster, sum(bundle_sizes)):
        until = time.monotonic() + cluster.start_timeout_s
        places = _places(cluster, max(bundle_sizes), on, until)
        shapes = [
            {RESOURCE[cluster.device]: size} | place
            for size, place in zip(bundle_sizes, places or [{}] * len(bundle_sizes), strict=True)
        ]
        bundles = placement_group(shapes, strategy="PACK")
        if not bundles.wait(max(1.0, until - time.monotonic())):
            raise RunError(_too_few(cluster, bundle_sizes))
        try:
            yield bundles
        finally:
            remove_placement_group(bundles)


def hosts_of(bundles: PlacementGroup) -> dict[int, str]:
    """Bundle -> host name of its machine."""
    hosts = {machine.node_id: machine.host for machine in machines()}
    return {
        index: hosts.get(node_id, node_id)
        for index, node_id in placement_group_table(bundles)["bundles_to_node_id"].items()
    }


def _places(
    cluster: ClusterConfig, devices: int, on: Sequence[int] | None, until: float
) -> list[dict[str, float]] | None:
    """What each bundle must find besides devices to be on its machine. Waits until there are enough machines."""
    if on is None:
        return None
    while True:
        fit = [one for one in machines() if one.devices[RESOURCE[cluster.device]] >= devices]
        if len(fit) > max(on):
            return [{fit[number].resource: SLIVER} for number in on]
        if time.monotonic() > until:
            have = ", ".join(_described(one, cluster.device) for one in machines())
            raise RunError(
                f"the cluster has {len(fit)} machines with {devices} {cluster.device} slots, and cluster.nodes="
                f"{cluster.nodes} needs {max(on) + 1} (waited {cluster.start_timeout_s:.0f} s; there are {have}): "
                "start Ray on the missing ones, or place the groups on fewer."
            )
        time.sleep(LOOK_S)


def _described(machine: Machine, device: Device) -> str:
    return f"{machine.host} with {machine.devices[RESOURCE[device]]:g}"


def _too_few(cluster: ClusterConfig, bundle_sizes: Sequence[int]) -> str:
    slots, have = sum(bundle_sizes), int(ray.cluster_resources().get(RESOURCE[cluster.device], 0))
    return (
        f"the cluster did not give {slots} {cluster.device} slots within {cluster.start_timeout_s:.0f} s "
        f"(it has {have} in all): free some, or place the groups on fewer."
    )


def within(bundles: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Where Ray starts what belongs in a bundle; what that starts in turn may go anywhere."""
    return PlacementGroupSchedulingStrategy(
        bundles, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
    )


def device_ids(bundles: PlacementGroup, indices: Iterable[int], timeout_s: float) -> dict[int, tuple[str, ...]]:
    """Bundle -> names of all its GPUs on their machine, in order, as CUDA_VISIBLE_DEVICES takes them.

    A process that holds the whole bundle is asked, so nothing else may hold a part of it meanwhile.
    """

    @ray.remote(num_cpus=0, max_retries=0)
    def names() -> list[str]:
        return list(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))

    refs = {}
    for index in indices:
        size = bundles.bundle_specs[index]["GPU"]
        refs[index] = names.options(num_gpus=size, scheduling_strategy=within(bundles, index)).remote()
    try:
        found = ray.get(list(refs.values()), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as late:
        raise RunError(f"waited {timeout_s:.0f} s for the cluster to name the GPUs of its bundles.") from late
    # As numbers are ordered: the shorter name first.
    return {
        index: tuple(sorted(ids, key=lambda name: (len(name), name))) for index, ids in zip(refs, found, strict=True)
    }


@contextlib.contextmanager
def _joined(cluster: ClusterConfig) -> Iterator[None]:
    """Joins the cluster at its address, and leaves it."""
    _check_reachable(str(cluster.address))
    connect(address=cluster.address)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _local(cluster: ClusterConfig, slots: int) -> Iterator[None]:
    """Starts a Ray that this machine alone reaches, with the user's token, and ends all its processes."""
    adopt_orphans()
    strangers = {process.pid for process in descendants()}
    require_token(os.environ, make=True)
    with ray_folder() as folder:
        try:
            connect(
                address="local",
                include_dashboard=False,
                _temp_dir=str(rays_own(folder)),
                object_store_memory=512 * 1024 * 1024 if cluster.device is Device.cpu else None,
                **({"num_cpus": slots} if cluster.device is Device.cpu else {}),
            )
            yield
        finally:
            ours = [process for process in descendants() if process.pid not in strangers]
            ray.shutdown()
            ours += [process for process in descendants() if process.pid not in strangers]
            end(ours)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and other words of Ray's own
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()
    except OSError as problem:
        raise UserError(
            f"cluster.address={address}: no Ray cluster answers there ({problem.strerror or problem}); start one "
            "with `ray start --head`, or set cluster.address=null for a local one."
        ) from problem
