"""Tests of the simulated engine: against a simulation token by token, and by conservation under Hypothesis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.apps.planner.engine import Prefix, Request, SimulatedEngine
from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.cluster.planning.work import EngineCosts
from tests.apps.planner.made import FREE, ends, leaving

COSTS = replace(FREE, step_s=0.01, weights_s=0.004, token_s=0.0005, request_s=0.0001, prefill_s=0.0002, max_running=8)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def ends_by_token(costs: EngineCosts, lengths: Sequence[int], prompt: int = 10) -> list[float]:
    """Return the same times by a loop over all decode steps; the cache never fills."""
    time, waiting, running = 0.0, list(enumerate(lengths)), dict[int, int]()
    found = [0.0] * len(lengths)
    while waiting or running:
        room = costs.max_running - len(running)
        taken, waiting = waiting[:room], waiting[room:]
        if taken:
            time += costs.step_s + costs.weights_s + len(taken) * prompt * costs.prefill_s
            running |= dict(taken)
        cached = sum(prompt + lengths[number] - left for number, left in running.items())
        time += costs.decode_s(len(running), cached)[0]
        running = {number: left - 1 for number, left in running.items()}
        for number in [number for number, left in running.items() if not left]:
            found[number] = time
            del running[number]
    return found


@given(LENGTHS)
def test_jumps_between_events_equal_single_steps(lengths: list[int]) -> None:
    assert ends(COSTS, lengths)[0] == pytest.approx(ends_by_token(COSTS, lengths))


@given(LENGTHS)
def test_growing_cache_is_integrated_within_one_token_of_each_request(lengths: list[int]) -> None:
    """A batch of B requests reads up to B tokens less or more in a step than the continuous growth says."""
    costs = replace(COSTS, cache_s=1e-5)
    for jumped, single in zip(ends(costs, lengths)[0], ends_by_token(costs, lengths), strict=True):
        assert single <= jumped + 1e-9 <= single + sum(lengths) * costs.cache_s * costs.max_running + 1e-8


@given(LENGTHS)
def test_engine_never_rests_while_there_is_work(lengths: list[int]) -> None:
    found, engine = ends(COSTS, lengths)
    assert engine.busy_s == pytest.approx(max(found))
    assert engine.generated == pytest.approx(sum(lengths))


@given(LENGTHS, st.integers(30, 200))
def test_full_cache_retracts_but_loses_nothing(lengths: list[int], room: int) -> None:
    found, engine = ends(replace(COSTS, cache_tokens=room), lengths)
    assert all(found)
    assert engine.generated == pytest.approx(sum(lengths))
    assert engine._cached == pytest.approx(0.0, abs=1e-3)
    if room >= sum(length + 10 for length in lengths):
        assert engine.retracted == 0


@given(LENGTHS, st.integers(30, 400))
def test_tokens_that_wait_for_admission_take_no_room_from_others(lengths: list[int], room: int) -> None:
    """If prefilling is free, the engine ends second turns at the same times if it kept the tokens of the first ones."""
    costs = replace(FREE, token_s=0.01, cache_tokens=room)
    kept, forgotten = (run_virtually(second_turns(costs, lengths, keeps)) for keeps in (True, False))
    assert kept == pytest.approx(forgotten)


async def second_turns(costs: EngineCosts, lengths: Sequence[int], keeps: bool) -> list[float]:
    """Return the time at which each request ends its second turn, which is submitted when the first has ended.

    Without `keeps`, another request with the same context takes it, of which the cache holds nothing.
    """
    engine, found = SimulatedEngine(costs), list[float]()
    leave, done = leaving(engine, len(lengths))

    def end(request: Request) -> None:
        found.append(now())
        leave(request)

    def go_on(request: Request) -> None:
        context, length = request.own, request.own
        if not keeps:
            engine.leave(request)
            request = Request(request.prefix, ended=end, own=context)
        request.ended, request.new, request.left = end, 5, length
        engine.submit(request)

    for length in lengths:
        engine.submit(Request(Prefix(10, 1 if keeps else 2), ended=go_on, left=length))
    await done.wait()
    return found


@pytest.mark.parametrize("name", ["step_s", "weights_s", "token_s", "request_s", "prefill_s", "cache_s"])
@given(lengths=LENGTHS)
def test_any_cheaper_work_is_never_slower(name: str, lengths: list[int]) -> None:
    dear = replace(COSTS, cache_s=1e-5)
    cheap = replace(dear, **{name: getattr(dear, name) / 2})
    assert max(ends(cheap, lengths)[0]) <= max(ends(dear, lengths)[0]) + 1e-9


def test_switch_of_weights_prefills_everything_in_flight_again() -> None:
    """One request of 100 tokens at 0.0146 s a step: halfway, 10 + 50 tokens are prefilled again."""

    async def run() -> tuple[float, float]:
        engine, done = SimulatedEngine(COSTS), asyncio.Event()
        request = Request(Prefix(10, 1), ended=lambda _: done.set(), left=100)
        engine.submit(request)
        first = COSTS.step_s + COSTS.weights_s
        await asyncio.sleep(first + 10 * COSTS.prefill_s + 50 * decode)
        engine.pause()
        await asyncio.sleep(5.0)
        engine.resume(version=1)
        await done.wait()
        return now(), request.version

    decode = COSTS.decode_s(1, 0)[0]
    took, version = run_virtually(run())
    assert took == pytest.approx(2 * (COSTS.step_s + COSTS.weights_s) + 70 * COSTS.prefill_s + 100 * decode + 5.0)
    assert version == 0, "a token of the first version stays the oldest"


def test_episodes_of_a_group_share_a_cached_prompt_and_a_waiting_one_keeps_its_tokens() -> None:
    """Two episodes of a prompt of 1,000 tokens begin together. When they end, one goes on after a tool call with an
    observation of 100 tokens, and a third begins."""
    costs = replace(FREE, token_s=1.0, prefill_s=0.01)

    async def run() -> tuple[float, float]:
        engine = SimulatedEngine(costs)
        leave, done = leaving(engine, 3)

        def go_on(request: Request) -> None:
            request.ended, request.new, request.left = leave, 100, 5
            engine.submit(request)
            engine.submit(third)

        prefix = Prefix(1000, 3)
        first, second, third = (Request(prefix, ended=end, left=5) for end in (go_on, leave, leave))
        engine.submit(first)
        engine.submit(second)
        await done.wait()
        return now(), engine.filled

    # 2,000 tokens, because no prompt is cached when they begin; 5 steps of two requests; 100 tokens; 5 steps of two.
    assert run_virtually(run()) == (pytest.approx(20 + 5 * 2 + 1 + 5 * 2), pytest.approx(2100))


def test_decoding_reads_a_shared_prompt_for_each_request() -> None:
    costs = replace(FREE, cache_s=0.001)

    async def run(prefixes: Sequence[Prefix]) -> float:
        engine = SimulatedEngine(costs)
        leave, done = leaving(engine, len(prefixes))
        for prefix in prefixes:
            engine.submit(Request(prefix, ended=leave, left=20))
        await done.wait()
        return now()

    shared = run_virtually(run([Prefix(100, 8)] * 8))
    assert shared == pytest.approx(run_virtually(run([Prefix(100, 1) for _ in range(8)])))
    # Each of 20 steps reads 8 contexts of 100 tokens and half of what is generated.
    assert shared == pytest.approx(0.001 * 20 * 8 * (100 + 20 / 2))


def test_prompts_that_no_running_request_uses_give_way() -> None:
    """Nine episodes wait for a tool with prompts that fill the cache. Of 40 others, nine at a time have room."""
    costs = replace(FREE, step_s=1.0, cache_tokens=9500)

    async def run() -> float:
        engine = SimulatedEngine(costs)
        leave, done = leaving(engine, 40)
        for _ in range(9):
            engine.submit(Request(Prefix(1000, 1), ended=lambda _: None, left=10))
        await asyncio.sleep(20)
        begun = now()
        for _ in range(40):
            engine.submit(Request(Prefix(1000, 1), ended=leave, left=10))
        await done.wait()
        return now() - begun

    # Prefilling five batches takes a step's time each.
    assert run_virtually(run()) == pytest.approx(5 * (1 + 10))


@given(LENGTHS, st.integers(30, 200), st.floats(0, 3), st.booleans())
def test_cancelled_requests_leave_nothing(lengths: list[int], room: int, after_s: float, switches: bool) -> None:
    async def run() -> None:
        engine, prefix = SimulatedEngine(replace(COSTS, cache_tokens=room, prefill_s=0.02)), Prefix(10, len(lengths))
        requests = [Request(prefix, ended=engine.leave, left=length) for length in lengths]
        for request in requests:
            engine.submit(request)
        await asyncio.sleep(after_s)
        if switches:
            engine.pause()
            await asyncio.sleep(0.5)
            engine.resume(version=1)
            await asyncio.sleep(after_s)
        for request in requests:
            if not request.left_engine:
                engine.cancel(request)
        await asyncio.sleep(100)
        assert [engine._cached, engine._read, engine._parked_tokens] == pytest.approx([0, 0, 0], abs=1e-6)
        assert [engine._prefixes, prefix.users, list(engine._waiting), engine._running] == [set(), 0, [], []]

    run_virtually(run())


def test_cancelled_prefill_counts_as_far_as_it_came() -> None:
    async def run() -> tuple[float, float]:
        engine = SimulatedEngine(replace(FREE, prefill_s=0.01))
        request = Request(Prefix(1000, 1), ended=engine.leave, left=5)
        engine.submit(request)
        await asyncio.sleep(4)
        engine.cancel(request)
        await asyncio.sleep(100)
        return engine.filled, engine.busy_s

    assert run_virtually(run()) == (pytest.approx(400), pytest.approx(4))
