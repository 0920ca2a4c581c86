"""The gate before a switch of weights: groups in flight end, new ones wait, and one that gives up leaves no trace."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.rollout.engine import DrainLock


async def pass_through(lock: DrainLock, may_leave: asyncio.Event) -> None:
    async with lock.inside():
        await may_leave.wait()


async def let_all_go_on() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_group_that_is_aborted_at_the_gate_neither_opens_nor_blocks_it() -> None:
    lock, may_leave, switched = DrainLock(), asyncio.Event(), asyncio.Event()

    async def switch() -> None:
        async with lock.closed():
            switched.set()

    inside = asyncio.create_task(pass_through(lock, may_leave))
    await let_all_go_on()
    switching = asyncio.create_task(switch())
    await let_all_go_on()
    aborted, waiting = (asyncio.create_task(pass_through(lock, may_leave)) for _ in range(2))
    await let_all_go_on()
    aborted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborted
    assert not switched.is_set(), "one is still inside"
    may_leave.set()
    await asyncio.gather(inside, switching, waiting)
    await switch()
