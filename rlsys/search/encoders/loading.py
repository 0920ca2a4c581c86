"""Models from disk: which folder, on which device, with all their weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from rlsys.errors import UserError
from rlsys.search.encoders.files import resolve_folder

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, with the tokenizer that belongs to it."""

    folder: Path
    model: Any
    tokenizer: Any
    checksum: str
    """SHA-256 of the weight files, in hex: two models of one name may still differ."""


def resolve_device(device: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`. Raises UserError for another name or a GPU that torch does not see."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is unknown: give cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and count <= (found.index or 0):
        sees = f"only cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise UserError(
            f"device {device}: torch sees {sees}; give another device, or check the driver (`nvidia-smi`), "
            "CUDA_VISIBLE_DEVICES and that torch is built for CUDA"
        )
    return found


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """What weights are held and multiplied in; None is float16 on a GPU and float32 on a CPU."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in _DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def load(
    name: str,
    architecture: Any,
    *,
    max_tokens: int,
    device: str,
    dtype: str | None,
    dispensable: str | None = None,
) -> Loaded:
    """Load what `architecture` (a transformers class with from_pretrained) makes of the folder of `name`.

    Weights that the files lack are refused with UserError, but for those with `dispensable` in their name.
    So is what the model cannot take: `max_tokens` beyond its positions, an unknown device or dtype.
    """
    place = resolve_device(device)
    precision = resolve_dtype(dtype, place)
    folder = resolve_folder(name)
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, info = architecture.from_pretrained(
            folder,
            dtype=precision,
            output_loading_info=True,
            # Refused below, in a sentence that says which.
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model {name!r} cannot be loaded from {folder}: {first_line(error)}") from error
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    lacking = {key for key in lacking if dispensable is None or dispensable not in key}
    if lacking:
        raise UserError(
            f"model {name!r} lacks {len(lacking)} weights, {min(lacking)} among them: "
            f"check that {folder} holds the model that its config.json names"
        )
    # Without a vocabulary transformers makes a tokenizer that takes every word for unknown.
    files = sorted(tokenizer.vocab_files_names.values())
    if not any((folder / file).is_file() for file in files):
        raise UserError(f"model {name!r} has no tokenizer: {folder} holds none of {', '.join(files)}")
    most = min([tokenizer.model_max_length, *_positions(model)])
    if not 1 <= max_tokens <= most:
        raise UserError(f"max_tokens {max_tokens} is out of range: model {name!r} takes 1 to {most}")
    model.config.use_cache = False
    model = model.eval().to(place)
    if place.type == "cpu":
        _lay_out_by_input(model)
    return Loaded(folder, model, tokenizer, weights_checksum(folder))


def first_line(error: Exception) -> str:
    """What an error says, without the paragraphs after it."""
    return str(error).strip().partition("\n")[0]


def _positions(model: torch.nn.Module) -> list[int]:
    """Tokens that each table of learned positions has room for; one with padding counts from behind it."""
    return [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and path.endswith("position_embeddings")
    ]


def _lay_out_by_input(model: torch.nn.Module) -> None:
    """Store the weights of linear layers input by input: a short text alone then takes a sixth less time.

    Values and shapes stay as they are. Measured with MKL on one core; for larger batches it is all one.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def weights_checksum(folder: Path) -> str:
    """SHA-256 over the SHA-256 of each weight file in `folder`, in the order of their paths, in hex."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
