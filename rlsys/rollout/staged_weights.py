"""Stages the weights of one version and predicts, from the tensors received, what the engine must hold after it.

SGLang's weight checker reports one hash for each of the engine's own tensors on each tensor-parallel
rank. This module predicts them: it fuses and cuts the received Hugging Face tensors as SGLang does
(`qkv_proj` is q, k, v; `gate_up_proj` is gate, up; `w13_weight` is gate, up of expert 0, then of expert 1
and so on, `w2_weight` is down of each; rows are cut over ranks before they are fused; the vocabulary is
padded with zeros to a multiple of 64, and on a CPU the width of an MLP to one of 32) and hashes the result. A
prediction that comes true for every tensor means that the engine holds what was sent.

Tensors of the Llama, Qwen2, Qwen3 and Qwen3-MoE families. A fused tensor is kept until its parts are in,
which for experts is a layer's worth of them; nothing else is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsys.weights.transport import Bucket, ChecksumError, digest, unpack

VOCAB_PADDING = 64
"""Rows; SGLang's default."""
CPU_WIDTH_PADDING = 32
"""Columns or rows of an MLP, on each tensor-parallel rank of an engine on a CPU."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")
_CUT_ROWS = (*_FUSED, "w13_weight")
_CUT_COLUMNS = ("o_proj", "down_proj", "w2_weight")
_OF_MLP = ("gate_up_proj", "down_proj", "w13_weight", "w2_weight")
_VOCABULARY = ("embed_tokens", "lm_head")

Hasher = Callable[[Tensor], str]


def sha256_prefix(tensor: Tensor) -> str:
    """SGLang's hash of a tensor in host memory: 8 bytes of SHA-256 over its bytes, in hex."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """The form in which an engine holds a model."""

    tp: int
    kv_heads: int
    tied: bool
    """The output layer is the embedding; a separate `lm_head.weight` is ignored."""
    dtype: torch.dtype
    experts: int = 0
    """Of a layer; 0 is a dense model."""
    width_padding: int = 1
    """An MLP's width on a rank is padded to a multiple of this."""


class StagedVersion:
    """The buckets of one version beside the engine, and the hashes that the engine must report once it holds them.

    Contract: `take` copies a bucket once and checks the copy, so that nothing that happens to the sender's
    memory afterwards can change what is loaded. `check` passes only for exactly the tensors that were sent.
    Handing the buckets out frees them one by one.

    Buckets are kept where they come: in host memory, or on a device, where a whole copy of the model then lies beside
    the engine. A bucket that comes on a device can be moved to host memory. Then it is checked before, for a device hashes
    much faster; that the move changed nothing, as that the load did not, shows in what the engine reports (`mismatches`).
    """

    def __init__(self, version: int, layout: Layout, hasher: Hasher) -> None:
        self.version = version
        self.nbytes = 0
        """Taken so far."""
        self.hashes: list[dict[str, str]] = [{} for _ in range(layout.tp)]
        """By tensor-parallel rank: the engine's tensor name to its hash."""
        self._layout = layout
        self._hasher = hasher
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []

    def take(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket, one at a time, `to_host` if it is not there.

        Raises ChecksumError for a tensor that is not as sent.
        """
        moves = to_host and isinstance(bucket.data, Tensor)
        staged = bucket.copy(to_host)
        for record, tensor in unpack(bucket if moves else staged):
            self.predict(record.name, tensor)
            self._checksums[record.name] = record.checksum
        self._buckets.append(staged)
        self.nbytes += staged.flat.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless this is `version`, and all of what the sender's digest speaks of."""
        if version != self.version:
            raise ChecksumError(f"version {version} was finished while version {self.version} was staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(f"{len(self._checksums)} tensors came, and they are not the ones that were sent")

    def leave_device(self) -> None:
        """Move what lies on a device to host memory."""
        self._buckets = [
            bucket.copy(to_host=True) if isinstance(bucket.data, Tensor) else bucket for bucket in self._buckets
        ]

    def hand_out(self) -> Iterator[Bucket]:
        """The buckets in the order in which they came; each is forgotten when the next is asked for."""
        while self._buckets:
            yield self._buckets.pop(0)

    def predict(self, name: str, tensor: Tensor) -> None:
        """Hash one whole Hugging Face tensor as the engine will hold it, once all that it is fused with is there."""
        if self._layout.tied and name == "lm_head.weight":
            return
        tensor = tensor.to(self._layout.dtype)
        target, index, parts = _place(name, self._layout.experts)
        if parts == 1:
            self._hash(target, [tensor])
            return
        known = self._parts.setdefault(target, {})
        known[index] = tensor.clone()
        if len(known) == parts:
            del self._parts[target]
            self._hash(target, [known[index] for index in range(parts)])

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """Names of tensors that were not sent, are not held, or differ, on any rank.

        `reported` is one mapping of tensor name to hash for each rank.
        """
        if len(reported) != len(self.hashes):
            raise ValueError(f"{len(reported)} ranks reported, {len(self.hashes)} expected")
        wrong = set(self._parts)
        for expected, held in zip(self.hashes, reported, strict=True):
            wrong |= {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
        return sorted(wrong)

    def _hash(self, target: str, parts: Sequence[Tensor]) -> None:
        for rank, hashes in enumerate(self.hashes):
            pieces = [self._piece(target, index, part, rank) for index, part in enumerate(parts)]
            hashes[target] = self._hasher(torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _piece(self, target: str, index: int, part: Tensor, rank: int) -> Tensor:
        """Rank `rank`'s share of one part of the engine's tensor `target`."""
        tp = self._layout.tp
        module = _module(target)
        if module in _VOCABULARY:
            return _padded(part, VOCAB_PADDING, dim=0).chunk(tp)[rank]
        if module == "qkv_proj" and index > 0 and self._layout.kv_heads < tp:
            return part.chunk(self._layout.kv_heads)[rank * self._layout.kv_heads // tp]
        multiple = tp * self._layout.width_padding if module in _OF_MLP else 1
        if module in _CUT_ROWS:
            return _padded(part, multiple, dim=0).chunk(tp)[rank]
        if module in _CUT_COLUMNS and part.dim() == 2:
            return _padded(part, multiple, dim=1).chunk(tp, dim=1)[rank]
        return part


def _place(name: str, experts: int) -> tuple[str, int, int]:
    """The engine's tensor that holds the Hugging Face tensor `name`: part number `index` of `parts`.

    Returns its name, the index and the parts. `experts` are those of a layer.
    """
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        for fused, modules in _OF_EXPERTS.items():
            if expert["module"] in modules:
                index = int(expert["number"]) * len(modules) + modules.index(expert["module"])
                return (f"{expert['experts']}.{fused}", index, experts * len(modules))
    for fused, modules in _FUSED.items():
        for index, module in enumerate(modules):
            if f".{module}." in name:
                return (name.replace(f".{module}.", f".{fused}."), index, len(modules))
    return (name, 0, 1)


def _module(target: str) -> str:
    """The part of a layer that the engine's tensor `target` is: experts name their tensors, others the module of it."""
    *_, module, leaf = target.rsplit(".", 2)
    return leaf if leaf in _OF_EXPERTS else module


def _padded(matrix: Tensor, multiple: int, dim: int) -> Tensor:
    """With zeros behind, up to the next `multiple` along `dim`."""
    missing = -matrix.shape[dim] % multiple
    return matrix if not missing else pad(matrix, [0, 0] * (matrix.dim() - 1 - dim) + [0, missing])
