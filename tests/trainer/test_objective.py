"""The actor's gradient for every aggregation and for KL terms over distributions, on parallel layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, KlEstimator
from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import MicroBatch, collate
from rlsys.trainer.log_prob import ReferencePlan
from rlsys.trainer.model.logprobs import divergence_of
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import rendezvous, run_group, weights_of

KL_COEF, TAU = 0.5, 0.5
OPTIMIZER = OptimizerConfig(lr=0.05, eps=1.0, clip_grad=1e9, weight_decay=0.0)
BATCHES = reference.make_batches(4, seed=3)
# One sequence without a trained token, which counts nowhere.
BATCHES[0].loss_mask[0] = False


def _actor(
    rank: int,
    world: int,
    port: int,
    model: Path,
    parallel: ParallelConfig,
    objective: Objective,
    scratch: str | Path = ".",
) -> Actor:
    config = ModelConfig(str(model), Layers.local, Dtype.float32)
    return Actor(rendezvous(rank, world, port), config, parallel, OPTIMIZER, objective, 3, seed=1, scratch=scratch)


def _aggregated(rank: int, world: int, model: Path, out: Path, ports: Sequence[int]) -> None:
    results = {}
    for aggregation, port in zip(Aggregation, ports, strict=True):
        objective = Objective(reference.LOSS, reference.TEMPERATURE, aggregation, reference.LOSS_LENGTH)
        actor = _actor(rank, world, port, model, ParallelConfig(), objective)
        actor.load_hf(model)
        mine = BATCHES[rank::world]
        stats = [actor.accumulate(mine[:1]), actor.accumulate([reference.packed(*mine[1:])])]
        results[str(aggregation)] = (actor.apply(), [part["divisor"] for part in stats], weights_of(actor))
        mesh.stop()
    torch.save(results, out / f"rank{rank}.pt")


def test_every_aggregation_is_that_of_one_process_whatever_the_split(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_config(layers=2), tmp_path / "model")
    run_group(_aggregated, 2, model, tmp_path, [free_port() for _ in Aggregation])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    norms = set()
    for name, (applied, _, weights) in ranks[0].items():
        module = reference.load(model)
        reference.aggregated(name, reference.by_sequence(module, BATCHES)).backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))  # type: ignore[misc]
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4), name
        for weight, parameter in module.named_parameters():
            # Adam's first step with a large eps: rate x gradient / (|gradient| + eps).
            assert parameter.grad is not None
            step = OPTIMIZER.lr * parameter.grad / (parameter.grad.abs() + OPTIMIZER.eps)
            torch.testing.assert_close(weights[weight], parameter.detach() - step, rtol=1e-4, atol=1e-5)
        norms.add(round(norm, 6))
    assert len(norms) == len(Aggregation)
    sequences = len(reference.by_sequence(reference.load(model), BATCHES))
    for name, divisor in (
        ("fixed-length", sequences * reference.LOSS_LENGTH),
        ("seq-mean-token-mean", sequences),
    ):
        assert sum(part for rank in ranks for part in rank[name][1]) == divisor


def _config(estimator: KlEstimator, top_k: int | None) -> AlgorithmConfig:
    return AlgorithmConfig(kl_coef=KL_COEF, kl_estimator=estimator, kl_topk_tokens=top_k, kl_use_tail_sampling=False)


def _picked(batch: MicroBatch, model: torch.nn.Module) -> MicroBatch:
    """With all tokens of the vocabulary as the most likely ones."""
    row, column = batch.loss_mask.nonzero()
    log_r = _log_p(model, batch)[row, column - 1]
    tokens = np.tile(np.arange(reference.VOCAB, dtype=np.int32)[::-1], (len(row), 1))
    return replace(batch, pick_tokens=tokens, pick_logprobs=log_r.detach().numpy()[:, ::-1].copy())


def _log_p(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    return torch.log_softmax(model(torch.tensor(batch.tokens)).logits / reference.TEMPERATURE, dim=-1)


def _diverging(
    rank: int,
    world: int,
    parallel: ParallelConfig,
    config: AlgorithmConfig,
    model: Path,
    start: Path,
    out: Path,
    ports: Sequence[int],
) -> None:
    """Two steps away from a reference that follows, and the second again from a checkpoint."""
    plan = ReferencePlan(TAU, 1, None) if config.kl_topk_tokens is None else None
    objective = Objective(policy_loss(config), reference.TEMPERATURE, divergence=divergence_of(config), reference=plan)
    batches = BATCHES if plan else [_picked(batch, reference.load(model)) for batch in BATCHES]
    filler = collate([], pad_id=0, multiple_of=4)
    results: list[Any] = []

    def step(actor: Actor) -> None:
        mine = batches[actor.place.dp :: actor.place.dp_size]
        parts = [actor.accumulate([*mine[:1], filler]), actor.accumulate(mine[1:])]
        results.append((actor.apply().grad_norm, sum(part.get("kl", 0.0) for part in parts)))

    actor = _actor(rank, world, ports[0], model, parallel, objective, out)
    actor.load_hf(start)
    step(actor)
    actor.end_step(1)
    actor.begin_save(out / "saved" / "actor")
    actor.finish_save()
    actor.offload()
    actor.restore()
    step(actor)
    mesh.stop()
    actor = _actor(rank, world, ports[1], model, ParallelConfig(), objective)
    actor.load(out / "saved" / "actor")
    step(actor)
    mesh.stop()
    torch.save(results, out / f"rank{rank}.pt")


def _kl_sums(policy: torch.nn.Module, anchor: torch.nn.Module, forward: bool) -> list[Tensor]:
    """Of each micro-batch's trained tokens, over the whole vocabulary."""
    sums = []
    for batch in BATCHES:
        row, column = batch.loss_mask.nonzero()
        log_p, log_r = (_log_p(one, batch)[row, column - 1] for one in (policy, anchor))
        one, other = (log_r.detach(), log_p) if forward else (log_p, log_r.detach())
        sums.append((one.exp() * (one - other)).sum())
    return sums


@pytest.mark.parametrize(
    ("parallel", "estimator", "top_k"),
    [
        pytest.param(ParallelConfig(tp=2), KlEstimator.full_reverse, None, id="reverse-tp2"),
        pytest.param(ParallelConfig(pp=2), KlEstimator.full_forward, None, id="forward-pp2"),
        pytest.param(ParallelConfig(tp=2), KlEstimator.full_reverse, reference.VOCAB, id="top-k-tp2"),
    ],
)
def test_a_kl_over_distributions_is_in_the_gradient(
    parallel: ParallelConfig, estimator: KlEstimator, top_k: int | None, tmp_path: Path
) -> None:
    shape = reference.tiny_config(layers=2)
    model, start = (reference.make_model(shape, tmp_path / str(seed), seed) for seed in (0, 1))
    config = _config(estimator, top_k)
    run_group(_diverging, 2, parallel, config, model, start, tmp_path, [free_port(), free_port()])
    results = torch.load(tmp_path / f"rank{parallel.pp - 1}.pt", weights_only=False)

    policy, anchor = reference.load(start), reference.load(model)
    surrogate = policy_loss(replace(config, kl_coef=0.0))
    tokens = sum(batch.trained_tokens for batch in BATCHES)
    for number in (0, 1):
        policy.zero_grad()
        sums = _kl_sums(policy, anchor, estimator is KlEstimator.full_forward)
        losses = [reference.loss_of(policy, batch, surrogate) for batch in BATCHES]
        kl = torch.stack(sums).sum()
        ((torch.stack(losses).sum() + KL_COEF * kl) / tokens).backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        assert results[number][0] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=2e-4)
        assert results[number][1] == pytest.approx(float(kl.detach()), rel=2e-4)
        if number == 0:
            optimizer = torch.optim.AdamW(policy.parameters(), lr=OPTIMIZER.lr, eps=1.0, weight_decay=0.0)
            optimizer.step()
            with torch.no_grad():
                for ours, theirs in zip(anchor.parameters(), policy.parameters(), strict=True):
                    ours.lerp_(theirs, 1.0 - TAU if top_k is None else 0.0)
    assert results[2][0] == pytest.approx(results[1][0], rel=1e-4)
