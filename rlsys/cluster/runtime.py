"""Ray for the length of a run: started or joined on entry, left on exit, nothing stays behind.

A local Ray is this run's own and ends with it, also after an exception or Ctrl-C. A cluster at an
address is joined and left; only the run's own actors end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError, UserError

STOP_S = 3.0
"""How long processes may take to end by themselves."""
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
RESOURCE = {Device.cpu: "CPU", Device.gpu: "GPU"}


@contextlib.contextmanager
def ray_runtime(cluster: ClusterConfig, bundle_sizes: Sequence[int]) -> Iterator[PlacementGroup]:
    """Join or start Ray and reserve bundles of that many devices each, every bundle on one machine."""
    slots = sum(bundle_sizes)
    _adopt_orphans()
    strangers = {process.pid for process in _descendants()}
    local_dir = _start(cluster, slots)
    try:
        bundles = placement_group(
            [{RESOURCE[cluster.device]: size} for size in bundle_sizes], strategy="PACK"
        )
        if not bundles.wait(cluster.start_timeout_s):
            have = int(ray.cluster_resources().get(RESOURCE[cluster.device], 0))
            raise RunError(
                f"the cluster did not give {slots} {cluster.device} slots within {cluster.start_timeout_s:.0f} s "
                f"(it has {have} in all): free some, or place the groups on fewer."
            )
        try:
            yield bundles
        finally:
            remove_placement_group(bundles)
    finally:
        _stop(local_dir, strangers)


def within(bundles: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Where Ray starts what belongs in a bundle; what that starts in turn may go anywhere."""
    return PlacementGroupSchedulingStrategy(
        bundles, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
    )


def device_ids(
    bundles: PlacementGroup, indices: Iterable[int], timeout_s: float
) -> dict[int, tuple[str, ...]]:
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
        index: tuple(sorted(ids, key=lambda name: (len(name), name)))
        for index, ids in zip(refs, found, strict=True)
    }


def _start(cluster: ClusterConfig, slots: int) -> str | None:
    """Connect; returns the folder of a local Ray, None when a running cluster was joined."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address is not None:
        _check_reachable(cluster.address)
        ray.init(address=cluster.address, **quiet)
        return None
    folder = tempfile.mkdtemp(prefix="rlsys-ray-")
    resources = {"num_cpus": slots} if cluster.device is Device.cpu else {}
    ray.init(
        address="local",
        include_dashboard=False,
        _temp_dir=folder,
        object_store_memory=512 * 1024 * 1024 if cluster.device is Device.cpu else None,
        **resources,
        **quiet,
    )
    return folder


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


def _stop(local_dir: str | None, strangers: set[int]) -> None:
    """Leave Ray; of a local one, end all processes but `strangers`, and remove its folder."""
    if local_dir is None:
        ray.shutdown()
        return
    ours = [process for process in _descendants() if process.pid not in strangers]
    ray.shutdown()
    ours += [process for process in _descendants() if process.pid not in strangers]
    _, alive = psutil.wait_procs(ours, timeout=STOP_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
    shutil.rmtree(local_dir, ignore_errors=True)


def _descendants() -> list[psutil.Process]:
    """All that this process has started, and what that has started, but multiprocessing's own helper."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def _adopt_orphans() -> None:
    """Make orphans of this process's descendants its own children, so that `_stop` finds them.

    A worker that is killed leaves an engine's processes behind, which would otherwise go to init.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
