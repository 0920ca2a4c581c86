"""Tests of routing replay with SGLang: its experts make Megatron's log-probs agree as those of a dense model do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from examples.searchr1.tiny.demo import prepare_world
from rlsys.config.algorithm import RouterReplay
from rlsys.config.schema import Device, Dtype, ParallelConfig, SglangConfig
from rlsys.data.trajectory import Sample
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.engine import EngineDriver
from rlsys.trainer.batches import collate
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.weights.weight_map import read_architecture
from tests.live.miniature_run import tiny_run, train_two_steps
from tests.support.megatron_processes import Group, on_ranks
from tests.support.tiny_models import tiny_model
from tests.support.trajectories import sample
from tests.trainer.harness import local_model

pytestmark = [pytest.mark.slow, pytest.mark.engine]
PROMPTS = [[5 + (7 * row + 11 * place) % 90 for place in range(12 + 9 * row)] for row in range(8)]
NEW = 40


def undecided(folder: Path, spread: float) -> Path:
    """A mixture of experts whose routers give all experts nearly the same logit, so that rounding decides."""
    file = tiny_model("qwen3_moe", folder) / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            middle = weight.mean(0, keepdim=True)
            weights[name] = (middle + spread * (weight - middle)).contiguous()
    save_file(weights, file, {"format": "pt"})
    return folder


def said_by_sglang(folder: Path, dtype: Dtype) -> list[Generation]:
    """Answers to `PROMPTS`; runs in a process of its own, whose children SGLang ends."""
    config = SglangConfig(dtype=dtype, kv_cache_tokens=4096, max_running=len(PROMPTS))
    architecture = read_architecture(folder, weights_only=True)
    routed = bool(architecture.experts)
    sampling = TurnSampling(1.0, max_new_tokens=NEW, routes_from=0 if routed else None)
    engine = EngineDriver(str(folder), config, Device.cpu, 3, architecture=architecture, returns_routes=routed)

    async def generate() -> list[Generation]:
        await engine.start()
        try:
            return await asyncio.gather(*(engine.generate(ids, sampling, f"r{at}") for at, ids in enumerate(PROMPTS)))
        finally:
            await engine.stop()

    return asyncio.run(generate())


def samples_of(said: Sequence[Generation], replayed: bool) -> list[Sample]:
    samples = []
    for ids, one in zip(PROMPTS, said, strict=True):
        made = sample([*ids, *one.token_ids], [False] * len(ids) + [True] * len(one.token_ids))
        if replayed:
            assert one.routes is not None
            routes = np.append(one.routes, np.full_like(one.routes[:1], 255), axis=0)
            made = replace(made, trajectory=replace(made.trajectory, routes=routes))
        samples.append(made)
    return samples


def scored(group: Group, folder: Path, dtype: Dtype, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Megatron's log-probs of the trained tokens of each sample."""
    worker = LogProbWorker(group.meet(), local_model(folder, dtype), ParallelConfig(), 1.0, 1)
    found = []
    for one in samples:
        (result,) = worker.compute([collate([one], 0, packed=True)]) or ()
        assert result.policy is not None
        found.append(result.policy[0][: len(one.trajectory.tokens)][one.trajectory.loss_mask])
    return found


def difference(folder: Path, dtype: Dtype, said: Sequence[Generation], replayed: bool) -> float:
    """Mean absolute difference of engine and trainer log-probs, in nats."""
    (found,) = on_ranks(scored, 1, folder, dtype, samples_of(said, replayed))
    pairs = zip(found, said, strict=True)
    return float(np.concatenate([np.abs(ours - np.array(one.logprobs)) for ours, one in pairs]).mean())


@pytest.mark.timeout(1800)
def test_difference_of_log_probs_falls_to_that_of_a_dense_model(tmp_path: Path) -> None:
    dense, experts = tiny_model("llama", tmp_path / "dense"), undecided(tmp_path / "experts", spread=0.01)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        of_dense, of_experts = (
            processes.submit(said_by_sglang, folder, Dtype.bfloat16).result() for folder in (dense, experts)
        )
    torch.set_num_threads(1)
    floor = difference(dense, Dtype.bfloat16, of_dense, replayed=False)
    free = difference(experts, Dtype.bfloat16, of_experts, replayed=False)
    replayed = difference(experts, Dtype.bfloat16, of_experts, replayed=True)
    print(f"dense {floor:.5f}, experts {free:.5f}, experts with replay {replayed:.5f}")
    assert replayed < 2 * floor
    assert free > 5 * replayed


@pytest.mark.timeout(0)  # Each of the runs has a time limit.
def test_run_with_undecided_routers_scores_what_its_engine_sampled(tmp_path: Path) -> None:
    prepare_world(Console(quiet=True))
    config = tiny_run(undecided(tmp_path / "model", spread=1e-6))
    with pytest.raises(AssertionError, match="the engines and Megatron must compute the same model"):
        train_two_steps(config, tmp_path / "free")
    replayed = replace(config.algorithm, router_replay=RouterReplay.r3)
    train_two_steps(replace(config, algorithm=replayed), tmp_path / "replayed")
