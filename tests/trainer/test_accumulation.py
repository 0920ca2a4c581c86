"""Tests of gradient accumulation: masked tokens, and splits of a step into micro-batches and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.config.schema import AdamwConfig
from rlsys.errors import RunError
from rlsys.trainer.batches import MicroBatch, collate
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import make_actor, weights_of

FLOATS = ("advantages", "old_logprobs", "ref_logprobs")


def _poisoned(batch: MicroBatch) -> MicroBatch:
    """A copy with NaN in every per-token array at untrained tokens, and with other token ids in the padding."""
    held = batch.lengths.sum() if batch.packed else batch.lengths[:, None]
    padding = np.arange(batch.tokens.shape[1])[None] >= held
    floats = {name: np.where(batch.loss_mask, getattr(batch, name), np.float32(np.nan)) for name in FLOATS}
    return replace(batch, tokens=np.where(padding, 99 - batch.tokens, batch.tokens), **floats)


def _one_step(group: Group, model: Path, calls: list[list[MicroBatch]]) -> dict[str, torch.Tensor]:
    actor = make_actor(group, model, optimizer=AdamwConfig(lr=0.1, eps=1.0, clip_grad=1e9))
    actor.load_hf(model)
    for batches in calls:
        actor.accumulate(batches)
    applied = actor.apply()
    return {**weights_of(actor), "norm": torch.tensor(applied.grad_norm)}


def _variants(group: Group, model: Path) -> dict[str, dict[str, torch.Tensor]]:
    batches = reference.make_batches(4, seed=3)
    rows = reference.rows_of(batches)
    row = reference.packed(*batches)
    fillers = [collate([], pad_id=0, multiple_of=8, packed=packed) for packed in (False, True)]
    variants = {
        "plain": [batches],
        "poisoned and filled": [[fillers[0], *map(_poisoned, batches)], fillers],
        "rows, reversed": [rows[4:][::-1], rows[:3], [], rows[3:4]],
        "packed": [[row]],
        "packed, poisoned": [[_poisoned(row)]],
        "some packed": [[reference.packed(*batches[1::-1]), reference.packed(batches[2]), batches[3]]],
    }
    results = {name: _one_step(group, model, calls) for name, calls in variants.items()}
    actor = make_actor(group, model)
    with pytest.raises(ValueError, match="first token"):
        actor.accumulate([replace(batches[0], loss_mask=batches[0].tokens >= 0)])
    with pytest.raises(ValueError, match="old_logprobs"):
        actor.accumulate([replace(batches[0], old_logprobs=None)])
    actor.load_hf(model)
    actor.accumulate([replace(batches[0], advantages=np.full_like(batches[0].advantages, np.inf))], last=True)
    with pytest.raises(ValueError, match="apply"):
        actor.accumulate(batches)
    with pytest.raises(RunError, match="optimiser step 1"):
        actor.apply()
    return results


def test_masked_tokens_get_no_gradient_and_micro_batch_splits_change_nothing(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(layers=2), tmp_path / "model")
    (results,) = on_ranks(_variants, 1, model)
    plain = results.pop("plain")
    for name, tensor in plain.items():
        assert torch.equal(results["poisoned and filled"][name], tensor), name
        assert torch.equal(results["packed, poisoned"][name], results["packed"][name]), name
    for variant, tensors in results.items():
        for name, tensor in plain.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{variant} {name}")
    batches = reference.make_batches(4, seed=3)
    expected = _gradient_norm(model, batches, sum(batch.trained_tokens for batch in batches))
    assert float(plain["norm"]) == pytest.approx(expected, rel=1e-5)


def _gradient_norm(model: Path, batches: Sequence[MicroBatch], divisor: int) -> float:
    """Gradient norm of all micro-batches as one batch, by transformers."""
    module = reference.load(model)
    total = torch.stack([reference.loss_of(module, batch) for batch in batches]).sum()
    (total / divisor).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
