"""Hugging Face folders are read as transformers writes them, and written so that it reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rlsys.errors import UserError
from rlsys.weights.families import read_architecture
from rlsys.weights.hf_io import HfReader, write_hf


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint made by transformers."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text('{"hello": 1}')
    return folder


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    reader = HfReader(folder)
    for name in sorted(reader.names()):
        yield name, reader.get(name)


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_what_is_written_is_what_was_read(original: Path, tmp_path: Path, shard_bytes: int) -> None:
    out = tmp_path / "out"
    write_hf(_tensors(original), out, original, shard_bytes)
    shards = list(out.glob("*.safetensors"))
    assert (len(shards) == 1) == (shard_bytes == 10**9)
    # 8 bytes of length and a JSON header come before the tensors.
    assert all(shard.stat().st_size <= shard_bytes + 4000 for shard in shards)
    expected = AutoModelForCausalLM.from_pretrained(original).state_dict()
    actual = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == torch.bfloat16
        assert torch.equal(actual[name], tensor), name
    assert (out / "tokenizer.json").read_text() == '{"hello": 1}'
    assert read_architecture(out) == read_architecture(original)


def test_the_written_config_names_the_written_dtype(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf(((name, tensor.float()) for name, tensor in _tensors(original)), out, original)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_failed_write_leaves_nothing_behind(original: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "model.norm.weight", torch.zeros(3)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        write_hf(broken(), tmp_path / "out", original)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(original: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        write_hf(_tensors(original), original, original)


def test_folders_that_are_no_model_are_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        read_architecture(tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        HfReader(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        HfReader(tmp_path).get("a")
    config = json.loads((original / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(UserError, match="model_type is gpt2"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is linear",
        ),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(
    original: Path, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    config = json.loads((original / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=sentence):
        read_architecture(tmp_path)
