"""Simulates a run's workers on the running loop's clock: rollouts, log-probs, learners, and their parts of a weight sync."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlsys.apps.planner.cores import SharedCores
from rlsys.apps.planner.costs import Costs
from rlsys.apps.planner.engine import Prefix, Request, SimulatedEngine
from rlsys.apps.planner.workload import EpisodeDraw, ToolServer, Workload
from rlsys.cluster.planning.work import CallCosts
from rlsys.config.derived import concurrent_episodes, on_update
from rlsys.config.schema import OnUpdate, RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Floats, Group, Sample, Scores, Trajectory
from rlsys.observe.spans import ROLLOUT_SPAN, Tracer
from rlsys.orchestrator.membership import Member, Members, Router
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.trainer.batches import BatchSharder, SampleSize
from rlsys.weights.transport import BucketHandle

_EMPTY = np.empty(0, np.float32)


class TokenArrays:
    """Makes the arrays of a trajectory as views, so that a long trajectory takes no memory."""

    def __init__(self, longest: int) -> None:
        self._zeros = np.zeros(longest, np.int32)
        self._mask = np.arange(2 * longest) >= longest
        self._longest = longest

    def trajectory(self, uid: str, sample: int, draw: EpisodeDraw, version: int) -> Trajectory:
        """Return a trajectory with the lengths of `draw`, whose oldest token is of `version`."""
        tokens, generated = int(draw.tokens), int(draw.generated)
        before = tokens - generated
        return Trajectory(
            question_uid=uid,
            sample=sample,
            tokens=self._zeros[:tokens],
            prompt_length=draw.prompt,
            loss_mask=self._mask[self._longest - before : self._longest + generated],
            rollout_logprobs=_EMPTY,
            versions=np.array([version], np.int32),
            turn_of_token=self._zeros[:0],
            tokens_differing=0,
            response="",
            turns=(),
            finish=Finish.ANSWER,
        )


def rewarded(question: Question, trajectories: Sequence[Trajectory]) -> Group:
    """Return the prompt group with rewards that differ."""
    return Group(
        question,
        tuple(Sample(one, float(number), (), {}, _EMPTY) for number, one in enumerate(trajectories)),
    )


@dataclass(slots=True, eq=False)
class _Episode:
    """Episode in flight: the turns that are left."""

    request: Request
    draw: EpisodeDraw
    turn: int = 0
    playing: bool = False
    """True while it holds a slot of its engine."""


class _Slots:
    """Lets at most `most` episodes of an engine play at a time; the others begin in order."""

    def __init__(self, most: int) -> None:
        self._free, self._waiting = most, deque[tuple[_Episode, Callable[[_Episode], None]]]()

    def begin(self, episode: _Episode, play: Callable[[_Episode], None]) -> None:
        """Play an episode now, or when those before it have ended."""
        self._waiting.append((episode, play))
        self._fill()

    def end(self, episode: _Episode) -> None:
        """Free the slot of an episode that has ended or is aborted, if it has one."""
        self._free += episode.playing
        episode.playing = False
        self._fill()

    def _fill(self) -> None:
        while self._free and self._waiting:
            episode, play = self._waiting.popleft()
            if not episode.request.left_engine:
                self._free -= 1
                episode.playing = True
                play(episode)


class SimulatedRollouts:
    """Engines behind the shipped router, and the tool server; implements `GroupGenerator` and `WeightReceiver`."""

    waits_for = ""

    def __init__(
        self,
        config: RunConfig,
        costs: Costs,
        workload: Workload,
        engines: int,
        tracer: Tracer,
        seed: int,
        cores: SharedCores,
    ) -> None:
        shared = None if costs.cores is None else cores
        self.engines = [SimulatedEngine(costs.engine, cores=shared) for _ in range(engines)]
        self._in_flight, self._in_flight_s, self._counted_s = 0, 0.0, 0.0
        """Episodes in flight, their integral over time, and the time up to which that is counted."""
        self.waited_s = 0.0
        """Seconds of all episodes that have ended or were aborted."""
        self.finished = 0
        self.workers: Any = SimpleNamespace(name="rollout", ranks=[SimpleNamespace(name="rollout")])
        self.living: Mapping[int, None] = {0: None}
        self._config, self._costs, self._workload, self._seed, self._tracer = config, costs, workload, seed, tracer
        self._samples, self._most = config.algorithm.n_samples, concurrent_episodes(config.task, config.rollout)
        self._slots = [_Slots(self._most) for _ in range(engines)]
        self._router = Router(Members.first(engines), self._most)
        self._queue: deque[tuple[str, asyncio.Future[Member]]] = deque()
        self._server = ToolServer(workload.tools_per_s)
        self._arrays = TokenArrays(config.task.max_total_tokens + config.task.max_prompt_tokens + 1)
        self._loop = asyncio.get_running_loop()
        self._finishes = on_update(config) is OnUpdate.finish
        self._open = True
        self._groups = 0
        """Groups on engines."""
        self._idle = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Number of groups that can be generated at a time."""
        return max(1, self._most // self._samples) * len(self.engines)

    @property
    def in_flight_s(self) -> float:
        """Integral of the episodes in flight over time, up to now."""
        self._fly(0)
        return self._in_flight_s

    def _leaves(self, begun: float) -> None:
        """Count an episode that ends or is aborted now."""
        self._fly(-1)
        self.finished += 1
        self.waited_s += self._loop.time() - begun

    def _fly(self, change: int) -> None:
        now = self._loop.time()
        self._in_flight_s += self._in_flight * (now - self._counted_s)
        self._in_flight, self._counted_s = self._in_flight + change, now

    async def run_group(
        self,
        question: Question,
        prompt_group: int,
        progress: Sequence[EpisodeProgress] = (),  # noqa: ARG002, nothing resumes
    ) -> list[Trajectory]:
        """Generate all episodes of a group on one engine."""
        key = str(prompt_group)
        member = await self._place(key)
        self._groups += 1
        draws = self._workload.group(self._config, self._seed, prompt_group, self._samples)
        try:
            with self._tracer.span(ROLLOUT_SPAN, lane=f"rank {member.engine}"):
                versions = await self._generate(member.engine, draws)
        finally:
            self._groups -= 1
            if not self._groups:
                self._idle.set()
            self._router.release(key)
            self._assign()
        made = zip(draws, versions, strict=True)
        return [self._arrays.trajectory(question.uid, number, *one) for number, one in enumerate(made)]

    async def _place(self, key: str) -> Member:
        placed: asyncio.Future[Member] = self._loop.create_future()
        self._queue.append((key, placed))
        self._assign()
        try:
            return await placed
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled():
                self._router.release(key)
                self._assign()
            raise

    def _assign(self) -> None:
        while self._open and self._queue:
            key, placed = self._queue[0]
            if placed.done():
                self._queue.popleft()
                continue
            member = self._router.assign(key, self._samples)
            if member is None:
                return
            self._queue.popleft()
            placed.set_result(member)

    async def _generate(self, number: int, draws: Sequence[EpisodeDraw]) -> list[int]:
        """Play the episodes on engine `number`; return the version of each one's first token."""
        engine, slots = self.engines[number], self._slots[number]
        begun, ended = self._loop.time(), self._loop.create_future()
        prefix = Prefix(draws[0].prompt, len(draws))
        left = [len(draws)]
        timers: dict[_Episode, asyncio.TimerHandle] = {}

        def play(episode: _Episode) -> None:
            timers.pop(episode, None)
            request, turn = episode.request, episode.draw.turns[episode.turn]
            request.left = turn.generated
            engine.submit(request)

        def end_turn(episode: _Episode, _: Request) -> None:
            turn = episode.draw.turns[episode.turn]
            episode.turn += 1
            if episode.turn < len(episode.draw.turns):
                episode.request.new = turn.observation
                at = self._server.answered_at(self._loop.time(), turn.tool_s)
                timers[episode] = self._loop.call_at(at, play, episode)
                return
            engine.leave(episode.request)
            slots.end(episode)
            self._leaves(begun)
            left[0] -= 1
            if not left[0] and not ended.done():
                ended.set_result(None)

        self._fly(len(draws))
        episodes: list[_Episode] = []
        for draw in draws:
            request = Request(prefix, ended=lambda _: None)
            episodes.append(_Episode(request, draw))
            request.ended = partial(end_turn, episodes[-1])
            slots.begin(episodes[-1], play)
        try:
            await ended
        except asyncio.CancelledError:
            for timer in timers.values():
                timer.cancel()
            for episode in episodes:
                if not episode.request.left_engine:
                    engine.cancel(episode.request)
                    self._leaves(begun)
            for episode in episodes:  # Only now: none of them must take the slot of another.
                slots.end(episode)
            raise
        return [episode.request.version for episode in episodes]

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """Return nothing: a simulated run is not saved."""
        return {}

    async def open_transport(self, specs: Mapping[int, Any]) -> None:
        """Do nothing: the links are there."""

    async def begin_update(self, version: int) -> None:
        """Do nothing: engines stage beside their work."""

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Receive and stage one bucket."""
        await asyncio.sleep(handle.nbytes * self._costs.sync.engine_s)

    async def finish_update(self, version: int, digest: str) -> None:  # noqa: ARG002
        """Switch all engines to `version`, with the groups in flight as `trainer.schedule.on_update` says."""
        if self._finishes:
            self._open = False
            while self._groups:
                self._idle.clear()
                await self._idle.wait()
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self._costs.sync.activate_s)
        for engine in self.engines:
            engine.resume(version, self._costs.sync.keeps_cache)
        self._open = True
        self._assign()

    async def offload(self) -> None:
        """Leave the devices; the cache is lost."""
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self._costs.switches["rollout"][0])

    async def restore(self) -> None:
        """Come back to the devices."""
        await asyncio.sleep(self._costs.switches["rollout"][1])
        for engine in self.engines:
            engine.resume(engine.version)


class SimulatedGroup:
    """Megatron group: calls take turns, each as long as its micro-batches need."""

    def __init__(
        self,
        name: str,
        costs: Costs,
        sharder: BatchSharder,
        tracer: Tracer,
        turn: asyncio.Lock,
        cores: SharedCores,
    ) -> None:
        """`turn` is shared by the groups on the same devices."""
        self.name, self.busy_s = name, 0.0
        self.operations = 0.0
        """Operations that the model needed, without recomputation."""
        self._scored = 0
        self._scoring = (0, 0.0, 0.0)
        """Tokens, begin and seconds of the scoring that is under way."""
        self.workers: Any = SimpleNamespace(name=name, ranks=[SimpleNamespace(name=name)])
        self.living: Mapping[int, None] = {0: None}
        self._costs, self._sharder, self._tracer = costs, sharder, tracer
        self._turn, self._cores = turn, cores

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        """Return True if a call with `samples` keeps every rank and pipeline stage busy."""
        return self._sharder.fills_micro_batches(samples)

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> Sequence[Floats] | None:  # noqa: ARG002
        """Add the gradient of `samples`."""
        call = self._costs.calls[self.name]
        sizes = sizes_of(samples)
        self.operations += 3 * sum(call.flops.of(*size) for size in sizes)
        await self._work("train.accumulate", call.seconds(self._sharder.plan_sizes(sizes), sizes))
        return None

    async def apply(self) -> Mapping[str, float]:
        """Take one optimiser step."""
        await self._work("train.apply", self._costs.calls[self.name].apply_s)
        return {}

    async def score(self, call: CallCosts, span: str, samples: Sequence[Sample]) -> None:
        """Compute log-probs or values of `samples`."""
        sizes = sizes_of(samples)
        scored = sum(size.tokens for size in sizes)
        await self._work(span, call.seconds(self._sharder.plan_sizes(sizes), sizes), scored)

    @property
    def scored(self) -> float:
        """Tokens of the samples that have been scored up to now."""
        tokens, begun, seconds = self._scoring
        passed = asyncio.get_running_loop().time() - begun
        return self._scored + tokens * min(1.0, passed / seconds if seconds else 0.0)

    async def _work(self, span: str, seconds: float, scored: int = 0) -> None:
        async with self._turn:
            begun = asyncio.get_running_loop().time()
            self._scoring = scored, begun, seconds
            with self._tracer.span(span):
                await self._cores.work(self, self.name, seconds)
            self._scored, self._scoring = self._scored + scored, (0, 0.0, 0.0)
            self.busy_s += asyncio.get_running_loop().time() - begun

    async def open_transport(self, specs: Mapping[int, Any]) -> None:
        """Do nothing: the links are there."""

    async def begin_update(self, version: int) -> None:  # noqa: ARG002
        """Block until running computations end."""
        await self._turn.acquire()

    async def load_bucket(self, handle: BucketHandle) -> None:
        await asyncio.sleep(handle.nbytes * self._costs.sync.inference_s)

    async def finish_update(self, version: int, digest: str) -> None:  # noqa: ARG002
        """Let computations begin again."""
        self._turn.release()


def sizes_of(samples: Sequence[Sample]) -> list[SampleSize]:
    """Return the sizes of simulated samples."""
    return [SampleSize(len(one.trajectory.tokens), int(one.trajectory.loss_mask.sum())) for one in samples]


@dataclass(frozen=True, slots=True)
class SimulatedScorer:
    """Computes log-probs and values; implements `SampleScorer`."""

    costs: Costs
    members: Mapping[str, SimulatedGroup]
    """Worker group -> its simulation, for the groups that score."""

    @property
    def groups(self) -> Sequence[str]:
        """Worker groups that must be on the devices for `compute`."""
        return [*self.members]

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Wait for the scores of `samples`."""
        calls: list[Awaitable[None]] = []
        for name, group in self.members.items():
            kind, span = ("values", "values.compute") if name == "critic" else (name, "logprob.compute")
            calls.append(group.score(self.costs.calls[kind], span, samples))
        await asyncio.gather(*calls)
        return [Scores() for _ in samples]


class SimulatedSender:
    """The actor's part of a weight sync: gathers one bucket after the other."""

    name, driver_host = "actor", ""

    def __init__(self, costs: Costs, bucket_bytes: int) -> None:
        self.ranks = [SimpleNamespace(name="actor rank 0")]
        self._costs, self._bucket_bytes = costs, bucket_bytes
        self._left = 0.0

    async def call(self, method: str, *_: Any, **_limits: Any) -> list[Any]:
        """Answer the calls of `WeightSync`."""
        if method == "begin_export":
            self._left = self._costs.sync.nbytes
        elif method == "next_handle":
            return [await self._next()]
        return [{"open_export": 1.0, "end_export": ""}.get(method)]

    async def _next(self) -> BucketHandle | None:
        nbytes = int(min(self._left, self._bucket_bytes))
        if nbytes < 1:
            return None
        self._left -= nbytes
        await asyncio.sleep(nbytes * self._costs.sync.gather_s)
        return BucketHandle(0, (), nbytes, None)


Switch = Callable[[], Awaitable[None]]


def switch_of(costs: Costs, group: str) -> tuple[Switch, Switch]:
    """Return the functions that take a colocated Megatron group off its devices and bring it back."""
    away, back = costs.switches[group]
    return partial(asyncio.sleep, away), partial(asyncio.sleep, back)
