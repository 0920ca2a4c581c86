"""What comes back from Megatron is a model to those who never heard of it: transformers, and SGLang."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.config.schema import Device, Dtype, EngineConfig, ParallelConfig
from rlsys.rollout.agent.episode import TurnSampling
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.hf_io import INDEX
from tests.support import tiny
from tests.support.paths import PROJECT
from tests.weights.convert.models import assert_same_logits, configs, logits_by_transformers, make_model

PROMPTS = [[5, 99, 7, 42], [17], [3, 1, 4, 1, 5, 9, 2, 6]]
NEW_TOKENS = 24
TOKENS = torch.tensor(np.random.default_rng(3).integers(0, 100, size=(2, 48)))


def converted(folder: Path, family: str, dtype: torch.dtype, critic: bool = False) -> tuple[Path, Path]:
    """A model with a tokenizer, and the same one after a round trip without it, in several files."""
    model, megatron, back = folder / "model", folder / "megatron", folder / "back"
    make_model(model, family, dtype, critic, tokenizer=False)
    tiny.tokenizer().save_pretrained(model)
    hf_to_megatron(model, megatron, parallel=ParallelConfig(tp=2, pp=3), values=critic, processes=1)
    megatron_to_hf(megatron, back, shard_bytes=60_000, processes=1)
    assert (back / INDEX).is_file()
    return model, back


@pytest.mark.parametrize(("family", "critic"), [("qwen3-moe", False), ("llama-tied", True)])
def test_transformers_computes_the_same(family: str, critic: bool, tmp_path: Path) -> None:
    model, back = converted(tmp_path, family, torch.bfloat16, critic)
    expected, found = (logits_by_transformers(folder, TOKENS, critic) for folder in (model, back))
    assert_same_logits(found, expected)
    text = "Question: What is the capital of France?"
    assert AutoTokenizer.from_pretrained(back)(text) == AutoTokenizer.from_pretrained(model)(text)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("family", configs())
def test_sglang_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    """Greedily: the engine of the converted folder, transformers of the original."""
    model, back = converted(tmp_path, family, torch.float32)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.weights.convert.test_loads_elsewhere", str(back)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said == by_transformers(model)
    assert len({token for answer in said for token in answer}) > 10


def by_transformers(folder: Path) -> list[list[int]]:
    """As the engine, an answer ends with the end of sequence, which is its last token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    return [model.generate(torch.tensor([ids]), **options)[0].tolist()[len(ids) :] for ids in PROMPTS]


async def by_sglang(folder: str) -> list[list[int]]:
    """The same of an engine on the CPU in float32, which wants a process of its own."""
    from rlsys.rollout.engine import Engine

    config = EngineConfig(dtype=Dtype.float32, memory_fraction=0.05, kv_cache_tokens=1024, max_running=4)
    engine = Engine(folder, config, Device.cpu, seed=0)
    await engine.start()
    try:
        sampling = TurnSampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
        said = [await engine.generate(prompt, sampling, "greedy") for prompt in PROMPTS]
    finally:
        await engine.stop()
    return [generation.token_ids for generation in said]


if __name__ == "__main__":  # SGLang spawns processes, which import this again.
    print(json.dumps(asyncio.run(by_sglang(sys.argv[1]))))
