"""The critic on each parallel layout equals transformers' token classification in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from rlsys.algorithms.losses import ValueLoss
from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import RunError, UserError
from rlsys.trainer import mesh
from rlsys.trainer.actor import Critic
from rlsys.trainer.batches import MicroBatch, collate
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import Layout, rendezvous, run_group

# Large eps, so that Adam's update depends on the size of the gradient and not only on its sign.
OPTIMIZER = OptimizerConfig(lr=2e-3, weight_decay=0.1, eps=1e-2, clip_grad=4.0)
CLIP, STEPS, PER_STEP = 0.3, 2, 4


ALONE = Layout()
LAYOUTS = [
    pytest.param(ALONE, id="one-process"),
    pytest.param(Layout(dp=2, tied=False), id="dp2"),
    pytest.param(Layout(tp=2), id="tp2"),
    pytest.param(Layout(tp=2, sequence_parallel=True, tied=False), id="tp2-sp"),
    pytest.param(Layout(pp=2, pp_layers=(2, 1)), id="pp2-tied"),
    pytest.param(Layout(pp=2, pp_layers=(1, 2), tied=False), id="pp2"),
    pytest.param(Layout(cp=2), id="cp2"),
    pytest.param(
        Layout(tp=2, cp=2, pp=2, pp_layers=(1, 2), sequence_parallel=True),
        id="tp2-cp2-pp2",
        marks=pytest.mark.slow,
    ),
    pytest.param(Layout(cp=2, dp=2, tied=False), id="cp2-dp2", marks=pytest.mark.slow),
    pytest.param(
        Layout(tp=2, pp=2, dp=2, pp_layers=(1, 2), sequence_parallel=True),
        id="tp2-pp2-dp2",
        marks=pytest.mark.slow,
    ),
]


def _classifier(policy: Path, out: Path, labels: int = 1) -> Path:
    """The policy's transformer with a random head and a bias."""
    model = AutoModelForTokenClassification.from_pretrained(policy, num_labels=labels, dtype=torch.float32)
    torch.manual_seed(11)
    with torch.no_grad():
        model.score.weight.copy_(0.2 * torch.randn_like(model.score.weight))
        model.score.bias.copy_(0.5 + torch.randn_like(model.score.bias))
    model.save_pretrained(out)
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


def _packed(*batches: MicroBatch, layout: Layout = ALONE) -> MicroBatch:
    return reference.packed(*batches, also=("values", "returns"), cp=layout.cp, tp=layout.tp)


def _critic(rank: int, world: int, port: int, model: Path, parallel: ParallelConfig, **options: Any) -> Critic:
    return Critic(
        rendezvous(rank, world, port),
        ModelConfig(str(model), Layers.local, options.get("dtype", Dtype.float32)),
        parallel,
        OPTIMIZER,
        ValueLoss(CLIP),
        STEPS,
        seed=1,
        scratch=options.get("scratch", "."),
    )


def _train(critic: Critic, step: int, layout: Layout = ALONE) -> list[Any]:
    mine = _steps()[step][critic.place.dp :: critic.place.dp_size]
    # One that trains nothing, and one that is packed.
    filler = layout.filler or collate([], pad_id=0, multiple_of=4, packed=bool(step % 2))
    rows = [_packed(batch, layout=layout) for batch in mine]
    first = rows[:1] if layout.cp > 1 else mine[:1]
    stats = [critic.accumulate(piece) for piece in ([*first, filler], rows[1:])]
    return [stats, critic.apply()]


def _in_group(rank: int, world: int, layout: Layout, model: Path, out: Path, port: int) -> None:
    critic = _critic(rank, world, port, model, layout.parallel)
    critic.load_hf(model)
    padded = _steps()[0]
    probe = [
        padded[0] if layout.cp == 1 else _packed(padded[0], layout=layout),
        _packed(*padded[1:3], layout=layout),
        layout.filler or collate([], pad_id=0, multiple_of=4),
    ]
    results: dict[str, Any] = {"before": critic.compute(probe)}
    results["steps"] = [_train(critic, step, layout) for step in range(STEPS)]
    results["after"] = critic.compute(probe)
    mesh.stop()
    torch.save(results, out / f"rank{rank}.pt")


def _values(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """[rows, width] by transformers, of padded rows; each from the state before its token."""
    scores = model.eval()(torch.tensor(batch.tokens)).logits[..., 0]
    return torch.nn.functional.pad(scores[:, :-1], (1, 0))


def _reference_steps(model: torch.nn.Module) -> list[float]:
    """Train on each step's micro-batches as one batch; gradient norms before clipping."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, others],
        lr=OPTIMIZER.lr,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    norms = []
    for batches in _steps():
        optimizer.zero_grad()
        errors = []
        for batch in batches:
            mask, old, target = (
                torch.tensor(part)[torch.tensor(batch.loss_mask)]
                for part in (batch.loss_mask, batch.values, batch.returns)
            )
            assert mask.all()
            v = _values(model, batch)[torch.tensor(batch.loss_mask)]
            near = torch.minimum(torch.maximum(v, old - CLIP), old + CLIP)
            errors.append(0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2))
        torch.cat(errors).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        optimizer.step()
    return norms


def _assert_values(found: list[np.ndarray], model: torch.nn.Module, tolerance: float, layout: Layout) -> np.ndarray:
    """Compare what `_in_group` computed for its probe; returns the values."""
    padded = _steps()[0]
    with torch.no_grad():
        expected = [_values(model, batch).numpy()[batch.loss_mask] for batch in padded[:3]]
    first = padded[0] if layout.cp == 1 else _packed(padded[0], layout=layout)
    masks = [first.loss_mask, _packed(*padded[1:3], layout=layout).loss_mask]
    for values, mask, numbers in zip(found, masks, (expected[0], np.concatenate(expected[1:])), strict=False):
        assert values.dtype == np.float32
        assert not values[~mask].any()
        np.testing.assert_allclose(values[mask], numbers, rtol=tolerance, atol=tolerance)
    assert not found[2].any()
    return np.concatenate(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_training_equal_transformers(layout: Layout, tmp_path: Path) -> None:
    policy = reference.make_model(reference.tiny_config(tied=layout.tied), tmp_path / "policy")
    model = _classifier(policy, tmp_path / "model")
    world = layout.processes
    run_group(_in_group, world, layout, model, tmp_path, free_port())
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world)]

    trained = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32)
    for rank in layout.reporting:
        before = _assert_values(results[rank]["before"], trained, 2e-5, layout)
    norms = _reference_steps(trained)
    for rank in layout.reporting:
        after = _assert_values(results[rank]["after"], trained, 1e-4, layout)
    assert np.abs(after - before).max() > 0.05
    for rank in set(range(world)) - set(layout.reporting):
        assert results[rank]["before"] is None
        assert not any(stats for step in results[rank]["steps"] for stats in step[0])
    for step, norm in enumerate(norms):
        applied = results[0]["steps"][step][1]
        assert applied.grad_norm == pytest.approx(norm, rel=1e-4)
        tokens = sum(part["tokens"] for rank in layout.reporting for part in results[rank]["steps"][step][0])
        assert tokens == sum(batch.trained_tokens for batch in _steps()[step])


def _weights(critic: Critic) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in critic._model.parameters.items()}


def _alone(rank: int, _: int, policy: Path, model: Path, out: Path) -> None:
    """Padding, packing, fresh heads and offloading, in one process."""
    critic = _critic(rank, 1, free_port(), policy, ParallelConfig(), scratch=out)
    critic.load_hf(policy)
    padded = _steps()[0]
    found = critic.compute(padded)
    assert found is not None
    assert not any(values.any() for values in found), "a fresh head knows nothing"
    gradients = []
    for batches in (padded, [_packed(*padded)], [_packed(*padded[2:]), _packed(*padded[:2])]):
        critic.load_hf(model)
        critic.accumulate(batches)
        # Gradients are one flat buffer; what apply returns is their norm, which would hide a wrong place.
        gradients.append(critic._wrapped.buffers[0].grad_data.clone())
        critic._wrapped.zero_grad_buffer()
        critic._divisor = 0
    # Sums over tokens in another order: rounding is of the largest, not of each.
    rounding = 1e-5 * float(gradients[0].abs().max())
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=rounding)
    with pytest.raises(RunError, match="The critic has gradients"):
        critic.offload()
    critic._pending = False
    with pytest.raises(ValueError, match="values and returns"):
        critic.accumulate([replace(padded[0], returns=None)])

    before, weights = critic.compute(padded), _weights(critic)
    critic.offload()
    with pytest.raises(RunError, match="The critic is offloaded and cannot compute"):
        critic.compute(padded)
    critic.restore()
    again = critic.compute(padded)
    assert before is not None
    assert again is not None
    assert all(np.array_equal(one, other) for one, other in zip(before, again, strict=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in _weights(critic).items())
    with pytest.raises(UserError, match="num_labels=1"):
        critic.load_hf(out / "two_labels")
    mesh.stop()
    critic = _critic(rank, 1, free_port(), policy, ParallelConfig(), dtype=Dtype.bfloat16)
    critic.load_hf(model)
    (rough,) = critic.compute(padded[:1]) or ()
    assert rough.dtype == np.float32
    np.testing.assert_allclose(rough, before[0], atol=0.2)
    mesh.stop()


def test_packing_does_not_matter_and_a_fresh_critic_knows_nothing(tmp_path: Path) -> None:
    policy = reference.make_model(reference.tiny_config(layers=2, tied=False), tmp_path / "policy")
    _classifier(policy, tmp_path / "two_labels", labels=2)
    run_group(_alone, 1, policy, _classifier(policy, tmp_path / "model"), tmp_path)


def _checkpoint(rank: int, world: int, model: Path, out: Path, ports: list[int]) -> None:
    layouts = [ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2, pp_layers=[1, 2])]
    critic = _critic(rank, world, ports[0], model, layouts[0])
    critic.load_hf(model)
    _train(critic, 0)
    critic.begin_save(out / "checkpoint")
    critic.finish_save()
    results = {"saved": critic.compute(_steps()[0])}
    _train(critic, 1)
    results["0"] = critic.compute(_steps()[0])
    for number, (layout, port) in enumerate(zip(layouts, ports[1:], strict=True)):
        mesh.stop()
        critic = _critic(rank, world, port, model, layout)
        assert critic.load(out / "checkpoint") == (number == 0)
        assert critic.step == 1
        results[f"loaded{number}"] = critic.compute(_steps()[0])
        _train(critic, 1)
        results[f"trained{number}"] = critic.compute(_steps()[0])
    mesh.stop()
    torch.save(results, out / f"rank{rank}.pt")


def test_a_checkpoint_continues_under_another_cut(tmp_path: Path) -> None:
    policy = reference.make_model(reference.tiny_config(tied=False), tmp_path / "policy")
    model = _classifier(policy, tmp_path / "model")
    run_group(_checkpoint, 2, model, tmp_path, [free_port() for _ in range(4)])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert np.abs(ranks[0]["0"][0] - ranks[0]["saved"][0]).max() > 1e-3
    for number, reporting in enumerate((0, 0, 1)):
        for name, expected in (("loaded", "saved"), ("trained", "0")):
            for found, values in zip(ranks[reporting][f"{name}{number}"], ranks[0][expected], strict=True):
                tolerance = 0.0 if number == 0 else 2e-5
                np.testing.assert_allclose(found, values, rtol=tolerance, atol=tolerance)
