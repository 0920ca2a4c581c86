"""Text to vectors: one way to load models, and one to run the dense encoders of every family.

Invariant: a vector depends on its text alone, not (beyond rounding) on what it is batched with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from rlsys.errors import UserError
from rlsys.search.encoders.packing import Batch, Lines, clean, pass_cost, plan, shares_lines
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Family, Floats, Pooling, resolve_folder

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with the tokenizer that belongs to it."""

    folder: Path
    model: Any
    tokenizer: Any
    checksum: str
    """SHA-256 over the SHA-256 of each weight file, in the order of their paths, in hex."""


class Encoder:
    """A loaded encoder. Not safe to call from two threads at once."""

    def __init__(self, name: str, family_name: str, family: Family, loaded: LoadedModel, max_tokens: int) -> None:
        self._tokenizer, self._model, config = loaded.tokenizer, loaded.model, loaded.model.config
        projection = getattr(config, "projection_dim", 0) if family.pooling is Pooling.POOLER else 0
        dimension = int(projection or config.hidden_size)
        self.facts = EncoderFacts(name, family_name, family, max_tokens, dimension, loaded.checksum)

    @classmethod
    def load(cls, name: str, family: str = "auto", **options: Any) -> Encoder:
        """Load `EncoderSpec(name, family, **options)`.

        Raises UserError for what is unknown, and for weights that do not fill the model.
        """
        spec = EncoderSpec(name, family, **options)
        folder = resolve_folder(name)
        family_name, resolved = spec.resolve_family(folder)
        dispensable = None if resolved.pooling is Pooling.POOLER else "pooler"
        loaded = load_model(name, _architecture(name, folder), spec.max_tokens, spec.device, spec.dtype, dispensable)
        return cls(name, family_name, resolved, loaded, spec.max_tokens)

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`, the query prefix put before each."""
        return self._encode([self.facts.family.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`, the passage prefix put before each."""
        return self._encode([self.facts.family.passage_prefix + text for text in texts])

    def close(self) -> None:
        """Nothing to give back: the weights go with the last reference to them."""

    def _encode(self, texts: list[str]) -> Floats:
        vectors = np.empty((len(texts), self.facts.dimension), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(clean(texts), truncation=True, max_length=self.facts.max_tokens)["input_ids"]
        # A model needs a token, and some tokenizers make none of an empty text.
        tokens = [ids or [self._tokenizer.pad_token_id] for ids in tokens]
        share = self.facts.family.pooling is not Pooling.POOLER and shares_lines(self._model)
        for lines in plan(list(map(len, tokens)), pass_cost(self._model.device), share=share):
            vectors[[row for line in lines for row in line]] = self._forward(tokens, lines)
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[Sequence[int]], lines: Lines) -> Floats:
        """[rows, dimension], the vectors of the rows of `lines` in their order."""
        family = self.facts.family
        batch = Batch.of([[tokens[row] for row in line] for line in lines], self._tokenizer.pad_token_id or 0)
        output = self._model(**batch.inputs(self._model.device))
        if family.pooling is Pooling.POOLER:
            pooled = output.pooler_output.float()
        else:
            pool = {Pooling.CLS: batch.first, Pooling.LAST: batch.last, Pooling.MEAN: batch.mean}[family.pooling]
            pooled = pool(output.last_hidden_state.float())
        if family.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def _architecture(name: str, folder: Path) -> Any:
    """The class to load. AutoModel takes every DPR model for a question encoder, so its class is named here."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model {name!r} cannot be loaded from {folder}: {_first_line(error)}") from error
    named = config.architectures or []
    if any("SequenceClassification" in architecture for architecture in named):
        raise UserError(f"model {name!r} scores pairs ({named[0]}): it is a reranker and gives no vectors")
    return transformers.DPRContextEncoder if "DPRContextEncoder" in named else transformers.AutoModel


def load_model(
    name: str, architecture: Any, max_tokens: int, device: str, dtype: str | None, dispensable: str | None = None
) -> LoadedModel:
    """Load what `architecture` (a transformers class with from_pretrained) makes of the folder of `name`.

    Weights that the files lack are refused with UserError, but for those with `dispensable` in their name. So is what
    the model cannot take: `max_tokens` beyond its positions, an unknown device or dtype.
    """
    place = _resolve_device(device)
    if dtype not in (None, *_DTYPES):
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(_DTYPES)}")
    precision = _DTYPES[dtype or ("float32" if place.type == "cpu" else "float16")]
    folder = resolve_folder(name)
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Sizes that do not match are refused below, in a sentence that says which.
        model, info = architecture.from_pretrained(
            folder, dtype=precision, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model {name!r} cannot be loaded from {folder}: {_first_line(error)}") from error
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
        # Weights stored input by input let a short text alone take a sixth less time (MKL, one core).
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()
    return LoadedModel(folder, model, tokenizer, _weights_checksum(folder))


def _resolve_device(device: str) -> torch.device:
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is unknown: give cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if resolved.type == "cuda" else 0
    if resolved.type == "cuda" and count <= (resolved.index or 0):
        sees = f"only cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise UserError(
            f"device {device}: torch sees {sees}; give another device, or check the driver (`nvidia-smi`), "
            "CUDA_VISIBLE_DEVICES and that torch is built for CUDA"
        )
    return resolved


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _positions(model: torch.nn.Module) -> list[int]:
    """Tokens that each table of learned positions has room for; one with padding counts from behind it."""
    return [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and path.endswith("position_embeddings")
    ]


def _weights_checksum(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
