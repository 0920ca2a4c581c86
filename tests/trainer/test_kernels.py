"""Kernels follow from what is asked for and what a machine has; those that a CPU can run compute the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from rlsys.config.schema import Attention, Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.environment import Capabilities
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor
from rlsys.trainer.model import stage_model as models
from rlsys.trainer.model.layers import choose_layers, kernel_settings
from rlsys.trainer.model.stage_model import transformer_config
from rlsys.weights.weight_map import read_architecture
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous, run_group, weights_of

NOTHING = Capabilities()
GPU = Capabilities(cuda_devices=1, compute_capability=(9, 0))
TE = replace(GPU, transformer_engine="2.20.2")
FUSIONS = (
    "bias_activation_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
    "gradient_accumulation_fusion",
)


def fused(settings: dict[str, Any]) -> set[str]:
    return {name for name in FUSIONS if settings.get(name)}


def test_layers_are_resolved() -> None:
    assert choose_layers(Layers.auto, NOTHING) is Layers.local
    assert choose_layers(Layers.auto, GPU) is Layers.local
    assert choose_layers(Layers.auto, TE) is Layers.te
    assert choose_layers(Layers.local, TE) is Layers.local
    assert choose_layers(Layers.te, TE) is Layers.te
    with pytest.raises(UserError, match="transformer_engine is not installed"):
        choose_layers(Layers.te, GPU)
    with pytest.raises(UserError, match="there is no GPU"):
        choose_layers(Layers.te, replace(TE, cuda_devices=0))


def test_each_kernel_comes_with_what_it_needs() -> None:
    model = ModelConfig("model")
    assert fused(kernel_settings(model, Layers.local, NOTHING)) == set()
    assert fused(kernel_settings(model, Layers.local, GPU)) == {"bias_activation_fusion"}
    assert fused(kernel_settings(model, Layers.local, TE)) == {"bias_activation_fusion", "apply_rope_fusion"}
    assert fused(kernel_settings(model, Layers.te, TE)) == set(FUSIONS) - {"gradient_accumulation_fusion"}
    assert fused(kernel_settings(model, Layers.te, replace(TE, apex=True))) == set(FUSIONS)
    assert fused(kernel_settings(replace(model, fusions=False), Layers.te, replace(TE, apex=True))) == set()


@pytest.mark.parametrize("asked", Attention)
def test_attention_is_transformer_engines(asked: Attention) -> None:
    model = ModelConfig("model", attention=asked)
    assert kernel_settings(model, Layers.te, TE)["attention_backend"] is AttnBackend[asked.value]
    assert kernel_settings(model, Layers.local, TE)["attention_backend"] is AttnBackend.auto


def test_fp8_is_asked_for() -> None:
    model = ModelConfig("model", fp8=True)
    assert "fp8" not in kernel_settings(replace(model, fp8=False), Layers.te, TE)
    assert kernel_settings(model, Layers.te, TE)["fp8"] == "hybrid"
    # Else the first micro-batch of every pass overwrites fused gradients, and copies of weights stay when they are offloaded.
    assert kernel_settings(model, Layers.te, replace(TE, apex=True))["disable_parameter_transpose_cache"]
    for here in (TE, NOTHING):
        with pytest.raises(UserError, match="fp8 is true"):
            kernel_settings(model, Layers.local, here)


@pytest.mark.parametrize("fp8", [False, True])
def test_megatron_takes_the_settings(fp8: bool, tmp_path: Path) -> None:
    """Its own checks pass, for those fields whose libraries are not asked for when a config is made."""
    model = reference.make_model(reference.tiny_config(layers=1), tmp_path / "model")
    asked = ModelConfig(str(model), fp8=fp8)
    settings = kernel_settings(asked, Layers.te, replace(TE, apex=True))
    for of_te in ("apply_rope_fusion", "moe_permute_fusion"):
        assert settings.pop(of_te)
    made = transformer_config(read_architecture(str(model)), asked, ParallelConfig(), settings)
    assert {name: getattr(made, name) for name in settings} == settings


def _steps(rank: int, _: int, paths: list[str], out: str) -> None:
    chosen = models.kernel_settings
    results = {}
    for path in paths:
        for fusion in (False, True):

            def with_fusion(*args: Any, fusion: bool = fusion) -> dict[str, Any]:
                return {**chosen(*args), "bias_activation_fusion": fusion}

            models.kernel_settings = with_fusion
            model = ModelConfig(path, Layers.local, Dtype.float32)
            optimizer = OptimizerConfig(lr=0.1, eps=1.0, clip_grad=1e9)
            meeting = rendezvous(rank, 1, free_port())
            actor = Actor(meeting, model, ParallelConfig(), optimizer, OBJECTIVE, total_steps=1, seed=1)
            assert actor._model.config.bias_activation_fusion is fusion
            actor.load_hf(path)
            actor.accumulate(reference.make_batches(3))
            norm = actor.apply().grad_norm
            results[path, fusion] = {**weights_of(actor), "norm": torch.tensor(norm)}
            mesh.stop()
    torch.save(results, f"{out}/results.pt")


def test_a_fused_swiglu_is_a_swiglu(tmp_path: Path) -> None:
    configs = {"dense": reference.tiny_config(layers=1), "experts": reference.tiny_qwen3_moe(layers=1)}
    paths = [str(reference.make_model(config, tmp_path / name)) for name, config in configs.items()]
    run_group(_steps, 1, paths, str(tmp_path))
    results = torch.load(tmp_path / "results.pt")
    for path in paths:
        for name, tensor in results[path, False].items():
            torch.testing.assert_close(results[path, True][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
