"""The actor: trains the policy, and hands its weights out.

Where the KL term sums over the whole vocabulary, the reference is kept here as well, and runs forward before
each call's micro-batches are trained: its logits are too many to come from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithms.aggregation import TOKEN_MEAN, divisor, token_weights
from rlsys.algorithms.losses import DIVISOR, LossInputs, PolicyLoss, Stats
from rlsys.config.algorithm import Aggregation
from rlsys.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.trainer import parallel as groups
from rlsys.trainer.anchor import Anchor, ReferencePlan
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.context import Share
from rlsys.trainer.divergence import Divergence
from rlsys.trainer.export import Export, owners_group
from rlsys.trainer.forward import forward, to_tensor
from rlsys.trainer.learner import Learner, LossOf
from rlsys.trainer.logprobs import lay_out, token_logprobs
from rlsys.trainer.model import PolicyModel
from rlsys.weights.checkpoint.sharded import Content
from rlsys.weights.checkpoint.store import read_about
from rlsys.weights.families import read_architecture
from rlsys.weights.transport import Sender


@dataclass(frozen=True, slots=True)
class Objective:
    """What the actor minimises: the losses of all trained tokens, as one number."""

    loss: PolicyLoss
    temperature: float
    """That samples were drawn at."""
    aggregation: Aggregation = TOKEN_MEAN
    loss_length: int = 0
    """Tokens that the aggregation `fixed-length` divides by."""
    divergence: Divergence | None = None
    """The KL term where it compares distributions."""
    reference: ReferencePlan | None = None
    """How the reference follows the policy that is kept here, for a divergence over the whole vocabulary."""


class Actor(Learner):
    """One process of the group that trains the policy."""

    def __init__(
        self,
        rendezvous: groups.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        objective: Objective,
        total_steps: int,
        seed: int,
    ) -> None:
        """Join the group and build the model, with undefined weights: `load_hf` or `load` follows.

        A reference that is kept here begins as the model at `model.path`. `total_steps` counts optimiser steps.
        """
        architecture = read_architecture(model.path)
        place = groups.start(rendezvous, parallel, seed)
        self._policy = PolicyModel(architecture, model, parallel, place)
        super().__init__("The actor", self._policy, optimizer, total_steps)
        self._objective = objective
        self._anchor: Anchor | None = None
        plan = objective.reference
        if plan is not None:
            copy = PolicyModel(architecture, model, parallel, place)
            copy.load_hf(model.path)
            self._anchor = Anchor(copy, plan)
        self._export_group = owners_group(place)

    def export(self, bucket_bytes: int, sender: Sender | None) -> Export:
        """Begin to hand the weights out; they must not change until the export has ended.

        All ranks call this together; `sender` is there on rank 0, with `ipc` on the first rank of every stage, and nowhere else.
        """
        require = functools.partial(self._memory.require, "export")
        require()
        self._gather()
        return Export(self._policy, require, self._export_group, bucket_bytes, sender)

    def end_step(self, version: int) -> None:
        """The weights are `version` now: a reference that is kept here does what is due then."""
        if self._anchor is not None:
            self._memory.require("end a step")
            self._gather()
            self._anchor.follow(self._policy, version)

    def load(self, folder: str | Path) -> bool:
        """See `Learner`. With weights alone, a reference that is kept here stays what it was."""
        generators = super().load(folder)
        if self._anchor is not None and read_about(folder).optimizer:
            self._anchor.load(_beside(Path(folder)))
        return generators

    def _kept(self) -> Iterable[Tensor]:
        anchor = () if self._anchor is None else self._anchor.tensors()
        return chain(super()._kept(), anchor)

    def _contents(self, folder: Path) -> list[Content]:
        """With a reference that is kept here, which lies beside `folder` and is complete before it."""
        own = super()._contents(folder)
        return own if self._anchor is None else [self._anchor.content(_beside(folder)), *own]

    def _check(self, batch: MicroBatch) -> None:
        if batch.old_logprobs is None:
            raise ValueError("A micro-batch without old_logprobs cannot be trained; recompute them first.")
        if self._objective.divergence is not None and batch.ref_logprobs is None:
            raise ValueError("A micro-batch without ref_logprobs has no divergence; compute them first.")

    def _divisor_of(self, batch: MicroBatch) -> int:
        objective = self._objective
        return divisor(objective.aggregation, batch.trained_lengths, objective.loss_length)

    def _runs(self, micro_batches: Sequence[MicroBatch]) -> Iterable[Sequence[MicroBatch]]:
        if self._anchor is None:
            return super()._runs(micro_batches)
        # The reference's logits of a run are held until its losses are taken: no more than fill the pipeline.
        size = self.place.pp_size
        return (micro_batches[start : start + size] for start in range(0, len(micro_batches), size))

    def _loss_for(self, micro_batches: Sequence[MicroBatch]) -> LossOf:
        ref_logits: Iterator[Tensor | None] = repeat(None)
        if self._anchor is not None:
            ref_logits = iter(forward(self._anchor.model, micro_batches, lambda logits, _: logits))
        return lambda logits, share: self._loss_of(logits, share, next(ref_logits))

    def _loss_of(self, logits: Tensor, share: Share, ref_logits: Tensor | None) -> tuple[Tensor, Stats]:
        objective, batch = self._objective, share.batch
        targets, mask = to_tensor(share.targets, logits), to_tensor(batch.loss_mask, logits)
        logprobs, entropy = token_logprobs(
            logits, targets, self._policy.vocab_shard, objective.temperature, with_entropy=True
        )
        assert entropy is not None
        assert batch.old_logprobs is not None
        divergence = self._divergence(logits, logprobs, share, ref_logits)
        weights = token_weights(objective.aggregation, batch.trained_lengths)
        inputs = LossInputs(
            old_logprobs=to_tensor(batch.old_logprobs, logits),
            ref_logprobs=None if batch.ref_logprobs is None else to_tensor(batch.ref_logprobs, logits),
            advantages=to_tensor(batch.advantages, logits),
            mask=mask,
            weights=to_tensor(batch.spread(weights).astype(np.float32), logits),
            sequences=to_tensor(batch.sequence_numbers, logits),
            divergence=None if divergence is None else lay_out(share.whole(divergence), mask),
        )
        of_targets, of_entropy = (lay_out(share.whole(values), mask) for values in (logprobs, entropy))
        loss, stats = objective.loss(of_targets, of_entropy, inputs)
        return loss, {**stats, DIVISOR: torch.tensor(self._divisor_of(batch))}

    def _divergence(self, logits: Tensor, logprobs: Tensor, share: Share, ref_logits: Tensor | None) -> Tensor | None:
        """[own targets]; None where the loss needs none."""
        divergence, batch = self._objective.divergence, share.batch
        if divergence is None:
            return None
        if not batch.trained_tokens:  # It fills up a rank, and nobody has picked tokens for it.
            return torch.zeros_like(logprobs)
        assert batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        tokens, picked = batch.pick_tokens, batch.pick_logprobs
        return divergence(
            logits,
            self._policy.vocab_shard,
            self._objective.temperature,
            targets=to_tensor(share.targets, logits),
            logprobs=logprobs,
            old_logprobs=to_tensor(share.own(batch.old_logprobs[batch.loss_mask]), logits),
            ref_logprobs=to_tensor(share.own(batch.ref_logprobs[batch.loss_mask]), logits),
            pick_tokens=None if tokens is None else to_tensor(share.own(tokens), logits),
            pick_logprobs=None if picked is None else to_tensor(share.own(picked), logits),
            ref_logits=ref_logits,
        )


def _beside(folder: Path) -> Path:
    """Where the reference of the checkpoint `folder` is."""
    return folder.with_name(f"{folder.name}_reference")
