"""What runs in the processes of the Megatron groups: a worker, and the shape of calls from the driver.

The driver hands every process the micro-batches of all data-parallel ranks, as one shared object; here
each process takes its own. Imported in worker processes only: it loads Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.algorithms.losses import grpo_loss
from rlsys.config.schema import RunConfig
from rlsys.megatron.actor import Actor
from rlsys.megatron.log_prob_worker import LogProbWorker
from rlsys.megatron.parallel import Rendezvous
from rlsys.megatron.results import Accumulated, Applied, LogProbs
from rlsys.pipeline.micro_batch import MicroBatch
from rlsys.weights.buckets import Bucket

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
        self.load_bucket = self._worker.load_bucket
        self.finish_update = self._worker.finish_update

    def begin_update(self, _version: int) -> None:
        """Begin to take a version; its number comes with its digest, at the end."""
        self._worker.begin_update()

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
        self._export: Iterator[Bucket | None] = iter(())
        self.save = self._actor.save

    def accumulate(self, dealt: Dealt) -> Accumulated:
        """Add the gradient of this data-parallel rank's micro-batches."""
        return self._actor.accumulate(dealt[self._actor.place.dp])

    def apply(self) -> Applied:
        """Take one optimiser step."""
        return self._actor.apply()

    def open_export(self, bucket_bytes: int) -> None:
        """Begin to hand out the weights."""
        self._export = self._actor.export_buckets(bucket_bytes)

    def next_bucket(self) -> Bucket | None:
        """The next bucket from rank 0; None at the end and from other ranks, which only take part."""
        return next(self._export, None)

    def export_digest(self) -> str | None:
        """Digest of all that was handed out, from rank 0."""
        return self._actor.exported_digest


def make_inference(config: RunConfig, rendezvous: tuple) -> InferenceProcess:
    """Build one process of the inference group; `rendezvous` as in `Rendezvous`."""
    return InferenceProcess(config, Rendezvous(*rendezvous))


def make_actor(config: RunConfig, rendezvous: tuple) -> ActorProcess:
    """Build one process of the actor; `rendezvous` as in `Rendezvous`."""
    return ActorProcess(config, Rendezvous(*rendezvous))
