"""The log-prob worker: forward only, with the policy's newest weights and the frozen reference.

Invariant: log-probs come from one whole version whose digest is the actor's, or not at all: between the
first bucket of an update and its end, after an update that failed and while the memory is offloaded,
`compute` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config.schema import ModelConfig, ParallelConfig
from rlsys.megatron import parallel as groups
from rlsys.megatron.forward import forward, to_tensor
from rlsys.megatron.logprobs import lay_out, token_logprobs
from rlsys.megatron.model import PolicyModel
from rlsys.megatron.offload import Offload
from rlsys.megatron.results import LogProbs, Offloaded
from rlsys.pipeline.micro_batch import MicroBatch
from rlsys.weights.bijection import ShardLoader
from rlsys.weights.buckets import Bucket, ChecksumError, digest, unpack
from rlsys.weights.families import read_architecture


class LogProbWorker:
    """One process of the group that recomputes log-probs."""

    def __init__(
        self,
        rendezvous: groups.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        temperature: float,
        with_reference: bool,
        seed: int,
    ) -> None:
        """Join the group and load the model at `model.path`, as version 0 of the policy and as reference.

        `temperature` is the one that samples are drawn at.
        """
        self._temperature = temperature
        architecture = read_architecture(model.path)
        self.place = groups.start(rendezvous, parallel, seed)
        self._policy = PolicyModel(architecture, model, parallel, self.place)
        self._reference = PolicyModel(architecture, model, parallel, self.place) if with_reference else None
        for part in (self._policy, self._reference):
            if part is not None:
                part.load_hf(model.path)
                part.module.eval().requires_grad_(False)
        models = [self._policy, self._reference] if self._reference else [self._policy]
        self._memory = Offload(
            "The log-prob worker", lambda: chain.from_iterable(m.module.parameters() for m in models)
        )
        self._version: int | None = 0
        self._update: ShardLoader | None = None
        entries = [self._policy.weights.entry(name) for name in self._policy.parameters()]
        self._siblings = {name: entry.hf for entry in entries for name in entry.hf}
        self._checksums: dict[str, str] = {}

    @property
    def version(self) -> int | None:
        """Of the policy's weights; None while an update is on its way or after one failed."""
        return self._version

    def compute(self, micro_batches: Sequence[MicroBatch]) -> list[LogProbs] | None:
        """Log-probs of the trained tokens of each micro-batch; None on ranks that do not report.

        All ranks of a data-parallel rank call this together with the same micro-batches. Raises
        RuntimeError if there is no whole version of the policy.
        """
        self._memory.require("compute")
        if self._version is None:
            raise RuntimeError("The log-prob worker has no complete weights: an update did not finish.")
        policy = self._forward(self._policy, micro_batches)
        reference = None if self._reference is None else self._forward(self._reference, micro_batches)
        if not self.place.reports:
            return None
        return [
            LogProbs(values, None if reference is None else reference[index])
            for index, values in enumerate(policy)
        ]

    def begin_update(self) -> None:
        """Begin to take a new version; what an update that broke off has left is forgotten."""
        self._memory.require("begin an update")
        self._update, self._checksums = self._policy.loader(), {}
        self._version = None

    def load_bucket(self, bucket: Bucket) -> None:
        """Take some of the new version's tensors. Raises ChecksumError if one is not as it was sent."""
        self._memory.require("take weights")
        if self._update is None:
            raise RuntimeError("A bucket came outside of an update; call begin_update first.")
        here = {record.name for record in bucket.records}
        for record, tensor in unpack(bucket):
            # What waits for the rest of its parameter outlives the bucket's memory.
            waits = not here.issuperset(self._siblings.get(record.name, ()))
            self._update.feed(record.name, tensor.clone() if waits else tensor)
            self._checksums[record.name] = record.checksum

    def finish_update(self, version: int, expected: str) -> None:
        """End an update: from here on the weights are `version`, whose digest is `expected`.

        Raises ChecksumError, and stays without weights, if tensors are missing or differ.
        """
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("An update ends that did not begin; call begin_update first.")
        missing = update.missing()
        if missing:
            raise ChecksumError(f"Version {version} came without {len(missing)} tensors, first {missing[0]}.")
        received = digest(self._checksums)
        if received != expected:
            raise ChecksumError(f"Version {version} has digest {received}, but the actor sent {expected}.")
        self._version = version

    def offload(self, scratch: str | Path) -> Offloaded:
        """Release the memory of all weights until `restore`: to host memory, or on a CPU to the folder `scratch`.

        Raises RunError if they find no room.
        """
        return self._memory.offload(scratch)

    def restore(self) -> Offloaded:
        """Bring back what `offload` released, bit for bit. Raises RunError if the device has no room."""
        return self._memory.restore()

    def _forward(self, model: PolicyModel, batches: Sequence[MicroBatch]) -> list[NDArray[np.float32]]:
        def on_logits(logits: Tensor, batch: MicroBatch) -> NDArray[np.float32]:
            targets = to_tensor(batch.targets, logits)
            logprobs, _ = token_logprobs(logits, targets, model.vocab_shard, self._temperature)
            return lay_out(logprobs, to_tensor(batch.loss_mask, logits)).cpu().numpy()

        return forward(model, batches, on_logits)
