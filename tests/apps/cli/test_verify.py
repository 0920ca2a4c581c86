"""Tests of `verify`: equal models, changed or missing tensors, and configs that change the logits."""

from pathlib import Path

import psutil
import pytest
import torch

from rlsys.apps.convert.verify import TensorDifference, prompts, verify
from rlsys.config.schema import ParallelConfig
from rlsys.weights.convert.conversion import hf_to_megatron
from rlsys.weights.convert.model_folder import open_model
from tests.support.hf_models import json_of, make_model, reconfigured, rewritten, tensors_of


@pytest.mark.parametrize(
    ("family", "dtype", "critic"), [("qwen3-moe", torch.bfloat16, False), ("llama", torch.float32, True)]
)
def test_the_megatron_model_computes_the_logits_of_transformers(
    family: str, dtype: torch.dtype, critic: bool, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", family, dtype, critic)
    hf_to_megatron(model, tmp_path / "mg", parallel=ParallelConfig(tp=2, pp=3), values=critic, processes=1)
    verdict = verify(model, tmp_path / "mg")
    assert (verdict.same, verdict.note, verdict.tensors) == (True, "", len(tensors_of(model)))
    assert verdict.logits is not None
    assert verdict.logits.agreement > 0.9
    assert verdict.logits.largest > 0.1
    assert {0, 99} <= set(prompts(open_model(model, None)).ravel()), "tokens of the whole vocabulary"


def test_a_changed_number_is_found_in_bytes_and_logits(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    name = "model.layers.1.self_attn.v_proj.bias"
    changed = tensors_of(model)[name].clone()
    changed[-1] += 1
    other = rewritten(make_model(tmp_path / "other", "qwen2"), **{name.replace(".", "__"): changed})
    hf_to_megatron(other, tmp_path / "mg", processes=1)
    total = 2 * sum(tensor.nbytes for tensor in tensors_of(model).values())
    seen: list[tuple[int, int]] = []
    for second in (other, tmp_path / "mg"):
        verdict = verify(model, second, show=lambda *progress: seen.append(progress))
        assert seen[-1] == (total, total)
        assert not verdict.same
        assert [(one.name, one.what) for one in verdict.differences] == [(name, "bytes")]
        assert verdict.logits is not None
        assert not verdict.logits.same


def test_wrong_rotary_scaling_is_found_by_logits_alone(tmp_path: Path) -> None:
    """The tensors are equal, only the configs differ."""
    model, other = (make_model(tmp_path / name, "llama") for name in ("model", "other"))
    rope = json_of(model / "config.json")["rope_parameters"]
    assert isinstance(rope, dict)
    reconfigured(other, rope_parameters=rope | {"factor": 2.0})
    verdict = verify(model, other)
    assert verdict.differences == ()
    assert not verdict.same
    assert verify(model, other, logits=False).same


def test_other_dtypes_and_missing_tensors_are_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    hf_to_megatron(model, tmp_path / "mg", dtype="float32", processes=1)
    verdict = verify(model, tmp_path / "mg")
    assert {(one.what, one.first, one.second) for one in verdict.differences} == {("dtype", "bfloat16", "float32")}
    assert len(verdict.differences) == verdict.tensors
    assert verdict.logits is not None
    assert verdict.logits.same, "the numbers are the same"
    verdict = verify(model, make_model(tmp_path / "tied", "qwen2-tied"))
    assert TensorDifference("lm_head.weight", "present", "yes", "-") in verdict.differences
    assert verdict.logits is None
    assert verdict.note


def test_too_little_memory_skips_the_logits_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    verdict = verify(model, model)
    assert (verdict.same, verdict.logits) == (True, None)
    assert verdict.note
