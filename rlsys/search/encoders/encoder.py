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

from rlsys.errors import UserError
from rlsys.search.encoders.batching import clean, pass_cost
from rlsys.search.encoders.families import Family, Overrides, Pooling, resolve_family
from rlsys.search.encoders.files import resolve_folder
from rlsys.search.encoders.loading import Loaded, first_line, load
from rlsys.search.encoders.packing import Batch, Lines, plan, shares_lines
from rlsys.search.encoders.spec import EncoderFacts, Floats


class Encoder:
    """A loaded encoder. Not safe to call from two threads at once."""

    def __init__(self, name: str, family_name: str, family: Family, loaded: Loaded, max_tokens: int) -> None:
        self._tokenizer = loaded.tokenizer
        self._model = loaded.model
        dimension = _dimension(self._model, family.pooling)
        self.facts = EncoderFacts(name, family_name, family, max_tokens, dimension, loaded.checksum)

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
        batch = Batch.of([[tokens[row] for row in line] for line in lines], self._tokenizer.pad_token_id or 0)
        pooled = _pool(self._model(**batch.inputs(self._model.device)), batch, self.facts.family.pooling)
        if self.facts.family.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def _dimension(model: Any, pooling: Pooling) -> int:
    projection = getattr(model.config, "projection_dim", 0) if pooling is Pooling.POOLER else 0
    return int(projection or model.config.hidden_size)


def _pool(output: Any, batch: Batch, pooling: Pooling) -> torch.Tensor:
    """[texts, dim] float32 of the states of `batch`."""
    if pooling is Pooling.POOLER:
        return output.pooler_output.float()
    states = output.last_hidden_state.float()
    if pooling is Pooling.CLS:
        return batch.first(states)
    return batch.last(states) if pooling is Pooling.LAST else batch.mean(states)


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
