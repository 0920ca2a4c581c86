"""Runs a coroutine with clean interruption: `run_to_end` for the command line, `finish` for the Python API."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from rlsys.errors import Interrupted, RunError, UserError, root_cause

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. Ctrl-C, SIGTERM and SIGHUP (unless ignored, as under nohup) cancel it and raise
    `Interrupted`."""

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise Interrupted("Interrupted; everything recorded so far is in the run's folder.") from None


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` from a script or a notebook and return its result.

    Ctrl-C (in a notebook, "interrupt the kernel") cancels the work, waits for its cleanup, and raises KeyboardInterrupt.
    Restores signal handlers. Raises `UserError` and `RunError` directly, also if they are inside an exception group.
    """
    try:
        if threading.current_thread() is not threading.main_thread() or _in_a_loop():
            return _in_another_thread(work)
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            return run_to_end(work)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    except BaseExceptionGroup as errors:
        cause = root_cause(errors)
        if isinstance(cause, UserError | RunError):
            raise cause from errors
        raise
    except Interrupted:
        raise KeyboardInterrupt from None


def _in_another_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new thread: for callers with a running event loop, or outside the main thread."""
    begun = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        begun.set()
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="rlsys") as thread:
        done = thread.submit(lambda: asyncio.run(supervised()))
        try:
            return done.result()
        except KeyboardInterrupt:
            begun.wait()
            loop, task = running[0]
            with suppress(RuntimeError):  # The loop has just closed: the work has ended.
                loop.call_soon_threadsafe(task.cancel)
            raise
