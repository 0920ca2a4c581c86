"""A model folder and a Megatron checkpoint behind one face, Hugging Face tensors by name; and what either holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlsys.weights.bijection import WeightMap
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, open_checkpoint
from rlsys.weights.convert.conversion import bytes_in
from rlsys.weights.convert.model_folder import CONFIG, MODEL, architecture_in, companions, is_critic, model_of, name_of
from rlsys.weights.families import Architecture
from rlsys.weights.hf_io import INDEX, HfReader, TensorSpec, check_repeated


class Side(Protocol):
    """One of two models that are compared."""

    folder: Path
    model: Path  # Hugging Face folder with its config.
    architecture: Architecture
    values: bool  # It is a critic.

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
        self.values = is_critic(self._reader)
        self._weights = WeightMap(self.architecture, values=self.values)
        # A tied model may repeat its embedding under the output layer's name.
        self._names = sorted(self._reader.names() - self._weights.repeated.keys())

    def check_repeated(self) -> None:
        check_repeated(self._reader, self._weights, self.folder)

    def specs(self) -> dict[str, TensorSpec]:
        return {name: self._reader.spec(name) for name in self._names}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._reader.get(name)) for name in self._names)


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
        self._checkpoint.check_copies(self._weights)

    def specs(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(name, self._checkpoint.dtype(entry), tuple(shape))
            for entry in self._weights.entries()
            for name, shape in zip(entry.hf, entry.rule.shapes, strict=True)
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self._weights.entries():
            yield from self._checkpoint.parts(entry, self._weights)


@dataclass(frozen=True, slots=True)
class Info:
    """Of one folder."""

    folder: str
    format: str  # hugging face, torch_dist or mp_rank.
    step: int | None  # Of training; None where that is not known.
    layout: str  # How the weights are spread over files.
    architecture: dict[str, Any] | None  # None where no config says it.
    critic: bool
    parameters: int
    nbytes: int  # Of the weights.
    dtypes: dict[str, int]  # Dtype -> parameters of it.
    folder_bytes: int  # Of all files in the folder, the optimiser's too.
    also: tuple[str, ...]  # Names of what else is in the folder.


def info(folder: str | Path, hf: str | Path | None = None) -> Info:
    """Look at a Hugging Face folder or a Megatron checkpoint, whose config may be in `hf`. Raises UserError."""
    folder = Path(folder)
    return _of_hf(folder) if is_hf(folder) else _of_megatron(folder, None if hf is None else Path(hf))


def _of_hf(folder: Path) -> Info:
    reader = HfReader(folder)
    specs = [reader.spec(name) for name in reader.names()]
    files = reader.files()
    return Info(
        folder=str(folder),
        format="hugging face",
        step=None,
        layout=f"{len(files)} safetensors file{'s' if len(files) > 1 else ''}",
        architecture=asdict(architecture_in(folder)),
        critic=is_critic(reader),
        folder_bytes=bytes_in(folder),
        also=tuple(str(path) for path in companions(folder)),
        **_counted((spec.dtype, spec.shape) for spec in specs),
    )


def _of_megatron(folder: Path, hf: Path | None) -> Info:
    checkpoint = open_checkpoint(folder)
    inside = checkpoint.folder / MODEL
    model = hf or (inside if (inside / CONFIG).is_file() else None)
    if model is None:
        # As stored: the vocabulary is padded, and what a checkpoint holds twice counts twice.
        stored = checkpoint.names().values()
        counted, architecture = _counted((weight.dtype, shape) for weight in stored for shape in weight.shapes), None
    else:
        side = MegatronSide(checkpoint, model)
        counted = _counted((spec.dtype, spec.shape) for spec in side.specs().values())
        architecture = asdict(side.architecture)
    return Info(
        folder=str(checkpoint.folder),
        format=checkpoint.format,
        step=checkpoint.step,
        layout=checkpoint.layout,
        architecture=architecture,
        critic=is_critic(checkpoint),
        folder_bytes=bytes_in(checkpoint.folder),
        also=tuple(sorted(path.name for path in checkpoint.folder.iterdir())),
        **counted,
    )


def _counted(stored: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Any]:
    parameters: Counter[torch.dtype] = Counter()
    for dtype, shape in stored:
        parameters[dtype] += prod(shape)
    return {
        "parameters": sum(parameters.values()),
        "nbytes": sum(count * dtype.itemsize for dtype, count in parameters.items()),
        "dtypes": {name_of(dtype): count for dtype, count in parameters.most_common()},
    }
