"""Tests of adapters (LoRA) against PEFT: logits, gradients, three steps, merged weights, reference, on parallel layouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from rlsys.config.schema import LoraConfig, LoraSync
from rlsys.trainer.batches import MicroBatch
from rlsys.weights.weight_map import ADAPTER_PREFIX
from tests.support import tiny_configs
from tests.support.megatron_processes import on_ranks
from tests.trainer import reference
from tests.trainer.harness import Layout
from tests.trainer.lora_groups import (
    OPTIMIZER,
    RATES,
    STEPS,
    dropped,
    logits_and_gradients,
    mine,
    sent_alone,
    train_and_score,
)

LORA = LoraConfig(rank=5, alpha=7.0)
SOME = replace(LORA, targets=["q_proj", "v_proj", "up_proj", "o_proj"])
ATTENTION = replace(LORA, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
LAYOUTS = {
    "one": (Layout(), LORA, "qwen2"),
    "dp2-some-targets": (Layout(dp=2, tied=False), SOME, "qwen3"),
    "tp2-sp": (Layout(tp=2, sequence_parallel=True), LORA, "qwen2"),
    "pp2-uneven-recomputed": (Layout(pp=2, pp_layers=(1, 2), recompute=True), LORA, "qwen2"),
}
MORE_LAYOUTS = {
    "cp2": (Layout(cp=2), LORA, "qwen2"),
    "tp2-dp2-some-targets": (Layout(tp=2, dp=2, tied=False), SOME, "llama"),
    # The TP ranks outnumber the two key-value heads.
    "tp4": (Layout(tp=4, tied=False, distributed=False), LORA, "qwen3"),
    "tp2-pp2-cp2-sp": (Layout(tp=2, pp=2, cp=2, pp_layers=(2, 1), sequence_parallel=True), SOME, "qwen2"),
    # Norms follow the outputs to which adapters add.
    "gemma3_text-tp2-pp2": (Layout(tp=2, pp=2, pp_layers=(2, 1), sequence_parallel=True), LORA, "gemma3_text"),
    "moe-tp2-ep2-sp": (Layout(tp=2, ep=2, sequence_parallel=True, tied=False), ATTENTION, "qwen3_moe"),
    "gpt_oss-tp2-ep2-sp": (Layout(tp=2, ep=2, sequence_parallel=True, tied=False), ATTENTION, "gpt_oss"),
}


def adapted(model: Path, lora: LoraConfig, folder: Path) -> peft.PeftModel:
    """PEFT's model at `model` with random adapters, which are saved to `folder`."""
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets or ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    found = peft.get_peft_model(reference.load(model), settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    found.save_pretrained(folder)
    return found


def _close(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("case", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_training_scoring_and_merged_weights_equal_peft(case: str, tmp_path: Path) -> None:
    layout, lora, family = (LAYOUTS | MORE_LAYOUTS)[case]
    model = reference.make_model(tiny_configs.FAMILIES[family](tied=layout.tied), tmp_path / "model")
    theirs = adapted(model, lora, tmp_path / "adapters")
    ranks = on_ranks(train_and_score, layout.processes, layout, lora, model, tmp_path / "adapters")
    first, base = ranks[0], reference.named_tensors(reference.load(model))
    _check_initial(first["initial"], base)
    _check_export(first["loaded"], theirs, base, 1e-6)
    assert all(torch.equal(first["again"][name], tensor) for name, tensor in first["loaded"].items())

    norms = reference.train_model(theirs, STEPS, OPTIMIZER, RATES)
    assert min(norms) > OPTIMIZER.clip_grad, "clipping must take effect"
    _close(torch.tensor([applied.grad_norm for applied in first["applied"]]), torch.tensor(norms), 1e-4)
    _check_export(first["trained"], theirs, base, 2e-5)
    for rank, found in enumerate(ranks):
        of_stage = ranks[rank - rank % (layout.processes // layout.pp)]
        for name, tensor in found["shared"].items():
            assert torch.equal(tensor, of_stage["shared"][name]), f"{name} differs between tensor-parallel ranks"
    # Two moments of the adapters, and of nothing else.
    copies = layout.dp * layout.cp if layout.distributed else 1
    assert first["state"] * copies == pytest.approx(2 * first["trainable"], rel=0.05)

    after = [reference.logprobs_and_entropy(theirs, batch.tokens)[0] for batch in STEPS[0]]
    with theirs.disable_adapter(), torch.no_grad():
        before = [reference.logprobs_and_entropy(theirs, batch.tokens)[0] for batch in STEPS[0]]
    reporting = ranks[layout.reporting[0]]
    _check_scores(reporting["before"], mine(STEPS[0], replace(layout, dp=1), 0), before, before)
    _check_scores(reporting["after"], mine(STEPS[0], replace(layout, dp=1), 0), after, before)
    assert max(float((one - other).abs().max()) for one, other in zip(after, before, strict=True)) > 0.05


def _check_initial(found: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    """Adapters start as in PEFT, and change nothing: the merged weights are the base, bit for bit."""
    for name, tensor in found.items():
        if not name.startswith(ADAPTER_PREFIX):
            assert torch.equal(tensor, base[name]), name
        elif "lora_B" in name:
            assert not tensor.any(), name
        else:
            bound = tensor.shape[1] ** -0.5  # Of Kaiming's uniform distribution with a = sqrt(5).
            assert 0.9 * bound < tensor.abs().max() <= bound, name
            assert 0.8 < float(tensor.std()) * 3**0.5 / bound < 1.2, name
    assert {name for name in found if not name.startswith(ADAPTER_PREFIX)} == base.keys()


def _check_export(found: dict[str, Tensor], theirs: peft.PeftModel, base: dict[str, Tensor], tolerance: float) -> None:
    """Assert that the adapters, and the weights with the adapters merged into them, are those of PEFT's model."""
    adapters = peft.get_peft_model_state_dict(theirs)
    own = {name: tensor for name, tensor in found.items() if name.startswith(ADAPTER_PREFIX)}
    assert adapters.keys() <= own.keys()
    for name, tensor in own.items():
        if name in adapters:
            _close(tensor, adapters[name].detach(), tolerance, name)
        else:
            assert not tensor.any(), f"{name} belongs to no target"
    for name, tensor in base.items():
        module = (
            theirs.base_model.model.get_submodule(name.removesuffix(".weight").removesuffix(".bias"))
            if (name.endswith("proj.weight") and "experts" not in name)
            else None
        )
        delta = module.get_delta_weight("default").detach() if hasattr(module, "get_delta_weight") else 0.0
        _close(found[name], tensor + delta, tolerance, name)


def _check_scores(found: list[Any], batches: list[MicroBatch], policy: list[Tensor], ref: list[Tensor]) -> None:
    for scores, batch, padded, of_policy, of_ref in zip(found, batches, STEPS[0], policy, ref, strict=True):
        mask = padded.loss_mask
        for ours, theirs in ((scores.policy, of_policy), (scores.reference, of_ref)):
            _close(torch.tensor(ours[batch.loss_mask]), theirs.detach()[torch.tensor(mask)], 1e-4)


def test_logits_and_gradients_equal_peft(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    theirs = adapted(model, LORA, tmp_path / "adapters")
    batch = reference.make_batches(3, seed=9)[2]
    (found,) = on_ranks(logits_and_gradients, 1, model, tmp_path / "adapters", LORA, batch)
    rows, columns = np.nonzero(batch.loss_mask)
    place = torch.tensor(rows), torch.tensor(columns - 1)
    with theirs.disable_adapter():
        _close(found["off"][:, : tiny_configs.VOCAB], theirs(torch.tensor(batch.tokens)).logits[place].detach(), 5e-5)
    _close(found["logits"][:, : tiny_configs.VOCAB], theirs(torch.tensor(batch.tokens)).logits[place].detach(), 5e-5)
    torch.stack([loss for loss, _ in reference.by_sequence(theirs, [batch])]).sum().backward()
    gradients = {name: one.grad for name, one in theirs.named_parameters() if one.requires_grad}
    assert {name.replace(".default", "") for name in gradients} == found["gradients"].keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        ours = found["gradients"][name.replace(".default", "")]
        assert (ours - gradient).norm() < 1e-4 * gradient.norm() + 1e-7, name
    assert not found["frozen with a gradient"]


@pytest.mark.parametrize(
    "layout",
    [Layout(), pytest.param(Layout(tp=2, pp=2, pp_layers=(2, 1), sequence_parallel=True), marks=pytest.mark.slow)],
)
def test_with_sync_adapters_alone_are_sent_by_the_actor_and_by_the_inference_group(
    layout: Layout, tmp_path: Path
) -> None:
    """The engine of a test in tests/rollout merges them. Their digest depends on the frozen model."""
    alone = replace(SOME, sync=LoraSync.adapters)
    shape = tiny_configs.FAMILIES["qwen2"]()
    models = [reference.make_model(shape, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    theirs = peft.get_peft_model_state_dict(adapted(models[0], alone, tmp_path / "adapters"))
    found = on_ranks(sent_alone, layout.processes, layout, alone, models, tmp_path / "adapters")[0]
    for sent in (found["actor"], found["again"], found["inference"]):
        assert all(name.startswith(ADAPTER_PREFIX) for name in sent)
        assert all(torch.equal(sent[name], tensor) for name, tensor in theirs.items())
        assert not any(tensor.any() for name, tensor in sent.items() if name not in theirs)


def test_dropout_changes_each_output_but_not_its_mean(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.FAMILIES["qwen2"](), tmp_path / "model")
    (found,) = on_ranks(dropped, 1, model, replace(LORA, dropout=0.3))
    assert [name.split(".")[-2] for name in found] == ["linear_qkv", "linear_proj"]
    for name, (expected, mean, error) in found.items():
        assert bool((error > 0).all()), f"{name}: nothing was dropped"
        # Of some thousand normal errors, none exceeds six standard deviations.
        assert float(((mean - expected) / error).abs().max()) < 6, name
