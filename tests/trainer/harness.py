"""Runs a function in several processes that form one Megatron group over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rlsys.config.schema import Device, ParallelConfig, SyncMode
from rlsys.trainer.actor import Objective
from rlsys.trainer.batches import MicroBatch, collate
from rlsys.trainer.export import WeightSender
from rlsys.trainer.mesh import Rendezvous
from rlsys.weights.transport import Bucket, TransportSpec, digest, open_receiver, open_sender, unpack
from tests.trainer import reference

OBJECTIVE = Objective(reference.LOSS, reference.TEMPERATURE)


def rendezvous(rank: int, world_size: int, port: int) -> Rendezvous:
    return Rendezvous(rank, world_size, "127.0.0.1", port, Device.cpu, timeout_s=120.0)


def run_group(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call `function(rank, world_size, *args)` in each of `world_size` processes; raise what one raises.

    They are forks of one process that has imported Megatron and has no threads: a fork takes milliseconds, an import seconds.
    """
    multiprocessing.set_forkserver_preload(["tests.trainer.preloaded"])
    mp.start_processes(function, args=(world_size, *args), nprocs=world_size, start_method="forkserver")


def shared_memory(rank: int, bucket_bytes: int) -> TransportSpec:
    """A transport within one process."""
    members = ("the actor", "the test")
    return TransportSpec(SyncMode.tensor, rank, members, bucket_bytes, 10.0, Device.cpu, ("", 0), "")


def export(worker: WeightSender, bucket_bytes: int) -> list[Bucket]:
    """All buckets, on rank 0. As a driver does it: the next is asked for when all ranks have answered."""
    buckets: list[Bucket] = []
    first = worker.place.rank == 0
    sender = open_sender(shared_memory(0, bucket_bytes)) if first else None
    receiver = open_receiver(shared_memory(1, bucket_bytes))
    running = worker.export(bucket_bytes, sender)
    while True:
        handle = running.next()
        dist.barrier()
        done = [handle is None]
        dist.broadcast_object_list(done, src=0)
        if done[0]:
            assert not first or running.digest == digest_of(buckets)
            return buckets
        if handle is not None and sender is not None:
            bucket = receiver.receive(handle)
            buckets.append(Bucket(bucket.data.copy(), bucket.records))
            sender.release(len(buckets))


def digest_of(buckets: list[Bucket]) -> str:
    return digest({record.name: record.checksum for bucket in buckets for record in bucket.records})


def weights_of(worker: WeightSender) -> dict[str, Tensor]:
    """Every exported tensor by name, on rank 0."""
    return {r.name: tensor.clone() for bucket in export(worker, 50_000) for r, tensor in unpack(bucket)}


@dataclass(frozen=True)
class Layout:
    """How a model under test is cut."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    pp_layers: tuple[int, ...] | None = None
    sequence_parallel: bool = False
    tied: bool = True
    recompute: bool = False
    distributed: bool = True

    @property
    def parallel(self) -> ParallelConfig:
        layers = list(self.pp_layers) if self.pp_layers else None
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            pp_layers=layers,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def processes(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def filler(self) -> MicroBatch | None:
        """A packed micro-batch that trains nothing, where all must be packed."""
        if self.cp == 1:
            return None
        wide = 2 * self.cp * self.tp
        return collate([], pad_id=0, multiple_of=wide, packed=True, room_multiple=2 * self.cp)

    @property
    def reporting(self) -> list[int]:
        """Rank of each data-parallel rank that returns results."""
        return [self.tp * self.cp * (self.dp * (self.pp - 1) + dp) for dp in range(self.dp)]
