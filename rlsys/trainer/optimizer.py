"""Builds Megatron's AdamW for one model, computes its learning rate, and saves and loads its state.

Communication between data-parallel ranks can overlap with computation:

    overlap_grad_reduce    Gradient buckets are reduced during the backward pass of a step's last micro-batch.
    overlap_param_gather   After a step, a rank has new values only for the weights that it updates itself. The next
                           training pass gathers all other weights, layer by layer. Call `Learner._gather` before any
                           other use of the weights.
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
    """Wrap the model with contiguous float32 gradient buffers, for `forward_backward`.

    Raises UserError if `overlap_param_gather` is set without the settings that it requires.
    """
    if config.overlap_param_gather and not (config.distributed and config.overlap_grad_reduce):
        raise UserError(
            "overlap_param_gather=true requires distributed=true and overlap_grad_reduce=true: set both, or set "
            "overlap_param_gather to false.",
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
    """Start the gradient reductions that no backward pass has started; no-op without `overlap_grad_reduce`."""
    if not wrapped.ddp_config.overlap_grad_reduce:
        return
    for buckets in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if buckets.grad_reduce_handle is None:
            buckets.start_grad_sync()


def build(wrapped: DistributedDataParallel, model: StageModel, config: OptimizerConfig) -> Any:
    """Build AdamW with gradient clipping, without weight decay for norms and biases."""
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
    """Return the learning rate of optimiser step `step`, counted from 0; a resumed run gets the same rates.

    The rate rises linearly over the first W = round(warmup_fraction x total_steps) steps, from lr / W to lr. It then
    stays at lr if `decay` is constant; otherwise it decays and would reach `min_lr` one step after the last.
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
    """Return the optimiser's part of a checkpoint; `model_state` is the model's part."""
    for member in optimizer.chained_optimizers:
        _allocate(member.optimizer)
    state: dict[str, Any] = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=CHECKPOINT_METADATA)
    return state


def load_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load `state`, the result of `sharded_state(..., loading=True)` filled from a checkpoint."""
    members = optimizer.chained_optimizers
    # Experts have a separate optimiser. With two optimisers, Megatron keys the states by number.
    states = [state] if len(members) == 1 else [state[number] for number in range(len(members))]
    moments = [of_member.pop("param_state", None) for of_member in states]
    optimizer.load_state_dict(state)
    for member, of_member in zip(members, moments, strict=True):
        if of_member is not None:
            _load_moments(member, of_member)


def _load_moments(member: DistributedOptimizer, moments: dict[str, Any]) -> None:
    """Load Adam's moments and the float32 weights.

    torch's AdamW keeps a step count next to the moments. Megatron would look for the count among the moments of the
    checkpoint, but the count was saved with the parameter groups and is loaded already: remove it during the load.
    Megatron also gives all parameters the same count tensor, which every parameter would increment at each step: clone
    the tensor.
    """
    states = member.optimizer.state.values()
    steps = [state.pop("step", None) for state in states]
    member.load_parameter_state_from_fully_reshardable(moments)
    for state, step in zip(states, steps, strict=True):
        if step is not None:
            state["step"] = step.clone()


def _allocate(optimizer: Any) -> None:
    """Allocate the state that torch's AdamW creates lazily at its first step; Megatron expects it earlier."""
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
