"""The rollout engines as one generator: which engine gets a prompt group, which live, which version each has.

All episodes of a prompt group go to one engine, so that they share its prefix cache. A new group goes to the engine with
the fewest episodes in flight, and waits in line while none has room or all switch weights. Some engines may be set aside
for an evaluation: they answer its questions, while the others roll on.

Contract:
- A group that is asked for is returned whole or raises: `GroupLost` if it alone is given up, another RunError if the run
  cannot go on. From its turn in line on, this takes at most the episodes' time-out and a margin on each of at most two
  engines, whatever the engines do.
- An engine is dead once its process is, or once it does not even answer a ping. It is killed, struck off once, and asked
  nothing more; who waits for its answer is told at once. Its groups run again elsewhere, once each, from the progress that
  they were asked for with. The run goes on while one engine lives.
- A group that is cancelled has ended on its engine, or the engine has been given `ABORT_TIMEOUT_S` for it.

Versions: all engines stage a new version as it comes. A switch passes over engines that are set aside: they keep their
version until they are put back, and then take what they have staged before they get rollouts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError
from rlsys.observe.spans import Arg, Span, Tracer, episode_spans
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, Loss
from rlsys.rollout.agent.episode import EngineActivity, EngineDied, common_wait
from rlsys.rollout.agent.tokens import EpisodeProgress

MARGIN_S = 30.0
"""Beyond the episodes' own time-out: for their abort, the way there and back, and a pause to switch weights."""
ABORT_TIMEOUT_S = 10.0
"""For an engine to end the episodes of a group."""
IN_FLIGHT_TIMEOUT_S = 30.0
"""For an engine to return the progress of its episodes."""
ACTIVITY_TIMEOUT_S = 5.0
"""For an engine to report its activity, which is only shown to people."""
PING_TIMEOUT_S = 30.0
"""For an engine that has kept a call too long to answer anything at all."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    """Groups, since the start."""

    requeued: int = 0
    """Run again because their engine died."""
    lost: int = 0
    """Given up."""
    timed_out: int = 0
    """Lost groups that their engine never returned."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Episodes of one question that are wanted from one engine."""

    key: str
    uid: str
    episodes: int
    method: str
    """Method of the worker."""
    args: tuple[Any, ...]
    aside: bool
    """Whether it is for an engine that is set aside."""
    prompt_group: int | None = None
    """Number of the scheduler's prompt group; None for an answer of an evaluation."""
    progress: tuple[EpisodeProgress, ...] = ()
    """Episodes of the group so far, when it was asked for."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Engines that are set aside; see `EnginePool.reserve`."""

    capacity: int
    """Answers that they may generate at a time."""
    version: int | None
    """Version of their weights, and so of all answers; None before the first update."""
    _pool: EnginePool

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0) -> Trajectory:
        """As `EnginePool.answer`. Raises NoneSetAside once all of these engines are dead, while others live."""
        return await self._pool.answer(question, sample, temperature, aside=True)


class EnginePool:
    """All engines of a run. Belongs to the event loop in which it is made."""

    def __init__(self, workers: WorkerGroup, config: RunConfig, tracer: Tracer, episodes: list[Span]) -> None:
        """`episodes` takes the spans in which the episodes of groups generated and searched."""
        self.workers = workers
        self.step = 0
        self.waits_for = ""
        """What all episodes on the rolling engines waited for at the last `look`; empty where some were generated."""
        self._samples = config.algorithm.n_samples
        self._slots = config.rollout.max_episodes
        self._episode_timeout_s = config.rollout.episode_timeout_s
        self._tracer, self._episodes = tracer, episodes
        self._lost: dict[str, str] = {}
        """Keys of groups that have lost two engines -> why they are given up."""
        self._router = Router(len(workers.ranks), self._slots)
        self._engines = EngineCalls(workers, self._router, self._on_engine_death)
        self._versions = VersionSwitch(self._engines, self._router, self._advance)
        self._reserving = asyncio.Lock()
        self._lines: dict[bool, deque[tuple[_Request, asyncio.Future[int]]]] = {False: deque(), True: deque()}
        """Requests in line for an engine, by whether it is one that is set aside."""
        self._rolling: dict[str, _Request] = {}
        """Groups of rollouts that are not returned yet."""
        self._serial = itertools.count()
        self._counts = _Counts()

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that are not known to be dead, by their rank in the group."""
        return self._router.living

    @property
    def capacity(self) -> int:
        """Groups that the living engines may generate at a time; none those that are set aside."""
        return max(1, self._slots // self._samples) * (len(self.living) - len(self._router.aside))

    async def run_group(
        self, question: Question, prompt_group: int, progress: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """`algorithm.n_samples` sampled episodes of `question`; those with `progress` resume.

        `prompt_group` names the group for `in_flight`. Raises GroupLost if they cannot be had while the run can go on.
        """
        key = self._key(question)
        # A resumed run may ask for fewer samples than it had.
        kept = tuple(episode for episode in progress if episode.sample < self._samples)
        args = (question, self._samples, key, kept)
        request = _Request(key, question.uid, self._samples, "run_group", args, False, prompt_group, kept)
        self._rolling[key] = request
        try:
            trajectories: list[Trajectory] = await self._run(request)
            return trajectories
        finally:
            del self._rolling[key]

    async def answer(
        self, question: Question, sample: int = 0, temperature: float = 0.0, *, aside: bool = False
    ) -> Trajectory:
        """One episode of `question`, as its sample number `sample`; temperature 0 is greedy.

        With `compat.sampled_validation` it is drawn as in training. `aside` asks an engine that is set aside. Raises
        GroupLost as `run_group` does.
        """
        key = self._key(question)
        request = _Request(key, question.uid, 1, "answer", (question, sample, temperature, key), aside)
        trajectory: Trajectory = await self._run(request)
        return trajectory

    async def in_flight(self) -> dict[int, tuple[EpisodeProgress, ...]]:
        """Progress of the groups that are not returned yet, by prompt group; groups without any are left out.

        For a group that runs nowhere, or whose engine does not answer in time, it is what the group was asked with.
        """
        keys = list(self._rolling)
        answers = await asyncio.gather(*(self._progress_on(engine, keys) for engine in self.living))
        told = {key: progress for answer in answers for key, progress in answer.items()}
        groups = {group.prompt_group: told.get(key, group.progress) for key, group in self._rolling.items()}
        return {number: progress for number, progress in groups.items() if number is not None and progress}

    async def look(self) -> None:
        """Update `waits_for`. Nothing is known while an engine does not answer."""
        rolling = [engine for engine in self.living if engine not in self._router.aside]
        answers = await asyncio.gather(*(self._activity_of(engine) for engine in rolling))
        known = [activity for activity in answers if activity]
        self.waits_for = common_wait(known) if len(known) == len(answers) else ""

    @asynccontextmanager
    async def reserve(self, engines: int) -> AsyncIterator[Reserved]:
        """Set at most `engines` aside, which answer while the others roll on; one caller after the other.

        Groups that run on them go on. One engine is left to rollouts if more than one lives; while all that live are set
        aside, rollouts wait for the end. A switch of weights does not wait for these engines: they take the version at the
        end, and are then back. That is waited for, unless the caller is cancelled.
        """
        async with self._reserving:
            taken = await self._versions.set_aside(engines)
            try:
                yield Reserved(self._slots * len(taken), self._versions.of_engine.get(taken[0]), self)
            finally:
                await self._versions.put_back(taken)

    async def metrics(self) -> dict[str, float]:
        """Counts since the start: the pool's own, and those of the living engines as flat keys by engine."""
        answers = await self._engines.tell_all("metrics")
        by_engine = {
            f"engine/{engine}/{name}": value for engine, figures in answers.items() for name, value in figures.items()
        }
        return by_engine | {
            "rollout/engines": len(self.living),
            "rollout/requeued_groups": self._counts.requeued,
            "rollout/lost_groups": self._counts.lost,
            "rollout/timed_out_groups": self._counts.timed_out,
        }

    async def open_transport(self, specs: Sequence[Any]) -> None:
        """Let each of the `living` engines, in that order, receive buckets as its part of `specs` says."""
        of_engine = dict(zip(self.living, specs, strict=True))
        await self._engines.each(lambda engine: self._engines.tell(engine, "open_transport", of_engine[engine]))

    async def begin_update(self, version: int) -> None:
        """Announce `version`; the engines generate on."""
        await self._versions.begin_update(version)

    async def load_bucket(self, bucket: Any) -> None:
        """Let every engine stage a bucket; they generate on."""
        await self._engines.tell_all("load_bucket", bucket)

    async def finish_update(self, version: int, digest: str) -> None:
        """Let every engine that is not set aside switch to `version`; each gets new groups again as soon as it has.

        `digest` is the sender's, over all tensors. Raises RunError if an engine holds anything else.
        """
        await self._versions.finish_update(version, digest)

    async def offload(self) -> None:
        """Let every engine hand its device's memory back; nothing may be in flight."""
        await self._engines.tell_all("sleep")

    async def restore(self) -> None:
        """Let every engine take its device's memory again."""
        await self._engines.tell_all("wake")

    async def stop(self, timeout_s: float) -> None:
        """End what every living engine has started."""
        await self._engines.each(lambda engine: self._engines.tell(engine, "stop", timeout_s=timeout_s))

    async def _run(self, request: _Request) -> Any:
        """Return what the worker's method does, from the place in line to the end; see the contract above."""
        limit_s = self._episode_timeout_s * ceil(request.episodes / self._slots) + MARGIN_S
        attempt = 1
        try:
            while True:
                engine = await self._turn(request, again=attempt > 1)
                self._counts.requeued += attempt > 1
                began_ns = self._tracer.now()
                try:
                    with self._span(engine, request, attempt):
                        try:
                            answer = await self.workers.call_rank(
                                engine,
                                request.method,
                                *request.args,
                                timeout_s=limit_s,
                                until=self._engines.dead[engine],
                            )
                        except RankSilent as silence:
                            await self._engines.ping(engine, silence)
                            raise
                    if request.prompt_group is not None:
                        whole = (began_ns, self._tracer.now())
                        self._episodes += episode_spans(whole, _lane(engine), {"question": request.uid}, answer)
                except (RankDied, EngineDied) as death:
                    self._engines.mark_dead(engine, death)
                except asyncio.CancelledError:
                    await self._abort(engine, request.key)
                    raise
                except RankSilent as silence:
                    await self._abort(engine, request.key)
                    detail = f"engine {engine} did not return it within {limit_s:.0f} s"
                    raise self._lose(request.uid, Loss.timeout, detail) from silence
                else:
                    return answer
                if request.key in self._lost and self.living:
                    raise self._lose(request.uid, Loss.engine_died, self._lost[request.key])
                attempt += 1
        finally:
            self._lost.pop(request.key, None)
            self._router.release(request.key)
            self._advance()

    def _lose(self, uid: str, reason: Loss, detail: str) -> GroupLost:
        """Count a group that is given up."""
        self._counts.lost += 1
        self._counts.timed_out += reason is Loss.timeout
        loss = GroupLost(uid, reason, detail)
        _log.warning("%s", loss)
        return loss

    async def _abort(self, engine: int, key: str) -> None:
        """End a group's episodes on its engine. Never raises: what is wrong with the engine shows elsewhere."""
        with contextlib.suppress(RunError):
            await self._engines.call(engine, "abort_group", key, timeout_s=ABORT_TIMEOUT_S, ping=False)

    async def _progress_on(self, engine: int, keys: Sequence[str]) -> Mapping[str, tuple[EpisodeProgress, ...]]:
        """Progress of those groups of `keys` that `engine` has; nothing if it does not answer, which shows elsewhere."""
        try:
            progress: dict[str, tuple[EpisodeProgress, ...]] = await self._engines.call(
                engine, "in_flight", keys, timeout_s=IN_FLIGHT_TIMEOUT_S, ping=False
            )
        except (RankDied, EngineDied, RankSilent):
            return {}
        return progress

    async def _activity_of(self, engine: int) -> EngineActivity | None:
        """The activity of `engine`; None if it does not answer, for whatever reason: that shows where it is needed."""
        try:
            activity: EngineActivity = await self._engines.call(
                engine, "activity", timeout_s=ACTIVITY_TIMEOUT_S, ping=False
            )
        except RunError:
            return None
        return activity

    def _key(self, question: Question) -> str:
        return f"{question.uid}~{next(self._serial)}"

    def _span(self, engine: int, request: _Request, attempt: int) -> AbstractContextManager[dict[str, Arg]]:
        facts: dict[str, Arg] = {"step": self.step, "question": request.uid}
        if engine in self._versions.of_engine:
            facts["version"] = self._versions.of_engine[engine]
        if attempt > 1:
            facts["attempt"] = attempt
        name = "eval.episode" if request.prompt_group is None else "rollout.group"
        return self._tracer.span(name, lane=_lane(engine), **facts)

    async def _turn(self, request: _Request, again: bool) -> int:
        """Wait in line, at its head if it comes `again`, for an engine with room."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        line = self._lines[request.aside]
        if again:
            line.appendleft((request, turn))
        else:
            line.append((request, turn))
        self._advance()
        return await turn

    def _on_engine_death(self, lost: Mapping[str, str]) -> None:
        """An engine has died, and groups of it are lost; the death of the last one ends the waiting for all."""
        self._lost |= lost
        self._advance()

    def _advance(self) -> None:
        """Give engines to the requests in line, in order, as long as there is room."""
        for line in self._lines.values():
            while line and self._assign(*line[0]):
                line.popleft()

    def _assign(self, request: _Request, turn: asyncio.Future[int]) -> bool:
        """Give the first in line an engine, or the error that it waits in vain; False if it has to wait."""
        if turn.cancelled():
            return True
        try:
            engine = self._router.assign(request.key, request.episodes, request.aside)
        except (NoEngineLeft, NoneSetAside) as end:
            turn.set_exception(type(end)(f"{end} The last one: {self._engines.last_error}"))
            return True
        if engine is not None:
            turn.set_result(engine)
        return engine is not None


class EngineCalls:
    """Calls to the engines, and which of them live. Belongs to the event loop in which it is made."""

    def __init__(self, workers: WorkerGroup, router: Router, on_death: Callable[[Mapping[str, str]], None]) -> None:
        """`on_death` is told the keys of the groups that are lost with an engine, each with the reason."""
        self.workers = workers
        self.last_error = ""
        """Why the engine that died last did, and the end of its log."""
        self._router = router
        self._on_death = on_death
        loop = asyncio.get_running_loop()
        self.dead: tuple[asyncio.Future[str], ...] = tuple(loop.create_future() for _ in workers.ranks)
        """Done when an engine is dead: the reason."""

    def mark_dead(self, engine: int, death: RunError) -> None:
        """Kill a dead engine and strike it off, once; all who wait for its answers learn of it, and move on."""
        if engine not in self._router.living:
            return
        why = str(death).partition("\n")[0]
        self.last_error = f"{why}\n{self.workers.log_tail(engine)}"
        self.workers.kill_rank(engine)
        orphans = self._router.died(engine)
        _log.warning(
            "rollout engine %d is dead, %d live: %d of its groups run again, %d are lost. %s",
            engine, len(self._router.living), len(orphans.again), len(orphans.lost), why,
        )  # fmt: skip
        self.dead[engine].set_result(why)
        self._on_death(orphans.lost)

    async def tell_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` on all living engines at once; the answers of those that still live then."""
        return await self.each(lambda engine: self.tell(engine, method, *args))

    async def each(
        self, do: Callable[[int], Coroutine[Any, Any, dict[int, Any]]], engines: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """`do` for all living engines, or for `engines`, at once; the answers joined. Raises the first failure.

        Raises NoEngineLeft if none lives afterwards.
        """
        tasks = [asyncio.ensure_future(do(engine)) for engine in (self._router.living if engines is None else engines)]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._router.living:
            raise NoEngineLeft(f"every rollout engine has died. The last one: {self.last_error}")
        return {engine: answer for told in answers for engine, answer in told.items()}

    async def tell(self, engine: int, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """The engine and its answer; nothing if it has died, which is not an error while others live."""
        try:
            return {engine: await self.call(engine, method, *args, timeout_s=timeout_s)}
        except (RankDied, EngineDied) as death:
            self.mark_dead(engine, death)
            return {}

    async def call(self, engine: int, method: str, *args: Any, timeout_s: float | None, ping: bool = True) -> Any:
        """The engine's answer. Raises RankDied as soon as it is known to be dead, RankSilent if it is late but alive.

        With `ping` an engine that is late is asked for its metrics, and is dead if it answers not even that.
        """
        try:
            return await self.workers.call_rank(engine, method, *args, timeout_s=timeout_s, until=self.dead[engine])
        except RankSilent as late:
            if ping:
                await self.ping(engine, late)
            raise

    async def ping(self, engine: int, late: RankSilent) -> None:
        """Ask an engine that is `late` for its metrics. Raises RankDied if it answers not even that."""
        try:
            await self.call(engine, "metrics", timeout_s=PING_TIMEOUT_S, ping=False)
        except RankSilent:
            raise RankDied(f"engine {engine} answers nothing any more: {late}", engine) from late


class VersionSwitch:
    """Tracks the version of each engine's weights, and which engines are set aside from rollouts.

    Invariants:
    - Engines that are set aside together have one version, and keep it.
    - An engine that a switch has passed over gets no rollouts before it has that version or a later one. Once it is put
      back it takes what it has staged; if a newer version is being staged by then, it waits for that one.
    - Nobody waits for ever for an engine that is behind: it catches up, waits for a switch that is on its way, or dies.
    - Updates of one engine follow each other: the next one begins when a switch that is running has ended.
    """

    def __init__(self, engines: EngineCalls, router: Router, advance: Callable[[], None]) -> None:
        """`advance` is called when engines take groups again."""
        self.of_engine: dict[int, int] = {}
        """Engine -> its version; none for one that has had no update."""
        self._engines, self._router, self._advance = engines, router, advance
        self._switching = asyncio.Lock()
        """Held while the pool switches, and while engines are chosen: they are then all of one version."""
        self._updating = [asyncio.Lock() for _ in engines.workers.ranks]
        """Held while an engine begins an update, or catches up."""
        self._staged: dict[int, tuple[int, str]] = {}
        """Engines that a switch has passed over -> its version and digest, until the next update begins."""
        self._behind: set[int] = set()
        """Engines that a switch has passed over, until one does not."""
        self._catching_up: set[asyncio.Task[None]] = set()

    async def begin_update(self, version: int) -> None:
        """Announce `version` to all engines; what they have staged is forgotten."""

        async def begin(engine: int) -> dict[int, Any]:
            async with self._updating[engine]:
                self._staged.pop(engine, None)
                return await self._engines.tell(engine, "begin_update", version)

        await self._engines.each(begin)

    async def finish_update(self, version: int, digest: str) -> None:
        """Let every engine that is not set aside switch; each gets groups again as soon as it has."""
        async with self._switching:
            aside = self._router.aside
            self._behind |= aside
            self._staged |= dict.fromkeys(aside, (version, digest))
            switching = [engine for engine in self._router.living if engine not in aside]
            for engine in switching:
                self._router.close(engine)
            try:
                await self._engines.each(lambda engine: self._switch(engine, version, digest), switching)
            finally:
                self._reopen(*switching)

    async def set_aside(self, count: int) -> tuple[int, ...]:
        """Take `count` engines out of rollouts, those with the fewest episodes; what runs on them goes on.

        Waits for a switch that is running. Fewer are taken if fewer have the newest version, or if none would be left
        for rollouts; but at least one. Raises NoEngineLeft if none lives.
        """
        async with self._switching:
            living = self._router.living
            if not living:
                raise NoEngineLeft(f"every rollout engine has died. The last one: {self._engines.last_error}")
            newest = max(self.of_engine.get(engine, -1) for engine in living)
            fit = [engine for engine in living if self.of_engine.get(engine, -1) == newest]
            taken = sorted(fit, key=self._router.load)[: min(count, max(1, len(living) - 1))]
            for engine in taken:
                self._router.set_aside(engine)
                self._router.reopen(engine)  # It may have been behind; for answers it is as good as any.
            return tuple(taken)

    async def put_back(self, engines: Sequence[int]) -> None:
        """End `set_aside`. Engines that are behind roll again once they have caught up, which this waits for.

        They catch up also where the caller is cancelled. One that refuses the version is marked dead.
        """
        for engine in engines:
            if engine in self._behind:
                self._router.close(engine)
            self._router.put_back(engine)
        self._advance()
        tasks = [asyncio.ensure_future(self._catch_up(engine)) for engine in engines if engine in self._staged]
        self._catching_up |= set(tasks)
        for task in tasks:
            task.add_done_callback(self._catching_up.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _catch_up(self, engine: int) -> None:
        async with self._updating[engine]:
            if engine not in self._staged:
                return
            try:
                await self._switch(engine, *self._staged.pop(engine))
            except RunError as refusal:
                self._engines.mark_dead(engine, refusal)

    async def _switch(self, engine: int, version: int, digest: str) -> dict[int, Any]:
        answer = await self._engines.tell(engine, "finish_update", version, digest)
        self.of_engine |= dict.fromkeys(answer, version)
        self._behind.discard(engine)
        self._reopen(engine)
        return answer

    def _reopen(self, *engines: int) -> None:
        for engine in engines:
            self._router.reopen(engine)
        self._advance()


def _lane(engine: int) -> str:
    return f"engine {engine}"


class NoEngineLeft(RunError):
    """Every engine is dead, so nothing can be generated any more."""


class NoneSetAside(RunError):
    """Of the engines that were set aside none lives, while others do: what was to be asked of them cannot be."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """The keys of an engine that died."""

    again: tuple[str, ...]
    """To be assigned once more, in the order in which they were assigned."""
    lost: Mapping[str, str]
    """Those that had lost an engine before, and why they are given up."""


@dataclass(frozen=True, slots=True)
class _Held:
    engine: int
    size: int


class Router:
    """Deals keys to `engines` engines, each with room for `slots` episodes; no limit by default. Pure.

    A key stands for one group; its size is how many episodes it has, and an engine's load is the sum of the sizes of its
    keys. A group stays with one engine, which holds the prefix that its episodes share. Engines that are set aside take the
    keys that are meant for them, and no others.

    Invariants:
    - A key is on one engine at most, which lives.
    - An engine is given a key only if no other that takes such keys has a smaller load (ties: lowest number),
      and only up to `slots` episodes, unless the one key is larger than that by itself.
    - A key outlives one engine and no more: the second death that it sees ends it.
    """

    def __init__(self, engines: int, slots: int | None = None) -> None:
        if engines < 1 or (slots is not None and slots < 1):
            raise ValueError(f"A router needs at least one engine and one slot, not {engines} and {slots}.")
        self._slots = slots
        self._loads = dict.fromkeys(range(engines), 0)
        """Of the living engines alone."""
        self._closed: set[int] = set()
        self._aside: set[int] = set()
        self._held: dict[str, _Held] = {}
        self._died_under: dict[str, int] = {}
        """Keys that have lost an engine -> that engine."""

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that have not died, in order."""
        return tuple(self._loads)

    @property
    def aside(self) -> frozenset[int]:
        """Those of the `living` that are set aside."""
        return frozenset(self._aside & self._loads.keys())

    def load(self, engine: int) -> int:
        """Episodes under way on `engine`; 0 for a dead one."""
        return self._loads.get(engine, 0)

    def assign(self, key: str, size: int = 1, aside: bool = False) -> int | None:
        """The engine of `key`, which keeps it until it is released or its engine dies.

        It is one of those set `aside`, or one of the others. None if all of these are closed or full, or if all
        are set aside and another is meant: ask again after a `release`, `died`, `reopen` or `put_back`.
        Raises NoEngineLeft if none lives, NoneSetAside if none that is set aside does and one is meant.
        """
        if key in self._held:
            return self._held[key].engine
        if not self._loads:
            raise NoEngineLeft("every rollout engine has died.")
        if aside and not self.aside:
            raise NoneSetAside("every rollout engine that was set aside has died.")
        takers = (one for one in self._loads if one not in self._closed and (one in self._aside) is aside)
        engine = min(takers, key=self.load, default=None)
        if engine is None or not self._has_room(engine, size):
            return None
        self._held[key] = _Held(engine, size)
        self._loads[engine] += size
        return engine

    def release(self, key: str) -> None:
        """Forget `key`: it has ended, in whatever way. Harmless for a key that is not known."""
        self._died_under.pop(key, None)
        held = self._held.pop(key, None)
        if held is not None:
            self._loads[held.engine] -= held.size

    def close(self, engine: int) -> None:
        """Give `engine` no new key until `reopen`; those that it has go on."""
        self._closed.add(engine)

    def reopen(self, engine: int) -> None:
        """Let `engine` have keys again, if it lives."""
        self._closed.discard(engine)

    def set_aside(self, engine: int) -> None:
        """Give `engine` only keys that are meant for engines set aside, until `put_back`; those that it has go on."""
        self._aside.add(engine)

    def put_back(self, engine: int) -> None:
        """End `set_aside`."""
        self._aside.discard(engine)

    def died(self, engine: int) -> Orphans:
        """Strike `engine` off; its keys are on no engine any more. Nobody's for an engine that was dead."""
        if self._loads.pop(engine, None) is None:
            return Orphans((), {})
        again: list[str] = []
        lost: dict[str, str] = {}
        for key in [key for key, held in self._held.items() if held.engine == engine]:
            del self._held[key]
            if key in self._died_under:
                first = self._died_under.pop(key)
                lost[key] = f"engines {first} and {engine} both died under it"
            else:
                self._died_under[key] = engine
                again.append(key)
        return Orphans(tuple(again), lost)

    def _has_room(self, engine: int, size: int) -> bool:
        load = self._loads[engine]
        return self._slots is None or load == 0 or load + size <= self._slots
