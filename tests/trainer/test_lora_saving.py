"""Tests of checkpoints of adapters (LoRA): resumed, merged into a Hugging Face folder, and loaded by PEFT."""

from dataclasses import asdict
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config.schema import ParallelConfig
from rlsys.weights.checkpoint.megatron_reader import open_checkpoint
from rlsys.weights.convert.conversion import PEFT_WEIGHTS, megatron_to_hf, megatron_to_peft
from rlsys.weights.weight_map import ADAPTER_PREFIX
from tests.support import tiny_configs
from tests.support.megatron_processes import on_ranks
from tests.support.refusals import refused
from tests.trainer import reference
from tests.trainer.lora_saves import LORA, STEPS, saved_and_resumed, whole_then_adapted


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_adapters_resume_exactly_and_become_peft_and_hugging_face_models(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    other = reference.make_model(tiny_configs.qwen2(), tmp_path / "other", seed=7)
    saved = tmp_path / "saved"
    results = on_ranks(saved_and_resumed, 2, model, other, saved, ParallelConfig(pp=2, pp_layers=[2, 1]))
    found = results[0]
    assert _same(found["saved"], found["loaded"])
    assert _same(found["trained"], found["resumed"])
    assert not _same(found["trained"], found["saved"])
    for name, tensor in found["elsewhere"].items():
        torch.testing.assert_close(tensor, found["trained"][name], rtol=2e-5, atol=2e-5, msg=name)
    for one in results:
        refusals = {name: ("mismatch", f"model.lora.{name}") for name in ("rank", "alpha", "targets")}
        expected = {**refusals, "whole": ("mismatch", "model.lora.rank"), "base": ("mismatch", "model.path")}
        assert one["refused"] == expected
    assert {name.rsplit(".", 2)[1] for name in open_checkpoint(saved).names()} == {"adapter"}, "the base is not saved"
    _check_conversions(model, other, saved, found["saved"], tmp_path)


def _check_conversions(model: Path, other: Path, saved: Path, exported: dict[str, Tensor], folder: Path) -> None:
    megatron_to_hf(saved, folder / "merged", model, processes=1)
    nbytes = megatron_to_peft(saved, folder / "peft", model)
    assert 2 * megatron_to_peft(saved, folder / "half", model, dtype="bfloat16") == nbytes
    whole, half = (load_file(folder / name / PEFT_WEIGHTS) for name in ("peft", "half"))
    assert _same(half, {name: tensor.bfloat16() for name, tensor in whole.items()})
    merged, theirs = (
        reference.load(folder / "merged"),
        peft.PeftModel.from_pretrained(reference.load(model), folder / "peft"),
    )
    tokens = torch.tensor(STEPS[0][0].tokens)
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=2e-5, atol=5e-5)
        assert (reference.load(model)(tokens).logits - expected).abs().max() > 0.05
    for name, tensor in peft.get_peft_model_state_dict(theirs).items():
        assert torch.equal(tensor, exported[name]), name
    for name, tensor in reference.named_tensors(merged).items():
        assert not name.startswith(ADAPTER_PREFIX)
        torch.testing.assert_close(tensor, exported[name], rtol=1e-6, atol=1e-6, msg=name)
    settings = theirs.peft_config["default"]
    wanted = asdict(LORA)
    assert (settings.r, settings.lora_alpha, settings.target_modules) == (4, 6.0, {*wanted["targets"]})
    for convert in (megatron_to_hf, megatron_to_peft):
        with refused("mismatch", "--hf"):
            convert(saved, folder / "none", other)


def test_checkpoint_of_a_whole_model_has_no_adapters(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    (found,) = on_ranks(whole_then_adapted, 1, model, tmp_path / "saved")
    assert found == ("mismatch", "model.lora.rank")
    with refused("mismatch", "--adapter"):
        megatron_to_peft(tmp_path / "saved", tmp_path / "peft", model)
