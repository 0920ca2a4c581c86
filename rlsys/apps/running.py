"""Runs work with clean interruption: `run_to_end` for the command line, `finish` for the Python API.

`supervise` runs a command that is started again when it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rlsys.cluster.local_ray import adopt_orphans, descendants, end, ends_with_parent
from rlsys.errors import Interrupted, RunError, UserError, root_cause
from rlsys.observe.faults import KILLED_AT, KILLED_BY, Restarts

T = TypeVar("T")
_SAYS = "RLSYS_SAYS_THAT_IT_ENDS"
"""Environment variable of a supervised process: the descriptor for `ends_by_itself`."""
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


def supervise(command: Sequence[str], restarts: Restarts, note: Callable[[str], None]) -> int:
    """Run `command`, and run it again whenever it is killed, as often as `restarts` allows; return its exit status.

    It is killed by a signal, or by a library that ends the process: Ray does so in a call if its raylet has died. Such a
    command has not left `ends_by_itself`. Call this from the main thread. Ctrl-C, SIGTERM and SIGHUP go to the command,
    which is then not run again. All processes that the command leaves are ended. The command ends with this process.
    `KILLED_BY` in its environment names what killed the command before it, and `KILLED_AT` when; both are empty at first.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    adopt_orphans()
    reason = killed_at = ""
    while True:
        said, says = os.pipe()
        os.set_blocking(said, False)
        variables = {KILLED_BY: reason, KILLED_AT: killed_at, _SAYS: str(says)}
        # Its own process group, so that the terminal does not send Ctrl-C a second time.
        child = subprocess.Popen(
            ends_with_parent(command), env=os.environ | variables, process_group=0, pass_fds=(says,)
        )
        os.close(says)
        if received:
            child.send_signal(received[-1])
        status = child.wait()
        killed_at = str(time.time())
        end(descendants())
        with open(said, "rb") as ends:
            if status == 0 or (status > 0 and ends.read()):
                return status
        reason = signal.Signals(-status).name if status < 0 else f"a library, with status {status}"
        if received or not restarts.take():
            return 128 - status if status < 0 else status
        note(f"The run was killed by {reason}. It starts again.")


@contextmanager
def ends_by_itself() -> Iterator[None]:
    """On exit, tell `supervise`, if it runs this process, that this process ends by itself.

    Processes that this one starts do not inherit the descriptor, so the variable with its number ends here.
    """
    says = os.environ.pop(_SAYS, None)
    try:
        yield
    finally:
        if says is not None:
            with suppress(BrokenPipeError):  # The supervisor has died.
                os.write(int(says), b".")


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
