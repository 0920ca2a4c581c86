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
