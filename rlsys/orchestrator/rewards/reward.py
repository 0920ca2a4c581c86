"""The reward of an episode: the weighted sum of the terms that the settings name, and where in it they fell.

Invariants: every term gives one finite value a turn, at least one; `turn_rewards` add up to `reward` but for
rounding. `reward` is made from the terms' totals alone, so that episodes with the same totals have the same
reward to the last bit, whichever turns they fell on: a group without spread is seen to have none.

A term of the user's own, `package.module.function` of (question, trajectory), returns a number for the whole episode, or
a sequence of numbers, one a turn. It cannot stall the episodes: a plain function runs in a thread, and all async ones run
on an event loop that has a thread of its own. Whatever goes wrong is one sentence that names the term, and so is a call
that takes longer than `reward.own_timeout_s`. A function that never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np

from rlsys.config.schema import CompatConfig, RewardConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import ANSWER_TERMS, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.orchestrator.rewards.check import check_terms, load_term, one_line, weights_of
from rlsys.orchestrator.rewards.judge import Judge
from rlsys.orchestrator.rewards.terms import JUDGE, Reader, Reading, Scored, pure_terms
from rlsys.rollout.tools.interface import tool_tags
from rlsys.search.web.loop import LoopThread

_MAX_THREADS = 8
"""Plain functions that run at a time; the others wait."""
_QUOTED_CHARS = 100


class Rewards:
    """Scores episodes, for one event loop; `close` it at the end.

    `transport` takes the place of the network for the judge. Raises UserError with one line for each problem of
    the settings.
    """

    def __init__(
        self,
        config: RewardConfig,
        task: TaskConfig,
        compat: CompatConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        problems = list(check_terms(config, task))
        if problems:
            raise UserError("\n".join(problems))
        self._config = config
        self._weights = weights_of(config)
        self._reader = Reader(task.tags, compat, tool_tags(task.tools))
        self._judge = Judge(config.judge, transport) if JUDGE in self._weights else None
        self._calls = Calls(config.own_timeout_s) if any("." in name for name in self._weights) else None
        known: dict[str, Callable[[Reading], Sequence[float] | Awaitable[Sequence[float]]]] = {
            **pure_terms(config, task),
            **({JUDGE: self._judge} if self._judge else {}),
            **({name: OwnTerm(name, self._calls) for name in self._weights if "." in name} if self._calls else {}),
        }
        self._terms = {name: known[name] for name in self._weights}

    async def score(self, question: Question, trajectory: Trajectory) -> Scored:
        """The reward of one episode of `question`.

        Raises RunError where the judge does not answer or a term of the user's own fails.
        """
        reading = self._reader.read(question, trajectory)
        values = {}
        for name, term in self._terms.items():
            given = term(reading)
            values[name] = self._bounded(name, reading, await given if isinstance(given, Awaitable) else given)
        parts = {name: math.fsum(of_turns) for name, of_turns in values.items()}
        return Scored(
            reward=math.fsum(self._weights[name] * part for name, part in parts.items()),
            turn_rewards=tuple(
                math.fsum(self._weights[name] * of_turns[slot] for name, of_turns in values.items())
                for slot in range(reading.slots)
            ),
            parts=parts,
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the judge since the last call, see `Judge.metrics`; empty without one."""
        return self._judge.metrics() if self._judge else {}

    async def close(self) -> None:
        """Give connections and files back. A function of the user's own that runs is not waited for."""
        if self._calls:
            self._calls.close()
        if self._judge:
            await self._judge.close()

    def _bounded(self, name: str, reading: Reading, values: Sequence[float]) -> Sequence[float]:
        """`values` of an answer's term, no more than `many_answers_score` for an episode of too many answers."""
        most = self._config.max_answer_tags
        if most is None or name not in ANSWER_TERMS or reading.answer_tags <= most:
            return values
        return [*values[:-1], min(values[-1], self._config.many_answers_score)]


class OverdueError(Exception):
    """A call that took too long."""


class Calls:
    """Calls functions of the user's own, each for `timeout_s` at most; for one event loop. `close` it at the end."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_THREADS)
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
    """The term `name`, a function of the user's own."""

    def __init__(self, name: str, calls: Calls) -> None:
        self._name = name
        self._function = load_term(name)
        self._calls = calls

    async def __call__(self, reading: Reading) -> Sequence[float]:
        """[slots] the function's values. Raises RunError where it raises, takes too long, or gives anything but finite numbers."""
        where = f"reward.terms.{self._name}, asked about sample {reading.trajectory.sample} of {reading.question.uid},"
        try:
            result = await self._calls.result_of(self._function, reading.question, reading.trajectory)
        except OverdueError:
            raise RunError(
                f"{where} had not returned after reward.own_timeout_s={self._calls.timeout_s:g} s: mend it, or raise "
                "that limit."
            ) from None
        except Exception as error:
            raise RunError(f"{where} raised {one_line(error)}: mend it.") from error
        try:
            values = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.full(1, np.nan)
        wanted, turns = "", len(reading.trajectory.turns)
        if isinstance(result, str | bytes) or values.ndim > 1 or not np.isfinite(values).all():
            wanted = "a finite number, or one a turn, is wanted"
        elif values.ndim == 1 and len(values) not in (turns, reading.slots):
            wanted = f"one number for each of the {turns} turns is wanted, or one alone"
        if wanted:
            raise RunError(f"{where} returned {repr(result)[:_QUOTED_CHARS]}: {wanted}.")
        return reading.at_end(float(values)) if values.ndim == 0 else values.tolist() or [0.0]


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


async def in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a thread that the process does not wait for when it ends, and gives what it gives."""
    outcome: Future[tuple[Any, Exception | None]] = Future()
    outcome.set_running_or_notify_cancel()  # Else whoever stops waiting would keep the thread from settling it.

    def work() -> None:
        try:
            outcome.set_result((function(*arguments), None))
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            outcome.set_result((None, error))

    threading.Thread(target=work, name="reward", daemon=True).start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:  # StopIteration itself would end the coroutine.
        stops = isinstance(error, StopIteration)
        raise RuntimeError("StopIteration") if stops else error
    return result
