"""A call that is waited for only so long."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""For a cancelled call to end in order; then it is waited for no more."""


async def within(
    call: Coroutine[Any, Any, T], *, timeout_s: float | None = None, stop: asyncio.Future[None] | None = None
) -> T | None:
    """What `call` returns, or None after `timeout_s` seconds or once `stop` is done.

    The call is then cancelled. One that ignores this is left behind after `CANCEL_GRACE_S`.
    """
    task = asyncio.ensure_future(call)
    try:
        waits: list[asyncio.Future[Any]] = [task] if stop is None else [task, stop]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            # The gather takes note of an error, which nobody will ask for any more.
            await asyncio.wait([asyncio.gather(task, return_exceptions=True)], timeout=CANCEL_GRACE_S)
