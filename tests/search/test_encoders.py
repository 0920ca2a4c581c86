"""Tests of encoders and rerankers against transformers, and of shared forward passes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

from rlsys.errors import Code
from rlsys.search.encoders.encoder import Batch, Encoder, Lines, PassCost, Reranker, plan, shares_lines
from rlsys.search.encoders.spec import family_of_name
from tests.search.tiny_encoders import SHAPE, bert, minilm_vectors, outputs_of, save
from tests.support.refusals import refused

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


def assert_encodes(encoder: Encoder, query_prefix: str, passage_prefix: str, expected: Callable[[str], Array]) -> None:
    """Check that each query and passage gets the vector `expected(text)` of its text with the prefix."""
    for prefix, encode in ((query_prefix, encoder.encode_queries), (passage_prefix, encoder.encode_passages)):
        for text, vector in zip(TEXTS, encode(TEXTS), strict=True):
            np.testing.assert_allclose(vector, expected(prefix + text), rtol=1e-5, atol=1e-5)


def test_minilm_equals_transformers(encoder: Encoder) -> None:
    reference = minilm_vectors(TEXTS)
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
        states = outputs_of(model, text).last_hidden_state[0].numpy()
        pooled = states[0] if cls else states.mean(axis=0)
        return pooled / np.linalg.norm(pooled) if normalize else pooled

    assert_encodes(Encoder.load(str(tmp_path / f"my-{family}-small")), *prefixes, expected)


MODULES = {
    "": "sentence_transformers.base.modules.transformer.Transformer",
    "1_Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "2_Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
"""Folder -> class, as sentence-transformers 6.2.0 writes them to modules.json."""


@pytest.mark.parametrize(("pooling", "normalize"), [("cls", False), ("lasttoken", True)])
def test_a_folder_of_sentence_transformers_is_read_as_its_files_say(
    model: BertModel, saved: str, tmp_path: Path, pooling: str, normalize: bool
) -> None:
    """The files are those that sentence-transformers 6.2.0 writes beside the weights."""
    folder = Path(shutil.copytree(saved, tmp_path / "nameless"))
    modules = [(path, kind) for path, kind in MODULES.items() if normalize or path != "2_Normalize"]
    rows = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(rows))
    prompts = {"document": "say: ", "query": "ask: "}
    described = {"model_type": "SentenceTransformer", "default_prompt_name": None, "prompts": prompts}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(described))
    pooled = {"embedding_dimension": 16, "pooling_mode": pooling, "include_prompt": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooled))

    def expected(text: str) -> Array:
        vector = outputs_of(model, text).last_hidden_state[0, 0 if pooling == "cls" else -1].numpy()
        return vector / np.linalg.norm(vector) if normalize else vector

    assert_encodes(Encoder.load(str(folder)), "ask: ", "say: ", expected)


def test_files_of_sentence_transformers_that_contradict_the_name_are_refused(copy: Path) -> None:
    modules, pooling = copy / "modules.json", copy / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    parts = {"Transformer": ".", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules.write_text(json.dumps([{"type": f"st.{kind}", "path": path} for kind, path in parts.items()]))
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with refused("conflict", "family"):
        Encoder.load(str(copy))
    assert Encoder.load(str(copy), "e5").facts.family.pooling == "mean"
    assert Encoder.load(str(copy), "sentence-transformers").facts.family.pooling == "cls"
    pooling.write_text(json.dumps({"pooling_mode": ["mean", "max"]}))
    with refused("unsupported", pooling):
        Encoder.load(str(copy))
    modules.write_text("{")
    with refused("malformed", modules):
        Encoder.load(str(copy))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/e5-mistral-7b-instruct", "e5-mistral-instruct"),
        ("facebook/dpr-ctx_encoder-single-nq-base", "dpr"),
        ("someone/bge-e5", None),
        ("e5/none", None),
        ("someone/e5base", None),
    ],
)
def test_the_family_is_recognised_by_whole_words_of_the_name(name: str, family: str | None) -> None:
    assert family_of_name(name) == family


def test_each_setting_of_the_family_can_be_overridden(model: BertModel, saved: str) -> None:
    encoder = Encoder.load(saved, "e5", pooling="last", query_prefix="q ", passage_prefix="", normalize=False)
    assert_encodes(encoder, "q ", "", lambda text: outputs_of(model, text).last_hidden_state[0, -1].numpy())


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({"device": "cuda:2"}, "no_room", "device"),
        ({"device": "tpu"}, "unknown", "device"),
        ({"dtype": "int8"}, "unknown", "dtype"),
        ({"family": "auto"}, "missing", "family"),
        ({"family": "sentence-transformers"}, "not_found", None),
        ({"pooling": "max"}, "unknown", "pooling"),
        ({"max_tokens": 513}, "out_of_range", "max_tokens"),
    ],
)
def test_settings_that_the_model_or_machine_lacks_are_refused(
    saved: str, options: dict[str, Any], code: Code, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused(code, key):
        Encoder.load(saved, **{"family": "e5"} | options)


@pytest.mark.parametrize(("architecture", "projection"), [(DPRContextEncoder, 0), (DPRQuestionEncoder, 8)])
def test_both_dpr_encoders_load_their_own_weights(tmp_path: Path, architecture: Any, projection: int) -> None:
    torch.manual_seed(0)
    dpr = architecture(DPRConfig(**SHAPE, projection_dim=projection))
    encoder = Encoder.load(save(dpr, tmp_path / "encoder"), "dpr")
    assert encoder.facts.dimension == (projection or 16)
    assert_encodes(encoder, "", "", lambda text: outputs_of(dpr, text).pooler_output[0].numpy())


def resize(**changes: int) -> Callable[[Path], None]:
    return lambda folder: BertConfig(**SHAPE | changes).save_pretrained(folder)


def rewrite_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def remove_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (resize(num_hidden_layers=3), "mismatch"),
        (resize(hidden_size=32), "mismatch"),
        (rewrite_weights(lambda whole: whole[:100]), "malformed"),
        (remove_vocabulary, "not_found"),
        (lambda folder: (folder / "config.json").unlink(), "malformed"),
        (lambda folder: BertForSequenceClassification(BertConfig(**SHAPE)).save_pretrained(folder), "unsupported"),
    ],
    ids=["deeper", "wider", "cut", "no vocabulary", "no config", "reranker"],
)
def test_an_incomplete_encoder_folder_is_refused(copy: Path, damage: Any, code: Code) -> None:
    damage(copy)
    with refused(code, copy):
        Encoder.load(str(copy))


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


def logits_of(folder: str) -> Array:
    """Logits [pairs, labels] of PAIRS by transformers, one pair at a time."""
    model = BertForSequenceClassification.from_pretrained(folder)
    return np.array([outputs_of(model, *pair, max_length=512).logits[0].numpy() for pair in PAIRS])


@pytest.mark.parametrize(
    ("named", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
    ],
    ids=["none", "old key", "new key"],
)
def test_scores_are_logits_with_the_activation_in_config_json(
    tmp_path: Path, named: dict[str, Any], sigmoid: bool
) -> None:
    """The two keys of config.json, and a sigmoid without either, are those of sentence-transformers' CrossEncoder."""
    folder = tiny(tmp_path, **named)
    expected = logits_of(folder)[:, 0]
    expected = 1 / (1 + np.exp(-expected)) if sigmoid else expected
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)
    assert Reranker.load(folder).scores([]) == []


def test_the_score_of_two_labels_is_the_probability_of_the_second(tmp_path: Path) -> None:
    folder = tiny(tmp_path, labels=2)
    logits = logits_of(folder)
    expected = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    np.testing.assert_allclose(Reranker.load(folder).scores(PAIRS), expected, atol=1e-5)


def test_models_that_are_no_rerankers_are_refused(tmp_path: Path) -> None:
    tanh = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    three, other = tiny(tmp_path / "three", labels=3), tiny(tmp_path / "tanh", sentence_transformers=tanh)
    cases: list[tuple[str, Code]] = [("minilm", "mismatch"), (three, "unsupported"), (other, "unsupported")]
    for name, code in cases:
        with refused(code, name):
            Reranker.load(name)


def test_learned_positions_begin_after_the_padding_row(tmp_path: Path) -> None:
    config = RobertaConfig(**SHARP, num_labels=1, pad_token_id=0, max_position_embeddings=65)
    folder = save(RobertaForSequenceClassification(config), tmp_path)
    assert np.isfinite(Reranker.load(folder, max_tokens=64).scores(PAIRS)).all()
    with refused("out_of_range", "max_tokens"):
        Reranker.load(folder, max_tokens=65)


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
