"""Engines of a simulated run behind the real engine pool, weight sync and supervisor, which starts engines again.

The processes are scripted: those of `workers.Engines`, an actor that sends the weights, and an inference group that has a
copy of them, or has none. The driver's part is the shipped one, from the queue for an engine to the admission of an engine
that was started again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlsys.cluster.worker_group import RankDied
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import ClusterConfig, Device, RolloutConfig, RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError
from rlsys.observe.faults import Fault, FaultKind, Restarts
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import Member, Members, Standing
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.watched import Property, Record
from tests.orchestrator.pipeline.workers import Engine, Engines, Play


class _Sender:
    """Actor that sends weights, or those of the last transfer again; a transfer takes a while."""

    driver_host = ""

    def __init__(self, script: Script, digest: Callable[[], str], receivers: dict[Engine, None]) -> None:
        """`digest` is that of the weights that the actor has now. `receivers` are the engines that stage them."""
        self.name, self.ranks = "actor", (SimpleNamespace(name="actor rank 0"),)
        self._script, self._digest, self._receivers = script, digest, receivers
        self._begun, self._again = "", False

    async def call(self, method: str, *args: Any, **_limits: Any) -> list[Any]:
        """Answer a call of the weight sync; there are no buckets."""
        if method == "begin_export":
            (self._again,) = args
            self._begun = self._begun if self._again else self._digest()
            await self._script.pause("update")
        if method == "end_export":
            whole = self._again or self._begun == self._digest()
            sent = self._begun if whole else "weights of two moments"
            for engine in self._receivers:
                engine.staged = sent
            self._receivers.clear()
            return [sent]
        return [1.0] if method == "open_export" else [None]


class _Faults:
    """Takes faults and keeps none."""

    def begin(self, part: str, kind: FaultKind, _: str) -> Fault:
        return Fault(0, part, kind, 0.0)

    def end(self, *_: Any) -> None: ...


class PooledEngines(Engines):
    """The rollout group: the real pool and supervisor in front of scripted processes."""

    name = "rollout"

    def __init__(self, script: Script, record: Record) -> None:
        super().__init__(script, record)
        self._stillborn: set[int] = set()
        """Lives of members whose processes die while they start."""
        self._receivers: dict[Engine, None] = {}
        """Engines that take part in the current transfer."""

    def open(self, wake: Callable[[], None]) -> None:
        """Open the pool in the running loop; `wake` is called whenever members change."""
        script = self.script
        config = RunConfig(
            rollout=RolloutConfig(max_episodes=script.slots),
            algorithm=AlgorithmConfig(n_samples=script.samples),
            cluster=ClusterConfig(device=Device.cpu, restarts=script.restarts),
        )
        tracer = Tracer("driver", clock=lambda: 0)
        sender: Any = _Sender(script, self._of_actor, self._receivers)
        workers: Any = self
        self.pool = EnginePool(workers, config, tracer, [])
        self.pool.engines.subscribe(lambda _: wake())
        self.sync = WeightSync(sender, [self.pool], config.cluster, Path(), tracer)
        budget, faults = Restarts(config.cluster, lambda: 0.0), _Faults()
        self.supervisor = Supervisor(
            self.pool, self.sync, self._restart, faults, config, budget, {}, lambda: 0.0  # type: ignore[arg-type]
        )  # fmt: skip

    async def watch(self) -> None:
        """Start engines again, until cancelled; deaths are noticed at once, without a poll."""
        await self.supervisor.run(math.inf)

    @property
    def ranks(self) -> Sequence[Engine]:
        """Processes by number; one that was started again is another object."""
        return self._engines

    @property
    def members(self) -> Members:
        return self.pool.engines.members

    @property
    def capacity(self) -> int:
        return self.pool.capacity

    async def run_group(
        self, question: Question, number: int, begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        self.record.begin_group(number, begun)
        try:
            return await self.pool.run_group(question, number, begun)
        finally:
            self._answers.pop(number, None)
            self.record.end("rollout")

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        return await self.pool.in_flight()

    async def push(self, version: int) -> None:
        await self.sync.push(version)

    async def switch(self, version: int) -> None:
        await self.sync.activate(version)

    def kill(self, number: int) -> None:
        """Kill an engine, the last one only if the script says so; one that is being started fails to start."""
        one = self.members.of_engine.get(number)
        if one is None or (self.members.living == (one,) and not self.script.last_may_die):
            return
        if one.standing is Standing.starting:
            self._stillborn.add(one.life)
            return
        self._die(self._engines[number])
        self.pool.engines.lost(one, RankDied("it was killed", number))

    async def call_rank(
        self,
        index: int,
        method: str,
        *args: Any,
        timeout_s: float | None = None,  # noqa: ARG002, no answer is late
        until: asyncio.Future[str] | None = None,
    ) -> Any:
        """Call a method of a process, as `WorkerGroup.call_rank` does."""
        assert until is not None
        if until.done():
            raise RankDied(until.result(), index)
        answer = getattr(self, f"_{method}")(self._engines[index], *args)
        if answer is None:
            return None
        call = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({call, until}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise RankDied(until.result(), index)
        finally:
            call.cancel()

    def kill_rank(self, index: int) -> None:
        """Nothing is left to be killed: only the dead are given up."""

    def log_tail(self, index: int) -> str:  # noqa: ARG002
        return ""

    def _of_actor(self) -> str:
        """Return the digest of the actor's weights, which each optimiser step changes."""
        return f"{self.record.version}.{self.record.updated('actor')}"

    async def _restart(self, member: Member) -> None:
        await self.script.pause("start")
        if member.life in self._stillborn:
            raise RunError("the process has died")
        self._engines[member.engine] = Engine(member.engine, -1)

    def _run_group(
        self, engine: Engine, question: Question, _: int, key: str, begun: Sequence[EpisodeProgress]
    ) -> Awaitable[list[Trajectory]]:
        (number,) = [one.prompt_group for one in self.pool._rolling.values() if one.key == key]
        assert number is not None
        play = self._play(number, question, begun, engine)
        play.key = key
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._start(play)
        return answer

    async def _abort_group(self, engine: Engine, key: str) -> None:
        for play in [one for one in (*engine.plays, *engine.held_back) if one.key == key]:
            self._end(play)
        if self.script.chance(0.5):
            await self.script.pause("abort")

    async def _in_flight(self, engine: Engine, keys: Iterable[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        await self.script.pause("save")
        said: dict[Play, tuple[EpisodeProgress, ...]] = {
            play: begun for play in engine.plays if play.key in keys and (begun := play.begun())
        }
        self.record.tell({play.number: begun for play, begun in said.items()})
        return {play.key: begun for play, begun in said.items()}

    def _open_transport(self, *_: Any) -> None: ...

    def _begin_update(self, engine: Engine, _: int) -> None:
        engine.staged = ""
        self._receivers[engine] = None

    async def _finish_update(self, engine: Engine, version: int, digest: str) -> None:
        whole = engine.staged == digest == f"{version}.0"
        self.record.hold(Property.pushed, whole, f"engine {engine.number} has {engine.staged}, not {digest}")
        await self._take_version(engine, version)
