"""What is not trained contributes nothing, and how the rest is cut up does not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import RunError
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor
from rlsys.trainer.batches import MicroBatch, collate
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous, run_group, weights_of

PER_TOKEN = ("tokens", "loss_mask", "advantages", "old_logprobs", "ref_logprobs")


def _row(batch: MicroBatch, row: int) -> MicroBatch:
    return replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in ("lengths", *PER_TOKEN)})


def _poisoned(batch: MicroBatch) -> MicroBatch:
    """Other values wherever nothing is trained: in every per-token array, and as tokens of the padding."""
    held = batch.lengths.sum() if batch.packed else batch.lengths[:, None]
    padding = np.arange(batch.tokens.shape[1])[None] >= held
    values = [np.where(batch.loss_mask, array, np.nan).astype(np.float32) for array in _floats(batch)]
    return replace(
        batch,
        tokens=np.where(padding, 99 - batch.tokens, batch.tokens),
        advantages=values[0],
        old_logprobs=values[1],
        ref_logprobs=values[2],
    )


def _floats(batch: MicroBatch) -> list[np.ndarray]:
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return [batch.advantages, batch.old_logprobs, batch.ref_logprobs]


def _widened(batch: MicroBatch) -> MicroBatch:
    """Five columns of padding more."""
    return replace(batch, **{name: np.pad(getattr(batch, name), ((0, 0), (0, 5))) for name in PER_TOKEN})


def _one_step(rank: int, model: str, calls: list[list[MicroBatch]]) -> dict[str, torch.Tensor]:
    actor = Actor(
        rendezvous(rank, 1, free_port()),
        ModelConfig(model, Layers.local, Dtype.float32),
        ParallelConfig(),
        OptimizerConfig(lr=0.1, eps=1.0, clip_grad=1e9),
        OBJECTIVE,
        total_steps=1,
        seed=1,
    )
    actor.load_hf(model)
    for batches in calls:
        actor.accumulate(batches)
    applied = actor.apply()
    weights = weights_of(actor)
    mesh.stop()
    return {**weights, "norm": torch.tensor(applied.grad_norm)}


def _variants(rank: int, _: int, model: str, out: str) -> None:
    batches = reference.make_batches(4, seed=3)
    rows = [_row(batch, row) for batch in batches for row in range(len(batch.tokens))]
    row = reference.packed(*batches)
    fillers = [collate([], pad_id=0, multiple_of=8, packed=packed) for packed in (False, True)]
    variants = {
        "plain": [batches],
        "poisoned": [[_poisoned(batch) for batch in batches]],
        "fillers": [[fillers[0], *batches], fillers],
        "widened": [[_widened(batch) for batch in batches]],
        "rows": [rows[:3], rows[3:4], [], rows[4:]],
        "reversed": [batches[::-1]],
        "packed": [[row]],
        "packed-poisoned": [[_poisoned(row)]],
        "packed-some": [[reference.packed(*batches[1::-1]), reference.packed(batches[2]), batches[3]]],
    }
    results = {name: _one_step(rank, model, calls) for name, calls in variants.items()}
    torch.save(results, f"{out}/results.pt")
    infinite = replace(batches[0], advantages=np.full_like(batches[0].advantages, np.inf))
    with pytest.raises(RunError, match="gradient of optimiser step 1"):
        _one_step(rank, model, [[infinite]])
    mesh.stop()
    with pytest.raises(ValueError, match="first token"):
        _one_step(rank, model, [[replace(batches[0], loss_mask=batches[0].tokens >= 0)]])


def test_masked_tokens_give_nothing_and_cuts_do_not_matter(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_config(layers=2), tmp_path / "model")
    run_group(_variants, 1, str(model), str(tmp_path))
    results = torch.load(tmp_path / "results.pt")
    plain = results.pop("plain")
    moved = (
        (plain["model.norm.weight"] - reference.named_tensors(reference.load(model))["model.norm.weight"]).abs().max()
    )
    assert moved > 1e-4
    for name, tensor in plain.items():
        assert torch.equal(results["poisoned"][name], tensor), name
        assert torch.equal(results["fillers"][name], tensor), name
        assert torch.equal(results["packed-poisoned"][name], results["packed"][name]), name
    for variant, tensors in results.items():
        for name, tensor in plain.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{variant} {name}")
    assert float(plain["norm"]) == pytest.approx(_gradient_norm(model), rel=1e-5)


def _gradient_norm(model: Path) -> float:
    """Of all micro-batches as one batch, in transformers."""
    module, batches = reference.load(model), reference.make_batches(4, seed=3)
    total = torch.stack([reference.loss_of(module, batch) for batch in batches]).sum()
    (total / sum(batch.trained_tokens for batch in batches)).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
