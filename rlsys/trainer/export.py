"""One version of a model's weights on its way out of its group, bucket by bucket.

Whole tensors under their Hugging Face names are gathered over tensor and expert parallelism by the first rank of their
pipeline stage, packed straight into the memory that the sender lends, or passed there, and sent by rank 0. With `ipc`
each stage's first rank packs and sends on its own device, and rank 0 passes on where that is. Every process of the
group makes an export and calls `next` equally often, together, for gathering is collective. The weights must not change
until it has returned None on rank 0.

Invariant: the tensors of one parameter (query, key and value; gate and up) travel in one bucket.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlsys.config.schema import SyncMode
from rlsys.errors import RunError
from rlsys.trainer.mesh import Place
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.buckets import Bucket, BucketFullError, copy_gb_s, digest, pack, pack_into
from rlsys.weights.transport import BucketHandle, IpcSender, Sender, TransportSpec, open_sender


def owners_group(place: Place) -> dist.ProcessGroup:
    """The group that passes weights on to rank 0: the first rank of every stage.

    Over host memory, whatever the Megatron group's own backend is. All ranks call this together.
    """
    owners = [stage * place.stage_size for stage in range(place.pp_size)]
    return dist.new_group(owners, backend="gloo")


class WeightSender(ABC):
    """The part of a worker that hands weights out; `WeightSync` calls it in every process of the group that sends."""

    place: Place
    _bucket_bytes = 0
    _sender: Sender | None = None
    _running: Export | None = None

    @abstractmethod
    def export(self, bucket_bytes: int, sender: Sender | None) -> Export:
        """Begin to hand the weights out; they must not change until the export has ended.

        All ranks call this together; `sender` is there on rank 0, with `ipc` on the first rank of every stage, and
        nowhere else.
        """

    def open_export(self, spec: TransportSpec) -> float | None:
        """Hand weights out in the way of `spec` from now on; rank 0 says how fast the bytes' memory copies, in GB/s.

        Rank 0 sends; with `ipc` so does the first rank of every stage.
        """
        self._bucket_bytes = spec.bucket_bytes
        if self.place.rank and not (spec.mode is SyncMode.ipc and self.place.in_stage == 0):
            return None
        if self._sender is not None:
            self._sender.close()
        self._sender = sender = open_sender(spec)
        if self.place.rank:
            return None
        return copy_gb_s(spec.bucket_bytes, sender.device if isinstance(sender, IpcSender) else torch.device("cpu"))

    def begin_export(self) -> None:
        """Begin to hand out the weights as they are now."""
        self._running = self.export(self._bucket_bytes, self._sender)

    def next_handle(self, taken: int) -> BucketHandle | None:
        """The next bucket's parcel from rank 0; None at the end and from other ranks, which only take part.

        `taken` counts the buckets that every receiver has taken since `open_export`.
        """
        return self._release(taken).next()

    def end_export(self, taken: int) -> str:
        """Free what the last buckets lie in; the digest of all that was handed out, from rank 0."""
        export, self._running = self._release(taken), None
        return export.digest

    def _release(self, taken: int) -> Export:
        if self._sender is not None:
            self._sender.release(taken)
        if self._running is None:
            raise RuntimeError("Weights were asked for before begin_export.")
        return self._running


class Export:
    """One process's part in handing one version out."""

    def __init__(
        self,
        model: PolicyModel,
        require_weights: Callable[[], None],
        owners: dist.ProcessGroup,
        bucket_bytes: int,
        sender: Sender | None,
    ) -> None:
        """See `WeightSender.export`. `owners` is the `owners_group`.

        `require_weights` raises if the model's memory is offloaded.
        """
        require_weights()
        self._model, self._place = model, model.place
        self._require_weights = require_weights
        self._owners, self._bucket_bytes, self._sender = owners, bucket_bytes, sender
        self._runs = self._plan()
        self._checksums: dict[str, str] = {}

    def next(self) -> BucketHandle | None:
        """Gather and send the next bucket; on rank 0 its handle, None after the last. None on other ranks.

        Raises RunError if a tensor is larger than a bucket, or if a receiver is gone.
        """
        self._require_weights()
        run = next(self._runs, None)
        if run is None:
            return None
        stage, names = run
        if isinstance(self._sender, IpcSender):
            handle = self._send_from_stage(self._sender, stage, names)
        elif self._sender is not None:
            bucket = self._take(stage, self._sender) if stage else self._pack(names, self._sender)
            handle = self._sender.send(bucket)
        else:
            self._give(stage, names)
            return None
        if handle is not None:
            self._checksums |= {record.name: record.checksum for record in handle.records}
        return handle

    @property
    def digest(self) -> str:
        """The digest of all that was sent from here."""
        return digest(self._checksums)

    def _plan(self) -> Iterator[tuple[int, list[str]]]:
        """Stage and Megatron names of each bucket of the whole model; names only for this process's stage."""
        if not self._place.exports:
            return iter(())
        of_stage = self._model.export_plan(self._bucket_bytes)
        counts = [0] * self._place.pp_size
        dist.all_gather_object(counts, len(of_stage), group=parallel_state.get_pipeline_model_parallel_group())
        return (
            (stage, of_stage[run] if stage == self._place.pp else [])
            for stage, runs in enumerate(counts)
            for run in range(runs)
        )

    def _send_from_stage(self, sender: IpcSender, stage: int, names: list[str]) -> BucketHandle | None:
        """The next bucket's handle on rank 0, from whichever stage has the bucket; None on its other owners."""
        rank_0 = self._place.rank == 0
        if stage != self._place.pp:
            sender.skip()
            if not rank_0:
                return None
            box: list[Any] = [None]
            dist.recv_object_list(box, src=stage * self._place.stage_size, group=self._owners)
            handle: BucketHandle = box[0]
            return handle
        handle = sender.send(self._pack(names, sender))
        if rank_0:
            return handle
        dist.send_object_list([handle], dst=0, group=self._owners)
        return None

    def _pack(self, names: list[str], sender: Sender) -> Bucket:
        """Gather parameters of this process's stage straight into the memory that `sender` lends."""
        try:
            return pack_into(sender.room(), self._model.whole_tensors(names))
        except BucketFullError as problem:
            raise RunError(
                f"cluster.sync_bucket_bytes={self._bucket_bytes} is too small for the model: {problem} Raise it."
            ) from problem

    def _give(self, stage: int, names: list[str]) -> None:
        """Gather parameters of this process's stage; the first rank of a later one passes them to rank 0."""
        if stage != self._place.pp:
            return
        tensors = list(self._model.whole_tensors(names))
        if stage and self._place.in_stage == 0:
            # The plan has cut them to size.
            (bucket,) = pack(tensors, sys.maxsize)
            dist.send_object_list([(bucket.records, bucket.data.nbytes)], dst=0, group=self._owners)
            dist.send(bucket.flat, dst=0, group=self._owners)

    def _take(self, stage: int, sender: Sender) -> Bucket:
        """Receive a bucket from the first rank of a later stage, in the memory that `sender` lends."""
        owner = stage * self._place.stage_size
        box: list[Any] = [None]
        dist.recv_object_list(box, src=owner, group=self._owners)
        records, nbytes = box[0]
        room = sender.room()
        if nbytes > room.nbytes:
            raise RunError(
                f"cluster.sync_bucket_bytes={self._bucket_bytes} is too small for the model: {records[0].name} is in "
                f"a bucket of {nbytes} bytes. Raise it."
            )
        bucket = Bucket(room[:nbytes], records)
        dist.recv(bucket.flat, src=owner, group=self._owners)
        return bucket
