"""A run that goes on from a checkpoint equals the one that was not interrupted, under its own layout and under another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsys.config.schema import Dtype, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer.actor import Actor
from rlsys.weights.checkpoint.store import About, read_about
from rlsys.weights.convert.conversion import megatron_to_hf
from rlsys.weights.hf_io import HfReader
from tests.trainer import reference
from tests.trainer.harness import OPTIMIZER, Group, on_ranks, weights_of

STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
CUTS = {"dp2": ParallelConfig(), "tp2": ParallelConfig(tp=2), "cp2": ParallelConfig(cp=2)}
"""Of two processes."""
Weights = dict[str, torch.Tensor]


def _train(actor: Actor, step: int) -> Weights:
    cp, mine = actor.place.cp_size, STEPS[step][actor.place.dp :: actor.place.dp_size]
    actor.accumulate([reference.packed(batch, cp=cp) for batch in mine] if cp > 1 else mine)
    actor.apply()
    return weights_of(actor)


def _resume(
    group: Group, model: Path, checkpoint: Path, cuts: tuple[str, str], distributed: bool, dtype: Dtype
) -> tuple[Weights, ...]:
    """Weights when they were saved under the first cut, one step on, and one step on from the checkpoint under both."""
    optimizer = replace(OPTIMIZER, distributed=distributed)
    actor = group.actor(model, CUTS[cuts[0]], optimizer, dtype=dtype)
    actor.load_hf(model)
    _train(actor, 0)
    saved = _train(actor, 1)
    actor.begin_save(checkpoint)
    actor.finish_save()
    weights = [saved, _train(actor, 2)]
    for number, cut in enumerate(cuts):
        actor = group.actor(model, CUTS[cut], optimizer, dtype=dtype)
        assert actor.load(checkpoint) == (number == 0)
        assert actor.step == 2
        weights.append(_train(actor, 2))
    return tuple(weights)


@pytest.mark.parametrize(
    ("cuts", "distributed", "dtype", "tolerance"),
    [
        (("cp2", "tp2"), True, Dtype.float32, 2e-5),
        pytest.param(("tp2", "cp2"), True, Dtype.float32, 2e-5, marks=pytest.mark.slow),
        pytest.param(("dp2", "tp2"), False, Dtype.float32, 2e-5, marks=pytest.mark.slow),
        pytest.param(("dp2", "tp2"), True, Dtype.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    cuts: tuple[str, str], distributed: bool, dtype: Dtype, tolerance: float, tmp_path: Path
) -> None:
    model, checkpoint = reference.make_model(reference.tiny_config(), tmp_path / "model"), tmp_path / "checkpoint"
    saved, uninterrupted, resumed, resharded = on_ranks(_resume, 2, model, checkpoint, cuts, distributed, dtype)[0]
    assert any(not torch.equal(saved[name], tensor) for name, tensor in uninterrupted.items())
    for name, tensor in uninterrupted.items():
        assert torch.equal(tensor, resumed[name]), name
        torch.testing.assert_close(resharded[name], tensor, rtol=tolerance, atol=tolerance)
    megatron_to_hf(checkpoint, tmp_path / "hf", model, shard_bytes=60_000, processes=1)
    converted = HfReader(tmp_path / "hf")
    assert converted.names() == saved.keys()
    assert all(torch.equal(converted.get(name), tensor) for name, tensor in saved.items())


def test_what_a_checkpoint_says_of_itself_is_read_whoever_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "complete.json"
    ours = About(3, optimizer=True, version=2, master=True, layout={"tp": 2, "dp": 1})
    file.write_text(ours.to_json())
    assert read_about(tmp_path) == ours
    # Other versions say more, or less.
    file.write_text('{"step": 5, "optimizer": true, "dtype": "bfloat16", "extra": {}}')
    assert read_about(tmp_path) == About(step=5, optimizer=True)
    file.write_text('{"step": 0}')
    assert read_about(tmp_path) == About(step=0, optimizer=False, version=0, master=False, layout=None)
    for damaged in ("", "[]", "{}", '{"optimizer": true}', "\0"):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"complete\.json"):
            read_about(tmp_path)
