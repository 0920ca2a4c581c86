"""Presents the rollout engines as one generator: assigns prompt groups, retries after engine deaths, switches versions.

All episodes of a prompt group run on one engine and share its prefix cache. A new group goes to the engine with the
fewest episodes in flight; the group queues while no engine has room or all are switching weights.

    run_group --queue--> engine --> trajectories
                         engine dies                 retry from the head of the queue; a second death raises GroupLost
                         engine lives, but is late   GroupLost

Contract:
- `run_group` returns the whole group or raises: `GroupLost` if only this group fails, another RunError if the run
  cannot continue. It makes at most two attempts. Each lasts at most the episode time-out (once per round of episodes)
  plus `MARGIN_S`, a ping, the stacks of an engine that does not answer it, and an abort.
- An engine is dead once its process has died, a ping times out, it is late for a part of an update or the supervisor
  finds it hung. It is killed and removed; pending calls to it fail at once. Each of its groups is retried once, on another engine or the next life of
  this one, from the progress passed to `run_group`. Requests wait while no engine lives but one is started again.
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
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup, together
from rlsys.config.derived import concurrent_episodes
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.observe.faults import FaultKind
from rlsys.observe.metrics import Metric
from rlsys.observe.spans import Arg, Span, Tracer, episode_spans
from rlsys.orchestrator.membership import Member, Members, NoEngineLeft, NoneSetAside, Router
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
        "groups given up; the prompt is tried again, after three losses (`MAX_LOSSES`) only once in each later epoch",
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
"""Time-out for reporting the activity."""
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
        members: Members | None = None,
    ) -> None:
        """`episodes` collects the generation and search spans of finished groups. `members` are those of a run that goes
        back; by default, all engines are new."""
        self.workers = workers
        self.step = 0
        self.waits_for = ""
        """Tools that all episodes waited for at the last refresh; empty if any episode generated, or if unknown."""
        self._samples = config.algorithm.n_samples
        self._slots = concurrent_episodes(config.task, config.rollout)
        self._episode_timeout_s = config.rollout.episode_timeout_s
        self._stall_timeout_s = config.rollout.engine.stall_timeout_s
        self._tracer, self._episodes, self._outages = tracer, episodes, outages
        self._lost: dict[str, str] = {}
        """Keys of groups that have lost two engines -> reason, for the error message."""
        self.engines = EngineCalls(workers, members or Members.first(len(workers.ranks)))
        self._router = Router(self.engines.members, self._slots)
        self._versions = VersionSwitch(self.engines, self._router.load)
        self.engines.subscribe(self._on_change)
        self._reserving = asyncio.Lock()
        """Held while engines are set aside, or kept together by `undivided`."""
        self._queues: dict[bool, deque[tuple[_Request, asyncio.Future[Member]]]] = {False: deque(), True: deque()}
        """Queued requests by `_Request.aside`."""
        self._rolling: dict[str, _Request] = {}
        """Rollout groups that have not returned yet, by key."""
        self._serial = itertools.count()
        self._counts = _Counts()

    @property
    def living(self) -> Mapping[int, asyncio.Future[str]]:
        """Rank of each living engine -> future that is done once it is gone."""
        return {one.engine: self.engines.gone(one) for one in self.engines.members.living}

    @property
    def capacity(self) -> int:
        """Number of groups that living engines can generate at a time, not counting engines set aside.

        A leaving engine counts with the groups that it still has.
        """
        members = self.engines.members
        ending = sum(self._router.keys(one) for one in members.leaving if not one.aside)
        return max(1, self._slots // self._samples) * len(members.rolling) + ending

    @property
    def answers(self) -> int:
        """Number of answers that all engines can generate at a time, also those that are started again; at least 1.

        Without those that leave.
        """
        members = self.engines.members
        return self._slots * max(1, len(members.of_engine) - len(members.leaving))

    def groups_on(self, one: Member) -> int:
        """Return the number of groups and answers that a member generates now."""
        return self._router.keys(one)

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
        answers = await asyncio.gather(*(self._progress_on(one, keys) for one in self.engines.members.living))
        by_key = {key: progress for answer in answers for key, progress in answer.items()}
        groups = {group.prompt_group: by_key.get(key, group.progress) for key, group in self._rolling.items()}
        return {number: progress for number, progress in groups.items() if number is not None and progress}

    async def activity(self) -> dict[Member, EngineActivity | None]:
        """Return the activity of each engine that is up, None if it does not answer, and update `waits_for`."""
        up = self.engines.members.up
        found = dict(zip(up, await asyncio.gather(*map(self._activity_of, up)), strict=True))
        rolling = [activity for one, activity in found.items() if one.lives and not one.aside]
        known = [activity for activity in rolling if activity]
        self.waits_for = common_wait(known) if len(known) == len(rolling) else ""
        return found

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
                yield ReservedEngines(self._slots * len(taken), taken[0].version, self)
            finally:
                await self._versions.put_back(taken)

    @asynccontextmanager
    async def undivided(self) -> AsyncIterator[None]:
        """Wait until no engine is set aside, and set none aside during the body."""
        async with self._reserving:
            yield

    async def metrics(self) -> dict[str, float]:
        """Return the pool's counts since the start, and the metrics of each living engine as `engine/N/NAME`."""
        answers = await self.engines.call_all("metrics")
        by_engine = {
            f"engine/{engine}/{name}": value for engine, figures in answers.items() for name, value in figures.items()
        }
        return by_engine | {
            "rollout/engines": len(self.engines.members.living),
            "rollout/requeued_groups": self._counts.requeued,
            "rollout/lost_groups": self._counts.lost,
            "rollout/timed_out_groups": self._counts.timed_out,
        }

    async def open_transport(self, specs: Mapping[int, Any]) -> None:
        """Open the transport on each engine in `specs`, unless it has died since."""
        members = [one for one in self.engines.members.living if one.engine in specs]
        await self.engines.run_on(members, lambda one: self.engines.try_call(one, "open_transport", specs[one.engine]))

    async def begin_update(self, version: int) -> None:
        """Prepare all engines to receive `version`; they keep generating."""
        await self._versions.begin_update(version)

    async def load_bucket(self, bucket: Any) -> None:
        """Stage one bucket on every engine; they keep generating."""
        await self.engines.call_all("load_bucket", bucket)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch every engine not set aside to `version`; each gets new groups again as soon as it has switched.

        `digest` is the digest that the sender computed over all tensors. Raises RunError if the staged tensors of an
        engine do not match it.
        """
        await self._versions.finish_update(version, digest)

    async def settle(self) -> None:
        """Wait until every engine has ended its groups and switches, which another driver or pool may have begun.

        An engine that makes no progress meanwhile has hung: the supervisor does not watch it now.
        """
        await self.engines.call_all("settle", timeout_s=self._stall_timeout_s)

    async def offload(self) -> None:
        """Release every engine's device memory; nothing may be in flight."""
        await self.engines.call_all("sleep")

    async def restore(self) -> None:
        """Allocate every engine's device memory again."""
        await self.engines.call_all("wake")

    async def stop(self, timeout_s: float) -> None:
        """Ask every engine that is up to stop. One that dies, is late or fails is only logged; it is killed anyway."""

        async def stop_one(one: Member) -> None:
            try:
                await self.engines.call(one, "stop", timeout_s=timeout_s, ping=False)
            except (RunError, UserError) as problem:
                _log.warning(
                    "rollout engine %d did not stop by itself: %s", one.engine, str(problem).partition("\n")[0]
                )

        await asyncio.gather(*map(stop_one, self.engines.members.up))

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
                one = await self._wait_for_engine(request, retry=attempt > 1)
                self._counts.requeued += attempt > 1
                began_ns = self._tracer.now()
                try:
                    with self._span(one, request, attempt):
                        answer = await self.engines.call(one, request.method, *request.args, timeout_s=limit_s)
                    if request.prompt_group is not None:
                        whole = (began_ns, self._tracer.now())
                        self._episodes += episode_spans(whole, _lane(one.engine), {"question": request.uid}, answer)
                except (RankDied, EngineDied) as death:
                    self.engines.lost(one, death)
                except asyncio.CancelledError:
                    await self._abort(one, request.key)
                    raise
                except RankSilent as silence:
                    await self._abort(one, request.key)
                    detail = f"engine {one.engine} did not return it within {limit_s:.0f} s"
                    raise self._give_up(request.uid, LostReason.timeout, detail) from silence
                else:
                    return answer
                if request.key in self._lost and self.engines.members.of_engine:
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

    async def _abort(self, one: Member, key: str) -> None:
        """End a group's episodes on its engine. Best effort: a later call will detect a broken engine."""
        with contextlib.suppress(RunError):
            await self.engines.call(one, "abort_group", key, timeout_s=ABORT_TIMEOUT_S, ping=False)

    async def _progress_on(self, one: Member, keys: Sequence[str]) -> Mapping[str, tuple[EpisodeProgress, ...]]:
        """Return key -> progress of the groups in `keys` that an engine runs; empty if it does not answer."""
        try:
            progress: dict[str, tuple[EpisodeProgress, ...]] = await self.engines.call(
                one, "in_flight", keys, timeout_s=IN_FLIGHT_TIMEOUT_S, ping=False
            )
        except (RankDied, EngineDied, RankSilent):
            return {}
        return progress

    async def _activity_of(self, one: Member) -> EngineActivity | None:
        """Return the activity of an engine; None if the call fails."""
        try:
            activity: EngineActivity = await self.engines.call(
                one, "activity", timeout_s=ACTIVITY_TIMEOUT_S, ping=False
            )
        except RunError:
            return None
        return activity

    def _key(self, question: Question) -> str:
        return f"{question.uid}~{next(self._serial)}"

    def _span(self, one: Member, request: _Request, attempt: int) -> AbstractContextManager[dict[str, Arg]]:
        facts: dict[str, Arg] = {"step": self.step, "question": request.uid}
        if one.version is not None:
            facts["version"] = one.version
        if attempt > 1:
            facts["attempt"] = attempt
        name = "eval.episode" if request.prompt_group is None else "rollout.group"
        return self._tracer.span(name, lane=_lane(one.engine), **facts)

    async def _wait_for_engine(self, request: _Request, retry: bool) -> Member:
        """Queue the request until an engine has room; return it. A `retry` goes to the head of the queue."""
        turn: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        queue = self._queues[request.aside]
        if retry:
            queue.appendleft((request, turn))
        else:
            queue.append((request, turn))
        self._advance()
        return await turn

    def _on_change(self, members: Members) -> None:
        """Record the lost groups of removed members. If none is left, queued requests fail in `_advance`."""
        self._lost |= self._router.update(members).lost
        self._advance()

    def _advance(self) -> None:
        """Assign engines to queued requests, in order, until the head of each queue must wait."""
        for queue in self._queues.values():
            while queue and self._assign(*queue[0]):
                queue.popleft()

    def _assign(self, request: _Request, turn: asyncio.Future[Member]) -> bool:
        """Resolve the head of the queue with an engine or an error; return False if it must wait."""
        if turn.cancelled():
            return True
        try:
            one = self._router.assign(request.key, request.episodes, request.aside)
        except (NoEngineLeft, NoneSetAside) as end:
            turn.set_exception(type(end)(f"{end} The last one: {self.engines.last_error}"))
            return True
        if one is not None:
            turn.set_result(one)
        return one is not None


class EngineCalls:
    """Calls engines, and keeps the members. Bound to the event loop that creates it."""

    def __init__(self, workers: WorkerGroup, members: Members) -> None:
        self.workers, self.members = workers, members
        self.last_error = ""
        """Cause of the last engine death, and the tail of that engine's log."""
        self.on_loss: Callable[[Member, FaultKind, str], bool] = lambda *_: False
        """Called when a member has died or hung, with the reason; returns True if its engine will be started again."""
        self._listeners: list[Callable[[Members], None]] = []
        loop = asyncio.get_running_loop()
        self._gone = {one.life: loop.create_future() for one in members.of_engine.values()}

    def subscribe(self, listener: Callable[[Members], None]) -> Callable[[], None]:
        """Call `listener` with each new snapshot of the members, until the returned function is called."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def change(self, members: Members) -> None:
        """Continue with the snapshot `members`."""
        for one in members.of_engine.values():
            if one.life not in self._gone:
                self._gone[one.life] = asyncio.get_running_loop().create_future()
        self.members = members
        for listener in tuple(self._listeners):
            listener(members)

    def gone(self, one: Member) -> asyncio.Future[str]:
        """Return the future that is done, with the reason, once a member has been removed."""
        return self._gone[one.life]

    def remove(self, one: Member, why: str, returns: bool = False) -> None:
        """Kill a member and remove it; pending calls to it fail at once."""
        self.workers.kill_rank(one.engine)
        self.gone(one).set_result(why)
        self.change(self.members.remove(one, returns))

    def lost(self, one: Member, death: Exception, kind: FaultKind = FaultKind.died) -> None:
        """Remove a member that has died or hung. Idempotent."""
        if not self.members.holds(one):
            return
        why = str(death).partition("\n")[0]
        self.last_error = f"{why}\n{self.workers.log_tail(one.engine)}"
        returns = self.on_loss(one, kind, why)
        _log.info(
            "rollout engine %d is dead (%s); %d live%s: %s",
            one.engine, kind, len(self.members.remove(one).living), ", it is started again" if returns else "", why,
        )  # fmt: skip
        self.remove(one, why, returns)

    async def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """Call `method` on all living engines at once; return engine -> answer, for engines that survive the call."""
        return await self.run_on(
            self.members.living, lambda one: self.try_call(one, method, *args, timeout_s=timeout_s)
        )

    async def run_on(
        self, members: Iterable[Member], do: Callable[[Member], Coroutine[Any, Any, dict[int, Any]]]
    ) -> dict[int, Any]:
        """Run `do` concurrently for `members`, and merge the results.

        Raises errors as `together` does. Raises NoEngineLeft if no engine lives afterwards, and none will return.
        """
        answers = await together(*map(do, members))
        self.require_members()
        return {engine: answer for by_engine in answers for engine, answer in by_engine.items()}

    def require_members(self) -> None:
        """Raise NoEngineLeft if no engine lives, and none will return."""
        if not self.members.of_engine:
            raise NoEngineLeft(f"every rollout engine has died. The last one: {self.last_error}")

    async def try_call(self, one: Member, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """Return {engine: answer}, or {} if the engine died or is late, which is no error while other engines live.

        A late engine counts as hung, also if it answers other calls. Raises RankSilent if it is late to give up its devices
        or take them back, for which other groups wait.
        """
        try:
            return {one.engine: await self.call(one, method, *args, timeout_s=timeout_s)}
        except (RankDied, EngineDied) as death:
            self.lost(one, death)
        except RankSilent as silence:
            if method in ("sleep", "wake"):
                raise
            if timeout_s is not None:  # Else the call has written the stacks.
                await self.workers.located([self.workers.ranks[one.engine]])
            self.lost(one, silence, FaultKind.hung)
        return {}

    async def call(
        self, one: Member, method: str, *args: Any, timeout_s: float | None = None, ping: bool = True
    ) -> Any:
        """Return the engine's answer. Raises RankDied if it is dead, RankSilent if it lives but times out.

        With `ping`, a time-out triggers `ping`, so an unresponsive engine counts as dead.
        """
        try:
            return await self.workers.call_rank(one.engine, method, *args, timeout_s=timeout_s, until=self.gone(one))
        except RankSilent as late:
            if ping:
                await self.ping(one, late)
            raise

    async def ping(self, one: Member, late: RankSilent) -> None:
        """Call `metrics` on an engine after another call timed out (`late`). Raises RankDied if `metrics` does too."""
        try:
            await self.call(one, "metrics", timeout_s=PING_TIMEOUT_S, ping=False)
        except RankSilent:
            where = await self.workers.located([self.workers.ranks[one.engine]])
            why = f"engine {one.engine} no longer responds{where and f' ({where})'}: {late}"
            raise RankDied(why, one.engine) from late


class Newcomer:
    """One engine that has just started, as the only receiver of a weight sync, which admits it to the pool."""

    def __init__(self, engines: EngineCalls, member: Member, limit_s: float) -> None:
        """`limit_s` is the time limit of a call: with a broadcast, the engine may wait for the sender."""
        self.workers = engines.workers
        self._engines, self._member, self._limit_s = engines, member, limit_s

    @property
    def living(self) -> Mapping[int, asyncio.Future[str]]:
        """The engine, as long as it lives."""
        alive = self._engines.members.holds(self._member)
        return {self._member.engine: self._engines.gone(self._member)} if alive else {}

    async def open_transport(self, specs: Mapping[int, Any]) -> None:
        """Open the transport. Raises RankDied if the engine has been removed since it was to be connected."""
        spec = specs.get(self._member.engine)
        if spec is None:
            raise RankDied(f"engine {self._member.engine} left before it could catch up", self._member.engine)
        await self._call("open_transport", spec)

    async def begin_update(self, version: int) -> None:
        """Prepare to receive `version`."""
        await self._call("begin_update", version)

    async def load_bucket(self, bucket: Any) -> None:
        await self._call("load_bucket", bucket)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to `version` and join the pool. Raises RunError if the tensors do not match `digest`."""
        await self._call("finish_update", version, digest)
        self._engines.change(self._engines.members.admit(self._member, version))

    async def _call(self, method: str, *args: Any) -> None:
        await self._engines.call(self._member, method, *args, timeout_s=self._limit_s)


class VersionSwitch:
    """Switches engines to a staged version, and sets engines aside from rollouts.

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

    def __init__(self, engines: EngineCalls, load: Callable[[Member], int]) -> None:
        """`load` returns the number of a member's episodes."""
        self._engines, self._load = engines, load
        self._switching = asyncio.Lock()
        """Held during a switch, and by `set_aside`, so that all engines set aside have the same version."""
        self._updating: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Life of a member -> lock that is held while it begins an update or catches up."""
        self._staged: dict[int, tuple[int, str]] = {}
        """Life of a member that a switch skipped -> staged version and digest, until the next update begins."""
        self._catching_up: set[asyncio.Task[None]] = set()

    async def begin_update(self, version: int) -> None:
        """Prepare all engines to receive `version`, discarding staged versions."""

        async def begin(one: Member) -> dict[int, Any]:
            async with self._updating[one.life]:
                self._staged.pop(one.life, None)
                return await self._engines.try_call(one, "begin_update", version)

        await self._engines.run_on(self._engines.members.living, begin)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch every engine not set aside; each gets groups again as soon as it has switched."""
        async with self._switching:
            self._engines.change(self._engines.members.raise_to(version))
            # An engine that joined after the push has the version already.
            behind = [one for one in self._engines.members.living if self._engines.members.is_behind(one)]
            self._staged |= {one.life: (version, digest) for one in behind if one.aside}
            switching = [one for one in behind if not one.aside]
            await self._engines.run_on(switching, lambda one: self._switch(one, version, digest))

    async def set_aside(self, count: int) -> tuple[Member, ...]:
        """Set aside up to `count` engines that have the newest version, and return them.

        Engines with the fewest episodes are chosen; these episodes continue. Blocks while an engine switches. Takes at
        least one engine, but leaves one for rollouts if more than one lives. Blocks while no engine lives but one
        will return; raises NoEngineLeft if none will.
        """
        while True:
            await asyncio.gather(*self._catching_up, return_exceptions=True)
            async with self._switching:
                self._engines.require_members()
                rolling = self._engines.members.rolling
                if rolling:
                    newest = max(_version(one) for one in rolling)
                    fit = [one for one in rolling if _version(one) == newest]
                    taken = sorted(fit, key=self._load)[: min(count, max(1, len(rolling) - 1))]
                    self._engines.change(self._engines.members.set_aside(taken))
                    return tuple(taken)
            await self._changed()

    async def put_back(self, taken: Sequence[Member]) -> None:
        """Return engines to rollouts; block until each engine that has a staged version has switched to it.

        The engines switch even if the caller is cancelled. An engine that refuses the version counts as dead.
        """
        self._engines.change(self._engines.members.set_aside(taken, aside=False))
        tasks = [asyncio.ensure_future(self._catch_up(one)) for one in taken if one.life in self._staged]
        self._catching_up |= set(tasks)
        for task in tasks:
            task.add_done_callback(self._catching_up.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _catch_up(self, one: Member) -> None:
        async with self._updating[one.life]:
            if one.life not in self._staged:
                return
            try:
                await self._switch(one, *self._staged.pop(one.life))
            except RunError as refusal:
                self._engines.lost(one, refusal)

    async def _switch(self, one: Member, version: int, digest: str) -> dict[int, Any]:
        answer = await self._engines.try_call(one, "finish_update", version, digest)
        if answer:
            self._engines.change(self._engines.members.switched(one, version))
        return answer

    async def _changed(self) -> None:
        """Wait for the next snapshot."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def listen(_: Members) -> None:
            if not changed.done():
                changed.set_result(None)

        stop = self._engines.subscribe(listen)
        try:
            await changed
        finally:
            stop()


def _version(one: Member) -> int:
    return -1 if one.version is None else one.version


def _has_aborted(answer: Trajectory | Sequence[Trajectory]) -> bool:
    """Return True if an episode of a worker's answer was aborted."""
    episodes = [answer] if isinstance(answer, Trajectory) else answer
    return any(episode.finish is Finish.ABORTED for episode in episodes)


def _lane(engine: int) -> str:
    return f"engine {engine}"
