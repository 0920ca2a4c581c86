"""Tests of the setup of a Megatron process: kernels, Megatron-core without CUDA, and ranks in the mesh."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from transformers import PretrainedConfig

from rlsys.cluster.planning.placement import parallel_problems
from rlsys.config.schema import Device, Layers, ModelConfig, ParallelConfig
from rlsys.observe.environment import Capabilities
from rlsys.trainer import cpu_support, mesh
from rlsys.trainer.mesh import Rendezvous, mesh_coordinates
from rlsys.trainer.model.layers import choose_layers, fuse_accumulation, kernel_settings, repeat_empty_states
from rlsys.trainer.model.stage_model import transformer_config
from rlsys.weights.weight_map import architecture_of, read_architecture
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.support.refusals import refused
from tests.trainer import reference

NOTHING = Capabilities()
GPU = Capabilities(cuda_devices=1, compute_capability=(9, 0))
TE = replace(GPU, transformer_engine="2.20.2")
FUSIONS = ("bias_activation_fusion", "apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")


def fused(settings: dict[str, Any]) -> set[str]:
    return {name for name in FUSIONS if settings.get(name)}


def test_layers_follow_the_capabilities_of_the_machine() -> None:
    assert choose_layers(Layers.auto, NOTHING) is Layers.local
    assert choose_layers(Layers.auto, replace(TE, cuda_devices=0)) is Layers.local
    assert choose_layers(Layers.auto, TE) is Layers.te
    for here in (NOTHING, GPU, TE):
        assert choose_layers(Layers.local, here) is Layers.local
    assert choose_layers(Layers.te, TE) is Layers.te
    for layers, here in ((Layers.auto, GPU), (Layers.te, GPU), (Layers.te, replace(TE, cuda_devices=0))):
        with refused("not_installed", "model.layers"):
            choose_layers(layers, here)


def test_fusion_is_enabled_only_with_its_packages() -> None:
    model = ModelConfig("model")
    assert fused(kernel_settings(model, Layers.local, NOTHING)) == set()
    assert fused(kernel_settings(model, Layers.local, GPU)) == {"bias_activation_fusion"}
    assert fused(kernel_settings(model, Layers.local, TE)) == {"bias_activation_fusion", "apply_rope_fusion"}
    assert fused(kernel_settings(model, Layers.te, TE)) == set(FUSIONS) - {"gradient_accumulation_fusion"}
    assert fused(kernel_settings(model, Layers.te, replace(TE, apex=True))) == set(FUSIONS)
    assert fused(kernel_settings(replace(model, fusions=False), Layers.te, replace(TE, apex=True))) == set()


@pytest.mark.parametrize(
    ("layers", "fusions", "fuses"),
    [(Layers.te, True, [True, None]), (Layers.te, False, [False, None]), (Layers.local, True, [False, None])],
)
def test_accumulation_is_fused_without_apex_in_the_layers_that_can(
    layers: Layers, fusions: bool, fuses: list[bool | None]
) -> None:
    of_te, output = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    of_te.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    fuse_accumulation(
        torch.nn.Sequential(torch.nn.Sequential(of_te), output), ModelConfig("m", fusions=fusions), layers
    )
    assert [getattr(module, "fuse_wgrad_accumulation", None) for module in (of_te, output)] == fuses


def test_experts_share_the_empty_state_of_fp8_layers() -> None:
    """With FP8, Megatron would look for scales in the state, but this recipe has none (Transformer Engine 2.20)."""

    class Grouped(torch.nn.Module):
        fp8, num_gemms = True, 3

        def _split_extra_state(self, state: torch.Tensor) -> list[Any]:
            decoded: Any = None if not state.numel() else state
            return list(decoded["extra_fp8_variables"])

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), Grouped())
    repeat_empty_states(module)
    state = torch.empty(0, dtype=torch.uint8)
    split = module[1]._split_extra_state(state)
    assert [one is state for one in split] == [True] * 3
    with pytest.raises(ValueError, match="state"):
        module[1]._split_extra_state(torch.ones(1, dtype=torch.uint8))


def test_first_micro_batch_never_overwrites_a_fused_gradient() -> None:
    """Transformer Engine's layers overwrite the gradient in the micro-batch that Megatron calls the first."""
    assert kernel_settings(ModelConfig("model"), Layers.te, TE)["disable_parameter_transpose_cache"]


def test_fp8_needs_transformer_engine_layers() -> None:
    model = ModelConfig("model", fp8=True)
    assert "fp8" not in kernel_settings(replace(model, fp8=False), Layers.te, TE)
    assert kernel_settings(model, Layers.te, TE)["fp8"] == "hybrid"
    for here in (TE, NOTHING):
        with refused("conflict", "model.fp8"):
            kernel_settings(model, Layers.local, here)


def test_megatron_accepts_the_kernel_settings(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(layers=1), tmp_path / "model")
    asked = ModelConfig(str(model), fp8=True)
    settings = kernel_settings(asked, Layers.te, replace(TE, apex=True))
    for needs_package in ("apply_rope_fusion", "moe_permute_fusion"):
        assert settings.pop(needs_package)
    made = transformer_config(read_architecture(str(model)), asked, ParallelConfig(), settings)
    assert {name: getattr(made, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("shape", "fuses"),
    [
        *((tiny_configs.FAMILIES[family](), True) for family in ("qwen2", "phi3", "gemma3_text", "ministral")),
        (tiny_configs.deepseek(yarn=True), True),
        (tiny_configs.deepseek(), False),
        (tiny_configs.glm4(), False),
    ],
    ids=["qwen2", "phi3", "gemma3", "ministral", "deepseek, yarn", "deepseek", "glm4"],
)
def test_positions_are_fused_only_where_the_kernel_has_those_of_the_family(
    shape: PretrainedConfig, fuses: bool
) -> None:
    """For packed rows, Megatron calls the kernel without `interleaved`, as if GLM-4 turned the halves of a head."""
    model = ModelConfig("m")
    settings = kernel_settings(model, Layers.te, TE) | {"moe_permute_fusion": False}
    with pytest.MonkeyPatch.context() as patch:
        # Megatron refuses the setting without the kernel.
        patch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", rope_utils.apply_rotary_pos_emb)
        made = transformer_config(architecture_of(shape), model, ParallelConfig(), settings)
    assert made.apply_rope_fusion == fuses


def test_first_stage_without_experts_is_refused_in_a_model_that_has_some() -> None:
    model = architecture_of(tiny_configs.deepseek())
    for counts, pp, fits in (([1, 2], 2, False), (None, 3, False), ([2, 1], 2, True)):
        stages = ParallelConfig(pp=pp, pp_layers=counts)
        found = [one.key for one in parallel_problems("actor", stages, pp, model)]
        assert found == ([] if fits else ["actor.parallel.pp"])


def _on_the_real_megatron(_: Group) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import multi_latent_attention

    function = schedules.forward_backward_no_pipelining
    before = function.__code__
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        patch.setattr(multi_latent_attention, "HAVE_TE", True)
        mesh._choose_device(Rendezvous(0, 1, "127.0.0.1", 0, Device.gpu, 1.0))
        assert function.__code__ is before, "with CUDA nothing else may change"
        assert not multi_latent_attention.HAVE_TE, "its layers would look for mocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(schedules, "forward_backward_no_pipelining")
        with pytest.raises(cpu_support.UnsupportedMegatron, match="forward_backward_no_pipelining"):
            cpu_support.adapt()
    cpu_support.adapt()
    cpu_support.adapt()
    assert "cuda" in before.co_consts
    assert "cuda" not in function.__code__.co_consts


def test_cpu_support_refuses_another_megatron_and_with_cuda_only_tells_that_the_engine_is_missing() -> None:
    on_ranks(_on_the_real_megatron, 1)


def test_ranks_vary_by_tensor_then_context_then_data_then_pipeline() -> None:
    places = [mesh_coordinates(rank, 16, ParallelConfig(tp=2, cp=2, pp=2, ep=4)) for rank in range(16)]
    assert [place.tp for place in places] == [0, 1] * 8
    assert [place.cp for place in places] == [0, 0, 1, 1] * 4
    assert [place.dp for place in places] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [place.pp for place in places] == [0] * 8 + [1] * 8
    assert [place.ep for place in places] == [0, 1, 2, 3] * 4
    assert [place.in_stage for place in places] == [*range(8)] * 2
    assert [place.rank for place in places if place.reports] == [8, 12]
    assert [place.rank for place in places if place.exports] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_experts_are_spread_over_neighbouring_ranks_of_a_stage() -> None:
    places = [mesh_coordinates(rank, 12, ParallelConfig(tp=2, pp=2, ep=3)) for rank in range(12)]
    assert [place.ep for place in places] == [0, 1, 2] * 4
    # Ranks 0 to 2 together hold all experts once, ranks 0 and 1 everything else.
    assert [place.rank for place in places if place.exports] == [0, 1, 2, 6, 7, 8]
