"""What SGLang says greedily, from a process of its own: `python -m tests.weights.convert.greedy FOLDER TOKENS < PROMPTS`.

Prompts are a JSON list of lists of tokens, and so is what is printed, as the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys

from rlsys.config.schema import Device, Dtype, EngineConfig
from rlsys.rollout.agent.episode import TurnSampling
from rlsys.rollout.engine import Engine


async def answers(folder: str, tokens: int, prompts: list[list[int]]) -> list[list[int]]:
    """At most `tokens` after each prompt, by an engine on the CPU in float32."""
    config = EngineConfig(dtype=Dtype.float32, memory_fraction=0.05, kv_cache_tokens=1024, max_running=4)
    engine = Engine(folder, config, Device.cpu, seed=0)
    await engine.start()
    try:
        sampling = TurnSampling(temperature=0.0, max_new_tokens=tokens)
        said = [await engine.generate(prompt, sampling, "greedy") for prompt in prompts]
    finally:
        await engine.stop()
    return [generation.token_ids for generation in said]


if __name__ == "__main__":  # SGLang spawns processes, which import this again.
    print(json.dumps(asyncio.run(answers(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
