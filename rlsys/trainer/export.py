"""One version of a model's weights on its way out of its group, bucket by bucket.

Whole tensors under their Hugging Face names are gathered over tensor and expert parallelism by the first rank of their
pipeline stage, packed straight into the memory that the sender lends, or passed there, and sent by rank 0. With
`ipc` each stage's first rank packs and sends on its own device, and rank 0 passes on where that is.
Every process of the group makes an export and calls `next` equally often, together, for gathering is
collective. The weights must not change until it has returned None on rank 0.

Invariant: the tensors of one parameter (query, key and value; gate and up) travel in one bucket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rlsys.errors import RunError
from rlsys.trainer.model import PolicyModel
from rlsys.trainer.parallel import Place
from rlsys.weights.buckets import Bucket, BucketFullError, digest, pack, pack_into
from rlsys.weights.transport import BucketHandle, IpcSender, Sender


def owners_group(place: Place) -> dist.ProcessGroup:
    """The group that passes weights on to rank 0: the first rank of every stage.

    Over host memory, whatever the Megatron group's own backend is. All ranks call this together.
    """
    owners = [stage * place.stage_size for stage in range(place.pp_size)]
    return dist.new_group(owners, backend="gloo")


class Export:
    """One process's part in handing a version out."""

    def __init__(
        self,
        model: PolicyModel,
        require_weights: Callable[[], None],
        owners: dist.ProcessGroup,
        bucket_bytes: int,
        sender: Sender | None,
    ) -> None:
        """`owners` is the `owners_group`; `sender` is there on rank 0, and if it is one of `ipc` on the first of each stage.

        All ranks of a pipeline call this together. `require_weights` raises if the model's memory is offloaded.
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
        """Of all that was sent from here."""
        return digest(self._checksums)

    def _plan(self) -> Iterator[tuple[int, list[str]]]:
        """Stage and Megatron names of each bucket of the whole model; names only for this process's stage."""
        if not self._place.exports:
            return iter(())
        own = self._model.export_plan(self._bucket_bytes)
        counts = [0] * self._place.pp_size
        dist.all_gather_object(counts, len(own), group=parallel_state.get_pipeline_model_parallel_group())
        return (
            (stage, own[run] if stage == self._place.pp else [])
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
        """What the first rank of a later stage gives, in the memory that `sender` lends."""
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
