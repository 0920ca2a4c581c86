"""The gate against a log of who entered and left, under many interleavings."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.rollout.engine import DrainLock

DELAYS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8)
"""Turns of the event loop before and after something begins."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=150, deadline=None)
@given(DELAYS, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=3))
def test_nobody_is_inside_while_it_is_closed_and_everybody_gets_through(
    visits: list[tuple[int, int]], closings: list[tuple[int, int]]
) -> None:
    inside: set[int] = set()
    through: list[int] = []

    async def visit(gate: DrainLock, name: int, delay: int, stay: int) -> None:
        await turns(delay)
        async with gate.inside():
            inside.add(name)
            await turns(stay)
            inside.remove(name)
        through.append(name)

    async def close(gate: DrainLock, delay: int, stay: int) -> None:
        await turns(delay)
        async with gate.closed():
            for _ in range(stay + 1):
                assert not inside
                await asyncio.sleep(0)

    async def play() -> None:
        gate = DrainLock()
        visitors = [visit(gate, name, *visit_) for name, visit_ in enumerate(visits)]
        await asyncio.gather(*(close(gate, *closing) for closing in closings), *visitors)

    asyncio.run(asyncio.wait_for(play(), timeout=10))
    assert sorted(through) == list(range(len(visits)))


async def test_those_inside_go_on_while_it_closes() -> None:
    gate, leave, closed = DrainLock(), asyncio.Event(), asyncio.Event()

    async def visit() -> None:
        async with gate.inside():
            await leave.wait()

    async def close() -> None:
        async with gate.closed():
            closed.set()

    visitor, closing = asyncio.create_task(visit()), asyncio.create_task(close())
    await turns(10)
    assert not closed.is_set()
    leave.set()
    await asyncio.gather(visitor, closing)


async def test_it_opens_again_after_a_failure_and_after_a_closing_that_was_given_up() -> None:
    gate = DrainLock()
    with pytest.raises(ZeroDivisionError):
        async with gate.closed():
            raise ZeroDivisionError
    async with gate.inside():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), gate.closed():
                raise AssertionError("closed with somebody inside")
    async with asyncio.timeout(1), gate.inside():
        pass
