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
from rlsys.algorithms.losses import DIVISOR, LossInputs, PolicyLoss, Stats, policy_loss
from rlsys.config.algorithm import Aggregation
from rlsys.config.derived import has_critic, loss_length, sums_over_vocabulary
from rlsys.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlsys.trainer import mesh
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.export import Export, WeightSender, owners_group
from rlsys.trainer.forward import Share, forward, to_tensor
from rlsys.trainer.learner import Learner, LossOf
from rlsys.trainer.model.logprobs import Divergence, divergence_of, lay_out, token_logprobs
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.trainer.reference_policy import ReferencePlan, ReferencePolicy
from rlsys.weights.checkpoint.about import read_about
from rlsys.weights.checkpoint.writing import Content
from rlsys.weights.families import read_architecture
from rlsys.weights.transport import Sender


@dataclass(frozen=True, slots=True)
class Objective:
    """The number that the actor minimises, made of the losses of all trained tokens."""

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

    @classmethod
    def from_config(cls, config: RunConfig) -> Objective:
        """What a run's algorithm asks for."""
        algorithm = config.algorithm
        whole_vocabulary = sums_over_vocabulary(algorithm) and algorithm.kl_topk_tokens is None
        return cls(
            policy_loss(algorithm),
            config.rollout.sampling.temperature,
            algorithm.aggregation,
            loss_length(config),
            divergence_of(algorithm),
            ReferencePlan.from_config(algorithm) if whole_vocabulary else None,
        )


class Actor(Learner, WeightSender):
    """One process of the group that trains the policy."""

    def __init__(
        self,
        rendezvous: mesh.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        objective: Objective,
        total_steps: int,
        seed: int,
        scratch: str | Path = ".",
    ) -> None:
        """Join the group and build the model, with undefined weights: `load_hf` or `load` follows.

        A reference that is kept here begins as the model at `model.path`. See `Learner` for the rest.
        """
        architecture = read_architecture(model.path)
        place = mesh.start(rendezvous, parallel, seed)
        self._policy = PolicyModel(architecture, model, parallel, place)
        super().__init__("The actor", self._policy, optimizer, total_steps, scratch)
        self._objective = objective
        self._reference: ReferencePolicy | None = None
        if objective.reference is not None:
            copy = PolicyModel(architecture, model, parallel, place)
            copy.load_hf(model.path)
            self._reference = ReferencePolicy(copy, objective.reference)
        self._export_group = owners_group(place)

    @classmethod
    def from_config(cls, config: RunConfig, rendezvous: mesh.Rendezvous) -> Actor:
        """The actor that a run asks for, with the weights that it starts from."""
        # It begins when the critic's warm-up has ended.
        warmup = config.critic.warmup_steps if has_critic(config.algorithm) else 0
        actor = cls(
            rendezvous,
            config.model,
            config.actor.parallel,
            config.actor.optimizer,
            Objective.from_config(config),
            max(0, config.trainer.steps - warmup) * config.trainer.mini_batches,
            config.trainer.seed,
            config.output_dir,
        )
        actor.load_hf(config.model.path)
        return actor

    def device_name(self) -> str:
        """Name of the device, as its driver gives it."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def export(self, bucket_bytes: int, sender: Sender | None) -> Export:
        """Of the policy; see `WeightSender`."""
        require = functools.partial(self._memory.require, "export")
        require()
        self._gather()
        return Export(self._policy, require, self._export_group, bucket_bytes, sender)

    def end_step(self, version: int) -> None:
        """The weights are `version` now: a reference that is kept here does what is due then."""
        if self._reference is not None:
            self._memory.require("end a step")
            self._gather()
            self._reference.follow(self._policy, version)

    def load(self, folder: str | Path) -> bool:
        """See `Learner`. With weights alone, a reference that is kept here stays what it was."""
        generators = super().load(folder)
        if self._reference is not None and read_about(folder).optimizer:
            self._reference.load(_beside(Path(folder)))
        return generators

    def _kept(self) -> Iterable[Tensor]:
        return chain(super()._kept(), () if self._reference is None else self._reference.tensors())

    def _contents(self, folder: Path) -> list[Content]:
        """With a reference that is kept here, which lies beside `folder` and is complete before it."""
        policy = super()._contents(folder)
        return policy if self._reference is None else [self._reference.content(_beside(folder)), *policy]

    def _check(self, batch: MicroBatch) -> None:
        if batch.old_logprobs is None:
            raise ValueError("A micro-batch without old_logprobs cannot be trained; recompute them first.")
        if self._objective.divergence is not None and batch.ref_logprobs is None:
            raise ValueError("A micro-batch without ref_logprobs has no divergence; compute them first.")

    def _divisor_of(self, batch: MicroBatch) -> int:
        objective = self._objective
        return divisor(objective.aggregation, batch.trained_lengths, objective.loss_length)

    def _runs(self, micro_batches: Sequence[MicroBatch]) -> Iterable[Sequence[MicroBatch]]:
        if self._reference is None:
            return super()._runs(micro_batches)
        # The reference's logits of a run are held until its losses are taken: no more than fill the pipeline.
        size = self.place.pp_size
        return (micro_batches[start : start + size] for start in range(0, len(micro_batches), size))

    def _loss_for(self, micro_batches: Sequence[MicroBatch]) -> LossOf:
        ref_logits: Iterator[Tensor | None] = repeat(None)
        if self._reference is not None:
            ref_logits = iter(forward(self._reference.model, micro_batches, lambda logits, _: logits))
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
    """The folder of the reference that belongs to the checkpoint `folder`."""
    return folder.with_name(f"{folder.name}_reference")
