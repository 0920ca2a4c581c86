"""Joins and leaves the process mesh of a Megatron group, and computes a process's coordinates in the mesh.

Ranks follow Megatron's order: tensor parallel varies fastest, then context, data and pipeline parallel. Example, tp=2,
pp=2, 8 processes:

            stage 0     stage 1
    rank:   0 1  2 3    4 5  6 7
    tp:     0 1  0 1    0 1  0 1
    dp:     0 0  1 1    0 0  1 1.

Every `ep` consecutive ranks of a stage divide the experts among themselves, regardless of tp, cp and dp. A single
expert is never cut, so tensor- and context-parallel ranks act as data-parallel ranks of the experts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rlsys.config.schema import Device, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import cpu_support
from rlsys.trainer.batches import data_parallel_ranks
from rlsys.weights.sockets import listener


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address and size of a process group, for one process that joins it."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    device: Device
    timeout_s: float
    """Timeout of joining and of every collective."""


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    rank: int
    tp: int
    tp_size: int
    cp: int
    """Context-parallel rank, which selects the process's chunks of every sequence; see `columns_of`."""
    cp_size: int
    dp: int
    dp_size: int
    pp: int
    pp_size: int
    ep: int
    """Index of the block of experts on this process."""
    ep_size: int
    in_stage: int
    """Index of the process within its pipeline stage."""
    stage_size: int
    """Processes per pipeline stage."""
    exports: bool
    """True if the process holds a TP shard or an expert block of the copy that its stage exports."""
    reports: bool
    """True if the process returns results: one process per data-parallel rank, on the last stage."""


def mesh_coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> MeshCoordinates:
    """Return the coordinates of `rank`. The parallel sizes fit the group; see `placement.parallel_problems`."""
    stage_size = world_size // parallel.pp
    tp, cp, pp, in_stage = rank % parallel.tp, rank // parallel.tp % parallel.cp, rank // stage_size, rank % stage_size
    return MeshCoordinates(
        rank=rank,
        tp=tp,
        tp_size=parallel.tp,
        cp=cp,
        cp_size=parallel.cp,
        dp=data_parallel_ranks(parallel, world_size)[rank],
        dp_size=world_size // (parallel.tp * parallel.cp * parallel.pp),
        pp=pp,
        pp_size=parallel.pp,
        ep=in_stage % parallel.ep,
        ep_size=parallel.ep,
        in_stage=in_stage,
        stage_size=stage_size,
        exports=in_stage < max(parallel.tp, parallel.ep),
        reports=pp == parallel.pp - 1 and tp == cp == 0,
    )


def start(rendezvous: Rendezvous, parallel: ParallelConfig, seed: int) -> MeshCoordinates:
    """Join the group and Megatron's process groups. Blocks until all have joined; torch raises after `timeout_s`."""
    coords = mesh_coordinates(rendezvous.rank, rendezvous.world_size, parallel)
    _choose_device(rendezvous)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    address, first = (rendezvous.master_addr, rendezvous.master_port), rendezvous.rank == 0
    store = dist.TCPStore(
        *address,
        rendezvous.world_size,
        is_master=first,
        timeout=timeout,
        master_listen_fd=listener(*address)[0] if first else None,
    )
    dist.init_process_group(
        "nccl" if rendezvous.device is Device.gpu else "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(rendezvous.timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return coords


def _choose_device(rendezvous: Rendezvous) -> None:
    """Choose this process's device, and adapt Megatron to it. Raises UserError if the machine lacks `device`."""
    # Set before any use of CUDA. On GPUs up to Hopper, Megatron relies on this setting: kernels start in launch order,
    # so communication kernels start before the compute kernels that overlap them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    visible = torch.cuda.device_count()
    if rendezvous.device is Device.gpu:
        if not visible:
            raise UserError(
                "cluster.device is gpu, but this machine has no CUDA device: set cluster.device to cpu.",
                code="not_found",
                key="cluster.device",
            )
        torch.cuda.set_device(rendezvous.rank % visible)
    elif visible:
        raise UserError(
            'cluster.device is cpu, but CUDA devices are visible: set CUDA_VISIBLE_DEVICES="", or set cluster.device '
            "to gpu.",
            code="conflict",
            key="cluster.device",
        )
    cpu_support.adapt()


def stop() -> None:
    """Leave the group; the process can join another one afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
