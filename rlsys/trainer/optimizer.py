"""Steps a model's trainable parameters through Megatron, computes the learning rate, and saves and loads the state.

Megatron reduces and clips the gradients, keeps float32 copies of bfloat16 weights, and has AdamW, whose state may be
sharded over data-parallel ranks. Any other optimiser (`rlsys.algorithms.optimizers`) takes the place of AdamW and gets
each parameter in float32 as this process holds it: whole, or as its tensor-parallel shard. Muon alone looks beyond a
shard: each rank gathers the matrices of its shards and orthogonalises them whole, so a step is that of one process.

Communication between data-parallel ranks can overlap with computation:

    overlap_grad_reduce    Gradient buckets are reduced during the backward pass of a step's last micro-batch.
    overlap_param_gather   After a step, a rank has new values only for the weights that it updates itself. The next
                           training pass gathers all other weights, layer by layer. Call `Learner._gather` before any
                           other use of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import cos, isfinite, pi
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from rlsys.algorithms.optimizers import Muon, OverMatrices, make_optimizer, problem
from rlsys.config.custom import Custom
from rlsys.config.schema import AdamwConfig, LrDecay, OptimizerConfig
from rlsys.trainer.model.stage_model import CHECKPOINT_METADATA, StageModel
from rlsys.weights.weight_map import Entry

_GATHERED_ELEMENTS = 2**26
"""Elements of all ranks that are gathered at a time for a checkpoint, in float32 on the device."""


def wrap(model: StageModel, config: OptimizerConfig) -> DistributedDataParallel:
    """Wrap the model with contiguous float32 gradient buffers, for `forward_backward`."""
    sharded: AdamwConfig = _sharding(config)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded.distributed,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=sharded.overlap_param_gather,
    )
    return DistributedDataParallel(model.config, options, model.module)


def begin_sums(wrapped: DistributedDataParallel) -> None:
    """Start the gradient reductions that no backward pass has started; no-op without `overlap_grad_reduce`."""
    if not wrapped.ddp_config.overlap_grad_reduce:
        return
    for buckets in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if buckets.grad_reduce_handle is None:
            buckets.start_grad_sync()


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


class Optimizer:
    """Optimiser of one model on one process."""

    def __init__(self, wrapped: DistributedDataParallel, model: StageModel, config: OptimizerConfig) -> None:
        """Build the optimiser; `wrapped` is the result of `wrap`. Raises UserError for one of the user's that fails."""
        self._model, self._config = model, config
        adamw: AdamwConfig = _sharding(config)
        options = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=adamw.weight_decay,
            adam_beta1=adamw.beta1,
            adam_beta2=adamw.beta2,
            adam_eps=adamw.eps,
            clip_grad=config.clip_grad,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=adamw.distributed,
            overlap_param_gather=adamw.overlap_param_gather,
        )
        self._megatron: Any = get_megatron_optimizer(
            options, [wrapped], config_overrides=get_standard_config_overrides(options), use_gloo_process_groups=False
        )
        # Experts have a member of their own.
        self._members: list[Any] = self._megatron.chained_optimizers
        for member in self._members:
            if isinstance(member, DistributedOptimizer):  # Megatron has no way to name another class.
                member.__class__ = ShardedAdamW
        if adamw is config:
            return
        kept = ("params", *param_group_identifier_keys)
        for member in self._members:
            groups = [{key: group[key] for key in kept} for group in member.optimizer.param_groups]
            member.optimizer, member.init_state_fn = make_optimizer(config, groups), _keep_state
            if isinstance(member.optimizer, Muon):
                member.optimizer.matrices = _matrices(model)

    def step(self, rate: float) -> float:
        """Clip, step and clear the gradients, and return their norm before clipping.

        Raises UserError if an optimiser from outside of the package fails or makes a weight that is not finite.
        """
        decay = getattr(self._config, "weight_decay", None)
        for group in self._megatron.param_groups:
            group["lr"] = rate
            if isinstance(decay, int | float):
                # `wd_mult` is 0 for norms and biases.
                group["weight_decay"] = decay * group["wd_mult"]
        _, grad_norm, _ = self._megatron.step()
        if isinstance(self._config, Custom) and isfinite(grad_norm):
            for name, parameter in self._model.trainable.items():
                if not parameter.isfinite().all():
                    raise problem(self._config, f"made {name} infinite or not a number")
        self._megatron.zero_grad()
        return float(grad_norm)

    def reload_weights(self) -> None:
        """Copy the model's weights, which have changed, to their float32 copies."""
        self._megatron.reload_model_params()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept between steps: float32 weights, some of them the model's own, and the state."""
        for member in self._members:
            for group in member.optimizer.param_groups:
                yield from group["params"]
            for state in member.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def sharded_state(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimiser's part of a checkpoint to save; `model_state` is the model's part.

        Tensors that ranks share have no values: `fill_in` gets those that this process writes.
        """
        return self._state(model_state, loading=False)

    def fill_in(self, wanted: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill the second of each two tensors with the values of the first, which is from the last `sharded_state`.

        All ranks call it together.
        """
        filled = sum(member.fill_in(wanted) for member in self._members if isinstance(member, ShardedAdamW))
        if filled < len(wanted) or not all(view.is_contiguous() for view, _ in wanted):
            raise RuntimeError("Megatron describes the optimiser's state by tensors that were not gathered.")

    @torch.no_grad()
    def state_to_load(self, model_state: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the part to fill from a checkpoint that was saved after `steps` steps. The weights may change."""
        if not isinstance(self._config, AdamwConfig):
            for member in self._members:
                member.optimizer.state.clear()
                if steps:
                    # Makes the state, whatever it is; its values, and the weights, are then loaded.
                    member.prepare_grads()
                    member.optimizer.step()
                    member.zero_grad()
        return self._state(model_state, loading=True)

    def load_state(self, state: dict[Any, Any]) -> None:
        """Load `state`, the result of `state_to_load` filled from a checkpoint."""
        # With two optimisers, Megatron keys the states by number.
        states = [state] if len(self._members) == 1 else [state[number] for number in range(len(self._members))]
        moments = [of_member.pop("param_state", None) for of_member in states]
        self._megatron.load_state_dict(state)
        for member, of_member in zip(self._members, moments, strict=True):
            if of_member is not None:
                _load_moments(member, of_member)

    def _state(self, model_state: dict[str, Any], loading: bool) -> dict[str, Any]:
        if isinstance(self._config, AdamwConfig):
            for member in self._members:
                _allocate(member.optimizer)
        state: dict[str, Any] = self._megatron.sharded_state_dict(
            model_state, is_loading=loading, metadata=CHECKPOINT_METADATA
        )
        return state


class ShardedAdamW(DistributedOptimizer):
    """Megatron's optimiser with sharded state, which gathers the state for a checkpoint in pieces.

    Megatron itself gathers whole buffers of float32 on every rank's device, at more than twice their size, and keeps
    three of them (weights and moments) in every rank's host memory. Its positions in them are those without the padding
    between buckets, but it reads parameters at their positions with it.

    Here a rank gets only what it writes, and reads only parameters of which it keeps a part. `sharded_state_dict` takes
    its tensors as views of flat tensors on the device "meta", which have no memory; `fill_in` copies their values.
    """

    _flat: Sequence[dict[str, Tensor]] = ()
    """Flat tensors of each buffer, of which the last `sharded_state_dict` took its tensors."""

    def get_parameter_state_dp_zero(self, *, empty_data: bool = False, **_: Any) -> dict[int, Any]:
        """Return the flat tensors of each buffer, padding included; with `empty_data`, to load into."""
        device = "cpu" if empty_data else "meta"
        flat = [
            {key: torch.empty(buffer.numel, device=device) for key in ("param", "exp_avg", "exp_avg_sq")}
            for buffer in self.buffers
        ]
        if not empty_data:
            self._flat = flat
        return {number: dict.fromkeys(ranges, flat[number]) for number, ranges in enumerate(self.gbuf_ranges)}

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[int, Any]:
        """Return Megatron's description by parameter; to load, of the parameters of which this rank keeps a part."""
        state: dict[int, Any] = super().sharded_param_state_fully_reshardable(
            model_sharded_state_dict, is_loading, metadata
        )
        if not is_loading:
            return state
        buckets = (bucket for by_dtype in self.gbuf_ranges for buckets in by_dtype.values() for bucket in buckets)
        kept = {parameter for bucket in buckets for parameter in bucket["param_map"]}
        every = (parameter for buffer in self.buffers for parameter in buffer.param_index_map)
        return {number: state[number] for number, parameter in enumerate(every) if parameter in kept}

    @torch.no_grad()
    def fill_in(self, wanted: Sequence[tuple[Tensor, Tensor]]) -> int:
        """See `Optimizer.fill_in`; return how many of `wanted` are from this optimiser."""
        filled = 0
        for buffer, by_dtype, flat in zip(self.buffers, self.gbuf_ranges, self._flat, strict=True):
            (ranges_of_buckets,) = by_dtype.values()
            for key, whole in flat.items():
                mine = [(int(view.storage_offset()), host.view(-1)) for view, host in wanted if view._base is whole]
                filled += len(mine)
                for bucket, ranges in zip(buffer.buckets, ranges_of_buckets, strict=True):
                    for run in self._gathered(bucket, ranges["param_map"], key):
                        for place in mine:
                            _copy_shared(place, run)
        self._flat = ()
        return filled

    def _gathered(self, bucket: Any, ranges: dict[Tensor, Any], key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the state `key` of a bucket as runs (position in the buffer, values); all ranks iterate together."""
        ranks, whole = self.data_parallel_group.size(), bucket.grad_data
        shard = whole.numel() // ranks
        size = min(shard, -(-_GATHERED_ELEMENTS // ranks))
        own, everyones = (whole.new_zeros(count, dtype=torch.float32) for count in (size, ranks * size))
        held = [
            (places["gbuf_local"].start, self._get_main_param_and_optimizer_states(parameter)[key].view(-1))
            for parameter, places in ranges.items()
        ]
        for start in range(0, shard, size):
            for run in held:
                _copy_shared((start, own), run)
            dist.all_gather_single(everyones, own, self.data_parallel_group)
            for rank, values in enumerate(everyones.split(size)):
                yield bucket.offset + rank * shard + start, values[: shard - start]


def _copy_shared(to: tuple[int, Tensor], source: tuple[int, Tensor]) -> None:
    """Copy the positions that two runs of a flat tensor share; a run is (first position, values)."""
    (at, into), (first, values) = to, source
    low, high = max(at, first), min(at + len(into), first + len(values))
    if low < high:
        into[low - at : high - at].copy_(values[low - first : high - first])


def _sharding(config: OptimizerConfig) -> AdamwConfig:
    """Return the settings of AdamW; those of a replicated one for any other optimiser, which is not sharded."""
    return config if isinstance(config, AdamwConfig) else AdamwConfig(distributed=False)


def _matrices(model: StageModel) -> dict[Tensor, OverMatrices]:
    """Return the parameters that Muon steps, or their float32 copies."""
    return {
        getattr(parameter, "main_param", parameter): partial(_over_matrices, model, model.entries[name])
        for name, parameter in model.trainable.items()
        if name in model.entries and model.entries[name].rule.of_matrices
    }


def _over_matrices(model: StageModel, entry: Entry, shard: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this process's shard of what `function` makes of each whole matrix of the parameter `entry`.

    All ranks of a TP group call this together. Query, key and value, and gate and up, are matrices of their own.
    """
    tp = (model.coords.tp, model.coords.tp_size) if entry.expert is None else (0, 1)
    parts = [part for _, part in model.weights.merge(entry, model.gathered(entry, shard))]
    matrices = model.weights.unfused(entry, parts)
    return model.weights.shard(entry, [function(matrix) for matrix in matrices], *tp)


def _keep_state(*_: Any) -> None:
    """Leave the state as it is; Megatron would add AdamW's."""


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
    """Allocate the state that AdamW creates lazily at its first step; Megatron expects it earlier.

    That of Transformer Engine and of apex counts its steps in the parameter groups.
    """
    counts = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    **({"step": torch.zeros(())} if counts else {}),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }
