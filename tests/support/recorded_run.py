"""Runs the real driver, Megatron workers and checkpoints on recorded episodes, and kills the run at a given moment.

The run trains a few steps with the sequential schedule, which gives the same bits for the same episodes. It saves after
every step and resumes from its newest checkpoint. At the `count`th `moment` after its first checkpoint it kills itself
and all its processes, as if the machine had failed.
"""

import asyncio
import functools
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlsys.algorithms.kl import kl_control
from rlsys.config.algorithm import AlgorithmConfig, KlControl, KlPlace, SampledKl
from rlsys.config.schema import (
    ActorConfig,
    CheckpointConfig,
    ClusterConfig,
    Device,
    Dtype,
    EvalConfig,
    InferenceConfig,
    Layers,
    LrDecay,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SequentialSchedule,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)
from rlsys.data.question import PromptSource, Question
from rlsys.data.trajectory import Floats, Sample, Scores, Trajectory
from rlsys.files import sha256_of
from rlsys.observe.spans import Tracer
from rlsys.observe.status import Progress
from rlsys.orchestrator.evaluator import Evaluator
from rlsys.orchestrator.pipeline.grouping import finish
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline
from rlsys.orchestrator.pipeline.training_step import make_scheduler, score_batch_size
from rlsys.orchestrator.resume import CHECKPOINTS, Origin, find_origin, folder_of
from rlsys.orchestrator.rewards.reward import Rewards, reward_group
from rlsys.orchestrator.run import Groups, Run
from rlsys.orchestrator.run_logger import RunLogger
from rlsys.orchestrator.saving import Saver
from rlsys.orchestrator.weight_sync import SyncReport, WeightSync
from rlsys.orchestrator.worker_groups import Checkpoints, InferenceGroup, OffloadManager, TrainedGroup, launch_megatron
from rlsys.train import train
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy
from tests.support.megatron_processes import ANSWER_S, Host, HostedGroup, forks, pool
from tests.support.recorded_episodes import RIGHT, Recording, Shape, record
from tests.support.scheduled import Arrivals, Learner, NoSearch, Outcome, Playback, Scorer, make_sharder
from tests.trainer import reference

STEPS, GROUPS, SAMPLES = 4, 4, 3
SEED = 5
LIMIT_S = 3000.0
NAME = "recorded"
MOMENTS = (
    "episode",
    "scoring",
    "accumulated",
    "applied",
    "transferred",
    "switched",
    "evaluating",
    "staged",
    "publishing",
    "published",
    "pruned",
)
QUESTIONS = [Question(f"q:{number}", "?", (RIGHT,)) for number in range(2 * GROUPS)]


class KillSwitch:
    """Kills this process and its children at the `count`th `moment` after the first checkpoint; never if it is None."""

    def __init__(self, moment: str | None, count: int) -> None:
        self._moment, self._left = moment, count
        self.saved = False
        """True after the first checkpoint."""

    def __call__(self, moment: str) -> None:
        """Report that `moment` is reached; kill the process group if its count is full."""
        if self.saved and moment == self._moment:
            self._left -= 1
            if not self._left:
                os.killpg(os.getpgrp(), signal.SIGKILL)


async def no_pause() -> None:
    """Return at once, in place of a seeded wait."""


class Episodes(Playback):
    """Playback without waits; in evaluations, the answer is a question's first recorded episode."""

    def __init__(self, config: RunConfig, recording: Recording, kill_switch: KillSwitch) -> None:
        super().__init__(config, recording, Arrivals(SEED), Outcome())
        self._kill_switch = kill_switch
        self.capacity = GROUPS

    async def run_group(self, question: Question, *_: Any) -> list[Trajectory]:
        version = self._version
        await asyncio.sleep(0)
        self._kill_switch("episode")
        return self._recording[question.uid, version]

    def undivided(self) -> AbstractAsyncContextManager[None]:
        """Return a context without effect: no engine is ever set aside."""
        return nullcontext()

    async def answer(self, question: Question, *_: Any) -> Trajectory:
        self._kill_switch("evaluating")
        return self._recording[question.uid, self._version][0]


class KillableScorer(Scorer):
    """A scorer that reports a moment after each call."""

    kill_switch: KillSwitch

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        found = await super().compute(samples)
        self.kill_switch("scoring")
        return found


class KillableLearner(Learner):
    """An actor that reports a moment after each call."""

    kill_switch: KillSwitch

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> list[Floats] | None:
        found = await super().accumulate(samples, last)
        self.kill_switch("accumulated")
        return found

    async def apply(self) -> dict[str, float]:
        figures = await super().apply()
        self.kill_switch("applied")
        return figures


class KillableCheckpoints(Checkpoints):
    """Checkpoints of a worker group that report a moment once the state is copied."""

    def __init__(self, group: TrainedGroup, kill_switch: KillSwitch) -> None:
        super().__init__(group)
        self._kill_switch = kill_switch

    async def begin_save(self, folder: Path) -> None:
        await super().begin_save(folder)
        self._kill_switch("staged")


class KillableStore(CheckpointStore):
    """A checkpoint store that reports moments around its renames."""

    def __init__(self, folder: Path, kill_switch: KillSwitch) -> None:
        super().__init__(folder)
        self._kill_switch = kill_switch

    def publish(self, step: int) -> Path:
        self._kill_switch("publishing")
        folder = super().publish(step)
        self._kill_switch("published")
        self._kill_switch.saved = True
        return folder

    def prune(
        self, keep: RetentionPolicy, score_of: Callable[[int], float | None], spared: Collection[int] = ()
    ) -> None:
        super().prune(keep, score_of, spared)
        self._kill_switch("pruned")


class KillableSync(WeightSync):
    """A weight sync that reports a moment after each stage."""

    kill_switch: KillSwitch

    async def push(self, version: int) -> SyncReport:
        report = await super().push(version)
        self.kill_switch("transferred")
        return report

    async def activate(self, version: int) -> SyncReport:
        report = await super().activate(version)
        self.kill_switch("switched")
        return report


def settings(model: Path, outputs: Path) -> RunConfig:
    """Config of the run; learning rate, reference and KL coefficient all depend on earlier steps."""
    return RunConfig(
        name=NAME,
        output_dir=str(outputs),
        resume="auto",
        model=ModelConfig(str(model), Layers.local, Dtype.float32),
        cluster=ClusterConfig(
            device=Device.cpu, start_timeout_s=ANSWER_S, call_timeout_s=ANSWER_S, sync_bucket_bytes=100_000
        ),
        actor=ActorConfig(
            optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, decay=LrDecay.linear, warmup_fraction=0.2),
            micro_batch_tokens=160,
        ),
        inference=InferenceConfig(micro_batch_tokens=256),
        algorithm=AlgorithmConfig(
            n_samples=SAMPLES,
            kl_coef=0.05,
            kl_in=KlPlace.reward,
            kl_estimator=SampledKl("k1"),
            kl_control=KlControl.adaptive,
            kl_horizon=100,
            ref_policy_ema_tau=0.5,
            ref_policy_ema_update_period=2,
        ),
        task=TaskConfig(train_path=str(model / "config.json")),
        trainer=TrainerConfig(
            schedule=SequentialSchedule(),
            steps=STEPS,
            prompts_per_step=GROUPS,
            mini_batches=3,  # The mini-batches have one group, one and two; the run may be killed between them.
            seed=SEED,
        ),
        eval=EvalConfig(interval=2),
        checkpoint=CheckpointConfig(interval=1, keep_last=2),
        tracking=TrackingConfig(tensorboard=False, wandb=False),
    )


@asynccontextmanager
async def opened(
    hosts: Sequence[Host], kill_switch: KillSwitch, config: RunConfig, run_dir: Path, origin: Origin | None
) -> AsyncIterator[Run]:
    """Open a run like `open_run`, but with recorded episodes and without Ray."""
    state = origin.state if origin else None
    groups = {"inference": HostedGroup("inference", hosts[:1]), "actor": HostedGroup("actor", hosts[1:])}
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress(Console(file=io.StringIO())))
        run = RunLogger(config, run_dir, progress, None, origin.history if origin else None, str)
        stack.callback(run.close)
        for name, group in groups.items():
            await launch_megatron(group, name, config)  # type: ignore[arg-type]
        session = _session(config, run_dir, run, groups, kill_switch, origin)
        await session.weights.open()
        if origin:
            await session.load(origin)
        yield session
        torch.save(session.groups.engines.weights, run_dir / "weights.pt")  # type: ignore[attr-defined]
    assert state is None or state.step <= STEPS


def _session(
    config: RunConfig,
    run_dir: Path,
    record_of_run: RunLogger,
    groups: dict[str, HostedGroup],
    kill_switch: KillSwitch,
    origin: Origin | None,
) -> Run:
    state = origin.state if origin else None
    recording = record(QUESTIONS, Shape(STEPS + 1, SAMPLES, reference.tiny_config().vocab_size), SEED)
    tracer, seen = record_of_run.tracers["driver"], Outcome(events=[""])
    sharders = {name: make_sharder(config, name, len(group.ranks)) for name, group in groups.items()}
    prompts = PromptSource(QUESTIONS, SEED, state.prompts if state else None)
    devices, kl = OffloadManager({}, tracer), kl_control(config.algorithm)
    if state:
        kl.restore(state.kl)
    handlers = Handlers(
        functools.partial(
            reward_group, score=Rewards(config.reward, config.task, config.compat).score, tracer=Tracer("driver")
        ),
        functools.partial(finish, config=config.algorithm, kl=kl),
    )
    rollout: Any = Episodes(config, recording, kill_switch)
    scorer = KillableScorer(groups["inference"], sharders["inference"], no_pause, seen)  # type: ignore[arg-type]
    learner = KillableLearner(groups["actor"], sharders["actor"], tracer, no_pause, seen)  # type: ignore[arg-type]
    takes = InferenceGroup(groups["inference"], sharders["inference"], tracer)  # type: ignore[arg-type]
    KillableScorer.kill_switch = KillableLearner.kill_switch = KillableSync.kill_switch = kill_switch
    learner.checkpoints = KillableCheckpoints(learner, kill_switch)
    store = KillableStore(run_dir / CHECKPOINTS, kill_switch)
    pipeline = RolloutPipeline(
        make_scheduler(config), prompts, rollout, scorer, handlers, score_batch_size(config), devices,
        state.pipeline if state else None,
    )  # fmt: skip
    trained = Groups(rollout, learner, devices, takes)
    saver = Saver(
        store, RetentionPolicy(2, None, best=False), record_of_run.em_of, devices.onload, background=True,
        newest=origin.checkpoint.folder if origin else None,
    )  # fmt: skip
    search: Any = NoSearch()
    evaluator = Evaluator(config, record_of_run, search, rollout, QUESTIONS[:3], trained.count_to, saver.awaited)
    weights = KillableSync(
        groups["actor"], [rollout], config.cluster, run_dir, tracer, [takes], activated=pipeline.publish
    )  # type: ignore[arg-type]
    return Run(
        config=config,
        log=record_of_run,
        search=search,
        groups=trained,
        pipeline=pipeline,
        weights=weights,
        evaluator=evaluator,
        saver=saver,
        rewards=Rewards(config.reward, config.task, config.compat),
        kl=kl,
        questions_sha256=sha256_of(Path(config.task.train_path)),
    )


def train_recorded(model: Path, outputs: Path, moment: str | None, count: int) -> None:
    """Train to the end, or until the run kills itself at `moment`."""
    config, kill_switch = settings(model, outputs), KillSwitch(moment, count)
    origin = find_origin(config, print)
    run_dir = folder_of(config, origin)
    asyncio.run(train(config, run_dir, origin, functools.partial(opened, pool(3), kill_switch)))


def ended(model: Path, outputs: Path, moment: str | None = None, count: int = 1) -> int:
    """Train in a new process group. Returns the exit code, negative for the signal that killed it."""
    process = forks().Process(target=_alone, args=(model, outputs, moment, count))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, "the run did not end in time"
    return process.exitcode


def _alone(*arguments: Any) -> None:
    os.setsid()
    train_recorded(*arguments)
