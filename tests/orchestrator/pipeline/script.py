"""Script of a simulated run: sizes, rules, durations and faults, all drawn from a seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from rlsys.orchestrator.pipeline.schedule_policy import EARLIEST_FIRST, CheckedPolicy, ReadyGroup, ScheduleView

WORKERS = ("generate", "reward", "score", "finish", "train", "apply", "need")
STAGES = ("roll", "abort", "reward", "score", "train", "apply", "update", "devices", "save")
SEEDS = 1000
"""Number of seeds in a block; the default suite runs the first block only."""


class AnyPolicy:
    """Answers by a hash of what it is asked: whatever a policy might answer, short of refusing for ever."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def may_admit(self, view: ScheduleView) -> bool:
        return not (view.rolling or view.ready) or crc32(f"{self._seed} {view}".encode()) % 3 > 0

    def priority(self, group: ReadyGroup) -> float:
        return crc32(f"{self._seed} {group.number}".encode()) % 4


ANY_POLICY = f"{__name__}.{AnyPolicy.__name__}"
OF_SCHEDULE = {
    "sequential": ("sequential",),
    "pipelined": ("pipelined",),
    "async": ("async", "bounded_wait", ANY_POLICY),
}
"""Bounds of a schedule, as the seeds have them -> kinds of `trainer.schedule` that are tried with them."""


@dataclass
class Script:
    """Sizes and rules of a run, and the faults that happen in it."""

    rng: random.Random
    seed: int = 0
    sizes: tuple[int, ...] = (2,)
    """Number of groups in each optimiser step of a training step."""
    samples: int = 1
    steps: int = 2
    knows_end: bool = True
    """True if the scheduler knows the number of steps."""
    kind: str = "pipelined"
    """`trainer.schedule.kind`."""
    max_staleness: int = 0
    max_wait: int | None = None
    policy: CheckedPolicy = EARLIEST_FIRST
    oversample: float = 1.0
    max_replaced: int = 0
    whole: bool = False
    mixed: bool = False
    """True for `on_update=continue`: episodes continue with new weights. Otherwise they finish with the old ones."""
    least: float = 1
    most: int = 2
    """Largest number of groups in a score batch; `least` is the smallest."""
    fills_micro_batches: int = 1
    """Number of samples that are worth a call of the learner."""
    questions: int = 5
    two_sources: bool = False
    """True if the questions are of two sources, which have a curriculum."""
    engines: int = 1
    slots: int = 4
    turns: int = 3
    """Largest number of turns in an episode; each turn has the versions that its engine has during the turn."""
    critic: bool = False
    """True if a critic scores beside the inference group and learns beside the actor."""
    warmup: int = 0
    """Steps in which only the critic learns."""
    flat: float = 0.0
    """Share of groups whose rewards are all equal."""
    scale_s: dict[str, float] = field(default_factory=dict)
    """Stage -> typical seconds of a call."""
    deaths: Sequence[tuple[float, int]] = ()
    """(time, engine) of each death."""
    last_may_die: bool = False
    """True if the last engine dies too, which ends the run."""
    pooled: bool = False
    """True for the real engine pool, weight sync and supervisor in front of the engines."""
    restarts: int = 0
    """Engines that are started again, if they are pooled."""
    poisoned: frozenset[str] = frozenset()
    """Questions whose groups are always lost."""
    ending: str = "finish"
    """`finish`, `fail` (a worker fails), `stop` (the pipeline is stopped) or `cancel` (the whole run is cancelled)."""
    end_at: float = 0.0
    """Time at which a run is stopped or cancelled."""
    fails: tuple[str, int] = ("", 0)
    """(worker, n): the n-th call of the worker fails."""

    def learning(self, step: int) -> tuple[str, ...]:
        """Worker groups that learn in `step`, counted from 1."""
        if not self.critic:
            return ("actor",)
        return ("critic",) if step <= self.warmup else ("actor", "critic")

    @property
    def sequential(self) -> bool:
        return self.kind == "sequential"

    def order(self, number: int, oldest: int, ready_since: int) -> tuple[int, ...]:
        """Return the rank of a ready group in the order of training, by the documented rules of the schedule."""
        if self.kind == ANY_POLICY:
            return (crc32(f"{self.seed} {number}".encode()) % 4, oldest)
        if self.max_wait is None:
            return (oldest,)
        return (min(oldest + self.max_staleness, ready_since + self.max_wait), oldest)

    @property
    def groups_per_step(self) -> int:
        return sum(self.sizes)

    @property
    def spare(self) -> int:
        """Number of prompt groups that a step may roll beyond those that it needs."""
        return next(n for n in range(100) if self.groups_per_step + n >= self.oversample * self.groups_per_step)

    @property
    def most_outstanding(self) -> int:
        """Largest number of outstanding prompt groups that the scheduler promises."""
        ahead = self.max_staleness if self.max_wait is None else min(self.max_staleness, self.max_wait)
        return (ahead + 1) * self.groups_per_step + self.spare

    @property
    def room(self) -> int:
        """Number of groups that an engine generates at the same time."""
        return max(1, self.slots // self.samples)

    @classmethod
    def seeded(cls, seed: int) -> Script:
        """Return a random small run."""
        rng = random.Random(seed)
        pick, below = rng.choice, rng.random
        sizes = pick([1, 1, 2]) * (pick([1, 1, 2, 3]),)
        if len(sizes) > 1 and seed % 2:
            sizes = (*sizes[1:], sizes[0] + 1)
        schedule = pick(["sequential", "pipelined", "async", "async", "async"])
        questions, engines, steps = rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 4)
        odd, critic = below() < 0.25, below() < 0.3
        # A generator of its own, so that a seed decides everything else as it does for `async`.
        policies = random.Random(f"policy {seed}")
        kind = policies.choice(OF_SCHEDULE[schedule])
        script = cls(
            rng=rng,
            seed=seed,
            kind=kind,
            sizes=sizes,
            samples=pick([1, 1, 2, 3]),
            steps=steps,
            knows_end=below() < 0.8,
            max_staleness=rng.randint(0, 3) if schedule == "async" else 0,
            oversample=pick([1, 1, 1.25, 1.5, 2]),
            max_replaced=pick([0, 0, 1, 3, 20]),
            whole=below() < 0.3,
            mixed=below() < 0.5,
            least=math.inf if schedule == "sequential" else pick([1, 1, 2, 3]),
            most=sum(sizes) if schedule == "sequential" else rng.randint(1, 4),
            fills_micro_batches=rng.randint(1, 6),
            critic=critic,
            warmup=pick([0, 0, 1]) if critic else 0,
            questions=questions,
            two_sources=seed % 3 == 0 and questions > 1,
            engines=engines,
            slots=rng.randint(1, 8),
            turns=pick([1, 3, 6]),
            flat=pick([0.0, 0.0, 0.3, 0.9]),
            scale_s={stage: pick([0.0, 0.1, 1.0, 1.0, 10.0]) for stage in STAGES},
            deaths=[(10 * below(), rng.randrange(engines)) for _ in range(rng.randint(0, 2 * engines))] if odd else (),
            poisoned=frozenset(f"q:{n}" for n in range(1, questions) if below() < 0.2) if odd else frozenset(),
        )
        if kind == ANY_POLICY:
            script.policy = CheckedPolicy(AnyPolicy(seed), kind)
        if kind == "bounded_wait" or (kind == ANY_POLICY and policies.random() < 0.5):
            script.max_wait = policies.randint(0, script.max_staleness)
        if script.mixed:  # Long episodes, so that some continue through an update.
            script.scale_s["roll"] *= 10
        if below() < 0.15:
            script.ending = pick(["fail", "stop", "cancel"])
            script.end_at = pick([0.0, below(), 20 * below()])
            if script.ending == "fail":
                script.fails = (pick(WORKERS), rng.randint(1, 6))
        return script

    def chance(self, share: float) -> bool:
        """Return True in a random `share` of the calls."""
        return self.rng.random() < share

    def duration_s(self, stage: str) -> float:
        """Return a random number of seconds for one call of `stage`."""
        scale, luck = self.scale_s["update" if stage == "close" else stage], self.rng.random()
        if luck < 0.2:
            return 0.0
        if luck < 0.5:
            return scale
        return 30 * scale if luck > 0.97 else scale * self.rng.random()

    async def pause(self, stage: str) -> None:
        """Wait as long as a call of `stage`; for 0 s, yield to the event loop up to twice."""
        duration_s = self.duration_s(stage)
        if duration_s:
            await asyncio.sleep(duration_s)
            return
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
