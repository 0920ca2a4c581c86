"""Finds engines that hang, and starts engines again that have died or hung.

    serving --dies, hangs--> killed --> started on the same devices --> gets the weights, verified --> serving
                               |                                            (`WeightSync.catch_up`)
                               +--> dropped from the pool, if `cluster.restarts` are used up, or if it leaves anyway

An engine whose machine has left the cluster is dropped; its fault is over once it has joined again (`rlsys.orchestrator.
elastic`). A start or a transfer that fails uses up another restart. Prompt groups of the engine are run again at once, on other
engines; requests wait while no engine lives and one is being started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlsys.cluster.worker_group import RankDied, RankLost
from rlsys.config.schema import Mode, RunConfig
from rlsys.errors import RunError, UserError
from rlsys.observe.faults import Fault, FaultKind, FaultLog, Outcome, Restarts
from rlsys.orchestrator.engine_pool import EnginePool, Newcomer
from rlsys.orchestrator.membership import Member, Members, Standing
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import MEGATRON
from rlsys.rollout.agent.episode import EngineActivity

POLLED_PER_S = 50
"""Most engines that are polled per second: each is a call, which the driver's event loop makes beside all others."""


@dataclass(slots=True)
class _Beat:
    progress: float | None
    at_s: float
    """Time of the last note."""
    stalled_s: float = 0.0
    """Time that it was busy without progress."""
    silent_s: float = 0.0
    """Time since its last answer."""


class Heartbeats:
    """Measures how long engines have been busy without progress, or silent. Pure.

    Waiting for a search is idle. Idle time does not count, but does not make up for a stall either: the episodes of an engine
    that hangs are cut off at their time limit, and it is idle then.
    """

    def __init__(self) -> None:
        self._beats: dict[int, _Beat] = {}
        """Life of a member -> its last sign of progress."""

    def note(self, life: int, activity: EngineActivity | None, now_s: float) -> float:
        """Note what a member reported, None if it did not answer; return the seconds without progress."""
        beat = self._beats.setdefault(life, _Beat(None, now_s))
        beat.silent_s, beat.at_s = beat.silent_s + now_s - beat.at_s, now_s
        if activity is not None:
            if activity.progress is None or activity.progress != beat.progress:
                beat.progress, beat.stalled_s = activity.progress, 0.0
            elif activity.busy:
                beat.stalled_s += beat.silent_s
            beat.silent_s = 0.0
        return beat.stalled_s + beat.silent_s


class Supervisor:
    """Watches the engines of a pool. `sync` is the weight sync from which engines that are started again catch up."""

    def __init__(
        self,
        pool: EnginePool,
        sync: WeightSync,
        start: Callable[[Member], Awaitable[None]],
        faults: FaultLog,
        config: RunConfig,
        budget: Restarts,
        unrecovered: dict[int, Fault],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start` starts a member's process and model; it raises RunError or UserError if that fails. `budget` and
        `unrecovered`, the faults by engine that are not over, outlast a run that goes back."""
        self.sync = sync
        self._pool, self._engines, self._start = pool, pool.engines, start
        self._faults, self._clock = faults, clock
        self._budget, self._unrecovered = budget, unrecovered
        self._restarts = config.cluster.mode is not Mode.colocated
        self._stall_timeout_s = config.rollout.engine.stall_timeout_s
        self._call_timeout_s = config.cluster.call_timeout_s
        self._heartbeats = Heartbeats()
        self._invited: dict[int, asyncio.Future[int]] = {}
        """Life of a member that joins -> its first weight version, or the error of its start, which is no fault."""
        self._engines.on_loss = self._lost

    @property
    def displaced(self) -> tuple[int, ...]:
        """Engines without a machine, which are no members."""
        return tuple(engine for engine in self._unrecovered if engine not in self._engines.members.of_engine)

    def invite(self, engine: int) -> Member:
        """Begin to start an engine that is no member; `joined` waits for it."""
        members = self._engines.members.join(engine)
        one = members.of_engine[engine]
        self._invited[one.life] = asyncio.get_running_loop().create_future()
        self._engines.change(members)
        return one

    async def joined(self, one: Member, stays: bool = False) -> int:
        """Wait until a member that was invited serves; return its first weight version.

        Raises RunError or UserError if it could not start, which uses up no restart. On cancellation it is removed, unless it
        `stays`.
        """
        joined, gone = self._invited[one.life], self._engines.gone(one)
        ends: list[asyncio.Future[Any]] = [joined, gone]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                raise RunError(f"engine {one.engine} did not join: {gone.result()}")
            return joined.result()
        finally:
            del self._invited[one.life]
            if not (joined.done() or gone.done() or stays):
                self._engines.remove(one, "its start was given up")
            joined.cancel()

    def tries_again(self, engine: int, why: str) -> None:
        """Count a failed start of a displaced engine as a restart; give it up if none is left."""
        if not self._budget.take():
            self.give_up(engine, f"no restart is left: {why}")

    def give_up(self, engine: int, why: str) -> None:
        """Record that the run goes on without an engine that has failed."""
        self._end(engine, Outcome.given_up, why)

    async def run(self, poll_s: float, after_poll: Callable[[], None] = lambda: None) -> None:
        """Watch and restart engines until cancelled; call `after_poll` after each poll of the engines.

        Polls are `poll_s` apart, or further with many engines: see `POLLED_PER_S`.
        """
        async with asyncio.TaskGroup() as restarts:
            begun: set[int] = set()

            def restart_new(members: Members) -> None:
                for one in members.of_engine.values():
                    if one.standing is Standing.starting and one.life not in begun:
                        begun.add(one.life)
                        restarts.create_task(self._restart(one))

            unsubscribe = self._engines.subscribe(restart_new)
            restart_new(self._engines.members)
            try:
                while True:
                    pause_s = min(len(self._engines.members.up) / POLLED_PER_S, self._stall_timeout_s / 4)
                    await asyncio.sleep(max(poll_s, pause_s))
                    await self.poll()
                    after_poll()
            finally:
                self._engines.on_loss = lambda *_: False
                unsubscribe()

    async def poll(self) -> None:
        """Ask the engines for their activity; suspect those without progress, and remove those that hang."""
        activities = await self._pool.activity()
        now = self._clock()
        hung: dict[Member, float] = {}
        for one, activity in activities.items():
            quiet_s = self._heartbeats.note(one.life, activity, now)
            if quiet_s >= self._stall_timeout_s:
                hung[one] = quiet_s
                continue
            members, works = self._engines.members, activity is None or activity.busy
            # An idle engine gets work again, with which it shows whether it hangs.
            judged = members.suspect(one) if works and 2 * quiet_s >= self._stall_timeout_s else members.trust(one)
            if judged is not members:
                self._engines.change(judged)
        if hung:
            workers = self._engines.workers
            where = await workers.located([workers.ranks[one.engine] for one in hung])
            for one, quiet_s in hung.items():
                why = f"engine {one.engine} has made no progress for {quiet_s:.0f} s{where and f' ({where})'}."
                self._engines.lost(one, RankDied(why, one.engine), FaultKind.hung)

    def _lost(self, one: Member, kind: FaultKind, why: str) -> bool:
        """Record the fault of a member; return True if its engine is started again."""
        standing = self._engines.members.of_engine[one.engine].standing
        joined = self._invited.get(one.life)
        if joined is not None and not joined.done():
            return False
        displaced, leaves = kind is FaultKind.displaced, standing is Standing.leaving
        if displaced and standing in (Standing.starting, Standing.joining):
            self._budget.give_back()  # It died first, and could not start again without its machine.
        returns = self._restarts and not displaced and not leaves and self._budget.take()
        if one.engine not in self._unrecovered:
            groups = self._pool.groups_on(one)
            detail = f"{why.rstrip('.')}; {groups} prompt groups are run again."
            self._unrecovered[one.engine] = self._faults.begin(f"engine {one.engine}", kind, detail)
        if not returns and (leaves or not displaced):
            reason = "no restart is left" if self._restarts else "the engines of a colocated run are not started again"
            self.give_up(one.engine, f"{'it was leaving' if leaves else reason}: {why}")
        return returns

    def _end(self, engine: int, outcome: Outcome, detail: str) -> None:
        fault = self._unrecovered.pop(engine, None)
        if fault is not None:
            self._faults.end(fault, outcome, detail)

    async def _restart(self, one: Member) -> None:
        """Start a new member and admit it with the current weights; a failure is another loss of its engine.

        Raises RankLost if the sender of the weights dies or hangs.
        """
        if not self._engines.members.holds(one):
            return
        joined = self._invited.get(one.life)
        try:
            await self._start(one)
            self._engines.change(self._engines.members.started(one))
            version = await self.sync.catch_up(Newcomer(self._engines, one, self._call_timeout_s))
        except (RunError, UserError) as problem:
            if isinstance(problem, RankLost) and problem.name.startswith(MEGATRON):
                raise  # The sender is lost: the run goes back to its last checkpoint, and the engine is not to blame.
            self._engines.lost(one, problem)
            if joined is not None and not joined.done():
                joined.set_exception(problem)
        else:
            self._end(one.engine, Outcome.recovered, f"started again; it has verified version {version}")
            if joined is not None and not joined.done():
                joined.set_result(version)
