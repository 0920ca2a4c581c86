"""Coroutines from scripts and notebooks: they end, are interrupted, and leave no handler behind."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from rlsys.apps.running import finish
from rlsys.errors import RunError
from tests.apps.api.interrupts import interrupted


async def fail() -> None:
    async def in_a_task() -> None:
        raise RunError("the engine died.")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_a_task())


async def number() -> int:
    await asyncio.sleep(0)
    return 7


def test_a_script_gets_the_value_and_its_own_handlers_back() -> None:
    def mine(*_: object) -> None:
        return

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert finish(number()) == 7
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_notebook_whose_loop_runs_gets_the_value() -> None:
    assert finish(number()) == 7


@pytest.mark.parametrize("in_loop", [False, True])
def test_an_error_for_people_comes_out_of_its_group(in_loop: bool) -> None:
    async def cell() -> None:
        finish(fail())

    with pytest.raises(RunError, match=r"the engine died\."):
        asyncio.run(cell()) if in_loop else finish(fail())


@pytest.mark.parametrize("in_loop", [False, True])
def test_an_interrupt_ends_the_work_first(in_loop: bool) -> None:
    begun, closed = threading.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    def cell() -> None:
        # As a notebook's kernel has it: the loop's own thread, with Python's handler of Ctrl-C.
        loop = asyncio.new_event_loop()
        loop.call_soon(finish, work())
        try:
            loop.run_forever()
        finally:
            loop.close()

    with interrupted(begun.is_set, "result" if in_loop else "run_to_end"):
        cell() if in_loop else finish(work())
    assert closed == [True]
