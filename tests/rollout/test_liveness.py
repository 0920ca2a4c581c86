"""A wait on real processes ends when one of them is killed."""

from __future__ import annotations

import asyncio
import subprocess

import psutil
import pytest

from rlsys.errors import RunError
from rlsys.rollout.engine import Liveness


async def test_a_killed_process_ends_the_wait_and_an_answer_passes() -> None:
    child = subprocess.Popen(["sleep", "600"])
    liveness = Liveness("the sleeper", [psutil.Process(child.pid)])

    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 7

    assert await liveness.guard(answer()) == 7
    waiting = asyncio.ensure_future(liveness.guard(asyncio.sleep(600)))
    await asyncio.sleep(0)
    child.kill()
    with pytest.raises(RunError, match=f"the sleeper died: its process {child.pid} is gone"):
        await asyncio.wait_for(waiting, timeout=10)
    child.wait()
    liveness.stop()
