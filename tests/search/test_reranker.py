"""Against sentence-transformers' CrossEncoder and plain transformers, on tiny models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, RobertaConfig
from transformers import RobertaForSequenceClassification as Roberta

from rlsys.search.encoders.encoder import Reranker
from tests.search.tiny_encoders import SHAPE, save
from tests.support.refusals import refused

SHARP = SHAPE | {"initializer_range": 0.5}
"""So that scores of pairs differ."""
PAIRS = [
    ("capital of Mali", "Bamako is the capital of Mali."),
    ("capital of Mali", "Lima is the capital of Peru. " * 80),
    ("", ""),
    ("why " * 300, "because " * 300),
    ("Zürich", "東京 🗼"),
]


def tiny(folder: Path, labels: int = 1, **extra: Any) -> str:
    torch.manual_seed(0)
    return save(BertForSequenceClassification(BertConfig(**SHARP, num_labels=labels, **extra)), folder)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
    ids=["nowhere", "as of old", "as of today"],
)
def test_scores_are_those_of_cross_encoder_with_the_activation_that_config_json_names(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    folder = tiny(tmp_path, **named)
    expected = CrossEncoder(folder, device="cpu").predict(PAIRS)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)


def test_an_activation_that_sentence_transformers_saved_holds(tmp_path: Path) -> None:
    model = CrossEncoder(tiny(tmp_path / "plain"), activation_fn=torch.nn.Identity(), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    scores = Reranker.load(str(tmp_path / "saved")).scores(PAIRS)
    np.testing.assert_allclose(scores, model.predict(PAIRS), atol=1e-5)


def test_the_score_of_two_labels_is_the_probability_of_the_second(tmp_path: Path) -> None:
    folder = tiny(tmp_path, labels=2)
    logits = CrossEncoder(folder, device="cpu").predict(PAIRS)
    expected = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)


def test_a_model_without_token_types_is_asked_without_them_and_pairs_are_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Roberta(RobertaConfig(**SHARP, num_labels=1, pad_token_id=0, max_position_embeddings=65)).eval()
    folder = save(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(folder)
    scores = Reranker.load(folder, max_tokens=64).scores(PAIRS)
    for (query, passage), score in zip(PAIRS, scores, strict=True):
        tokens = tokenizer([query], [passage], return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            logit = model(**tokens).logits
        assert score == pytest.approx(float(logit.sigmoid()), abs=1e-5)
    with refused("out_of_range", "max_tokens"):
        Reranker.load(folder, max_tokens=65)


def test_no_pairs_and_pairs_that_are_no_text_are_scored(tmp_path: Path) -> None:
    reranker = Reranker.load(tiny(tmp_path))
    assert reranker.scores([]) == []
    assert reranker.scores([("a\udc80", "\x00")]) == pytest.approx(reranker.scores([("a?", "")]), abs=1e-6)


def test_what_is_no_reranker_is_refused(tmp_path: Path) -> None:
    tanh = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    three, other = tiny(tmp_path / "three", labels=3), tiny(tmp_path / "tanh", sentence_transformers=tanh)
    for name, code in (("minilm", "mismatch"), (three, "unsupported"), (other, "unsupported")):
        with refused(code, name):  # type: ignore[arg-type]
            Reranker.load(name)
