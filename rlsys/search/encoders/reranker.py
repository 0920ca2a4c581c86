"""Pairs to scores: cross-encoders, which read a query and a passage together.

Scores are those of sentence-transformers' CrossEncoder with one label: the logit through the activation that the
model's files name (sigmoid or none), through the sigmoid where they name none. Two labels (not relevant, relevant)
become one logit first, the second less the first, whose sigmoid is the probability of the second label.

Invariant: a score depends on its pair alone, not (beyond rounding) on what it is batched with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from rlsys.errors import UserError
from rlsys.search.encoders.encoder import LoadedModel, load_model
from rlsys.search.encoders.packing import clean, length_buckets, pass_cost
from rlsys.search.encoders.spec import read_json


class Reranker:
    """A loaded cross-encoder. Not safe to call from two threads at once."""

    def __init__(self, name: str, loaded: LoadedModel, max_tokens: int) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self.checksum = loaded.checksum
        """SHA-256 of the weight files, in hex."""
        self._tokenizer = loaded.tokenizer
        self._model = loaded.model
        self._sigmoid = _has_sigmoid(name, loaded)

    @classmethod
    def load(cls, name: str, *, max_tokens: int = 512, device: str = "cpu", dtype: str | None = None) -> Reranker:
        """Load a Hugging Face folder, or a model that is in the local Hugging Face cache.

        `max_tokens` cuts pairs, the longer of the two first, special tokens included. `dtype` (float32, float16,
        bfloat16) is float16 on a GPU and float32 on a CPU unless given. Raises UserError for what is unknown, for
        weights that do not fill the model, and for a model of more than two labels.
        """
        architecture = transformers.AutoModelForSequenceClassification
        loaded = load_model(name, architecture, max_tokens, device, dtype)
        labels = loaded.model.config.num_labels
        if labels > 2:
            raise UserError(f"model {name!r} has {labels} labels: a reranker has one, or two (no and yes)")
        return cls(name, loaded, max_tokens)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The score of each (query, passage), higher is better; in [0, 1] if the activation is sigmoid."""
        if not pairs:
            return []
        queries, passages = (clean(side) for side in zip(*pairs, strict=True))
        limits = {"truncation": True, "max_length": self.max_tokens}
        columns = self._tokenizer(queries, passages, **limits, return_attention_mask=False)
        scores = np.empty(len(pairs))
        lengths = [len(ids) for ids in columns["input_ids"]]
        for rows in length_buckets(lengths, pass_cost(self._model.device)):
            scores[rows] = self._forward({name: [column[row] for row in rows] for name, column in columns.items()})
        as_list: list[float] = scores.tolist()
        return as_list

    def describe(self) -> Mapping[str, Any]:
        """Name, checksum, cut and activation."""
        activation = "sigmoid" if self._sigmoid else "none"
        model = {"reranker": self.name, "reranker_sha256": self.checksum}
        return {**model, "max_tokens": self.max_tokens, "activation": activation}

    @torch.inference_mode()
    def _forward(self, columns: Mapping[str, list[list[int]]]) -> np.ndarray[Any, Any]:
        device = self._model.device
        fillers = {"input_ids": self._tokenizer.pad_token_id or 0}
        columns = {**columns, "attention_mask": [[1] * len(ids) for ids in columns["input_ids"]]}
        inputs = {name: _padded(column, fillers.get(name, 0)).to(device) for name, column in columns.items()}
        logits = self._model(**inputs).logits.float()
        logit = logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        return (logit.sigmoid() if self._sigmoid else logit).cpu().numpy()


def _padded(sequences: list[list[int]], filler: int) -> torch.Tensor:
    """[batch, longest] int64: each sequence from the left, `filler` after its end."""
    return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, sequences)), batch_first=True, padding_value=filler)


def _has_sigmoid(name: str, loaded: LoadedModel) -> bool:
    """True unless the files name another activation, in any of the three places that CrossEncoder has put it."""
    config, beside = loaded.model.config, loaded.folder / "config_sentence_transformers.json"
    named = (
        (read_json(beside) if beside.is_file() else {}).get("activation_fn")
        or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or "Sigmoid"
    )
    kind = str(named).rsplit(".", 1)[-1]
    if kind not in ("Sigmoid", "Identity"):
        raise UserError(f"model {name!r} has the activation {named}: only Sigmoid and Identity are supported")
    return kind == "Sigmoid"
