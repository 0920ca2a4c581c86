"""Tests of training and log-probs on parallel layouts against Hugging Face transformers in one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import tiny_configs
from tests.trainer import reference
from tests.trainer.against_transformers import check_training
from tests.trainer.harness import Layout

LAYOUTS = [
    pytest.param(Layout(pp=2, pp_layers=(1, 2), recompute=True), "gemma3_text", id="pp2-uneven-tied-recomputed"),
    pytest.param(Layout(tp=2, ep=2, sequence_parallel=True, tied=False), "qwen3_moe", id="moe-tp2-ep2-sp"),
]
TP2_PP2 = Layout(tp=2, pp=2, pp_layers=(1, 2), sequence_parallel=True, tied=False)
MORE_LAYOUTS = {
    **{f"{family}-tp2-pp2": (TP2_PP2, family) for family in ("gemma3_text", "glm4", "ministral", "phi3")},
    "deepseek_v2-tp2-pp2-ep2": (replace(TP2_PP2, ep=2, pp_layers=(2, 1)), "deepseek_v2"),
    "deepseek_v2-tp2-cp2-ep2": (
        Layout(tp=2, cp=2, ep=2, sequence_parallel=True, tied=False, recompute=True),
        "deepseek_v2",
    ),
    "gpt_oss-tp2-ep2-pp2": (replace(TP2_PP2, ep=2), "gpt_oss"),
    "gpt_oss-cp2-dp2-recomputed": (Layout(cp=2, dp=2, tied=False, recompute=True), "gpt_oss"),
    "gemma3_text-tp2-cp2": (Layout(tp=2, cp=2, sequence_parallel=True), "gemma3_text"),
    "qwen2-pp2-uneven-recomputed": (Layout(pp=2, pp_layers=(1, 2), recompute=True), "qwen2"),
    # The TP ranks outnumber the two key-value heads.
    "tp4": (Layout(tp=4, tied=False), "qwen3"),
    "pp3-dp2": (Layout(pp=3, dp=2, tied=False), "llama"),
    "tp2-dp2-sp": (Layout(tp=2, dp=2, sequence_parallel=True, tied=False), "mistral"),
    "cp4-not-distributed": (Layout(cp=4, distributed=False), "qwen2"),
    "tp2-cp2-pp2": (Layout(tp=2, cp=2, pp=2, pp_layers=(1, 2), sequence_parallel=True, recompute=True), "qwen2"),
    "moe-pp2-dp2-ep2": (Layout(pp=2, dp=2, ep=2, pp_layers=(1, 2), tied=False, recompute=True), "qwen3_moe"),
    # All tensor and data parallel ranks hold one copy of the experts; with context parallel ranks as well, they hold
    # two.
    "moe-tp2-dp2-ep4": (Layout(tp=2, dp=2, ep=4, sequence_parallel=True, distributed=False, tied=False), "qwen3_moe"),
    "moe-tp2-cp2-dp2-ep4": (Layout(tp=2, cp=2, dp=2, ep=4, sequence_parallel=True, tied=False), "qwen3_moe"),
}


@pytest.mark.parametrize(
    ("layout", "family"),
    [*LAYOUTS, *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE_LAYOUTS.items())],
)
def test_training_and_logprobs_equal_transformers(layout: Layout, family: str, tmp_path: Path) -> None:
    check_training(layout, reference.make_model(tiny_configs.FAMILIES[family](tied=layout.tied), tmp_path / "model"))


@pytest.mark.slow
def test_training_with_latent_queries_and_yarn_equals_transformers(tmp_path: Path) -> None:
    config = tiny_configs.deepseek(q_lora_rank=20, yarn=True)
    check_training(replace(TP2_PP2, ep=2, pp_layers=(2, 1)), reference.make_model(config, tmp_path / "model"))
