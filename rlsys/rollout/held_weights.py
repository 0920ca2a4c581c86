"""What an engine must hold after an update, computed from the tensors that were received.

SGLang's weight checker reports one hash for each of the engine's own tensors on each tensor-parallel
rank. This module predicts them: it fuses and cuts the received Hugging Face tensors as SGLang does
(`qkv_proj` is q, k, v; `gate_up_proj` is gate, up; rows are cut over ranks before they are fused; the
vocabulary is padded with zeros to a multiple of 64) and hashes the result. A prediction that comes true for every tensor means that the engine holds what was sent.

Tensors of the Llama, Qwen2 and Qwen3 families. A fused tensor is kept until its parts are in; nothing
else is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB_PADDING = 64
"""Rows; SGLang's default."""

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_CUT_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")

Hasher = Callable[[Tensor], str]


def sha256_prefix(tensor: Tensor) -> str:
    """SGLang's hash of a tensor in host memory: 8 bytes of SHA-256 over its bytes, in hex."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine holds a model."""

    tp: int
    kv_heads: int
    tied: bool
    """The output layer is the embedding; a separate `lm_head.weight` is ignored."""
    dtype: torch.dtype


class HeldWeights:
    """Collects received tensors and predicts the hashes that the engine must report."""

    def __init__(self, layout: Layout, hasher: Hasher) -> None:
        self._layout = layout
        self._hasher = hasher
        self._parts: dict[str, dict[str, Tensor]] = {}
        self.hashes: list[dict[str, str]] = [{} for _ in range(layout.tp)]
        """By tensor-parallel rank: the engine's tensor name to its hash."""

    def feed(self, name: str, tensor: Tensor) -> None:
        """Take one whole Hugging Face tensor."""
        if self._layout.tied and name == "lm_head.weight":
            return
        tensor = tensor.to(self._layout.dtype)
        target, order = _fused_name(name)
        if not order:
            self._store(name, [tensor])
            return
        parts = self._parts.setdefault(target, {})
        parts[name] = tensor.clone()
        if len(parts) == len(order):
            del self._parts[target]
            self._store(target, [parts[part] for part in order])

    def missing(self) -> list[str]:
        """Engine tensors of which only some parts have come."""
        return sorted(self._parts)

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """Names of tensors that were not sent, are not held, or differ, on any rank.

        `reported` is one mapping of tensor name to hash for each rank.
        """
        wrong = set(self.missing())
        if len(reported) != len(self.hashes):
            raise ValueError(f"{len(reported)} ranks reported, {len(self.hashes)} expected")
        for expected, held in zip(self.hashes, reported, strict=True):
            wrong |= {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
        return sorted(wrong)

    def _store(self, target: str, parts: Sequence[Tensor]) -> None:
        for rank, hashes in enumerate(self.hashes):
            pieces = [self._piece(target, index, part, rank) for index, part in enumerate(parts)]
            hashes[target] = self._hasher(torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _piece(self, target: str, index: int, part: Tensor, rank: int) -> Tensor:
        """Rank `rank`'s share of one part of the engine's tensor `target`."""
        tp = self._layout.tp
        module = target.rsplit(".", 2)[-2]
        if module in _VOCABULARY:
            return _pad_vocabulary(part).chunk(tp)[rank]
        if module == "qkv_proj" and index > 0 and self._layout.kv_heads < tp:
            return part.chunk(self._layout.kv_heads)[rank * self._layout.kv_heads // tp]
        if module in _FUSED:
            return part.chunk(tp)[rank]
        if module in _CUT_COLUMNS and part.dim() == 2:
            return part.chunk(tp, dim=1)[rank]
        return part


def _fused_name(name: str) -> tuple[str, list[str]]:
    """The engine's tensor that `name` is a part of, and all parts in order; no parts if it stands alone."""
    for fused, modules in _FUSED.items():
        for module in modules:
            if f".{module}." in name:
                parts = [name.replace(f".{module}.", f".{sibling}.") for sibling in modules]
                return name.replace(f".{module}.", f".{fused}."), parts
    return name, []


def _pad_vocabulary(rows: Tensor) -> Tensor:
    """Zero rows up to SGLang's padded vocabulary."""
    missing = -rows.shape[0] % VOCAB_PADDING
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
