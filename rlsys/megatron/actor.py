"""The actor: accumulates gradients as micro-batches arrive and takes one step for all of them.

Contract: `accumulate` any number of times, then `apply` once. The gradient is the sum over all micro-batches
and data-parallel ranks of the loss's sum, divided once by the number of trained tokens of all of them; so
it does not depend on how they were split. Every method is called on all ranks of the group together, and
every data-parallel rank is handed equally many micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rlsys.algorithms.losses import LossInputs, PolicyLoss, Stats, join_stats
from rlsys.checkpoint import sharded
from rlsys.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import RunError
from rlsys.megatron import optimizer as adam
from rlsys.megatron import parallel as groups
from rlsys.megatron.export import Export
from rlsys.megatron.forward import forward_backward, to_tensor
from rlsys.megatron.learning_rate import learning_rate
from rlsys.megatron.logprobs import lay_out, token_logprobs
from rlsys.megatron.model import PolicyModel
from rlsys.megatron.offload import Offload, gradient_buffers, training_state
from rlsys.megatron.results import Accumulated, Applied, Offloaded
from rlsys.pipeline.micro_batch import MicroBatch
from rlsys.weights.families import read_architecture
from rlsys.weights.transport import Sender


class Actor:
    """One process of the group that trains."""

    def __init__(
        self,
        rendezvous: groups.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        loss: PolicyLoss,
        temperature: float,
        total_steps: int,
        seed: int,
    ) -> None:
        """Join the group and build the model, with undefined weights: `load_hf` or `load` follows.

        `temperature` is the one that samples were drawn at; `total_steps` counts optimiser steps.
        """
        self._optimizer_config, self._total_steps = optimizer, total_steps
        self._loss, self._temperature, self._dtype = loss, temperature, model.dtype
        architecture = read_architecture(model.path)
        self.place = groups.start(rendezvous, parallel, seed)
        self._model = PolicyModel(architecture, model, parallel, self.place)
        self._wrapped = adam.wrap(self._model, optimizer)
        self._optimizer = adam.build(self._wrapped, self._model, optimizer)
        self._wrapped.zero_grad_buffer()
        self._step = 0
        self._trained_tokens = 0
        self._pending = False
        self._memory = Offload(
            "The actor",
            lambda: training_state(self._model.module, self._optimizer),
            lambda: gradient_buffers(self._wrapped),
        )
        # Weights leave through host memory, whatever the group's own backend is.
        owners = [rank * parallel.tp * self.place.dp_size for rank in range(parallel.pp)]
        self._export_group = dist.new_group(owners, backend="gloo")

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self._step

    def load_hf(self, path: str | Path) -> None:
        """Start from the weights of a Hugging Face folder."""
        self._memory.require("load weights")
        self._model.load_hf(path)
        self._optimizer.reload_model_params()

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Accumulated:
        """Add the gradients of this data-parallel rank's micro-batches.

        Each needs `old_logprobs`, and `ref_logprobs` where the loss has a KL term. Raises ValueError
        otherwise.
        """
        self._memory.require("accumulate")
        for batch in micro_batches:
            _check(batch)
        self._pending = True
        parts: list[Stats] = forward_backward(self._model, self._wrapped, micro_batches, self._loss_of)
        self._trained_tokens += sum(batch.trained_tokens for batch in micro_batches)
        return Accumulated(
            stats=join_stats(parts) if self.place.reports else {},
            tokens=sum(int(batch.lengths.sum()) for batch in micro_batches),
            padded_tokens=sum(batch.tokens.size for batch in micro_batches),
        )

    def apply(self) -> Applied:
        """Divide what was accumulated by the token count, clip it, and take one optimiser step.

        Raises RunError if the gradient is not finite; the weights are not to be used after that.
        """
        self._memory.require("apply")
        config = self._optimizer_config
        tokens = torch.tensor(self._trained_tokens, device=self._device)
        # Reduces over data parallel, tied embeddings and norms; also sums and divides by `tokens`.
        finalize_model_grads([self._wrapped], tokens)
        rate = learning_rate(self._step, self._total_steps, config)
        adam.set_rate(self._optimizer, rate, config.weight_decay)
        _, grad_norm, _ = self._optimizer.step()
        self._step += 1
        if not isfinite(grad_norm):
            raise RunError(
                f"The gradient of optimiser step {self._step} is {grad_norm}; resume and look at it."
            )
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._trained_tokens, self._pending = 0, False
        return Applied(self._step, float(grad_norm), rate, int(tokens))

    def export(self, bucket_bytes: int, sender: Sender | None) -> Export:
        """Begin to hand the weights out; they must not change until the export has ended.

        All ranks call this together; `sender` is there on rank 0 alone.
        """
        require = functools.partial(self._memory.require, "export")
        return Export(self._model, require, self._export_group, bucket_bytes, sender)

    def save(self, folder: str | Path, extra: dict[str, Any]) -> None:
        """Write weights, optimiser state and step, and `extra` (plain JSON) to a new checkpoint."""
        self._memory.require("save")
        about = {"step": self._step, "optimizer": True, "dtype": self._dtype.value, "extra": extra}
        sharded.save(folder, self._sharded_state(loading=False), about)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, saved under any TP, PP and DP; returns its `extra`.

        A checkpoint of weights alone (a converted model) starts at step 0 with a new optimiser.
        """
        self._memory.require("load")
        about = sharded.read_about(folder)
        if about["optimizer"]:
            state = sharded.load(folder, self._sharded_state(loading=True))
            self._model.module.load_state_dict(state["model"])
            adam.load_state(self._optimizer, state["optimizer"])
        else:
            self._model.load_checkpoint(folder)
            self._optimizer.reload_model_params()
        self._step = about["step"]
        extra: dict[str, Any] = about["extra"]
        return extra

    def offload(self, scratch: str | Path) -> Offloaded:
        """Release the memory of weights, gradients and optimiser state until `restore`.

        It goes to host memory, or on a CPU to the folder `scratch`; gradients are zero and need no room.
        Raises RunError if there is no room, or if gradients wait for `apply`.
        """
        if self._pending:
            raise RunError("The actor has gradients that were not applied: call apply before offload.")
        return self._memory.offload(scratch)

    def restore(self) -> Offloaded:
        """Bring back what `offload` released, bit for bit. Raises RunError if the device has no room."""
        return self._memory.restore()

    @property
    def _device(self) -> torch.device:
        return next(self._model.module.parameters()).device

    def _loss_of(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Stats]:
        targets, mask = to_tensor(batch.targets, logits), to_tensor(batch.loss_mask, logits)
        logprobs, entropy = token_logprobs(
            logits, targets, self._model.vocab_shard, self._temperature, with_entropy=True
        )
        assert entropy is not None
        assert batch.old_logprobs is not None
        inputs = LossInputs(
            old_logprobs=to_tensor(batch.old_logprobs, logits),
            ref_logprobs=None if batch.ref_logprobs is None else to_tensor(batch.ref_logprobs, logits),
            advantages=to_tensor(batch.advantages, logits),
            mask=mask,
        )
        return self._loss(lay_out(logprobs, mask), lay_out(entropy, mask), inputs)

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        model = self._model.sharded_state()
        return {"model": model, "optimizer": adam.sharded_state(self._optimizer, model, loading)}


def _check(batch: MicroBatch) -> None:
    if batch.old_logprobs is None:
        raise ValueError("A micro-batch without old_logprobs cannot be trained; recompute them first.")
