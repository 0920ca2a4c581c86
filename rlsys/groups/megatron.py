"""The inference group and the actor from the driver's side: samples in, log-probs or an update out.

Both have a dealer cut samples into micro-batches, and hand every process the whole plan; each takes its
own data-parallel rank's part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.algorithms.losses import reduce_stats
from rlsys.cluster.worker_group import WorkerGroup, share
from rlsys.config.schema import RunConfig
from rlsys.groups.dealer import Dealer
from rlsys.megatron.results import switch_figures
from rlsys.observe.spans import Tracer
from rlsys.pipeline.group import Sample
from rlsys.weights.transport import Parcel, TransportSpec

Floats = NDArray[np.float32]


class InferenceGroup:
    """Recomputes log-probs.

    Contract: nothing is computed from `begin_update` to the end of `finish_update`; each waits for the other.
    """

    def __init__(self, workers: WorkerGroup, dealer: Dealer, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        self._dealer = dealer
        self._tracer = tracer
        self._weights = asyncio.Lock()

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that take weights: all."""
        return tuple(range(len(self.workers.ranks)))

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        """Log-probs of policy and reference, [seq] each and 0 where not trained, in the order of `samples`."""
        plan, batches = self._dealer.deal(samples)
        async with self._weights:
            with self._tracer.span("logprob.compute", step=self.step, samples=len(samples)):
                answers = await self.workers.call("compute", share(batches))
        found: list[tuple[Floats, Floats | None]] = [(np.empty(0, np.float32), None)] * len(samples)
        for dp_rank, results in filter(None, answers):
            for indices, batch, result in zip(plan[dp_rank], batches[dp_rank], results, strict=True):
                policy = batch.split(result.policy)
                reference = None if result.reference is None else batch.split(result.reference)
                for row, index in enumerate(indices):
                    found[index] = (policy[row], None if reference is None else reference[row])
        return found

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        """Let each rank take weights in the way of its spec."""
        await self.workers.call_each("open_transport", [(spec,) for spec in specs])

    async def begin_update(self, version: int) -> None:
        """Wait for what is being computed, and begin to take `version`."""
        await self._weights.acquire()
        try:
            await self.workers.call("begin_update", version)
        except BaseException:
            self._weights.release()
            raise

    async def load_bucket(self, parcel: Parcel) -> None:
        """Let every rank take a bucket."""
        await self.workers.call("load_bucket", parcel)

    async def finish_update(self, version: int, digest: str) -> None:
        """Compute with `version` from now on. Raises RunError if it is not what the digest speaks of."""
        try:
            await self.workers.call("finish_update", version, digest)
        finally:
            self._weights.release()

    async def offload(self) -> dict[str, float]:
        """Release the memory of the group's devices until `restore`; what it cost, as `switch_figures` says."""
        return switch_figures(await self.workers.call("offload"))

    async def restore(self) -> dict[str, float]:
        """Bring back what `offload` released; what it cost."""
        return switch_figures(await self.workers.call("restore"))


class ActorGroup:
    """Trains."""

    def __init__(self, workers: WorkerGroup, dealer: Dealer, tracer: Tracer) -> None:
        self.workers = workers
        self.step = 0
        self._dealer = dealer
        self._tracer = tracer
        self._stats: list[Mapping[str, float]] = []

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Whether a call for `samples` keeps every rank and pipeline stage busy."""
        return self._dealer.enough(samples)

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

    async def offload(self) -> dict[str, float]:
        """Release the memory of the group's devices until `restore`; what it cost, as `switch_figures` says."""
        return switch_figures(await self.workers.call("offload"))

    async def restore(self) -> dict[str, float]:
        """Bring back what `offload` released; what it cost."""
        return switch_figures(await self.workers.call("restore"))


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
