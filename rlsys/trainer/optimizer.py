"""Megatron's AdamW for one model, and its state in checkpoints.

What travels between data-parallel ranks may travel beside computation. With `overlap_grad_reduce` the sums of gradients
begin in the backward pass of an optimiser step's last micro-batch, bucket by bucket as these become complete; with
`overlap_param_gather` each rank has after a step the new weights of its own shard alone, and the others' come in the
next training pass, before the layer that needs them. Whoever reads weights otherwise calls `Learner._gather` first.
"""

from __future__ import annotations

from math import cos, pi
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlsys.config.schema import LrDecay, OptimizerConfig
from rlsys.errors import UserError
from rlsys.trainer.model.stage_model import CHECKPOINT_METADATA, StageModel


def wrap(model: StageModel, config: OptimizerConfig) -> DistributedDataParallel:
    """The model with gradients in contiguous float32 buffers; pass through it by `forward_backward`.

    Raises UserError for an overlap that needs another setting.
    """
    if config.overlap_param_gather and not (config.distributed and config.overlap_grad_reduce):
        raise UserError(
            "overlap_param_gather=true gathers the shards of a distributed optimiser bucket by bucket: set distributed and "
            "overlap_grad_reduce to true beside it, or it to false.",
            code="conflict",
            key="overlap_param_gather",
        )
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    return DistributedDataParallel(model.config, options, model.module)


def begin_sums(wrapped: DistributedDataParallel) -> None:
    """Begin to sum the gradients that no backward pass has begun to sum, where that is overlapped."""
    if not wrapped.ddp_config.overlap_grad_reduce:
        return
    for buckets in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if buckets.grad_reduce_handle is None:
            buckets.start_grad_sync()


def build(wrapped: DistributedDataParallel, model: StageModel, config: OptimizerConfig) -> Any:
    """AdamW with gradient clipping; norms and biases are not decayed."""
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=config.distributed,
        overlap_param_gather=config.overlap_param_gather,
    )
    return get_megatron_optimizer(
        options, [wrapped], config_overrides=get_standard_config_overrides(options), use_gloo_process_groups=False
    )


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of optimiser step `step`, counted from 0, of `total_steps`: pure, so that a resumed run cannot disagree.

    It rises linearly over the first W = round(warmup_fraction x total_steps) steps, of which the first already learns
    (lr / W), then decays towards `min_lr`, which it reaches after the last step.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.decay is LrDecay.constant:
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - progress if config.decay is LrDecay.linear else 0.5 * (1.0 + cos(pi * progress))
    return config.min_lr + share * (config.lr - config.min_lr)


def sharded_state(optimizer: Any, model_state: dict[str, Any], loading: bool) -> dict[str, Any]:
    """The optimiser's part of a checkpoint; `model_state` is the model's."""
    for member in optimizer.chained_optimizers:
        _allocate(member.optimizer)
    state: dict[str, Any] = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=CHECKPOINT_METADATA)
    return state


def load_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Take what was loaded into the result of `sharded_state(..., loading=True)`."""
    members = optimizer.chained_optimizers
    # Experts have an optimiser of their own; Megatron numbers the states where there are two.
    states = [state] if len(members) == 1 else [state[number] for number in range(len(members))]
    moments = [of_member.pop("param_state", None) for of_member in states]
    optimizer.load_state_dict(state)
    for member, of_member in zip(members, moments, strict=True):
        if of_member is not None:
            _load_moments(member, of_member)


def _load_moments(member: DistributedOptimizer, moments: dict[str, Any]) -> None:
    """Load Adam's moments and the float32 weights.

    torch's AdamW keeps its step count beside the moments, where Megatron looks for it in the checkpoint and does not
    find it (it was loaded with the parameter groups): hide it meanwhile. Megatron also hands one and the same count to
    all parameters, which would then each raise it at every step.
    """
    states = member.optimizer.state.values()
    steps = [state.pop("step", None) for state in states]
    member.load_parameter_state_from_fully_reshardable(moments)
    for state, step in zip(states, steps, strict=True):
        if step is not None:
            state["step"] = step.clone()


def _allocate(optimizer: Any) -> None:
    """Give torch's AdamW the state that it otherwise makes at its first step; Megatron expects it."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }
