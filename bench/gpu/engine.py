"""Measures the tokens per second of an SGLang engine, if SGLang is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from pathlib import Path

from bench.gpu.figures import Figure, NotHereError, Scale
from rlsys.config.schema import Device, Dtype, EngineConfig
from rlsys.rollout.agent.episode import TurnSampling
from rlsys.rollout.engine import Engine

PROMPT_TOKENS = 32
_KV_TOKENS_ON_CPU = 16384
_PLAIN_TOKENS = 256
"""Number of token ids from which prompts are drawn; every vocabulary has these ids."""


def measure(scale: Scale, device: Device, folder: Path) -> list[Figure]:
    """Return the tokens per second of one request, and of many concurrent requests. Raises NotHereError without
    SGLang."""
    if importlib.util.find_spec("sglang") is None:
        raise NotHereError("needs SGLang")
    return asyncio.run(_measure(scale, device, folder))


async def _measure(scale: Scale, device: Device, folder: Path) -> list[Figure]:
    on_gpu = device is Device.gpu
    config = EngineConfig(
        dtype=Dtype.bfloat16 if on_gpu else Dtype.float32,
        memory_fraction=0.7 if on_gpu else 0.05,
        kv_cache_tokens=None if on_gpu else _KV_TOKENS_ON_CPU,
    )
    engine = Engine(str(folder), config, device, seed=0)
    try:
        await engine.start()
        await _rate(engine, scale.requests, scale.new_tokens)  # Warm-up of kernels and CUDA graphs.
        one = await _rate(engine, 1, scale.new_tokens)
        many = await _rate(engine, scale.requests, scale.new_tokens)
    finally:
        await engine.stop()
    return [
        Figure("engine", "one request", one, "tokens/s"),
        Figure("engine", f"{scale.requests} requests", many, "tokens/s", "one request", many / one),
    ]


async def _rate(engine: Engine, requests: int, new_tokens: int) -> float:
    """Return the tokens generated per second for random prompts."""
    draw = random.Random(0)
    sampling = TurnSampling(temperature=1.0, max_new_tokens=new_tokens)
    prompts = [[draw.randrange(_PLAIN_TOKENS) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.generate(prompt, sampling, f"bench-{at}") for at, prompt in enumerate(prompts))
    )
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)
