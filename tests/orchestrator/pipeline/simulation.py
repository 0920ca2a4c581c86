"""Whole runs of the pipeline under a virtual clock: real scheduler, pipeline, learner's loop, prompt source and router.

`simulate(seed)` scripts the workers by the seed (`workers`), drives the run as the driver does, and checks the
properties (`watched.Property`); it raises `Breach` if one does not hold. `simulate_lives(seed)` saves the run between
two steps, kills it at that moment or later, and resumes it from the saved state, once or twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from rlsys.apps.planner.virtual_time import EndlessError, HangError, run_virtually
from rlsys.config.schema import CurriculumConfig, SourceConfig, TaskConfig
from rlsys.data.prompt_source import PromptSource, SourceState
from rlsys.errors import root_cause
from rlsys.observe import status
from rlsys.orchestrator.membership import NoEngineLeft
from rlsys.orchestrator.pipeline.rollout_pipeline import (
    MAX_LOSSES,
    Handlers,
    PipelineState,
    RolloutPipeline,
    ScoreBatchSize,
)
from rlsys.orchestrator.pipeline.scheduler import DropReason, StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from tests.orchestrator.pipeline.pooled import PooledEngines
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.watched import LEARNERS, Breach, Failure, Property, Record, watched
from tests.orchestrator.pipeline.workers import Devices, Engines, Handling, Learner, Scorer
from tests.support.trajectories import question

MOST_TURNS = 20_000
"""Limit of the event loop's turns. A typical run takes some hundred; the longest of 3,000 seeds took a thousand."""


@dataclass(frozen=True)
class Parts:
    """Classes that a run is built from; a planted bug replaces one of them."""

    scheduler: type[StalenessScheduler] = StalenessScheduler
    pipeline: type[RolloutPipeline] = RolloutPipeline
    prompts: type[PromptSource] = PromptSource


@dataclass(frozen=True)
class Moment:
    """Moment at which a run is saved, and the delay after which it is killed."""

    steps: int
    """Number of steps closed before the save."""
    published: bool
    """True if the save comes after the new version is sent to the engines."""
    killed_after_s: float
    """Seconds between the save and the kill; the run may end before the kill."""


@dataclass(frozen=True)
class State:
    """State of a run as a checkpoint holds it."""

    pipeline: PipelineState
    prompts: SourceState


@dataclass(frozen=True)
class Saved:
    """Parts of a killed run that remain: the saved state, and the record up to the save."""

    state: State
    record: Record


def task_of(script: Script) -> TaskConfig:
    """Return the task: without sources, or with two, whose weights change if the window is short."""
    if not script.two_sources:
        return TaskConfig()
    sources = {"few": SourceConfig(pass_reward=1.0), "many": SourceConfig(weight=1.5, pass_reward=1.0)}
    return TaskConfig(
        sources=sources, curriculum=CurriculumConfig(easy_threshold=0.5, window=10**6 if script.seed % 2 else 2)
    )


class Simulation:
    """A run that begins anew or from the state that an earlier life saved, and that ends or is killed."""

    def __init__(self, script: Script, parts: Parts, saved: Saved | None = None, moment: Moment | None = None) -> None:
        self.script = script
        self.record = record = saved.record.resumed() if saved else Record(script)
        self.saved: Saved | None = None
        """State that this life has saved; None before its save."""
        self._moment, self._killed = moment, False
        self.ended_early = False
        """True if the run ended because no engine was left."""
        names = [*task.sources] if (task := task_of(script)).sources else [""]
        self.questions = [
            replace(question(number), source=names[number % len(names)]) for number in range(script.questions)
        ]
        self.prompts = parts.prompts(self.questions, 0, saved.state.prompts if saved else None, task)
        self.engines = PooledEngines(script, record) if script.pooled else Engines(script, record)
        self.learners = {name: Learner(name, script, record) for name in LEARNERS}
        self.devices = Devices(script, record)
        self.scheduler = watched(parts.scheduler)(
            script.groups_per_step,
            script.max_staleness,
            script.oversample,
            script.max_replaced,
            script.steps if script.knows_end else None,
            script.max_wait,
            script.policy,
        )
        self.scheduler.record = record
        handling = Handling(script, record)
        self.pipeline = parts.pipeline(
            self.scheduler,
            self.prompts,
            self.engines,
            Scorer(script, record),
            Handlers(handling.reward, handling.finish),
            ScoreBatchSize(script.least, script.most),
            self.devices,
            saved.state.pipeline if saved else None,
        )

    def state(self) -> State:
        """Return the state to save, without reports of the engines."""
        return State(self.pipeline.state({}), self.prompts.state())

    async def drive(self) -> None:
        """Drive the run as `rlsys.train` does."""
        script, loop = self.script, asyncio.get_running_loop()
        self._life = asyncio.current_task()
        for time, engine in script.deaths:
            loop.call_at(time, self.engines.kill, engine)
        try:
            async with asyncio.timeout_at(script.end_at if script.ending == "cancel" else None):
                if script.ending == "cancel":
                    loop.call_at(script.end_at, self._give_up)
                with status.reported_to(self.record.states.__setitem__):
                    await self._steps()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if not self._killed:
                raise

    async def _steps(self) -> None:
        script, version = self.script, self.record.version
        cut = MiniBatches(script.sizes, list if script.whole else None)
        async with asyncio.TaskGroup() as background:
            if version > self.scheduler.published:
                self.pipeline.publish(version)
            watching = await self._engines_begin(version, background)
            background.create_task(self._flow())
            if script.ending == "stop":
                asyncio.get_running_loop().call_at(script.end_at, self._stop)
            switched = None
            await self._save_if_due(version, published=True)
            for step in range(version + 1, script.steps + 1):
                learners = {name: self.learners[name] for name in script.learning(step)}
                await learn(self.pipeline, learners, self.devices, cut)
                await self._save_if_due(step, published=False)
                await self.devices.onload("actor", "inference")
                if switched is not None:
                    await switched
                await self.engines.push(step)
                switched = background.create_task(self._switch(step))
                if script.max_staleness == 0:
                    await switched
                await self._save_if_due(step, published=True)
            self._stop()
            if watching:
                watching.cancel()

    async def _engines_begin(self, version: int, background: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Open the engine pool, if there is one, and send its first weights; return the task that starts engines again."""
        if not isinstance(self.engines, PooledEngines):
            return None
        self.engines.open(self.pipeline.wake)
        watching = background.create_task(self.engines.watch())
        await self.engines.push(version)
        await self.engines.switch(version)
        return watching

    async def _save_if_due(self, steps: int, *, published: bool) -> None:
        moment = self._moment
        if self.saved or moment is None or (moment.steps, moment.published) != (steps, published):
            return
        await self.script.pause("save")
        begun = await self.engines.in_flight()
        await self.script.pause("save")
        self.record.told += self.scheduler.ended()
        self.saved = Saved(State(self.pipeline.state(begun), self.prompts.state()), self.record.resumed())
        asyncio.get_running_loop().call_later(moment.killed_after_s, self._kill)

    def _kill(self) -> None:
        """Kill the run: actions of its tasks no longer count."""
        self.record.over = self._killed = True
        self._life.cancel()

    async def _switch(self, version: int) -> None:
        await self.devices.onload("rollout")
        await self.engines.switch(version)
        self.pipeline.publish(version)

    async def _flow(self) -> None:
        try:
            await self.pipeline.run()
        finally:
            self.record.over = True

    def _give_up(self) -> None:
        self.record.over = True

    def _stop(self) -> None:
        self.record.over = True
        self.pipeline.stop()

    def check_idle(self) -> None:
        """Check, whenever all tasks wait for time to pass, that no stage waits although it has work."""
        record, waits = self.record, self.record.states
        if record.over or "rollout" not in waits:  # The pipeline has not begun.
            return
        record.hold(Property.unschedulable, not self.scheduler.unschedulable())
        may_roll = bool(record.again) or self.scheduler.may_admit()
        room = record.running < self.engines.capacity and may_roll
        record.hold(Property.waiting, not room or self.devices.pending["rollout"], "a prompt may be admitted")
        if waits.get("actor") in ("waits for rollouts", "waits for rewards", "waits for log-probs"):
            record.hold(Property.waiting, not record.offered, f"the learner waits for {record.offered}")
        no_more = not record.running and not record.rewarded_now and not may_roll
        enough = len(record.unscored) >= self.script.least or (record.unscored and no_more)
        scorer_waits = waits["inference"] == "waits for rollouts" and not self.devices.pending["inference"]
        record.hold(Property.waiting, not scorer_waits or not enough, f"the scorer waits for {record.unscored}")

    def check_end(self) -> None:
        """Check that every prompt is accounted for at the end of the run."""
        record, script = self.record, self.script
        record.hold(Property.once, not record.open, f"{record.open} are neither trained nor dropped")
        if script.ending == "finish" and not self.ended_early:
            record.hold(Property.step, record.version == script.steps, f"{record.version} steps were closed")
        counted = Counter(reason for _, reason in record.dropped)
        record.hold(Property.once, self.scheduler.dropped == counted, f"counted {self.scheduler.dropped}")
        ended = [(one.number, one.outcome) for one in [*record.told, *self.scheduler.ended()]]
        record.hold(Property.once, ended == [*record.ended.items()], f"the scheduler tells of {ended}")
        state = self.prompts.state()
        asked = self._asked(state)
        found = Counter(one.uid for one in [*record.trained, *state.given_back]) + self._for_good()
        record.hold(Property.conserved, asked == found, f"asked {asked}, found {found}")
        if script.two_sources:
            kept = [*state.uncounted, *chain.from_iterable(source.recent for source in state.sources.values())]
            counted = sorted(count.prompt_group for count in kept)
            every = task_of(script).curriculum.window < len(record.counted) or counted == sorted(record.counted)
            once = len({*counted}) == len(counted) and {*counted} <= record.counted
            record.hold(Property.counted, every and once, f"counted {counted}")

    def _asked(self, state: SourceState) -> Counter[str]:
        """Count the questions handed out for the first time: of each source, as many as its shuffle has given."""
        left = {name: source.position for name, source in state.sources.items()} or {"": state.position}
        fresh, asked = PromptSource(self.questions, seed=0), Counter[str]()
        while any(left.values()):
            one = fresh.next()
            if left[one.source]:
                left[one.source] -= 1
                asked[one.uid] += 1
        return asked

    def _for_good(self) -> Counter[str]:
        """Count dropped prompts that will not be asked again, by question."""
        count: Counter[str] = Counter(one.uid for one, reason in self.record.dropped if reason is DropReason.no_spread)
        losses = Counter(one.uid for one, reason in self.record.dropped if reason is DropReason.lost)
        return count + Counter({uid: max(0, lost - MAX_LOSSES + 1) for uid, lost in losses.items()})


Runner = Callable[[Simulation], None]
"""Runs `Simulation.drive`, and calls `check_idle` whenever all tasks wait."""


def _virtually(simulation: Simulation) -> None:
    run_virtually(simulation.drive(), MOST_TURNS, simulation.check_idle)


def live(simulation: Simulation, runner: Runner = _virtually) -> None:
    """Run the simulation to its end or kill. A failed worker's error must end the run; other errors are raised."""
    script, record = simulation.script, simulation.record
    try:
        runner(simulation)
    except HangError:
        raise Breach(Property.deadlock, f"at step {record.version}") from None
    except EndlessError:
        raise Breach(Property.livelock, f"{MOST_TURNS} turns of the loop") from None
    except ExceptionGroup as group:
        error = record.broken or root_cause(group)
        stopped = script.ending == "stop" and record.over and isinstance(error, RuntimeError)
        if isinstance(error, NoEngineLeft) and not simulation.engines.members.living:
            simulation.ended_early = True
        elif not stopped and not isinstance(error, Failure):
            raise error from None
    else:
        assert not record.failed, "the failure of a worker did not end the run"


def simulate(seed: int, parts: Parts = Parts()) -> Simulation:
    """Run the script of `seed`. Raises Breach."""
    simulation = Simulation(Script.seeded(seed), parts)
    live(simulation)
    simulation.check_end()
    return simulation


def simulate_lives(
    seed: int, parts: Parts = Parts(), through: Callable[[State], State] = lambda state: state
) -> list[Simulation]:
    """Run the script of `seed`, kill the run once or twice, and resume it from `through(state)`; return all its lives.

    The last life may have fewer steps. Raises Breach.
    """
    script, rng = Script.seeded(seed), random.Random(f"lives {seed}")
    script.ending, script.fails = "finish", ("", 0)
    lives: list[Simulation] = []
    saved, done = None, 0
    for _ in range(rng.choice([1, 2])):
        steps = done if rng.random() < 0.3 else rng.randint(done, script.steps)
        delay = rng.choice([0.0, rng.random(), 20 * rng.random()])
        moment = Moment(steps, steps == done or rng.random() < 0.7, delay)
        lives.append(Simulation(script, parts, saved, moment))
        live(lives[-1])
        saved = lives[-1].saved
        assert saved is not None
        saved, done = replace(saved, state=through(saved.state)), saved.record.version
    if rng.random() < 0.5:
        script.steps = min(done + 1, script.steps)
    lives.append(Simulation(script, parts, saved))
    live(lives[-1])
    lives[-1].check_end()
    return lives


def breach_of(live: Callable[[int, Parts], object], seed: int, parts: Parts) -> Property | None:
    """Return the property that breaks in `live(seed, parts)`; None if all hold."""
    try:
        live(seed, parts)
    except Breach as breach:
        return breach.broken
    return None
