"""Reads the models to convert or compare.

Covers the files of a Hugging Face folder other than weights (config, tokenizer, generation config, chat template), and
`StoredModel`, one interface to Hugging Face folders and Megatron checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.bucket import dtype_name
from rlsys.weights.checkpoint.adapters import MergedCheckpoint, adapters_in
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, open_checkpoint
from rlsys.weights.hf_io import INDEX, HfReader, TensorSpec, check_repeated
from rlsys.weights.weight_map import Architecture, WeightMap, read_architecture

CONFIG = "config.json"
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf"),
    *(".h5", ".msgpack", ".onnx"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TEMPLATES = "additional_chat_templates"  # The only subfolder that transformers saves with a tokenizer.
_POLICY, _CRITIC = "ForCausalLM", "ForTokenClassification"


def companions(original: Path) -> list[Path]:
    """Return the files of a model folder other than weights, relative to it.

    Raises UserError if `original` is not a model folder.
    """
    read_config(original)
    found = [path for path in original.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)]
    if (original / _TEMPLATES).is_dir():
        found += [path for path in (original / _TEMPLATES).iterdir() if path.is_file()]
    return sorted(path.relative_to(original) for path in found if not path.name.startswith("."))


def copy_companions(original: Path, folder: Path) -> list[str]:
    """Copy the companions of `original` to `folder`; return notes for the user.

    What is converted is not quantised, so the copied config does not say so.
    """
    for path in companions(original):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original / path, folder / path)
    config = read_config(folder)
    if config.pop("quantization_config", None) is not None:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not any((original / name).is_file() for name in _TOKENIZERS):
        return [f"{original} has no tokenizer, so the converted model has none: copy one into it before use."]
    return []


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's config.json. Raises UserError if the file is missing or damaged."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder} has no {CONFIG}: give a Hugging Face model folder.", code="not_found", key=str(folder)
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): get it again.", code="malformed", key=str(path)) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object: get it again.", code="malformed", key=str(path))
    return config


def adjust_config(folder: Path, dtype: torch.dtype, values: bool) -> None:
    """Update the dtype, if any, in the config of `folder`; with `values`, make it a token classification config."""
    config = read_config(folder)
    changed = dict(config)
    key = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if key is not None:
        changed[key] = dtype_name(dtype)
    if values:
        # transformers takes the number of labels from these two keys, not from num_labels.
        changed |= {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
        if architectures := config.get("architectures"):
            changed["architectures"] = [name.replace(_POLICY, _CRITIC) for name in architectures]
    if changed != config:
        (folder / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


MODEL = "hf"  # Subfolder of a converted Megatron checkpoint with the model's config, tokenizer and other companions.
_HF_HEAD, _MEGATRON_HEAD = "score.weight", "value_head.weight"  # Value heads, which only a critic has.


def architecture_in(folder: Path, family: str | None = None) -> Architecture:
    """Return the architecture of a model folder for conversion; `family` is as in `model.family`.

    Settings that a run would refuse are accepted if they leave the weights unchanged. Raises UserError.
    """
    read_config(folder)
    return read_architecture(folder, family, weights_only=True)


def model_of(checkpoint: Path, original: str | Path | None) -> Path:
    """Return the Hugging Face folder with the config of a Megatron checkpoint's model. Raises UserError."""
    if original is not None:
        return Path(original)
    inside = checkpoint / MODEL
    if not (inside / CONFIG).is_file():
        raise UserError(
            f"{checkpoint} has no {MODEL}/{CONFIG}: give its original Hugging Face folder with --hf.",
            code="missing",
            key="--hf",
        )
    return inside


def open_whole(
    checkpoint: str | Path, original: str | Path | None, family: str | None = None
) -> tuple[MegatronCheckpoint, Path]:
    """Open a Megatron checkpoint of a whole model, or of adapters together with their base `original`.

    Return it with the Hugging Face folder of its config; `family` is as in `model.family`. Raises UserError.
    """
    opened = open_checkpoint(checkpoint)
    model, lora = model_of(opened.folder, original), adapters_in(opened.folder)
    return opened if lora is None else MergedCheckpoint(opened, lora, model, architecture_in(model, family)), model


def is_critic(source: MegatronCheckpoint | HfReader) -> bool:
    """Return True if the weights have a value head (in Hugging Face: token classification)."""
    names = source.names()
    return _HF_HEAD in names or _MEGATRON_HEAD in names


def check_hf(reader: HfReader, weights: WeightMap, source: Path, values: bool) -> None:
    """Raise UserError unless `source` holds the tensors of `weights`; with `values`, the value head may be missing."""
    if not values and is_critic(reader):
        raise UserError(f"{source} is a critic (it has {_HF_HEAD}): give --values.", code="missing", key="--values")
    weights.check_hf_names(reader.names(), headless=values)
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if name in reader.names() and reader.spec(name).shape != tuple(shape):
                raise UserError(
                    f"{source} has {name} of shape {list(reader.spec(name).shape)}, but its {CONFIG} implies "
                    f"{list(shape)}: use weights and config of the same model.",
                    code="mismatch",
                    key=name,
                )
    check_repeated(reader, weights, source)


WRITTEN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Target dtypes of a conversion, by name."""


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype called `name`, or None for None, which keeps each tensor's dtype.

    Raises UserError for an unknown name.
    """
    if name is None:
        return None
    if name not in WRITTEN:
        raise UserError(f"dtype is {name}: give one of {', '.join(WRITTEN)}.", code="unknown", key="dtype")
    return WRITTEN[name]


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `tensor` in `dtype`, rounded to nearest. Raises UserError on overflow or for a non-floating tensor."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if not tensor.is_floating_point():
        raise UserError(
            f"{name} is {dtype_name(tensor.dtype)}, which --dtype cannot convert: omit --dtype, or use weights that "
            "are not quantised.",
            code="unsupported",
            key="--dtype",
        )
    made = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((made.isinf() & tensor.isfinite()).any()):
        raise UserError(
            f"{name} has values outside the range of {dtype_name(dtype)}: give another --dtype.",
            code="out_of_range",
            key="--dtype",
        )
    return made


def dominant_dtype(specs: Iterable[TensorSpec]) -> torch.dtype:
    """Return the dtype with the most bytes, which the config gives as the model's dtype."""
    counts: Counter[torch.dtype] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.nbytes
    return counts.most_common(1)[0][0]


def fingerprint(folder: Path, files: Iterable[Path]) -> list[Any]:
    """Return the path of `folder`, and name, size (bytes) and mtime (ns) of each of its `files`; does not read them."""
    stats = {str(path): (folder / path).stat() for path in sorted(files)}
    return [str(folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]]


def bytes_in(folder: Path) -> int:
    """Return the total size of the files in a folder; files may disappear during the scan."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


class StoredModel(Protocol):
    """A model to compare or describe, in either format."""

    folder: Path
    model: Path  # Hugging Face folder with the config.
    architecture: Architecture
    values: bool  # True for a critic.

    def check_repeated(self) -> None:
        """Raise UserError if the two stored copies of a tied tensor differ; reads both."""

    def specs(self) -> dict[str, TensorSpec]:
        """Return name, dtype and shape of every tensor by its Hugging Face name, without reading data."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all Hugging Face tensors by name, reading one stored tensor at a time."""


def is_hf(folder: Path) -> bool:
    """Return True if `folder` holds safetensors of a Hugging Face model."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def open_model(folder: Path, hf: Path | None, family: str | None = None) -> StoredModel:
    """Open a folder of either format; `family` is as in `model.family`. Raises UserError.

    `hf` is the Hugging Face folder with a Megatron checkpoint's config; None if the checkpoint includes the config.
    """
    if is_hf(folder):
        return HfModel(folder, family)
    return MegatronModel(*open_whole(folder, hf, family), family)


class HfModel:
    """A Hugging Face folder as a `StoredModel`."""

    def __init__(self, folder: Path, family: str | None = None) -> None:
        self.folder = self.model = folder
        self.architecture = architecture_in(folder, family)
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


class MegatronModel:
    """A Megatron checkpoint as a `StoredModel`."""

    def __init__(self, checkpoint: MegatronCheckpoint, model: Path, family: str | None = None) -> None:
        """Raises UserError if the checkpoint does not fit the config in `model`."""
        self.folder, self.model = checkpoint.folder, model
        self._checkpoint = checkpoint
        self.architecture, self.values = architecture_in(model, family), is_critic(checkpoint)
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
    """Description of a model folder or checkpoint."""

    folder: str
    format: str  # "hugging face", "torch_dist" or "mp_rank".
    step: int | None  # Optimiser steps taken; None if unknown.
    layout: str  # Distribution of the weights over files, as text.
    architecture: dict[str, Any] | None  # None without a config.
    critic: bool
    parameters: int
    nbytes: int  # Size of the weights.
    dtypes: dict[str, int]  # Dtype -> number of parameters.
    folder_bytes: int  # Size of all files in the folder, optimiser state included.
    also: tuple[str, ...]  # Hugging Face: names of the companion files; Megatron: all names in the folder.


def info(folder: str | Path, hf: str | Path | None = None, family: str | None = None) -> Info:
    """Describe a Hugging Face folder, or a Megatron checkpoint whose config may be in `hf`. Raises UserError."""
    folder = Path(folder)
    return _of_hf(folder, family) if is_hf(folder) else _of_megatron(folder, None if hf is None else Path(hf), family)


def _of_hf(folder: Path, family: str | None) -> Info:
    reader = HfReader(folder)
    specs = [reader.spec(name) for name in reader.names()]
    files = reader.files()
    return Info(
        folder=str(folder),
        format="hugging face",
        step=None,
        layout=f"{len(files)} safetensors file{'s' if len(files) > 1 else ''}",
        architecture=asdict(architecture_in(folder, family)),
        critic=is_critic(reader),
        folder_bytes=bytes_in(folder),
        also=tuple(str(path) for path in companions(folder)),
        **_counted((spec.dtype, spec.shape) for spec in specs),
    )


def _of_megatron(folder: Path, hf: Path | None, family: str | None) -> Info:
    checkpoint = open_checkpoint(folder)
    inside = checkpoint.folder / MODEL
    model = hf or (inside if (inside / CONFIG).is_file() else None)
    if model is not None:
        checkpoint, model = open_whole(folder, model, family)
    if model is None:
        # Count tensors as stored: vocabulary padding included, duplicates twice.
        stored = checkpoint.names().values()
        counted, architecture = _counted((weight.dtype, shape) for weight in stored for shape in weight.shapes), None
    else:
        side = MegatronModel(checkpoint, model, family)
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
        "dtypes": {dtype_name(dtype): count for dtype, count in parameters.most_common()},
    }
