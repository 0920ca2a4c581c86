"""Scripted stand-ins for the workers of rollout engines, called like Ray actors, on any event loop.

A call continues in the worker after the driver has stopped waiting for it. Calls fail if their worker dies or is
killed, and stay pending if it is silent.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.apps.planner.virtual_time import now
from rlsys.cluster.worker_group import RankDied, RankSilent
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import GatewayAgent, RolloutConfig, RunConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import Member, NoEngineLeft
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost
from rlsys.rollout.agent.episode import EngineActivity
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.support.trajectories import question, trajectory

CALL_TIMEOUT_S = 1800.0
SAMPLES = 4
TIMEOUT_S = 600.0
NEVER = float("inf")


class Worker:
    """Process of one engine, with its running groups and a log of its calls."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"rollout rank {number}"
        self.alive = True
        self.silent = False
        self.unreachable = False
        """True if callers do not notice that the worker has died."""
        self.killed = False
        self.switching = False
        self.version = -1
        self.staged: int | None = None
        self.running: dict[str, int] = {}
        """Key of a running group -> number of its episodes."""
        self.begun: dict[str, tuple[EpisodeProgress, ...]] = {}
        """Key of a group -> progress that it resumed from."""
        self.activity = EngineActivity(False, {})
        self.most_episodes = 0
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.pending: dict[asyncio.Future[Any], str | None] = {}
        """Pending call -> key of the group that it runs, None for other calls."""
        self.timers: dict[asyncio.Future[Any], asyncio.TimerHandle] = {}

    def end(self) -> None:
        self.alive = False
        self.running.clear()
        death = RankDied(f"rollout rank {self.number} died before it could answer.", self.number)
        for call in [] if self.unreachable else list(self.pending):
            self.answer(call, death)

    def finish(self, key: str) -> None:
        """End a running group: its call returns no episodes."""
        for call in [call for call, running in self.pending.items() if running == key]:
            self.answer(call, [])

    def answer(self, call: asyncio.Future[Any], answer: Any) -> None:
        """End a call with `answer`, which is raised if it is an exception."""
        self.running.pop(self.pending.pop(call, None) or "", None)
        timer = self.timers.pop(call, None)
        if timer is not None:
            timer.cancel()
        if not call.done():
            if isinstance(answer, BaseException):
                call.set_exception(answer)
                call.exception()  # Marks the exception as retrieved; the caller may be gone.
            else:
                call.set_result(answer)


class Engines:
    """The methods of WorkerGroup that EnginePool uses, on scripted workers."""

    def __init__(
        self,
        count: int,
        seconds: Callable[[str, tuple[Any, ...]], float] = lambda *_: 1.0,
        failures: dict[str, Exception] | None = None,
        continues: bool = False,
    ) -> None:
        """Each call takes `seconds(method, arguments)`; `failures` maps methods to exceptions that they raise.

        `continues` is True for `on_update=continue`: a switch does not wait for running groups.
        """
        self.ranks = [Worker(number) for number in range(count)]
        self.finished = 0
        self.former: list[Worker] = []
        """Workers that were started again."""
        self.starts: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        """Question -> (engine, time) of every attempt to run it."""
        self.answered_by: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """Question -> (engine, its version) of every attempt to answer it in an evaluation."""
        self.published = -1
        """Oldest version with which rollouts may begin."""
        self.breaches: list[str] = []
        self.located_of: list[int] = []
        """Engines whose stacks were written."""
        self.split: set[str] = set()
        """Keys of groups and answers that ran while their engine switched."""
        self._seconds = seconds
        self._failures = failures or {}
        self._continues = continues

    async def call_rank(
        self,
        index: int,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        until: asyncio.Future[str] | None = None,
    ) -> Any:
        if until is not None and until.done():
            raise RankDied(until.result(), index)
        worker = self.ranks[index]
        if worker.killed:
            self.breaches.append(f"{method} was asked of engine {index} after it was given up")
        worker.log.append((method, args))
        call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        worker.pending[call] = None
        if not worker.alive:
            worker.end()
        elif not worker.silent:
            getattr(self, f"_{method}", self._plain)(worker, call, method, args)
        limit = CALL_TIMEOUT_S if timeout_s is None else timeout_s
        waits = {call} if until is None else {call, until}
        done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if until is not None and until.done() and not call.done():
            raise RankDied(until.result(), index)
        if not done:
            raise RankSilent(f"waited {limit:.0f} s for rollout rank {index} to finish {method}.", index)
        return call.result()

    async def located(self, ranks: Sequence[Worker]) -> str:
        self.located_of += [worker.number for worker in ranks]
        self.breaches += [
            f"the stacks of engine {worker.number} are read after its end" for worker in ranks if worker.killed
        ]
        return "its stacks are written"

    def kill_rank(self, index: int) -> None:
        self.ranks[index].killed = True
        self.ranks[index].end()

    async def restart(self, member: Member) -> None:
        """Start an engine, a new one or again, as `restart_engine` does. Raises the failure of `start`, if any."""
        former = self.ranks[member.engine : member.engine + 1]
        if former and not former[0].killed:
            self.breaches.append(f"engine {member.engine} is started beside its former process")
        if not former:
            self.ranks.append(Worker(member.engine))
        await asyncio.sleep(self._seconds("start", (member,)))
        if "start" in self._failures:
            raise self._failures["start"]
        if former:
            self.former += former
            self.ranks[member.engine] = Worker(member.engine)

    def log_tail(self, index: int) -> str:
        return f"The last lines of engine {index}"

    def die(self, index: int) -> None:
        """End an engine's process without telling the driver."""
        self.ranks[index].end()

    def _plain(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        self._later(worker, call, self._seconds(method, args), self._failures.get(method))

    def _activity(self, worker: Worker, call: asyncio.Future[Any], _method: str, _args: tuple[Any, ...]) -> None:
        worker.answer(call, worker.activity)

    def _run_group(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        question, samples, key, begun = args
        if worker.version < self.published:
            self.breaches.append(f"{key} began with version {worker.version}, not {self.published}")
        worker.begun[key] = begun
        self._begin(worker, call, question, samples, key)
        answer = self._failures.get(method) or episodes(question, samples)
        self._later(worker, call, self._seconds(method, args), answer)

    def _answer(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        question, sample, _, key = args
        self.answered_by[question.uid].append((worker.number, worker.version))
        self._begin(worker, call, question, 1, key)
        answer = trajectory(uid=question.uid, sample=sample, version=worker.version)
        self._later(worker, call, self._seconds(method, args), answer)

    def _begin(self, worker: Worker, call: asyncio.Future[Any], question: Question, episodes: int, key: str) -> None:
        self.starts[question.uid].append((worker.number, now()))
        if worker.switching:
            self.breaches.append(f"{key} began on engine {worker.number} while it switched")
        worker.running[key] = episodes
        worker.pending[call] = key
        worker.most_episodes = max(worker.most_episodes, sum(worker.running.values()))

    def _in_flight(self, worker: Worker, call: asyncio.Future[Any], _: str, args: tuple[Any, ...]) -> None:
        """Report the progress of running groups: sample 0 as done, the others where they resumed from."""
        found = {}
        for key in worker.running.keys() & worker.begun.keys() & set(args[0]):
            first = trajectory(uid=key.partition("~")[0], sample=0)
            found[key] = (first, *(one for one in worker.begun[key] if one.sample != 0))
        self._later(worker, call, 0.0, found)

    def _abort_group(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        worker.finish(args[0])
        self._plain(worker, call, method, args)

    def _begin_update(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        if worker.switching:
            self.breaches.append(f"version {args[0]} came to engine {worker.number} while it switched")
        worker.staged = args[0]
        self._plain(worker, call, method, args)

    def _finish_update(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        """Switch to the staged version; unless groups continue, wait until no group runs."""
        if worker.switching:
            self.breaches.append(f"engine {worker.number} was told to switch while it did")
        if worker.staged not in (args[0], None):
            self.breaches.append(f"engine {worker.number} has staged {worker.staged}, not {args[0]}")
        worker.switching = True

        def look() -> None:
            if worker.running and not self._continues:
                worker.timers[call] = asyncio.get_running_loop().call_later(0.5, look)
            else:
                self._plain(worker, call, method, args)

        def ended(call: asyncio.Future[Any]) -> None:
            worker.switching = False
            if not call.cancelled() and call.exception() is None:
                worker.version = args[0]
                self.split |= worker.running.keys()

        call.add_done_callback(ended)
        look()

    def _metrics(self, worker: Worker, call: asyncio.Future[Any], _: str, __: tuple[Any, ...]) -> None:
        self._later(worker, call, 0.0, {"version": 0.0})

    @staticmethod
    def _later(worker: Worker, call: asyncio.Future[Any], seconds: float, answer: Any) -> None:
        if seconds != NEVER:
            loop = asyncio.get_running_loop()
            worker.timers[call] = loop.call_later(seconds, worker.answer, call, answer)


def episodes(question: Question, samples: int) -> list[Trajectory]:
    return [trajectory(uid=question.uid, sample=number) for number in range(samples)]


def make(engines: Engines, slots: int = 8, agents: int | None = None) -> tuple[EnginePool, Tracer]:
    """Return a pool, whose engines have room for `slots` episodes each or run `agents` of the gateway, and its tracer."""
    config = RunConfig(
        task=TaskConfig(agent=GatewayAgent(concurrency=agents)) if agents else TaskConfig(),
        rollout=RolloutConfig(max_episodes=slots, episode_timeout_s=TIMEOUT_S),
        algorithm=AlgorithmConfig(n_samples=SAMPLES),
    )
    tracer = Tracer("rollout", clock=lambda: int(now() * 1e9))
    return EnginePool(engines, config, tracer, []), tracer  # type: ignore[arg-type]


def taking(**seconds: float) -> Callable[[str, tuple[Any, ...]], float]:
    """Return a function that gives the seconds of a call by its method; methods that are not named take no time."""
    return lambda method, _: seconds.get(method, 0.0)


async def ask(group: EnginePool, count: int) -> list[Any]:
    """Ask `count` questions at the same time; return (outcome, time) of each."""

    async def one(number: int) -> Any:
        try:
            found = await group.run_group(question(number), number)
            assert [(t.question_uid, t.sample) for t in found] == [(f"q:{number}", i) for i in range(SAMPLES)]
            return "whole", now()
        except GroupLost as loss:
            return loss.reason.value, now()
        except NoEngineLeft:
            return "end", now()

    return await asyncio.gather(*(one(number) for number in range(count)))
