"""A term of the user's own: `package.module.function` of (question, trajectory).

It returns a number for the whole episode, or a sequence of numbers, one a turn. A plain function runs in a thread,
so that it cannot stall the episodes; an async one runs on their event loop and must not block it. Whatever goes
wrong is one sentence that names the term.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from rlsys.agent.trajectory import Trajectory
from rlsys.data.question import Question
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
    """The term `name`, a function loaded by `load`; `threads` run it unless it is async."""

    def __init__(self, name: str, threads: Executor) -> None:
        self._name = name
        self._function = load(name)
        self._threads = threads

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
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, self._call, question, trajectory)
        return await result if inspect.isawaitable(result) else result

    def _call(self, question: Question, trajectory: Trajectory) -> Any:
        try:
            return self._function(question, trajectory)
        except StopIteration as error:
            # A future refuses this one, and whoever waits for it would wait for ever.
            raise RuntimeError("StopIteration") from error

    def _mistake(self, reading: Reading, result: Any, wanted: str) -> RunError:
        return RunError(f"{self._where(reading)} returned {repr(result)[:_QUOTED_CHARS]}: {wanted}.")

    def _where(self, reading: Reading) -> str:
        return f"reward.terms.{self._name}, asked about sample {reading.trajectory.sample} of {reading.question.uid},"


def _said(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
