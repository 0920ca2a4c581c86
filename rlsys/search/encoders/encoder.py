"""Text to vectors: one way to run the dense encoders of every family.

Invariant: a vector depends on its text alone, not (beyond rounding) on what it is batched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from rlsys.errors import UserError
from rlsys.search.encoders.batching import budget_tokens, clean, length_buckets, mask_of, pad
from rlsys.search.encoders.families import Family, Overrides, Pooling, resolve_family
from rlsys.search.encoders.loading import Loaded, first_line, load, resolve_folder

__all__ = ["Encoder", "Floats", "length_buckets"]

Floats = NDArray[np.float32]


class Encoder:
    """A loaded encoder. Not safe to call from two threads at once."""

    def __init__(self, name: str, family_name: str, family: Family, loaded: Loaded, max_tokens: int) -> None:
        self.name = name
        self.family_name = family_name
        self.family = family
        self.max_tokens = max_tokens
        self.checksum = loaded.checksum
        """SHA-256 of the weight files, in hex: two encoders of one name may still differ."""
        self._tokenizer = loaded.tokenizer
        self._model = loaded.model

    @classmethod
    def load(
        cls,
        name: str,
        family: str = "auto",
        *,
        max_tokens: int = 256,
        device: str = "cpu",
        dtype: str | None = None,
        pooling: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        normalize: bool | None = None,
    ) -> Encoder:
        """Load `minilm`, a Hugging Face folder, or a model that is in the local Hugging Face cache.

        `max_tokens` cuts queries and passages, prefix and special tokens included. `dtype` (float32, float16,
        bfloat16) is float16 on a GPU and float32 on a CPU unless given; vectors are float32 always. bfloat16 on a
        CPU with AMX takes half to a quarter of the time and moves MiniLM's components by up to 3e-3. `pooling`,
        the prefixes and `normalize` stand in for the family's. Raises UserError for what is unknown, and for
        weights that do not fill the model.
        """
        folder = resolve_folder(name)
        overrides = Overrides(pooling, query_prefix, passage_prefix, normalize)
        family_name, resolved = resolve_family(name, folder, family, overrides)
        loaded = load(
            name,
            _architecture(name, folder),
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            dispensable=None if resolved.pooling is Pooling.POOLER else "pooler",
        )
        return cls(name, family_name, resolved, loaded, max_tokens)

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
        tokens = self._tokenizer(clean(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        # A model needs a token, and some tokenizers make none of an empty text.
        tokens = [ids or [self._tokenizer.pad_token_id] for ids in tokens]
        for rows in length_buckets([len(ids) for ids in tokens], budget_tokens(self._model.device)):
            vectors[rows] = self._forward([tokens[row] for row in rows])
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: list[list[int]]) -> Floats:
        device = self._model.device
        # Padding comes after the text whatever the tokenizer's side: a causal model then never sees it.
        ids = pad(tokens, self._tokenizer.pad_token_id or 0).to(device)
        mask = mask_of([len(sequence) for sequence in tokens]).to(device)
        output = self._model(input_ids=ids, attention_mask=mask)
        pooled = _pool(output, mask, self.family.pooling)
        if self.family.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def _pool(output: Any, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """[batch, seq, dim] states -> [batch, dim] float32; `mask` [batch, seq] is 1 where there is a token."""
    if pooling is Pooling.POOLER:
        return output.pooler_output.float()
    states = output.last_hidden_state.float()
    if pooling is Pooling.CLS:
        return states[:, 0]
    lengths = mask.sum(dim=1)
    if pooling is Pooling.LAST:
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    return (states * mask.unsqueeze(-1)).sum(dim=1) / lengths.unsqueeze(-1)


def _architecture(name: str, folder: Path) -> Any:
    """The class to load. AutoModel takes every DPR model for a question encoder, so its class is named here."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model {name!r} cannot be loaded from {folder}: {first_line(error)}") from error
    named = config.architectures or []
    if any("SequenceClassification" in architecture for architecture in named):
        raise UserError(f"model {name!r} scores pairs ({named[0]}): it is a reranker and gives no vectors")
    return transformers.DPRContextEncoder if "DPRContextEncoder" in named else transformers.AutoModel
