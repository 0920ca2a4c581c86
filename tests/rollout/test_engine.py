"""A real SGLang engine against transformers, and a whole worker on it. One engine for the module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlsys.agent.episode import TurnSampling
from rlsys.agent.trajectory import Action, Finish
from rlsys.config.schema import (
    Device,
    Dtype,
    EngineConfig,
    RolloutConfig,
    SearchConfig,
    TaskConfig,
    TokenMode,
)
from rlsys.data.question import Question
from rlsys.errors import RunError
from rlsys.rollout.engine import Engine
from rlsys.rollout.worker import RolloutWorker
from rlsys.weights.buckets import digest, pack
from tests.rollout import tiny

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

STOP = ("</search>", "</answer>")
QUESTION = Question(uid="q1", prompt=tiny.FIRST.prompt, answers=("Paris",))


@dataclass
class Bench:
    """What the tests share."""

    worker: RolloutWorker
    rollout: RolloutConfig
    words: PreTrainedTokenizerFast
    first: Qwen2ForCausalLM
    second: Qwen2ForCausalLM
    endless: Qwen2ForCausalLM
    """Never greedily says the end-of-sequence token: its logit is 0, below the largest."""
    asked: list[str]

    @property
    def engine(self) -> Engine:
        return self.worker.engine

    def encode(self, text: str) -> list[int]:
        return self.words(text)["input_ids"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    words = tiny.tokenizer()
    first, second = tiny.train(tiny.FIRST, words, seed=0), tiny.train(tiny.SECOND, words, seed=1)
    path: Path = tmp_path_factory.mktemp("policy")
    engine = EngineConfig(dtype=Dtype.float32, memory_fraction=0.05, kv_cache_tokens=16384, max_running=32)
    rollout = RolloutConfig(engine=engine, max_episodes=3)
    task = TaskConfig(train_path="", eval_path="", max_turns=2, max_turn_tokens=64, max_total_tokens=4096)
    with tiny.search_server() as (url, asked):
        worker = RolloutWorker(
            tiny.save(first, words, path), rollout, task, SearchConfig(url=url), Device.cpu, seed=7
        )
        before = set(psutil.Process().children(recursive=True))
        await worker.start()
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
        yield Bench(worker, rollout, words, first, second, endless_copy(first, words), asked)
        await worker.stop()
        living = [process for process in started if process.is_running()]
        # Python's resource tracker, which SGLang ends too, is joined when Python next needs one.
        assert {process.status() for process in living} <= {psutil.STATUS_ZOMBIE}


def endless_copy(model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    copy = deepcopy(model)
    with torch.no_grad():
        copy.model.embed_tokens.weight[words.eos_token_id] = 0.0
    return copy


def logprobs_of(model: Qwen2ForCausalLM, ids: Iterable[int], temperature: float = 1.0) -> torch.Tensor:
    """[seq - 1] log-prob of each token after the first, by transformers."""
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


async def send(engine: Engine, model: Qwen2ForCausalLM, version: int) -> None:
    """Bring `model` to the engine in several buckets."""
    buckets = list(pack(model.named_parameters(), bucket_bytes=40_000))
    assert len(buckets) > 2
    await engine.begin_update(version)
    for bucket in buckets:
        await engine.load_bucket(bucket)
    await engine.finish_update(version, digest_of(buckets))


def digest_of(buckets: Iterable) -> str:
    return digest({record.name: record.checksum for bucket in buckets for record in bucket.records})


async def test_greedy_tokens_and_logprobs_are_those_of_transformers(bench: Bench) -> None:
    sampling = TurnSampling(temperature=0.0, max_new_tokens=48)
    for text in ("Paris", "<search> Lyon", tiny.FIRST.prompt[:20], "zzz ü 東京"):
        ids = bench.encode(text)
        generation = await bench.engine.generate(ids, sampling, "greedy")
        expected = bench.first.generate(
            torch.tensor([ids]), max_new_tokens=48, do_sample=False, eos_token_id=bench.words.eos_token_id
        )[0].tolist()
        assert generation.token_ids == expected[len(ids) :]
        reference = logprobs_of(bench.first, expected)[len(ids) - 1 :]
        np.testing.assert_allclose(generation.logprobs, reference, atol=1e-4)


async def test_sampled_logprobs_are_scaled_by_the_temperature(bench: Bench) -> None:
    ids = bench.encode("France is")
    generation = await bench.engine.generate(ids, TurnSampling(temperature=1.7, max_new_tokens=40), "hot")
    reference = logprobs_of(bench.first, [*ids, *generation.token_ids], temperature=1.7)[len(ids) - 1 :]
    np.testing.assert_allclose(generation.logprobs, reference, atol=1e-4)


async def test_a_stop_string_ends_the_turn_in_the_engine(bench: Bench) -> None:
    ids = bench.encode(tiny.FIRST.prompt)
    sampling = TurnSampling(temperature=0.0, max_new_tokens=64)
    free = await bench.engine.generate(ids, sampling, "free")
    stopped = await bench.engine.generate(ids, replace(sampling, stop=STOP), "stopped")
    assert bench.words.decode(stopped.token_ids) == tiny.FIRST.search
    assert stopped.finish == "stop"
    assert len(stopped.token_ids) < len(free.token_ids)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.token_ids)


async def test_a_group_searches_answers_and_reuses_its_prefix(bench: Bench) -> None:
    bench.asked.clear()
    group = await bench.worker.run_group(QUESTION, n_samples=5)
    assert [trajectory.sample for trajectory in group] == list(range(5))
    (greedy,) = await bench.worker.run_group(QUESTION, n_samples=1, greedy=True)
    assert bench.asked
    assert greedy.finish is Finish.ANSWER
    assert greedy.answer == "Paris"
    assert [turn.action for turn in greedy.turns] == [Action.SEARCH, Action.ANSWER]
    assert greedy.response == f"{tiny.FIRST.search}{tiny.OBSERVATION}{tiny.FIRST.answer}"
    assert greedy.turns[1].cached_tokens >= greedy.turns[0].prompt_tokens
    assert bench.words.decode(greedy.tokens) == tiny.FIRST.text + tiny.EOS
    for trajectory in [*group, greedy]:
        reference = logprobs_of(bench.first, trajectory.tokens.tolist())
        compared = ~np.isnan(trajectory.rollout_logprobs[1:])
        assert compared.any()
        assert not (compared & ~trajectory.loss_mask[1:]).any()
        np.testing.assert_allclose(
            trajectory.rollout_logprobs[1:][compared], reference[torch.from_numpy(compared)], atol=1e-4
        )
    assert bench.worker.metrics()["cached_fraction"] > 0


async def test_append_mode_scores_every_sampled_token(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.worker._tools.task, "token_mode", TokenMode.append)
    for trajectory in await bench.worker.run_group(QUESTION, n_samples=3):
        reference = logprobs_of(bench.first, trajectory.tokens.tolist())
        sampled = trajectory.versions >= 0
        assert trajectory.tokens_differing == 0
        assert sampled.sum() == sum(turn.generated_tokens for turn in trajectory.turns)
        np.testing.assert_allclose(
            trajectory.rollout_logprobs[sampled], reference[torch.from_numpy(sampled[1:])], atol=1e-4
        )


async def test_new_weights_arrive_whole_and_change_what_is_said(bench: Bench) -> None:
    ids = bench.encode(tiny.FIRST.prompt)
    sampling = TurnSampling(temperature=0.0, stop=STOP, max_new_tokens=64)
    before = await bench.engine.generate(ids, sampling, "before")
    await send(bench.engine, bench.second, version=1)
    after = await bench.engine.generate(ids, sampling, "after")
    assert (before.version, after.version) == (0, 1)
    assert bench.words.decode(after.token_ids) == tiny.SECOND.search
    assert after.cached_tokens == 0, "the cache still holds keys of the old weights"
    reference = logprobs_of(bench.second, [*ids, *after.token_ids])[len(ids) - 1 :]
    np.testing.assert_allclose(after.logprobs, reference, atol=1e-4)
    counts = bench.engine.counts
    assert counts.updates == 1
    assert counts.update_bytes >= sum(tensor.nbytes for tensor in bench.second.parameters())
    await send(bench.engine, bench.first, version=2)


async def test_generation_waits_for_an_update_and_the_update_for_generation(bench: Bench) -> None:
    sampling = TurnSampling(temperature=0.0, max_new_tokens=30)
    running = asyncio.create_task(bench.engine.generate(bench.encode("Paris"), sampling, "running"))
    await asyncio.sleep(0)
    await bench.engine.begin_update(3)
    assert running.done()
    assert running.result().version == 2
    waiting = asyncio.create_task(bench.engine.generate(bench.encode("Paris"), sampling, "waiting"))
    buckets = list(pack(bench.second.named_parameters(), bucket_bytes=1 << 20))
    for bucket in buckets:
        await bench.engine.load_bucket(bucket)
    assert not waiting.done()
    await bench.engine.finish_update(3, digest_of(buckets))
    assert (await waiting).version == 3


async def test_a_bucket_that_changed_on_its_way_is_refused(bench: Bench) -> None:
    await bench.engine.begin_update(4)
    waiting = asyncio.create_task(
        bench.engine.generate(bench.encode("Paris"), TurnSampling(0.0, max_new_tokens=4), "waiting")
    )
    (bucket,) = pack(bench.second.named_parameters(), bucket_bytes=1 << 30)
    bucket.data[bucket.records[3].offset] ^= 1
    with pytest.raises(RunError, match=bucket.records[3].name):
        await bench.engine.load_bucket(bucket)
    with pytest.raises(RunError, match="refused a weight update"):
        await waiting


async def test_an_update_that_lacks_a_tensor_is_refused(bench: Bench) -> None:
    tensors = [
        (name, tensor) for name, tensor in bench.first.named_parameters() if name != "model.norm.weight"
    ]
    buckets = list(pack(tensors, bucket_bytes=1 << 20))
    await bench.engine.begin_update(5)
    for bucket in buckets:
        await bench.engine.load_bucket(bucket)
    with pytest.raises(RunError, match=r"first model\.norm\.weight"):
        await bench.engine.finish_update(5, digest_of(buckets))


async def test_an_engine_that_holds_something_else_is_refused_and_recovers(bench: Bench) -> None:
    (bucket,) = pack(bench.first.named_parameters(), bucket_bytes=1 << 30)
    await bench.engine.begin_update(6)
    await bench.engine.load_bucket(bucket)
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = bench.first.get_parameter(name).detach().clone()
    changed[5, 7] += 1e-6
    (stray,) = pack([(name, changed)], bucket_bytes=1 << 30)
    await bench.engine._sglang.load_bucket(stray, version=6, ranks=1)
    with pytest.raises(
        RunError, match=r"1 of its tensors .*first model\.layers\.1\.self_attn\.qkv_proj\.weight"
    ):
        await bench.engine.finish_update(6, digest_of([bucket]))
    with pytest.raises(RunError, match="refused"):
        await bench.worker.run_group(QUESTION, n_samples=2)
    await send(bench.engine, bench.first, version=7)
    (trajectory,) = await bench.worker.run_group(QUESTION, n_samples=1, greedy=True)
    assert trajectory.answer == "Paris"
    assert set(trajectory.versions[trajectory.loss_mask]) == {7, -1}


async def test_abort_returns_what_there_is(bench: Bench) -> None:
    await send(bench.engine, bench.endless, version=8)
    sampling = TurnSampling(temperature=0.0, max_new_tokens=4000)
    ids = bench.encode("zzz")
    long = asyncio.create_task(bench.engine.generate(ids, sampling, "long"))
    await asyncio.sleep(0.5)
    bench.engine.abort("long")
    generation = await long
    assert generation.finish == "abort"
    assert 0 < len(generation.token_ids) == len(generation.logprobs) < 4000


async def test_an_episode_out_of_time_is_returned_and_frees_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.rollout, "episode_timeout_s", 0.4)
    monkeypatch.setattr(bench.rollout.sampling, "stop", [])
    monkeypatch.setattr(bench.worker._tools.task, "max_turn_tokens", 4000)
    aborted = bench.worker.metrics()["episodes_aborted"]
    group = await bench.worker.run_group(replace(QUESTION, prompt="zzz"), n_samples=4, greedy=True)
    assert {trajectory.finish for trajectory in group} == {Finish.ABORTED}
    assert not any(trajectory.loss_mask.any() for trajectory in group)
    assert bench.worker.metrics()["episodes_aborted"] == aborted + 4
    await send(bench.engine, bench.first, version=9)
    assert bench.worker.metrics()["requests_running"] == 0
