"""A model folder and a Megatron checkpoint behind one face: Hugging Face tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlsys.weights.bijection import WeightMap
from rlsys.weights.checkpoint.formats import MegatronCheckpoint, open_checkpoint
from rlsys.weights.convert.source import architecture_in, is_critic, model_of
from rlsys.weights.families import Architecture
from rlsys.weights.hf_io import INDEX, HfReader, TensorSpec
from rlsys.weights.repeated import check_repeated


class Side(Protocol):
    """One of two models that are compared."""

    folder: Path
    model: Path
    """Hugging Face folder with its config."""
    architecture: Architecture
    values: bool
    """It is a critic."""

    def check_repeated(self) -> None:
        """Raise UserError unless what a tied model has twice is the same both times; it is read."""

    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor by its Hugging Face name, without reading it."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one Megatron tensor at a time."""


def is_hf(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model's weights."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def open_side(folder: Path, hf: Path | None) -> Side:
    """Open either kind; `hf` has the config of a Megatron checkpoint that has none. Raises UserError."""
    if is_hf(folder):
        return HfSide(folder)
    checkpoint = open_checkpoint(folder)
    return MegatronSide(checkpoint, model_of(checkpoint.folder, hf))


class HfSide:
    """See `Side`."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.model = folder
        self.architecture = architecture_in(folder)
        self._reader = HfReader(folder)
        names = self._reader.names()
        self.values = is_critic(self._reader)
        self._weights = WeightMap(self.architecture, values=self.values)
        # A tied model may repeat its embedding under the output layer's name.
        self._names = sorted(names - self._weights.repeated.keys())

    def check_repeated(self) -> None:
        """See `Side`."""
        check_repeated(self._reader, self._weights, self.folder)

    def specs(self) -> dict[str, TensorSpec]:
        """See `Side`."""
        return {name: self._reader.spec(name) for name in self._names}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Side`."""
        for name in self._names:
            yield name, self._reader.get(name)


class MegatronSide:
    """See `Side`."""

    def __init__(self, checkpoint: MegatronCheckpoint, model: Path) -> None:
        """Raises UserError if the checkpoint is not one of the model whose config is in `model`."""
        self.folder, self.model = checkpoint.folder, model
        self._checkpoint = checkpoint
        self.architecture, self.values = architecture_in(model), is_critic(checkpoint)
        self._weights = WeightMap(self.architecture, values=self.values)
        checkpoint.check(self._weights)

    def check_repeated(self) -> None:
        """See `Side`."""
        self._checkpoint.check_copies(self._weights)

    def specs(self) -> dict[str, TensorSpec]:
        """See `Side`."""
        return {
            name: TensorSpec(name, self._checkpoint.dtype(entry), tuple(shape))
            for entry in self._weights.entries()
            for name, shape in zip(entry.hf, self._weights.hf_shapes(entry), strict=True)
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Side`."""
        for entry in self._weights.entries():
            yield from self._checkpoint.parts(entry, self._weights)
