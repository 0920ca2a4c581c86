"""Experts: routed as transformers routes them, spread over ranks, and saved under one spread and loaded under another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor
from rlsys.trainer.model.layers import ExpertRouter
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.convert.conversion import megatron_to_hf
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import read_architecture
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous, run_group, weights_of

OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1)
STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
WHOLE = ParallelConfig()
SPREAD = ParallelConfig(ep=2)
OVER_TP = ParallelConfig(tp=2, ep=2, sequence_parallel=True)


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_routed_as_transformers_routes_them(dtype: torch.dtype, norm_topk: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm_topk)
    torch.manual_seed(0)
    theirs = Qwen3MoeTopKRouter(config).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    hidden = torch.randn(7, 2, 32, dtype=dtype)
    nobody = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    ours = ExpertRouter(
        SimpleNamespace(
            num_moe_experts=8,
            hidden_size=32,
            add_bias_linear=False,
            calculate_per_token_loss=True,
            perform_initialization=False,
            params_dtype=dtype,
            sequence_parallel=False,
            moe_router_topk=3,
            moe_router_pre_softmax=not norm_topk,
        ),
        nobody,
    )
    ours.weight.data.copy_(theirs.weight)
    weights, chosen = ours(hidden)
    _, their_weights, their_choice = theirs(hidden)
    assert weights.dtype is their_weights.dtype is dtype
    assert torch.equal(weights.gather(1, their_choice), their_weights)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, their_choice, True))
    assert not weights[~chosen].any()


def _actor(rank: int, port: int, model: str, parallel: ParallelConfig, dtype: Dtype) -> Actor:
    config = ModelConfig(model, Layers.local, dtype)
    return Actor(rendezvous(rank, 2, port), config, parallel, OPTIMIZER, OBJECTIVE, len(STEPS), seed=1)


def _train(actor: Actor, step: int) -> None:
    actor.accumulate(STEPS[step][actor.place.dp :: actor.place.dp_size])
    actor.apply()


def _resume(
    rank: int,
    _: int,
    model: str,
    out: str,
    layouts: list[ParallelConfig],
    ports: list[int],
    dtype: Dtype,
) -> None:
    """Save under the first layout after two steps, and take the third under each."""
    first, *_ = layouts
    actor = _actor(rank, ports[0], model, first, dtype)
    actor.load_hf(model)
    _train(actor, 0)
    _train(actor, 1)
    actor.begin_save(f"{out}/checkpoint")
    actor.finish_save()
    results: dict[str, Any] = {"saved": weights_of(actor), "resumed": []}
    _train(actor, 2)
    results["uninterrupted"] = weights_of(actor)
    for layout, port in zip(layouts, ports[1:], strict=True):
        mesh.stop()
        actor = _actor(rank, port, model, layout, dtype)
        actor.load(f"{out}/checkpoint")
        _train(actor, 2)
        results["resumed"].append(weights_of(actor))
    mesh.stop()
    if rank == 0:
        torch.save(results, f"{out}/results.pt")


@pytest.mark.parametrize(
    ("layouts", "dtype", "tolerance"),
    [
        pytest.param([SPREAD, WHOLE, OVER_TP], Dtype.float32, 2e-5, id="spread"),
        pytest.param([WHOLE, SPREAD], Dtype.float32, 2e-5, id="whole", marks=pytest.mark.slow),
        pytest.param([OVER_TP, WHOLE], Dtype.bfloat16, 2e-2, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_under_another_spread(
    layouts: list[ParallelConfig], dtype: Dtype, tolerance: float, tmp_path: Path
) -> None:
    model = reference.make_model(reference.tiny_qwen3_moe(layers=2), tmp_path / "model")
    ports = [free_port() for _ in range(len(layouts) + 1)]
    run_group(_resume, 2, str(model), str(tmp_path), layouts, ports, dtype)
    results = torch.load(tmp_path / "results.pt")
    expected = results["uninterrupted"]
    same, *others = results["resumed"]
    for name, tensor in expected.items():
        assert torch.equal(tensor, same[name]), name
        assert not torch.equal(tensor, results["saved"][name]) or "layernorm" in name, name
        for other in others:
            torch.testing.assert_close(other[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "hf", model)
    converted = HfReader(tmp_path / "hf")
    assert converted.names() == results["saved"].keys()
    assert all(torch.equal(converted.get(name), tensor) for name, tensor in results["saved"].items())


@pytest.mark.parametrize(
    ("family", "parallel", "sentence"),
    [
        ("qwen3", ParallelConfig(ep=2), "ep is 2, but the model has no experts"),
        (
            "qwen3_moe",
            ParallelConfig(tp=2),
            "tp is 2 and the model has experts: set sequence_parallel to true",
        ),
        ("qwen3_moe", ParallelConfig(ep=8), "ep is 8, which does not divide the model's 4 experts"),
        ("qwen3", ParallelConfig(tp=8), "tp is 8, which does not divide the model's 4 attention heads"),
    ],
)
def test_cuts_that_the_model_forbids_are_refused(
    family: str, parallel: ParallelConfig, sentence: str, tmp_path: Path
) -> None:
    model = str(reference.make_model(reference.TINY[family](layers=1), tmp_path))
    config, place = ModelConfig(model, Layers.local, Dtype.float32), mesh.place_of(0, 8, parallel)
    with pytest.raises(UserError, match=sentence):
        PolicyModel(read_architecture(model), config, parallel, place)
