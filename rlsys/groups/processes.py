"""What runs in the processes of the Megatron groups: a worker, and the shape of calls from the driver.

The driver hands every process the micro-batches of all data-parallel ranks, as one shared object; here
each process takes its own. Imported in worker processes only: it loads Megatron.
"""

from __future__ import annotations

import functools

from rlsys.algorithms.losses import grpo_loss
from rlsys.config.schema import RunConfig
from rlsys.megatron.actor import Actor
from rlsys.megatron.export import Export
from rlsys.megatron.log_prob_worker import LogProbWorker
from rlsys.megatron.parallel import Rendezvous
from rlsys.megatron.results import Accumulated, Applied, LogProbs
from rlsys.pipeline.micro_batch import MicroBatch
from rlsys.weights.copy_speed import copy_gb_s
from rlsys.weights.transport import Parcel, Receiver, Sender, TransportSpec, open_receiver, open_sender

Dealt = list[list[MicroBatch]]
"""[data-parallel rank][micro-batch]"""


class InferenceProcess:
    """One process of the inference group."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous) -> None:
        self._worker = LogProbWorker(
            rendezvous,
            config.model,
            config.inference.parallel,
            config.rollout.sampling.temperature,
            with_reference=config.algorithm.kl_coef > 0,
            seed=config.trainer.seed,
        )
        self._receiver: Receiver | None = None
        self.finish_update = self._worker.finish_update
        self.offload = functools.partial(self._worker.offload, config.output_dir)
        self.restore = self._worker.restore

    def open_transport(self, spec: TransportSpec) -> None:
        """Take weights in the way of `spec` from now on."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = open_receiver(spec)

    def begin_update(self, _version: int) -> None:
        """Begin to take a version; its number comes with its digest, at the end."""
        self._worker.begin_update()

    def load_bucket(self, parcel: Parcel) -> None:
        """Take some of the version's tensors. Raises ChecksumError if one is not as it was sent."""
        if self._receiver is None:
            raise RuntimeError("A parcel came before open_transport.")
        self._worker.load_bucket(self._receiver.receive(parcel))

    def compute(self, dealt: Dealt) -> tuple[int, list[LogProbs]] | None:
        """Data-parallel rank and its log-probs, from the process that reports for it; None from others."""
        dp_rank = self._worker.place.dp
        results = self._worker.compute(dealt[dp_rank])
        return None if results is None else (dp_rank, results)


class ActorProcess:
    """One process of the actor."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous) -> None:
        self._actor = Actor(
            rendezvous,
            config.model,
            config.actor.parallel,
            config.actor.optimizer,
            loss=grpo_loss(config.algorithm),
            temperature=config.rollout.sampling.temperature,
            total_steps=config.trainer.steps * config.trainer.mini_batches,
            seed=config.trainer.seed,
        )
        self._actor.load_hf(config.model.path)
        self._bucket_bytes = config.cluster.sync_bucket_bytes
        self._sender: Sender | None = None
        self._export: Export | None = None
        self.save = self._actor.save
        self.offload = functools.partial(self._actor.offload, config.output_dir)
        self.restore = self._actor.restore

    def accumulate(self, dealt: Dealt) -> Accumulated:
        """Add the gradient of this data-parallel rank's micro-batches."""
        return self._actor.accumulate(dealt[self._actor.place.dp])

    def apply(self) -> Applied:
        """Take one optimiser step."""
        return self._actor.apply()

    def open_transport(self, spec: TransportSpec) -> float | None:
        """Hand weights out in the way of `spec` from now on; rank 0 says how fast its host copies, in GB/s."""
        if self._actor.place.rank:
            return None
        if self._sender is not None:
            self._sender.close()
        self._sender = open_sender(spec)
        return copy_gb_s(self._bucket_bytes)

    def begin_export(self) -> None:
        """Begin to hand out the weights as they are now."""
        self._export = self._actor.export(self._bucket_bytes, self._sender)

    def next_parcel(self, taken: int) -> Parcel | None:
        """The next bucket's parcel from rank 0; None at the end and from other ranks, which only take part.

        `taken` counts the buckets that every receiver has taken since the transport was opened.
        """
        if self._sender is not None:
            self._sender.release(taken)
        return self._running_export().next()

    def end_export(self, taken: int) -> str:
        """Free what the last buckets lie in; the digest of all that was handed out, from rank 0."""
        if self._sender is not None:
            self._sender.release(taken)
        export, self._export = self._running_export(), None
        return export.digest

    def _running_export(self) -> Export:
        if self._export is None:
            raise RuntimeError("The actor was asked for weights before begin_export.")
        return self._export


def make_inference(config: RunConfig, rendezvous: tuple) -> InferenceProcess:
    """Build one process of the inference group; `rendezvous` as in `Rendezvous`."""
    return InferenceProcess(config, Rendezvous(*rendezvous))


def make_actor(config: RunConfig, rendezvous: tuple) -> ActorProcess:
    """Build one process of the actor; `rendezvous` as in `Rendezvous`."""
    return ActorProcess(config, Rendezvous(*rendezvous))
