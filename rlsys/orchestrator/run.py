"""Opens a run and provides the operations of the training loop in `rlsys.train`.

`open_session` starts what a run keeps to its end: progress display, rewards, search server, Ray, worker processes.
`Session.opened` builds the rest in it: workers, weight transports, records, pipeline. On exit, also after an error, both
stop their parts in reverse order: no process survives and all records are on disk.

If a process of the inference group dies or hangs, that group is started again and gets the weights that the actor pushed
last. If that is not possible (`Session.let_recover`), or after the loss of another Megatron process, `Session.go_back` kills
all of them, and the next `opened` starts them again and restores everything from the last checkpoint, as a resume does.
Engines and search server go on; the engines get the weights of the checkpoint by the weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.algorithms.kl import KlController, kl_control
from rlsys.cluster.local_ray import ray_processes
from rlsys.cluster.planning.placement import launch_problems
from rlsys.cluster.planning.resolve import notes_on
from rlsys.cluster.runtime import RayWatch, answer
from rlsys.cluster.worker_group import RankDied, RankLost, WorkerGroup
from rlsys.config.derived import due, max_staleness, moves_reference, scores_with_policy, train_files
from rlsys.config.schema import Mode, Packing, RunConfig
from rlsys.data.prompt_source import PromptSource, training_questions
from rlsys.data.trajectory import Group, MaskOf, trained_tokens, value_mask
from rlsys.errors import RunError, UserError
from rlsys.files import sha256_of
from rlsys.observe import status
from rlsys.observe.environment import detect, unmet_requirements
from rlsys.observe.faults import (
    FAULT_METRICS,
    FAULTS,
    KILLED_AT,
    KILLED_BY,
    Fault,
    FaultKind,
    FaultLog,
    Outcome,
    Restarts,
)
from rlsys.observe.guards import GUARD_METRICS, Alarm
from rlsys.observe.metrics import Metric
from rlsys.observe.requests import Inbox
from rlsys.observe.spans import BATCH_METRICS, peak_flops
from rlsys.observe.status import STATUS, Progress, StatusFile
from rlsys.orchestrator.elastic import Elastic
from rlsys.orchestrator.engine_pool import ENGINE_METRICS, EnginePool
from rlsys.orchestrator.evaluation.heldout import EVALUATION_METRICS, heldout_questions
from rlsys.orchestrator.evaluator import Evaluator
from rlsys.orchestrator.pipeline.grouping import finish, mean_kl
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline
from rlsys.orchestrator.pipeline.scheduler import DropReason
from rlsys.orchestrator.pipeline.step_metrics import (
    ADVANTAGE_METRICS,
    DISTILLATION_METRICS,
    EPISODE_METRICS,
    REWARD_METRICS,
    SOURCE_METRICS,
    TOKEN_METRICS,
)
from rlsys.orchestrator.pipeline.training_step import (
    learn,
    learning,
    make_scheduler,
    mini_batches,
    score_batch_size,
)
from rlsys.orchestrator.resume import CHECKPOINTS, Origin, RunState, find_origin, folder_of, write_state
from rlsys.orchestrator.rewards.judge import JUDGE_METRICS
from rlsys.orchestrator.rewards.reward import Rewards, reward_group
from rlsys.orchestrator.run_logger import (
    FIRST_UPDATE_METRICS,
    STEP_METRICS,
    TIME_METRICS,
    History,
    RunLogger,
)
from rlsys.orchestrator.saving import CheckpointedGroup, Saver
from rlsys.orchestrator.search_server import SearchOutages, require_named, serving, silent
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.teacher import TEACHER_METRICS, TeacherServer, require_teacher, teacher_server
from rlsys.orchestrator.watchdog import blocking, ending_if_blocked, stall_limit_s, until_stalled
from rlsys.orchestrator.weight_sync import SYNC_METRICS, WeightSync
from rlsys.orchestrator.worker_groups import (
    MEGATRON,
    STOP_TIMEOUT_S,
    UPDATE_METRICS,
    ActorGroup,
    CriticGroup,
    InferenceGroup,
    OffloadManager,
    Scorer,
    TrainedGroup,
    build_groups,
    launch_megatron,
    restart_engine,
    started_groups,
)
from rlsys.trainer.batches import BatchSharder
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import read_architecture

_log = logging.getLogger(__name__)

PIPELINE_METRICS = (
    Metric("pipeline/outstanding", "groups", "prompt groups admitted and not yet trained or dropped"),
    Metric("pipeline/version_lag", "versions", "versions trained and not yet used by all engines"),
    Metric(
        "pipeline/dropped_<reason>",
        "groups",
        "dropped because `stale`, `surplus`, `no_spread`, `lost`, or at the `end`",
    ),
)
METRIC_TABLES: Mapping[str, Sequence[Metric]] = {
    "Rewards": (*REWARD_METRICS, *JUDGE_METRICS),
    "Advantages, values and divergences": ADVANTAGE_METRICS,
    "Distillation": (*DISTILLATION_METRICS, *TEACHER_METRICS),
    "Episodes": (*EPISODE_METRICS, *STEP_METRICS),
    "Sources of questions": SOURCE_METRICS,
    "Updates": (*UPDATE_METRICS, *FIRST_UPDATE_METRICS),
    "Late and changed tokens": TOKEN_METRICS,
    "Time": (*TIME_METRICS, *BATCH_METRICS, *SYNC_METRICS),
    "Pipeline and engines": (*PIPELINE_METRICS, *ENGINE_METRICS),
    "Evaluations": EVALUATION_METRICS,
    "Guards": GUARD_METRICS,
    "Faults": FAULT_METRICS,
}
"""Heading in docs/metrics.md -> its metrics; without those of the user."""

POLL_S = 1.0
"""Shortest interval at which the engines are polled."""
_KEEPS = "waits for trajectories to be written"


@dataclass(frozen=True, slots=True)
class Groups:
    engines: EnginePool
    actor: ActorGroup
    devices: OffloadManager
    inference: InferenceGroup | None = None
    """None if it would have nothing to compute (`scoring_forwards`)."""
    critic: CriticGroup | None = None

    @property
    def trained(self) -> dict[str, TrainedGroup]:
        """Actor, and critic if the algorithm has one, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def count_to(self, step: int) -> None:
        """Record the groups' work from now on under `step`."""
        for group in (self.engines, self.devices, self.inference, *self.trained.values()):
            if group is not None:
                group.step = step


@dataclass(slots=True)
class Run:
    """Parts of an open run, and the operations that the training loop calls."""

    config: RunConfig
    log: RunLogger
    search: SearchOutages
    groups: Groups
    pipeline: RolloutPipeline
    weights: WeightSync
    supervisor: Supervisor
    elastic: Elastic
    evaluator: Evaluator
    saver: Saver
    rewards: Rewards
    kl: KlController
    questions_sha256: Mapping[str, str]
    """SHA-256 of each source's training file."""
    teacher: TeacherServer | None = None
    """None unless the teacher is behind an address."""

    @property
    def on_policy(self) -> bool:
        """True if `max_staleness` is 0: the weight version that sampled a token also trains it."""
        return max_staleness(self.config) == 0

    @property
    def colocated(self) -> bool:
        """True if the groups share devices."""
        return self.config.cluster.mode is Mode.colocated

    async def train_step(self, step: int) -> tuple[list[Group], list[Mapping[str, float]]]:
        """Train on the next prompt groups; return them and the statistics of each optimiser step.

        Raises an exception group with a RunError if the search server does not answer in time.
        """
        self.groups.count_to(step)
        self.log.faults.step = step
        learners = {name: self.groups.trained[name] for name in learning(self.config, step)}
        status.show("waits for the critic to warm up", *(self.groups.trained.keys() - learners.keys()))
        self.log.begin_step()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.search.check())  # Beside the training, which it ends if it fails.
            groups, updates = await learn(self.pipeline, learners, self.groups.devices, mini_batches(self.config))
        await self.groups.devices.onload("actor")  # The critic may have learned last and may still be on the devices.
        await self.groups.actor.end_step(step)
        kl = mean_kl(groups)
        if kl is not None:
            self.kl.observe(kl, sum(len(group.samples) for group in groups))
        return groups, updates

    async def log_step(self, step: int, groups: Sequence[Group], updates: Sequence[Mapping[str, float]]) -> list[Alarm]:
        """Record a finished step; return the guards' alarms, which are signs of collapse."""
        alarms = self.log.step(step, groups, updates, await self._metrics())
        with status.stage(_KEEPS, *(f"{name}.trajectories" for name in self.groups.trained)):
            await self.log.trajectories(step, groups)
        self.log_prompts(step)
        return alarms

    def log_prompts(self, step: int) -> None:
        """Record under `step` the prompt groups that have ended since the last call."""
        self.log.prompts(step, self.pipeline.scheduler.ended())

    async def watch(self) -> None:
        """Watch engines, search server and progress, and let engines join and leave, until cancelled.

        Raises an exception group with a RunError if nothing progresses, or if the search server does not return.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.search.watch())
            tasks.create_task(self.supervisor.run(POLL_S, self.pipeline.show_rollouts))
            tasks.create_task(self.elastic.run())
            tasks.create_task(self.watch_progress())

    async def watch_progress(self) -> None:
        """Wait until nothing progresses for longer than any single wait may take; then raise RunError. Never returns."""
        groups = self.groups
        workers = [group.workers for group in (groups.engines, groups.inference, *groups.trained.values()) if group]

        def progress() -> tuple[float, ...]:
            finished = sum(group.finished for group in workers) + self.rewards.finished
            finished += self.teacher.finished if self.teacher else 0
            begun = groups.engines.engines.members.born  # A start that fails is followed by another one.
            return (finished, begun, *self.pipeline.progress, *self.log.faults.metrics().values())

        limit_s = stall_limit_s(self.config)
        await until_stalled(progress, limit_s)
        who, stacks = blocking(self.log.progress.status().states), await groups.actor.workers.located([])
        raise RunError(f"the run has made no progress for {limit_s:.0f} s: {who}; {stacks}.")

    async def evaluate_reference(self, step: int) -> None:
        """Evaluate the reference policy on the held-out questions. The engines keep its weights afterwards."""
        groups = self.groups
        if groups.inference is None:
            raise RuntimeError("A run without an inference group has no reference policy to evaluate.")
        folder, tracer = self.log.run_dir / "reference", self.log.tracers["driver"]
        onload = groups.devices.onload
        sync = WeightSync(
            groups.inference.workers,
            [groups.engines],
            self.config.cluster,
            folder,
            tracer,
            onload=onload,
            after=self.weights,
        )
        self.supervisor.sync = sync
        try:
            await onload("inference")
            await sync.send(step + 1)
            found = await self.evaluator.ask_all(step)
        finally:
            sync.close()
        if found is not None:
            self.log.reference_evaluation(found)

    async def save(self, step: int) -> None:
        """Begin a checkpoint after `step`, with all worker groups and all prompt groups in flight.

        Trajectories up to `step` are written to disk first.
        """
        trained = self.groups.trained
        with status.stage(_KEEPS, *(f"{name}.trajectories" for name in trained)):
            await self.log.trajectories_written()
        in_flight = await self.groups.engines.in_flight()
        # No await until `state` is complete, so that the snapshot is consistent.
        self.log_prompts(step)
        state = RunState(
            step=step,
            pipeline=self.pipeline.state(in_flight),
            prompts=self.pipeline.prompts.state(),
            kl=self.kl.state(),
            history=self.log.history(step),
            questions_sha256=self.questions_sha256.get("", ""),
            sources_sha256={name: found for name, found in self.questions_sha256.items() if name},
        )
        parts: dict[str, tuple[str, CheckpointedGroup]] = {
            name: (name, group.checkpoints) for name, group in trained.items()
        }
        if self._keeps_reference and self.groups.inference:
            parts["reference"] = ("inference", self.groups.inference.reference)
        with status.stage("saves a checkpoint", *(f"{name}.checkpoint" for name in trained)):
            await self.saver.begin(step, lambda folder: write_state(folder, state, self.config), parts)

    async def load(self, origin: Origin) -> None:
        """Load the part of the checkpoint that belongs to each worker group."""
        folder = origin.checkpoint.folder
        for name, group in self.groups.trained.items():
            await self.groups.devices.onload(name)
            with status.stage("loads the checkpoint", f"{name}.checkpoint"):
                same_layout = await group.checkpoints.load(folder / name)
            if not same_layout:
                _log.warning("%s has another parallel layout than its checkpoint: its random generators restart", name)
        if self._keeps_reference and self.groups.inference:
            await self.groups.devices.onload("inference")
            await self.groups.inference.reference.load(folder / "reference")
        await self.groups.devices.onload("actor")
        await self.groups.actor.end_step(origin.state.step)

    @property
    def _keeps_reference(self) -> bool:
        """True if the reference policy changes during the run, so that checkpoints must save it."""
        return moves_reference(self.config.algorithm)

    async def _metrics(self) -> dict[str, float]:
        """Return the current metrics of engines, weight sync, rewards and pipeline."""
        scheduler = self.pipeline.scheduler
        return {
            **await self.groups.engines.metrics(),
            **self.weights.figures(),
            **self.rewards.metrics(),
            **self.pipeline.prompts.metrics(),
            **(self.teacher.metrics() if self.teacher else {}),
            "pipeline/outstanding": scheduler.outstanding_count,
            "pipeline/version_lag": scheduler.version - scheduler.published,
            **{f"pipeline/dropped_{reason}": scheduler.dropped[reason] for reason in DropReason},
        }


def ready_to_start(config: RunConfig, note: Callable[[str], None]) -> tuple[Path, Origin | None]:
    """Check that a valid `config` can start; return the run's folder and the checkpoint to resume from, if any.

    `note` is called with remarks for the user. All checks come before the folder is created and any process is started.
    Raises UserError if requirements are missing (it lists all of them), if the run cannot resume, or if a teacher's server
    has other tokens. Raises RunError if the search server or the teacher that the config names does not answer.
    """
    missing = launched = list(launch_problems(config))
    if config.cluster.address is None:  # Else other machines do the work; their packages cannot be checked here.
        missing = [*launched, *unmet_requirements(config, detect())]
    if missing:
        sentences = "\n".join(map(str, missing))
        raise UserError(sentences, code="conflict" if launched else "not_installed", key=missing[0].key)
    for sentence in notes_on(config):
        note(sentence)
    origin = find_origin(config, note)
    if origin is not None:
        note(f"The run resumes after step {origin.state.step}, from {origin.checkpoint.folder}.")
        for change in origin.changed:
            note(f"Version changed since then: {change}.")
    with silent("rlsys.search"):
        require_named(config.search)
    require_teacher(config, partial(AutoTokenizer.from_pretrained, config.model.path))
    return folder_of(config, origin), origin


class Session:
    """Holds what outlasts a return to a checkpoint: the run's folder, processes, search server and rewards."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        progress: Progress,
        faults: FaultLog,
        rewards: Rewards,
        search: SearchOutages,
        workers: Mapping[str, WorkerGroup],
        ray: RayWatch,
        done: int = 0,
    ) -> None:
        """`config` has the address of the search server. `workers` are processes by group, at first without workers. `done`
        is the step after which the run resumes."""
        self.config, self.run_dir, self.progress, self.faults = config, run_dir, progress, faults
        self.rewards, self.search, self.workers, self.ray = rewards, search, workers, ray
        self.inbox = Inbox(run_dir)
        self._restarts, self._engine_restarts = Restarts(config.cluster), Restarts(config.cluster)
        self._engine_faults: dict[int, Fault] = {}
        """Engine -> its fault that is not over."""
        self._engines: EnginePool | None = None
        """Engines as the last run has left them."""
        faults.step = done
        self._fault: Fault | None = None
        """Fault from which the run has not recovered yet."""
        if killed_by := os.environ.get(KILLED_BY):
            killed_at = os.environ.get(KILLED_AT)
            detail, at_s = f"It was killed by {killed_by}.", float(killed_at) if killed_at else None
            self._fault = faults.begin("driver", FaultKind.died, detail, at_s)
        self._at_start: History | None = None
        """Extent of the records before the first step of a new run; None before the run is opened."""
        self._ran = False
        """True once the run was open: its processes have workers, and an error is no mistake of its settings."""

    @asynccontextmanager
    async def opened(self, origin: Origin | None) -> AsyncIterator[Run]:
        """Build the run at `origin`, or at its start; stop everything that this call has started on exit."""
        config = self.config
        done = origin.state.step if origin else 0
        async with AsyncExitStack() as stack:
            state = origin.state.prompts if origin else None
            prompts = PromptSource(training_questions(config.task), config.trainer.seed, state, config.task)
            heldout = heldout_questions(config)
            log = self.logger(origin, _decoder(config))
            stack.callback(log.close)
            groups, kl = _groups(config, log, self.workers, self.search, self._engines), kl_control(config.algorithm)
            self._engines = groups.engines
            if origin:
                kl.restore(origin.state.kl)
            if (teacher := teacher_server(config)) is not None:
                stack.push_async_callback(teacher.close)
            scorer = Scorer(groups.inference, groups.critic, config.algorithm.old_logprobs, teacher)
            pipeline = _pipeline(config, log, groups, prompts, scorer, self.rewards, kl, origin)
            weights = _weight_sync(config, log, groups, pipeline)
            stack.callback(weights.close)
            self.let_recover(groups.inference, weights)
            supervisor = self._supervisor(groups.engines, weights, done)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self.ray.run())
                await self._build(groups, done)
                watching.cancel()
            log.actor_peak = peak_flops(await groups.actor.device_names())
            saver = _saver(config, self.run_dir, log, groups.devices, origin)
            run = Run(
                config=config,
                log=log,
                search=self.search,
                groups=groups,
                pipeline=pipeline,
                weights=weights,
                supervisor=supervisor,
                elastic=Elastic(
                    groups.engines, supervisor, self.workers["rollout"].seats, self.inbox, self.faults, config
                ),
                evaluator=Evaluator(config, log, self.search, groups.engines, heldout, groups.count_to, saver.awaited),
                saver=saver,
                rewards=self.rewards,
                kl=kl,
                questions_sha256={file.source: sha256_of(Path(file.path)) for file in train_files(config.task)},
                teacher=teacher,
            )
            if origin:
                await run.load(origin)
            self.ready(done)
            yield run
            status.show("ends", *self.workers)
            status.show("", "sync")
            await groups.engines.stop(STOP_TIMEOUT_S)

    def _supervisor(self, engines: EnginePool, weights: WeightSync, done: int) -> Supervisor:
        restart = partial(restart_engine, self.workers["rollout"], config=self.config, done=done)
        return Supervisor(
            engines, weights, restart, self.faults, self.config, self._engine_restarts, self._engine_faults
        )

    def logger(self, origin: Origin | None, decode: Callable[[Sequence[int]], str]) -> RunLogger:
        """Open the records, which continue at `origin`, or begin anew."""
        config, history = self.config, origin.history if origin else self._at_start
        cost = flops_of(read_architecture(config.model.path, config.model.family))
        declared = [metric for table in METRIC_TABLES.values() for metric in table]
        log = RunLogger(config, self.run_dir, self.progress, cost, history, decode, declared, self.faults)
        if origin is None:
            self._at_start = self._at_start or log.history(0)
        self.faults.step = history.step if history else 0
        self.progress.update(step=self.faults.step, em=log.last_em)
        return log

    def ready(self, step: int) -> None:
        """Record that the run is open after `step`, so it has recovered from a fault."""
        self._ran = True
        if self._fault is not None:
            self.faults.end(self._fault, Outcome.recovered, f"the run goes on after step {step}")
            self._fault = None

    def go_back(self, error: Exception, origin: Origin | None) -> Origin | None:
        """Kill the Megatron processes after `error`; return the checkpoint to go on from, None for the run's start.

        `origin` is the checkpoint from which the run was opened. Raises `error` unless a Megatron process of an open run
        has died or hangs, after `cluster.restarts` restarts within `cluster.restart_window_s`, and if the user has ended
        the run meanwhile. Raises RunError if Ray itself has died.
        """
        lost, task = lost_worker(error), asyncio.current_task()
        # A task group that ends with an error hides that its task was cancelled.
        if lost is None or not self._ran or (task is not None and task.cancelling()):
            raise error
        self.ray.require_alive()  # Without Ray no process can be started again.
        if self._fault is not None:
            self.faults.end(self._fault, Outcome.given_up, str(lost).partition("\n")[0].rstrip("."))
        self._fault = self._begin(lost)
        if not self._restarts.take():
            times = f"cluster.restarts={self._restarts.limit}"
            self.faults.end(self._fault, Outcome.given_up, f"Megatron processes have been restarted {times} times")
            raise error
        for group in self._trained():
            group.kill()  # They may still be writing a checkpoint.
        store = CheckpointStore(self.run_dir / CHECKPOINTS)
        store.recover()
        if store.saved():
            origin = find_origin(replace(self.config, resume=str(self.run_dir)), self.progress.warn)
        self.progress.warn(f"The run goes back to step {origin.state.step if origin else 0}.")
        return origin

    def let_recover(self, inference: InferenceGroup | None, weights: WeightSync) -> None:
        """Let the inference group be started again alone.

        Not in a colocated run, and not with a reference that moves: only its processes have that.
        """
        if inference and self.config.cluster.mode is not Mode.colocated and not moves_reference(self.config.algorithm):
            inference.recover = partial(self._restart_inference, inference, weights)

    async def _restart_inference(
        self, group: InferenceGroup, weights: WeightSync, lost: RankLost, updated: bool
    ) -> None:
        """Start the inference group again after `lost`; with `updated`, send it the last version.

        Raises `lost` if no restart is left or if it cannot start, and the run goes back. Raises RunError if Ray has died, or
        if the group refuses the version.
        """
        self.ray.require_alive()  # Without Ray no process can be started again.
        if await answer(group.workers.seats.stranded) or not self._restarts.take():
            raise lost
        fault, how, outcome = self._begin(lost), "it could not be started again", Outcome.given_up
        try:
            with status.stage("starts again", "inference"):
                group.workers.restart()
                try:
                    await launch_megatron(group.workers, "inference", self.config)
                except (RunError, UserError) as problem:
                    self._restarts.give_back()  # Going back takes it.
                    raise lost from problem
                held = scores_with_policy(self.config.algorithm)
                group.started(loaded=not held)
                if held and updated:
                    await weights.catch_up(group)
            how, outcome = "the inference group has been started again", Outcome.recovered
        finally:
            self.faults.end(fault, outcome, how)

    def _begin(self, lost: RankLost) -> Fault:
        """Record the fault of a Megatron process."""
        kind = FaultKind.died if isinstance(lost, RankDied) else FaultKind.hung
        reason = str(lost).partition("\n")[0].rstrip(".")
        return self.faults.begin(lost.name, kind, f"{reason}.")

    def _trained(self) -> list[WorkerGroup]:
        return [group for name, group in self.workers.items() if name in MEGATRON]

    async def _build(self, groups: Groups, done: int) -> None:
        """Build the workers of all groups; after going back, those of the Megatron groups."""
        if self._ran:
            for group in self._trained():
                if stranded := await answer(group.seats.stranded):
                    raise RunError(
                        f"{group.ranks[stranded[0]].name} cannot start again, because its machine has left the cluster: see "
                        "its power, network and memory. resume=auto continues from the last checkpoint, on machines that "
                        "are there."
                    )
                group.restart()
            for one in groups.engines.engines.members.of_engine.values():
                if not one.lives:  # It was being started when the run went back; the supervisor starts it again.
                    self.workers["rollout"].kill_rank(one.engine)
            running = {"rollout": groups.engines.settle}
            await build_groups(self.config, self.workers, groups.devices.built, done, running)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._await_search())  # Meanwhile: a server that hangs should not be found out last.
            await build_groups(self.config, self.workers, groups.devices.built, done)

    async def _await_search(self) -> None:
        with status.stage("starts", "search"):
            await self.search.started()


def lost_worker(error: BaseException) -> RankLost | None:
    """Return the loss of a Megatron process that caused `error`; None if there is none, or a mistake of the user too.

    The engine pool goes on without a lost engine, so an engine that is named in an error could not be lost.
    """
    causes = list(_leaves(error))
    if any(isinstance(cause, UserError) for cause in causes):
        return None
    lost = [cause for cause in causes if isinstance(cause, RankLost) and cause.name.startswith(MEGATRON)]
    return min(lost, key=lambda cause: not isinstance(cause, RankDied), default=None)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a tree of exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@asynccontextmanager
async def open_session(config: RunConfig, run_dir: Path, origin: Origin | None = None) -> AsyncIterator[Session]:
    """Start what the run keeps; stop everything on exit, also after an error. `origin` is the checkpoint to begin at."""
    async with AsyncExitStack() as stack:
        # Ray's start blocks the event loop, for up to two waits.
        stack.enter_context(ending_if_blocked(run_dir, 2 * stall_limit_s(config)))
        progress = stack.enter_context(_progress(config, run_dir, origin.history if origin else None))
        faults = FaultLog(run_dir / FAULTS, say=progress.notice)
        stack.callback(faults.close)
        rewards = Rewards(config.reward, config.task, config.compat)
        stack.push_async_callback(rewards.close)
        search = stack.enter_context(serving(config.search, config.cluster.threads, run_dir / "logs"))
        if not search.started:
            await search.require()
        outages = SearchOutages(search, Restarts(config.cluster), faults)
        stack.push_async_callback(outages.close)
        workers = await stack.enter_async_context(started_groups(config, run_dir / "logs"))
        done = origin.state.step if origin else 0
        ray = RayWatch(ray_processes())
        settled = replace(config, search=search.search)
        session = Session(settled, run_dir, progress, faults, rewards, outages, workers, ray, done)
        stack.callback(session.inbox.close)
        yield session


def _groups(
    config: RunConfig,
    log: RunLogger,
    workers: Mapping[str, WorkerGroup],
    outages: SearchOutages,
    before: EnginePool | None,
) -> Groups:
    """Return the worker groups, whose processes have no workers yet; the engines of the pool `before` go on."""
    members = before.engines.members.anew() if before else None
    engines = EnginePool(workers["rollout"], config, log.tracers["rollout"], log.episodes, outages, members)
    actor = ActorGroup(workers["actor"], _sharder(config, "actor", workers), log.tracers["actor"])
    switches = {"rollout": (engines.offload, engines.restore), "actor": (actor.offload, actor.restore)}
    critic, inference = None, None
    if "critic" in workers:
        sharder = _sharder(config, "critic", workers, value_mask(config.compat))
        critic = CriticGroup(workers["critic"], sharder, log.tracers["critic"])
        switches["critic"] = (critic.offload, critic.restore)
    if "inference" in workers:
        sharder = _sharder(config, "inference", workers)
        inference = InferenceGroup(workers["inference"], sharder, log.tracers["inference"])
        switches["inference"] = (inference.offload, inference.restore)
    colocated = config.cluster.mode is Mode.colocated
    devices = OffloadManager(switches if colocated else {}, log.tracers["driver"])
    return Groups(engines, actor, devices, inference, critic)


def _pipeline(
    config: RunConfig,
    log: RunLogger,
    groups: Groups,
    prompts: PromptSource,
    scorer: Scorer,
    rewards: Rewards,
    kl: KlController,
    origin: Origin | None,
) -> RolloutPipeline:
    """Return the pipeline; it is woken whenever an engine comes, goes or has room again."""
    pipeline = RolloutPipeline(
        make_scheduler(config),
        prompts,
        groups.engines,
        scorer,
        Handlers(
            reward=partial(reward_group, score=rewards.score, tracer=log.tracers["driver"]),
            finish=partial(finish, config=config.algorithm, kl=kl, mask_of=value_mask(config.compat)),
        ),
        score_batch_size(config),
        groups.devices,
        origin.state.pipeline if origin else None,
    )
    groups.engines.engines.subscribe(lambda _: pipeline.wake())
    return pipeline


def _weight_sync(config: RunConfig, log: RunLogger, groups: Groups, pipeline: RolloutPipeline) -> WeightSync:
    """Return the weight sync. In a disaggregated run it publishes an activated version to the pipeline at once.

    In a colocated run, the training loop publishes the version after evaluation and checkpoint, because rollouts would
    take the devices away from these.
    """
    immediate = [groups.inference] if groups.inference and scores_with_policy(config.algorithm) else []
    colocated = config.cluster.mode is Mode.colocated
    return WeightSync(
        groups.actor.workers,
        [groups.engines],
        config.cluster,
        log.run_dir,
        log.tracers["driver"],
        immediate,
        groups.devices.onload,
        (lambda _version: None) if colocated else pipeline.publish,
    )


def _progress(config: RunConfig, run_dir: Path, history: History | None) -> Progress:
    """Return the progress display, set to the start of the run or to the resumed step."""
    progress = Progress(status=StatusFile(run_dir / STATUS))
    progress.update(step=history.step if history else 0, steps=config.trainer.steps)
    return progress


def _decoder(config: RunConfig) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids of the policy to text, special tokens included."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    return decode


def _saver(config: RunConfig, run_dir: Path, log: RunLogger, devices: OffloadManager, origin: Origin | None) -> Saver:
    settings = config.checkpoint
    keep = RetentionPolicy(settings.keep_last, settings.keep_every, settings.keep_best)
    newest = origin.checkpoint.folder if origin else None
    store = CheckpointStore(run_dir / CHECKPOINTS)
    saver = Saver(store, keep, log.em_of, devices.onload, settings.background, newest)
    if origin and settings.keep_best:  # An evaluation is cut off when a run ends or goes back.
        for step in (one.step for one in store.saved() if one.step < origin.state.step):
            if due(step, config.eval.interval) and log.em_of(step) is None:
                log.progress.warn(f"the checkpoint of step {step} has no evaluation: it may be the best, and is kept.")
                saver.awaited.add(step)
    return saver


def _sharder(
    config: RunConfig, name: str, workers: Mapping[str, WorkerGroup], mask_of: MaskOf = trained_tokens
) -> BatchSharder:
    settings = config.actor if name == "actor" else config.critic if name == "critic" else config.inference
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return BatchSharder(
        settings.parallel,
        len(workers[name].ranks),
        settings.micro_batch_tokens,
        tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        settings.packing is Packing.packed,
        flops_of(read_architecture(config.model.path, config.model.family)),
        mask_of,
        config.model.fp8,
    )
