"""What belongs to a Hugging Face model besides its weights: config, tokenizer, generation config, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlsys.errors import UserError

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
_TEMPLATES = "additional_chat_templates"
"""The one folder that transformers keeps beside a tokenizer."""
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
        changed[key] = str(dtype).removeprefix("torch.")
    if values:
        changed |= _of_one_label(config.get("architectures") or [])
    if changed != config:
        (folder / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _of_one_label(architectures: Sequence[str]) -> Mapping[str, Any]:
    # transformers counts labels by these, not by a num_labels.
    labels: dict[str, Any] = {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
    named = [name.replace(_POLICY, _CRITIC) for name in architectures]
    return labels | ({"architectures": named} if named else {})
