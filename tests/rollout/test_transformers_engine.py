"""Tests of the transformers engine: tokens and log-probs against transformers, stops, aborts, updates, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import sqrt
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlsys.config.schema import Device, Dtype, ParallelConfig, TransformersConfig
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.engine import EngineDriver
from rlsys.weights.bucket import Bucket
from rlsys.weights.hf_io import with_attention_scale
from tests.rollout.bench import EngineBench, endless, greedy, greedy_by_transformers
from tests.rollout.contract import ENDS, End, Progress, assert_logprobs, check_end, check_end_token, check_switch
from tests.support import tiny
from tests.support.megatron_processes import Group, on_ranks
from tests.support.refusals import refused
from tests.support.tensors import digest_of, pack
from tests.support.tiny_models import BUILT_IN, tiny_model
from tests.trainer.harness import export, make_actor

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHANGED = "model.layers.1.self_attn.k_proj.weight"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineBench]:
    words = tiny.tokenizer()
    first, second = tiny.train(tiny.FIRST, words, seed=0), tiny.train(tiny.SECOND, words, seed=1)
    engine = new_engine(Path(tiny.save(first, words, tmp_path_factory.mktemp("policy"))))
    before = set(psutil.Process().children())
    await engine.start()
    (child,) = set(psutil.Process().children()) - before
    yield EngineBench(engine, words, first, second)
    await engine.stop()
    assert not child.is_running()


def new_engine(folder: Path, start_timeout_s: float = 600.0) -> EngineDriver:
    config = TransformersConfig(dtype=Dtype.float32, max_running=400, start_timeout_s=start_timeout_s)
    return EngineDriver(str(folder), config, Device.cpu, seed=7)


async def test_greedy_requests_that_join_one_another_are_those_of_transformers(world: EngineBench) -> None:
    version = await world.bring(world.first)
    prompts = [world.encode(text) for text in (tiny.FIRST.prompt[:20], "zzz ü 東京", tiny.FIRST.prompt, "Paris")]
    running: list[asyncio.Task] = []
    for number, ids in enumerate(prompts):
        heard = asyncio.Event()
        call = world.engine.generate(ids, greedy(30 + 5 * number), "greedy", lambda _ids, told=heard: told.set())
        running.append(asyncio.create_task(call))
        await heard.wait()
    for number, (ids, generation) in enumerate(zip(prompts, await asyncio.gather(*running), strict=True)):
        assert generation.token_ids == greedy_by_transformers(world.first, ids, 30 + 5 * number)
        assert set(generation.versions) == {version}
        assert_logprobs(world.first, ids, generation.token_ids, generation.logprobs)


def _exported(group: Group, model: Path) -> list[Bucket]:
    actor = make_actor(group, model, ParallelConfig(tp=2, sequence_parallel=True))
    actor.load_hf(model)
    return export(actor, bucket_bytes=100_000)


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILT_IN)
async def test_weights_sent_by_megatron_generate_greedily_as_in_transformers(family: str, tmp_path: Path) -> None:
    """The engine starts with another model of the family. The prompt is longer than any window."""
    first, second = (tiny_model(family, tmp_path / str(seed), seed) for seed in range(2))
    buckets = on_ranks(_exported, 2, second)[0]
    before, after = (with_attention_scale(AutoModelForCausalLM.from_pretrained(path)) for path in (first, second))
    ids = list(range(10, 50))
    engine = new_engine(first)
    await engine.start()
    try:
        await engine.begin_update(1)
        for bucket in buckets:
            await engine.load_bucket(bucket)
        await engine.finish_update(1, digest_of(buckets))
        generation = await engine.generate(ids, greedy(40), "greedy")
    finally:
        await engine.stop()
    said = greedy_by_transformers(after, ids, 40)
    assert generation.token_ids == said
    assert said != greedy_by_transformers(before, ids, 40)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, -1), (0.7, -1), (1.0, 4), (0.7, 4), (0.9, 2)])
async def test_draws_have_the_models_distribution_and_log_probs_of_the_whole(
    world: EngineBench, top_p: float, top_k: int
) -> None:
    await world.bring(world.first)
    ids, draws, temperature = world.encode("zzz ü"), 400, 2.5
    sampling = TurnSampling(temperature, top_p, top_k, max_new_tokens=1)
    got = await asyncio.gather(*(world.engine.generate(ids, sampling, f"{number}") for number in range(draws)))
    with torch.no_grad():
        logits = world.first(torch.tensor([ids])).logits[0, -1].double()
    whole = torch.softmax(logits / temperature, dim=-1).numpy()
    kept, mass = dict[int, float](), 0.0
    for rank, token in enumerate(np.argsort(-whole, kind="stable")):
        if mass <= top_p and (top_k < 0 or rank < top_k):
            kept[int(token)] = whole[token]
        mass += whole[token]
    counts = np.bincount([one.token_ids[0] for one in got], minlength=len(whole))
    assert {*np.flatnonzero(counts)} <= kept.keys()
    for token, share in kept.items():
        chance = share / sum(kept.values())
        # Counts of rare tokens have the longer tail of a Poisson distribution, hence the 3. One of about 1,000 tokens of
        # all cases is beyond the limit less than once in 1,000 seeds.
        assert abs(counts[token] - draws * chance) <= 5 * sqrt(draws * chance * (1 - chance)) + 3, token
    for one in got[:5]:
        assert_logprobs(world.first, ids, one.token_ids, one.logprobs, temperature)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: f"{end.finish}-{end.text[-12:]}")
async def test_request_ends_as_in_the_table(world: EngineBench, end: End) -> None:
    await world.bring(world.first)
    await check_end(world.engine, world.words, end)
    assert world.engine.progress is not None


async def test_end_token_ends_a_request(world: EngineBench) -> None:
    await world.bring(world.first)
    await check_end_token(world.engine, world.words)


async def test_abort_returns_the_tokens_so_far_and_cancellation_frees_the_engine(world: EngineBench) -> None:
    model = endless(world.first, world.words)
    await world.bring(model)
    ids, heard = world.encode("zzz"), Progress()
    long = asyncio.create_task(world.engine.generate(ids, greedy(3000), "long", heard.hear))
    cancelled = asyncio.create_task(world.engine.generate(ids, greedy(3000), "cancelled"))
    await heard.until(10)
    with pytest.raises(RunError, match="2 requests"):
        await world.engine.sleep()
    cancelled.cancel()
    await heard.until(20)
    world.engine._engine.abort_all()
    generation = await long
    assert generation.finish == "abort"
    assert 20 <= len(generation.token_ids) < 3000
    assert_logprobs(model, ids, generation.token_ids, generation.logprobs)
    assert (world.engine.running, world.engine.counts.aborted) == (0, 2)
    assert (await world.engine.generate(ids, greedy(2), "next")).token_ids == generation.token_ids[:2]


async def test_requests_in_flight_continue_with_the_new_weights(world: EngineBench) -> None:
    await check_switch(world, ["zzz", "Paris", tiny.FIRST.prompt])


async def test_update_that_differs_from_what_was_sent_is_refused_with_the_tensors_name(
    world: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.bring(world.first)
    (damaged,) = pack([(CHANGED, world.first.get_parameter(CHANGED))], bucket_bytes=1 << 20)
    damaged.data[0] ^= 1
    await world.engine.begin_update(world.engine.version + 1)
    with pytest.raises(RunError, match=CHANGED):
        await world.engine.load_bucket(damaged)
    changed = world.first.get_parameter(CHANGED).detach().clone()
    changed[5, 7] += 1e-6
    (stray,) = pack([(CHANGED, changed)], bucket_bytes=1 << 20)
    load = world.engine._engine.load_bucket

    async def load_with_a_stray(bucket: Bucket) -> None:
        await load(bucket)
        if CHANGED in {record.name for record in bucket.records}:
            await load(stray)

    async def load_damaged(_bucket: Bucket) -> None:
        await load(damaged)

    for wrong in (load_with_a_stray, load_damaged):
        version, total = await world.stage(world.first)
        with monkeypatch.context() as patch:
            patch.setattr(world.engine._engine, "load_bucket", wrong)
            with pytest.raises(RunError, match=CHANGED):
                await world.engine.finish_update(version, total)
        with pytest.raises(RunError, match="refused a weight update"):
            await world.engine.generate([1], greedy(1), "refused")
    version, total = await world.stage(world.first, ("model.extra.weight", torch.ones(3)))
    with pytest.raises(RunError, match=r"model\.extra\.weight"):
        await world.engine.finish_update(version, total)
    version = await world.bring(world.first)
    assert (await world.engine.generate([1], greedy(1), "again")).versions == [version]


async def test_engine_is_unchanged_after_sleep(world: EngineBench) -> None:
    await world.bring(world.first)
    ids = world.encode(tiny.FIRST.prompt)
    before = await world.engine.generate(ids, greedy(20), "before")
    for _ in range(2):
        await world.engine.sleep()
    with pytest.raises(RunError, match="asleep"):
        await world.engine.generate(ids, greedy(20), "asleep")
    version, total = await world.stage(world.second)
    await world.engine.wake()
    assert (await world.engine.generate(ids, greedy(20), "after")).token_ids == before.token_ids
    await world.engine.finish_update(version, total)
    after = await world.engine.generate(ids, greedy(20), "switched")
    assert after.token_ids == greedy_by_transformers(world.second, ids, 20)


@pytest.mark.parametrize("how", ["killed", "timed out", pytest.param("incomplete", marks=pytest.mark.slow)])
async def test_child_that_dies_or_does_not_start_is_one_error(world: EngineBench, how: str, tmp_path: Path) -> None:
    folder = Path(tiny.save(world.first.float(), world.words, tmp_path))
    engine = new_engine(folder, start_timeout_s=0.05 if how == "timed out" else 600.0)
    if how == "incomplete":
        weights = load_file(folder / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with refused("mismatch", "model.path"):
            await engine.start()
    elif how == "timed out":
        with pytest.raises(RunError, match="start_timeout_s"):
            await engine.start()
    else:
        await engine.start()
        (child,) = engine._engine.processes()
        running = asyncio.create_task(engine.generate([1], greedy(3000), "long"))
        await asyncio.sleep(0)
        child.kill()
        for call in (running, engine.generate([1], greedy(1), "next"), engine.sleep()):
            with pytest.raises(EngineDied, match=str(child.pid)):
                await asyncio.wait_for(call, timeout=600)
    await engine.stop()
