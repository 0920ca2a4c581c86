"""Predicts the hashes of an SGLang engine's tensors.

SGLang's weight checker reports one hash per engine tensor and tensor-parallel rank. The expected hashes are computed
from the Hugging Face tensors, which are fused, cut and padded as in SGLang. The model's family names the fused tensors
(`engine` in rlsys/weights/family_file.py), and the weight map tells how they are cut:

    qkv                   q, k, v (rows are cut over ranks before they are fused);
    gate_up               gate, up (cut likewise);
    columns               columns are cut;
    vocab                 rows are padded with zeros to a multiple of 64, and cut;
    whole, latents        down-projections of queries, and of keys and values, if both have one;
    several experts       the parts of expert 0, then of expert 1, and so on;
    MLP on a CPU          width padded to a multiple of 32 per rank.

If all hashes match, the engine holds the weights that were sent. Besides the buckets, only the parts of fused tensors
are kept that a bucket leaves incomplete; for experts, these are parts of one layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsys.rollout.staging import WeightCheck
from rlsys.weights.bucket import bytes_of
from rlsys.weights.weight_map import Cut, Entry, WeightMap, rules_of

Hasher = Callable[[Sequence[Tensor]], str]
"""Parts of a tensor, concatenated along dimension 0 -> the hash that SGLang reports for it."""

VOCAB_PADDING = 64
"""SGLang pads the number of vocabulary rows to a multiple of this by default."""
CPU_WIDTH_PADDING = 32
"""SGLang pads the width of an MLP to a multiple of this on each tensor-parallel rank, if the engine is on a CPU."""


def sha256_prefix(parts: Sequence[Tensor]) -> str:
    """Return SGLang's hash of a tensor in host memory: the first 8 bytes of SHA-256 over its bytes, in hex."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(bytes_of(part).data)
    return whole.digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage format of a model in SGLang."""

    tp: int
    dtype: torch.dtype
    width_padding: int = 1
    """The width of an MLP is padded to a multiple of this on each rank."""


class SglangWeights(WeightCheck):
    """Check of an SGLang engine."""

    def __init__(self, weights: WeightMap, layout: Layout, hasher: Hasher) -> None:
        super().__init__(layout.tp)
        self._weights, self._layout, self._hasher = weights, layout, hasher
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._fused: dict[str | None, list[str]] = {}
        """Engine tensor -> the Hugging Face tensors that it holds, of one expert, in order; with placeholders."""
        for rule in rules_of(weights.architecture):
            self._fused.setdefault(rule.engine, []).extend(rule.hf)

    def predict(self, name: str, tensor: Tensor) -> None:
        """Add a Hugging Face tensor. Hash an engine tensor once all of its parts have been added."""
        if name in self._weights.repeated:
            return
        entry = self._weights.entry_of_hf(name)
        target, index, count = self._place(entry, name)
        known = self._parts.setdefault(target, {})
        known[index] = tensor.to(self._layout.dtype)
        if len(known) == count:
            del self._parts[target]
            self._hash(target, entry, [known[number] for number in range(count)])

    def _place(self, entry: Entry, name: str) -> tuple[str, int, int]:
        """Return the engine tensor that holds the tensor `name`, its index there, and the number of parts."""
        fused = self._fused[entry.rule.engine]
        # A tensor keeps its name if the model lacks those with which it would be fused.
        if entry.rule.engine is None or (len(fused) == 1 and entry.expert is None):
            return name, 0, 1
        target, parts = entry.rule.engine.format(layer=entry.layer, expert=entry.expert), len(fused)
        index = fused.index(entry.rule.hf[entry.hf.index(name)])
        if entry.expert is None or "{expert}" in entry.rule.engine:
            return target, index, parts
        return target, entry.expert * parts + index, self._weights.architecture.experts * parts

    def detach(self, flat: Tensor) -> None:
        """Copy the parts of incomplete tensors that share the memory of `flat`."""
        for parts in self._parts.values():
            parts |= {index: part.clone() for index, part in parts.items() if _shares(part, flat)}

    def incomplete(self) -> set[str]:
        """Return the names of the fused tensors that lack a part."""
        return {*self._parts}

    def _hash(self, target: str, entry: Entry, parts: Sequence[Tensor]) -> None:
        parts = self._weights.unfused(entry, parts)
        for rank, hashes in enumerate(self.hashes):
            hashes[target] = self._hasher([self._piece(entry, n, part, rank) for n, part in enumerate(parts)])

    def _piece(self, entry: Entry, index: int, part: Tensor, rank: int) -> Tensor:
        """Return the shard that `rank` holds of one part of an engine tensor."""
        tp, kv_heads = self._layout.tp, self._weights.architecture.kv_heads
        cut = entry.rule.engine_cut or entry.rule.cut
        if cut is Cut.WHOLE:
            return part
        if cut is Cut.QKV and index > 0 and kv_heads < tp:
            return part.chunk(kv_heads)[rank * kv_heads // tp]
        padding = tp * self._layout.width_padding if ".mlp." in entry.name else 1
        dimension = 1 if cut is Cut.COLUMNS else 0
        whole = _padded(part, VOCAB_PADDING if cut is Cut.VOCAB else padding, dimension)
        return whole.chunk(tp, dim=dimension)[rank]


def _shares(part: Tensor, flat: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _padded(matrix: Tensor, multiple: int, dim: int) -> Tensor:
    """Return `matrix` padded with zeros along `dim`, to the next multiple of `multiple`."""
    missing = -matrix.shape[dim] % multiple
    return matrix if not missing else pad(matrix, [0, 0] * (matrix.dim() - 1 - dim) + [0, missing])
