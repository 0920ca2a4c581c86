"""THE map between Hugging Face tensors and Megatron shards. Pure: no process, no device, no file.

Invariant: `merge` undoes `shard` bit for bit, for every tensor, TP size and split into stages. Loading,
live synchronisation and conversion all go through here, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.families import Architecture, Cut, Rule, rules_of

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor of one model: its rule with the layer filled in."""

    hf: tuple[str, ...]
    rule: Rule


class WeightMap:
    """The map for one architecture."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._rules = rules_of(architecture)
        self._by_name = {name: rule for rule in self._rules for name in rule.megatron}

    def entry(self, megatron: str) -> Entry:
        """Look up a Megatron parameter by its name with the global layer number. KeyError if unknown."""
        layer = _LAYER.search(megatron)
        number = layer[1] if layer else ""
        rule = self._by_name[_LAYER.sub(".layers.{}.", megatron)]
        return Entry(tuple(name.format(number) for name in rule.hf), rule)

    def stage_names(self, layers: range, first: bool, last: bool) -> list[str]:
        """Megatron names of a pipeline stage, as the local layers name them, in the order of export.

        A stage that is both first and last has no output layer of its own when embeddings are tied.
        """
        names: list[str] = []
        per_layer = [rule for rule in self._rules if "{}" in rule.megatron[0]]
        embedding, final_norm, output = (rule for rule in self._rules if "{}" not in rule.megatron[0])
        if first:
            names.append(embedding.megatron[0])
        names += [rule.megatron[0].format(layer) for layer in layers for rule in per_layer]
        if last:
            names.append(final_norm.megatron[0])
        if last and (output.exported or not first):
            names.append(output.megatron[0])
        return names

    def hf_names(self) -> set[str]:
        """Every Hugging Face tensor of the model."""
        every = self.stage_names(range(self.architecture.layers), first=True, last=True)
        return {name for megatron in every for name in self.entry(megatron).hf}

    def check_hf_names(self, found: set[str]) -> None:
        """Raise UserError unless a checkpoint with the tensors `found` is one of this architecture."""
        expected = self.hf_names()
        missing = sorted(expected - found)
        if missing:
            raise UserError(
                f"The checkpoint lacks {len(missing)} tensors, first {missing[0]}; is it complete?"
            )
        # Some checkpoints repeat the tied matrix under the output layer's name.
        optional = {"lm_head.weight"} if self.architecture.tied else set()
        unknown = sorted(name for name in found - expected - optional if not _IGNORED.search(name))
        if unknown:
            raise UserError(
                f"The checkpoint has {len(unknown)} tensors that a {self.architecture.family} model does "
                f"not have, first {unknown[0]}; use a checkpoint that fits its config.json."
            )

    def shard(self, entry: Entry, parts: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Rank `tp_rank`'s piece of a Megatron tensor, made from its whole Hugging Face `parts`.

        Parts come in the order of `entry.hf`. The result may share memory with a part.
        """
        if entry.rule.cut is Cut.GATE_UP:
            return torch.cat([part.chunk(tp_size)[tp_rank] for part in parts])
        return _piece(self._fuse(entry.rule.cut, parts, tp_size), entry.rule.cut, tp_rank, tp_size)

    def merge(self, entry: Entry, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Names and whole Hugging Face tensors from the pieces of all TP ranks, in rank order.

        The results may share memory with a piece.
        """
        cut = entry.rule.cut
        if cut is Cut.WHOLE:
            parts = [shards[0]]
        elif cut is Cut.COLUMNS:
            parts = [_joined(shards, dim=1)]
        elif cut is Cut.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            parts = [_joined([half[which] for half in halves]) for which in (0, 1)]
        else:
            rows = _joined(shards)
            parts = self._unfuse_qkv(rows) if cut is Cut.QKV else [rows]
            parts = [rows[: self.architecture.vocab]] if cut is Cut.VOCAB else parts
        return list(zip(entry.hf, parts, strict=True))

    def _fuse(self, cut: Cut, parts: Sequence[Tensor], tp_size: int) -> Tensor:
        if cut is Cut.QKV:
            # Per query group: its query heads, then its key head, then its value head.
            groups = self.architecture.kv_heads
            grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        (whole,) = parts
        if cut is Cut.VOCAB:
            padding = self.architecture.padded_vocab(tp_size) - whole.shape[0]
            return torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]) if padding else whole
        return whole

    def _unfuse_qkv(self, fused: Tensor) -> list[Tensor]:
        arch = self.architecture
        sizes = [arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim, arch.head_dim]
        grouped = fused.reshape(arch.kv_heads, sum(sizes), *fused.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One tensor of all parts; one part alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _piece(whole: Tensor, cut: Cut, tp_rank: int, tp_size: int) -> Tensor:
    if cut is Cut.WHOLE:
        return whole
    dimension = 1 if cut is Cut.COLUMNS else 0
    if whole.shape[dimension] % tp_size:
        raise UserError(
            f"tp is {tp_size}, which does not divide a dimension of {whole.shape[dimension]}; lower tp."
        )
    return whole.chunk(tp_size, dim=dimension)[tp_rank]


class ShardLoader:
    """Turns a stream of whole Hugging Face tensors, in any order, into one rank's shards.

    A fused tensor waits until all its parts are in; nothing else is kept.
    """

    def __init__(
        self,
        weights: WeightMap,
        names: Sequence[str],
        tp_rank: int,
        tp_size: int,
        store: Callable[[str, Tensor], None],
    ) -> None:
        """`names` are this rank's Megatron tensors; `store(name, shard)` takes each shard."""
        self._weights, self._store = weights, store
        self._tp = (tp_rank, tp_size)
        self._entries = {name: weights.entry(name) for name in names}
        self._user = {hf: name for name, entry in self._entries.items() for hf in entry.hf}
        self._parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}

    def feed(self, hf_name: str, tensor: Tensor) -> None:
        """Take one tensor; tensors that other ranks hold are ignored."""
        name = self._user.get(hf_name)
        if name is None or name not in self._parts:
            return
        entry, parts = self._entries[name], self._parts[name]
        parts[hf_name] = tensor
        if len(parts) == len(entry.hf):
            self._store(name, self._weights.shard(entry, [parts[hf] for hf in entry.hf], *self._tp))
            del self._parts[name]

    def missing(self) -> list[str]:
        """Hugging Face tensors that this rank still lacks."""
        return sorted(
            hf for name, parts in self._parts.items() for hf in self._entries[name].hf if hf not in parts
        )
