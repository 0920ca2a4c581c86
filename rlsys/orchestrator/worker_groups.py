"""The worker groups of a run from the driver's side: their processes, the Megatron groups, and who is on shared devices.

`started_groups` gives empty processes, `build_groups` makes the workers in them: side by side where every group has devices
of its own; one after the other, each leaving the devices before the next comes, where they share them. On the way out every
process is ended, whatever the reason.

A Megatron group takes samples in and gives scores or an update out. It shards samples over its data-parallel ranks in
micro-batches, and hands every process those of its own rank. Calls reach every process of a group in the order in which they
are made, so that one may be made while another is under way: it waits for its turn.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.algorithms.losses import TOKENS, reduce_stats
from rlsys.cluster.planning.placement import CRITIC, parse_placement, plan_bundles
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup, share
from rlsys.config.derived import has_critic, on_update
from rlsys.config.schema import Device, Mode, RunConfig
from rlsys.data.trajectory import Floats, Sample, Scores, TopkLogprobs
from rlsys.observe import status
from rlsys.observe.spans import QUESTIONS, Arg, Tracer
from rlsys.trainer.batches import BatchSharder, LogProbs, MicroBatch, Plan
from rlsys.trainer.offload import switch_figures
from rlsys.weights.transport import BucketHandle, TransportSpec

STOP_TIMEOUT_S = 30.0


@asynccontextmanager
async def started_groups(config: RunConfig, log_dir: Path) -> AsyncIterator[dict[str, WorkerGroup]]:
    """The processes of all groups, empty."""
    several = config.cluster.nodes > 1
    plan = plan_bundles(holdings(config), config.cluster.devices_per_node if several else None)
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
                    variables=_search_token(config),
                )
            yield groups
        finally:
            for group in groups.values():
                group.kill()


def _search_token(config: RunConfig) -> dict[str, str]:
    """The variable with the search servers' token, which other machines may not have in their environment."""
    name = config.search.token_env
    return {name: os.environ[name]} if name and name in os.environ else {}


async def build_groups(
    config: RunConfig,
    groups: Mapping[str, WorkerGroup],
    built: Callable[[str], Awaitable[None]],
    done: int = 0,
) -> None:
    """Make the workers of all groups, each followed by `built`.

    With `done` steps behind it, a run draws otherwise than at its beginning.
    """

    async def build(name: str) -> None:
        status.show("starts", name)
        await _build(name, groups[name], config, done)
        await built(name)
        status.show("waits for the other groups to start", name)

    if config.cluster.mode is Mode.collocated:
        for name in groups:
            await build(name)
    else:
        async with asyncio.TaskGroup() as builds:
            for name in groups:
                builds.create_task(build(name))
    for name in groups:
        status.show("waits for weight sync" if name == "rollout" else "waits for rollouts", name)


def _rollout_worker(config: RunConfig, seed: int) -> Any:
    """Build one engine's worker, in its own process; `search.url` names a running server."""
    from rlsys.rollout.engine import RolloutWorker  # loads SGLang, which the driver has no use for

    cluster = config.cluster
    return RolloutWorker(
        model_path=config.model.path,
        rollout=config.rollout,
        task=config.task,
        search=config.search,
        device=cluster.device,
        seed=seed,
        on_update=on_update(config),
        memory_saver=cluster.mode is Mode.collocated and cluster.device is Device.gpu,
        sampled_answers=config.compat.sampled_validation,
    )


async def _build(name: str, group: WorkerGroup, config: RunConfig, done: int) -> None:
    if name == "rollout":
        first = config.trainer.seed + done * len(group.ranks)
        arguments = [(config, first + rank) for rank in range(len(group.ranks))]
        await group.build(_rollout_worker, arguments, config.rollout.engine.start_timeout_s)
    else:
        await launch_megatron(group, name, config)


def holdings(config: RunConfig) -> dict[str, list[tuple[int, ...]]]:
    """The device ranks of each worker process of the groups that the run has, in the order they are built.

    An engine holds `tp` ranks, a Megatron process one.
    """
    with_critic = has_critic(config.algorithm)
    placed = parse_placement(config.cluster.placement, with_critic)
    ranks = {name: sorted(held) for name, held in placed.items()}
    tp = config.rollout.engine.tp
    held: dict[str, list[tuple[int, ...]]] = {
        "rollout": [tuple(ranks["rollout"][i : i + tp]) for i in range(0, len(ranks["rollout"]), tp)]
    }
    trained = ("actor", CRITIC) if with_critic else ("actor",)
    for name in ("inference", *trained) if config.algorithm.recompute_logprobs else trained:
        held[name] = [(rank,) for rank in ranks[name]]
    return held


Answers = Sequence[Sequence[Any]]
"""[data-parallel rank][micro-batch] results."""


class MegatronGroup:
    """What every group has: processes, a sharder of samples for them, and memory on their devices."""

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        """That what it does is counted to."""
        self._sharder = sharder
        self._tracer = tracer

    async def offload(self) -> dict[str, float]:
        """Release the memory of the group's devices until `restore`; what it cost, as `switch_figures` says."""
        return switch_figures(await self.workers.call("offload"))

    async def restore(self) -> dict[str, float]:
        """Bring back what `offload` released; what it cost."""
        return switch_figures(await self.workers.call("restore"))

    def span(self, name: str, **args: Arg) -> AbstractContextManager[dict[str, Arg]]:
        """Record the body's time as the group's, in the step that it is counted to."""
        return self._tracer.span(name, None, step=self.step, **args)

    def work(
        self, name: str, samples: Sequence[Sample], batches: Sequence[Sequence[MicroBatch]]
    ) -> AbstractContextManager[dict[str, Arg]]:
        """The span of a call for `samples`, sharded as `batches`: whose they are, and how full these are."""
        questions = dict.fromkeys(sample.trajectory.question_uid for sample in samples)
        facts: dict[str, Arg] = {"samples": len(samples), QUESTIONS: list(questions)}
        return self.span(name, **facts, **self._sharder.load(batches))

    async def call_sharded(self, method: str, batches: Sequence[Sequence[MicroBatch]], *args: Any) -> list[Any]:
        """Call `method` on every process with the micro-batches of its data-parallel rank and `args`."""
        of_ranks = [share(of_rank) for of_rank in batches]
        return await self.workers.call_each(method, [(of_ranks[rank], *args) for rank in self._sharder.dp_ranks])

    async def computed(self, batches: Sequence[Sequence[MicroBatch]]) -> Answers:
        """Results of all micro-batches: one process of each data-parallel rank reports, the others answer None."""
        answers = await self.call_sharded("compute", batches)
        pairs = zip(self._sharder.dp_ranks, answers, strict=True)
        reported = {rank: results for rank, results in pairs if results is not None}
        return [reported[rank] for rank in range(len(batches))]


class Checkpoints:
    """What the processes of a group save and load together, while they go on working."""

    def __init__(self, group: MegatronGroup) -> None:
        self._group = group

    async def begin_save(self, folder: Path) -> None:
        """Copy what is saved, and begin to write it to the new folder `folder`, which all processes share.

        A save before it is finished first. Raises RunError if one cannot write.
        """
        with self._group.span("checkpoint.stage"):
            await self._group.workers.call("begin_save", str(folder))

    async def saving(self) -> bool:
        """Whether files are still being written."""
        return any(await self._group.workers.call("saving"))

    async def finish_save(self) -> None:
        """Wait until what was begun is complete. Raises RunError if one could not write.

        The span says what was written meanwhile: bytes of all processes, seconds of the slowest.
        """
        with self._group.span("checkpoint.finish") as args:
            written = await self._group.workers.call("finish_save")
            args["bytes"] = sum(one.bytes for one in written)
            args["write_s"] = max(one.seconds for one in written)

    async def load(self, folder: Path) -> bool:
        """Continue from a checkpoint; whether random generators do as well.

        They do only in the parallel layout that they were saved in. Raises UserError if the checkpoint is incomplete,
        damaged or of another model.
        """
        with self._group.span("checkpoint.load"):
            return all(await self._group.workers.call("load", str(folder)))


class InferenceGroup(MegatronGroup):
    """Recomputes log-probs, and holds the reference policy, whose checkpoints are `reference`.

    Contract: nothing is computed from `begin_update` to the end of `finish_update`; each waits for the other.
    """

    groups: tuple[str, ...] = ("inference",)

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        super().__init__(workers, sharder, tracer)
        self.reference = Checkpoints(self)
        self._weights = asyncio.Lock()
        self._version = 0

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that take weights: all."""
        return tuple(range(len(self.workers.ranks)))

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Scores without values, in the order of `samples`; log-probs are 0 where nothing is trained."""
        plan, batches = self._sharder.shard(samples)
        async with self._weights:
            with self.work("logprob.compute", samples, batches):
                answers = await self.computed(batches)
            version = self._version
        return [replace(one, version=version) for one in scores_of(plan, batches, answers)]

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        """Let each rank take weights in the way of its spec."""
        await self.workers.call_each("open_transport", [(spec,) for spec in specs])

    async def begin_update(self, version: int) -> None:  # noqa: ARG002
        """Wait for what is being computed, and begin to take `version`."""
        await self._weights.acquire()
        try:
            await self.workers.call("begin_update")
        except BaseException:
            self._weights.release()
            raise

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Let every rank take a bucket."""
        await self.workers.call("load_bucket", handle)

    async def finish_update(self, version: int, digest: str) -> None:
        """Compute with `version` from now on. Raises RunError if it is not what the digest speaks of."""
        try:
            await self.workers.call("finish_update", version, digest)
            self._version = version
        finally:
            self._weights.release()


class TrainedGroup(MegatronGroup, ABC):
    """A group that learns: gradients accumulate, then one optimiser step for all."""

    def __init__(self, workers: WorkerGroup, sharder: BatchSharder, tracer: Tracer) -> None:
        super().__init__(workers, sharder, tracer)
        self._stats: list[Mapping[str, float]] = []
        self.checkpoints = Checkpoints(self)

    @abstractmethod
    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """What the loss's statistics of a mini-batch come to."""

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Whether a call for `samples` keeps every rank and pipeline stage busy."""
        return self._sharder.enough(samples)

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:
        """Add the gradient of the summed loss of `samples`, the `last` of an optimiser step or not."""
        _, batches = self._sharder.shard(samples)
        with self.work("train.accumulate", samples, batches):
            answers = await self.call_sharded("accumulate", batches, last)
        self._stats.extend(filter(None, answers))

    async def apply(self) -> dict[str, float]:
        """Take one optimiser step; means of what was accumulated for it, gradient norm and rate."""
        with self.span("train.apply"):
            applied = (await self.workers.call("apply"))[0]
        stats, self._stats = self._stats, []
        return {**self._figures(stats), "grad_norm": applied.grad_norm, "lr": applied.lr}


class ActorGroup(TrainedGroup):
    """Trains the policy."""

    async def end_step(self, version: int) -> None:
        """The step's last update is done, and the policy is now `version`: a reference held here may follow it."""
        await self.workers.call("end_step", version)

    async def device_names(self) -> list[str]:
        """Of all processes, as their drivers give them."""
        return list(await self.workers.call("device_name"))

    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return reduce_stats(stats)


class CriticGroup(TrainedGroup):
    """Learns what episodes are going to be worth. Its sharder's mask says at which tokens."""

    async def compute(self, samples: Sequence[Sample]) -> list[Floats]:
        """Values [seq] in the order of `samples`; 0 outside of the mask."""
        plan, batches = self._sharder.shard(samples)
        with self.work("values.compute", samples, batches):
            answers = await self.computed(batches)
        found: list[Floats] = [np.empty(0, np.float32)] * len(samples)
        for indices, batch, values in _results(plan, batches, answers):
            for index, row in zip(indices, batch.split(values), strict=True):
                found[index] = row
        return found

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:
        """Add the gradient of the summed loss of `samples`, whose picks are the actor's alone."""
        await super().accumulate([replace(sample, picks=None) for sample in samples], last)

    def _figures(self, stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        # Its tokens are counted by the actor already.
        return {name: value for name, value in reduce_stats(stats).items() if name != TOKENS}


class EngineLogprobs:
    """A scorer that takes the engine's own log-probs, for runs that do not recompute them."""

    groups: tuple[str, ...] = ()
    step = 0

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """What was sampled with; 0 where nothing was sampled, which is not trained."""
        return [Scores(np.nan_to_num(sample.trajectory.rollout_logprobs)) for sample in samples]


class WithValues:
    """A scorer that has the critic speak beside another, at the same time."""

    def __init__(self, logprobs: InferenceGroup | EngineLogprobs, critic: CriticGroup) -> None:
        self.groups = (*logprobs.groups, "critic")
        self._logprobs, self._critic = logprobs, critic

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """All scores, in the order of `samples`."""
        async with asyncio.TaskGroup() as tasks:
            scores = tasks.create_task(self._logprobs.compute(samples))
            values = tasks.create_task(self._critic.compute(samples))
        return [replace(one, values=own) for one, own in zip(scores.result(), values.result(), strict=True)]


def scores_of(plan: Plan, batches: Sequence[Sequence[MicroBatch]], answers: Answers) -> list[Scores]:
    """`LogProbs` of sharded micro-batches as scores of the samples, in the order of these."""
    found: dict[int, Scores] = {}
    for indices, batch, result in _results(plan, batches, answers):
        found |= zip(indices, _split(result, batch), strict=True)
    return [found[index] for index in range(len(found))]


def _split(result: LogProbs, batch: MicroBatch) -> list[Scores]:
    """Of each sequence of `batch`."""
    nothing: list[None] = [None] * len(batch.lengths)
    references = nothing if result.reference is None else batch.split(result.reference)
    picks: list[TopkLogprobs] | list[None] = nothing
    if result.picks is not None and len(batch.lengths):  # np.split makes one part of nothing.
        ends = np.cumsum(batch.trained_lengths)[:-1]
        picks = [TopkLogprobs(*pair) for pair in zip(*(np.split(one, ends) for one in result.picks), strict=True)]
    parts = zip(batch.split(result.policy), references, picks, strict=True)
    return [Scores(policy, reference, picked) for policy, reference, picked in parts]


def _results(
    plan: Plan, batches: Sequence[Sequence[MicroBatch]], answers: Answers
) -> Iterator[tuple[list[int], MicroBatch, Any]]:
    """(indices of its samples, micro-batch, result) of all ranks."""
    for of_rank in zip(plan, batches, answers, strict=True):
        yield from zip(*of_rank, strict=True)


async def launch_megatron(workers: WorkerGroup, kind: str, config: RunConfig) -> None:
    """Build the processes of a Megatron group, `kind` actor, critic or inference, and let them meet."""
    timeout_s = config.cluster.start_timeout_s
    address = await workers.free_address(timeout_s)
    size = len(workers.ranks)
    meetings = [(rank, size, *address, config.cluster.device, config.cluster.call_timeout_s) for rank in range(size)]
    await workers.build(_megatron_worker, [(kind, config, meeting) for meeting in meetings], timeout_s)


def _megatron_worker(kind: str, config: RunConfig, rendezvous: tuple) -> Any:
    from rlsys.trainer.actor import Actor, Critic  # loads Megatron, which the driver has no use for
    from rlsys.trainer.log_prob import LogProbWorker
    from rlsys.trainer.mesh import Rendezvous

    workers: dict[str, Any] = {"actor": Actor, "critic": Critic, "inference": LogProbWorker}
    return workers[kind].from_config(config, Rendezvous(*rendezvous))


Switch = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Moves a group's memory; what it cost, as arguments of its span: bytes, rss_before, rss_after, ... May be repeated."""


class OffloadManager:
    """Moves groups that are colocated on and off the devices that they share.

    Invariant: a member acquires only after everyone else who holds memory and is not needed has released it. A member
    whose release or acquisition failed or was cut off counts as holding memory and as not ready, so the next call finishes
    what was begun; members' calls must therefore bear being repeated.

    Names that are not members are groups with devices of their own, always there: without members, as in a disaggregated
    run, every call does nothing.
    """

    def __init__(self, groups: Mapping[str, tuple[Switch, Switch]], tracer: Tracer) -> None:
        """`groups` are the offload and the restore of each. None is built yet: once one is, `built` has it make room."""
        self.step = 0
        self._groups = dict(groups)
        self._tracer = tracer
        self._holding: set[str] = set()
        self._ready: set[str] = set()
        self._switching = asyncio.Lock()

    @property
    def ready(self) -> frozenset[str]:
        """Members that are resident and can work."""
        return frozenset(self._ready)

    @property
    def holding(self) -> frozenset[str]:
        """Members that hold memory: those that are ready, and those whose last switch did not end."""
        return frozenset(self._holding)

    async def built(self, name: str) -> None:
        """Member `name` has just been built, and so is resident: release it."""
        async with self._switching:
            if name in self._groups:
                self._holding.add(name)
                await self._release(name)

    async def need(self, *names: str) -> None:
        """Make the members `names` ready, in this order, after all others have released their memory.

        Raises what a member raises; the call can be repeated, or another made.
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
