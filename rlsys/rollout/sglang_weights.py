"""Predicts the hashes of an SGLang engine's tensors.

SGLang's weight checker reports one hash per engine tensor and tensor-parallel rank. The expected hashes are computed
from the Hugging Face tensors, which are fused, cut and padded as in SGLang:

    qkv_proj              q, k, v (rows are cut over ranks before they are fused);
    gate_up_proj          gate, up (cut likewise);
    w13_weight            gate, up of expert 0, then of expert 1, and so on;
    w2_weight             down of each expert;
    embed_tokens, lm_head padded with zero rows to a multiple of 64;
    MLP on a CPU          width padded to a multiple of 32 per rank.

If all hashes match, the engine holds the weights that were sent. Besides the buckets, only the parts of fused tensors
are kept that a bucket leaves incomplete; for experts, these are parts of one layer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsys.rollout.staging import WeightCheck
from rlsys.weights.transport import bytes_of

Hasher = Callable[[Sequence[Tensor]], str]
"""Parts of a tensor, concatenated along dimension 0 -> the hash that SGLang reports for it."""

VOCAB_PADDING = 64
"""SGLang pads the number of vocabulary rows to a multiple of this by default."""
CPU_WIDTH_PADDING = 32
"""SGLang pads the width of an MLP to a multiple of this on each tensor-parallel rank, if the engine is on a CPU."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")


def sha256_prefix(parts: Sequence[Tensor]) -> str:
    """Return SGLang's hash of a tensor in host memory: the first 8 bytes of SHA-256 over its bytes, in hex."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(bytes_of(part).data)
    return whole.digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage format of a model in SGLang, for the Llama, Qwen2, Qwen3 and Qwen3-MoE families."""

    tp: int
    kv_heads: int
    tied: bool
    """True if the output layer is the embedding; a separate `lm_head.weight` is then ignored."""
    dtype: torch.dtype
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    width_padding: int = 1
    """The width of an MLP is padded to a multiple of this on each rank."""


class SglangWeights(WeightCheck):
    """Check of an SGLang engine."""

    def __init__(self, layout: Layout, hasher: Hasher) -> None:
        super().__init__(layout.tp)
        self._layout = layout
        self._hasher = hasher
        self._parts: dict[str, dict[int, Tensor]] = {}

    def predict(self, name: str, tensor: Tensor) -> None:
        """Add a Hugging Face tensor. Hash an engine tensor once all of its parts have been added."""
        if self._layout.tied and name == "lm_head.weight":
            return
        tensor = tensor.to(self._layout.dtype)
        target, index, parts = _engine_tensor(name, self._layout.experts)
        known = self._parts.setdefault(target, {})
        known[index] = tensor
        if len(known) == parts:
            del self._parts[target]
            self._hash(target, [known[index] for index in range(parts)])

    def detach(self, flat: Tensor) -> None:
        """Copy the parts of incomplete tensors that share the memory of `flat`."""
        for parts in self._parts.values():
            parts |= {index: part.clone() for index, part in parts.items() if _shares(part, flat)}

    def incomplete(self) -> set[str]:
        """Return the names of the fused tensors that lack a part."""
        return {*self._parts}

    def _hash(self, target: str, parts: Sequence[Tensor]) -> None:
        for rank, hashes in enumerate(self.hashes):
            hashes[target] = self._hasher([self._piece(target, n, part, rank) for n, part in enumerate(parts)])

    def _piece(self, target: str, index: int, part: Tensor, rank: int) -> Tensor:
        """Return the shard that `rank` holds of one part of the engine tensor `target`."""
        tp = self._layout.tp
        *_, module, leaf = target.rsplit(".", 2)
        module = leaf if leaf in _OF_EXPERTS else module
        if module in ("embed_tokens", "lm_head"):
            return _padded(part, VOCAB_PADDING, dim=0).chunk(tp)[rank]
        if module == "qkv_proj" and index > 0 and self._layout.kv_heads < tp:
            return part.chunk(self._layout.kv_heads)[rank * self._layout.kv_heads // tp]
        multiple = tp * self._layout.width_padding if module in ("gate_up_proj", "down_proj", *_OF_EXPERTS) else 1
        if module in (*_FUSED, "w13_weight"):
            return _padded(part, multiple, dim=0).chunk(tp)[rank]
        if module in ("o_proj", "down_proj", "w2_weight") and part.dim() == 2:
            return _padded(part, multiple, dim=1).chunk(tp, dim=1)[rank]
        return part


def _shares(part: Tensor, flat: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _engine_tensor(name: str, experts: int) -> tuple[str, int, int]:
    """Return the name of the engine tensor that contains the Hugging Face tensor `name`.

    Also return the index of `name` among the parts of the engine tensor, and the number of parts.
    """
    if expert := _EXPERT.fullmatch(name):
        for fused, modules in _OF_EXPERTS.items():
            if expert["module"] in modules:
                index = int(expert["number"]) * len(modules) + modules.index(expert["module"])
                return (f"{expert['experts']}.{fused}", index, experts * len(modules))
    for fused, modules in _FUSED.items():
        for index, module in enumerate(modules):
            if f".{module}." in name:
                return (name.replace(f".{module}.", f".{fused}."), index, len(modules))
    return (name, 0, 1)


def _padded(matrix: Tensor, multiple: int, dim: int) -> Tensor:
    """Return `matrix` padded with zeros along `dim`, to the next multiple of `multiple`."""
    missing = -matrix.shape[dim] % multiple
    return matrix if not missing else pad(matrix, [0, 0] * (matrix.dim() - 1 - dim) + [0, missing])
