"""Compares training of adapters (LoRA) with training of the whole model: bytes and seconds of an optimiser step.

    python -m bench.lora [--model examples/searchr1/tiny/policy] [--rank 8] [--steps 4]

One process trains each of the three on the same random micro-batches and exports the weights after every step. Adapters
are exported with each value of `model.lora.sync`. Optimiser state, trained parameters, checkpoint and exported tensors are
counted, not estimated. The first step is not timed. The command prints a table and writes outputs/bench/lora.json.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import AdamwConfig, Device, Dtype, Layers, LoraConfig, LoraSync, ModelConfig, ParallelConfig
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.export import export_plan, whole_tensors
from rlsys.weights.weight_map import read_architecture

RESULT = Path("outputs/bench/lora.json")
POLICY = Path("examples/searchr1/tiny/policy")
ROWS, WIDTH = 8, 256
ALONE = mesh.Rendezvous(0, 1, "127.0.0.1", 0, Device.cpu, 600.0)  # Port 0: any free port.


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder.")] = POLICY,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Optimiser steps of each training.", min=2)] = 4,
) -> None:
    """Measure all trainings, and print and write the figures."""
    settings = {"whole": LoraConfig()} | {sync.value: LoraConfig(rank, sync=sync) for sync in LoraSync}
    found = {name: measured(model, lora, steps) for name, lora in settings.items()}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"model": str(model), "rank": rank, "steps": steps, **found}, indent=2) + "\n")
    table = Table("", "whole model", *(f"LoRA, rank {rank}, sync={sync}" for sync in LoraSync))
    for figure in found["whole"]:
        table.add_row(figure, *(f"{of_one[figure]:,.4g}" for of_one in found.values()))
    Console().print(table)


def measured(model: Path, lora: LoraConfig, steps: int) -> dict[str, float]:
    """Train for `steps` optimiser steps; return bytes, and the median seconds of a step and of an export."""
    config = ModelConfig(str(model), Layers.local, Dtype.float32, lora=lora)
    objective = Objective(policy_loss(AlgorithmConfig(kl_coef=0.0)), temperature=1.0)
    with TemporaryDirectory() as folder:
        actor = Actor(ALONE, config, ParallelConfig(), AdamwConfig(lr=1e-4), objective, steps, 1, folder)
        actor.load_hf(model)
        batch = _batch(read_architecture(model).vocab)
        step_s, export_s, exported = [], [], {}
        for _ in range(steps):
            started = time.perf_counter()
            actor.accumulate([batch])
            actor.apply()
            step_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            runs = export_plan(actor._policy, 2**30)
            exported = {name: tensor.nbytes for run in runs for name, tensor in whole_tensors(actor._policy, run)}
            export_s.append(time.perf_counter() - started)
        actor.begin_save(Path(folder) / "saved")
        saved = actor.finish_save().bytes
        held: list[Any] = list(actor._optimizer.tensors())
        trained = sum(one.nbytes for one in actor._policy.trainable.values())
    mesh.stop()
    return {
        "trained parameters, bytes": trained,
        "optimiser state, bytes": sum(tensor.nbytes for tensor in held) - trained,
        "checkpoint, bytes": saved,
        "sync, bytes": sum(exported.values()),
        "optimiser step, s": median(step_s[1:]),
        "gathering of an export, s": median(export_s[1:]),
    }


def _batch(vocab: int) -> MicroBatch:
    """Return a micro-batch of random tokens, of which the second half is trained."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab, size=(ROWS, WIDTH))
    mask = np.arange(WIDTH)[None, :].repeat(ROWS, axis=0) >= WIDTH // 2
    advantages = random.standard_normal(tokens.shape).astype(np.float32) * mask
    batch = MicroBatch(tokens, np.full(ROWS, WIDTH), mask, advantages)
    return replace(batch, old_logprobs=np.full(tokens.shape, -np.log(vocab), dtype=np.float32))


if __name__ == "__main__":
    typer.run(main)
