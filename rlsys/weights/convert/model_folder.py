"""A Hugging Face model folder that is converted or made: which model it is, whether it is whole, and what belongs to it
besides weights (config, tokenizer, generation config, chat template)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.bijection import WeightMap
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint
from rlsys.weights.families import Architecture, read_architecture
from rlsys.weights.hf_io import HfReader, TensorSpec, check_repeated

CONFIG = "config.json"
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
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
        raise UserError(f"{folder} has no {CONFIG}; give a Hugging Face model folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); get it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; get it again.")
    return config


def adjust_config(folder: Path, dtype: torch.dtype, values: bool) -> None:
    """Make the config of `folder` say what its weights are; a config that says so already is left as it is.

    `values`: the weights are a critic's, a token classification of one label.
    """
    config = read_config(folder)
    changed = dict(config)
    key = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if key is not None:
        changed[key] = name_of(dtype)
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
    """The architecture of a model folder, as far as its weights depend on it: what no weight does may be unsupported.

    Raises UserError if its config is missing, damaged or unknown.
    """
    read_config(folder)
    return read_architecture(folder, weights_only=True)


def model_of(checkpoint: Path, original: str | Path | None) -> Path:
    """The Hugging Face folder that says what model a Megatron checkpoint is of. Raises UserError."""
    if original is not None:
        return Path(original)
    inside = checkpoint / MODEL
    if not (inside / CONFIG).is_file():
        raise UserError(f"{checkpoint} does not say what model it is of; give its original with --hf.")
    return inside


def is_critic(source: MegatronCheckpoint | HfReader) -> bool:
    """Whether the weights are a critic's: in Hugging Face a token classification."""
    names = source.names()
    return _HF_HEAD in names or _MEGATRON_HEAD in names


def check_hf(reader: HfReader, weights: WeightMap, source: Path, values: bool) -> None:
    """Raise UserError unless the tensors of `source` are those of the map, which is a critic's with `values`.

    A critic may come from a policy, which has no value head and an output layer that it does not need.
    """
    if not values and is_critic(reader):
        raise UserError(f"{source} is a critic, with a head {_HF_HEAD}; give --values.")
    weights.check_hf_names(reader.names(), headless=values)
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if name in reader.names() and reader.spec(name).shape != tuple(shape):
                raise UserError(
                    f"{source} has {name} of shape {list(reader.spec(name).shape)}, and its {CONFIG} says "
                    f"{list(shape)}; use weights and config of one model."
                )
    check_repeated(reader, weights, source)


WRITTEN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be converted to, by name."""


def chosen(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None keeps each tensor's own. Raises UserError for an unknown one."""
    if name is None:
        return None
    if name not in WRITTEN:
        raise UserError(f"dtype is {name}; give one of {', '.join(WRITTEN)}.")
    return WRITTEN[name]


def name_of(dtype: torch.dtype) -> str:
    """As a config.json names it."""
    return str(dtype).removeprefix("torch.")


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another dtype, rounded to nearest. Raises UserError if a number becomes infinite, or counts."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if not tensor.is_floating_point():
        raise UserError(
            f"{name} is {name_of(tensor.dtype)}, which another dtype would not say the same in; leave --dtype out, "
            "or use weights that are not quantised."
        )
    made = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((made.isinf() & tensor.isfinite()).any()):
        raise UserError(f"{name} has numbers that {name_of(dtype)} cannot hold; give another --dtype.")
    return made


def most(specs: Iterable[TensorSpec]) -> torch.dtype:
    """The dtype that most bytes have: what a config calls that of the model."""
    counts: Counter[torch.dtype] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.nbytes
    return counts.most_common(1)[0][0]


def fingerprint(folder: Path, files: Iterable[Path]) -> list[Any]:
    """Where `folder` is, and name, bytes and time of change in ns of `files`, which are relative to `folder`.

    Contents are not read: that would take as long as converting them.
    """
    stats = {str(path): (folder / path).stat() for path in sorted(files)}
    return [str(folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]]
