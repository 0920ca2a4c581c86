"""Sums and gathers that travel beside computation change nothing: gradients and weights are those without them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import mesh
from rlsys.trainer import optimizer as adam
from rlsys.trainer.actor import Actor
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, Layout, rendezvous, run_group, weights_of

SMALL_BUCKET = 4000
"""Numbers in a bucket, so that a small model has several."""
STEPS = 3
# Adam without a memory and large epsilon: a step is the gradient, nearly.
PLAIN = OptimizerConfig(lr=0.3, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
WAYS = {
    "plain": replace(PLAIN, distributed=False),
    "sums": replace(PLAIN, distributed=False, overlap_grad_reduce=True),
    "distributed-sums": replace(PLAIN, overlap_grad_reduce=True),
    "distributed-both": replace(PLAIN, overlap_grad_reduce=True, overlap_param_gather=True),
}
LAYOUTS = {
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "dp2-recompute": Layout(dp=2, recompute=True, tied=False),
    "dp2-pp2": Layout(dp=2, pp=2),
    "dp2-experts": Layout(dp=2, ep=2),
    "dp2-tp2-sequence-parallel": Layout(dp=2, tp=2, sequence_parallel=True),
}
QUICK = ("dp2", "pp2", "dp2-experts")


class _Watched:
    """Notes which buckets of a learner's gradients are on their way at the end of each call."""

    def __init__(self, actor: Actor) -> None:
        wrapped = actor._wrapped
        self._buckets = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
        self.buckets = len(self._buckets)

    def under_way(self) -> int:
        return sum(one.grad_reduce_handle is not None for one in self._buckets)


def _trained(rank: int, port: int, layout: Layout, model: str, way: OptimizerConfig, told: bool) -> dict[str, Any]:
    """`STEPS` steps, each of several calls; with `told` the learner hears which is the last."""
    settings = ModelConfig(model, Layers.local, Dtype.float32, recompute=layout.recompute)
    meeting = rendezvous(rank, layout.processes, port)
    actor = Actor(meeting, settings, layout.parallel, way, OBJECTIVE, total_steps=STEPS, seed=1)
    actor.load_hf(model)
    watched = _Watched(actor)
    norms, under_way = [], []
    for step in range(STEPS):
        batches = reference.make_batches(8, seed=step)[actor.place.dp :: actor.place.dp_size]
        calls = [batches[:1], [], batches[1:]]
        for number, call in enumerate(calls, 1):
            actor.accumulate(call, last=told and number == len(calls))
            under_way.append(watched.under_way())
        norms.append(actor.apply().grad_norm)
    weights = weights_of(actor)
    mesh.stop()
    return {"norms": norms, "under_way": under_way, "weights": weights, "buckets": watched.buckets}


def _in_group(rank: int, _: int, ports: list[int], layout: Layout, model: str, out: str) -> None:
    small = functools.partial(adam.DistributedDataParallelConfig, bucket_size=SMALL_BUCKET)
    adam.DistributedDataParallelConfig = small  # type: ignore[misc, assignment]
    results = {
        name: _trained(rank, port, layout, model, way, told=True)
        for (name, way), port in zip(WAYS.items(), ports, strict=False)
    }
    results["never-told"] = _trained(rank, ports[-1], layout, model, WAYS["distributed-both"], told=False)
    torch.save(results, f"{out}/{rank}.pt")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_overlapped_steps_are_those_without(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    make = reference.tiny_qwen3_moe if layout.ep > 1 else reference.tiny_config
    model = reference.make_model(make(layers=2, tied=layout.tied), tmp_path / "model")
    ports = [free_port() for _ in range(len(WAYS) + 1)]
    run_group(_in_group, layout.processes, ports, layout, str(model), str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(layout.processes)]
    plain = ranks[0]["plain"]
    before = reference.named_tensors(reference.load(model))
    assert any((plain["weights"][key] - tensor).abs().max() > 1e-3 for key, tensor in before.items())
    for way, found in ranks[0].items():
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5), way
        for key, tensor in plain["weights"].items():
            torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-5, atol=1e-6, msg=f"{way} {key}")
    for rank in ranks:
        _overlaps_when_it_should(rank)
    # Megatron does not cut the gradients of stages behind the first.
    assert ranks[0]["sums"]["buckets"] > 1


def _overlaps_when_it_should(results: dict[str, Any]) -> None:
    """Sums are under way at the end of a step's last call, from the second step on (Megatron learns from the first)."""
    for way, found in results.items():
        last_calls, others = found["under_way"][2::3], found["under_way"][:2] + found["under_way"][3:5]
        assert others == [0] * 4, way
        overlaps = way not in ("plain", "never-told")
        assert last_calls == [0, *[found["buckets"] if overlaps else 0] * (STEPS - 1)], way


def _refused(rank: int, _: int, model: str) -> None:
    settings = ModelConfig(model, Layers.local, Dtype.float32)

    def actor(way: OptimizerConfig) -> Actor:
        meeting = rendezvous(rank, 1, free_port())
        return Actor(meeting, settings, ParallelConfig(), way, OBJECTIVE, total_steps=1, seed=1)

    for lacks in ({"overlap_grad_reduce": True, "distributed": False}, {"overlap_grad_reduce": False}):
        with pytest.raises(UserError, match="overlap_param_gather=true"):
            actor(replace(PLAIN, overlap_param_gather=True, **lacks))
        mesh.stop()
    learner = actor(PLAIN)
    learner.load_hf(model)
    learner.accumulate(reference.make_batches(1), last=True)
    with pytest.raises(ValueError, match="call apply before more"):
        learner.accumulate(reference.make_batches(1))
    mesh.stop()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_config(layers=1), tmp_path / "model")
    run_group(_refused, 1, str(model))
