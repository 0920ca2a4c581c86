"""The Megatron groups from the driver's side: samples in, scores or an update out.

Each shards samples over its data-parallel ranks in micro-batches, and hands every process those of its own rank. Calls
reach every process of a group in the order in which they are made, so that one may be made while another is under way:
it waits for its turn.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.algorithms.losses import TOKENS, reduce_stats
from rlsys.cluster.worker_group import WorkerGroup, share
from rlsys.config.schema import RunConfig
from rlsys.data.group import Floats, Sample, Scores, TopkLogprobs
from rlsys.observe.spans import QUESTIONS, Arg, Tracer
from rlsys.trainer.batches import BatchSharder, LogProbs, MicroBatch, Plan
from rlsys.trainer.offload import switch_figures
from rlsys.weights.transport import BucketHandle, TransportSpec

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
    await workers.build(_build, [(kind, config, meeting) for meeting in meetings], timeout_s)


def _build(kind: str, config: RunConfig, rendezvous: tuple) -> Any:
    from rlsys.trainer.actor import Actor, Critic  # loads Megatron, which the driver has no use for
    from rlsys.trainer.log_prob import LogProbWorker
    from rlsys.trainer.mesh import Rendezvous

    workers: dict[str, Any] = {"actor": Actor, "critic": Critic, "inference": LogProbWorker}
    return workers[kind].from_config(config, Rendezvous(*rendezvous))
