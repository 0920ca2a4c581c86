"""Tests of conversion between Hugging Face and Megatron: exact round trips, dtypes, heads, refusals, resumption."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlsys.apps.convert.verify import verify
from rlsys.config.schema import ParallelConfig
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.convert.model_folder import info
from rlsys.weights.hf_io import INDEX, SINGLE
from tests.support.hf_models import (
    assert_same_logits,
    assert_same_tensors,
    json_of,
    logits_by_transformers,
    make_model,
    quantised,
    reconfigured,
    rewritten,
    tensors_of,
)
from tests.support.refusals import refused
from tests.support.tensors import begin_weights_at, raw


def round_trip(model: Path, parallel: ParallelConfig | None = None, **options: Any) -> Path:
    megatron, back = model.with_name(f"{model.name}-mg"), model.with_name(f"{model.name}-back")
    hf_to_megatron(model, megatron, parallel=parallel, processes=1, **options)
    megatron_to_hf(megatron, back, model, processes=1)
    return back


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"intermediate_size": 128}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 4, "layer_types": None}, "model.layers.3.input_layernorm.weight"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
    ],
    ids=["shapes", "layers", "tied"],
)
def test_weights_that_do_not_match_the_config_are_refused(changes: dict[str, object], key: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg")
    reconfigured(model, **changes)
    with refused("mismatch", key):
        hf_to_megatron(model, tmp_path / "out")
    with refused("mismatch", tmp_path / "mg"):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", model)
    for sides in ((tmp_path / "mg", model), (model, tmp_path / "mg")) if key == "lm_head.weight" else ():
        with refused("mismatch"):
            verify(*sides, hf=model, logits=False)
    assert not list(tmp_path.glob("*out*")), "nothing may be begun"


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", ParallelConfig(tp=4, pp=3)),  # the TP ranks outnumber the query groups
        ("llama-tied", ParallelConfig()),
        ("qwen2", ParallelConfig(tp=2)),
        ("qwen3", ParallelConfig(pp=3)),
        ("qwen3-moe", ParallelConfig(ep=2, tp=2, pp=3)),
    ],
)
def test_model_round_trip_is_bit_exact(family: str, parallel: ParallelConfig, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family)
    back = round_trip(model, parallel)
    assert_same_tensors(model, back)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / file).read_bytes() == (model / file).read_bytes(), file


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("offset", [4, 8, 40])
def test_weights_at_odd_alignments_are_converted_alike(offset: int, critic: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2", torch.float32, critic)
    odd, tokens = Path(shutil.copytree(model, tmp_path / "odd")), torch.arange(48)[None]
    begin_weights_at(offset, odd)
    with (odd / SINGLE).open("rb") as file:
        assert (8 + int.from_bytes(file.read(8), "little")) % 64 == offset
    assert_same_logits(*(logits_by_transformers(folder, tokens, critic) for folder in (odd, model)))
    assert_same_tensors(round_trip(odd, values=critic), model)


def test_missing_value_head_is_converted_as_zeros(tmp_path: Path) -> None:
    """A policy has no value head, and the head of a sequence classifier has no bias."""
    model = make_model(tmp_path / "model", "qwen2")
    back = round_trip(model, values=True)
    assert json_of(back / "config.json")["architectures"] == ["Qwen2ForTokenClassification"]
    before, after = tensors_of(model), tensors_of(back)
    assert before.keys() - after.keys() == {"lm_head.weight"}
    assert after.keys() - before.keys() == {"score.weight", "score.bias"}
    assert not logits_by_transformers(back, torch.arange(48)[None], critic=True).any()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name in before)

    critic = make_model(tmp_path / "critic", "qwen2", critic=True)
    with refused("missing", "--values"):
        hf_to_megatron(critic, tmp_path / "wrong")
    head = tensors_of(critic)["score.weight"].clone()
    after = tensors_of(round_trip(rewritten(critic, score__bias=None), values=True))
    assert torch.equal(after["score.bias"], torch.zeros(1).bfloat16())
    assert torch.equal(after["score.weight"], head)


def test_dtype_is_changed_on_request_in_either_direction(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", torch.float32)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors_of(model).items()}
    for there, back in (("bfloat16", None), (None, "bfloat16")):
        megatron, out = tmp_path / f"mg-{there}", tmp_path / f"back-{back}"
        hf_to_megatron(model, megatron, dtype=there, processes=1)
        megatron_to_hf(megatron, out, model, dtype=back, processes=1)
        after = tensors_of(out)
        assert after.keys() == rounded.keys()
        assert all(torch.equal(tensor, rounded[name]) for name, tensor in after.items())
        assert json_of(out / "config.json") == json_of(model / "config.json") | {"dtype": "bfloat16"}


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    gates = {name: tensor for name, tensor in tensors_of(model).items() if name.endswith("mlp.gate.weight")}
    rewritten(model, **{name.replace(".", "__"): gate.float() + 1e-7 for name, gate in gates.items()})
    assert len({tensor.dtype for tensor in tensors_of(model).values()}) == 2
    assert_same_tensors(model, round_trip(model))


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    norm = torch.ones(64).bfloat16()
    norm[3] = 1e6
    large = rewritten(make_model(tmp_path / "large"), model__norm__weight=norm)
    with refused("out_of_range", "--dtype"):
        hf_to_megatron(large, tmp_path / "out", dtype="float16", processes=1)
    whole = rewritten(make_model(tmp_path / "whole"), model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert_same_tensors(whole, round_trip(whole))
    with refused("unsupported", "--dtype"):
        hf_to_megatron(whole, tmp_path / "out2", dtype="float32", processes=1)


@pytest.mark.parametrize("remains", ["nothing", "all but its weights"])
def test_model_is_restored_without_the_original_weights(remains: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", shard_size="40KB")
    expected = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    hf_to_megatron(model, tmp_path / "mg")
    for file in model.iterdir() if remains == "nothing" else (*model.glob("*.safetensors"), model / INDEX):
        file.unlink()
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", None if remains == "nothing" else model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(tmp_path / "back").items())
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert not (tmp_path / "back" / INDEX).exists(), "the original's index lists other files"


def test_checkpoint_without_a_config_needs_the_original(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg", processes=1)
    for file in (tmp_path / "mg" / "hf").iterdir():
        file.unlink()
    for call in (lambda: verify(model, tmp_path / "mg"), lambda: megatron_to_hf(tmp_path / "mg", tmp_path / "out")):
        with refused("missing", "--hf"):
            call()
    assert info(tmp_path / "mg").architecture is None


def test_shards_are_no_larger_than_asked(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    hf_to_megatron(model, tmp_path / "mg")
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", model, shard_bytes=40_000, processes=1)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    sizes = {shard.name: 0 for shard in shards}
    for name, tensor in tensors_of(tmp_path / "back").items():
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert max(sizes.values()) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert_same_tensors(model, tmp_path / "back")


def test_repeated_embedding_must_have_the_same_shape_and_dtype(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2-tied")
    embedding = tensors_of(model)["model.embed_tokens.weight"]
    for other in (embedding[:-1], embedding.float(), embedding.view(-1)):
        with refused("mismatch", "lm_head.weight"):
            hf_to_megatron(rewritten(model, lm_head__weight=other), tmp_path / "out")
    hf_to_megatron(rewritten(model, lm_head__weight=embedding), tmp_path / "out")
    assert verify(model, tmp_path / "out", logits=False).same


def test_conversion_resumes_after_a_damaged_source_is_repaired(tmp_path: Path) -> None:
    """The converted model is written to a folder within the checkpoint."""
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg", parallel=ParallelConfig(pp=3), processes=1)
    last, out = sorted((tmp_path / "mg").glob("__2_*.distcp"))[-1], tmp_path / "mg" / "inner"
    whole, stat = last.read_bytes(), last.stat()
    last.write_bytes(bytes(len(whole)))
    os.utime(last, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with refused("malformed", last):
        megatron_to_hf(tmp_path / "mg", out, model, shard_bytes=5000, processes=1)
    last.write_bytes(whole)
    os.utime(last, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    outcome = megatron_to_hf(tmp_path / "mg", out, model, shard_bytes=5000, processes=1)
    assert 0 < outcome.kept < outcome.files
    assert_same_tensors(model, out)


def test_experts_in_mxfp4_come_back_as_what_transformers_makes_of_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "gpt-oss", shard_size="1GB")
    names = load_file(model / SINGLE).keys()
    given = load_file(quantised(model) / SINGLE)
    hf_to_megatron(model, tmp_path / "mg", processes=1)
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", processes=1)
    found = load_file(tmp_path / "back" / SINGLE)
    assert found.keys() == names
    for name, tensor in found.items():
        blocks, scales = (given.get(f"{name}_{part}") for part in ("blocks", "scales"))
        expected = given[name] if blocks is None else convert_moe_packed_tensors(blocks, scales)
        assert raw(tensor) == raw(expected), name
    for folder in (tmp_path / "mg" / "hf", tmp_path / "back"):
        assert json_of(folder / "config.json") == {
            key: value for key, value in json_of(model / "config.json").items() if key != "quantization_config"
        }
    assert logits_by_transformers(tmp_path / "back", torch.arange(9)[None]).isfinite().all()
