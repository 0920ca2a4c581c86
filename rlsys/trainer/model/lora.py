"""Adds adapters (LoRA) to the linear layers of a Megatron model; `rlsys.weights.lora` describes their tensors.

Let r be a TP rank, x its input and s = alpha / rank:

    column-parallel   y_r = W_r x + s B_r A x           A is the same on all ranks. The gradient of A x is a sum over ranks.
    row-parallel      y   = sum_r W_r x_r + s B sum_r A_r x_r                          B is the same on all ranks.

With sequence parallelism, each rank has its own tokens of x (column-parallel) or y (row-parallel). Then [tokens, rank]
values are gathered or scattered instead of summed, and the matrix that all ranks share sees a rank's own tokens only:
its gradient is summed over TP, like that of a norm.

Adapters change an output after the layer has computed it, so the layer's own kernels and collectives stay as they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import dropout, linear

from rlsys.config.schema import LoraConfig
from rlsys.weights.lora import merged
from rlsys.weights.weight_map import Cut, Entry, WeightMap


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Place of a process in the TP group."""

    rank: int
    size: int
    sequence_parallel: bool


class Adapter(Module):
    """The adapters of the Hugging Face linear layers in one Megatron linear layer."""

    _mask: Tensor

    def __init__(
        self, weights: WeightMap, a: Entry, b: Entry, lora: LoraConfig, like: Parameter, tp: TensorParallel
    ) -> None:
        """Make A and B, with undefined values, for the weight `like`; `a` and `b` are their entries in `weights`."""
        super().__init__()
        self._weights, self._entries, self._tp, self._dropout = weights, (a, b), tp, lora.dropout
        self.on = True
        """False while the layer computes without its adapter."""
        self.scale = lora.alpha / lora.rank
        self._row_parallel = a.rule.cut is Cut.COLUMNS
        targets = [hf.replace("lora_B", "lora_A") in a.hf for hf in b.hf]
        # Part of each row of B: [rows, targets], a row of zeros for a part without an adapter.
        parts = iter(torch.eye(sum(targets)).unbind())
        of_part = [next(parts) if held else torch.zeros(sum(targets)) for held in targets]
        columns = [row.expand(shape[0], -1) for row, shape in zip(of_part, b.rule.shapes, strict=True)]
        mask = weights.shard(b, columns, tp.rank, tp.size).to(like)
        self.register_buffer("_mask", mask.contiguous(), persistent=False)
        self.a = Parameter(like.new_empty(sum(targets) * lora.rank, like.shape[1]))
        self.b = Parameter(like.new_empty(like.shape[0], lora.rank))
        cut, shared = (self.a, self.b) if self._row_parallel else (self.b, self.a)
        # Megatron's marks: the norm of the gradient counts every shard of a cut matrix, and one copy of a shared one.
        cut.tensor_model_parallel = True  # type: ignore[attr-defined]
        shared.sequence_parallel = tp.sequence_parallel  # type: ignore[attr-defined]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of A and B."""
        return tuple(entry.name for entry in self._entries)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the adapter adds to the layer's output, given the layer's input."""
        seen = linear(self._dropped(inputs), self.a)
        parallel = self._tp.sequence_parallel
        if self._row_parallel:
            sum_up = (
                reduce_scatter_to_sequence_parallel_region if parallel else reduce_from_tensor_model_parallel_region
            )
            seen = sum_up(seen)
        else:
            seen = (gather_from_sequence_parallel_region if parallel else copy_to_tensor_model_parallel_region)(seen)
        return linear(seen * self.scale, self._blocks())

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this process's shard of W + s B A, given its shard of W."""
        return merged(weight, self.a, self._blocks(), self.scale)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Start as PEFT does: A uniform within 1 / sqrt(in), B zero; the values do not depend on the layout."""
        entry, _ = self._entries
        parts = []
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            # A seed of its own for each matrix, whichever process holds it.
            own = torch.Generator().manual_seed(
                int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=7).digest())
            )
            bound = 1 / sqrt(shape[1])
            parts.append(torch.empty(shape).uniform_(-bound, bound, generator=own))
        self.a.copy_(self._weights.shard(entry, parts, self._tp.rank, self._tp.size))
        self.b.zero_()

    def sharded_state(self) -> dict[str, Any]:
        """Return Megatron's description of A and B for a distributed checkpoint, by name."""
        (a, b), state = self._entries, {}
        for entry, tensor in ((a, self.a), (b, self.b)):
            if entry.rule.cut is Cut.WHOLE:
                state[entry.name] = make_sharded_tensor_for_checkpoint(tensor, entry.name)
                continue
            axis = 1 if entry.rule.cut is Cut.COLUMNS else 0
            state[entry.name] = cut = make_tp_sharded_tensor_for_checkpoint(tensor, entry.name, tp_axis=axis)
            if entry.rule.cut is Cut.GATE_UP:
                # Gate and up are cut one by one, so that another TP size finds its rows.
                state[entry.name] = apply_swiglu_sharded_factory(cut, ())
        return state

    def _blocks(self) -> Tensor:
        """Return B spread over the columns of its parts, [rows, targets x rank]."""
        return (self._mask[:, :, None] * self.b[:, None, :]).flatten(1)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not (self.training and self._dropout):
            return inputs
        # Ranks with different inputs draw from different generators, ranks with the same inputs from the same.
        split = self._row_parallel or self._tp.sequence_parallel
        generator: AbstractContextManager[None] = get_cuda_rng_tracker().fork() if split else nullcontext()
        with generator:
            return dropout(inputs, self._dropout)


def adapt(layer: Module, adapter: Adapter) -> None:
    """Add `adapter` to the outputs of a linear layer of Megatron's or Transformer Engine's."""

    def added(_: Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
        return (outputs[0] + adapter(inputs[0]), *outputs[1:]) if adapter.on else None

    layer.add_module("adapter", adapter)
    layer.register_forward_hook(added, prepend=True)  # Before a norm of the output.
