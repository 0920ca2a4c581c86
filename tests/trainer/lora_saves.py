"""Saves and loads checkpoints of adapters (LoRA) in Megatron processes, which need not import PEFT."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema import LoraConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer.actor import Actor
from tests.support.megatron_processes import Group
from tests.trainer import reference
from tests.trainer.harness import OPTIMIZER, WHOLE, Layout, make_actor, weights_of

STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
LORA = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "down_proj", "gate_proj"])
OTHERS = {
    "rank": replace(LORA, rank=3),
    "alpha": replace(LORA, alpha=1.0),
    "targets": replace(LORA, targets=["q_proj"]),
    "whole": WHOLE,
}


def _train(actor: Actor, *steps: int) -> None:
    for step in steps:
        actor.accumulate(STEPS[step][actor.coords.dp :: actor.coords.dp_size])
        actor.apply()


def _actor(group: Group, model: Path, parallel: ParallelConfig, lora: LoraConfig = LORA) -> Actor:
    actor = make_actor(group, model, parallel, replace(OPTIMIZER, lr=2e-2), lora=lora)
    actor.load_hf(model)
    return actor


def saved_and_resumed(group: Group, model: Path, other: Path, folder: Path, again: ParallelConfig) -> dict[str, Any]:
    tp2 = ParallelConfig(tp=2, sequence_parallel=True)
    actor = _actor(group, model, tp2)
    _train(actor, 0, 1)
    actor.begin_save(folder)
    saved = weights_of(actor)
    _train(actor, 2)
    actor.finish_save()
    results: dict[str, Any] = {"saved": saved, "trained": weights_of(actor)}
    actor = _actor(group, model, tp2)
    actor.load(folder)
    results["loaded"] = weights_of(actor)
    _train(actor, 2)
    results["resumed"] = weights_of(actor)
    actor = _actor(group, model, again)
    actor.load(folder)
    _train(actor, 2)
    results["elsewhere"] = weights_of(actor)
    results["refused"] = {}
    for name, lora in OTHERS.items():
        results["refused"][name] = _refusal(_actor(group, model, tp2, lora), folder)
    results["refused"]["base"] = _refusal(_actor(group, other, tp2), folder)
    return results


def _refusal(actor: Actor, folder: Path) -> tuple[str, str]:
    with pytest.raises(UserError) as caught:
        actor.load(folder)
    return caught.value.code, str(caught.value.key)


def whole_then_adapted(group: Group, model: Path, folder: Path) -> tuple[str, str]:
    layout = Layout()
    actor = _actor(group, model, layout.parallel, WHOLE)
    actor.begin_save(folder)
    actor.finish_save()
    return _refusal(_actor(group, model, layout.parallel), folder)
