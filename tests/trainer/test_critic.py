"""Tests of the critic on parallel layouts against transformers' token classification in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from rlsys.algorithms.losses import ValueLoss
from rlsys.config.schema import AdamwConfig, ParallelConfig
from rlsys.errors import RunError
from rlsys.trainer.actor import Critic
from rlsys.trainer.batches import MicroBatch, collate
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.support.refusals import refused
from tests.support.tensors import save_model
from tests.trainer import reference
from tests.trainer.harness import Layout, local_model

# Large, so that Adam's update depends on the size of the gradient as well as its sign.
OPTIMIZER = AdamwConfig(lr=2e-3, weight_decay=0.1, eps=1e-2, clip_grad=4.0)
CLIP, STEPS, PER_STEP = 0.3, 2, 4


ONE_RANK = Layout()
LAYOUTS = [
    pytest.param(Layout(tp=2, sequence_parallel=True, tied=False), id="tp2-sp"),
    pytest.param(Layout(pp=2, pp_layers=(2, 1)), id="pp2-tied", marks=pytest.mark.slow),
    pytest.param(Layout(tp=2, cp=2, sequence_parallel=True), id="tp2-cp2", marks=pytest.mark.slow),
    pytest.param(Layout(cp=2, dp=2, tied=False), id="cp2-dp2", marks=pytest.mark.slow),
]


def _classifier(policy: Path, out: Path, labels: int = 1) -> Path:
    """A token classifier on the policy's transformer, with a random head and bias."""
    model = AutoModelForTokenClassification.from_pretrained(policy, num_labels=labels, dtype=torch.float32)
    torch.manual_seed(11)
    with torch.no_grad():
        model.score.weight.copy_(0.2 * torch.randn_like(model.score.weight))
        model.score.bias.copy_(0.5 + torch.randn_like(model.score.bias))
    save_model(model, out)
    return out


def _steps() -> list[list[MicroBatch]]:
    random = np.random.default_rng(2)
    steps = []
    for step in range(STEPS):
        numbers = (
            (batch, random.standard_normal((2, *batch.tokens.shape)).astype(np.float32))
            for batch in reference.make_batches(PER_STEP, seed=step)
        )
        steps.append([replace(b, values=0.5 * n[0], returns=n[1]) for b, n in numbers])
    return steps


def _packed(*batches: MicroBatch, layout: Layout = ONE_RANK) -> MicroBatch:
    return reference.packed(*batches, also=("values", "returns"), cp=layout.cp, tp=layout.tp)


def _critic(group: Group, model: Path, parallel: ParallelConfig | None = None) -> Critic:
    config, loss = local_model(model), ValueLoss(CLIP)
    return Critic(group.meet(), config, parallel or ParallelConfig(), OPTIMIZER, loss, STEPS, seed=1)


def _train(critic: Critic, step: int, layout: Layout = ONE_RANK) -> list[Any]:
    mine = _steps()[step][critic.coords.dp :: critic.coords.dp_size]
    # Add a micro-batch without trained tokens.
    filler = layout.filler or collate([], pad_id=0, multiple_of=4, packed=bool(step % 2))
    rows = [_packed(batch, layout=layout) for batch in mine]
    first = rows[:1] if layout.cp > 1 else mine[:1]
    stats = [critic.accumulate(piece) for piece in ([*first, filler], rows[1:])]
    return [stats, critic.apply()]


def _probe(layout: Layout) -> list[MicroBatch]:
    """One micro-batch of the first step, two others packed in one row, and one without trained tokens."""
    first, *others = _steps()[0][:3]
    if layout.cp > 1:
        first = _packed(first, layout=layout)
    return [first, _packed(*others, layout=layout), layout.filler or collate([], pad_id=0, multiple_of=4)]


def _in_group(group: Group, layout: Layout, model: Path, checkpoint: Path) -> dict[str, Any]:
    critic = _critic(group, model, layout.parallel)
    critic.load_hf(model)
    results = {"before": critic.compute(_probe(layout)), "steps": [_train(critic, 0, layout)]}
    critic.begin_save(checkpoint)
    critic.finish_save()
    results["steps"].append(_train(critic, 1, layout))
    results["after"] = critic.compute(_probe(layout))
    # Resume under another layout: one pipeline stage, and a whole copy on each rank.
    critic = _critic(group, model)
    critic.load(checkpoint)
    _train(critic, 1)
    return results | {"after, other layout": critic.compute(_probe(ONE_RANK))}


def _values(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Values [rows, width] of padded rows by transformers, each computed from the state before its token."""
    scores = model.eval()(torch.tensor(batch.tokens)).logits[..., 0]
    return torch.nn.functional.pad(scores[:, :-1], (1, 0))


def _reference_steps(model: torch.nn.Module) -> list[float]:
    """Train on each step's micro-batches as one batch; returns the gradient norms before clipping."""
    optimizer = reference.optimizer_of(model, OPTIMIZER)
    norms = []
    for batches in _steps():
        optimizer.zero_grad()
        errors = []
        for batch in batches:
            mask = torch.tensor(batch.loss_mask)
            old, target = torch.tensor(batch.values)[mask], torch.tensor(batch.returns)[mask]
            v = _values(model, batch)[mask]
            near = torch.minimum(torch.maximum(v, old - CLIP), old + CLIP)
            errors.append(0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2))
        torch.cat(errors).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        optimizer.step()
    return norms


def _assert_values(found: list[np.ndarray], model: torch.nn.Module, tolerance: float, layout: Layout) -> np.ndarray:
    """Compare the probe's values, as returned by `_in_group`, with those of `model`; returns the expected values."""
    with torch.no_grad():
        expected = [_values(model, batch).numpy()[batch.loss_mask] for batch in _steps()[0][:3]]
    numbers = expected[0], np.concatenate(expected[1:]), np.zeros(0, np.float32)
    for values, batch, wanted in zip(found, _probe(layout), numbers, strict=True):
        assert values.dtype == np.float32
        assert not values[~batch.loss_mask].any()
        np.testing.assert_allclose(values[batch.loss_mask], wanted, rtol=tolerance, atol=tolerance)
    return np.concatenate(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_critic_values_and_training_equal_transformers(layout: Layout, tmp_path: Path) -> None:
    policy = reference.make_model(tiny_configs.qwen2(tied=layout.tied), tmp_path / "policy")
    model = _classifier(policy, tmp_path / "model")
    world = layout.processes
    results = on_ranks(_in_group, world, layout, model, tmp_path / "checkpoint")

    trained = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32)
    for rank in layout.reporting:
        before = _assert_values(results[rank]["before"], trained, 2e-5, layout)
    norms = _reference_steps(trained)
    for rank in layout.reporting:
        after = _assert_values(results[rank]["after"], trained, 1e-4, layout)
    assert np.abs(after - before).max() > 0.05
    for found in results:
        _assert_values(found["after, other layout"], trained, 1e-4, ONE_RANK)
    for rank in set(range(world)) - set(layout.reporting):
        assert results[rank]["before"] is None
        assert not any(stats for step in results[rank]["steps"] for stats in step[0])
    for step, norm in enumerate(norms):
        applied = results[0]["steps"][step][1]
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4)
        tokens = sum(part.stats["tokens"] for rank in layout.reporting for part in results[rank]["steps"][step][0])
        assert tokens == sum(batch.trained_tokens for batch in _steps()[step])


def _new_critic(group: Group, policy: Path, two_labels: Path) -> None:
    critic = _critic(group, policy)
    critic.load_hf(policy)
    batches = _steps()[0]
    found = critic.compute(batches)
    assert found is not None
    assert not any(values.any() for values in found)
    with pytest.raises(ValueError, match="returns"):
        critic.accumulate([replace(batches[0], returns=None)])
    critic._scratch = policy.parent
    critic.offload()
    with pytest.raises(RunError, match="offloaded"):
        critic.compute(batches)
    critic.restore()
    with refused("mismatch", two_labels):
        critic.load_hf(two_labels)


def test_new_critic_predicts_zero_and_refuses_missing_returns_and_two_labels(tmp_path: Path) -> None:
    policy = reference.make_model(tiny_configs.qwen2(layers=2, tied=False), tmp_path / "policy")
    on_ranks(_new_critic, 1, policy, _classifier(policy, tmp_path / "two_labels", labels=2))
