"""Wraps the worker groups of a run for the driver: starts, calls and kills them, moves them on and off devices.

`started_groups` launches empty processes and kills them on exit. `build_groups` builds the workers in them: in parallel
if disaggregated; one after the other if colocated, each leaving the devices before the next is built.

A Megatron group shards samples over its data-parallel ranks and sends each process the micro-batches of its own rank.
Every process receives calls in the order in which they are made. Callers may therefore overlap calls: a later call
waits for the earlier calls.

    samples -> micro-batches by data-parallel rank -> one call per process -> results by rank -> scores by sample
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rlsys.algorithms.losses import TOKENS, reduce_stats
from rlsys.cluster.planning.placement import CRITIC, parse_placement, plan_bundles
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.stacks import StackWriter
from rlsys.cluster.worker_group import RankLost, WorkerGroup, share
from rlsys.config.algorithm import OldLogprobs, RouterReplay
from rlsys.config.derived import has_critic, on_update, scoring_forwards
from rlsys.config.schema import Device, Mode, RunConfig, SyncMode
from rlsys.data.trajectory import Floats, Sample, Scores, TopkLogprobs
from rlsys.observe import status
from rlsys.observe.metrics import Metric
from rlsys.observe.spans import QUESTIONS, Arg, Tracer
from rlsys.orchestrator.membership import Member
from rlsys.orchestrator.teacher import TeacherServer
from rlsys.rollout.tools.interface import tool_variables
from rlsys.trainer.batches import Accumulated, BatchSharder, LogProbs, MicroBatch, Plan, joined_branches
from rlsys.trainer.offload import switch_figures
from rlsys.weights.transport import BucketHandle, TransportSpec

UPDATE_METRICS = (
    Metric("actor/policy_loss", "1", "the surrogate loss", "S `actor/pg_loss`, R"),
    Metric("actor/kl_loss", "nats", "the KL term of the loss, without its weight", "S, R"),
    Metric("actor/entropy", "nats a token", "entropy of the policy", "S `actor/entropy_loss`, R `actor/entropy_loss`"),
    Metric("actor/ratio", "1", "mean ratio of a token", "R"),
    Metric("actor/ratio_max actor/ratio_min", "1", "largest and smallest ratio"),
    Metric("actor/ratio_dev_max", "1", "largest distance of a ratio from 1"),
    Metric("actor/clip_fraction", "share", "clipped tokens", "S `actor/pg_clipfrac`, R"),
    Metric(
        "actor/clip_fraction_low actor/clip_fraction_high",
        "share",
        "tokens clipped by the lower and by the upper bound",
    ),
    Metric("actor/dual_clip_fraction", "share", "tokens that `algorithm.policy_loss.dual_clip` bounds"),
    Metric(
        "actor/approx_kl",
        "nats a token",
        "divergence between old and new policy, by k3",
        "S `actor/ppo_kl` (by k1), R",
    ),
    Metric(
        "actor/kl",
        "nats a token",
        "divergence of the policy from the reference during the updates, by the configured estimator",
    ),
    Metric(
        "actor/correct_logprob",
        "nats a token",
        "log-likelihood of correct trajectories during the updates; correct are those whose advantages sum to more than 0",
    ),
    Metric(
        "actor/correct_change",
        "nats a token",
        "change of the log-likelihood of correct trajectories since the step's start, mean over trajectories and updates: "
        "below 0, other updates have [displaced](algorithms.md#lazy-likelihood-displacement) them",
    ),
    Metric("actor/correct_displaced", "share", "correct trajectories whose log-likelihood has fallen since then"),
    Metric("actor/llds_loss", "nats", "the penalty of `algorithm.llds`, without its weight"),
    Metric("actor/tokens", "tokens", "trained tokens of an optimiser step"),
    Metric("actor/grad_norm", "1", "gradient norm before clipping", "S, R"),
    Metric("actor/lr", "1", "learning rate", "S, R"),
    Metric("critic/vf_loss", "reward^2", "loss of the critic", "S"),
    Metric("critic/vf_clipfrac", "share", "tokens whose gradient `critic.value_clip` clips", "S"),
    Metric("critic/vpred_mean", "reward", "mean of the critic's values during the updates", "S"),
    Metric("critic/value_error", "reward", "mean return minus mean value: the critic's overall bias"),
    Metric("critic/grad_norm", "1", "gradient norm before clipping", "S"),
    Metric("critic/lr", "1", "learning rate", "S"),
)
MEGATRON = ("actor", "critic", "inference")
"""Groups of Megatron processes."""
STOP_TIMEOUT_S = 30.0


@asynccontextmanager
async def started_groups(config: RunConfig, log_dir: Path) -> AsyncIterator[dict[str, WorkerGroup]]:
    """Launch the processes of all groups, without workers; yield the groups by name and kill them on exit.

    `log_dir` is a folder within the run's folder, which also gets the stacks of hung processes.
    """
    several = config.cluster.nodes > 1
    plan = plan_bundles(holdings(config), config.cluster.devices_per_node if several else None)
    stacks = StackWriter(log_dir.parent)
    here_only = config.cluster.sync_mode in (SyncMode.tensor, SyncMode.ipc)
    with ray_runtime(config.cluster, plan.sizes, plan.machines) as bundles:
        groups: dict[str, WorkerGroup] = {}
        try:
            for name, slots in plan.slots.items():
                concurrency = config.rollout.max_episodes + 16 if name == "rollout" else 0
                groups[name] = WorkerGroup.launch(
                    name,
                    bundles,
                    slots,
                    config.cluster,
                    log_dir,
                    concurrency=concurrency,
                    variables=_secrets(config),
                    stacks=stacks,
                    near=plan.slots["actor"][0].bundle if here_only else None,
                )
            yield groups
        finally:
            for group in groups.values():
                group.kill()
                group.seats.release_all()


def _secrets(config: RunConfig) -> dict[str, str]:
    """Return the environment variables of the search servers and tools: workers on other machines lack them."""
    task = config.task
    tools = [*task.tools, *(tool for source in task.sources.values() for tool in source.tools or [])]
    names = [config.search.token_env, *tool_variables(tools)]
    return {name: os.environ[name] for name in names if name and name in os.environ}


async def build_groups(
    config: RunConfig,
    groups: Mapping[str, WorkerGroup],
    built: Callable[[str], Awaitable[None]],
    done: int = 0,
    running: Mapping[str, Callable[[], Awaitable[None]]] = MappingProxyType({}),
) -> None:
    """Build the workers of all groups, and call `built` with the name of each group once it is built.

    `done` is the number of finished steps; it shifts the engines' seeds, so that a resumed run does not repeat samples.
    `running` has groups that keep their workers -> function that waits until they are idle.
    """

    async def build(name: str) -> None:
        status.show("starts", name)
        await (running[name]() if name in running else _build(name, groups[name], config, done))
        await built(name)
        status.show("waits for the other groups to start", name)

    if config.cluster.mode is Mode.colocated:
        for name in groups:
            await build(name)
    else:
        async with asyncio.TaskGroup() as builds:
            for name in groups:
                builds.create_task(build(name))
    for name in groups:
        status.show("waits for weight sync" if name == "rollout" else "waits for rollouts", name)


def _rollout_worker(config: RunConfig, seed: int) -> Any:
    """Build one engine's worker; runs in the worker's process. `search.url` names a running server."""
    from rlsys.rollout.worker import RolloutWorker  # imports torch; keep it out of the driver

    cluster = config.cluster
    return RolloutWorker(
        model_path=config.model.path,
        rollout=config.rollout,
        task=config.task,
        search=config.search,
        device=cluster.device,
        seed=seed,
        on_update=on_update(config),
        memory_saver=cluster.mode is Mode.colocated and cluster.device is Device.gpu,
        sampled_answers=config.compat.sampled_validation,
        family=config.model.family,
        returns_routes=config.algorithm.router_replay is RouterReplay.r3,
        lora=config.model.lora,
    )


async def _build(name: str, group: WorkerGroup, config: RunConfig, done: int) -> None:
    if name == "rollout":
        first = config.trainer.seed + done * group.seats.planned
        arguments = [(config, first + rank) for rank in range(len(group.ranks))]
        await group.build(_rollout_worker, arguments, config.rollout.engine.start_timeout_s)
    else:
        await launch_megatron(group, name, config)


async def restart_engine(group: WorkerGroup, member: Member, config: RunConfig, done: int = 0) -> None:
    """Start the process of a new engine, or of one again, with a seed that no other engine of this process has had."""
    seed = config.trainer.seed + done * group.seats.planned + member.life
    group.restart(member.engine)
    start_timeout_s = config.rollout.engine.start_timeout_s
    await group.build(_rollout_worker, [(config, seed)], start_timeout_s, member.engine)


def holdings(config: RunConfig) -> dict[str, list[tuple[int, ...]]]:
    """Return group name -> device ranks of each worker process, in the order in which groups are built.

    An engine holds `tp` ranks, a Megatron process holds one.
    """
    with_critic = has_critic(config.algorithm)
    placed = parse_placement(config.cluster.placement, with_critic)
    ranks = {name: sorted(held) for name, held in placed.items()}
    tp = config.rollout.engine.tp
    held: dict[str, list[tuple[int, ...]]] = {
        "rollout": [tuple(ranks["rollout"][i : i + tp]) for i in range(0, len(ranks["rollout"]), tp)]
    }
    trained = ("actor", CRITIC) if with_critic else ("actor",)
    for name in ("inference", *trained) if scoring_forwards(config.algorithm) else trained:
        held[name] = [(rank,) for rank in ranks[name]]
    return held


Answers = Sequence[Sequence[Any]]
"""[data-parallel rank][micro-batch] results."""


class MegatronGroup:
    """Group of Megatron processes: shards samples over them, and offloads their memory."""

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        """Step under which spans are recorded."""
        self._sharder = sharder
        self._tracer = tracer

    async def offload(self) -> dict[str, float]:
        """Release the group's device memory until `restore`; return bytes and seconds (`switch_figures`)."""
        return switch_figures(await self.workers.call("offload"))

    async def restore(self) -> dict[str, float]:
        """Undo `offload`; return bytes and seconds."""
        return switch_figures(await self.workers.call("restore"))

    def span(self, name: str, **args: Arg) -> AbstractContextManager[dict[str, Arg]]:
        """Record the body as a span of the group in the current `step`."""
        return self._tracer.span(name, None, step=self.step, **args)

    def work(
        self, name: str, samples: Sequence[Sample], batches: Sequence[Sequence[MicroBatch]]
    ) -> AbstractContextManager[dict[str, Arg]]:
        """Record the body, a call with `samples` sharded as `batches`, as a span with the questions and the load."""
        questions = dict.fromkeys(sample.trajectory.question_uid for sample in samples)
        facts: dict[str, Arg] = {"samples": len(samples), QUESTIONS: list(questions)}
        return self.span(name, **facts, **self._sharder.load(batches))

    async def call_sharded(self, method: str, batches: Sequence[Sequence[MicroBatch]], *args: Any) -> list[Any]:
        """Call `method` on every process with the micro-batches of its data-parallel rank and `args`."""
        of_ranks = [share(of_rank) for of_rank in batches]
        return await self.workers.call_each(method, [(of_ranks[rank], *args) for rank in self._sharder.dp_ranks])

    async def computed(self, batches: Sequence[Sequence[MicroBatch]]) -> Answers:
        """Call `compute` on every process and return the results of all micro-batches by data-parallel rank.

        One process of each data-parallel rank returns its results; the others return None.
        """
        return self._reported(await self.call_sharded("compute", batches))

    def _reported(self, answers: Sequence[Any]) -> list[Any]:
        """Return the answers of the processes that report, by data-parallel rank; the others answered None."""
        pairs = zip(self._sharder.dp_ranks, answers, strict=True)
        reported = {rank: answer for rank, answer in pairs if answer is not None}
        return [reported[rank] for rank in range(len(reported))]


class Checkpoints:
    """Saves and loads a group's part of a checkpoint; files are written while the group works."""

    def __init__(self, group: MegatronGroup) -> None:
        self._group = group

    async def begin_save(self, folder: Path) -> None:
        """Copy the state and start writing it to the new folder `folder`, which all processes share.

        Finishes an earlier save first. Raises RunError if a process cannot write.
        """
        with self._group.span("checkpoint.stage"):
            await self._group.workers.call("begin_save", str(folder))

    async def saving(self) -> bool:
        """Return True while a process is writing files."""
        return any(await self._group.workers.call("saving"))

    async def finish_save(self) -> None:
        """Block until the save is complete. Raises RunError if a process could not write.

        The span records the bytes of all processes and the write seconds of the slowest.
        """
        with self._group.span("checkpoint.finish") as args:
            written = await self._group.workers.call("finish_save")
            args["bytes"] = sum(one.bytes for one in written)
            args["write_s"] = max(one.seconds for one in written)

    async def load(self, folder: Path) -> bool:
        """Load a checkpoint; return True if random generators were restored too.

        They are restored only if the parallel layout is the same as at the save. Raises UserError if the checkpoint is
        incomplete, damaged or of another model.
        """
        with self._group.span("checkpoint.load"):
            return all(await self._group.workers.call("load", str(folder)))


class InferenceGroup(MegatronGroup):
    """Computes log-probs and holds the reference policy, which `reference` saves and loads.

    Invariants: no `compute` overlaps an update, which lasts from `begin_update` to the end of `finish_update`. Processes that
    have been started again compute nothing before they have the weights.
    """

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        super().__init__(workers, sharder, tracer)
        self.reference = Checkpoints(self)
        self.recover: Callable[[RankLost, bool], Awaitable[None]] | None = None
        """Starts the processes again after the loss of one, calls `started`, and updates them if the flag is True. Raises
        the loss if that fails. None if the group cannot recover."""
        self._weights = asyncio.Lock()
        self._updating = False
        """True while an update holds `_weights`."""
        self._version = 0
        self._runs, self._loaded = asyncio.Event(), asyncio.Event()
        """Set while all processes run, and while they have the weights to compute with."""
        self._runs.set()
        self._loaded.set()

    @property
    def living(self) -> Mapping[int, None]:
        """All ranks; the push of a version cannot do without one."""
        return dict.fromkeys(range(len(self.workers.ranks)))

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return scores without values, in the order of `samples`; log-probs are 0 at untrained tokens.

        Their version is that of the group's policy.
        """
        plan, batches = self._sharder.shard(samples)
        while True:
            await self._loaded.wait()
            async with self._weights:
                if not self._loaded.is_set():
                    continue
                try:
                    with self.work("logprob.compute", samples, batches):
                        answers = await self.computed(batches)
                    version = self._version
                    break
                except RankLost as problem:
                    lost = problem
                    self._stopped()
            await self._recovered(lost, updated=True)
        return [replace(one, version=version) for one in scores_of(plan, batches, answers, samples)]

    def started(self, loaded: bool) -> None:
        """Record that all processes run again, and with `loaded` that they can compute without an update."""
        self._runs.set()
        if loaded:
            self._loaded.set()

    def _stopped(self) -> None:
        self._runs.clear()
        self._loaded.clear()

    async def _recovered(self, lost: RankLost, updated: bool) -> None:
        if self.recover is None:
            raise lost
        await self.recover(lost, updated)

    async def open_transport(self, specs: Mapping[int, TransportSpec]) -> None:
        """Open the transport on each rank with its spec."""
        await self.workers.call_each("open_transport", [(specs[rank],) for rank in self.living])

    async def begin_update(self, version: int) -> None:  # noqa: ARG002
        """Block until running computations end, then prepare to receive `version`; discards an unfinished update.

        Processes of which one is lost are started again.
        """
        while not self._updating:
            await self._runs.wait()
            await self._weights.acquire()
            self._updating = self._runs.is_set()
            if not self._updating:  # A call before this one has found a loss.
                self._weights.release()
        try:
            try:
                await self.workers.call("begin_update")
            except RankLost as lost:
                self._stopped()
                await self._recovered(lost, updated=False)
                await self.workers.call("begin_update")
        except BaseException:
            self._end_update()
            raise

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Load one bucket on every rank."""
        await self.workers.call("load_bucket", handle)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to `version`. Raises RunError if the received tensors do not match `digest`."""
        try:
            await self.workers.call("finish_update", version, digest)
            self._version = version
            self._loaded.set()
        finally:
            self._end_update()

    def _end_update(self) -> None:
        self._updating = False
        self._weights.release()


class TrainedGroup(MegatronGroup, ABC):
    """Megatron group that trains: accumulates gradients, then takes one optimiser step."""

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        super().__init__(workers, sharder, tracer)
        self._stats: list[Mapping[str, float]] = []
        self.checkpoints = Checkpoints(self)

    @abstractmethod
    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Reduce the loss statistics of a mini-batch to metrics."""

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        """Return True if a call with `samples` keeps every rank and pipeline stage busy."""
        return self._sharder.fills_micro_batches(samples)

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> list[Floats] | None:
        """Add the gradient of the summed loss of `samples`; `last` marks the final call before `apply`.

        Returns the policy's log-probs [seq] in the order of `samples` if they are the old log-probs, else None.
        """
        plan, batches = self._sharder.shard(samples)
        with self.work("train.accumulate", samples, batches):
            answers = await self.call_sharded("accumulate", batches, last)
        return self._taken(samples, plan, batches, self._reported(answers))

    def _taken(
        self,
        samples: Sequence[Sample],
        plan: Plan,
        batches: Sequence[Sequence[MicroBatch]],
        answers: Sequence[Accumulated],
    ) -> list[Floats] | None:
        """Keep the statistics of one `accumulate`; return its log-probs in the order of the samples, if any."""
        self._stats += [one.stats for one in answers]
        logprobs = [one.logprobs for one in answers if one.logprobs is not None]
        return joined_branches(samples, _rows(plan, batches, logprobs)) if logprobs else None

    async def apply(self) -> dict[str, float]:
        """Take one optimiser step; return the loss metrics of its samples, the gradient norm and the learning rate."""
        with self.span("train.apply"):
            applied = (await self.workers.call("apply"))[0]
        stats, self._stats = self._stats, []
        return {**self._figures(stats), "grad_norm": applied.grad_norm, "lr": applied.lr}


class ActorGroup(TrainedGroup):
    """Trains the policy."""

    async def end_step(self, version: int) -> None:
        """Finish the step: the policy is now `version`, and a reference policy in these processes may follow it."""
        await self.workers.call("end_step", version)

    async def device_names(self) -> list[str]:
        """Device names of all processes, as reported by the GPU driver."""
        return list(await self.workers.call("device_name"))

    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return reduce_stats(stats)


class CriticGroup(TrainedGroup):
    """Trains the critic. The mask of its sharder selects the tokens with values."""

    async def compute(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return values [seq] in the order of `samples`; 0 outside the mask."""
        plan, batches = self._sharder.shard(samples)
        with self.work("values.compute", samples, batches):
            answers = await self.computed(batches)
        return joined_branches(samples, _rows(plan, batches, answers))

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> list[Floats] | None:
        """Add the gradient of the summed loss of `samples`; strips `picks`, which only the actor uses."""
        return await super().accumulate([replace(sample, picks=None) for sample in samples], last)

    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        # The actor already reports the token count.
        return {name: value for name, value in reduce_stats(stats).items() if name != TOKENS}


class Scorer:
    """Scores samples in the inference group, the critic and a teacher's server concurrently, as far as the run has
    them."""

    def __init__(
        self,
        inference: InferenceGroup | None,
        critic: CriticGroup | None,
        source: OldLogprobs,
        teacher: TeacherServer | None = None,
    ) -> None:
        """`source` names the old log-probs; with `actor`, the scores have none."""
        held = {"inference": inference, "critic": critic}
        self.groups = tuple(name for name, group in held.items() if group is not None)
        self._inference, self._critic, self._source, self._teacher = inference, critic, source, teacher

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return log-probs and values in the order of `samples`."""
        found = [Scores()] * len(samples)
        async with asyncio.TaskGroup() as tasks:
            scores = tasks.create_task(self._inference.compute(samples)) if self._inference else None
            values = tasks.create_task(self._critic.compute(samples)) if self._critic else None
            taught = tasks.create_task(self._teacher.compute(samples)) if self._teacher else None
        if scores is not None:
            found = scores.result()
        if self._source is not OldLogprobs.recompute:
            found = [replace(one, version=None) for one in found]
        if self._source is OldLogprobs.engine:
            # Tokens that were not sampled have no engine log-prob and are not trained.
            sampled = [np.nan_to_num(sample.trajectory.rollout_logprobs) for sample in samples]
            found = [replace(one, policy=policy) for one, policy in zip(found, sampled, strict=True)]
        if taught is not None:
            found = [replace(one, reference=theirs) for one, theirs in zip(found, taught.result(), strict=True)]
        if values is not None:
            found = [replace(one, values=own) for one, own in zip(found, values.result(), strict=True)]
        return found


def scores_of(
    plan: Plan, batches: Sequence[Sequence[MicroBatch]], answers: Answers, samples: Sequence[Sample]
) -> list[Scores]:
    """Return the `LogProbs` of sharded micro-batches as scores of `samples`, in their order."""
    found: dict[int, Scores] = {}
    for indices, batch, result in _results(plan, batches, answers):
        found |= zip(indices, _split(result, batch), strict=True)
    parts = iter(found[index] for index in range(len(found)))
    return [_joined([next(parts) for _ in sample.trajectory.branches]) for sample in samples]


def _joined(branches: Sequence[Scores]) -> Scores:
    """Return the scores of the branches of one sample as those of the sample."""
    if len(branches) == 1:
        return branches[0]
    policies, references, picks = (
        [found for one in branches if (found := getattr(one, name)) is not None]
        for name in ("policy", "reference", "picks")
    )
    return Scores(
        np.concatenate(policies) if policies else None,
        np.concatenate(references) if references else None,
        TopkLogprobs(*(np.concatenate([getattr(one, name) for one in picks]) for name in ("tokens", "logprobs")))
        if picks
        else None,
    )


def _split(result: LogProbs, batch: MicroBatch) -> list[Scores]:
    """Return the scores of each sequence of `batch`."""
    nothing: list[None] = [None] * len(batch.lengths)
    policies = nothing if result.policy is None else batch.split(result.policy)
    references = nothing if result.reference is None else batch.split(result.reference)
    picks: list[TopkLogprobs] | list[None] = nothing
    if result.picks is not None and len(batch.lengths):  # Without sequences, np.split still returns one part.
        ends = np.cumsum(batch.trained_lengths)[:-1]
        picks = [TopkLogprobs(*pair) for pair in zip(*(np.split(one, ends) for one in result.picks), strict=True)]
    parts = zip(policies, references, picks, strict=True)
    return [Scores(policy, reference, picked) for policy, reference, picked in parts]


def _rows(plan: Plan, batches: Sequence[Sequence[MicroBatch]], answers: Answers) -> list[Floats]:
    """Return per-token results [rows, width] of sharded micro-batches as one array [tokens] per sequence, in their order."""
    found: dict[int, Floats] = {}
    for indices, batch, values in _results(plan, batches, answers):
        found |= zip(indices, batch.split(values), strict=True)
    return [found[index] for index in range(len(found))]


def _results(
    plan: Plan, batches: Sequence[Sequence[MicroBatch]], answers: Answers
) -> Iterator[tuple[list[int], MicroBatch, Any]]:
    """Yield (indices of sequences, micro-batch, result) of all ranks."""
    for of_rank in zip(plan, batches, answers, strict=True):
        yield from zip(*of_rank, strict=True)


async def launch_megatron(workers: WorkerGroup, kind: str, config: RunConfig) -> None:
    """Build the workers of a Megatron group and initialise torch.distributed; `kind` is actor, critic or inference."""
    timeout_s = config.cluster.start_timeout_s
    address = await workers.free_address(timeout_s)
    size = len(workers.ranks)
    meetings = [(rank, size, *address, config.cluster.device, config.cluster.call_timeout_s) for rank in range(size)]
    await workers.build(_megatron_worker, [(kind, config, meeting) for meeting in meetings], timeout_s)


def _megatron_worker(kind: str, config: RunConfig, rendezvous: tuple) -> Any:
    from rlsys.trainer.actor import Actor, Critic  # imports Megatron; keep it out of the driver
    from rlsys.trainer.log_prob import LogProbWorker
    from rlsys.trainer.mesh import Rendezvous

    workers: dict[str, Any] = {"actor": Actor, "critic": Critic, "inference": LogProbWorker}
    return workers[kind].from_config(config, Rendezvous(*rendezvous))


Switch = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Offloads or restores a group; returns its cost as span arguments (bytes, rss_before, rss_after, ...). Idempotent."""


class OffloadManager:
    """Moves colocated groups on and off the devices that they share.

    Example with members rollout, actor and inference, rollout on the devices:

        onload("actor")               offload rollout, restore actor
        onload("actor", "inference")  restore inference; the actor stays

    Invariant: a member is restored only after every member that holds memory and is not needed has been offloaded.

    A member whose offload or restore failed or was cancelled counts as holding memory, but not as ready. The next call
    repeats the operation, so both operations must be idempotent. Names of other groups are ignored: a disaggregated run
    has no members, and every call is a no-op.
    """

    def __init__(self, groups: Mapping[str, tuple[Switch, Switch]], tracer: Tracer) -> None:
        """`groups` maps each member to its (offload, restore). Report each member with `built` once it exists."""
        self.step = 0
        self._groups = dict(groups)
        self._tracer = tracer
        self._holding: set[str] = set()
        self._ready: set[str] = set()
        self._switching = asyncio.Lock()

    @property
    def ready(self) -> frozenset[str]:
        """Members that are on the devices and can work."""
        return frozenset(self._ready)

    @property
    def holding(self) -> frozenset[str]:
        """Members that hold device memory: ready members, and members whose last offload or restore did not finish."""
        return frozenset(self._holding)

    async def built(self, name: str) -> None:
        """Offload member `name`, which has just been built on its devices; no-op for other groups."""
        async with self._switching:
            if name in self._groups:
                self._holding.add(name)
                await self._release(name)

    async def onload(self, *names: str) -> None:
        """Offload all other members, then restore the members `names` in this order.

        Raises the error of a member that failed; the call may then be repeated, also with other names.
        """
        async with self._switching:
            for name in self._groups:
                if name in self._holding and name not in names:
                    await self._release(name)
            for name in names:
                if name in self._groups and name not in self._ready:
                    await self._acquire(name)

    async def _release(self, name: str) -> None:
        self._ready.discard(name)
        await self._switch(name, 0, "leaves its devices", "switch.release")
        self._holding.discard(name)
        status.show("waits for its devices", f"{name}.devices")

    async def _acquire(self, name: str) -> None:
        self._holding.add(name)
        await self._switch(name, 1, "takes its devices", "switch.acquire")
        self._ready.add(name)

    async def _switch(self, name: str, which: int, text: str, span: str) -> None:
        timed = self._tracer.span(span, lane=name, step=self.step)
        with status.stage(text, f"{name}.devices", span=timed) as args:
            args.update(await self._groups[name][which]() or {})
