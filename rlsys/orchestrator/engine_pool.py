"""Presents the rollout engines as one generator: assigns prompt groups, retries after engine deaths, switches versions.

All episodes of a prompt group run on one engine and share its prefix cache. A new group goes to the engine with the
fewest episodes in flight; the group queues while no engine has room or all are switching weights.

    run_group --queue--> engine --> trajectories
                         engine dies                 retry from the head of the queue; a second death raises GroupLost
                         engine lives, but is late   GroupLost

Contract:
- `run_group` returns the whole group or raises: `GroupLost` if only this group fails, another RunError if the run
  cannot continue. It makes at most two attempts. Each lasts at most the episode time-out (once per round of episodes)
  plus `MARGIN_S`, a ping and an abort.
- An engine is dead once its process has died or a ping times out. It is killed, dropped from the pool and never called
  again; pending calls to it fail at once. Each of its groups is retried once on another engine, from the progress
  passed to `run_group`. The run continues while one engine lives.
- A request whose search no server has answered is run again once a server answers; so is one with an aborted episode, if
  the server did not answer meanwhile. If a search fails twice although the server answers others, it raises GroupLost.
- When a cancelled `run_group` ends, its engine has ended the group, or has had `ABORT_TIMEOUT_S` to do so.

Engines set aside serve an evaluation while the others roll out. Every engine stages each new version as it arrives. A
switch skips engines set aside: they keep their version until they are put back, and then switch before they get
rollouts.
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

from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup, together
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError
from rlsys.observe.metrics import Metric
from rlsys.observe.spans import Arg, Span, Tracer, episode_spans
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, LostReason
from rlsys.orchestrator.search_server import SearchOutages
from rlsys.rollout.agent.episode import EngineActivity, EngineDied, common_wait
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.search.retrieval import SearchFailed

ENGINE_METRICS = (
    Metric("rollout/engines", "count", "living engines"),
    Metric(
        "rollout/requeued_groups",
        "groups",
        "groups run again after the [death of an engine](troubleshooting.md#an-engine-died)",
    ),
    Metric(
        "rollout/lost_groups",
        "groups",
        "groups given up for now; the prompt is tried again, at most twice (`MAX_LOSSES` is 3)",
    ),
    Metric("rollout/timed_out_groups", "groups", "lost groups that a living engine did not finish in time"),
    Metric("engine/<engine>/tokens_per_s", "tokens/s", "tokens of one engine per second in which it generates"),
    Metric("engine/<engine>/cached_fraction", "share", "tokens sent to one engine that were in its prefix cache"),
    Metric("engine/<engine>/<name>_s", "s", "times of one engine"),
    Metric("engine/<engine>/<name>", "", "counts of one engine and its search client"),
)
MARGIN_S = 30.0
"""Extra time beyond the episode time-out, for aborts, transfer, and a pause to switch weights."""
ABORT_TIMEOUT_S = 10.0
"""Time-out for ending the episodes of a group."""
IN_FLIGHT_TIMEOUT_S = 30.0
"""Time-out for returning the progress of episodes."""
ACTIVITY_TIMEOUT_S = 5.0
"""Time-out for reporting the activity, which is for display only."""
PING_TIMEOUT_S = 30.0
"""Time-out of a ping after a call has timed out; an engine that does not answer it is dead."""

SEARCH_TRIES = 2
"""Tries of a group that may end with a failed search although the search server answers others."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    """Counts of groups since the start."""

    requeued: int = 0
    """Groups retried because their engine died."""
    lost: int = 0
    """Groups given up (`GroupLost`)."""
    timed_out: int = 0
    """Lost groups that a live engine did not return in time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Request for episodes of one question on one engine."""

    key: str
    uid: str
    episodes: int
    method: str
    """Method of the worker."""
    args: tuple[Any, ...]
    aside: bool
    """True if only engines set aside may take the request, False if only the other engines may."""
    prompt_group: int | None = None
    """Number of the scheduler's prompt group; None for an evaluation."""
    progress: tuple[EpisodeProgress, ...] = ()
    """Partial episodes from which the group resumes."""


@dataclass(frozen=True, slots=True)
class ReservedEngines:
    """Engines set aside by `EnginePool.reserve`."""

    capacity: int
    """Number of answers that these engines can generate at a time."""
    version: int | None
    """Weight version with which these engines answer; None before the first update."""
    _pool: EnginePool

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0) -> Trajectory:
        """Generate as `EnginePool.answer` does. Raises NoneSetAside if all these engines are dead but others live."""
        return await self._pool.answer(question, sample, temperature, aside=True)


class EnginePool:
    """All engines of a run. Bound to the event loop that creates it."""

    def __init__(
        self,
        workers: WorkerGroup,
        config: RunConfig,
        tracer: Tracer,
        episodes: list[Span],
        outages: SearchOutages | None = None,
    ) -> None:
        """`episodes` collects the generation and search spans of finished groups."""
        self.workers = workers
        self.step = 0
        self.waits_for = ""
        """Tools that all episodes waited for at the last refresh; empty if any episode generated, or if unknown."""
        self._samples = config.algorithm.n_samples
        self._slots = config.rollout.max_episodes
        self._episode_timeout_s = config.rollout.episode_timeout_s
        self._tracer, self._episodes, self._outages = tracer, episodes, outages
        self._lost: dict[str, str] = {}
        """Keys of groups that have lost two engines -> reason, for the error message."""
        self._router = Router(len(workers.ranks), self._slots)
        self._engines = EngineCalls(workers, self._router, self._on_engine_death)
        self._versions = VersionSwitch(self._engines, self._router, self._advance)
        self._reserving = asyncio.Lock()
        """Held while engines are set aside, or kept together by `undivided`."""
        self.capacity_grew: Callable[[], None] = lambda: None
        """Called when engines that were set aside take rollouts again."""
        self._queues: dict[bool, deque[tuple[_Request, asyncio.Future[int]]]] = {False: deque(), True: deque()}
        """Queued requests by `_Request.aside`."""
        self._rolling: dict[str, _Request] = {}
        """Rollout groups that have not returned yet, by key."""
        self._serial = itertools.count()
        self._counts = _Counts()

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks of the engines not known to be dead."""
        return self._router.living

    @property
    def deaths(self) -> Sequence[asyncio.Future[str]]:
        """One future per engine, done once the engine is dead."""
        return self._engines.dead

    @property
    def capacity(self) -> int:
        """Number of groups that living engines can generate at a time, not counting engines set aside."""
        return max(1, self._slots // self._samples) * (len(self.living) - len(self._router.aside))

    async def run_group(
        self, question: Question, prompt_group: int, progress: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """Sample `algorithm.n_samples` episodes of `question`, resuming the partial episodes in `progress`.

        `prompt_group` is the group's number in `in_flight`. Raises GroupLost if only this group fails.
        """
        key = self._key(question)
        # A resumed run may have a lower `n_samples`.
        kept = tuple(episode for episode in progress if episode.sample < self._samples)
        args = (question, self._samples, key, kept)
        request = _Request(key, question.uid, self._samples, "run_group", args, False, prompt_group, kept)
        self._rolling[key] = request
        try:
            trajectories: list[Trajectory] = await self._run_searching(request)
            return trajectories
        finally:
            del self._rolling[key]

    async def answer(
        self, question: Question, sample: int = 0, temperature: float = 0.0, *, aside: bool = False
    ) -> Trajectory:
        """Generate one episode of `question` as sample number `sample`; temperature 0 is greedy.

        With `compat.sampled_validation` the episode is sampled as in training. `aside` selects the engines set aside.
        Raises GroupLost as `run_group` does.
        """
        key = self._key(question)
        request = _Request(key, question.uid, 1, "answer", (question, sample, temperature, key), aside)
        trajectory: Trajectory = await self._run_searching(request)
        return trajectory

    async def in_flight(self) -> dict[int, tuple[EpisodeProgress, ...]]:
        """Return prompt group number -> progress of each unfinished rollout group that has made progress.

        A group that is queued, or whose engine does not answer in time, has the progress passed to `run_group`.
        """
        keys = list(self._rolling)
        answers = await asyncio.gather(*(self._progress_on(engine, keys) for engine in self.living))
        by_key = {key: progress for answer in answers for key, progress in answer.items()}
        groups = {group.prompt_group: by_key.get(key, group.progress) for key, group in self._rolling.items()}
        return {number: progress for number, progress in groups.items() if number is not None and progress}

    async def refresh_activity(self) -> None:
        """Update `waits_for` from the activity of the engines; it becomes empty if an engine does not answer."""
        rolling = [engine for engine in self.living if engine not in self._router.aside]
        answers = await asyncio.gather(*(self._activity_of(engine) for engine in rolling))
        known = [activity for activity in answers if activity]
        self.waits_for = common_wait(known) if len(known) == len(answers) else ""

    @asynccontextmanager
    async def reserve(self, engines: int) -> AsyncIterator[ReservedEngines]:
        """Set up to `engines` engines aside for `ReservedEngines.answer` while the others roll out.

        One caller at a time. Groups that are already on these engines finish there. If more than one engine lives, at
        least one is left for rollouts. Rollouts wait while every living engine is set aside. Weight switches skip the
        engines set aside. On exit, these engines switch to their staged version. The caller blocks until they have
        switched, unless it is cancelled.
        """
        async with self._reserving:
            taken = await self._versions.set_aside(engines)
            try:
                yield ReservedEngines(self._slots * len(taken), self._versions.of_engine.get(taken[0]), self)
            finally:
                try:
                    await self._versions.put_back(taken)
                finally:
                    self.capacity_grew()

    @asynccontextmanager
    async def undivided(self) -> AsyncIterator[None]:
        """Wait until no engine is set aside, and set none aside during the body."""
        async with self._reserving:
            yield

    async def metrics(self) -> dict[str, float]:
        """Return the pool's counts since the start, and the metrics of each living engine as `engine/N/NAME`."""
        answers = await self._engines.call_all("metrics")
        by_engine = {
            f"engine/{engine}/{name}": value for engine, figures in answers.items() for name, value in figures.items()
        }
        return by_engine | {
            "rollout/engines": len(self.living),
            "rollout/requeued_groups": self._counts.requeued,
            "rollout/lost_groups": self._counts.lost,
            "rollout/timed_out_groups": self._counts.timed_out,
        }

    async def open_transport(self, specs: Mapping[int, Any]) -> None:
        """Open the transport on each engine in `specs`, unless it has died since."""
        await self._engines.run_on_all(lambda engine: self._engines.try_call(engine, "open_transport", specs[engine]))

    async def begin_update(self, version: int) -> None:
        """Prepare all engines to receive `version`; they keep generating."""
        await self._versions.begin_update(version)

    async def load_bucket(self, bucket: Any) -> None:
        """Stage one bucket on every engine; they keep generating."""
        await self._engines.call_all("load_bucket", bucket)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch every engine not set aside to `version`; each gets new groups again as soon as it has switched.

        `digest` is the digest that the sender computed over all tensors. Raises RunError if the staged tensors of an
        engine do not match it.
        """
        await self._versions.finish_update(version, digest)

    async def settle(self) -> None:
        """Wait until every engine has ended its groups and switches, which another driver or pool may have begun."""
        await self._engines.call_all("settle")

    async def offload(self) -> None:
        """Release every engine's device memory; nothing may be in flight."""
        await self._engines.call_all("sleep")

    async def restore(self) -> None:
        """Allocate every engine's device memory again."""
        await self._engines.call_all("wake")

    async def stop(self, timeout_s: float) -> None:
        """Ask every living engine to stop. One that dies or is late is only logged; its process is killed anyway."""

        async def stop_one(engine: int) -> None:
            try:
                await self._engines.call(engine, "stop", timeout_s=timeout_s, ping=False)
            except (RankDied, EngineDied, RankSilent) as problem:
                _log.warning("rollout engine %d did not stop by itself: %s", engine, str(problem).partition("\n")[0])

        await asyncio.gather(*map(stop_one, self.living))

    async def _run_searching(self, request: _Request) -> Any:
        """Run the request, again if the search server did not answer meanwhile; see the module's contract."""
        outages, unexplained = self._outages, 0
        while outages is not None:
            await outages.available()
            before = outages.count
            try:
                answer = await self._run(request)
            except SearchFailed as failure:
                unexplained += not await outages.failed(str(failure))
                if unexplained == SEARCH_TRIES:
                    raise self._give_up(request.uid, LostReason.search_failed, str(failure).rstrip(".")) from failure
                continue
            if _has_aborted(answer):
                await outages.check()  # The time of an episode may have run out while it waited for the server.
                if outages.count > before:
                    continue
            return answer
        return await self._run(request)

    async def _run(self, request: _Request) -> Any:
        """Queue the request, run it and return the worker's result, retrying once; see the module's contract."""
        limit_s = self._episode_timeout_s * ceil(request.episodes / self._slots) + MARGIN_S
        attempt = 1
        try:
            while True:
                engine = await self._wait_for_engine(request, retry=attempt > 1)
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
                    raise self._give_up(request.uid, LostReason.timeout, detail) from silence
                else:
                    return answer
                if request.key in self._lost and self.living:
                    raise self._give_up(request.uid, LostReason.engine_died, self._lost[request.key])
                attempt += 1
        finally:
            self._lost.pop(request.key, None)
            self._router.release(request.key)
            self._advance()

    def _give_up(self, uid: str, reason: LostReason, detail: str) -> GroupLost:
        """Count a lost group, log it and return the error to raise."""
        self._counts.lost += 1
        self._counts.timed_out += reason is LostReason.timeout
        loss = GroupLost(uid, reason, detail)
        _log.warning("%s", loss)
        return loss

    async def _abort(self, engine: int, key: str) -> None:
        """End a group's episodes on its engine. Best effort: a later call will detect a broken engine."""
        with contextlib.suppress(RunError):
            await self._engines.call(engine, "abort_group", key, timeout_s=ABORT_TIMEOUT_S, ping=False)

    async def _progress_on(self, engine: int, keys: Sequence[str]) -> Mapping[str, tuple[EpisodeProgress, ...]]:
        """Return key -> progress of the groups in `keys` that `engine` runs; empty if it does not answer."""
        try:
            progress: dict[str, tuple[EpisodeProgress, ...]] = await self._engines.call(
                engine, "in_flight", keys, timeout_s=IN_FLIGHT_TIMEOUT_S, ping=False
            )
        except (RankDied, EngineDied, RankSilent):
            return {}
        return progress

    async def _activity_of(self, engine: int) -> EngineActivity | None:
        """Return the activity of `engine`; None if the call fails."""
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

    async def _wait_for_engine(self, request: _Request, retry: bool) -> int:
        """Queue the request until an engine has room; return the engine. A `retry` goes to the head of the queue."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue = self._queues[request.aside]
        if retry:
            queue.appendleft((request, turn))
        else:
            queue.append((request, turn))
        self._advance()
        return await turn

    def _on_engine_death(self, lost: Mapping[str, str]) -> None:
        """Record the lost groups of a dead engine. If no engine is left, queued requests fail in `_advance`."""
        self._lost |= lost
        self._advance()

    def _advance(self) -> None:
        """Assign engines to queued requests, in order, until the head of each queue must wait."""
        for queue in self._queues.values():
            while queue and self._assign(*queue[0]):
                queue.popleft()

    def _assign(self, request: _Request, turn: asyncio.Future[int]) -> bool:
        """Resolve the head of the queue with an engine or an error; return False if it must wait."""
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
    """Calls engines and detects dead ones. Bound to the event loop that creates it."""

    def __init__(self, workers: WorkerGroup, router: Router, on_death: Callable[[Mapping[str, str]], None]) -> None:
        """`on_death` is called after each engine death with the keys of lost groups -> reason."""
        self.workers = workers
        self.last_error = ""
        """Cause of the last engine death, and the tail of that engine's log."""
        self._router = router
        self._on_death = on_death
        loop = asyncio.get_running_loop()
        self.dead: tuple[asyncio.Future[str], ...] = tuple(loop.create_future() for _ in workers.ranks)
        """Futures by engine, resolved with the reason when the engine dies."""

    def mark_dead(self, engine: int, death: RunError) -> None:
        """Kill a dead engine and drop it from the pool; pending calls to it fail at once. Idempotent."""
        if engine not in self._router.living:
            return
        why = str(death).partition("\n")[0]
        self.last_error = f"{why}\n{self.workers.log_tail(engine)}"
        self.workers.kill_rank(engine)
        orphans = self._router.died(engine)
        _log.warning(
            "rollout engine %d is dead, %d live: %d of its prompt groups are run again, %d are dropped. %s",
            engine, len(self._router.living), len(orphans.retry), len(orphans.lost), why,
        )  # fmt: skip
        self.dead[engine].set_result(why)
        self._on_death(orphans.lost)

    async def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` on all living engines at once; return engine -> answer, for engines that survive the call."""
        return await self.run_on_all(lambda engine: self.try_call(engine, method, *args))

    async def run_on_all(
        self, do: Callable[[int], Coroutine[Any, Any, dict[int, Any]]], engines: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Run `do` concurrently for all living engines, or for `engines`, and merge the results.

        Raises errors as `together` does. Raises NoEngineLeft if no engine lives afterwards.
        """
        answers = await together(*map(do, self._router.living if engines is None else engines))
        if not self._router.living:
            raise NoEngineLeft(f"every rollout engine has died. The last one: {self.last_error}")
        return {engine: answer for by_engine in answers for engine, answer in by_engine.items()}

    async def try_call(self, engine: int, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """Return {engine: answer}, or {} if the engine died, which is no error while other engines live."""
        try:
            return {engine: await self.call(engine, method, *args, timeout_s=timeout_s)}
        except (RankDied, EngineDied) as death:
            self.mark_dead(engine, death)
            return {}

    async def call(self, engine: int, method: str, *args: Any, timeout_s: float | None, ping: bool = True) -> Any:
        """Return the engine's answer. Raises RankDied if it is dead, RankSilent if it lives but times out.

        With `ping`, a time-out triggers `ping`, so an unresponsive engine counts as dead.
        """
        try:
            return await self.workers.call_rank(engine, method, *args, timeout_s=timeout_s, until=self.dead[engine])
        except RankSilent as late:
            if ping:
                await self.ping(engine, late)
            raise

    async def ping(self, engine: int, late: RankSilent) -> None:
        """Call `metrics` on an engine after another call timed out (`late`). Raises RankDied if `metrics` does too."""
        try:
            await self.call(engine, "metrics", timeout_s=PING_TIMEOUT_S, ping=False)
        except RankSilent:
            raise RankDied(f"engine {engine} no longer responds: {late}", engine) from late


class VersionSwitch:
    """Tracks each engine's weight version, and sets engines aside from rollouts.

    Example with engines 0 and 1, both at version 3:

        set_aside(1)        picks engine 1, which has fewer episodes
        finish_update(4)    engine 0 switches to 4; engine 1 keeps 3 and is behind, with 4 staged
        put_back([1])       engine 1 switches to 4, then gets rollouts again

    Invariants:
    - All engines that are set aside have the same version, and keep it.
    - An engine that a switch skipped gets no rollouts before it has that version or a later one. On `put_back` it
      switches to its staged version; if a newer version is already being staged, it waits for that version.
    - An engine that is behind never blocks a caller for ever: it catches up, waits for a running switch, or dies.
    - Updates of one engine are serialised: the next begins after a running switch has ended.
    """

    def __init__(self, engines: EngineCalls, router: Router, advance: Callable[[], None]) -> None:
        """`advance` is called when engines can take groups again."""
        self.of_engine: dict[int, int] = {}
        """Engine -> its version; absent before its first update."""
        self._engines, self._router, self._advance = engines, router, advance
        self._switching = asyncio.Lock()
        """Held during a switch, and by `set_aside`, so that all engines set aside have the same version."""
        self._updating = [asyncio.Lock() for _ in engines.workers.ranks]
        """Lock of each engine, held while the engine begins an update or catches up."""
        self._staged: dict[int, tuple[int, str]] = {}
        """Engines that a switch skipped -> staged version and digest, until the next update begins."""
        self._outdated: set[int] = set()
        """Engines that a switch skipped and that have not switched since."""
        self._catching_up: set[asyncio.Task[None]] = set()

    async def begin_update(self, version: int) -> None:
        """Prepare all engines to receive `version`, discarding staged versions."""

        async def begin(engine: int) -> dict[int, Any]:
            async with self._updating[engine]:
                self._staged.pop(engine, None)
                return await self._engines.try_call(engine, "begin_update", version)

        await self._engines.run_on_all(begin)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch every engine not set aside; each gets groups again as soon as it has switched."""
        async with self._switching:
            aside = self._router.aside
            self._outdated |= aside
            self._staged |= dict.fromkeys(aside, (version, digest))
            switching = [engine for engine in self._router.living if engine not in aside]
            for engine in switching:
                self._router.close(engine)
            try:
                await self._engines.run_on_all(lambda engine: self._switch(engine, version, digest), switching)
            finally:
                self._reopen(*switching)

    async def set_aside(self, count: int) -> tuple[int, ...]:
        """Set aside up to `count` engines that have the newest version, and return them.

        Engines with the fewest episodes are chosen; these episodes continue. Blocks while a switch runs. Takes at least
        one engine, but leaves one for rollouts if more than one lives. Raises NoEngineLeft if none lives.
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
                self._router.reopen(engine)  # An engine that was behind is closed, but it may answer evaluations.
            return tuple(taken)

    async def put_back(self, engines: Sequence[int]) -> None:
        """Return `engines` to rollouts; block until each engine that has a staged version has switched to it.

        The engines switch even if the caller is cancelled. An engine that refuses the version is marked dead.
        """
        for engine in engines:
            if engine in self._outdated:
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
        answer = await self._engines.try_call(engine, "finish_update", version, digest)
        self.of_engine |= dict.fromkeys(answer, version)
        self._outdated.discard(engine)
        self._reopen(engine)
        return answer

    def _reopen(self, *engines: int) -> None:
        for engine in engines:
            self._router.reopen(engine)
        self._advance()


def _has_aborted(answer: Trajectory | Sequence[Trajectory]) -> bool:
    """Return True if an episode of a worker's answer was aborted."""
    episodes = [answer] if isinstance(answer, Trajectory) else answer
    return any(episode.finish is Finish.ABORTED for episode in episodes)


def _lane(engine: int) -> str:
    return f"engine {engine}"


class NoEngineLeft(RunError):
    """Every engine is dead; the run cannot continue."""


class NoneSetAside(RunError):
    """All engines set aside are dead while others live; requests for engines set aside fail."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Keys that were assigned to an engine that died."""

    retry: tuple[str, ...]
    """Keys to assign again, in their order of assignment."""
    lost: Mapping[str, str]
    """Key whose engine died for the second time -> reason, for the error message."""


@dataclass(frozen=True, slots=True)
class _Assignment:
    engine: int
    size: int


class Router:
    """Assigns keys to `engines` engines with room for `slots` episodes each. Pure.

    Without `slots` there is no limit. A key stands for one group and its size is the group's number of episodes. An
    engine's load is the sum of the sizes of its keys. Engines set aside take only keys meant for them.

    Example with 2 engines and 8 slots:

        assign("a", 5) -> 0     both are empty: lowest number
        assign("b", 5) -> 1     smallest load
        assign("c", 5) -> None  neither has room: retry after `release`
        died(1)                 retry=("b",); if the next engine of "b" dies too, "b" is lost

    Invariants:
    - A key is on at most one engine, which lives.
    - A key goes to the engine with the smallest load among those that may take it; ties go to the lowest number.
    - A load exceeds `slots` only if a single key is larger than `slots`.
    - A key is retried after the death of its first engine, and lost after the death of its second engine.
    """

    def __init__(self, engines: int, slots: int | None = None) -> None:
        if engines < 1 or (slots is not None and slots < 1):
            raise ValueError(f"A router needs at least one engine and one slot, not {engines} and {slots}.")
        self._slots = slots
        self._loads = dict.fromkeys(range(engines), 0)
        """Load of each living engine."""
        self._closed: set[int] = set()
        self._aside: set[int] = set()
        self._assignments: dict[str, _Assignment] = {}
        self._died_under: dict[str, int] = {}
        """Keys that have lost one engine -> the engine that died."""

    @property
    def living(self) -> tuple[int, ...]:
        """Living engines, in order."""
        return tuple(self._loads)

    @property
    def aside(self) -> frozenset[int]:
        """Living engines that are set aside."""
        return frozenset(self._aside & self._loads.keys())

    def load(self, engine: int) -> int:
        """Number of episodes assigned to `engine`; 0 if it is dead."""
        return self._loads.get(engine, 0)

    def assign(self, key: str, size: int = 1, aside: bool = False) -> int | None:
        """Assign `key` to an engine until `release` or the engine's death, and return the engine.

        A repeated call returns the same engine. With `aside`, only engines set aside may take the key, otherwise only
        the other engines. Returns None if all engines that may take the key are closed or full: retry after `release`,
        `died`, `reopen` or `put_back`. Raises NoEngineLeft if no engine lives, and NoneSetAside if `aside` is True and
        no engine set aside lives.
        """
        if key in self._assignments:
            return self._assignments[key].engine
        if not self._loads:
            raise NoEngineLeft("every rollout engine has died.")
        if aside and not self.aside:
            raise NoneSetAside("every rollout engine that was reserved for evaluation has died.")
        takers = (one for one in self._loads if one not in self._closed and (one in self._aside) is aside)
        engine = min(takers, key=self.load, default=None)
        if engine is None or not self._has_room(engine, size):
            return None
        self._assignments[key] = _Assignment(engine, size)
        self._loads[engine] += size
        return engine

    def release(self, key: str) -> None:
        """Forget `key` after its group has ended. No-op for an unknown key."""
        self._died_under.pop(key, None)
        held = self._assignments.pop(key, None)
        if held is not None:
            self._loads[held.engine] -= held.size

    def close(self, engine: int) -> None:
        """Assign no new key to `engine` until `reopen`; it keeps the keys it has."""
        self._closed.add(engine)

    def reopen(self, engine: int) -> None:
        """Undo `close`; no-op for a dead engine."""
        self._closed.discard(engine)

    def set_aside(self, engine: int) -> None:
        """Assign only `aside` keys to `engine` until `put_back`; it keeps the keys it has."""
        self._aside.add(engine)

    def put_back(self, engine: int) -> None:
        """Undo `set_aside`."""
        self._aside.discard(engine)

    def died(self, engine: int) -> Orphans:
        """Remove a dead `engine`, unassign its keys and return them. Returns no keys if it was already removed."""
        if self._loads.pop(engine, None) is None:
            return Orphans((), {})
        retry: list[str] = []
        lost: dict[str, str] = {}
        for key in [key for key, held in self._assignments.items() if held.engine == engine]:
            del self._assignments[key]
            if key in self._died_under:
                first = self._died_under.pop(key)
                lost[key] = f"engines {first} and {engine} both died while generating it"
            else:
                self._died_under[key] = engine
                retry.append(key)
        return Orphans(tuple(retry), lost)

    def _has_room(self, engine: int, size: int) -> bool:
        load = self._loads[engine]
        return self._slots is None or load == 0 or load + size <= self._slots
