"""Whether there is room: on disk for what the run writes, in shared memory, in host memory. Pure but for TMPDIR."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsys.cluster.folders import ray_parent
from rlsys.cluster.preflight.estimates import (
    checkpoint_gib,
    checkpoints_at_once,
    host_memory_gib,
    run_folder_gib,
    spoken,
)
from rlsys.cluster.preflight.finding import Finding, note, ok, unknown, wrong
from rlsys.cluster.preflight.probes import Probes, Unseen
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
SHARED_GIB = {Device.gpu: 1.0, Device.cpu: 0.5}
"""NCCL's buffers between cards of a machine (NVIDIA's documentation asks containers for 1 GiB); Ray's object store."""
_FULL = 0.95
"""Share of a file system from which on Ray writes no more of its objects to it."""
_LOGS_GIB = 1.0
"""Logs, figures and Ray's session."""


def room_findings(config: RunConfig, plan: Mapping[str, Any] | None, probes: Probes) -> Iterator[Finding]:
    """Of all that a run writes; without a plan, of what does not depend on it."""
    if plan is not None:
        yield _output(config, int(plan["model"]["parameters"]), probes)
    yield _spill(probes)
    yield _shared(config.cluster.device, probes)
    if plan is not None and config.cluster.device is Device.cpu and config.cluster.address is None:
        yield _host(plan, probes)


def _output(config: RunConfig, parameters: int, probes: Probes) -> Finding:
    what, folder = "disk for the run", Path(config.output_dir)
    try:
        disk = probes.disk(folder)
    except Unseen as problem:
        return wrong(what, f"output_dir={folder}: {problem}", "give a folder that can be written")
    if not disk.writable:
        return wrong(
            what,
            f"{disk.folder} cannot be written by this user",
            "give another output_dir, or make it writable",
        )
    count, needed = checkpoints_at_once(config), run_folder_gib(config, parameters) + _LOGS_GIB
    each = checkpoint_gib(config, parameters)
    found = (
        f"{disk.free_gib:.1f} GiB free in {disk.folder}, and {needed:.1f} may be written, {count} "
        f"checkpoint{'s' if count > 1 else ''} of {spoken(each)} among it"
    )
    if disk.free_gib >= needed:
        return ok(what, found)
    room = int((disk.free_gib - _LOGS_GIB) / each)
    fewer = f"set checkpoint.keep_last={room - 1}, or " if room > 1 else ""
    return wrong(what, found, f"{fewer}free {needed - disk.free_gib:.1f} GiB, or give another output_dir")


def _spill(probes: Probes) -> Finding:
    """Where Ray keeps its session, and what it spills."""
    what = "disk for Ray"
    try:
        scratch = ray_parent()
        disk = probes.disk(scratch)
    except UserError as problem:
        return wrong(what, str(problem))
    except Unseen as problem:
        return wrong(what, f"{scratch}: {problem}", "set TMPDIR to a folder that can be written")
    used = 1 - disk.free_gib / disk.total_gib if disk.total_gib else 1.0
    found = f"{disk.free_gib:.1f} GiB free in {disk.folder}, which is {used:.0%} full"
    if not disk.writable:
        return wrong(what, f"{disk.folder} cannot be written by this user", "set TMPDIR to another folder")
    if used >= _FULL or disk.free_gib < _LOGS_GIB:
        return wrong(what, f"{found}; from {_FULL:.0%} on Ray spills nothing to it", "free some, or set TMPDIR")
    return ok(what, found)


def _shared(device: Device, probes: Probes) -> Finding:
    what, needed = str(SHARED_MEMORY), SHARED_GIB[device]
    try:
        disk = probes.disk(SHARED_MEMORY)
    except Unseen as problem:
        return unknown(what, str(problem))
    found = f"{disk.free_gib:.1f} GiB free"
    if disk.folder != SHARED_MEMORY:
        return unknown(what, "this system has none")
    if disk.free_gib >= needed:
        return ok(what, found)
    fix = "free some, or give the container more: docker run --shm-size=16g"
    if device is Device.gpu:
        return wrong(what, f"{found}, and NCCL wants {needed:g}", fix)
    return note(what, f"{found}, so Ray's object store of {needed:g} goes to the slower disk", fix)


def _host(plan: Mapping[str, Any], probes: Probes) -> Finding:
    needed, free = host_memory_gib(plan), probes.memory_gib()
    found = f"{free:.1f} GiB free, and models and optimisers take about {needed:.1f}"
    if free > needed:
        return ok("memory", found)
    return wrong("memory", found, "free some, take a smaller model, or place the groups on fewer ranks")
