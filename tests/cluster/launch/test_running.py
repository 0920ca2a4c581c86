"""The loss of the terminal ends a run in order, unless it is to be ignored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from rlsys.apps.running import run_to_end
from rlsys.errors import Interrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_loss_of_the_terminal_is_an_interruption_but_under_nohup() -> None:
    closed = []

    async def work(wait_s: float) -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            await asyncio.sleep(wait_s)
        finally:
            closed.append(True)
        return "done"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run_to_end(work(0.1)) == "done"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(Interrupted):
        run_to_end(work(30))
    assert closed == [True, True]
