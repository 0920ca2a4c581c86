"""The rollout group from the driver's side: engines, and who gets the next question.

All episodes of a question go to one engine, so that they share its prefix cache; a new question goes to
the engine with the fewest episodes under way, and waits in line while none has room or all switch weights.
Some engines may be set aside for an evaluation: they answer its questions, while the others roll on.

Contract:
- A group that is asked for is returned whole or raises: `GroupLost` if it alone is given up, another
  RunError if the run cannot go on. From its turn in line on, this takes at most the episodes' time-out and
  a margin on each of at most two engines, whatever the engines do.
- The groups of an engine that dies (see `engines.py`) are run again elsewhere, once each, from what was begun
  when they were asked for. The run goes on while one engine lives.
- A group that is cancelled has ended on its engine, or the engine has been given `ABORT_TIMEOUT_S` for it.
- All answers of the engines that are set aside are of one version, which they keep meanwhile; they roll again
  with the newest (see `switching.py`). While all that live are set aside, rollouts wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.config.schema import Device, Mode, RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError
from rlsys.observe.spans import Arg, Interval, Tracer
from rlsys.observe.timeline import EpisodeSpans
from rlsys.orchestrator.groups.engines import Engines
from rlsys.orchestrator.groups.switching import Switching
from rlsys.orchestrator.pipeline.routing import GroupLost, Loss, NoEngineLeft, NoneSetAside, Router
from rlsys.rollout.agent.begun import Begun
from rlsys.rollout.agent.doing import Doing, common_wait
from rlsys.rollout.liveness import EngineDied

MARGIN_S = 30.0
"""Beyond the episodes' own time-out: for their abort, the way there and back, and a pause to switch weights."""
ABORT_TIMEOUT_S = 10.0
"""For an engine to end the episodes of a group."""
UNDER_WAY_TIMEOUT_S = 30.0
"""For an engine to say what is begun."""
DOING_TIMEOUT_S = 5.0
"""For an engine to say what it is at, which only people are told."""

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
class _Asked:
    """Episodes of one question that are to come from one engine."""

    key: str
    uid: str
    episodes: int
    method: str
    """Of the worker."""
    args: tuple[Any, ...]
    aside: bool
    """The engine is one that is set aside."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Somebody in line."""

    asked: _Asked
    turn: asyncio.Future[int]
    """The engine, once one has room."""


@dataclass(frozen=True, slots=True)
class _Rolling:
    """A group of rollouts that is not returned yet."""

    ticket: int
    begun: tuple[Begun, ...]
    """When it was asked for."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Engines that are set aside; see `RolloutGroup.reserve`."""

    capacity: int
    """Answers that they may generate at a time."""
    version: int | None
    """Of their weights, and so of all answers; None before the first update."""
    _group: RolloutGroup

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0) -> Trajectory:
        """As `RolloutGroup.answer`. Raises NoneSetAside once all of these engines are dead, while others live."""
        return await self._group._answer(question, sample, temperature, aside=True)


class RolloutGroup:
    """All engines as one generator. Belongs to the event loop in which it is made."""

    def __init__(self, workers: WorkerGroup, config: RunConfig, tracer: Tracer, episodes: EpisodeSpans) -> None:
        """`episodes` is told when the episodes of groups generated and searched."""
        self.workers = workers
        self.step = 0
        self.waits_for = ""
        """What all episodes on the engines that roll waited for at the last `look`; empty where some were generated."""
        self._samples = config.algorithm.n_samples
        self._slots = config.rollout.max_episodes
        self._episode_timeout_s = config.rollout.episode_timeout_s
        self._tracer, self._episodes = tracer, episodes
        self._given_up: dict[str, str] = {}
        self._router = Router(len(workers.ranks), self._slots)
        self._engines = Engines(workers, self._router, self._bereaved)
        self._switching = Switching(self._engines, self._router, self._advance)
        self._reserving = asyncio.Lock()
        self._lines: dict[bool, deque[_Waiting]] = {False: deque(), True: deque()}
        """By whether an engine that is set aside is waited for."""
        self._rolling: dict[str, _Rolling] = {}
        self._serial = itertools.count()
        self._counts = _Counts()

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that are not known to be dead, by their rank in the group."""
        return self._engines.living

    @property
    def capacity(self) -> int:
        """Groups that the living engines may generate at a time; none those that are set aside."""
        return max(1, self._slots // self._samples) * (len(self.living) - len(self._router.aside))

    async def run_group(self, question: Question, ticket: int, begun: Sequence[Begun] = ()) -> list[Trajectory]:
        """`algorithm.n_samples` sampled episodes of `question`; those that are `begun` go on.

        `ticket` names the group for `under_way`. Raises GroupLost if they cannot be had while the run can go on.
        """
        key = self._key(question)
        # A resumed run may ask for fewer than were begun.
        kept = tuple(one for one in begun if one.sample < self._samples)
        asked = _Asked(key, question.uid, self._samples, "run_group", (question, self._samples, key, kept), False)
        self._rolling[key] = _Rolling(ticket, kept)
        try:
            found: list[Trajectory] = await self._run(asked)
            return found
        finally:
            del self._rolling[key]

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0) -> Trajectory:
        """One episode of `question`, as number `sample` of it; temperature 0 is greedy.

        With `compat.sampled_validation` it is drawn as in training. Raises GroupLost as `run_group` does.
        """
        return await self._answer(question, sample, temperature, aside=False)

    async def under_way(self) -> dict[int, tuple[Begun, ...]]:
        """Of the groups of rollouts that are not returned yet: what is begun, by ticket; none without any.

        Of a group that runs nowhere, or whose engine does not answer in time, that is what it was asked with.
        """
        keys = list(self._rolling)
        answers = await asyncio.gather(*(self._begun_on(engine, keys) for engine in self.living))
        found = {key: begun for answer in answers for key, begun in answer.items()}
        groups = {rolling.ticket: found.get(key, rolling.begun) for key, rolling in self._rolling.items()}
        return {ticket: begun for ticket, begun in groups.items() if begun}

    async def look(self) -> None:
        """Find out what `waits_for` is now. Nothing is known of it while an engine does not answer."""
        rolling = [engine for engine in self.living if engine not in self._router.aside]
        found = await asyncio.gather(*(self._doing_on(engine) for engine in rolling))
        known = [doing for doing in found if doing]
        self.waits_for = common_wait(known) if len(known) == len(found) else ""

    @asynccontextmanager
    async def reserve(self, engines: int) -> AsyncIterator[Reserved]:
        """Set at most `engines` aside, which answer while the others roll on; one caller after the other.

        Groups that run on them go on. One engine is left to rollouts if more than one lives; while all that live
        are set aside, rollouts wait for the end. A switch of weights does not wait for the engines: they take
        the version at the end, and are then back. That is waited for, unless the caller is cancelled.
        """
        async with self._reserving:
            taken = await self._switching.set_aside(engines)
            try:
                version = self._switching.versions.get(taken[0])
                yield Reserved(self._slots * len(taken), version, self)
            finally:
                await self._switching.put_back(taken)

    async def metrics(self) -> dict[str, float]:
        """Counts since the start: the group's own, and those of the living engines as flat keys by engine."""
        answers = await self._engines.tell_all("metrics")
        figures = {
            f"engine/{engine}/{name}": value for engine, found in answers.items() for name, value in found.items()
        }
        return figures | {
            "rollout/engines": len(self.living),
            "rollout/requeued_groups": self._counts.requeued,
            "rollout/lost_groups": self._counts.lost,
            "rollout/timed_out_groups": self._counts.timed_out,
        }

    async def open_transport(self, specs: Sequence[Any]) -> None:
        """Let each of the `living` engines, in that order, receive handles as its part of `specs` says."""
        own = dict(zip(self.living, specs, strict=True))
        await self._engines.each(lambda engine: self._engines.tell(engine, "open_transport", own[engine]))

    async def begin_update(self, version: int) -> None:
        """Announce `version`; the engines generate on."""
        await self._switching.begin_update(version)

    async def load_bucket(self, handle: Any) -> None:
        """Let every engine stage a handle; they generate on."""
        await self._engines.tell_all("load_bucket", handle)

    async def finish_update(self, version: int, digest: str) -> None:
        """Let every engine that is not set aside switch to `version`; each gets new groups again as soon as it has.

        `digest` is the sender's, over all tensors. Raises RunError if an engine holds anything else.
        """
        await self._switching.finish_update(version, digest)

    async def sleep(self) -> None:
        """Let every engine hand its device's memory back; nothing may be under way."""
        await self._engines.tell_all("sleep")

    async def wake(self) -> None:
        """Let every engine take its device's memory again."""
        await self._engines.tell_all("wake")

    async def stop(self, timeout_s: float) -> None:
        """End what every living engine has started."""
        await self._engines.each(lambda engine: self._engines.tell(engine, "stop", timeout_s=timeout_s))

    async def _answer(self, question: Question, sample: int, temperature: float, aside: bool) -> Trajectory:
        key = self._key(question)
        asked = _Asked(key, question.uid, 1, "answer", (question, sample, temperature, key), aside)
        found: Trajectory = await self._run(asked)
        return found

    def _key(self, question: Question) -> str:
        return f"{question.uid}~{next(self._serial)}"

    async def _begun_on(self, engine: int, keys: Sequence[str]) -> Mapping[str, tuple[Begun, ...]]:
        """What `engine` says of the groups that it has; nothing if it does not answer, which shows elsewhere."""
        try:
            found: dict[str, tuple[Begun, ...]] = await self._engines.answer(
                engine, "under_way", keys, timeout_s=UNDER_WAY_TIMEOUT_S
            )
        except (RankDied, EngineDied, RankSilent):
            return {}
        return found

    async def _doing_on(self, engine: int) -> Doing | None:
        """What `engine` is at; None if it does not say, for whatever reason: that shows in what it is needed for."""
        try:
            found: Doing = await self._engines.answer(engine, "doing", timeout_s=DOING_TIMEOUT_S)
        except RunError:
            return None
        return found

    async def _run(self, asked: _Asked) -> Any:
        """What the worker's method returns, from the place in line to the end; see the contract above."""
        try:
            return await self._on_living_engines(asked)
        except GroupLost as loss:
            self._counts.lost += 1
            self._counts.timed_out += loss.reason is Loss.timeout
            _log.warning("%s", loss)
            raise
        finally:
            self._given_up.pop(asked.key, None)
            self._router.release(asked.key)
            self._advance()

    async def _on_living_engines(self, asked: _Asked) -> Any:
        """Try one engine after the other while they die."""
        attempt = 1
        while True:
            engine = await self._turn(asked, again=attempt > 1)
            self._counts.requeued += attempt > 1
            try:
                began_ns = self._tracer.now()
                with self._span(engine, asked, attempt):
                    found = await self._generate(engine, asked)
            except (RankDied, EngineDied) as death:
                self._engines.bury(engine, death)
            else:
                self._tell_episodes(engine, asked, (began_ns, self._tracer.now()), found)
                return found
            if asked.key in self._given_up and self.living:
                raise GroupLost(asked.uid, Loss.engine_died, self._given_up[asked.key])
            attempt += 1

    def _tell_episodes(self, engine: int, asked: _Asked, whole: Interval, found: Any) -> None:
        if asked.key in self._rolling:
            self._episodes.add(whole, _lane(engine), {"question": asked.uid}, found)

    async def _generate(self, engine: int, asked: _Asked) -> Any:
        """One try, on one engine."""
        limit_s = self._episode_timeout_s * ceil(asked.episodes / self._slots) + MARGIN_S
        try:
            return await self._engines.ask(engine, asked.method, *asked.args, timeout_s=limit_s)
        except asyncio.CancelledError:
            await self._abort(engine, asked.key)
            raise
        except RankSilent as silence:
            await self._abort(engine, asked.key)
            detail = f"engine {engine} did not return it within {limit_s:.0f} s"
            raise GroupLost(asked.uid, Loss.timeout, detail) from silence

    async def _abort(self, engine: int, key: str) -> None:
        """End a group's episodes on its engine. Never raises: what is wrong with the engine shows elsewhere."""
        with contextlib.suppress(RunError):
            await self._engines.answer(engine, "abort_group", key, timeout_s=ABORT_TIMEOUT_S)

    def _span(self, engine: int, asked: _Asked, attempt: int) -> AbstractContextManager[dict[str, Arg]]:
        facts: dict[str, Arg] = {"step": self.step, "question": asked.uid}
        if engine in self._switching.versions:
            facts["version"] = self._switching.versions[engine]
        if attempt > 1:
            facts["attempt"] = attempt
        name = "rollout.group" if asked.key in self._rolling else "eval.episode"
        return self._tracer.span(name, lane=_lane(engine), **facts)

    async def _turn(self, asked: _Asked, again: bool) -> int:
        """Wait in line, at its head if it comes `again`, for an engine with room."""
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        line = self._lines[asked.aside]
        if again:
            line.appendleft(waiting)
        else:
            line.append(waiting)
        self._advance()
        return await waiting.turn

    def _bereaved(self, lost: Mapping[str, str]) -> None:
        """An engine has died, and groups of it are lost; the last one ends the waiting for all."""
        self._given_up |= lost
        self._advance()

    def _advance(self) -> None:
        """Give engines to those in line, in order, as long as there is room."""
        for line in self._lines.values():
            while line and self._seat(line[0]):
                line.popleft()

    def _seat(self, first: _Waiting) -> bool:
        """Whether the first in line has not to wait any longer."""
        if first.turn.cancelled():
            return True
        asked = first.asked
        try:
            engine = self._router.assign(asked.key, asked.episodes, asked.aside)
        except (NoEngineLeft, NoneSetAside) as end:
            first.turn.set_exception(type(end)(f"{end} The last one: {self._engines.last_words}"))
            return True
        if engine is not None:
            first.turn.set_result(engine)
        return engine is not None


def _lane(engine: int) -> str:
    return f"engine {engine}"
