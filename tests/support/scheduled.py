"""Runs the real pipeline and real Megatron workers on recorded episodes, under a virtual clock.

Session, step, pipeline, scheduler, sharders, weight sync, actor and log-prob worker are the real ones. Episodes are
played back after seeded waits, and there are seeded waits around every call for log-probs or training. The seed
therefore decides when each prompt group arrives, which groups share a call or a micro-batch, and which calls overlap.
"""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rlsys.algorithms.kl import kl_control
from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.config.derived import scores_with_policy
from rlsys.config.schema import Packing, RunConfig
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Floats, Group, Sample, Scores, Trajectory
from rlsys.observe.guards import Alarm
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.membership import Members
from rlsys.orchestrator.pipeline.grouping import finish
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline
from rlsys.orchestrator.pipeline.scheduler import GroupOutcome
from rlsys.orchestrator.pipeline.training_step import make_scheduler, score_batch_size
from rlsys.orchestrator.resume import RunState
from rlsys.orchestrator.rewards.reward import Rewards, reward_group
from rlsys.orchestrator.run import Groups, Run
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import ActorGroup, InferenceGroup, MegatronGroup, OffloadManager, launch_megatron
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.trainer.batches import BatchSharder, MicroBatch
from rlsys.weights.bucket import unpack
from rlsys.weights.transport import BucketHandle, Receiver, TransportSpec, open_receiver
from tests.support.megatron_processes import Host, HostedGroup
from tests.support.recorded_episodes import Recording

EPISODE_S, CALL_S = 10.0, 2.0
"""Longest wait for a group's episodes, and longest wait before and after a call to a worker."""
WAVE_S = 1000.0
"""Seconds between waves, more than all work on the groups of a mini-batch takes."""
PAD_ID = 0
Pause = Callable[[], Awaitable[None]]
"""Wait before and after a call to a worker."""


@dataclass(frozen=True)
class Arrivals:
    """Order in which a step's prompt groups arrive."""

    seed: int
    waves: tuple[int, ...] | None = None
    """Wave of each prompt of a step, in prompt order; the seed orders the groups within a wave. None means one wave."""


@dataclass
class Outcome:
    """Record of a run."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """Hugging Face name -> parameter after the last step."""
    trained: list[list[str]] = field(default_factory=list)
    """Questions of each step, in the order of training."""
    updates: list[Mapping[str, float]] = field(default_factory=list)
    """Statistics of each optimiser step."""
    samples: dict[tuple[int, str, int], Sample] = field(default_factory=dict)
    """(version that sampled, question, number of the sample) -> trained sample."""
    events: list[str] = field(default_factory=list)
    """Events of each step, in order.

    `r`: a group's episodes have ended, `s`: groups are scored, `t`: groups are trained, `u`: the weights are updated.
    """
    faults: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Takes the step under which `RunLogger` would record faults; these runs have none."""

    def happened(self, event: str) -> None:
        self.events[-1] += event

    def begin_step(self) -> None:
        self.events.append("")

    def step(
        self, _: int, groups: Sequence[Group], updates: Sequence[Mapping[str, float]], _figures: Mapping[str, float]
    ) -> list[Alarm]:
        self.trained.append([group.question.uid for group in groups])
        self.updates += updates
        for sample in (sample for group in groups for sample in group.samples):
            path = sample.trajectory
            self.samples[int(path.versions.max()), path.question_uid, path.sample] = sample
        return []

    async def trajectories(self, _: int, _groups: Sequence[Group]) -> None:
        """See `RunLogger`."""

    def prompts(self, _: int, _ended: Iterable[GroupOutcome]) -> None:
        """See `RunLogger`."""


class Playback:
    """Rollout group of one engine, which holds real weights and returns recorded episodes of its weight version."""

    def __init__(self, config: RunConfig, recording: Recording, arrivals: Arrivals, seen: Outcome) -> None:
        self.workers = SimpleNamespace(ranks=[SimpleNamespace(name="rollout rank 0")], finished=0)
        self.living = {0: None}
        self.engines = SimpleNamespace(members=Members.first(1))
        self.step = 0
        self.waits_for = ""
        self.weights: dict[str, Tensor] = {}
        self._version = -1
        self._recording, self._seen = recording, seen
        self._groups = config.trainer.prompts_per_step
        self._waves = arrivals.waves or (0,) * self._groups
        self._random = random.Random(arrivals.seed)
        self._begun = 0
        # With a capacity below the number of groups, some groups would begin late and arrive after their wave.
        self.capacity = self._groups if arrivals.waves else self._random.randint(3, self._groups)

    async def run_group(
        self, question: Question, _group: int, _progress: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        version = self._version
        place = self._begun % self._groups
        self._begun += 1
        await asyncio.sleep(self._waves[place] * WAVE_S + self._random.random() * EPISODE_S)
        self._seen.happened("r")
        return self._recording[question.uid, version]

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        """Return no partial episodes, as episodes are played back whole."""
        return {}

    async def open_transport(self, specs: Mapping[int, TransportSpec]) -> None:
        self._end: Receiver = open_receiver(specs[0])

    async def begin_update(self, _: int) -> None:
        self.weights = {}

    async def load_bucket(self, handle: BucketHandle) -> None:
        self.weights |= {record.name: one.clone() for record, one in unpack(self._end.receive(handle))}

    async def finish_update(self, version: int, _: str) -> None:
        self._version = version

    async def metrics(self) -> dict[str, float]:
        return {}


class Pauses:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(self) -> None:
        await asyncio.sleep(self._random.random() * CALL_S)


class Local(MegatronGroup):
    """Group of `HostedGroup` processes, to which micro-batches go without Ray's object store, and with waits."""

    def __init__(
        self, workers: HostedGroup, sharder: BatchSharder, tracer: Tracer, pause: Pause, seen: Outcome
    ) -> None:
        super().__init__(workers, sharder, tracer)  # type: ignore[arg-type]
        self._pause, self._seen = pause, seen

    async def call_sharded(self, method: str, batches: Sequence[Sequence[MicroBatch]], *args: Any) -> list[Any]:
        return await self.workers.call_each(method, [(batches[rank], *args) for rank in self._sharder.dp_ranks])


class Scorer(Local, InferenceGroup):
    """Inference group, and the scorer of a run without a critic."""

    groups = ("inference",)

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        await self._pause()
        self._seen.happened("s")
        found = await super().compute(samples)
        await self._pause()
        return found


class Learner(Local, ActorGroup):
    """Actor group that trains."""

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> list[Floats] | None:
        await self._pause()
        self._seen.happened("t")
        found = await super().accumulate(samples, last)
        await self._pause()
        return found

    async def apply(self) -> dict[str, float]:
        await self._pause()
        self._seen.happened("u")
        return await super().apply()


class NoDeaths:
    """Supervisor of played-back episodes, which need no engine, and nobody who asks for one to join or leave."""

    async def run(self, *_: Any) -> None:
        await asyncio.Event().wait()


class NoSearch:
    """Search server that is always available, as recorded episodes do not search."""

    async def check(self) -> None:
        """See `SearchOutages`."""

    async def watch(self) -> None:
        """See `SearchOutages`."""


def run(
    config: RunConfig,
    recording: Recording,
    questions: Sequence[Question],
    arrivals: Arrivals,
    inference: Sequence[Host],
    actor: Sequence[Host],
) -> Outcome:
    """Train like the driver, from the weights at `config.model.path`, in the processes `inference` and `actor`."""
    groups = {"inference": HostedGroup("inference", inference), "actor": HostedGroup("actor", actor)}
    seen = Outcome()

    async def steps() -> None:
        for name, group in groups.items():
            await launch_megatron(group, name, config)  # type: ignore[arg-type]
        rollout, pauses = Playback(config, recording, arrivals, seen), Pauses(arrivals.seed)
        session = assemble(config, questions, groups, rollout, seen, pauses, seen, Tracer("test"), Path())
        await session.weights.push(version=0)
        await session.weights.activate(version=0)
        async with asyncio.TaskGroup() as background:
            background.create_task(session.pipeline.run())
            for step in range(1, config.trainer.steps + 1):
                groups_of_step, updates = await session.train_step(step)
                await session.weights.push(version=step)
                activated = background.create_task(session.weights.activate(version=step))
                if session.on_policy:
                    await activated
                await session.log_step(step, groups_of_step, updates)
            await activated
            session.pipeline.stop()
        seen.weights = rollout.weights

    run_virtually(steps())
    return seen


def assemble(
    config: RunConfig,
    questions: Sequence[Question],
    workers: Mapping[str, Any],
    rollout: Any,
    seen: Outcome,
    pause: Pause,
    log: Any,
    tracer: Tracer,
    run_dir: Path,
    state: RunState | None = None,
    scorer: type[Scorer] = Scorer,
    learner: type[Learner] = Learner,
    sync: type[WeightSync] = WeightSync,
) -> Run:
    """Build a run of real parts around played-back episodes, without an evaluator and a saver."""
    sharders = {name: make_sharder(config, name, len(group.ranks)) for name, group in workers.items()}
    devices, kl = OffloadManager({}, tracer), kl_control(config.algorithm)
    if state:
        kl.restore(state.kl)
    rewards = Rewards(config.reward, config.task, config.compat)
    handlers = Handlers(
        functools.partial(reward_group, score=rewards.score, tracer=Tracer("driver")),
        functools.partial(finish, config=config.algorithm, kl=kl),
    )
    # Its spans are no part of the metrics: a resumed run does not score again what was scored before the checkpoint.
    inference = scorer(workers["inference"], sharders["inference"], Tracer("inference"), pause, seen)
    pipeline = RolloutPipeline(
        make_scheduler(config),
        PromptSource(questions, config.trainer.seed, state.prompts if state else None),
        rollout,
        inference,
        handlers,
        score_batch_size(config),
        devices,
        state.pipeline if state else None,
    )
    follows = [inference] if scores_with_policy(config.algorithm) else []
    none = NoDeaths()
    absent: dict[str, Any] = {
        "search": NoSearch(),
        "supervisor": none,
        "elastic": none,
        "evaluator": None,
        "saver": None,
    }
    return Run(
        config=config,
        log=log,
        groups=Groups(rollout, learner(workers["actor"], sharders["actor"], tracer, pause, seen), devices, inference),
        pipeline=pipeline,
        weights=sync(workers["actor"], [rollout], config.cluster, run_dir, tracer, follows, activated=pipeline.publish),
        rewards=rewards,
        kl=kl,
        questions_sha256={},
        **absent,
    )


def make_sharder(config: RunConfig, name: str, ranks: int) -> BatchSharder:
    settings = config.actor if name == "actor" else config.inference
    return BatchSharder(
        settings.parallel, ranks, settings.micro_batch_tokens, PAD_ID, settings.packing is Packing.packed
    )
