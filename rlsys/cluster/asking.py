"""Questions to a Ray whose head may be dead, for which Ray itself waits for minutes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import ray

from rlsys.errors import RunError

T = TypeVar("T")
SILENCE_S = 20.0
"""For an answer."""


async def answer(ask: Callable[[], T], timeout_s: float = SILENCE_S) -> T:
    """Of `ask`, in a thread, which stays behind and does not keep the process where it takes longer than `timeout_s`.

    Raises RunError then, or where Ray refuses.
    """
    found: Future[T] = Future()

    def work() -> None:
        found.set_running_or_notify_cancel()  # The thread cannot be called off.
        try:
            found.set_result(ask())
        except (ray.exceptions.RayError, RuntimeError, OSError) as problem:
            found.set_exception(problem)

    threading.Thread(target=work, daemon=True, name="asks-ray").start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(found), timeout_s)
    except TimeoutError:
        why = f"has not answered for {timeout_s:.0f} s"
    except (ray.exceptions.RayError, RuntimeError, OSError) as problem:
        why = f"refuses to answer ({problem})"
    raise RunError(
        f"the head of the Ray cluster {why}, so the run has been ended. Look at gcs_server's log and at the memory of that "
        "machine. resume=auto goes on from its last checkpoint."
    )
