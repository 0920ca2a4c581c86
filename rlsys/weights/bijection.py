"""THE map between Hugging Face tensors and Megatron shards. Pure: no process, no device, no file.

Invariant: `merge` undoes `shard` bit for bit, for every tensor, TP and EP size and split into stages. Loading, live
synchronisation and conversion all go through here, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.families import FAMILIES, Architecture, Cut, Rule, rules_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$")
"""A layer or an expert in a Megatron name; Transformer Engine writes the expert at the end."""
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor of one model: its rule with the numbers filled in."""

    hf: tuple[str, ...]
    rule: Rule
    name: str  # The first of its names, with the global numbers of layer and expert.
    layer: int | None = None
    expert: int | None = None


class WeightMap:
    """The map for one architecture."""

    def __init__(self, architecture: Architecture, values: bool = False, folder: Path = FAMILIES) -> None:
        """`values`: of a critic, with a value head and no output layer. `folder` holds the family's file."""
        self.architecture = architecture
        self._rules = rules_of(architecture, values, folder)
        self._by_name = {_shape_of(name): rule for rule in self._rules for name in rule.megatron}
        policy = rules_of(replace(architecture, tied=False), folder=folder)
        self._of_policy = {hf for rule in policy if not rule.per_layer for hf in rule.hf}
        untied = {rule.megatron: rule for rule in policy}
        copies = [rule for rule in self._rules if not rule.exported]
        self.repeated: dict[str, str] = {
            again: hf for rule in copies for again, hf in zip(untied[rule.megatron].hf, rule.hf, strict=True)
        }
        """A Hugging Face tensor that some checkpoints of a tied model have -> the one that it must be equal to."""

    def entry(self, megatron: str) -> Entry:
        """Look up a Megatron tensor by any of its names, with global numbers. KeyError if there is none."""
        rule = self._by_name[_NUMBER.sub("#", megatron)]
        entry = _entry(rule, *map(int, _NUMBER.findall(megatron)))
        if (entry.layer or 0) >= self.architecture.layers or (
            entry.expert is not None and entry.expert >= self.architecture.experts
        ):
            raise KeyError(megatron)
        return entry

    def entries(self) -> list[Entry]:
        """Every exported Megatron tensor of the model, in the order of export: layer by layer."""
        everything = self._stage(range(self.architecture.layers), True, True, range(self.architecture.experts))
        return [entry for entry in everything if entry.rule.exported]

    def copies(self) -> list[Entry]:
        """Every Megatron tensor that is stored beside the one that it is a copy of; its `hf` are that one's."""
        return [_entry(rule) for rule in self._rules if not rule.exported]

    def stage_names(self, layers: range, first: bool, last: bool, experts: range | None = None) -> list[str]:
        """Megatron names of a pipeline stage, as the local layers name them, in the order of export.

        `experts` are those that the expert-parallel rank holds, by default all. A stage that is both first and last has
        no output layer of its own when embeddings are tied.
        """
        held = range(self.architecture.experts) if experts is None else experts
        return [entry.name for entry in self._stage(layers, first, last, held)]

    def hf_names(self) -> set[str]:
        """Every Hugging Face tensor of the model."""
        return {name for entry in self.entries() for name in entry.hf}

    def whole_shape(self, entry: Entry, tp: int) -> tuple[int, ...]:
        """Shape of the Megatron tensor before it is cut; the vocabulary is padded for `tp`."""
        shapes = entry.rule.shapes
        rows = sum(shape[0] for shape in shapes)
        return (self.architecture.padded_vocab(tp) if entry.rule.cut is Cut.VOCAB else rows, *shapes[0][1:])

    def check_hf_names(self, found: set[str], headless: bool = False) -> None:
        """Raise UserError unless a checkpoint with the tensors `found` is one of this architecture.

        `headless` also takes a critic without its head, or with one without bias. A policy's output layer is ignored
        where there is none; whether it is the embedding that it is tied to, only its numbers tell (`repeated`).
        """
        expected = self.hf_names()
        head = {hf for rule in self._rules if not rule.per_layer for hf in rule.hf} - self._of_policy
        if headless:
            biases = {name for name in head if name.endswith(".bias")}
            expected -= (biases if head & found else head) - found
        missing = sorted(expected - found)
        if missing:
            raise UserError(f"The checkpoint lacks {len(missing)} tensors, first {missing[0]}; is it complete?")
        # Some checkpoints repeat a tied matrix under the output layer's name.
        unknown = sorted(name for name in found - expected - self._of_policy if not _IGNORED.search(name))
        if unknown:
            raise UserError(
                f"The checkpoint has {len(unknown)} tensors that a {self.architecture.family} model does "
                f"not have, first {unknown[0]}; use a checkpoint that fits its config.json."
            )

    def shard(self, entry: Entry, parts: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Rank `tp_rank`'s piece of a Megatron tensor, made from its whole Hugging Face `parts`.

        Parts come in the order of `entry.hf`. The result may share memory with a part. Raises UserError where `tp_size`
        does not divide the tensor; it may exceed the query groups, whose rows are then cut as well.
        """
        if entry.rule.cut is Cut.GATE_UP:
            return torch.cat([_piece(part, Cut.ROWS, tp_rank, tp_size) for part in parts])
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
            parts = [_joined(halves) for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)]
        elif cut is Cut.QKV:
            parts = self._unfuse_qkv(_joined(shards))
        else:
            parts = [_joined(shards)[: self.architecture.vocab] if cut is Cut.VOCAB else _joined(shards)]
        return list(zip(entry.hf, parts, strict=True))

    def _stage(self, layers: range, first: bool, last: bool, experts: range) -> Iterator[Entry]:
        blocks = [number for number, rule in enumerate(self._rules) if rule.per_layer]
        whole = [(number > blocks[0], rule) for number, rule in enumerate(self._rules) if not rule.per_layer]
        block = [self._rules[number] for number in blocks]
        if first:
            yield from (_entry(rule) for after, rule in whole if not after)
        for layer in layers:
            yield from (_entry(rule, layer) for rule in block if not rule.per_expert)
            yield from (_entry(rule, layer, e) for e in experts for rule in block if rule.per_expert)
        if last:
            yield from (_entry(rule) for after, rule in whole if after and (rule.exported or not first))

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


def _shape_of(name: str) -> str:
    """A name of a rule with `#` for its numbers."""
    return name.format(layer="#", expert="#")


def _entry(rule: Rule, layer: int | None = None, expert: int | None = None) -> Entry:
    numbers = {"layer": layer, "expert": expert}
    hf = tuple(name.format(**numbers) for name in rule.hf)
    return Entry(hf, rule, rule.megatron[0].format(**numbers), layer, expert)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One tensor of all parts; one part alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _piece(whole: Tensor, cut: Cut, tp_rank: int, tp_size: int) -> Tensor:
    if cut is Cut.WHOLE:
        return whole
    dimension = 1 if cut is Cut.COLUMNS else 0
    if whole.shape[dimension] % tp_size:
        raise UserError(f"tp is {tp_size}, which does not divide a dimension of {whole.shape[dimension]}; lower tp.")
    return whole.chunk(tp_size, dim=dimension)[tp_rank]


class ShardLoader:
    """Turns a stream of whole Hugging Face tensors, in any order, into one rank's shards.

    A fused tensor waits until all its parts are in; nothing else is kept. No expert is cut: a rank holds it whole or
    not at all.
    """

    def __init__(
        self, weights: WeightMap, names: Sequence[str], tp_rank: int, tp_size: int, store: Callable[[str, Tensor], None]
    ) -> None:
        """`names` are this rank's Megatron tensors; `store(name, shard)` takes each shard.

        Experts are not cut by TP: they are spread whole, and `names` holds those that the rank has.
        """
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
            tp = self._tp if entry.expert is None else (0, 1)
            self._store(name, self._weights.shard(entry, [parts[hf] for hf in entry.hf], *tp))
            del self._parts[name]

    def missing(self) -> list[str]:
        """Hugging Face tensors that this rank still lacks."""
        return sorted(hf for name, parts in self._parts.items() for hf in self._entries[name].hf if hf not in parts)
