"""Tests that a family can be one file of one's own, and that its mistakes are named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from rlsys.errors import Code
from rlsys.weights.weight_map import RopeScaling, WeightMap, architecture_of, rotary_dims
from tests.support.refusals import refused
from tests.weights.published import LLAMA_8B


def own_family(folder: Path, text: str) -> str:
    (folder / "own.yaml").write_text(text)
    return str(folder / "own.yaml")


def test_family_of_ones_own_is_one_file(tmp_path: Path) -> None:
    """A file changes fields, tensors and supported keys of a model of any type; the built-in families stay."""
    own = own_family(
        tmp_path,
        "extends: llama\nconfig: {qkv_bias: [with_bias, true]}\nonly: {mlp_bias: null, odd: {values: [1], else: oddness}}",
    )
    config = LLAMA_8B | {"model_type": "made-up", "mlp_bias": True}
    found = architecture_of(config, own)
    assert (found.family, found.qkv_bias, found.rope) == (own, True, RopeScaling(8.0, 1.0, 4.0, 8192))
    names = WeightMap(found).hf_names()
    assert names - WeightMap(architecture_of(LLAMA_8B)).hf_names() == {
        f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(32) for part in "qkv"
    }
    assert architecture_of(config | {"mlp_bias": False}, "qwen2").qkv_bias, "a built-in family can be named too"
    with refused("unsupported", "odd"):
        architecture_of(config | {"odd": 2}, own)
    with refused("unsupported", "model_type"):
        architecture_of(config)


@pytest.mark.parametrize(
    ("text", "code", "key"),
    [
        ("a: [", "malformed", "own.yaml"),
        ("[]", "wrong_type", ""),
        ("layers: 3", "unknown", "layers"),
        ("extends: gpt2", "unknown", "extends"),
        ("extends: [qwen2]", "unknown", "extends"),
        ("layer_spec: 3", "wrong_type", "layer_spec"),
        ("layer_spec: {interleaved: true}", "wrong_type", "layer_spec"),
        ("config: 3", "wrong_type", "config"),
        ("config: {layers_of_it: n}", "unknown", "config.layers_of_it"),
        ("config: {layers: {n: 3}}", "wrong_type", "config.layers"),
        ("config: {layers: null}", "missing", "config.layers"),
        ("only: {hidden_act: [silu]}", "wrong_type", "only.hidden_act"),
        ("only: {hidden_act: {values: [silu]}}", "missing", "only.hidden_act.else"),
        ("only: {hidden_act: {values: silu, else: no}}", "wrong_type", "only.hidden_act.values"),
        ("tensors: {a.b: [c]}", "wrong_type", "tensors.a.b"),
        ("tensors: {a.b: {hf: {c: [hidden]}}}", "missing", "tensors.a.b.cut"),
        ("tensors: {a.b: {cut: whole}}", "missing", "tensors.a.b.hf"),
        ("tensors: {a.b: {cut: diagonal, hf: {c: [hidden]}}}", "unknown", "tensors.a.b.cut"),
        ("tensors: {a.b: {cut: whole, hf: {c: [hidden]}, size: 3}}", "unknown", "tensors.a.b.size"),
        ("tensors: {a.b: {cut: whole, hf: {c: [hidden]}, when: tuesday}}", "unknown", "tensors.a.b.when"),
        ("tensors: {a.b: {cut: whole, hf: {c: [hidden]}, tied: a.c}}", "unknown", "tensors.a.b.tied"),
        ("tensors: {a.b: {cut: whole, hf: {c: [width]}}}", "unknown", "tensors.a.b.hf.c"),
        ("tensors: {a.b: {cut: whole, hf: {c: hidden}}}", "unknown", "tensors.a.b.hf.c"),
        ("tensors: {a.b: {cut: qkv, hf: {c: [hidden], d: [hidden]}}}", "mismatch", "tensors.a.b.hf"),
        ("tensors: {'a.{n}': {cut: whole, hf: {c: [hidden]}}}", "malformed", "tensors.a.{n}"),
        ("tensors: {'a.{layer}': {cut: whole, hf: {c: [hidden]}}}", "malformed", "tensors.a.{layer}.hf"),
        ("tensors: {'a.{layer}': {cut: whole, hf: {'c.{layer': [hidden]}}}", "malformed", "tensors.a.{layer}.hf"),
        ("tensors: {a.b: {cut: whole, hf: {c: [hidden]}, engine: 'd.{layer}'}}", "malformed", "tensors.a.b.engine"),
        ("tensors: {a.b: {cut: whole, hf: {c: [hidden]}, stack: d}}", "malformed", "tensors.a.b.stack"),
    ],
)
def test_mistake_in_a_family_file_is_named(text: str, code: Code, key: str, tmp_path: Path) -> None:
    file = own_family(tmp_path, text if "extends" in text or text == "[]" else f"extends: _decoder\n{text}\n")
    with refused(code, file if key == "own.yaml" else key) as caught:
        architecture_of(LLAMA_8B, file)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fraction", "dims"), [(1.0, 128), (0.5, 64), (0.02, 2), (0.03, None), (0.001, None), (2, None)]
)
def test_rotary_fraction_must_leave_pairs_of_dimensions(fraction: float, dims: int | None, tmp_path: Path) -> None:
    own = own_family(
        tmp_path, "extends: llama\nconfig: {rotary_fraction: [fraction, 1.0]}\nonly: {partial_rotary_factor: null}"
    )
    with nullcontext() if dims else refused("mismatch", "fraction"):
        assert rotary_dims(architecture_of(LLAMA_8B | {"fraction": fraction}, own)) == dims
