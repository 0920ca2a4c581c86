"""A process's end of handing weights out: what `WeightSync` calls in every process of the group that sends.

Imported in worker processes only: it loads Megatron.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rlsys.config.schema import SyncMode
from rlsys.trainer.export import Export
from rlsys.trainer.parallel import Place
from rlsys.weights.buckets import copy_gb_s
from rlsys.weights.transport import BucketHandle, IpcSender, Sender, TransportSpec, open_sender


class StartExport(Protocol):
    """Begins to hand out the weights as they are now; see `Actor.export`."""

    def __call__(self, bucket_bytes: int, sender: Sender | None) -> Export: ...


class Sending:
    """One process's part in handing out the weights that `start` exports."""

    def __init__(self, place: Place, bucket_bytes: int, start: StartExport) -> None:
        self._place, self._bucket_bytes, self._start = place, bucket_bytes, start
        self._sender: Sender | None = None
        self._export: Export | None = None

    def open_export(self, spec: TransportSpec) -> float | None:
        """Hand weights out in the way of `spec` from now on; rank 0 says how fast the bytes' memory copies, in GB/s.

        Rank 0 sends; with `ipc` so does the first rank of every stage.
        """
        if self._place.rank and not (spec.mode is SyncMode.ipc and self._place.in_stage == 0):
            return None
        if self._sender is not None:
            self._sender.close()
        self._sender = sender = open_sender(spec)
        if self._place.rank:
            return None
        device = sender.device if isinstance(sender, IpcSender) else torch.device("cpu")
        return copy_gb_s(self._bucket_bytes, device)

    def begin_export(self) -> None:
        """Begin to hand out the weights as they are now."""
        self._export = self._start(self._bucket_bytes, self._sender)

    def next_handle(self, taken: int) -> BucketHandle | None:
        """The next bucket's handle from rank 0; None at the end and from other ranks, which only take part.

        `taken` counts the buckets that every receiver has taken since `open_export`.
        """
        if self._sender is not None:
            self._sender.release(taken)
        return self._running().next()

    def end_export(self, taken: int) -> str:
        """Free what the last buckets lie in; the digest of all that was handed out, from rank 0."""
        if self._sender is not None:
            self._sender.release(taken)
        export, self._export = self._running(), None
        return export.digest

    def _running(self) -> Export:
        if self._export is None:
            raise RuntimeError("Weights were asked for before begin_export.")
        return self._export
