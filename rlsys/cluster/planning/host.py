"""Estimates the host memory that a run needs on its fullest machine. Pure.

    groups    memory of all ranks, if the devices are CPUs
    pinned    state of colocated groups while they are off their GPUs: parameters, optimiser state and reference of each
              Megatron rank (gradients are zero and not copied), and the weights of the engines
    staged    one copy of the model per engine, from a push to its activation; on its device with sync_mode=ipc, unless
              the engine sleeps
    pushed    one copy of the weights that the actor pushed last, for processes that start again; not in colocated runs
    buckets   weight buckets in the host memory of sender and receivers
    saved     the copy of each Megatron rank's share of a checkpoint, from which the checkpoint is written
    shared    space in /dev/shm: on a CPU, an engine passes each staged bucket to SGLang's processes there, and the previous
              one may still be mapped

Not counted: the processes themselves, and the files of models and checkpoints in the page cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rlsys.cluster.planning.memory import (
    BYTES,
    GIB,
    engine_weights_bytes,
    group_memory,
    saved_bytes,
    trained_parameters,
)
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import Device, Mode, RunConfig, SyncMode
from rlsys.weights.weight_map import Architecture

SHARED_BYTES = {Device.gpu: GIB, Device.cpu: GIB // 2}
"""Shared memory of libraries: NCCL's buffers on GPUs (NVIDIA recommends 1 GiB for containers), Ray's objects on CPUs."""
LOADING_BUCKETS = 2
"""Buckets of an engine on a CPU in /dev/shm at a time."""
_SENT = {SyncMode.tensor: 2, SyncMode.broadcast: 2, SyncMode.disk: 1, SyncMode.ipc: 0}
_RECEIVED = {SyncMode.tensor: 0, SyncMode.broadcast: 1, SyncMode.disk: 1, SyncMode.ipc: 0}
"""Buckets in host memory of the sender, and of each receiver; none with `broadcast` on GPUs."""
_OFFLOADED = ("parameters", "optimizer", "reference")


@dataclass(slots=True)
class HostMemory:
    """Bytes on one machine; `shared` is part of its memory only while weights are loaded."""

    groups: float = 0.0
    pinned: float = 0.0
    staged: float = 0.0
    pushed: float = 0.0
    buckets: float = 0.0
    saved: float = 0.0
    shared: float = 0.0

    @property
    def total(self) -> float:
        """All bytes except `shared`."""
        return self.groups + self.pinned + self.staged + self.pushed + self.buckets + self.saved


def stages_in_host(config: RunConfig) -> bool:
    """True if engines stage pushed weights in host memory."""
    on_device = config.cluster.sync_mode is SyncMode.ipc and config.cluster.mode is Mode.disaggregated
    return not on_device


def _exporting(config: RunConfig, ranks: Sequence[int]) -> list[int]:
    """Return the actor's ranks that hold the weights which it pushes (`MeshCoordinates.exports`)."""
    parallel = config.actor.parallel
    in_stage = len(ranks) // parallel.pp
    return [rank for number, rank in enumerate(ranks) if number % in_stage < max(parallel.tp, parallel.ep)]


def host_memory(config: RunConfig, model: Architecture) -> HostMemory:
    """Return the needs of the machine that needs most, `shared` included."""
    cluster, tp = config.cluster, config.rollout.engine.tp
    ranks = parse_placement(cluster.placement, has_critic(config.algorithm))
    per_machine = cluster.devices_per_node or inf
    machines: defaultdict[float, HostMemory] = defaultdict(HostMemory)
    on_cpu, away = cluster.device is Device.cpu, cluster.mode is Mode.colocated and cluster.device is Device.gpu
    # On GPUs, a broadcast does not pass through host memory.
    bucket = 0 if cluster.sync_mode is SyncMode.broadcast and not on_cpu else cluster.sync_bucket_bytes
    for name in [*megatron_groups(config), "rollout"]:
        memory = group_memory(config, model, name)
        offloaded = ("parameters",) if name == "rollout" else _OFFLOADED
        for rank in ranks[name]:
            here = machines[rank // per_machine]
            here.groups += memory.total if on_cpu else 0.0
            here.pinned += sum(memory.parts.get(part, 0.0) for part in offloaded) if away else 0.0
            here.buckets += bucket * _RECEIVED[cluster.sync_mode] * (name == "inference")
            here.saved += 0.0 if name == "rollout" else saved_bytes(config, model, name) / len(ranks[name])
    exporting = _exporting(config, sorted(ranks["actor"])) if cluster.mode is Mode.disaggregated else []
    for rank in exporting:
        machines[rank // per_machine].pushed += (
            trained_parameters(config, model) * BYTES[config.model.dtype] / len(exporting)
        )
    machines[ranks["actor"][0] // per_machine].buckets += bucket * _SENT[cluster.sync_mode]
    copy = engine_weights_bytes(config, model) * tp if stages_in_host(config) else 0.0
    for first in sorted(ranks["rollout"])[::tp]:
        here = machines[first // per_machine]
        here.staged += copy
        here.buckets += bucket * _RECEIVED[cluster.sync_mode]
        here.shared += LOADING_BUCKETS * min(copy, cluster.sync_bucket_bytes) if on_cpu else 0.0
    fullest = max(machines.values(), key=lambda one: one.total + one.shared)
    fullest.shared += SHARED_BYTES[cluster.device]
    return fullest
