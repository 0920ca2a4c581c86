"""Tests of a real SGLang engine against transformers, and of episodes on it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlsys.config.schema import TokenMode
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import RunError
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.agent.tokens import EpisodeProgress, PartialEpisode
from tests.rollout.bench import QUESTION, STOP, Bench, endless, greedy, greedy_by_transformers, logprobs_of
from tests.rollout.contract import ENDS, End, check_end, check_end_token
from tests.support import tiny
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]


async def test_greedy_tokens_and_log_probs_are_those_of_transformers(bench: Bench) -> None:
    version = await bench.bring(bench.first)
    for text in (tiny.FIRST.prompt[:20], "zzz ü 東京"):
        ids = bench.encode(text)
        generation = await bench.engine.generate(ids, greedy(48), "greedy")
        assert generation.token_ids == greedy_by_transformers(bench.first, ids, 48)
        assert set(generation.versions) == {version}
        bench.assert_logprobs(ids, generation)


async def test_watched_processes_are_the_scheduler_and_the_detokenizer(bench: Bench) -> None:
    watched = bench.sglang.processes()
    assert sorted(process.cmdline()[0].rstrip() for process in watched) == ["sglang::detokenizer", "sglang::scheduler"]
    assert {parent.cmdline()[0].rstrip() for one in watched if (parent := one.parent())} == {"sglang::template"}


async def test_log_probs_are_over_the_whole_vocabulary_at_the_temperature(bench: Bench) -> None:
    """`rlsys.report.drift` relies on this."""
    await bench.bring(bench.first)
    ids = bench.encode("France is")
    sampling = TurnSampling(temperature=1.7, top_p=0.6, top_k=3, max_new_tokens=60)
    generation = await bench.engine.generate(ids, sampling, "hot")
    whole = logprobs_of(bench.first, [*ids, *generation.token_ids], temperature=1.7)[len(ids) - 1 :]
    np.testing.assert_allclose(generation.logprobs, whole, atol=1e-4)


async def test_stop_string_ends_the_turn_and_a_listener_gets_tokens_as_they_come(bench: Bench) -> None:
    await bench.bring(bench.first)
    ids = bench.encode(tiny.FIRST.prompt)
    free = await bench.engine.generate(ids, greedy(64), "free")
    alone = await bench.engine.generate(ids, greedy(64, STOP), "alone")
    assert bench.words.decode(alone.token_ids) == tiny.FIRST.search
    assert alone.finish == "stop"
    assert len(alone.token_ids) < len(free.token_ids)
    assert alone.token_ids == free.token_ids[: len(alone.token_ids)]
    heard: list[list[int]] = []
    followed = await bench.engine.generate(ids, greedy(64, STOP), "followed", heard.append)
    assert followed.token_ids == alone.token_ids == heard[-1]
    bench.assert_logprobs(ids, followed)
    lengths = [len(part) for part in heard]
    assert heard == [alone.token_ids[:length] for length in sorted(lengths)]
    # A weak bound: parts that a busy process has not taken yet come as one.
    assert len(set(lengths)) > 2, "tokens are not held back until the end"


@pytest.mark.parametrize("end", ENDS, ids=lambda end: f"{end.finish}-{end.text[-12:]}")
async def test_request_ends_as_in_the_table(bench: Bench, end: End) -> None:
    await bench.bring(bench.first)
    await check_end(bench.engine, bench.words, end)
    assert bench.engine.progress is not None


async def test_end_token_ends_a_request(bench: Bench) -> None:
    await bench.bring(bench.first)
    await check_end_token(bench.engine, bench.words)


async def test_group_searches_answers_and_reuses_its_prefix(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.worker._tools.task, "token_mode", TokenMode.append)
    await bench.bring(bench.first)
    asked = len(bench.search.asked)
    group = await bench.worker.run_group(QUESTION, n_samples=5)
    best = await bench.worker.answer(QUESTION, sample=5)
    assert [trajectory.sample for trajectory in (*group, best)] == list(range(6))
    assert len(bench.search.asked) > asked
    assert (best.finish, best.answer) == (Finish.ANSWER, "Paris")
    assert [turn.action for turn in best.turns] == [Action.SEARCH, Action.ANSWER]
    assert best.response == f"{tiny.FIRST.search}{tiny.OBSERVATION}{tiny.FIRST.answer}"
    assert best.turns[1].cached_tokens >= best.turns[0].prompt_tokens
    assert bench.words.decode(best.tokens) == tiny.FIRST.text + tiny.EOS
    for trajectory in [*group, best]:
        reference = logprobs_of(bench.first, trajectory.tokens.tolist()).numpy()
        compared = ~np.isnan(trajectory.rollout_logprobs[1:])
        assert not (compared & ~trajectory.loss_mask[1:]).any()
        np.testing.assert_allclose(trajectory.rollout_logprobs[1:][compared], reference[compared], atol=1e-4)
        assert compared.sum() == sum(turn.generated_tokens for turn in trajectory.turns)
    assert bench.worker.metrics()["cached_fraction"] > 0


async def test_aborted_group_resumes_from_its_progress_to_the_same_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.bring(bench.first)
    monkeypatch.setattr(bench.rollout.sampling, "temperature", 0.0)
    expected = await bench.worker.run_group(QUESTION, n_samples=3)
    generate, held = bench.engine.generate, asyncio.Event()

    async def halting(input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        if rid.endswith(("#1.1", "#2.1")):
            held.set()
            await asyncio.Event().wait()
        return await generate(input_ids, sampling, rid)

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "generate", halting)
        first = asyncio.create_task(bench.worker.run_group(QUESTION, 3, "first"))
        await held.wait()

        def in_flight() -> tuple[EpisodeProgress, ...]:
            return bench.worker.in_flight(["first", "other"])["first"]

        await until(lambda: [type(one) for one in in_flight()] == [Trajectory, PartialEpisode, PartialEpisode])
        begun = in_flight()
        await bench.worker.abort_group("unknown")
        await bench.worker.abort_group("first")
        aborted = await first
    found = [(one.finish, len(one.turns)) for one in aborted]
    assert found == [(Finish.ANSWER, 2), (Finish.ABORTED, 1), (Finish.ABORTED, 1)]
    assert bench.worker.in_flight(["first"]) == {}
    requests, searches = bench.worker.metrics()["requests"], len(bench.search.asked)
    again = await bench.worker.run_group(QUESTION, 3, "again", [begun[1], begun[0]])
    assert again[0] is begun[0]
    assert bench.worker.metrics()["requests"] == requests + 3, (
        "one second turn, and both turns of the episode whose progress was not passed"
    )
    assert len(bench.search.asked) == searches + 1
    for one, other in zip(again, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.versions, other.versions)
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-4)


async def test_abort_returns_the_tokens_so_far_and_cancellation_frees_the_engine(bench: Bench) -> None:
    await bench.bring(endless(bench.first, bench.words))
    ids = bench.encode("zzz")
    long = asyncio.create_task(bench.engine.generate(ids, greedy(4000), "long"))
    cancelled = asyncio.create_task(bench.engine.generate(ids, greedy(4000), "cancelled"))
    await bench.until_generating(requests=2)
    with pytest.raises(RunError, match="2 requests"):
        await bench.worker.sleep()
    cancelled.cancel()
    await until(lambda: len(bench.sglang._manager.rid_to_state) <= 1)
    bench.sglang.abort_all()
    generation = await long
    assert generation.finish == "abort"
    assert 50 <= len(generation.token_ids) < 4000
    bench.assert_logprobs(ids, generation)
    assert bench.worker.metrics()["requests_running"] == 0


async def test_engine_refuses_requests_asleep_and_is_unchanged_after_waking(bench: Bench) -> None:
    await bench.bring(bench.first)
    ids = bench.encode(tiny.FIRST.prompt)
    before = await bench.engine.generate(ids, greedy(48), "before")
    again = await bench.engine.generate(ids, greedy(48), "again")
    assert again.cached_tokens > 0
    for _ in range(2):
        await bench.worker.sleep()
    with pytest.raises(RunError, match="asleep"):
        await bench.worker.run_group(QUESTION, n_samples=2)
    version, total = await bench.stage(bench.second)
    with pytest.raises(RunError, match=f"Version {version} stays staged"):
        await bench.worker.finish_update(version, total)
    for _ in range(2):
        await bench.worker.wake()
    after = await bench.engine.generate(ids, greedy(48), "after")
    assert after.token_ids == before.token_ids
    assert after.cached_tokens == 0, "sleeping empties the prefix cache"
    await bench.worker.finish_update(version, total)
    switched = await bench.engine.generate(ids, greedy(48), "switched")
    assert switched.token_ids == greedy_by_transformers(bench.second, ids, 48)
    assert bench.worker.metrics()["asleep_frees_memory"] == 0.0
