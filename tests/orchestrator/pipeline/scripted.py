"""Workers that a seed scripts, for simulations of the pipeline: engines, rewards, scorer, learners, devices.

They sleep for seeded times, many of them equal or nought, and some very long; answer twice, late or never;
die, and take new weights in while they generate. What they see that must not be raises `Breach`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import Router
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, Loss
from rlsys.orchestrator.worker_groups import OffloadManager
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.scripted_episodes import mark, ones, partial_episode, ticket_of, whole_episode
from tests.orchestrator.pipeline.watched import GROUPS, Property, Record
from tests.support.trajectories import rewarded


class Signal:
    """Something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Tell all who wait."""
        self._event.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it."""
        while not holds():
            self._event.clear()
            await self._event.wait()


@dataclass(eq=False)
class _Engine:
    number: int
    version: int = 0
    updating: bool = False
    alive: bool = True
    plays: set[_Play] = field(default_factory=set)
    held_back: list[_Play] = field(default_factory=list)


@dataclass(eq=False)
class _Play:
    """A group on an engine; `versions` are those of the turns that it has begun here."""

    prompt_group: int
    question: Question
    engine: _Engine
    turns: int
    lengths: Sequence[int]
    """Turns of each episode here; one that had ended before has none."""
    before: Mapping[int, EpisodeProgress]
    """Sample -> what was begun of it elsewhere."""
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    def begun(self) -> tuple[EpisodeProgress, ...]:
        """Episodes that have ended or have whole turns; the last turn is under way."""
        whole = max(0, len(self.versions) - 1)
        found: list[EpisodeProgress] = []
        for sample, length in enumerate(self.lengths):
            versions = self._versions(sample, whole)
            if sample in self.before and isinstance(self.before[sample], Trajectory):
                found.append(self.before[sample])
            elif whole and whole >= length:
                found.append(whole_episode(self.question.uid, self.prompt_group, sample, versions))
            elif versions:
                found.append(partial_episode(self.question.uid, sample, versions))
        return tuple(found)

    def trajectories(self) -> list[Trajectory]:
        """Some episodes end early; one that is aborted at once has no token that was sampled."""
        return [
            whole_episode(self.question.uid, self.prompt_group, sample, self._versions(sample, len(self.versions)))
            for sample in range(len(self.lengths))
        ]

    def _versions(self, sample: int, turns: int) -> tuple[int, ...]:
        """Those of an episode's turns, the earlier ones elsewhere, then the first `turns` here."""
        before = self.before[sample].versions if sample in self.before else np.zeros(0, np.int32)
        here = self.versions[: min(turns, self.lengths[sample])]
        return (*before[before >= 0].tolist(), *here)


class Engines:
    """The rollout group: the real router over scripted engines."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record
        self.waits_for = ""
        self.router = Router(script.engines, script.slots)
        self._engines = [_Engine(number, record.version) for number in range(script.engines)]
        self._answers: dict[int, asyncio.Future[list[Trajectory]]] = {}
        self._changed = Signal()

    @property
    def capacity(self) -> int:
        """Groups that the living engines have room for."""
        return max(1, self.script.slots // self.script.samples) * len(self.router.living)

    async def run_group(
        self, question: Question, prompt_group: int, begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """All episodes of `question`. May wind down slowly if cancelled, or return its answer all the same."""
        self.record.begin_group(prompt_group, begun)
        play = None
        try:
            self.record.fail_if_due("generate")
            while True:
                play = self._play(prompt_group, question, begun, await self._engine_of(str(prompt_group)))
                answer = self._answers[prompt_group] = asyncio.get_running_loop().create_future()
                self._start(play)
                try:
                    return await answer
                except EngineDied:
                    continue
        except asyncio.CancelledError:
            if play is not None:
                self._end(play)
                if self.script.rng.random() < 0.5:
                    await self.script.pause("abort")
                if self.script.rng.random() < 0.2:
                    return play.trajectories()
            raise
        finally:
            self.record.end("rollout")
            self._answers.pop(prompt_group, None)
            self.router.release(str(prompt_group))
            self._changed.set()

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """Each engine is asked in its turn."""
        found: dict[int, tuple[EpisodeProgress, ...]] = {}
        for engine in self._engines:
            await self.script.pause("save")
            here = {play.prompt_group: play.begun() for play in engine.plays}
            said = {prompt_group: begun for prompt_group, begun in here.items() if begun}
            self.record.tell(said)
            found |= said
        return found

    async def switch(self, version: int) -> None:
        """Every engine takes `version`, each at its own time."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._switch(engine, version))

    def kill(self, number: int) -> None:
        """An engine dies, unless it is the last. Its groups may have gone on to an answer that comes late."""
        if len(self.router.living) == 1 or number not in self.router.living:
            return
        engine = self._engines[number]
        engine.alive = False
        orphans = self.router.died(number)
        for key in orphans.again:
            self._fail(int(key), EngineDied(f"engine {number}"))
        for key, reason in orphans.lost.items():
            self._fail(int(key), GroupLost(key, Loss.engine_died, reason))
        if self.script.rng.random() < 0.5:
            for play in [*engine.plays]:
                self._end(play)
        engine.plays.clear()
        self._changed.set()

    async def _engine_of(self, key: str) -> _Engine:
        assigned: list[int] = []

        def has_turn() -> bool:
            number = self.router.assign(key, self.script.samples)
            assigned.extend([] if number is None else [number])
            return bool(assigned)

        await self._changed.until(has_turn)
        return self._engines[assigned[0]]

    def _play(self, prompt_group: int, question: Question, begun: Sequence[EpisodeProgress], engine: _Engine) -> _Play:
        rng = self.script.rng
        turns, before = rng.randint(1, self.script.turns), {one.sample: one for one in begun}
        lengths = [
            0 if isinstance(before.get(sample), Trajectory) else rng.choice([turns, rng.randint(0, turns)])
            for sample in range(self.script.samples)
        ]
        return _Play(prompt_group, question, engine, turns, lengths, before)

    def _start(self, play: _Play) -> None:
        if play.engine.updating:
            play.engine.held_back.append(play)
            return
        play.engine.plays.add(play)
        self._play_turn(play)

    def _play_turn(self, play: _Play) -> None:
        if play.aborted:
            return
        if play.engine.updating and self.script.mixed:
            play.engine.held_back.append(play)
            return
        play.versions.append(play.engine.version)
        go_on = self._play_turn if len(play.versions) < play.turns else self._deliver
        asyncio.get_running_loop().call_later(self.script.duration_s("roll"), go_on, play)

    def _deliver(self, play: _Play) -> None:
        """The answer of `play` to whoever waits for its key now: of two tries, the first to answer is heard."""
        if play.aborted:
            return
        self._end(play)
        answer = self._answers.get(play.prompt_group)
        if answer is None or answer.done():
            self.record.late_answers += 1
        elif play.question.uid in self.script.poisoned:
            self._fail(play.prompt_group, GroupLost(play.question.uid, Loss.timeout, "poisoned"))
        else:
            answer.set_result(play.trajectories())

    def _end(self, play: _Play) -> None:
        play.aborted = True
        play.engine.plays.discard(play)
        self._changed.set()

    def _fail(self, prompt_group: int, error: Exception) -> None:
        if prompt_group in self._answers and not self._answers[prompt_group].done():
            self._answers[prompt_group].set_exception(error)

    async def _switch(self, engine: _Engine, version: int) -> None:
        await self.script.pause("update")
        if not engine.alive:
            return
        self.router.close(engine.number)
        engine.updating = True
        if not self.script.mixed:
            await self._changed.until(lambda: not engine.plays)
        await self.script.pause("update")
        if not engine.alive:
            return
        engine.version, engine.updating = version, False
        self.router.reopen(engine.number)
        held_back, engine.held_back = engine.held_back, []
        for play in held_back:
            self._start(play)
        self._changed.set()


class Scorer:
    """The inference group, and the critic where there is one."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record
        self.groups = ("inference", "critic") if script.critic else ("inference",)

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Log-probs and values that belong to each sample alone."""
        self.record.begin("inference")
        if not samples:
            raise self.record.breach(Property.unschedulable, "the scorer is called for nothing")
        for sample in samples:
            self.record.ask(ticket_of(sample), sample.trajectory.sample)
        await self.script.pause("score", len(samples))
        self.record.fail_if_due("score")
        self.record.end("inference")
        return [Scores(mark(one), values=-mark(one) if self.script.critic else None) for one in samples]


class Learner:
    """The actor, or the critic."""

    def __init__(self, name: str, script: Script, record: Record) -> None:
        self.name, self.script, self.record = name, script, record

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Some number of samples."""
        return len(samples) >= self.script.enough

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:  # noqa: ARG002
        """Check everything about samples that are trained."""
        self.record.begin(self.name)
        for sample in samples:
            own = sample.old_logprobs is not None and np.array_equal(sample.old_logprobs, mark(sample))
            if self.script.critic:
                own = own and sample.values is not None and np.array_equal(sample.values, -mark(sample))
            if not own or sample.weights is None:
                raise self.record.breach(
                    Property.own, f"ticket {ticket_of(sample)} has no scores or weights, or another's"
                )
            trajectory = sample.trajectory
            versions = [int(version) for version in trajectory.versions[trajectory.loss_mask]]
            finished = len(set(versions)) <= 1 or ticket_of(sample) in self.record.gone_on
            if not self.script.mixed and not finished:
                raise self.record.breach(Property.update, f"ticket {ticket_of(sample)} was not finished on its version")
            self.record.train(self.name, ticket_of(sample), trajectory.sample, versions)
        await self.script.pause("train", len(samples))
        self.record.fail_if_due("train")
        self.record.end(self.name)

    async def apply(self) -> Mapping[str, float]:
        """One optimiser step."""
        self.record.begin(self.name)
        await self.script.pause("apply")
        self.record.fail_if_due("apply")
        self.record.end(self.name)
        self.record.update(self.name)
        return {"loss": 0.0}


class Devices:
    """Enough for all groups; it may take a while to see that."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record
        self.pending: Counter[str] = Counter()
        """Groups that are waited for."""

    async def need(self, *groups: str) -> None:
        """Bring `groups` in."""
        self.record.fail_if_due("need")
        self.pending.update(groups)
        await self._bring_in(*groups)
        self.pending.subtract(groups)

    async def _bring_in(self, *_: str) -> None:
        if self.script.rng.random() < 0.1:
            await self.script.pause("devices")


class SharedDevices(Devices):
    """The real residence over devices that hold the groups in turn."""

    def __init__(self, script: Script, record: Record) -> None:
        super().__init__(script, record)
        members = {name: (partial(self._leave, name), partial(self._enter, name)) for name in GROUPS}
        self._residence = OffloadManager(members, Tracer("devices", clock=lambda: 0))
        record.resident = lambda: self._residence.ready

    async def _bring_in(self, *groups: str) -> None:
        await self._residence.need(*groups)

    async def _leave(self, name: str) -> None:
        self.record.leave(name)
        await self.script.pause("devices")

    async def _enter(self, _: str) -> None:
        await self.script.pause("devices")


class Handling:
    """The handling of groups between the stages."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record

    async def reward(self, question: Question, trajectories: Sequence[Trajectory]) -> Group:
        """Rewards, which are all equal in some groups. May take long, and wind down slowly if cancelled."""
        flat = self.script.rng.random() < self.script.flat
        samples = tuple(rewarded(one, 0.0 if flat else float(one.sample)) for one in trajectories)
        with self.record.rewarding(ticket_of(samples[0]), trajectories):
            try:
                await self.script.pause("reward")
            except asyncio.CancelledError:
                if self.script.rng.random() < 0.5:
                    await self.script.pause("abort")
                if self.script.rng.random() < 0.8:
                    raise
            self.record.fail_if_due("reward")
        return Group(question, samples)

    def finish(self, group: Group) -> Group:
        """Weights of 1."""
        self.record.fail_if_due("finish")
        self.record.offer(ticket_of(group.samples[0]))
        return replace(group, samples=tuple(replace(one, weights=ones(one)) for one in group.samples))
