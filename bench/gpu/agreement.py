"""Compares the log-probs that an engine reports for its tokens with those that the trainer computes for them.

In bfloat16 both differ from float32 by rounding. The engine's mean difference from the trainer in float32 may be at most
twice that of the trainer in bfloat16. In float32, on a CPU, engine and trainer must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.gpu.engine import generate, prompts, started
from bench.gpu.figures import Figure, Setting, at_most
from bench.gpu.parity import FLOAT32_LIMIT, ROUNDING_LIMIT
from bench.gpu.part import in_new_process
from bench.gpu.trainer import score
from rlsys.config.schema import Dtype, Layers
from rlsys.rollout.agent.recorder import Generation
from rlsys.trainer.batches import MicroBatch

REQUESTS = 64


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the differences between engine and trainer on the engine's tokens."""
    generations = in_new_process(sample, setting)
    batches = micro_batches(prompts(len(generations)), generations)
    engine = np.concatenate([np.array(each.logprobs, dtype=np.float32) for each in generations])
    runs = (setting.model, setting.device)
    (exact,) = in_new_process(
        *(score, *runs, Layers.local, Dtype.float32, [batches]), environment={"NVIDIA_TF32_OVERRIDE": "0"}
    )
    trainer = exact
    if setting.on_gpu:
        (trainer,) = in_new_process(score, *runs, Layers.auto, setting.dtype, [batches])
    yield from differences(engine, trainer, exact)


def sample(setting: Setting) -> list[Generation]:
    """Return an engine's continuations of random prompts. Call it in a new process."""

    async def run() -> list[Generation]:
        async with started(setting) as worker:
            return await generate(worker.engine, min(REQUESTS, max(setting.scale.requests)), setting.scale.new_tokens)

    return asyncio.run(run())


def micro_batches(asked: list[list[int]], generations: list[Generation]) -> list[MicroBatch]:
    """Return one packed micro-batch of all episodes, whose generated tokens are trained."""
    tokens = [np.array([*prompt, *each.token_ids]) for prompt, each in zip(asked, generations, strict=True)]
    mask = [np.arange(len(row)) >= len(prompt) for prompt, row in zip(asked, tokens, strict=True)]
    whole = np.concatenate(tokens)[None]
    return [
        MicroBatch(
            tokens=whole,
            lengths=np.array([len(row) for row in tokens]),
            loss_mask=np.concatenate(mask)[None],
            advantages=np.zeros(whole.shape, dtype=np.float32),
            packed=True,
        )
    ]


def differences(
    engine: NDArray[np.float32], trainer: NDArray[np.float32], exact: NDArray[np.float32]
) -> Iterator[Figure]:
    """Yield the figures for log-probs of the same tokens: `exact` is the trainer's in float32, `trainer` as in a run."""
    apart = np.abs(engine - trainer)
    yield Figure("tokens", float(apart.size))
    yield Figure("mean difference", float(apart.mean()), "nats")
    yield Figure("mean ratio of probabilities", float(np.exp(trainer.astype(np.float64) - engine).mean()))
    if trainer is exact:
        yield at_most("largest difference", float(apart.max()), FLOAT32_LIMIT, "nats")
        return
    yield Figure("largest difference", float(apart.max()), "nats")
    of_engine, of_trainer = (float(np.abs(each - exact).mean()) for each in (engine, trainer))
    yield Figure("mean rounding error of the trainer", of_trainer, "nats")
    yield at_most("rounding error of the engine over that of the trainer", of_engine / of_trainer, ROUNDING_LIMIT)
