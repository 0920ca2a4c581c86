"""The log-prob worker: forward only, with the policy's newest weights and the reference.

Invariants: log-probs come from one whole version whose digest is the actor's, or not at all: between the
first bucket of an update and its end, after an update that failed and while the memory is offloaded,
`compute` refuses. The reference follows the policy at the end of an update, from the weights that came with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config.schema import ModelConfig, ParallelConfig
from rlsys.trainer import parallel as groups
from rlsys.trainer.anchor import Anchor, ReferencePlan
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.context import Share
from rlsys.trainer.divergence import top_tokens
from rlsys.trainer.export import Export, owners_group
from rlsys.trainer.forward import forward, to_tensor
from rlsys.trainer.logprobs import lay_out, logprobs_at, token_logprobs
from rlsys.trainer.model import PolicyModel
from rlsys.trainer.offload import Offload
from rlsys.trainer.results import LogProbs, Offloaded
from rlsys.weights.bijection import ShardLoader
from rlsys.weights.buckets import Bucket, ChecksumError, digest, unpack
from rlsys.weights.checkpoint.sharded import CheckpointWriter, Written, restore_generators
from rlsys.weights.families import read_architecture
from rlsys.weights.transport import Sender

DevicePicks = tuple[Tensor, Tensor]
"""Tokens [trained tokens, k] and log-probs of them."""


@dataclass(frozen=True, slots=True)
class PickPlan:
    """The most likely tokens that a KL term sums over."""

    k: int
    forward: bool
    """Take the reference's most likely tokens (KL(reference || policy)), not the policy's."""


class LogProbWorker:
    """One process of the group that recomputes log-probs."""

    def __init__(
        self,
        rendezvous: groups.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        temperature: float,
        seed: int,
        reference: ReferencePlan | None = None,
        picks: PickPlan | None = None,
    ) -> None:
        """Join the group and load the model at `model.path`, as version 0 of the policy and as reference.

        `temperature` is the one that samples are drawn at. Without `reference` there is none; `picks` need one.
        """
        if picks is not None and reference is None:
            raise ValueError("DevicePicks are the tokens to ask a reference about, and there is none.")
        self._temperature, self._picks = temperature, picks
        architecture = read_architecture(model.path)
        self.place = groups.start(rendezvous, parallel, seed)
        self._policy = PolicyModel(architecture, model, parallel, self.place)
        self._policy.load_hf(model.path)
        self._policy.module.eval().requires_grad_(False)
        self._anchor: Anchor | None = None
        if reference is not None:
            copy = PolicyModel(architecture, model, parallel, self.place)
            copy.load_hf(model.path)
            self._anchor = Anchor(copy, reference)
            self._export_group = owners_group(self.place)
        self._memory = Offload("The log-prob worker", self._tensors)
        self._writer = CheckpointWriter()
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
        """Log-probs of the trained tokens of each micro-batch, and picks; None on ranks that do not report.

        All ranks of a data-parallel rank call this together with the same micro-batches. Raises
        RuntimeError if there is no whole version of the policy.
        """
        self._memory.require("compute")
        if self._version is None:
            raise RuntimeError("The log-prob worker has no complete weights: an update did not finish.")
        scores = self._scores(micro_batches)
        return [score.as_result() for score in scores] if self.place.reports else None

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

        The reference does what is due then. Raises ChecksumError, and stays without weights, if tensors are
        missing or differ.
        """
        self._memory.require("end an update")
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
        if self._anchor is not None:
            self._anchor.follow(self._policy, version)

    def begin_save_reference(self, folder: str | Path) -> None:
        """Copy the reference, and begin to write it to a new checkpoint; as `Learner.begin_save`."""
        self._writer.begin([self._reference("save the reference").content(Path(folder))])

    def saving(self) -> bool:
        """Whether files of this process are still being written."""
        return self._writer.writing

    def finish_save(self) -> Written:
        """Wait until the checkpoint that was begun is complete. Raises RunError, on all ranks, if one could not write."""
        return self._writer.finish()

    def load_reference(self, folder: str | Path) -> bool:
        """Continue with the reference of a checkpoint, in place of `model.path`'s; as `Learner.load`."""
        about = self._reference("load the reference").load(folder)
        return restore_generators(Path(folder), about.layout)

    def export_reference(self, bucket_bytes: int, sender: Sender | None) -> Export:
        """Begin to hand the reference out; it must not follow the policy until the export has ended.

        All ranks call this together; `sender` is there on rank 0, with `ipc` on the first rank of every stage, and nowhere else.
        """
        model = self._reference("export the reference").model
        require = functools.partial(self._memory.require, "export the reference")
        return Export(model, require, self._export_group, bucket_bytes, sender)

    def offload(self, scratch: str | Path) -> Offloaded:
        """Release the memory of all weights until `restore`: to host memory, or on a CPU to the folder `scratch`.

        Raises RunError if they find no room.
        """
        return self._memory.offload(scratch)

    def restore(self) -> Offloaded:
        """Bring back what `offload` released, bit for bit. Raises RunError if the device has no room."""
        return self._memory.restore()

    def _tensors(self) -> Iterable[Tensor]:
        policy = self._policy.module.parameters()
        return policy if self._anchor is None else chain(policy, self._anchor.tensors())

    def _reference(self, purpose: str) -> Anchor:
        self._memory.require(purpose)
        if self._anchor is None:
            raise RuntimeError(f"The log-prob worker has no reference and cannot {purpose}.")
        return self._anchor

    def _scores(self, batches: Sequence[MicroBatch]) -> list[_Scores]:
        """Of each micro-batch on the last stage, else an empty list."""
        plan = self._picks
        k, reverse = (None, False) if plan is None else (plan.k, not plan.forward)
        policy = self._forward(self._policy, batches, k if reverse else None)
        if self._anchor is None:
            return [_Scores(logprobs, None, None) for logprobs, _ in policy]
        chosen = [picks[0] for _, picks in policy if picks is not None]
        reference = self._forward(self._anchor.model, batches, k, chosen if reverse else None)
        return [
            _Scores(of_policy, of_reference, picks)
            for (of_policy, _), (of_reference, picks) in zip(policy, reference, strict=True)
        ]

    def _forward(
        self,
        model: PolicyModel,
        batches: Sequence[MicroBatch],
        k: int | None,
        chosen: Sequence[Tensor] | None = None,
    ) -> list[tuple[Tensor, DevicePicks | None]]:
        """Log-probs [rows, width] of each micro-batch, and picks: its own top k, or what it makes of `chosen`.

        Neither without `k`. `chosen` [trained tokens, k] is one for each micro-batch.
        """
        # The last stage sees the micro-batches in their order.
        waiting = None if chosen is None else iter(chosen)

        def on_logits(logits: Tensor, share: Share) -> tuple[Tensor, DevicePicks | None]:
            shard, temperature = model.vocab_shard, self._temperature
            logprobs, _ = token_logprobs(logits, to_tensor(share.targets, logits), shard, temperature)
            picks = None
            if waiting is not None:
                tokens = next(waiting)
                picks = tokens, share.whole(logprobs_at(logits, share.own(tokens), shard, temperature))
            elif k is not None:
                tokens, of_tokens = top_tokens(logits, shard, temperature, k)
                picks = share.whole(tokens), share.whole(of_tokens)
            mask = to_tensor(share.batch.loss_mask, logits)
            return lay_out(share.whole(logprobs), mask), picks

        found: list[tuple[Tensor, DevicePicks | None]] = forward(model, batches, on_logits)
        return found


@dataclass(frozen=True, slots=True)
class _Scores:
    """`LogProbs` on the device."""

    policy: Tensor
    reference: Tensor | None
    picks: DevicePicks | None

    def as_result(self) -> LogProbs:
        return LogProbs(
            self.policy.cpu().numpy(),
            None if self.reference is None else self.reference.cpu().numpy(),
            None if self.picks is None else _on_host(*self.picks),
        )


def _on_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy()
