"""Trains the policy (`Actor`) and the value model (`Critic`).

Contract of a `Learner`, per optimiser step:

    accumulate(a)              adds gradients; any number of calls;
    accumulate(b, last=True)   the same, with an optional hint that `apply` follows;
    apply()                    divides, clips and steps once.

A step's loss is the sum of the losses of all micro-batches and data-parallel ranks, divided once by the sum of their
divisors; its gradient does not depend on how samples are split. All ranks of the group call every method together, and
every data-parallel rank gets the same number of micro-batches.

If the KL term sums over the whole vocabulary, the actor keeps its own reference, because full logits are too large to
transfer. The reference computes its logits for a run of micro-batches just before the actor trains on that run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms.losses import (
    DIVISOR,
    TOKEN_MEAN,
    LossFunction,
    LossInputs,
    Stats,
    ValueLoss,
    divisor,
    join_stats,
    policy_loss,
    token_weights,
)
from rlsys.config.algorithm import Aggregation, OldLogprobs
from rlsys.config.derived import has_critic, loss_length, sums_over_vocabulary
from rlsys.config.schema import Mode, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlsys.errors import RunError
from rlsys.trainer import mesh
from rlsys.trainer.batches import Accumulated, MicroBatch, OptimizerStep
from rlsys.trainer.export import Export, ExportedWeights, WeightSender, load_hf, owners_group
from rlsys.trainer.forward import (
    ContextShare,
    context_shares,
    forward,
    forward_backward,
    to_tensor,
    without_routes,
)
from rlsys.trainer.log_prob import BaseReference, MegatronWorker, ReferencePlan, ReferencePolicy
from rlsys.trainer.model.logprobs import Divergence, divergence_of, lay_out, token_logprobs
from rlsys.trainer.model.stage_model import PolicyModel, StageModel, ValueModel
from rlsys.trainer.offload import OffloadStats, gradient_buffers
from rlsys.trainer.optimizer import Optimizer, begin_sums, learning_rate, wrap
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.adapters import check_adapters, described
from rlsys.weights.checkpoint.sharded import CheckpointContent, restore_generators
from rlsys.weights.checkpoint.store import CheckpointInfo, read_checkpoint_info
from rlsys.weights.transport import Sender
from rlsys.weights.weight_map import read_architecture

Result = tuple[Stats, Tensor | None]
"""(scalar statistics of a micro-batch, log-probs [rows, width] to return or None)."""
LossOf = Callable[[Tensor, ContextShare], tuple[Tensor, Result]]
"""(output [own targets, ...], share of a micro-batch) -> (loss sum of the whole micro-batch, result)."""


class Learner(MegatronWorker, ABC):
    """One process of a training group; base of `Actor` and `Critic`."""

    def __init__(
        self, owner: str, model: StageModel, optimizer: OptimizerConfig, total_steps: int, scratch: str | Path
    ) -> None:
        """Wrap `model` for training; its weights are undefined until `load_hf` or `load`.

        `owner` is the name used in messages; `total_steps` counts optimiser steps.
        """
        super().__init__(owner, model.coords, scratch, self._kept, lambda: gradient_buffers(self._wrapped))
        self.step = 0
        """Optimiser steps taken."""
        self._model, self._optimizer_config, self._total_steps = model, optimizer, total_steps
        self._wrapped = wrap(model, optimizer)
        self._optimizer = Optimizer(self._wrapped, model, optimizer)
        self._wrapped.zero_grad_buffer()
        self._divisor = 0
        self._pending = False
        self._complete = False
        """True once the step's last micro-batch has passed; gradient reduction may have begun."""
        self._gathered = False
        """True if the whole model shard of this process is current, not only the weights that this process updates."""

    @abstractmethod
    def _check(self, batch: MicroBatch) -> None:
        """Raise ValueError if `batch` lacks an input of the loss."""

    @abstractmethod
    def _divisor_of(self, batch: MicroBatch) -> int:
        """Return the part of the step's divisor that `batch` adds."""

    @abstractmethod
    def _loss_for(self, shares: Sequence[ContextShare]) -> LossOf:
        """Return the loss function, which is called for each of `shares` in order, on the last stage only."""

    def _runs(self, shares: Sequence[ContextShare]) -> Iterable[Sequence[ContextShare]]:
        """Split `shares` into runs, each of which passes through the pipeline in one call."""
        return (shares,)

    def load_hf(self, path: str | Path) -> None:
        """Load the weights of the Hugging Face folder `path`."""
        self._require("load weights")
        load_hf(self._model, path)
        self._optimizer.reload_weights()

    def accumulate(self, micro_batches: Sequence[MicroBatch], last: bool = False) -> Accumulated | None:
        """Add the gradients of this data-parallel rank's micro-batches; with `last`, the next call must be `apply`.

        Returns None unless `MeshCoordinates.reports`. The only effect of `last` is that gradient reduction may overlap with the final backward pass. Raises ValueError if
        a micro-batch lacks an input of the loss or comes after the last micro-batch of the step.
        """
        self._require("accumulate")
        if self._complete:
            raise ValueError(f"{self._owner} already has the last micro-batches of this step: call apply before more.")
        for batch in micro_batches:
            self._check(batch)
        self._pending, self._complete = True, last
        results: list[Result] = []
        runs = list(self._runs(context_shares(self._model, micro_batches)))
        for number, run in enumerate(runs, 1):
            ends = last and number == len(runs)
            results += forward_backward(self._wrapped, run, self._loss_for(run), ends)
        # A training pass completes all pending parameter gathers.
        self._gathered = self._gathered or bool(micro_batches)
        if self.coords.cp == 0:  # Context-parallel ranks have the same micro-batches.
            self._divisor += sum(map(self._divisor_of, micro_batches))
        if not self.coords.reports:
            return None
        logprobs = [found.cpu().numpy() for _, found in results if found is not None]
        return Accumulated(join_stats(stats for stats, _ in results), logprobs or None)

    def apply(self) -> OptimizerStep:
        """Take one optimiser step. Raises RunError if the gradient is not finite; the weights are then invalid."""
        self._require("apply")
        divisor = torch.tensor(self._divisor, device=self._model.device)
        begin_sums(self._wrapped)
        # Reduces gradients over data parallelism, tied embeddings and norms; sums `divisor` over ranks and divides the
        # gradients by this sum.
        finalize_model_grads([self._wrapped], divisor)
        rate = learning_rate(self.step, self._total_steps, self._optimizer_config)
        grad_norm = self._optimizer.step(rate)
        self.step += 1
        if not isfinite(grad_norm):
            raise RunError(
                f"The gradient of optimiser step {self.step} of {self._owner.lower()} is {grad_norm}: "
                "lower its learning rate, and look at the last rows of metrics.jsonl."
            )
        self._wrapped.zero_grad_buffer()
        self._divisor, self._pending, self._complete, self._gathered = 0, False, False, False
        return OptimizerStep(self.step, grad_norm, rate, int(divisor))

    def begin_save(self, folder: str | Path) -> None:
        """Copy weights, optimiser state, step and random generators, and begin to write them to a new checkpoint.

        Training may continue while files are written. Finishes an earlier save first, and raises its errors. Raises
        RunError if gradients are pending, because a checkpoint does not contain them, and UserError if `folder` already
        holds a complete checkpoint.
        """
        self._require("save")
        if self._pending:
            raise RunError(f"{self._owner} has gradients that were not applied: call apply before saving.")
        self._gather()
        self._writer.begin(self._contents(Path(folder)))

    def load(self, folder: str | Path) -> bool:
        """Load a checkpoint saved under any TP, PP, EP and DP; return True if random generators were restored.

        Generators are restored only under the layout that saved them; see `restore_generators`. From a checkpoint with
        only weights (a converted model), training starts at step 0 with a new optimiser. Raises UserError if the
        checkpoint is incomplete, damaged or of another model.
        """
        self._require("load")
        info = read_checkpoint_info(folder)
        if info.optimizer:
            model = self._model.sharded_state()
            optimizer = self._optimizer.state_to_load(model, info.step)
            state = sharded.load(folder, {"model": model, "optimizer": optimizer})
            self._model.load_state(state["model"])
            self._optimizer.load_state(state["optimizer"])
        else:
            self._model.load_checkpoint(folder)
            self._optimizer.reload_weights()
        self.step = info.step
        return restore_generators(Path(folder), info.layout)

    def offload(self) -> OffloadStats:
        """Offload all memory until `restore`. Raises RunError if gradients are pending or space runs out."""
        if self._pending:
            raise RunError(f"{self._owner} has gradients that were not applied: call apply before offload.")
        return super().offload()

    def _gather(self) -> None:
        """Gather the weights that other ranks updated, for uses other than training; all ranks call this together."""
        if not self._gathered and self._wrapped.ddp_config.overlap_param_gather:
            self._wrapped.start_param_sync(force_sync=True)
        self._gathered = True

    def _kept(self) -> Iterable[Tensor]:
        """Return the tensors whose values must survive an offload."""
        return chain(self._model.module.parameters(), self._optimizer.tensors())

    def _contents(self, folder: Path) -> list[CheckpointContent]:
        """Return the parts of a checkpoint, each with its own folder."""
        model = self._model.sharded_state()
        state = {"model": model, "optimizer": self._optimizer.sharded_state(model)}
        info = CheckpointInfo(self.step, optimizer=True)
        return [CheckpointContent(folder, state, info, self._optimizer.fill_in)]


@dataclass(frozen=True, slots=True)
class Objective:
    """Settings of the actor's loss."""

    loss: LossFunction
    temperature: float
    """Sampling temperature of the rollouts."""
    aggregation: Aggregation = TOKEN_MEAN
    loss_length: int = 0
    """Tokens per sequence in the divisor of the aggregation `fixed-length`."""
    divergence: Divergence | None = None
    """KL term that compares distributions; None if the loss has no such term."""
    reference: ReferencePlan | None = None
    """Schedule of the actor's own reference, kept for a divergence over the whole vocabulary."""
    own_old: bool = False
    """True if the old log-probs are those of the training's own forward pass; `accumulate` then returns them."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Objective:
        """Read the objective from a run's config."""
        algorithm = config.algorithm
        return cls(
            policy_loss(algorithm),
            config.rollout.sampling.temperature,
            algorithm.aggregation,
            loss_length(config),
            divergence_of(algorithm),
            ReferencePlan.from_config(config) if sums_over_vocabulary(algorithm) else None,
            algorithm.old_logprobs is OldLogprobs.actor,
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
        keeps_pushed: bool = True,
    ) -> None:
        """Join the group and build the model; call `load_hf` or `load` next.

        The actor's own reference, if the objective has one, starts from the weights at `model.path`, or is a teacher. With
        `keeps_pushed`, host memory holds a copy of the weights of the last export, so that it can be repeated.
        """
        architecture = read_architecture(model.path, model.family)
        coords = mesh.start(rendezvous, parallel, seed)
        self._policy = PolicyModel(architecture, model, parallel, coords)
        super().__init__("The actor", self._policy, optimizer, total_steps, scratch)
        self._objective, self._seed = objective, seed
        self._reference: ReferencePolicy | BaseReference | None = None
        plan = objective.reference
        if plan is not None and self._policy.lora is not None and plan.teacher is None:
            self._reference = BaseReference(self._policy, plan)
        elif plan is not None:
            self._reference = ReferencePolicy.loaded(plan, model, parallel, coords)
        self._export_group = owners_group(coords)
        self._exported = ExportedWeights(self._policy) if keeps_pushed else None

    @classmethod
    def from_config(cls, config: RunConfig, rendezvous: mesh.Rendezvous) -> Actor:
        """Build the actor that a run's config describes and load its initial weights."""
        # The actor trains only after the critic's warm-up.
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
            keeps_pushed=config.cluster.mode is Mode.disaggregated,  # Else no process starts alone.
        )
        actor.load_hf(config.model.path)
        return actor

    def load_hf(self, path: str | Path) -> None:
        """See `Learner`. Adapters get their initial values, with which they change nothing."""
        if self._policy.lora is not None:
            self._policy.reset_adapters(self._seed)
        super().load_hf(path)

    def device_name(self) -> str:
        """Return the GPU's name as CUDA reports it, or "cpu"."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def export(self, bucket_bytes: int, sender: Sender | None, again: bool = False) -> Export:
        """Begin to export the policy, or `again` as it was at the last export; see `WeightSender`."""
        self._require("export")
        if again and self._exported is None:
            raise RuntimeError("The actor keeps no copy of its exports.")
        if not again:
            self._gather()
        require = partial(self._require, "export")
        return Export(self._policy, require, self._export_group, bucket_bytes, sender, self._exported, again)

    def end_step(self, version: int) -> None:
        """Let the actor's own reference follow the policy, which is now at `version`; no-op without a reference."""
        if isinstance(self._reference, ReferencePolicy):
            self._require("end a step")
            self._gather()
            self._reference.follow(self._policy, version)

    def load(self, folder: str | Path) -> bool:
        """See `Learner`. A checkpoint with only weights leaves the actor's own reference unchanged; none has a teacher.

        A checkpoint of adapters needs the base that they were trained beside, which `load_hf` has loaded. Raises UserError
        for one of another base, rank, alpha or targets, and for one of a whole model.
        """
        self._require("load")
        check_adapters(folder, read_checkpoint_info(folder), self._adapters())
        generators = super().load(folder)
        reference = self._saved_reference
        if reference is not None and read_checkpoint_info(folder).optimizer:
            reference.load(f"{Path(folder)}_reference")
        return generators

    def _kept(self) -> Iterable[Tensor]:
        own = self._reference.tensors() if isinstance(self._reference, ReferencePolicy) else ()
        return chain(super()._kept(), own)

    def _contents(self, folder: Path) -> list[CheckpointContent]:
        """See `Learner`. The actor's own reference goes to `{folder}_reference`, which is complete before `folder`."""
        (policy,), reference = super()._contents(folder), self._saved_reference
        policy = replace(policy, info=replace(policy.info, adapters=self._adapters()))
        return [policy] if reference is None else [reference.content(Path(f"{folder}_reference")), policy]

    @property
    def _saved_reference(self) -> ReferencePolicy | None:
        """The actor's own reference; None if it has none, or a teacher, which stays in its own folder."""
        plan, reference = self._objective.reference, self._reference
        taught = plan is not None and plan.teacher is not None
        return reference if isinstance(reference, ReferencePolicy) and not taught else None

    def _adapters(self) -> dict[str, Any] | None:
        """Return what a checkpoint says about its adapters; None if the whole model is trained."""
        lora = self._policy.lora
        if lora is None:
            return None
        if self._policy.base is None:
            raise RuntimeError("Adapters have no base: call load_hf first.")
        return described(lora, self._policy.architecture, self._policy.base)

    def _check(self, batch: MicroBatch) -> None:
        if batch.old_logprobs is None and not self._objective.own_old:
            raise ValueError("A micro-batch without old_logprobs cannot be trained: recompute them first.")
        if self._objective.divergence is not None and batch.ref_logprobs is None:
            raise ValueError("A micro-batch without ref_logprobs has no divergence: compute them first.")

    def _divisor_of(self, batch: MicroBatch) -> int:
        objective = self._objective
        return divisor(objective.aggregation, batch.counted_episodes, objective.loss_length)

    def _runs(self, shares: Sequence[ContextShare]) -> Iterable[Sequence[ContextShare]]:
        if self._reference is None:
            return super()._runs(shares)
        # Reference logits of a run are held until its losses are computed: limit a run to one micro-batch per stage.
        size = self.coords.pp_size
        return (shares[start : start + size] for start in range(0, len(shares), size))

    def _loss_for(self, shares: Sequence[ContextShare]) -> LossOf:
        ref_logits: Iterator[Tensor | None] = repeat(None)
        if self._reference is not None:
            with self._reference.scoring() as model:
                ref_logits = iter(forward(model, without_routes(shares), lambda logits, _: logits))
        return lambda logits, share: self._loss_of(logits, share, next(ref_logits))

    def _loss_of(self, logits: Tensor, share: ContextShare, ref_logits: Tensor | None) -> tuple[Tensor, Result]:
        objective, batch, mask = self._objective, share.batch, share.mask
        logprobs, entropy = token_logprobs(
            logits, share.targets, self._policy.vocab_shard, objective.temperature, with_entropy=True
        )
        assert entropy is not None
        of_targets, of_entropy = (lay_out(share.whole(values), mask) for values in (logprobs, entropy))
        old = of_targets.detach()
        if not objective.own_old:
            assert batch.old_logprobs is not None
            old = to_tensor(batch.old_logprobs, logits)
        divergence = self._divergence(logits, logprobs, old, share, ref_logits)
        weights = token_weights(objective.aggregation, batch.trained_by_episode)
        inputs = LossInputs(
            old_logprobs=old,
            ref_logprobs=None if batch.ref_logprobs is None else to_tensor(batch.ref_logprobs, logits),
            advantages=to_tensor(batch.advantages, logits),
            mask=mask,
            weights=to_tensor(batch.spread(weights).astype(np.float32), logits),
            sequences=to_tensor(batch.sequence_numbers, logits),
            divergence=None if divergence is None else lay_out(share.whole(divergence), mask),
            turns=to_tensor(batch.turn_numbers, logits),
        )
        loss, stats = objective.loss(of_targets, of_entropy, inputs)
        return loss, (
            {**stats, DIVISOR: torch.tensor(self._divisor_of(batch))},
            old if objective.own_old else None,
        )

    def _divergence(
        self, logits: Tensor, logprobs: Tensor, old: Tensor, share: ContextShare, ref_logits: Tensor | None
    ) -> Tensor | None:
        """Return the KL to the reference, [own targets]; None if the loss does not need it.

        `old` [rows, width] holds the old log-probs.
        """
        divergence, batch = self._objective.divergence, share.batch
        if divergence is None:
            return None
        if not batch.trained_tokens:  # An empty micro-batch of a rank with fewer samples; it has no picks.
            return torch.zeros_like(logprobs)
        assert batch.ref_logprobs is not None
        tokens, picked = batch.pick_tokens, batch.pick_logprobs
        return divergence(
            logits,
            self._policy.vocab_shard,
            self._objective.temperature,
            targets=share.targets,
            logprobs=logprobs,
            old_logprobs=share.own(old[share.mask]),
            ref_logprobs=to_tensor(share.own(batch.ref_logprobs[batch.loss_mask]), logits),
            pick_tokens=None if tokens is None else to_tensor(share.own(tokens), logits),
            pick_logprobs=None if picked is None else to_tensor(share.own(picked), logits),
            ref_logits=ref_logits,
        )


class Critic(Learner):
    """One process of the group that trains the value model; the loss is the mean over trained tokens."""

    def __init__(
        self,
        rendezvous: mesh.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        loss: ValueLoss,
        total_steps: int,
        seed: int,
        scratch: str | Path = ".",
    ) -> None:
        """Join the group and build the value model of `model.path`'s architecture; call `load_hf` or `load` next."""
        architecture = read_architecture(model.path, model.family)
        values = ValueModel(architecture, model, parallel, mesh.start(rendezvous, parallel, seed))
        super().__init__("The critic", values, optimizer, total_steps, scratch)
        self._loss = loss

    @classmethod
    def from_config(cls, config: RunConfig, rendezvous: mesh.Rendezvous) -> Critic:
        """Build the critic that a run's config describes and load its initial weights."""
        critic = cls(
            rendezvous,
            config.model,
            config.critic.parallel,
            config.critic.optimizer,
            ValueLoss(config.critic.value_clip),
            config.trainer.steps * config.trainer.mini_batches,
            config.trainer.seed,
            config.output_dir,
        )
        critic.load_hf(config.model.path)
        return critic

    def compute(self, micro_batches: Sequence[MicroBatch]) -> list[NDArray[np.float32]] | None:
        """Return the targets' values [rows, width] of each micro-batch, 0 elsewhere; None on ranks that do not report.

        All processes with the same data-parallel rank call this together, with the same micro-batches. Gradients stay
        unchanged.
        """
        self._require("compute")
        self._gather()

        def on_values(values: Tensor, share: ContextShare) -> NDArray[np.float32]:
            return lay_out(share.whole(values), share.mask).cpu().numpy()

        found = forward(self._model, context_shares(self._model, micro_batches), on_values)
        return found if self.coords.reports else None

    def _check(self, batch: MicroBatch) -> None:
        if batch.values is None or batch.returns is None:
            raise ValueError("A micro-batch without values and returns cannot be trained: compute them first.")

    def _divisor_of(self, batch: MicroBatch) -> int:
        return batch.trained_tokens

    def _loss_for(self, shares: Sequence[ContextShare]) -> LossOf:  # noqa: ARG002
        return self._loss_of

    def _loss_of(self, values: Tensor, share: ContextShare) -> tuple[Tensor, Result]:
        batch = share.batch
        assert batch.values is not None
        assert batch.returns is not None
        old, returns = to_tensor(batch.values, values), to_tensor(batch.returns, values)
        loss, stats = self._loss(lay_out(share.whole(values), share.mask), old, returns, share.mask)
        return loss, (stats, None)
