"""One step of training with scripted workers: the real stages and channels under a virtual clock.

The workers sleep for seeded durations and write down what they are asked; `Watched` channels write down
who waited for what. `check` holds the invariants of the pipeline against that record.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlsys.agent.trajectory import Trajectory
from rlsys.data.question import Question
from rlsys.pipeline.channel import Channel
from rlsys.pipeline.group import Group, Sample
from rlsys.pipeline.stages import Floats, generate, learn, recompute
from tests.pipeline.build import question, trajectory
from tests.pipeline.virtual_time import now

INSTANT = 1e-6


class WorkerError(Exception):
    """A scripted worker's failure."""


@dataclass
class Script:
    """A step: its size, and how long each call of a worker takes."""

    questions: int
    samples: int
    runners: int
    capacity: int
    groups_per_update: int
    generate_s: Callable[[int], float]
    score_s: Callable[[int], float]
    train_s: Callable[[int], float]
    apply_s: float = 0.0
    fails: tuple[str, int] | None = None
    """(worker, the number of the call that fails)"""

    @classmethod
    def seeded(cls, seed: int) -> Script:
        """Any step of up to 12 questions; many durations are equal or nought."""
        rng = random.Random(seed)

        def durations(scale: float) -> Callable[[int], float]:
            return lambda _: rng.choice([0.0, scale, rng.random() * scale])

        scale = [rng.choice([0.1, 1, 10]) for _ in range(3)]
        return cls(
            questions=rng.randint(1, 12),
            samples=rng.randint(1, 3),
            runners=rng.randint(1, 5),
            capacity=rng.randint(1, 4),
            groups_per_update=rng.randint(1, 6),
            generate_s=durations(scale[0]),
            score_s=durations(scale[1]),
            train_s=durations(scale[2]),
            apply_s=rng.choice([0.0, 1.0]),
        )


@dataclass
class Record:
    """What happened."""

    started: list[str] = field(default_factory=list)
    """Questions whose episodes were begun."""
    finished_at: list[float] = field(default_factory=list)
    generating: int = 0
    most_generating: int = 0
    scored: list[tuple[str, int]] = field(default_factory=list)
    trained: list[tuple[str, int]] = field(default_factory=list)
    trained_at: list[float] = field(default_factory=list)
    between_updates: list[int] = field(default_factory=list)
    """Samples accumulated for each optimiser step."""
    problems: list[str] = field(default_factory=list)


class Watched(Channel[Group]):
    """Writes down every breach of the channel's promises, and every needless wait."""

    def __init__(self, name: str, capacity: int, record: Record) -> None:
        super().__init__(name, capacity)
        self._record = record
        self._put_at: dict[str, float] = {}
        self.taken = 0

    async def put(self, item: Group) -> None:
        self._put_at[item.question.uid] = now()
        await super().put(item)
        if len(self) > self.capacity:
            self._record.problems.append(f"{self.name} holds {len(self)} of {self.capacity}")

    async def get_some(self, most: int) -> list[Group]:
        idle_since = now()
        taken = await self._take(most)
        self.taken += len(taken)
        available = max(idle_since, self._put_at[taken[0].question.uid])
        if now() > available + INSTANT:
            self._record.problems.append(f"{self.name} kept its reader waiting for {now() - available} s")
        return taken

    async def _take(self, most: int) -> list[Group]:
        return await super().get_some(most)


class Workers:
    """Generator, scorer and learner in one, as the script has it."""

    def __init__(self, script: Script, record: Record) -> None:
        self.script, self.record = script, record
        self.capacity = script.runners
        self._calls: Counter[str] = Counter()
        self._accumulated = 0

    def _fail_if_due(self, worker: str) -> None:
        self._calls[worker] += 1
        if self.script.fails == (worker, self._calls[worker]):
            raise WorkerError(worker)

    async def run_group(self, question: Question) -> list[Trajectory]:
        record = self.record
        record.started.append(question.uid)
        record.generating += 1
        record.most_generating = max(record.most_generating, record.generating)
        await asyncio.sleep(self.script.generate_s(len(record.started)))
        self._fail_if_due("generate")
        record.generating -= 1
        record.finished_at.append(now())
        return [trajectory(uid=question.uid, sample=number) for number in range(self.script.samples)]

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        await asyncio.sleep(self.script.score_s(len(samples)))
        self._fail_if_due("score")
        self.record.scored += [identity(sample.trajectory) for sample in samples]
        return [(mark(sample.trajectory), None) for sample in samples]

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        await asyncio.sleep(self.script.train_s(len(samples)))
        self._fail_if_due("train")
        self._accumulated += len(samples)
        self.record.trained += [identity(sample.trajectory) for sample in samples]
        self.record.trained_at.append(now())
        for sample in samples:
            if sample.old_logprobs is None or (sample.old_logprobs != mark(sample.trajectory)).any():
                self.record.problems.append(f"{identity(sample.trajectory)} has another's log-probs")

    async def apply(self) -> Mapping[str, float]:
        await asyncio.sleep(self.script.apply_s)
        self._fail_if_due("apply")
        self.record.between_updates.append(self._accumulated)
        self._accumulated = 0
        return {"update": len(self.record.between_updates)}


def identity(trajectory: Trajectory) -> tuple[str, int]:
    """Which episode of which question."""
    return trajectory.question_uid, trajectory.sample


def mark(trajectory: Trajectory) -> Floats:
    """Log-probs that belong to this episode alone."""
    number = int(trajectory.question_uid.split(":")[1]) * 100 + trajectory.sample
    return np.full(len(trajectory.tokens), -number, dtype=np.float32)


def gather(question: Question, trajectories: Sequence[Trajectory]) -> Group:
    """A group without a judgement."""
    return Group(question, tuple(Sample(one, reward=0.0, advantage=0.0) for one in trajectories))


async def run_step(
    script: Script, channel: type[Watched] = Watched, workers: type[Workers] = Workers
) -> tuple[Record, list[Group], list[Mapping[str, float]]]:
    """The three stages joined by two channels, as the driver runs them, watched all the while."""
    record = Record()
    doing = workers(script, record)
    rolled = channel("rolled", script.capacity, record)
    scored = channel("scored", script.capacity, record)
    questions = [question(number) for number in range(script.questions)]

    def say(_: str) -> None:
        # Finished or not, no more groups may have been begun than runners and the channel can hold.
        ahead = len(record.started) - rolled.taken
        if ahead > script.runners + script.capacity:
            record.problems.append(f"{ahead} groups are ahead of the scorer")

    async with asyncio.TaskGroup() as stages:
        stages.create_task(generate(questions, doing, gather, rolled, say))
        stages.create_task(recompute(rolled, doing, scored, say))
        learned = stages.create_task(learn(scored, doing, script.groups_per_update, say))
    return record, *learned.result()


def check(
    script: Script, record: Record, groups: Sequence[Group], updates: Sequence[Mapping[str, float]]
) -> None:
    """The invariants of a step; AssertionError where one does not hold."""
    uids = [f"q:{number}" for number in range(script.questions)]
    samples = sorted((uid, number) for uid in uids for number in range(script.samples))
    assert record.started == uids, "every question is begun once, in order"
    assert sorted(record.scored) == samples, "every sample is scored once"
    assert sorted(record.trained) == samples, "every sample is trained once"
    assert sorted(group.question.uid for group in groups) == sorted(uids), "every group is returned once"
    whole, rest = divmod(script.questions, script.groups_per_update)
    per_update = [script.groups_per_update] * whole + [rest] * bool(rest)
    assert record.between_updates == [count * script.samples for count in per_update]
    assert [update["update"] for update in updates] == list(range(1, len(per_update) + 1))
    assert record.most_generating <= script.runners
    assert record.problems == []
