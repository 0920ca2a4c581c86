"""Tests of the targets of adapters, and of those that are refused before a run starts."""

import pytest

from rlsys.config.schema import LoraConfig
from rlsys.weights.lora import adapter_map, target_modules
from rlsys.weights.weight_map import architecture_of
from tests.support import tiny_configs
from tests.support.refusals import refused

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize(("family", "known"), [("qwen2", sorted([*ATTENTION, *MLP])), ("qwen3_moe", ATTENTION)])
def test_targets_default_to_every_linear_layer_outside_of_experts(family: str, known: list[str]) -> None:
    architecture = architecture_of(tiny_configs.FAMILIES[family]())
    assert target_modules(architecture, LoraConfig(rank=2)) == known
    for target, code in (("gate_proj", "unsupported"), ("w_proj", "unknown"), ("gate", "unknown")):
        if target not in known:
            with refused(code, "model.lora.targets"):
                adapter_map(architecture, LoraConfig(rank=2, targets=["q_proj", target]))
    with refused("unknown", "model.lora.targets"):
        adapter_map(architecture, LoraConfig(rank=2, targets=[]))
