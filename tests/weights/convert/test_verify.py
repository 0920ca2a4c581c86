"""Two models are the same where their bytes are, and what differs is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rlsys.apps.convert.verify import TensorDifference, logits_of, prompts, verify
from rlsys.config.schema import ParallelConfig
from rlsys.errors import UserError
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.convert.model_folder import info, open_side
from tests.weights.convert.models import configs, logits_by_transformers, make_model, tensors_of


def changed(model: Path, out: Path, name: str) -> Path:
    """A copy of a model with another number in one tensor."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.no_grad():
        loaded.get_parameter(name).view(-1)[-1] += 1
    loaded.save_pretrained(out)
    return out


@pytest.mark.parametrize("family", configs())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_megatrons_model_computes_what_transformers_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, dtype)
    hf_to_megatron(model, tmp_path / "mg", parallel=ParallelConfig(tp=2, pp=3), processes=1)
    verdict = verify(model, tmp_path / "mg")
    assert verdict.same
    assert verdict.note == ""
    assert verdict.logits is not None
    assert verdict.logits.agreement == 1
    assert verdict.logits.largest > 0.1
    assert verdict.logits.difference < 1e-4 * verdict.logits.largest
    assert verdict.tensors == len(tensors_of(model))


def test_logits_are_those_of_transformers_on_tokens_of_the_whole_vocabulary(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", torch.float32)
    tokens = prompts(open_side(model, None))
    assert {0, 99} <= set(tokens.ravel())
    expected = logits_by_transformers(model, torch.tensor(tokens))[:, :-1]
    hf_to_megatron(model, tmp_path / "mg", processes=1)
    for folder in (model, tmp_path / "mg"):
        actual = logits_of(open_side(folder, None), tokens)
        torch.testing.assert_close(actual, expected.flatten(0, 1), atol=1e-5, rtol=1e-5)


def test_a_critic_is_compared_by_its_values(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2", torch.float32, critic=True)
    hf_to_megatron(model, tmp_path / "mg", values=True, processes=1)
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", processes=1)
    for other in ("mg", "back"):
        verdict = verify(model, tmp_path / other)
        assert verdict.same
        assert verdict.logits is not None
        assert verdict.logits.largest > 0.1


def test_a_changed_number_is_found_and_what_it_computes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    name = "model.layers.1.self_attn.v_proj.bias"
    other = changed(model, tmp_path / "other", name)
    hf_to_megatron(other, tmp_path / "mg", processes=1)
    for second in (other, tmp_path / "mg"):
        verdict = verify(model, second)
        assert not verdict.same
        assert [(one.name, one.what) for one in verdict.differences] == [(name, "bytes")]
        assert verdict.logits is not None
        assert not verdict.logits.same


def test_wrong_rotary_scaling_is_found_by_logits_alone(tmp_path: Path) -> None:
    """The bytes are the same: the config is not."""
    model = make_model(tmp_path / "model", "llama")
    other = make_model(tmp_path / "other", "llama")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["factor"] = 2.0
    (other / "config.json").write_text(json.dumps(config))
    verdict = verify(model, other)
    assert verdict.differences == ()
    assert not verdict.same
    assert verify(model, other, logits=False).same


def test_dtypes_shapes_and_missing_tensors_are_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    hf_to_megatron(model, tmp_path / "mg", dtype="float32", processes=1)
    verdict = verify(model, tmp_path / "mg")
    assert {(one.what, one.first, one.second) for one in verdict.differences} == {("dtype", "bfloat16", "float32")}
    assert len(verdict.differences) == verdict.tensors
    assert verdict.logits is not None
    assert verdict.logits.same, "the numbers are the same"

    tied = make_model(tmp_path / "tied", "qwen2-tied", seed=0)
    verdict = verify(model, tied)
    assert TensorDifference("lm_head.weight", "present", "yes", "-") in verdict.differences
    assert verdict.logits is None
    assert "different shapes" in verdict.note


def test_a_tied_model_may_repeat_its_embedding(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2-tied")
    tensors = tensors_of(model)
    repeated = make_model(tmp_path / "repeated", "qwen2-tied")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        repeated / "model.safetensors",
        metadata={"format": "pt"},
    )
    hf_to_megatron(repeated, tmp_path / "mg", processes=1)
    assert verify(model, repeated, logits=False).same
    assert verify(repeated, tmp_path / "mg", logits=False).same


def test_too_little_memory_skips_logits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    verdict = verify(model, model)
    assert verdict.same
    assert verdict.logits is None
    assert "Logits were not compared" in verdict.note


def test_progress_counts_both(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    seen: list[tuple[int, int]] = []
    verify(model, model, logits=False, show=lambda done, total: seen.append((done, total)))
    total = 2 * sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert seen[-1] == (total, total)
    assert np.all(np.diff([done for done, _ in seen]) > 0)


def test_a_checkpoint_without_a_config_needs_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg", processes=1)
    for file in (tmp_path / "mg" / "hf").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="give its original with --hf"):
        verify(model, tmp_path / "mg")
    assert verify(model, tmp_path / "mg", hf=model).same
    assert info(tmp_path / "mg").architecture is None


def test_info_says_what_is_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe", shard_size="40KB")
    tensors = tensors_of(model)
    hf_to_megatron(model, tmp_path / "mg", parallel=ParallelConfig(pp=3), processes=1)
    of_hf, of_megatron = info(model), info(tmp_path / "mg")
    assert (of_hf.format, of_megatron.format) == ("hugging face", "torch_dist")
    assert (of_hf.step, of_megatron.step) == (None, 0)
    assert of_hf.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert of_hf.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert of_hf.dtypes == {"bfloat16": of_hf.parameters}
    for key in ("parameters", "nbytes", "dtypes", "architecture", "critic"):
        assert getattr(of_megatron, key) == getattr(of_hf, key), key
    assert of_hf.architecture is not None
    assert of_hf.architecture["experts"] == 4
    assert "tokenizer.json" in of_hf.also
    assert not of_hf.critic
    assert of_hf.folder_bytes > of_hf.nbytes
    assert "safetensors files" in of_hf.layout
