"""The rollout group from the driver's side: engines, and who gets the next question.

All episodes of a question go to one engine, so that they share its prefix cache; a new question goes to
the engine with the fewest episodes under way, and waits in line while none has room or all switch weights.

Contract:
- A group that is asked for is returned whole or raises: `GroupLost` if it alone is given up, another
  RunError if the run cannot go on. From its turn in line on, this takes at most the episodes' time-out and
  a margin on each of at most two engines, whatever the engines do.
- An engine is dead once its process is, or once it answers not even a question for its metrics. It is
  killed and gets nothing more; its groups are run again elsewhere, once each. The run goes on while one
  engine lives.
- A group that is cancelled has ended on its engine, or the engine has been given `ABORT_TIMEOUT_S` for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlsys.agent.trajectory import Trajectory
from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.config.schema import Device, Mode, RunConfig
from rlsys.data.question import Question
from rlsys.errors import RunError
from rlsys.observe.spans import Arg, Tracer
from rlsys.pipeline.routing import EngineDied, GroupLost, Loss, NoEngineLeft, Router

MARGIN_S = 30.0
"""Beyond the episodes' own time-out: for their abort, the way there and back, and a pause to switch weights."""
PING_TIMEOUT_S = 30.0
"""For an engine that has kept a group too long to answer anything at all."""
ABORT_TIMEOUT_S = 10.0
"""For an engine to end the episodes of a group."""

_log = logging.getLogger(__name__)


def make_worker(config: RunConfig, seed: int) -> Any:
    """Build one engine's worker, in its own process; `search.url` names a running server."""
    from rlsys.rollout.worker import RolloutWorker  # loads SGLang, which the driver has no use for

    cluster = config.cluster
    return RolloutWorker(
        model_path=config.model.path,
        rollout=config.rollout,
        task=config.task,
        search=config.search,
        device=cluster.device,
        seed=seed,
        on_update=config.trainer.schedule.on_update,
        memory_saver=cluster.mode is Mode.collocated and cluster.device is Device.gpu,
        sampled_answers=config.compat.sampled_validation,
    )


@dataclass(slots=True)
class _Counts:
    """Groups, since the start."""

    requeued: int = 0
    """Run again because their engine died."""
    lost: int = 0
    """Given up."""
    timed_out: int = 0
    """Of those, the ones that their engine never returned."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A group in line."""

    key: str
    episodes: int
    turn: asyncio.Future[int]
    """The engine, once one has room."""


class RolloutGroup:
    """All engines as one generator. Belongs to the event loop in which it is made."""

    def __init__(self, workers: WorkerGroup, config: RunConfig, tracer: Tracer) -> None:
        engines = len(workers.ranks)
        self.workers = workers
        self.step = 0
        self._samples = config.algorithm.n_samples
        self._slots = config.rollout.max_episodes
        self._episode_timeout_s = config.rollout.episode_timeout_s
        self._tracer = tracer
        self._router = Router(engines, self._slots)
        loop = asyncio.get_running_loop()
        self._gone: tuple[asyncio.Future[str], ...] = tuple(loop.create_future() for _ in range(engines))
        """Done when an engine is dead: why."""
        self._last_words = ""
        """Why the engine that died last did, and what it last wrote."""
        self._line: deque[_Waiting] = deque()
        self._given_up: dict[str, str] = {}
        self._versions: dict[int, int] = {}
        self._serial = itertools.count()
        self._counts = _Counts()

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that are not known to be dead, by their rank in the group."""
        return self._router.living

    @property
    def capacity(self) -> int:
        """Groups that the living engines may generate at a time."""
        return max(1, self._slots // self._samples) * len(self.living)

    async def run_group(self, question: Question, n_samples: int | None = None) -> list[Trajectory]:
        """`n_samples` sampled episodes of `question`, by default `algorithm.n_samples`.

        Raises GroupLost if they cannot be had while the run can go on.
        """
        samples = self._samples if n_samples is None else n_samples
        return await self._run(question, samples, greedy=False)

    async def answer(self, question: Question) -> Trajectory:
        """One episode of `question`, greedy unless `compat.sampled_validation`. Raises GroupLost as `run_group` does."""
        return (await self._run(question, 1, greedy=True))[0]

    async def metrics(self) -> dict[str, float]:
        """Counts since the start: the group's own, and those of the living engines as flat keys by engine."""
        answers = await self._tell_all("metrics")
        figures = {
            f"engine/{engine}/{name}": value
            for engine, found in answers.items()
            for name, value in found.items()
        }
        return figures | {
            "rollout/engines": len(self.living),
            "rollout/requeued_groups": self._counts.requeued,
            "rollout/lost_groups": self._counts.lost,
            "rollout/timed_out_groups": self._counts.timed_out,
        }

    async def open_transport(self, specs: Sequence[Any]) -> None:
        """Let each of the `living` engines, in that order, receive parcels as its part of `specs` says."""
        own = dict(zip(self.living, specs, strict=True))
        await self._each(lambda engine: self._tell(engine, "open_transport", own[engine]))

    async def begin_update(self, version: int) -> None:
        """Announce `version`; the engines generate on."""
        await self._tell_all("begin_update", version)

    async def load_bucket(self, parcel: Any) -> None:
        """Let every engine stage a parcel; they generate on."""
        await self._tell_all("load_bucket", parcel)

    async def finish_update(self, version: int, digest: str) -> None:
        """Let every engine switch to `version`; each gets new groups again as soon as it has.

        `digest` is the sender's, over all tensors. Raises RunError if an engine holds anything else.
        """

        async def switch(engine: int) -> dict[int, Any]:
            answer = await self._tell(engine, "finish_update", version, digest)
            self._versions |= dict.fromkeys(answer, version)
            self._reopen(engine)
            return answer

        switching = self.living
        for engine in switching:
            self._router.close(engine)
        try:
            await self._each(switch)
        finally:
            self._reopen(*switching)

    async def sleep(self) -> None:
        """Let every engine hand its device's memory back; nothing may be under way."""
        await self._tell_all("sleep")

    async def wake(self) -> None:
        """Let every engine take its device's memory again."""
        await self._tell_all("wake")

    async def stop(self, timeout_s: float) -> None:
        """End what every living engine has started."""
        await self._each(lambda engine: self._tell(engine, "stop", timeout_s=timeout_s))

    async def _run(self, question: Question, samples: int, greedy: bool) -> list[Trajectory]:
        """A group, from its place in line to its end; see the contract above."""
        key = f"{question.uid}~{next(self._serial)}"
        try:
            return await self._on_living_engines(key, question, samples, greedy)
        except GroupLost as loss:
            self._counts.lost += 1
            self._counts.timed_out += loss.reason is Loss.timeout
            _log.warning("%s", loss)
            raise
        finally:
            self._given_up.pop(key, None)
            self._router.release(key)
            self._advance()

    async def _on_living_engines(
        self, key: str, question: Question, samples: int, greedy: bool
    ) -> list[Trajectory]:
        """Try one engine after the other while they die."""
        attempt = 1
        while True:
            engine = await self._turn(key, samples, again=attempt > 1)
            self._counts.requeued += attempt > 1
            try:
                with self._span(engine, question, greedy, attempt):
                    return await self._generate(engine, key, question, samples, greedy)
            except (RankDied, EngineDied) as death:
                self._bury(engine, death)
            if key in self._given_up and self.living:
                raise GroupLost(question.uid, Loss.engine_died, self._given_up[key])
            attempt += 1

    async def _generate(
        self, engine: int, key: str, question: Question, samples: int, greedy: bool
    ) -> list[Trajectory]:
        """One try at a group, on one engine."""
        limit_s = self._episode_timeout_s * ceil(samples / self._slots) + MARGIN_S
        try:
            found: list[Trajectory] = await self._ask(
                engine, "run_group", question, samples, greedy, key, timeout_s=limit_s
            )
        except asyncio.CancelledError:
            await self._abort(engine, key)
            raise
        except RankSilent as silence:
            await self._abort(engine, key)
            detail = f"engine {engine} did not return it within {limit_s:.0f} s"
            raise GroupLost(question.uid, Loss.timeout, detail) from silence
        return found

    async def _abort(self, engine: int, key: str) -> None:
        """End a group's episodes on its engine. Never raises: what is wrong with the engine shows elsewhere."""
        with contextlib.suppress(RunError):
            await self._answer(engine, "abort_group", key, timeout_s=ABORT_TIMEOUT_S)

    def _span(
        self, engine: int, question: Question, greedy: bool, attempt: int
    ) -> AbstractContextManager[dict[str, Arg]]:
        facts: dict[str, Arg] = {"step": self.step, "question": question.uid}
        if engine in self._versions:
            facts["version"] = self._versions[engine]
        if attempt > 1:
            facts["attempt"] = attempt
        name = "eval.episode" if greedy else "rollout.group"
        return self._tracer.span(name, lane=f"engine {engine}", **facts)

    async def _turn(self, key: str, episodes: int, again: bool) -> int:
        """Wait in line, at its head if it comes `again`, for an engine with room."""
        waiting = _Waiting(key, episodes, asyncio.get_running_loop().create_future())
        if again:
            self._line.appendleft(waiting)
        else:
            self._line.append(waiting)
        self._advance()
        return await waiting.turn

    def _reopen(self, *engines: int) -> None:
        for engine in engines:
            self._router.reopen(engine)
        self._advance()

    def _advance(self) -> None:
        """Give engines to those in line, in order, as long as there is room."""
        while self._line:
            first = self._line[0]
            if not first.turn.cancelled():
                try:
                    engine = self._router.assign(first.key, first.episodes)
                except NoEngineLeft as end:
                    first.turn.set_exception(NoEngineLeft(f"{end} The last one: {self._last_words}"))
                else:
                    if engine is None:
                        return
                    first.turn.set_result(engine)
            self._line.popleft()

    def _bury(self, engine: int, death: RunError) -> None:
        """Strike a dead engine off, once; all who wait for its answers learn of it, and move on."""
        if engine not in self.living:
            return
        why = str(death).partition("\n")[0]
        self._last_words = f"{why}\n{self.workers.log_tail(engine)}"
        self.workers.kill_rank(engine)
        orphans = self._router.died(engine)
        self._given_up |= orphans.lost
        _log.warning(
            "rollout engine %d is dead, %d live: %d of its groups run again, %d are lost. %s",
            engine, len(self.living), len(orphans.again), len(orphans.lost), why,
        )  # fmt: skip
        self._gone[engine].set_result(why)

    async def _tell_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` on all living engines at once; the answers of those that still live then."""
        return await self._each(lambda engine: self._tell(engine, method, *args))

    async def _each(self, do: Callable[[int], Coroutine[Any, Any, dict[int, Any]]]) -> dict[int, Any]:
        """`do` for all living engines at once, and what it returns, joined. Raises the first failure."""
        tasks = [asyncio.ensure_future(do(engine)) for engine in self.living]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            await _end(*tasks)
        if not self.living:
            raise NoEngineLeft(f"every rollout engine has died. The last one: {self._last_words}")
        return {engine: answer for found in answers for engine, answer in found.items()}

    async def _tell(
        self, engine: int, method: str, *args: Any, timeout_s: float | None = None
    ) -> dict[int, Any]:
        """The engine and its answer; nothing if it has died, which is not an error while others live."""
        try:
            return {engine: await self._ask(engine, method, *args, timeout_s=timeout_s)}
        except (RankDied, EngineDied) as death:
            self._bury(engine, death)
            return {}

    async def _ask(self, engine: int, method: str, *args: Any, timeout_s: float | None) -> Any:
        """What the engine answers. Raises RankSilent if it is late but alive, else EngineDied or RankDied."""
        try:
            return await self._answer(engine, method, *args, timeout_s=timeout_s)
        except RankSilent as late:
            try:
                await self._answer(engine, "metrics", timeout_s=PING_TIMEOUT_S)
            except RankSilent:
                raise EngineDied(f"engine {engine} answers nothing any more: {late}") from late
            raise

    async def _answer(self, engine: int, method: str, *args: Any, timeout_s: float | None) -> Any:
        """What the engine answers. Raises EngineDied as soon as it is known to be dead."""
        gone = self._gone[engine]
        if gone.done():
            raise EngineDied(gone.result())
        call = asyncio.ensure_future(self.workers.call_rank(engine, method, *args, timeout_s=timeout_s))
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineDied(gone.result())
            return call.result()
        finally:
            await _end(call)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is not done, and wait until it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
