"""What a folder with a model holds, without reading its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from rlsys.weights.checkpoint.formats import open_checkpoint
from rlsys.weights.convert.companions import CONFIG, companions
from rlsys.weights.convert.dtypes import name_of
from rlsys.weights.convert.engine import bytes_in
from rlsys.weights.convert.sides import MegatronSide, is_hf
from rlsys.weights.convert.source import MODEL, architecture_in, is_critic
from rlsys.weights.hf_io import HfReader


@dataclass(frozen=True, slots=True)
class Info:
    """Of one folder."""

    folder: str
    format: str
    """hugging face, torch_dist or mp_rank."""
    step: int | None
    """Of training; None where that is not known."""
    layout: str
    """How the weights are spread over files."""
    architecture: dict[str, Any] | None
    """None where no config says it."""
    critic: bool
    parameters: int
    nbytes: int
    """Of the weights."""
    dtypes: dict[str, int]
    """Dtype -> parameters of it."""
    folder_bytes: int
    """Of all files in the folder, the optimiser's too."""
    also: tuple[str, ...]
    """Names of what else is in the folder."""


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
    own = checkpoint.folder / MODEL
    model = hf or (own if (own / CONFIG).is_file() else None)
    if model is None:
        # As stored: the vocabulary is padded, and what a checkpoint holds twice counts twice.
        stored = checkpoint.names().values()
        counted, architecture = _counted((one.dtype, shape) for one in stored for shape in one.shapes), None
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
