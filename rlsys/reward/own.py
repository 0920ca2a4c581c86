"""A term of the user's own: `package.module.function` of (question, trajectory).

It returns a number for the whole episode, or a sequence of numbers, one a turn. A plain function runs in a thread,
so that it cannot stall the episodes; an async one runs on their event loop and must not block it. Whatever goes
wrong is one sentence that names the term. A function that never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlsys.errors import RunError, UserError
from rlsys.reward.reading import Reading

_QUOTED_CHARS = 100


def load(name: str) -> Callable[..., Any]:
    """The function called `name`. Imports its module; raises UserError with one sentence."""
    module_name, _, attribute = name.rpartition(".")
    key = f"reward.terms.{name}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{key}: {module_name} cannot be imported ({_said(error)}): mend it, or put the folder that holds it "
            "into PYTHONPATH."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{key}: {module_name} has no function {attribute}: define it, or mend the name.")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserError(
            f"{key} does not take two arguments ({error}): define it as {attribute}(question, trajectory)."
        ) from error
    except ValueError:
        pass  # of one written in C, which shows no signature
    return function


class OwnTerm:
    """The term `name`, a function loaded by `load`; unless it is async, `slots` bound how many run at a time."""

    def __init__(self, name: str, slots: asyncio.Semaphore) -> None:
        self._name = name
        self._function = load(name)
        self._slots = slots

    async def __call__(self, reading: Reading) -> Sequence[float]:
        """[slots] what the function gives. Raises RunError where it raises, or gives anything but finite numbers."""
        try:
            result = await self._run(reading)
        except Exception as error:
            raise RunError(f"{self._where(reading)} raised {_said(error)}: mend it.") from error
        try:
            values = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.full(1, np.nan)
        if isinstance(result, str | bytes) or values.ndim > 1 or not np.isfinite(values).all():
            raise self._mistake(reading, result, "a finite number, or one a turn, is wanted")
        if values.ndim == 0:
            return reading.at_end(float(values))
        turns = len(reading.trajectory.turns)
        if len(values) not in (turns, reading.slots):
            raise self._mistake(
                reading, result, f"one number for each of the {turns} turns is wanted, or one alone"
            )
        return [float(value) for value in values] or [0.0]

    async def _run(self, reading: Reading) -> Any:
        question, trajectory = reading.question, reading.trajectory
        if inspect.iscoroutinefunction(self._function):
            return await self._function(question, trajectory)
        async with self._slots:
            result = await in_daemon_thread(lambda: self._function(question, trajectory))
        return await result if inspect.isawaitable(result) else result

    def _mistake(self, reading: Reading, result: Any, wanted: str) -> RunError:
        return RunError(f"{self._where(reading)} returned {repr(result)[:_QUOTED_CHARS]}: {wanted}.")

    def _where(self, reading: Reading) -> str:
        return f"reward.terms.{self._name}, asked about sample {reading.trajectory.sample} of {reading.question.uid},"


async def in_daemon_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, called in a thread that the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # Cancelled: nobody waits any more.
            return
        if error is None:
            future.set_result(result)
        else:
            # A future refuses StopIteration, and whoever waits for it would wait for ever.
            stops = isinstance(error, StopIteration)
            future.set_exception(RuntimeError("StopIteration") if stops else error)

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001 (whoever waits gets it)
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future


def _said(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
