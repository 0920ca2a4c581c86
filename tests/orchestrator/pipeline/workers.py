"""Workers of a simulated run, scripted by a seed: engines, rewards, scorer, learners, devices.

Workers sleep for seeded times, of which many are equal or 0 and some are very long. They answer twice, late or never,
die, and take new weights while they generate. They raise `Breach` if a call breaks a property.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Floats, Group, Sample, Scores, Trajectory
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.membership import Members, Router
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, LostReason
from rlsys.orchestrator.worker_groups import OffloadManager
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.tokens import EpisodeProgress, PartialEpisode
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.watched import GROUPS, Property, Record
from tests.support.trajectories import rewarded, trajectory


def number_of(sample: Sample) -> int:
    return int(sample.trajectory.response)


def mark(sample: Sample) -> Floats:
    """Return log-probs from which the sample can be recognised."""
    return np.full(len(sample.trajectory.tokens), -(10 * number_of(sample) + sample.trajectory.sample), np.float32)


@lru_cache(1000)
def whole_episode(uid: str, number: int, sample: int, versions: tuple[int, ...]) -> Trajectory:
    """Return an episode with a sampled token for each of `versions`; its response is the number of its prompt group."""
    finish = Finish.ANSWER if versions else Finish.ABORTED
    of_tokens = (-1, *versions)
    one = trajectory([1] * len(of_tokens), uid=uid, sample=sample, finish=finish, version=of_tokens)
    return replace(one, response=str(number))


def partial_episode(uid: str, sample: int, versions: tuple[int, ...]) -> PartialEpisode:
    sampled = np.array(versions, np.int32)
    nothing, ended = np.full(len(sampled), np.nan, np.float32), np.ones(len(sampled), np.bool_)
    return PartialEpisode(uid, sample, (), sampled, nothing, sampled, ended)


@dataclass(eq=False)
class Engine:
    """Process of one engine, and the groups that it plays."""

    number: int
    version: int = 0
    updating: bool = False
    alive: bool = True
    plays: dict[Play, None] = field(default_factory=dict)
    """Groups in the order in which they began; an ordered set, so that a run can be repeated."""
    held_back: list[Play] = field(default_factory=list)
    staged: str = ""
    """Digest of the weights that it holds beside those in use."""

    @property
    def name(self) -> str:
        return f"rollout rank {self.number}"


@dataclass(eq=False)
class Play:
    """A group that plays on an engine; `versions` has the versions of each turn that was begun on this engine.

    A turn has several versions if the engine switched within it.
    """

    number: int
    question: Question
    engine: Engine
    turns: int
    lengths: Sequence[int]
    """Number of turns of each episode on this engine; 0 if the episode had ended before."""
    before: Mapping[int, EpisodeProgress]
    """Sample -> progress from another engine."""
    key: str = ""
    """Key of the group in the engine pool, if there is one."""
    versions: list[tuple[int, ...]] = field(default_factory=list)
    aborted: bool = False

    def begun(self) -> tuple[EpisodeProgress, ...]:
        """Return the progress of episodes that have ended or completed a turn; the turn begun last is not complete."""
        whole = max(0, len(self.versions) - 1)
        found: list[EpisodeProgress] = []
        for sample, length in enumerate(self.lengths):
            versions = self._versions(sample, whole)
            if sample in self.before and isinstance(self.before[sample], Trajectory):
                found.append(self.before[sample])
            elif whole and whole >= length:
                found.append(whole_episode(self.question.uid, self.number, sample, versions))
            elif versions:
                found.append(partial_episode(self.question.uid, sample, versions))
        return tuple(found)

    def trajectories(self) -> list[Trajectory]:
        """Return all episodes; some end early, and an episode that is aborted at once has no sampled token."""
        return [
            whole_episode(self.question.uid, self.number, sample, self._versions(sample, len(self.versions)))
            for sample in range(len(self.lengths))
        ]

    def _versions(self, sample: int, turns: int) -> tuple[int, ...]:
        """Return the versions of an episode's turns: all on earlier engines, then the first `turns` on this engine."""
        before = self.before[sample].versions.tolist() if sample in self.before else []
        here = self.versions[: min(turns, self.lengths[sample])]
        return (*(version for version in before if version >= 0), *chain.from_iterable(here))


class _Worker:
    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record


class Engines(_Worker):
    """The rollout group: the real router in front of scripted engines."""

    waits_for = ""

    def __init__(self, script: Script, record: Record) -> None:
        super().__init__(script, record)
        self.router = Router(Members.first(script.engines), script.slots)
        self._engines = [Engine(number, record.version) for number in range(script.engines)]
        self._answers: dict[int, asyncio.Future[list[Trajectory]]] = {}
        self._changed = asyncio.Event()

    @property
    def members(self) -> Members:
        return self.router.members

    @property
    def capacity(self) -> int:
        return self.script.room * len(self.members.living)

    async def run_group(
        self, question: Question, number: int, begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """Return all episodes of `question`. A cancelled call may end slowly, or still return its episodes."""
        self.record.begin_group(number, begun)
        play = None
        try:
            self.record.fail_if_due("generate")
            while True:
                play = self._play(number, question, begun, await self._engine_of(str(number)))
                answer = self._answers[number] = asyncio.get_running_loop().create_future()
                self._start(play)
                try:
                    return await answer
                except EngineDied:
                    continue
        except asyncio.CancelledError:
            if play is not None:
                self._end(play)
                if self.script.chance(0.5):
                    await self.script.pause("abort")
                if self.script.chance(0.2):
                    return play.trajectories()
            raise
        finally:
            self.record.end("rollout")
            self._answers.pop(number, None)
            self.router.release(str(number))
            self._changed.set()

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        found: dict[int, tuple[EpisodeProgress, ...]] = {}
        for engine in self._engines:
            await self.script.pause("save")
            said = {play.number: begun for play in engine.plays if (begun := play.begun())}
            self.record.tell(said)
            found |= said
        return found

    async def push(self, version: int) -> None:  # noqa: ARG002
        await self.script.pause("update")

    async def switch(self, version: int) -> None:
        self.router.update(self.router.members.raise_to(version))
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._switch(engine, version))

    def kill(self, number: int) -> None:
        """Kill an engine, the last one only if the script says so. Its groups may still answer, which is too late."""
        members = self.router.members
        if number not in members.of_engine or (len(members.living) == 1 and not self.script.last_may_die):
            return
        orphans = self.router.update(members.remove(members.of_engine[number]))
        for key in orphans.retry:
            self._fail(int(key), EngineDied(f"engine {number}"))
        for key, reason in orphans.lost.items():
            self._fail(int(key), GroupLost(key, LostReason.engine_died, reason))
        self._die(self._engines[number])

    def _die(self, engine: Engine) -> None:
        engine.alive = False
        if self.script.chance(0.5):
            for play in [*engine.plays]:
                self._end(play)
        engine.plays.clear()
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _engine_of(self, key: str) -> Engine:
        await self._until(lambda: self.router.assign(key, self.script.samples) is not None)
        one = self.router.assign(key, self.script.samples)
        assert one is not None
        return self._engines[one.engine]

    def _play(self, number: int, question: Question, begun: Sequence[EpisodeProgress], engine: Engine) -> Play:
        rng = self.script.rng
        turns, before = rng.randint(1, self.script.turns), {one.sample: one for one in begun}
        lengths = [
            0 if isinstance(before.get(sample), Trajectory) else rng.choice([turns, rng.randint(0, turns)])
            for sample in range(self.script.samples)
        ]
        return Play(number, question, engine, turns, lengths, before)

    def _start(self, play: Play) -> None:
        if play.engine.updating:
            play.engine.held_back.append(play)
            return
        play.engine.plays[play] = None
        self._play_turn(play)

    def _play_turn(self, play: Play) -> None:
        if play.aborted:
            return
        if play.engine.updating and self.script.mixed:
            play.engine.held_back.append(play)
            return
        play.versions.append((play.engine.version,))
        then = self._play_turn if len(play.versions) < play.turns else self._deliver
        asyncio.get_running_loop().call_later(self.script.duration_s("roll"), then, play)

    def _deliver(self, play: Play) -> None:
        """Answer the call that runs the group of `play`; of two attempts, the first one to answer counts."""
        if play.aborted:
            return
        self._end(play)
        if play.question.uid in self.script.poisoned:
            self._fail(play.number, GroupLost(play.question.uid, LostReason.timeout, "poisoned"))
        elif play.number in self._answers and not self._answers[play.number].done():
            self._answers[play.number].set_result(play.trajectories())

    def _end(self, play: Play) -> None:
        play.aborted = True
        play.engine.plays.pop(play, None)
        self._changed.set()

    def _fail(self, number: int, error: Exception) -> None:
        if number in self._answers and not self._answers[number].done():
            self._answers[number].set_exception(error)

    async def _switch(self, engine: Engine, version: int) -> None:
        if await self._take_version(engine, version):
            members = self.router.members
            self.router.update(members.switched(members.of_engine[engine.number], version))
            self._changed.set()

    async def _take_version(self, engine: Engine, version: int) -> bool:
        await self.script.pause("close")
        if not engine.alive:
            return False
        engine.updating = True
        if not self.script.mixed:
            await self._until(lambda: not engine.plays)
        await self.script.pause("update")
        if not engine.alive:
            return False
        engine.version, engine.updating = version, False
        held_back, engine.held_back = engine.held_back, []
        for play in [
            one for one in engine.plays if one not in held_back
        ]:  # Only if episodes continue; their turns do too.
            play.versions[-1] += (version,)
        for play in held_back:
            self._start(play)
        return True


class Scorer(_Worker):
    """The inference group and, in runs with a critic, the critic."""

    @property
    def groups(self) -> Sequence[str]:
        return ("inference", "critic") if self.script.critic else ("inference",)

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return log-probs and values from which each sample can be recognised."""
        self.record.begin("inference")
        self.record.hold(Property.unschedulable, samples, "the scorer is called for nothing")
        for sample in samples:
            self.record.ask(number_of(sample), sample.trajectory.sample)
        await self.script.pause("score")
        self.record.fail_if_due("score")
        self.record.end("inference")
        return [Scores(mark(one), values=-mark(one) if self.script.critic else None) for one in samples]


class Learner:
    def __init__(self, name: str, script: Script, record: Record) -> None:
        self.name, self.script, self.record = name, script, record

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        return len(samples) >= self.script.fills_micro_batches

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:  # noqa: ARG002
        self.record.begin(self.name)
        for sample in samples:
            number, one = number_of(sample), sample.trajectory
            own = np.array_equal(sample.old_logprobs, mark(sample)) and sample.weights is not None
            if self.script.critic:
                own = own and np.array_equal(sample.values, -mark(sample))
            self.record.hold(Property.own, own, f"{number} has no scores or weights, or another's")
            versions = one.versions[one.loss_mask].tolist()
            split = len({*versions}) > 1 and number not in self.record.gone_on
            self.record.hold(Property.update, self.script.mixed or not split, f"{number} is split")
            self.record.train(self.name, number, one.sample, versions)
        await self.script.pause("train")
        self.record.fail_if_due("train")
        self.record.end(self.name)

    async def apply(self) -> Mapping[str, float]:
        self.record.begin(self.name)
        await self.script.pause("apply")
        self.record.fail_if_due("apply")
        self.record.end(self.name)
        self.record.update(self.name)
        return {"loss": 0.0}


class Devices:
    """Devices with room for all worker groups; in sequential runs, the real offload manager for fewer devices."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record
        self.pending: Counter[str] = Counter()
        self._offload = None
        if script.sequential:
            members = {name: (partial(self._leave, name), self._enter) for name in GROUPS}
            self._offload = OffloadManager(members, Tracer("devices", clock=lambda: 0))
            record.resident = lambda: self._offload.ready

    async def onload(self, *groups: str) -> None:
        self.record.fail_if_due("need")
        self.pending.update(groups)
        if self._offload:
            await self._offload.onload(*groups)
        elif self.script.chance(0.1):
            await self.script.pause("devices")
        self.pending.subtract(groups)

    async def _leave(self, name: str) -> None:
        self.record.leave(name)
        await self.script.pause("devices")

    async def _enter(self) -> None:
        await self.script.pause("devices")


class Handling(_Worker):
    async def reward(self, question: Question, trajectories: Sequence[Trajectory]) -> Group:
        """Reward episodes; in some groups all rewards are equal. May take long; a cancelled call may end slowly."""
        flat = self.script.chance(self.script.flat)
        samples = tuple(rewarded(one, 0.0 if flat else float(one.sample)) for one in trajectories)
        with self.record.rewarding(number_of(samples[0]), trajectories):
            try:
                await self.script.pause("reward")
            except asyncio.CancelledError:
                if self.script.chance(0.5):
                    await self.script.pause("abort")
                if self.script.chance(0.8):
                    raise
            self.record.fail_if_due("reward")
        return Group(question, samples)

    def finish(self, group: Group) -> Group:
        self.record.fail_if_due("finish")
        self.record.offered.add(number_of(group.samples[0]))
        return replace(
            group, samples=tuple(replace(one, weights=np.ones_like(one.advantages)) for one in group.samples)
        )
