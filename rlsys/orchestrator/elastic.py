"""Lets engines join and leave while training goes on: on request of `rlsys engines`, and with the machines of the cluster.

    leave    The engine gets no new groups. When those that it has have ended, or at the limit, it is removed and its process
             is killed. Groups that are cut short run again on other engines, and are not counted as lost.
    join     A new engine, or one that has left, starts on free devices, gets the last pushed weights alone
             (`WeightSync.catch_up`), verifies them and is admitted.

An engine whose machine has left the cluster is removed at once, and joins again when it has devices on a machine that lives.
With `cluster.max_engines`, more engines join by themselves while the cluster has free devices.

The driver decides about one request at a time, within one turn of its event loop; waits of several requests overlap. The
last engine that serves never leaves: if it becomes the last one meanwhile, it stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, NoReturn, TypeVar

import psutil

from rlsys.cluster.runtime import answer
from rlsys.cluster.seats import Seats
from rlsys.cluster.worker_group import RankDied
from rlsys.config.schema import Mode, RunConfig, SyncMode
from rlsys.errors import RunError, UserError
from rlsys.observe import status
from rlsys.observe.faults import Change, FaultKind, FaultLog, Outcome
from rlsys.observe.requests import Inbox, Request
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import Member, Standing
from rlsys.orchestrator.supervisor import Supervisor

POLL_S = 1.0
"""Interval at which requests and the groups of a leaving engine are looked at."""
MACHINES_POLL_S = 5.0
"""Interval at which Ray is asked for the machines of the engines."""
DEVICES_TIMEOUT_S = 15.0
"""Time in which Ray must find free devices for an engine that joins on request."""
_LEFT = "it has left the run"
"""Reason for which an engine is gone that was asked to leave."""
T = TypeVar("T")
Say = Callable[[str], None]
"""Receives what a request waits for."""


class Elastic:
    """Carries out joins and leaves. `seats` are the devices of the engines."""

    def __init__(
        self,
        pool: EnginePool,
        supervisor: Supervisor,
        seats: Seats,
        inbox: Inbox,
        faults: FaultLog,
        config: RunConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._engines, self._supervisor = pool, pool.engines, supervisor
        self._seats, self._inbox, self._faults, self._clock = seats, inbox, faults, clock
        self._config = config
        self._choosing = asyncio.Lock()
        """Held from the choice of an engine that joins to the beginning of its start."""
        self._asking = asyncio.Lock()
        """Held while Ray is asked about `seats`."""

    async def run(self) -> None:
        """Carry out requests and follow the machines until cancelled; open requests begin anew with the next `run`."""
        begun: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            if self._config.cluster.address is not None:
                tasks.create_task(self._watch_machines(tasks))
            while True:
                for request in self._inbox.requests():
                    if request.name not in begun:
                        begun.add(request.name)
                        tasks.create_task(self._carry_out(request))
                await asyncio.sleep(POLL_S)

    async def _carry_out(self, request: Request) -> None:
        def say(text: str) -> None:
            self._inbox.say(request, text)

        try:
            if request.action == "list":
                rows = self.listed()
                self._inbox.end(request, f"{status.count(len(rows), 'engine')}.", rows)
            elif request.action == "leave":
                self._inbox.end(request, await self.leave(request.engine, request.limit_s, say))
            else:
                self._inbox.end(request, await self.join(request.engine, say))
        except (UserError, RunError) as refusal:
            self._inbox.refuse(request.name, refusal)

    def listed(self) -> list[Mapping[str, Any]]:
        """Return number, state, weight version and number of groups of each engine."""
        rows = [
            {
                "engine": engine,
                "state": "evaluating" if one.aside else str(one.standing),
                "version": one.version,
                "groups": self._pool.groups_on(one),
            }
            for engine, one in self._engines.members.of_engine.items()
        ]
        waiting = {"state": "waits for a machine", "version": None, "groups": 0}
        rows += [{"engine": engine, **waiting} for engine in self._supervisor.displaced]
        return sorted(rows, key=lambda row: row["engine"])

    async def leave(self, engine: int | None, limit_s: float | None, say: Say = lambda _: None) -> str:
        """Remove an engine, by default the one with the fewest groups; return what happened.

        After `limit_s` its remaining groups run again on other engines; without a limit all of them end. Raises UserError
        if the engine cannot leave, RunError if it must stay because the others have died meanwhile.
        """
        if engine in self._supervisor.displaced:
            self._supervisor.give_up(engine, "it was asked to leave")
            await self._release(engine)
            return f"engine {engine} does not return."
        one, began = self._leaver(engine), self._clock()
        self._engines.change(self._engines.members.leave(one))
        if one.lives:
            await self._end_groups(one, inf if limit_s is None else began + limit_s, say)
        if not self._engines.members.holds(one):
            await self._release(one.engine)
            why = self._engines.gone(one).result()
            if why == _LEFT:
                return f"engine {one.engine} has left on another request."
            raise RunError(f"engine {one.engine} was lost before it could leave, and is not started again: {why}")
        groups = self._pool.groups_on(one)
        detail = f"after {self._clock() - began:.0f} s"
        if groups:
            detail += f"; {status.count(groups, 'prompt group')} run again on other engines"
        self._engines.remove(one, _LEFT)
        self._supervisor.give_up(one.engine, "it was asked to leave")
        await self._release(one.engine)
        self._faults.note(f"engine {one.engine}", Change.left, detail)
        return f"engine {one.engine} left {detail}."

    async def _end_groups(self, one: Member, until: float, say: Say) -> None:
        """Wait until a leaving engine has no groups and receives no weights, at most to the time `until`.

        Raises RunError, and lets it stay, once no other engine serves.
        """
        while waits := self._waits_for(one):
            self._require_others(one)
            if self._clock() >= until:
                return
            say(f"engine {one.engine} waits for {waits}")
            await asyncio.sleep(min(POLL_S, until - self._clock()))
        async with self._supervisor.sync.between_transfers():
            self._require_others(one)

    def _require_others(self, one: Member) -> None:
        """Let a leaving member stay, and raise RunError, if no other one serves."""
        members = self._engines.members
        if members.holds(one) and not members.remains_without(one):
            self._engines.change(members.stay(one))
            raise RunError(f"engine {one.engine} stays, because no other engine serves any more.")

    def _leaver(self, engine: int | None) -> Member:
        """Return the member that leaves. Raises UserError if it is none, or the last one that stays."""
        members = self._engines.members
        if engine is not None and engine not in members.of_engine:
            have = ", ".join(map(str, sorted(members.of_engine)))
            raise UserError(f"engine {engine} is not in the run: its engines are {have}.", code="unknown", key="ENGINE")
        staying = [one for one in members.living if one.standing is not Standing.leaving and not one.aside]
        chosen = staying if engine is None else [members.of_engine[engine]]
        one = min(reversed(chosen), key=self._pool.groups_on, default=None)
        if one is None or not members.remains_without(one):
            who = "no engine can" if one is None else f"engine {one.engine} cannot"
            raise UserError(
                f"{who} leave now, because the run would have none for prompt groups: let another one join first.",
                code="conflict",
                key="ENGINE",
            )
        return one

    def _waits_for(self, one: Member) -> str:
        """Return what a leaving engine waits for; empty if it can be removed."""
        held = self._engines.members.of_engine.get(one.engine)
        if held is None or held.life != one.life or not held.lives:
            return ""
        if held.aside:
            return "the end of its evaluation"
        groups = self._pool.groups_on(held)
        return status.count(groups, "prompt group") if groups else ""

    async def join(self, engine: int | None, say: Say = lambda _: None) -> str:
        """Start an engine on free devices and admit it; return what happened.

        By default it is the lowest number without an engine. Raises UserError if it cannot join.
        """
        began = self._clock()
        async with self._choosing:
            while True:
                number = self._joiner(engine)
                say(f"engine {number} waits for free devices")
                await self._find_devices(number)
                if number not in self._engines.members.of_engine:  # Else it has returned from a lost machine meanwhile.
                    break
            one = self._supervisor.invite(number)
        say(f"engine {number} starts, and gets the weights")
        return f"engine {number} joined {await self._joined(one, began)}."

    async def _joined(self, one: Member, began: float, stays: bool = False) -> str:
        """Wait until an invited engine serves, record it, and return with what it serves and after how long.

        Raises RunError or UserError, and gives back its devices, if it cannot start. On cancellation it remains a member only
        if it `stays`.
        """
        try:
            version = await self._supervisor.joined(one, stays)
        except (RunError, UserError):
            await self._release(one.engine)
            raise
        detail = f"with weight version {version} in {self._clock() - began:.0f} s"
        self._faults.note(f"engine {one.engine}", Change.joined, detail)
        return detail

    def _joiner(self, engine: int | None) -> int:
        """Return the number of the engine that joins. Raises UserError if it cannot."""
        if self._config.cluster.mode is Mode.colocated:
            raise UserError(
                "cluster.mode=colocated shares each device between all groups, so no engine can join: use "
                "cluster.mode=disaggregated.",
                code="unsupported",
                key="cluster.mode",
            )
        members, new, most = self._engines.members.of_engine, self._new, self._config.cluster.max_engines
        free = [number for number in range(new + 1) if number not in members]
        if engine is not None and engine in members:
            raise UserError(f"engine {engine} is in the run already.", code="exists", key="ENGINE")
        if engine is not None and engine not in free:
            raise UserError(
                f"engine {engine} cannot join: the next new engine is {new}.", code="out_of_range", key="ENGINE"
            )
        number = free[0] if engine is None else engine
        if most is not None and number >= most:
            fix = f"engine {free[0]} can" if free[0] < most else "let another one leave first"
            raise UserError(
                f"engine {number} cannot join, because cluster.max_engines={most}: {fix}.",
                code="out_of_range",
                key="cluster.max_engines",
            )
        return number

    @property
    def _new(self) -> int:
        """Lowest number that no engine has had."""
        return max([len(self._pool.workers.ranks), *(number + 1 for number in self._engines.members.of_engine)])

    @property
    def _grows_by(self) -> tuple[int, ...]:
        """Engine that joins by itself as soon as it has devices; none while one with a lower number is absent."""
        most, here = self._config.cluster.max_engines, len(self._engines.members.of_engine)
        return (self._new,) if most is not None and here == self._new < most else ()

    async def _find_devices(self, number: int) -> None:
        """Reserve devices for an engine. Raises UserError if none are free."""
        if self._seats.unreserved:
            needed = await asyncio.to_thread(self._pool.workers.memory_bytes)
            self._require_memory(needed, psutil.virtual_memory().available)
        until = self._clock() + DEVICES_TIMEOUT_S
        while not await self._ask(lambda: self._seats.find(number)):
            if self._clock() >= until:
                await self._release(number)
                self._refuse_devices()
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _require_memory(needed: float, free: float) -> None:
        """Raise UserError if a machine with `free` bytes has no room for another engine, which takes `needed` bytes."""
        if free < needed:
            raise UserError(
                f"no engine can join, because it takes about {needed / 2**30:.1f} GiB and this machine has "
                f"{free / 2**30:.1f} GiB of free memory: stop other programs, or let an engine leave.",
                code="no_room",
                key="ENGINE",
            )

    def _refuse_devices(self) -> NoReturn:
        config = self._config
        mode, tp = config.cluster.sync_mode, config.rollout.engine.tp
        on = "the actor's machine" if mode in (SyncMode.tensor, SyncMode.ipc) else "one machine"
        raise UserError(
            f"no engine can join, because {on} has not {tp} free {config.cluster.device} slots"
            f"{f' (cluster.sync_mode={mode} does not reach other machines)' if on != 'one machine' else ''}: free some, "
            "or add a machine to the Ray cluster.",
            code="no_room",
            key="cluster.placement.rollout",
        )

    async def _release(self, engine: int) -> None:
        """Give back the devices of an engine, unless it is a member by now."""
        async with self._asking:
            if engine not in self._engines.members.of_engine:
                await answer(lambda: self._seats.release(engine))

    async def _ask(self, question: Callable[[], T]) -> T:
        """Return the result of a question about `seats`."""
        async with self._asking:
            return await answer(question)

    async def _watch_machines(self, tasks: asyncio.TaskGroup) -> None:
        """Remove engines whose machine has left the cluster, and start them again once they have another one; let more join."""
        while True:
            await asyncio.sleep(MACHINES_POLL_S)
            found = await self._find_all()
            for engine, placed in found.items():
                one = self._engines.members.of_engine.get(engine)
                if one is not None and not placed:
                    gone = RankDied(f"the machine of engine {engine} has left the cluster", engine)
                    self._engines.lost(one, gone, FaultKind.displaced)
                if one is None and placed and engine in self._supervisor.displaced:
                    tasks.create_task(self._return(self._supervisor.invite(engine)))
                elif one is None and placed and engine in self._grows_by:
                    tasks.create_task(self._grow(self._supervisor.invite(engine)))

    async def _find_all(self) -> Mapping[int, bool]:
        """Return whether each engine has devices, also the one that joins by itself; give back those of all others."""
        async with self._asking:  # Devices of an engine that leaves meanwhile are released afterwards.
            wanted = [*self._engines.members.of_engine, *self._supervisor.displaced, *self._grows_by]
            if not self._choosing.locked():  # Else one that joins on request waits for its devices.
                for number in {*self._seats.asked_for}.difference(wanted):
                    await answer(partial(self._seats.release, number))
            return await answer(partial(self._seats.find_all, wanted))

    async def _grow(self, one: Member) -> None:
        """Wait for an additional engine that is started; if it cannot start, the run goes on without it.

        If the run goes back meanwhile, it is started again.
        """
        try:
            await self._joined(one, self._clock(), stays=True)
        except (RunError, UserError) as problem:
            gone = self._engines.gone(one)
            if gone.done() and gone.result() == _LEFT:
                return
            fault = self._faults.begin(f"engine {one.engine}", FaultKind.died, str(problem).partition("\n")[0])
            self._faults.end(fault, Outcome.given_up, "it was starting in addition to the others")

    async def _return(self, one: Member) -> None:
        """Wait for a displaced engine that is started again; a failure of its start uses up a restart, if one is left."""
        try:
            await self._supervisor.joined(one)
        except (RunError, UserError) as problem:
            supervisor = self._supervisor
            placed = one.engine in supervisor.displaced and await self._ask(partial(self._seats.find, one.engine))
            # Else its machine has left too, or it was asked to leave.
            if placed and one.engine in supervisor.displaced:
                supervisor.tries_again(one.engine, str(problem).partition("\n")[0])
            if one.engine not in supervisor.displaced:
                await self._release(one.engine)
