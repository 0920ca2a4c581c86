"""The actor: accumulates gradients as micro-batches arrive and takes one step for all of them.

Contract: `accumulate` any number of times, then `apply` once. The gradient is the sum over all micro-batches
and data-parallel ranks of the loss's sum, divided once by the number of trained tokens of all of them; so
it does not depend on how they were split. Every method is called on all ranks of the group together, and
every data-parallel rank is handed equally many micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rlsys.algorithms.losses import LossInputs, PolicyLoss, Stats, join_stats
from rlsys.checkpoint import sharded
from rlsys.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import RunError
from rlsys.megatron import optimizer as adam
from rlsys.megatron import parallel as groups
from rlsys.megatron.forward import forward_backward, to_tensor
from rlsys.megatron.learning_rate import learning_rate
from rlsys.megatron.logprobs import token_logprobs
from rlsys.megatron.model import PolicyModel
from rlsys.megatron.results import Accumulated, Applied
from rlsys.pipeline.micro_batch import MicroBatch
from rlsys.weights.buckets import Bucket, digest, pack
from rlsys.weights.families import read_architecture


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
        self._exported_digest: str | None = None
        # Weights leave through host memory, whatever the group's own backend is.
        owners = [rank * parallel.tp * self.place.dp_size for rank in range(parallel.pp)]
        self._export_group = dist.new_group(owners, backend="gloo")

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self._step

    @property
    def exported_digest(self) -> str | None:
        """Digest of the version that `export_buckets` last finished; None on ranks but the first."""
        return self._exported_digest

    def load_hf(self, path: str | Path) -> None:
        """Start from the weights of a Hugging Face folder."""
        self._model.load_hf(path)
        self._optimizer.reload_model_params()

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> Accumulated:
        """Add the gradients of this data-parallel rank's micro-batches.

        Each needs `old_logprobs`, and `ref_logprobs` where the loss has a KL term; column 0 of the loss
        mask must be False, for nothing predicts it. Raises ValueError otherwise.
        """
        for batch in micro_batches:
            _check(batch)
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
        self._trained_tokens = 0
        return Applied(self._step, float(grad_norm), rate, int(tokens))

    def export_buckets(self, bucket_bytes: int) -> Iterator[Bucket | None]:
        """The weights as whole Hugging Face tensors, in buckets of at most `bucket_bytes`, on rank 0.

        All ranks iterate in step: the others yield None, until they are no longer needed. A fused
        parameter that is larger than `bucket_bytes` comes in one bucket.
        """
        self._exported_digest = None
        if self.place.dp:
            return
        plan = self._model.export_plan(bucket_bytes)
        checksums: dict[str, str] = {}
        for stage, runs in enumerate(self._runs_of_stages(len(plan))):
            for run in range(runs):
                bucket = self._pass_on(stage, plan[run] if stage == self.place.pp else [])
                if bucket is not None:
                    checksums |= {record.name: record.checksum for record in bucket.records}
                yield bucket
        if self.place.rank == 0:
            self._exported_digest = digest(checksums)

    def save(self, folder: str | Path, extra: dict[str, Any]) -> None:
        """Write weights, optimiser state and step, and `extra` (plain JSON) to a new checkpoint."""
        about = {"step": self._step, "optimizer": True, "dtype": self._dtype.value, "extra": extra}
        sharded.save(folder, self._sharded_state(loading=False), about)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, saved under any TP, PP and DP; returns its `extra`.

        A checkpoint of weights alone (a converted model) starts at step 0 with a new optimiser.
        """
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

    @property
    def _device(self) -> torch.device:
        return next(self._model.module.parameters()).device

    def _loss_of(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Stats]:
        tokens = to_tensor(batch.tokens, logits)
        logprobs, entropy = token_logprobs(logits, tokens, self._model.vocab_shard, self._temperature)
        assert batch.old_logprobs is not None
        inputs = LossInputs(
            old_logprobs=to_tensor(batch.old_logprobs, logits),
            ref_logprobs=None if batch.ref_logprobs is None else to_tensor(batch.ref_logprobs, logits),
            advantages=to_tensor(batch.advantages, logits),
            mask=to_tensor(batch.loss_mask, logits),
        )
        return self._loss(logprobs, entropy, inputs)

    def _runs_of_stages(self, own: int) -> list[int]:
        """How many buckets each pipeline stage has."""
        group = parallel_state.get_pipeline_model_parallel_group()
        runs = [0] * self.place.pp_size
        dist.all_gather_object(runs, own, group=group)
        return runs

    def _pass_on(self, stage: int, names: list[str]) -> Bucket | None:
        """Bring one bucket of `stage`, which holds the parameters `names`, to rank 0."""
        box: list[Bucket | None] = [None]
        if stage == self.place.pp:
            tensors = list(self._model.whole_tensors(names))
            if self.place.tp == 0:
                # The plan has cut them to size.
                (box[0],) = pack(tensors, bucket_bytes=sys.maxsize)
            if stage and self.place.tp == 0:
                dist.send_object_list(box, dst=0, group=self._export_group)
        elif self.place.rank == 0:
            owner = stage * self.place.tp_size * self.place.dp_size
            dist.recv_object_list(box, src=owner, group=self._export_group)
        return box[0] if self.place.rank == 0 else None

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        model = self._model.sharded_state()
        return {"model": model, "optimizer": adam.sharded_state(self._optimizer, model, loading)}


def _check(batch: MicroBatch) -> None:
    if batch.old_logprobs is None:
        raise ValueError("A micro-batch without old_logprobs cannot be trained; recompute them first.")
    if batch.loss_mask[:, 0].any():
        raise ValueError("The first token of a sequence is marked as trained, but nothing predicts it.")
