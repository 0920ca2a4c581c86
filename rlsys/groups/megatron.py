"""The inference group and the actor from the driver's side: samples in, log-probs or an update out.

Both cut samples into micro-batches by token budget, deal them to the data-parallel ranks, and hand
every process the whole plan; each takes its own data-parallel rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.algorithms.losses import reduce_stats
from rlsys.cluster.worker_group import WorkerGroup, share
from rlsys.config.schema import ParallelConfig, RunConfig
from rlsys.observe.spans import Tracer
from rlsys.pipeline.batcher import Plan, plan_micro_batches
from rlsys.pipeline.group import Sample
from rlsys.pipeline.micro_batch import MicroBatch, collate

Floats = NDArray[np.float32]


class Dealer:
    """Cuts samples for one Megatron group."""

    def __init__(self, parallel: ParallelConfig, processes: int, budget_tokens: int, pad_id: int) -> None:
        self._ranks = processes // (parallel.tp * parallel.pp)
        self._budget = budget_tokens
        self._pad_id = pad_id
        self._multiple_of = parallel.tp if parallel.sequence_parallel else 1

    def deal(self, samples: Sequence[Sample]) -> tuple[Plan, list[list[MicroBatch]]]:
        """Which sample went where, and the micro-batches of each data-parallel rank."""
        lengths = [len(sample.trajectory.tokens) for sample in samples]
        plan = plan_micro_batches(lengths, self._budget, self._ranks, self._multiple_of)
        batches = [
            [collate([samples[i] for i in batch], self._pad_id, self._multiple_of) for batch in rank]
            for rank in plan
        ]
        return plan, batches


class InferenceGroup:
    """Recomputes log-probs."""

    def __init__(self, workers: WorkerGroup, dealer: Dealer, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        self._dealer = dealer
        self._tracer = tracer

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        """Log-probs of policy and reference, [seq] each, in the order of `samples`."""
        plan, batches = self._dealer.deal(samples)
        with self._tracer.span("logprob.compute", step=self.step, samples=len(samples)):
            answers = await self.workers.call("compute", share(batches))
        found: list[tuple[Floats, Floats | None]] = [(np.empty(0, np.float32), None)] * len(samples)
        for dp_rank, results in filter(None, answers):
            for indices, result in zip(plan[dp_rank], results, strict=True):
                for row, index in enumerate(indices):
                    length = len(samples[index].trajectory.tokens)
                    reference = None if result.reference is None else result.reference[row, :length]
                    found[index] = (result.policy[row, :length], reference)
        return found


class ActorGroup:
    """Trains."""

    def __init__(self, workers: WorkerGroup, dealer: Dealer, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        self._dealer = dealer
        self._tracer = tracer
        self._stats: list[Mapping[str, float]] = []

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add the gradient of the summed loss of `samples`."""
        _, batches = self._dealer.deal(samples)
        with self._tracer.span("train.accumulate", step=self.step, samples=len(samples)):
            answers = await self.workers.call("accumulate", share(batches))
        self._stats.extend(answer.stats for answer in answers if answer.stats)

    async def apply(self) -> dict[str, float]:
        """Take one optimiser step; token means of what was accumulated, gradient norm and rate."""
        with self._tracer.span("train.apply", step=self.step):
            applied = (await self.workers.call("apply"))[0]
        stats, self._stats = reduce_stats(self._stats), []
        return {**stats, "grad_norm": applied.grad_norm, "lr": applied.lr}

    async def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint of all ranks, and `extra` with it."""
        with self._tracer.span("checkpoint.save", step=self.step):
            await self.workers.call("save", str(folder), extra)


class EngineLogprobs:
    """A scorer that takes the engine's own log-probs, for runs that do not recompute them."""

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        """What was sampled with, [seq] each; 0 where nothing was sampled, which is not trained."""
        return [(np.nan_to_num(sample.trajectory.rollout_logprobs), None) for sample in samples]


async def launch_megatron(workers: WorkerGroup, kind: str, config: RunConfig) -> None:
    """Build the processes of a Megatron group, `kind` actor or inference, and let them meet."""
    timeout_s = config.cluster.start_timeout_s
    address = await workers.free_address(timeout_s)
    size = len(workers.ranks)
    meetings = [
        (rank, size, *address, config.cluster.device, config.cluster.call_timeout_s) for rank in range(size)
    ]
    await workers.build(_BUILDERS[kind], [(config, meeting) for meeting in meetings], timeout_s)


def _build_actor(config: RunConfig, rendezvous: tuple) -> Any:
    from rlsys.groups.processes import make_actor  # loads Megatron, which the driver has no use for

    return make_actor(config, rendezvous)


def _build_inference(config: RunConfig, rendezvous: tuple) -> Any:
    from rlsys.groups.processes import make_inference

    return make_inference(config, rendezvous)


_BUILDERS = {"actor": _build_actor, "inference": _build_inference}
