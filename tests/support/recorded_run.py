"""Runs the real driver, Megatron workers and checkpoints on recorded episodes, and kills the run at a given moment.

The run trains a few steps with the sequential schedule, which gives the same bits for the same episodes. It saves after
every step and resumes from its newest checkpoint. At the `count`th `moment` after its first checkpoint it kills itself
and all its processes, as if the machine had failed, or only the processes of one group, the `victim`.
"""

import asyncio
import functools
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from rich.console import Console

from rlsys.cluster.runtime import RayWatch
from rlsys.cluster.worker_group import RankDied
from rlsys.config.algorithm import AlgorithmConfig, KlControl, KlPlace, SampledKl
from rlsys.config.schema import (
    ActorConfig,
    AdamwConfig,
    CheckpointConfig,
    ClusterConfig,
    Device,
    Dtype,
    EvalConfig,
    InferenceConfig,
    Layers,
    LrDecay,
    ModelConfig,
    RunConfig,
    SequentialSchedule,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.files import sha256_of
from rlsys.observe.faults import FAULTS, FaultLog
from rlsys.observe.status import Progress
from rlsys.orchestrator import run_logger
from rlsys.orchestrator.evaluator import Evaluator
from rlsys.orchestrator.resume import CHECKPOINTS, Origin, find_origin, folder_of
from rlsys.orchestrator.run import Run, Session
from rlsys.orchestrator.run_logger import RunLogger
from rlsys.orchestrator.saving import Saver
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import Checkpoints, launch_megatron
from rlsys.train import train
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy
from tests.support import tiny_configs
from tests.support.megatron_processes import ANSWER_S, Host, HostedGroup, fork, forks, pool
from tests.support.recorded_episodes import RIGHT, Recording, Shape, record
from tests.support.scheduled import Arrivals, Learner, Outcome, Playback, Scorer, assemble

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
T = TypeVar("T")
QUESTIONS = [Question(f"q:{number}", "?", (RIGHT,)) for number in range(2 * GROUPS)]


class KillSwitch:
    """Kills this process and its children at the `count`th `moment` after the first checkpoint; never if it is None."""

    def __init__(self, moment: str | None, count: int, victim: str = "", early: bool = False) -> None:
        """If given, `victim` is the only group of processes to be killed. `early` also counts before the checkpoint."""
        self._moment, self._left = moment, count
        self.victim = victim
        self.kill: Callable[[], None] = lambda: os.killpg(os.getpgrp(), signal.SIGKILL)
        self.saved = early
        """True after the first checkpoint."""

    def __call__(self, moment: str) -> None:
        """Report that `moment` is reached; kill if its count is full."""
        if self.saved and moment == self._moment:
            self._left -= 1
            if not self._left:
                self.kill()


class MortalGroup(HostedGroup):
    """Processes that may die, which `call_each` reports as a WorkerGroup does."""

    async def call_each(self, method: str, arguments: Sequence[tuple], timeout_s: float = ANSWER_S) -> list[Any]:
        try:
            return await super().call_each(method, arguments, timeout_s)
        except (EOFError, OSError) as problem:
            raise RankDied(
                f"{self.name} rank 0 died before it could finish {method}.", 0, f"{self.name} rank 0"
            ) from problem

    def kill(self) -> None:
        for host in self.ranks:
            host.kill()

    def restart(self) -> None:
        self.kill()
        self.ranks = fork(len(self.ranks))

    seats = SimpleNamespace(stranded=list)


class Episodes(Playback):
    """Playback without waits; in evaluations, the answer is a question's first recorded episode."""

    def __init__(self, config: RunConfig, recording: Recording, kill_switch: KillSwitch) -> None:
        super().__init__(config, recording, Arrivals(SEED), Outcome())
        self._kill_switch = kill_switch
        self.capacity = self.answers = GROUPS

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


def reporting(kind: type[T], kill_switch: KillSwitch, **moments: str) -> type[T]:
    """Subclass of `kind` in which each method named in `moments` reports its moment when it returns."""

    def reports(method: Callable[..., Awaitable[Any]], moment: str) -> Callable[..., Awaitable[Any]]:
        async def reported(*args: Any, **options: Any) -> Any:
            found = await method(*args, **options)
            kill_switch(moment)
            return found

        return reported

    return type(kind.__name__, (kind,), {name: reports(getattr(kind, name), at) for name, at in moments.items()})


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


def settings(model: Path, outputs: Path, fixed: bool = False) -> RunConfig:
    """Config of the run; learning rate, reference (unless it is `fixed`) and KL coefficient all depend on earlier steps."""
    return RunConfig(
        name=NAME,
        output_dir=str(outputs),
        resume="auto",
        model=ModelConfig(str(model), Layers.local, Dtype.float32),
        cluster=ClusterConfig(
            device=Device.cpu, start_timeout_s=ANSWER_S, call_timeout_s=ANSWER_S, sync_bucket_bytes=100_000
        ),
        actor=ActorConfig(
            optimizer=AdamwConfig(lr=3e-3, eps=1e-4, decay=LrDecay.linear, warmup_fraction=0.2),
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
            ref_policy_ema_tau=1.0 if fixed else 0.5,
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


class RecordedSession(Session):
    """A session with recorded episodes and without Ray."""

    def __init__(self, config: RunConfig, run_dir: Path, progress: Progress, hosts: Sequence[Host], kill: KillSwitch):
        workers = {"inference": MortalGroup("inference", hosts[:1]), "actor": MortalGroup("actor", hosts[1:])}
        parts: dict[str, Any] = {"rewards": None, "search": None, "workers": workers, "ray": RayWatch({})}
        super().__init__(config, run_dir, progress, FaultLog(run_dir / FAULTS), **parts)
        recording = record(QUESTIONS, Shape(STEPS + 1, SAMPLES, tiny_configs.qwen2().vocab_size), SEED)
        self.engines, self.kill_switch, self.groups = Episodes(config, recording, kill), kill, workers
        self.openings = 0
        """Number of times that the run was opened: once, and again whenever it goes back."""
        if kill.victim:
            kill.kill = workers[kill.victim].kill

    @asynccontextmanager
    async def opened(self, origin: Origin | None) -> AsyncIterator[Run]:
        log = self.logger(origin, str)
        try:
            for name, group in self.groups.items():
                if self._ran:
                    group.restart()
                await launch_megatron(group, name, self.config)  # type: ignore[arg-type]
            run = _run(self, log, origin)
            self.let_recover(run.groups.inference, run.weights)
            self.openings += 1
            if origin:
                await run.load(origin)
            self.ready(origin.state.step if origin else 0)
            yield run
        finally:
            log.close()


@asynccontextmanager
async def opened(
    hosts: Sequence[Host], kill_switch: KillSwitch, config: RunConfig, run_dir: Path, _: Origin | None
) -> AsyncIterator[Session]:
    with Progress(Console(file=io.StringIO())) as progress:
        session = RecordedSession(config, run_dir, progress, hosts, kill_switch)
        yield session
    torch.save(session.engines.weights, run_dir / "weights.pt")
    (run_dir / "openings").write_text(str(session.openings))


def _run(session: RecordedSession, log: RunLogger, origin: Origin | None) -> Run:
    config, run_dir, kill_switch = session.config, session.run_dir, session.kill_switch
    rollout: Any = session.engines
    run = assemble(
        config, QUESTIONS, session.groups, rollout, Outcome(events=[""]), functools.partial(asyncio.sleep, 0), log,
        log.tracers["driver"], run_dir, origin.state if origin else None,
        scorer=reporting(Scorer, kill_switch, compute="scoring"),
        learner=reporting(Learner, kill_switch, accumulate="accumulated", apply="applied"),
        sync=reporting(WeightSync, kill_switch, push="transferred", activate="switched"),
    )  # fmt: skip
    actor = run.groups.actor
    actor.checkpoints = reporting(Checkpoints, kill_switch, begin_save="staged")(actor)
    run.saver = Saver(
        KillableStore(run_dir / CHECKPOINTS, kill_switch), RetentionPolicy(2, None, best=False), log.em_of,
        run.groups.devices.onload, background=True, newest=origin.checkpoint.folder if origin else None,
    )  # fmt: skip
    run.evaluator = Evaluator(config, log, run.search, rollout, QUESTIONS[:3], run.groups.count_to, run.saver.awaited)
    run.questions_sha256 = {"": sha256_of(Path(config.task.train_path))}
    return run


def train_recorded(
    model: Path, outputs: Path, moment: str | None, count: int, victim: str, early: bool, fixed: bool
) -> None:
    """Train to the end, or until the run kills itself at `moment`; it outlives the death of a `victim`."""
    config, kill_switch = settings(model, outputs, fixed), KillSwitch(moment, count, victim, early)
    origin = find_origin(config, print)
    run_dir = folder_of(config, origin)
    asyncio.run(train(config, run_dir, origin, functools.partial(opened, pool(3), kill_switch)))


def ended(
    model: Path,
    outputs: Path,
    moment: str | None = None,
    count: int = 1,
    victim: str = "",
    early: bool = False,
    fixed: bool = False,
) -> int:
    """Train in a new process group. Returns the exit code, negative for the signal that killed it."""
    process = forks().Process(target=_alone, args=(model, outputs, moment, count, victim, early, fixed))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, "the run did not end in time"
    return process.exitcode


def _alone(*arguments: Any) -> None:
    os.setsid()
    with mock.patch.object(run_logger, "draw_curves"):  # Charts take longer than a step.
        train_recorded(*arguments)
