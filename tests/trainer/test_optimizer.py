"""Tests of the optimiser: overlapped communication changes nothing, and the learning rate follows its schedule."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config.schema import LrDecay, OptimizerConfig
from rlsys.trainer import optimizer as adam
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import Layout, make_actor, weights_of

SMALL_BUCKET = 4000
"""Numbers per bucket, few enough that a small model has several buckets."""
STEPS = 2
# Without momentum and with a large epsilon, an Adam step is nearly the gradient.
PLAIN = OptimizerConfig(lr=0.3, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
WAYS = {
    "plain": replace(PLAIN, distributed=False),
    "sums": replace(PLAIN, distributed=False, overlap_grad_reduce=True),
    "distributed-sums": replace(PLAIN, overlap_grad_reduce=True),
    "distributed-both": replace(PLAIN, overlap_grad_reduce=True, overlap_param_gather=True),
}


def _trained(group: Group, layout: Layout, model: Path, way: OptimizerConfig, marked: bool) -> dict[str, Any]:
    """Results of `STEPS` steps of several calls each; with `marked`, the last call of a step says that it is last."""
    actor = make_actor(group, model, layout.parallel, way, recompute=layout.recompute)
    actor.load_hf(model)
    wrapped = actor._wrapped
    buckets = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
    norms, in_flight = [], []
    for step in range(STEPS):
        batches = reference.make_batches(4, seed=step)[actor.coords.dp :: actor.coords.dp_size]
        calls = [batches[:1], [], batches[1:]]
        for number, call in enumerate(calls, 1):
            actor.accumulate(call, last=marked and number == len(calls))
            in_flight.append(sum(one.grad_reduce_handle is not None for one in buckets))
        norms.append(actor.apply().grad_norm)
    return {"norms": norms, "in_flight": in_flight, "weights": weights_of(actor), "buckets": len(buckets)}


def _in_group(group: Group, layout: Layout, model: Path) -> dict[str, Any]:
    small = functools.partial(adam.DistributedDataParallelConfig, bucket_size=SMALL_BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "DistributedDataParallelConfig", small)
        results = {name: _trained(group, layout, model, way, marked=True) for name, way in WAYS.items()}
        return results | {"unmarked": _trained(group, layout, model, WAYS["distributed-both"], marked=False)}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp=2), id="dp2"),
        pytest.param(Layout(dp=2, pp=2, recompute=True), id="dp2-pp2", marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, ep=2), id="dp2-experts", marks=pytest.mark.slow),
    ],
)
def test_overlapped_communication_changes_no_step(layout: Layout, tmp_path: Path) -> None:
    make = reference.tiny_qwen3_moe if layout.ep > 1 else reference.tiny_config
    model = reference.make_model(make(layers=2, tied=layout.tied), tmp_path / "model")
    ranks = on_ranks(_in_group, layout.processes, layout, model)
    plain = ranks[0]["plain"]
    before = reference.named_tensors(reference.load(model))
    assert any((plain["weights"][key] - tensor).abs().max() > 1e-3 for key, tensor in before.items())
    for way, found in ranks[0].items():
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5), way
        for key, tensor in plain["weights"].items():
            torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-5, atol=1e-6, msg=f"{way} {key}")
    # After the last call of a step, sums are in flight, except in the first step, where Megatron learns their order.
    for way, found in [item for rank in ranks for item in rank.items()]:
        overlaps = way not in ("plain", "unmarked")
        assert found["in_flight"] == [0] * 5 + [found["buckets"] if overlaps else 0], way
    # On later pipeline stages, Megatron puts all gradients in one bucket.
    assert ranks[0]["sums"]["buckets"] > 1


@pytest.mark.parametrize(
    ("decay", "warmup_fraction", "expected"),
    [
        (LrDecay.constant, 0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.constant, 1 / 3, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.linear, 1 / 3, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (LrDecay.cosine, 1 / 3, [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_learning_rate_warms_up_and_decays_to_its_minimum(
    decay: LrDecay, warmup_fraction: float, expected: list[float]
) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, decay=decay, warmup_fraction=warmup_fraction)
    assert [adam.learning_rate(step, 6, config) for step in range(7)] == pytest.approx(expected, abs=1e-6)
