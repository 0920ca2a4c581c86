"""Loads weights into a model's shards, and exports one weight version from a group, bucket by bucket.

Export gathers whole tensors, under their Hugging Face names, over TP and EP to the first rank of each pipeline stage:

    stage 0:   ranks 0 .. 3  --gather-->  rank 0  --pack into the sender's memory-->                   rank 0 sends
    stage 1:   ranks 4 .. 7  --gather-->  rank 4  --pack, transfer to the sender's memory on rank 0->  rank 0 sends
    ipc:       each stage's first rank packs and sends on its own device; rank 0 returns all handles.

Tensors stay on their device up to the sender. The experts of all other ranks go to the first rank in one transfer per
bucket, because a model may have thousands of them.

Every process of the group creates an `Export`, and all processes call `next` together and equally often, because
gathering is collective. The weights must not change until `next` has returned None on rank 0.

The actor trains on while its last export is repeated for a process that has just started: `ExportedWeights` holds copies.

Invariant: all tensors of one parameter (query, key and value; gate and up) are in one bucket, and so are parameters that
an engine fuses.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import Parameter

from rlsys.config.schema import SyncMode
from rlsys.errors import RunError, UserError
from rlsys.trainer.mesh import MeshCoordinates
from rlsys.trainer.model.stage_model import PolicyModel, StageModel, ValueModel
from rlsys.trainer.offload import HostBlocks
from rlsys.weights.bucket import Bucket, BucketFullError, Memory, digest, pack_into
from rlsys.weights.checkpoint.adapters import BaseModel
from rlsys.weights.hf_io import HfReader, check_repeated
from rlsys.weights.transport import BucketHandle, IpcSender, Sender, TransportSpec, bucket_memory, open_sender
from rlsys.weights.weight_map import Entry, ShardLoader, WeightMap, aligned, packed, shares_bucket

_COPY_BYTES = 256 * 1024 * 1024  # Size limit of a measured copy; larger copies run at the same speed.
_COPY_ROUNDS = 3


def update_loader(model: StageModel) -> ShardLoader:
    """Return a loader that takes the tensors of an export: those of the adapters in a model that has them, else all."""
    return shard_loader(model, model.updated, model.adapter_weights)


def shard_loader(
    model: StageModel, parameters: Mapping[str, Parameter] | None = None, weights: WeightMap | None = None
) -> ShardLoader:
    """Return a loader that takes whole Hugging Face tensors and copies this process's shards into `parameters`.

    `parameters` defaults to all that the model loads from a folder, and `weights` to the model's map.
    """
    into, weights = model.loaded if parameters is None else parameters, weights or model.weights

    def store(name: str, shard: Tensor) -> None:
        if into[name].shape != shard.shape:
            raise UserError(
                f"{name} has shape {list(into[name].shape)} in the layers of the family {model.architecture.family}, but "
                f"{list(shard.shape)} in the weights: correct the family, or use the config.json of the weights.",
                code="mismatch",
                key=name,
            )
        into[name].data.copy_(shard)

    return ShardLoader(weights, list(into), model.coords.tp, model.coords.tp_size, store)


def load_hf(model: StageModel, path: str | Path) -> None:
    """Load the Hugging Face folder `path`. Raises UserError if it does not fit the architecture.

    A critic loads a token classification model with one label, or a model without a value head; the critic's value head
    then starts at zero. Advantages then start as the returns themselves; random values would be noise that value
    clipping removes only slowly.
    """
    reader, parameters = HfReader(path), dict(model.loaded)
    names, critic = reader.names(), isinstance(model, ValueModel)
    model.weights.check_hf_names(names, headless=critic)
    if not critic:
        check_repeated(reader, model.weights, path)
    for name in {"value_head.weight", "value_head.bias"} & parameters.keys():
        (hf,) = model.weights.entry(name).hf
        if hf not in names:
            parameters.pop(name).data.zero_()
            continue
        shape, own = list(reader.get(hf).shape), list(parameters[name].shape)
        if shape != own:
            raise UserError(
                f"{path} has a head {hf} of shape {shape}, but the critic's head has shape {own}: use a model with "
                "num_labels=1, or one without a head.",
                code="mismatch",
                key=str(path),
            )
    loader = shard_loader(model, parameters)
    for name in loader.missing():
        loader.feed(name, reader.get(name))
    if model.lora is not None:
        found = [BaseModel.of(path) if model.coords.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        model.base = found[0]


def export_plan(model: PolicyModel, bucket_bytes: int) -> list[list[Entry]]:
    """Return the stage's exported parameters, in order, as one list per bucket of at most `bucket_bytes`.

    With `model.lora.sync=adapters` they are those of the adapters. A parameter larger than a bucket gets its own list.
    """
    itemsize = model.config.params_dtype.itemsize
    entries = [
        entry
        for entry in (() if model.sent_beside else model.weights.entries())
        # Include all experts of the stage's layers, whichever rank of the stage holds them.
        if entry.name in model.exported or (entry.expert is not None and entry.layer in model.layers)
    ]
    together: list[list[Entry]] = []
    for entry in [*entries, *model.adapter_entries]:
        if together and shares_bucket(together[-1][-1].rule, entry.rule):
            together[-1].append(entry)
        else:
            together.append([entry])

    def nbytes(items: list[Entry]) -> int:
        return sum(aligned(prod(shape) * itemsize) for entry in items for shape in entry.rule.shapes)

    return [[entry for items in run for entry in items] for run in packed(together, nbytes, bucket_bytes)]


@torch.no_grad()
def whole_tensors(model: PolicyModel, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole Hugging Face tensors on the first rank of the stage and nothing on other ranks, experts last.

    All ranks with `MeshCoordinates.exports` iterate together, because gathering is collective.
    """
    coords = model.coords
    for entry in entries:
        if entry.expert is not None or coords.in_stage >= coords.tp_size:
            continue
        shard = model.parameters[entry.name].data
        if entry.name in model.adapters:
            shard = model.adapters[entry.name].merged(shard)
        shards = model.gathered(entry, shard)
        if coords.in_stage == 0:
            yield from model.weights.merge(entry, shards)
    for entry, held in _experts(model, [entry for entry in entries if entry.expert is not None]):
        yield from model.weights.merge(entry, [held])


def _experts(model: PolicyModel, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Tensor]]:
    """Yield the experts' tensors on the stage's first rank, to which all other owners send theirs together.

    This is a collective of all owners, because NCCL makes a communicator for each pair that sends by itself.
    """
    coords, owned = model.coords, [list[Entry]() for _ in range(model.coords.ep_size)]
    if coords.in_stage >= coords.ep_size:
        return
    for entry in entries:
        assert entry.expert is not None
        owned[entry.expert // len(model.experts)].append(entry)
    held = [model.parameters[entry.name].data for entry in owned[coords.in_stage]]
    first = coords.in_stage == 0
    if first:
        yield from zip(owned[0], held, strict=True)
    foreign = [entry for of_owner in owned[1:] for entry in of_owner]
    if not foreign:
        return
    counts = [0, *(sum(prod(model.weights.whole_shape(entry, 1)) for entry in of_owner) for of_owner in owned[1:])]
    received = torch.empty(sum(counts) if first else 0, dtype=model.config.params_dtype, device=model.device)
    sent = received[:0] if first else torch.cat([received, *(tensor.flatten() for tensor in held)])
    nothing = [0] * coords.ep_size
    group = parallel_state.get_expert_model_parallel_group()
    dist.all_to_all_single(received, sent, counts if first else nothing, [len(sent), *nothing[1:]], group)
    if first:
        shapes = [model.weights.whole_shape(entry, 1) for entry in foreign]
        for entry, shape, part in zip(foreign, shapes, received.split(list(map(prod, shapes))), strict=True):
            yield entry, part.view(shape)


def owners_group(coords: MeshCoordinates) -> dist.ProcessGroup:
    """Return the group of every stage's first rank, which passes weights to rank 0; all ranks call this.

    On GPUs it has two backends: NCCL for tensors on the device, and gloo for descriptions of buckets.
    """
    owners = [stage * coords.stage_size for stage in range(coords.pp_size)]
    on_gpus = dist.get_backend() == dist.Backend.NCCL
    return dist.new_group(owners, backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo")


class WeightSender(ABC):
    """Part of a worker that exports weights; `WeightSync` calls it in every process of the exporting group."""

    coords: MeshCoordinates
    _bucket_bytes = 0
    _sender: Sender | None = None
    _running: Export | None = None

    @abstractmethod
    def export(self, bucket_bytes: int, sender: Sender | None, again: bool = False) -> Export:
        """Begin an export on all ranks together; the weights must not change until it ends.

        With `again`, the last export is repeated bit for bit, also if training has changed the weights since. `sender` is set
        on rank 0 and, with `ipc`, on the first rank of every stage; it is None on other ranks.
        """

    def open_export(self, spec: TransportSpec) -> float | None:
        """Open the transport `spec` for later exports.

        Returns the copy bandwidth of the sender's memory in GB/s on rank 0, None on other ranks.
        """
        self._bucket_bytes = spec.bucket_bytes
        if self.coords.rank and not (spec.mode is SyncMode.ipc and self.coords.in_stage == 0):
            return None
        self.close_export()
        self._sender = sender = open_sender(spec)
        if self.coords.rank:
            return None
        return copy_gb_s(spec.bucket_bytes, sender.device or torch.device("cpu"))

    def close_export(self) -> None:
        """Free the memory of the transport until `open_export` opens another one. Idempotent."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def begin_export(self, again: bool = False) -> None:
        """Begin to export the current weights, or `again` those of the last export."""
        self._running = self.export(self._bucket_bytes, self._sender, again)

    def next_handle(self, taken: int) -> BucketHandle | None:
        """Return the next bucket's handle on rank 0, None after the last bucket and on other ranks.

        `taken` counts the buckets that all receivers have taken; their memory is reused.
        """
        return self._release(taken).next()

    def end_export(self, taken: int) -> str:
        """Release the last buckets' memory; return the digest, which covers the whole export on rank 0 only."""
        export, self._running = self._release(taken), None
        return export.digest

    def _release(self, taken: int) -> Export:
        if self._sender is not None:
            self._sender.release(taken)
        if self._running is None:
            raise RuntimeError("A bucket was requested without an export: call begin_export first.")
        return self._running


class ExportedWeights:
    """Copies, in host memory, of what an export reads of a model that trains on.

    They are made bucket by bucket, on the stream that packs the buckets, and lie in a few blocks: torch would round a pinned
    tensor of each parameter up to a power of two.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model, self._blocks = model, HostBlocks()
        self._read = _parameters_read(model)
        self._pieces: dict[str, list[Tensor]] = {}
        """Name of a parameter -> the pieces of its copy, [bytes] each."""

    def take(self, entries: Sequence[Entry]) -> None:
        """Copy the current weights of `entries`."""
        if not self._pieces:
            self._pieces = self._allocated()
        for name in self._names(entries):
            for host, device in self._paired(name, self._read[name].data):
                host.copy_(device, non_blocking=True)

    @contextmanager
    def in_place(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Give the model the copies of `entries` during the body."""
        current = {name: self._read[name].data for name in self._names(entries)}
        try:
            for name, data in current.items():
                copied = torch.empty_like(data)
                for host, device in self._paired(name, copied):
                    device.copy_(host, non_blocking=True)
                self._read[name].data = copied
            yield
        finally:
            for name, data in current.items():
                self._read[name].data = data

    def _allocated(self) -> dict[str, list[Tensor]]:
        pairs = self._blocks.pieces([_flat_bytes(one.data) for one in self._read.values()])
        found: dict[str, list[Tensor]] = {name: [] for name in self._read}
        for name, parameter in self._read.items():
            left = parameter.nbytes
            while left:
                found[name].append(next(pairs)[0])
                left -= len(found[name][-1])
        return found

    def _names(self, entries: Sequence[Entry]) -> set[str]:
        """Return the parameters that an export of `entries` reads, with the adapters that it merges into them."""
        adapters = self._model.adapters
        merged = (name for entry in entries if entry.name in adapters for name in adapters[entry.name].names)
        return {*(entry.name for entry in entries), *merged} & self._read.keys()

    def _paired(self, name: str, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pieces of a parameter's copy, each with the same bytes of `data`."""
        pieces = self._pieces[name]
        return zip(pieces, _flat_bytes(data).split([len(piece) for piece in pieces]), strict=True)


def _flat_bytes(data: Tensor) -> Tensor:
    return data.view(-1).view(torch.uint8)


def _parameters_read(model: PolicyModel) -> dict[str, Parameter]:
    """Return the parameters of this process that training changes and `whole_tensors` reads."""
    coords, adapters = model.coords, {entry.name for entry in model.adapter_entries}
    dense, experts = coords.in_stage < coords.tp_size, coords.in_stage < coords.ep_size
    return {
        name: parameter
        for name, parameter in model.trainable.items()
        if (dense and name in adapters)
        or (name in model.exported and (dense if model.entries[name].expert is None else experts))
    }


class Export:
    """Exports one weight version from this process."""

    def __init__(
        self,
        model: PolicyModel,
        require_weights: Callable[[], None],
        owners: dist.ProcessGroup,
        bucket_bytes: int,
        sender: Sender | None,
        copies: ExportedWeights | None = None,
        again: bool = False,
    ) -> None:
        """See `WeightSender.export`. `require_weights` raises while the weights are offloaded.

        `owners` is the group from `owners_group`. The export writes `copies`, or with `again` reads them.
        """
        self._model, self._coords = model, model.coords
        self._require_weights = require_weights
        self._owners, self._bucket_bytes, self._sender = owners, bucket_bytes, sender
        self._copies, self._again = copies, again
        self._room: Memory | None = None
        """Memory in which the first rank of a stage above 0 packs a bucket."""
        self._runs = self._plan()
        self._checksums: dict[str, str] = {}

    def next(self) -> BucketHandle | None:
        """Gather and send the next bucket; return its handle on rank 0, None after the last bucket and on other ranks.

        Raises RunError if a tensor is larger than a bucket, or if a receiver is gone.
        """
        self._require_weights()
        run = next(self._runs, None)
        if run is None:
            return None
        stage, entries = run
        if self._copies is not None and not self._again:
            self._copies.take(entries)
        with self._copies.in_place(entries) if self._copies is not None and self._again else nullcontext():
            handle = self._send(stage, entries)
        if handle is not None:
            self._checksums |= {record.name: record.checksum for record in handle.records}
        return handle

    def _send(self, stage: int, entries: list[Entry]) -> BucketHandle | None:
        """Gather and send a bucket of `stage`; return its handle on rank 0, None on other ranks."""
        if isinstance(self._sender, IpcSender):
            return self._send_from_stage(self._sender, stage, entries)
        if self._sender is None:
            self._give(stage, entries)
            return None
        return self._sender.send(
            self._take(stage, self._sender) if stage else self._pack(entries, self._sender.next_slot())
        )

    @property
    def digest(self) -> str:
        """Digest of all tensors whose handles `next` returned; covers the whole export on rank 0 only."""
        return digest(self._checksums, self._model.sent_beside)

    def _plan(self) -> Iterator[tuple[int, list[Entry]]]:
        """Return (stage, parameters) for each bucket of the model; parameters are empty for buckets of other stages."""
        if not self._coords.exports:
            return iter(())
        of_stage = export_plan(self._model, self._bucket_bytes)
        counts = [0] * self._coords.pp_size
        dist.all_gather_object(counts, len(of_stage), group=parallel_state.get_pipeline_model_parallel_group())
        return (
            (stage, of_stage[run] if stage == self._coords.pp else [])
            for stage, runs in enumerate(counts)
            for run in range(runs)
        )

    def _send_from_stage(self, sender: IpcSender, stage: int, entries: list[Entry]) -> BucketHandle | None:
        """Send the next bucket if it belongs to this stage; return its handle on rank 0, None on other ranks."""
        rank_0 = self._coords.rank == 0
        if stage != self._coords.pp:
            sender.skip()
            if not rank_0:
                return None
            box: list[Any] = [None]
            dist.recv_object_list(box, src=stage * self._coords.stage_size, group=self._owners)
            handle: BucketHandle = box[0]
            return handle
        handle = sender.send(self._pack(entries, sender.next_slot()))
        if rank_0:
            return handle
        dist.send_object_list([handle], dst=0, group=self._owners)
        return None

    def _pack(self, entries: list[Entry], memory: Memory) -> Bucket:
        """Gather parameters of this process's stage directly into `memory`, [bucket_bytes]."""
        try:
            return pack_into(memory, whole_tensors(self._model, entries))
        except BucketFullError as problem:
            raise RunError(
                f"cluster.sync_bucket_bytes={self._bucket_bytes} is too small for the model: {problem} Raise it."
            ) from problem

    def _give(self, stage: int, entries: list[Entry]) -> None:
        """Gather `entries` if this process is in `stage`; the first rank of a stage above 0 sends them to rank 0."""
        if stage != self._coords.pp:
            return
        if self._coords.in_stage:
            list(whole_tensors(self._model, entries))
            return
        if self._room is None:
            on_cpu = self._model.device.type == "cpu"
            self._room = bucket_memory(self._bucket_bytes, None if on_cpu else self._model.device)
        bucket = self._pack(entries, self._room)
        dist.send_object_list([(bucket.records, bucket.data.nbytes)], dst=0, group=self._owners)
        dist.send(bucket.flat, dst=0, group=self._owners)

    def _take(self, stage: int, sender: Sender) -> Bucket:
        """Receive a bucket from the first rank of `stage` into the memory that `sender` lends."""
        owner = stage * self._coords.stage_size
        box: list[Any] = [None]
        dist.recv_object_list(box, src=owner, group=self._owners)
        records, nbytes = box[0]
        bucket = Bucket(sender.next_slot()[:nbytes], records)
        dist.recv(bucket.flat, src=owner, group=self._owners)
        return bucket


def copy_gb_s(nbytes: int, device: torch.device) -> float:
    """Return the speed in GB/s (10^9) of copying `nbytes` on `device`: best of a few rounds, one thread on a CPU."""
    size = min(nbytes, _COPY_BYTES)
    fastest = _fastest_s(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / fastest / 1e9


def _fastest_s(size: int, device: torch.device) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    fastest = float("inf")
    for _ in range(_COPY_ROUNDS):
        started = time.perf_counter()
        if device.type == "cuda":
            target.copy_(source)
            torch.cuda.synchronize(device)
        else:
            np.copyto(target.numpy(), source.numpy())
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
