"""What every checkpoint of Megatron's offers, whatever its format: its weights, one at a time.

Nothing of a model is built and no process group is joined. A checkpoint is plain data, which other processes may be
sent; its files are opened when something is read and closed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.bijection import Entry, WeightMap
from rlsys.weights.buckets import checksum
from rlsys.weights.families import VOCAB_MULTIPLE, Cut


@dataclass(frozen=True, slots=True)
class Stored:
    """One Megatron tensor as a checkpoint holds it."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each tensor-parallel piece, in the order of ranks; one where it is held whole."""
    dtype: torch.dtype


class MegatronCheckpoint(ABC):
    """Megatron's weights in a folder, by their names with global layer and expert numbers."""

    format: str
    """torch_dist or mp_rank."""

    def __init__(self, folder: Path, step: int | None, layout: str) -> None:
        """`layout` says to people how it was cut when it was saved, as far as can be told."""
        self.folder, self.step, self.layout = folder, step, layout

    @abstractmethod
    def names(self) -> Mapping[str, Stored]:
        """Every weight, named as it is stored: of Transformer Engine's layers as those name it."""

    @abstractmethod
    def _read(self, name: str) -> list[Tensor]:
        """The tensor-parallel pieces of a weight, in the order of ranks."""

    @abstractmethod
    def _cut_into(self, name: str) -> int:
        """How many pieces a weight is stored in: at least as many as the tensor-parallel ranks that cut it."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that weights are read from, as far as they are there, relative to the folder."""

    def check(self, weights: WeightMap) -> None:
        """Raise UserError unless this is a checkpoint of the model of `weights`, whole and of the right shapes.

        Only what is said of the tensors is read, not the tensors.
        """
        entries = {entry.name: entry for entry in weights.entries()}
        unknown, found = [], set()
        for name in self.names():
            known = _entry(weights, name)
            if known is None or (known.rule.exported and known.name not in entries):
                unknown.append(name)
            else:
                found.add(known.name)
        missing = [name for name in entries if name not in found]
        if missing:
            raise UserError(
                f"{self.folder} lacks {len(missing)} weights of this model, first {missing[0]}; give the whole "
                "checkpoint of a model that fits the config.json."
            )
        if unknown:
            raise UserError(
                f"{self.folder} has {len(unknown)} weights that this model does not have, first {unknown[0]}; "
                "give the config.json of the model that was trained."
            )
        for entry in entries.values():
            self._check_shape(entry, weights)
            if entry.rule.cut is Cut.VOCAB:
                self._check_padding(entry, weights.architecture.vocab)

    def check_copies(self, weights: WeightMap) -> None:
        """Raise UserError unless what is stored beside the tensor that it is a copy of has the same numbers.

        Both are read, one at a time.
        """
        originals = {entry.hf: entry for entry in weights.entries()}
        stored = {known.name for name in self.names() if (known := _entry(weights, name))}
        for copy in weights.copies():
            original = originals[copy.hf]
            if copy.name in stored and self._sums(copy, weights) != self._sums(original, weights):
                raise UserError(
                    f"{self.folder} has {copy.name} with other numbers than {original.name}, and they would be lost, "
                    "for the config.json says that the two are one (tie_word_embeddings); give the config.json of the "
                    "model that was trained."
                )

    def dtype(self, entry: Entry) -> torch.dtype:
        """The dtype that a weight is stored in. Raises UserError if there is no such weight."""
        return self.names()[self._stored_name(entry)].dtype

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """A weight's whole Hugging Face tensors with their names, on the CPU, in the dtype they are stored in.

        Reads no other weight. They may share memory with each other. Raises UserError if the weight is not there, or
        its file is damaged.
        """
        return self._merged(entry, weights, self._read(self._stored_name(entry)))

    def _check_shape(self, entry: Entry, weights: WeightMap) -> None:
        stored = self.names()[self._stored_name(entry)]
        shapes = [torch.empty(shape, dtype=stored.dtype, device="meta") for shape in stored.shapes]
        merged = [tuple(part.shape) for _, part in self._merged(entry, weights, shapes)]
        if merged != list(weights.hf_shapes(entry)):
            raise self._misfit(entry, stored)

    def _check_padding(self, entry: Entry, vocab: int) -> None:
        """Megatron pads by less than a multiple of its own for each tensor-parallel rank; more is another model's."""
        name = self._stored_name(entry)
        rows = sum(shape[0] for shape in self.names()[name].shapes)
        if rows - vocab >= VOCAB_MULTIPLE * self._cut_into(name):
            raise UserError(
                f"{self.folder} has a vocabulary of {rows} rows in {name}, and the config.json says {vocab}, which is "
                "too few for the rest to be padding; give the config.json of the model that was trained (--hf)."
            )

    def _sums(self, entry: Entry, weights: WeightMap) -> list[str]:
        return [checksum(name, tensor) for name, tensor in self.parts(entry, weights)]

    def _merged(self, entry: Entry, weights: WeightMap, shards: list[Tensor]) -> list[tuple[str, Tensor]]:
        try:
            return weights.merge(entry, shards)
        except (RuntimeError, ValueError) as error:
            raise self._misfit(entry, self.names()[self._stored_name(entry)]) from error

    def _misfit(self, entry: Entry, stored: Stored) -> UserError:
        shapes = " and ".join(str(list(shape)) for shape in stored.shapes)
        return UserError(
            f"{self.folder} has {entry.name} of shape {shapes}, which is not this model's; give the config.json of "
            "the model that was trained, and the files of all its ranks."
        )

    def _stored_name(self, entry: Entry) -> str:
        for template in entry.rule.megatron:
            name = template.format(layer=entry.layer, expert=entry.expert)
            if name in self.names():
                return name
        raise UserError(f"{self.folder} lacks {entry.name}; give the whole checkpoint of this model.")


def _entry(weights: WeightMap, name: str) -> Entry | None:
    try:
        return weights.entry(name)
    except KeyError:
        return None
