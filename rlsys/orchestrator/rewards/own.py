"""A term of the user's own: `package.module.function` of (question, trajectory).

It returns a number for the whole episode, or a sequence of numbers, one a turn. It cannot stall the episodes: a plain
function runs in a thread, and all async ones run on an event loop that has a thread of its own. Whatever goes wrong
is one sentence that names the term, and so is a call that takes longer than `reward.own_timeout_s`. A function that
never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rlsys.errors import RunError, UserError
from rlsys.orchestrator.rewards.reading import Reading
from rlsys.search.web.loop import LoopThread

_AT_A_TIME = 8
"""Plain functions that run; what does not run yet waits."""
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


class OverdueError(Exception):
    """A call that took too long."""


class Calls:
    """Calls functions of the user's own, each for `timeout_s` at most; for one event loop. `close` it at the end."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._loop = LoopThread("reward-loop")

    async def result_of(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function`, or its exception. Raises OverdueError; the wait for a thread does not count."""
        plain = not inspect.iscoroutinefunction(function)
        async with self._slots if plain else contextlib.nullcontext():
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    result = function(*arguments) if not plain else await in_daemon_thread(function, *arguments)
                    return await self._loop.result_of(_wait(result)) if inspect.isawaitable(result) else result
            except TimeoutError:
                if limit.expired():
                    raise OverdueError from None
                raise

    def close(self) -> None:
        """End the event loop. Functions that run are not waited for."""
        self._loop.abandon()


class OwnTerm:
    """The term `name`, a function loaded by `load`."""

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._function = load(name)
        self._calls = calls

    async def __call__(self, reading: Reading) -> Sequence[float]:
        """[slots] what the function gives.

        Raises RunError where it raises, takes too long, or gives anything but finite numbers.
        """
        try:
            result = await self._calls.result_of(self._function, reading.question, reading.trajectory)
        except OverdueError:
            raise RunError(
                f"{self._where(reading)} had not returned after reward.own_timeout_s={self._calls.timeout_s:g} s: "
                "mend it, or raise that limit."
            ) from None
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
            raise self._mistake(reading, result, f"one number for each of the {turns} turns is wanted, or one alone")
        return [float(value) for value in values] or [0.0]

    def _mistake(self, reading: Reading, result: Any, wanted: str) -> RunError:
        return RunError(f"{self._where(reading)} returned {repr(result)[:_QUOTED_CHARS]}: {wanted}.")

    def _where(self, reading: Reading) -> str:
        return f"reward.terms.{self._name}, asked about sample {reading.trajectory.sample} of {reading.question.uid},"


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


async def in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a thread that the process does not wait for when it ends, and gives what it gives."""
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
            result = function(*arguments)
        except Exception as raised:  # noqa: BLE001 (whoever waits gets it)
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future


def _said(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
