"""The models that are converted: a Hugging Face folder with what belongs to it besides weights (config, tokenizer, generation
config, chat template), and a folder or a Megatron checkpoint behind one face."""

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
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, open_checkpoint
from rlsys.weights.hf_io import INDEX, HfReader, TensorSpec, check_repeated
from rlsys.weights.transport import dtype_name
from rlsys.weights.weight_map import Architecture, WeightMap, read_architecture

CONFIG = "config.json"
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf"),
    *(".h5", ".msgpack", ".onnx"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TEMPLATES = "additional_chat_templates"  # The one folder that transformers keeps beside a tokenizer.
_POLICY, _CRITIC = "ForCausalLM", "ForTokenClassification"


def companions(original: Path) -> list[Path]:
    """The files of a model folder that are no weights, relative to it. Raises UserError if it is none."""
    read_config(original)
    found = [path for path in original.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)]
    if (original / _TEMPLATES).is_dir():
        found += [path for path in (original / _TEMPLATES).iterdir() if path.is_file()]
    return sorted(path.relative_to(original) for path in found if not path.name.startswith("."))


def copy_companions(original: Path, folder: Path) -> list[str]:
    """Copy them to `folder`; sentences for the user."""
    for path in companions(original):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original / path, folder / path)
    if not any((original / name).is_file() for name in _TOKENIZERS):
        return [f"{original} has no tokenizer, so what was made has none; copy one to it before you use it."]
    return []


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises UserError if there is none, or it is damaged."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder} has no {CONFIG}; give a Hugging Face model folder.", code="not_found", key=str(folder)
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); get it again.", code="malformed", key=str(path)) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; get it again.", code="malformed", key=str(path))
    return config


def adjust_config(folder: Path, dtype: torch.dtype, values: bool) -> None:
    """Make the config of `folder` say what its weights are, with `values` a critic's (a token classification)."""
    config = read_config(folder)
    changed = dict(config)
    key = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if key is not None:
        changed[key] = dtype_name(dtype)
    if values:
        # transformers counts labels by these, not by a num_labels.
        changed |= {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
        if architectures := config.get("architectures"):
            changed["architectures"] = [name.replace(_POLICY, _CRITIC) for name in architectures]
    if changed != config:
        (folder / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


MODEL = "hf"  # Folder within a converted Megatron checkpoint with what belongs to the model besides its weights.
_HF_HEAD, _MEGATRON_HEAD = "score.weight", "value_head.weight"  # What a critic has and a policy has not.


def architecture_in(folder: Path) -> Architecture:
    """The architecture of a model folder; what changes no weight may be unsupported. Raises UserError."""
    read_config(folder)
    return read_architecture(folder, weights_only=True)


def model_of(checkpoint: Path, original: str | Path | None) -> Path:
    """The Hugging Face folder that says what model a Megatron checkpoint is of. Raises UserError."""
    if original is not None:
        return Path(original)
    inside = checkpoint / MODEL
    if not (inside / CONFIG).is_file():
        raise UserError(
            f"{checkpoint} does not say what model it is of; give its original with --hf.", code="missing", key="--hf"
        )
    return inside


def is_critic(source: MegatronCheckpoint | HfReader) -> bool:
    """Whether the weights are a critic's: in Hugging Face a token classification."""
    names = source.names()
    return _HF_HEAD in names or _MEGATRON_HEAD in names


def check_hf(reader: HfReader, weights: WeightMap, source: Path, values: bool) -> None:
    """Raise UserError unless `source` holds the tensors of the map; a critic (`values`) may come from a policy."""
    if not values and is_critic(reader):
        raise UserError(f"{source} is a critic, with a head {_HF_HEAD}; give --values.", code="missing", key="--values")
    weights.check_hf_names(reader.names(), headless=values)
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if name in reader.names() and reader.spec(name).shape != tuple(shape):
                raise UserError(
                    f"{source} has {name} of shape {list(reader.spec(name).shape)}, and its {CONFIG} says "
                    f"{list(shape)}; use weights and config of one model.",
                    code="mismatch",
                    key=name,
                )
    check_repeated(reader, weights, source)


WRITTEN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be converted to, by name."""


def chosen(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None keeps each tensor's own. Raises UserError for an unknown one."""
    if name is None:
        return None
    if name not in WRITTEN:
        raise UserError(f"dtype is {name}; give one of {', '.join(WRITTEN)}.", code="unknown", key="dtype")
    return WRITTEN[name]


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another dtype, rounded to nearest. Raises UserError if a number becomes infinite, or counts."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if not tensor.is_floating_point():
        raise UserError(
            f"{name} is {dtype_name(tensor.dtype)}, which another dtype would not say the same in; leave --dtype out, "
            "or use weights that are not quantised.",
            code="unsupported",
            key="--dtype",
        )
    made = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((made.isinf() & tensor.isfinite()).any()):
        raise UserError(
            f"{name} has numbers that {dtype_name(dtype)} cannot hold; give another --dtype.",
            code="out_of_range",
            key="--dtype",
        )
    return made


def most(specs: Iterable[TensorSpec]) -> torch.dtype:
    """The dtype that most bytes have: what a config calls that of the model."""
    counts: Counter[torch.dtype] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.nbytes
    return counts.most_common(1)[0][0]


def fingerprint(folder: Path, files: Iterable[Path]) -> list[Any]:
    """Where `folder` is, and name, bytes and time of change in ns of `files` in it; contents are not read."""
    stats = {str(path): (folder / path).stat() for path in sorted(files)}
    return [str(folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]]


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder, which may change meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


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
        "dtypes": {dtype_name(dtype): count for dtype, count in parameters.most_common()},
    }
