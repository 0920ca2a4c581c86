"""The critic: learns the return to expect from every trained token on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms.losses import Stats, ValueLoss
from rlsys.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlsys.trainer import mesh
from rlsys.trainer.actor import Learner, LossOf
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.forward import Share, forward, to_tensor
from rlsys.trainer.model.logprobs import lay_out
from rlsys.trainer.model.stage_model import ValueModel
from rlsys.weights.weight_map import read_architecture


class Critic(Learner):
    """One process of the group that learns values; the mean of their loss is over trained tokens."""

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
        """Join the group and build the model, with undefined weights: `load_hf` or `load` follows.

        `model` is the policy's. See `Learner` for the rest.
        """
        architecture = read_architecture(model.path)
        values = ValueModel(architecture, model, parallel, mesh.start(rendezvous, parallel, seed))
        super().__init__("The critic", values, optimizer, total_steps, scratch)
        self._loss = loss

    @classmethod
    def from_config(cls, config: RunConfig, rendezvous: mesh.Rendezvous) -> Critic:
        """The critic that a run asks for, with the weights that it starts from."""
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
        """Values [rows, width] of the trained tokens of each micro-batch, 0 elsewhere.

        None on ranks that do not report. All ranks of a data-parallel rank call this together with the same
        micro-batches; gradients that were accumulated stay as they are.
        """
        self._require("compute")
        self._gather()

        def on_values(values: Tensor, share: Share) -> NDArray[np.float32]:
            mask = to_tensor(share.batch.loss_mask, values)
            return lay_out(share.whole(values), mask).cpu().numpy()

        found = forward(self._model, micro_batches, on_values)
        return found if self.place.reports else None

    def _check(self, batch: MicroBatch) -> None:
        if batch.values is None or batch.returns is None:
            raise ValueError("A micro-batch without values and returns cannot be trained; compute them first.")

    def _divisor_of(self, batch: MicroBatch) -> int:
        return batch.trained_tokens

    def _loss_for(self, micro_batches: Sequence[MicroBatch]) -> LossOf:  # noqa: ARG002
        return self._loss_of

    def _loss_of(self, values: Tensor, share: Share) -> tuple[Tensor, Stats]:
        batch = share.batch
        assert batch.values is not None
        assert batch.returns is not None
        mask = to_tensor(batch.loss_mask, values)
        old, returns = to_tensor(batch.values, values), to_tensor(batch.returns, values)
        return self._loss(lay_out(share.whole(values), mask), old, returns, mask)
