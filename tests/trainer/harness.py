"""Builds actors for the tests, describes parallel layouts, and gathers exported weights."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlsys.config.schema import (
    AdamwConfig,
    Device,
    Dtype,
    Layers,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SyncMode,
)
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import MicroBatch, collate
from rlsys.trainer.export import Export, WeightSender
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.weights.bucket import Bucket, unpack
from rlsys.weights.transport import TransportSpec, open_receiver, open_sender
from tests.support.megatron_processes import Group
from tests.support.tensors import digest_of
from tests.trainer import reference

OBJECTIVE = Objective(reference.LOSS, reference.TEMPERATURE)
OPTIMIZER = AdamwConfig(lr=3e-3, weight_decay=0.1)
TOTAL_STEPS = 3
WHOLE = LoraConfig()
"""No adapters: the whole model is trained."""


def local_model(
    path: Path | str,
    dtype: Dtype = Dtype.float32,
    recompute: bool = False,
    family: str | None = None,
    lora: LoraConfig = WHOLE,
) -> ModelConfig:
    """Config of the model at `path` for a run on a CPU."""
    return ModelConfig(str(path), Layers.local, dtype, recompute, family=family, lora=lora)


def make_actor(
    group: Group,
    model: Path | str,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    objective: Objective = OBJECTIVE,
    *,
    dtype: Dtype = Dtype.float32,
    recompute: bool = False,
    family: str | None = None,
    lora: LoraConfig = WHOLE,
    scratch: Path | str = ".",
) -> Actor:
    """An actor without weights, in the next process group that `group` forms."""
    config = local_model(model, dtype, recompute, family, lora)
    return Actor(group.meet(), config, parallel or ParallelConfig(), optimizer, objective, TOTAL_STEPS, 1, scratch)


def shared_memory(rank: int, bucket_bytes: int) -> TransportSpec:
    """Transport between a sender and a receiver in the same process."""
    members = ("the actor", "the test")
    return TransportSpec(SyncMode.tensor, rank, members, bucket_bytes, 120.0, Device.cpu, None, "")


def export(worker: WeightSender, bucket_bytes: int, base: str = "", again: bool = False) -> list[Bucket]:
    """Return all exported buckets on rank 0, none elsewhere; `base` is a part of their digest.

    With `again` they are those of the last export. Like the driver, ask for the next bucket once all ranks have answered.
    """
    buckets: list[Bucket] = []
    first = worker.coords.rank == 0
    sender = open_sender(shared_memory(0, bucket_bytes)) if first else None
    receiver = open_receiver(shared_memory(1, bucket_bytes))
    running = worker.export(bucket_bytes, sender, again)
    while True:
        handle = running.next()
        dist.barrier()
        done = [handle is None]
        dist.broadcast_object_list(done, src=0)
        if done[0]:
            assert not first or running.digest == digest_of(buckets, base)
            return buckets
        if handle is not None and sender is not None:
            bucket = receiver.receive(handle)
            buckets.append(Bucket(bucket.data.copy(), bucket.records))
            sender.release(len(buckets))


def weights_of(worker: WeightSender, again: bool = False) -> dict[str, Tensor]:
    """Every exported tensor by name, on rank 0; with `again` those of the last export."""
    return {r.name: tensor.clone() for bucket in export(worker, 500_000, again=again) for r, tensor in unpack(bucket)}


def weights_in(worker: LogProbWorker) -> dict[str, Tensor]:
    """Every tensor of the policy of an inference worker by name, on rank 0."""
    assert worker._policy is not None
    sends: Any = SimpleNamespace(coords=worker.coords)
    sends.export = lambda size, sender, _: Export(worker._policy, lambda: None, worker._export_group, size, sender)
    base = worker._policy.sent_beside
    return {r.name: tensor.clone() for bucket in export(sends, 500_000, base) for r, tensor in unpack(bucket)}


@dataclass(frozen=True)
class Layout:
    """A parallel layout of a model, and the settings that go with it."""

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
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "sequence_parallel")}
        return ParallelConfig(**sizes, pp_layers=list(self.pp_layers) if self.pp_layers else None)

    @property
    def processes(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def filler(self) -> MicroBatch | None:
        """A packed micro-batch without trained tokens; None if the layout does not need packing."""
        if self.cp == 1:
            return None
        wide = 2 * self.cp * self.tp
        return collate([], pad_id=0, multiple_of=wide, packed=True, room_multiple=2 * self.cp)

    @property
    def reporting(self) -> list[int]:
        """Ranks that return results: one rank of each data-parallel replica."""
        return [self.tp * self.cp * (self.dp * (self.pp - 1) + dp) for dp in range(self.dp)]
