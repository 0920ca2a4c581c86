"""What runs in the processes of the Megatron groups: a worker, and the shape of calls from the driver.

The driver hands every process the micro-batches of all data-parallel ranks, as one shared object; here
each process takes its own. Imported in worker processes only: it loads Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rlsys.algorithms.losses import policy_loss
from rlsys.algorithms.values import ValueLoss
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.config.derived import has_critic, has_reference, loss_length, sums_over_vocabulary
from rlsys.config.schema import RunConfig
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.anchor import ReferencePlan
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.critic import Critic
from rlsys.trainer.divergence import divergence_of
from rlsys.trainer.log_prob_worker import LogProbWorker, PickPlan
from rlsys.trainer.parallel import Rendezvous
from rlsys.trainer.results import Accumulated, Applied, LogProbs
from rlsys.trainer.sending import Sending
from rlsys.weights.transport import BucketHandle, Receiver, TransportSpec, open_receiver

Dealt = list[list[MicroBatch]]
"""[data-parallel rank][micro-batch]"""


class InferenceProcess(Sending):
    """One process of the inference group. It takes the policy's weights and hands the reference's out."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous) -> None:
        self._worker = LogProbWorker(
            rendezvous,
            config.model,
            config.inference.parallel,
            config.rollout.sampling.temperature,
            seed=config.trainer.seed,
            reference=reference_plan(config.algorithm),
            picks=pick_plan(config.algorithm),
        )
        super().__init__(self._worker.place, config.cluster.sync_bucket_bytes, self._worker.export_reference)
        self._receiver: Receiver | None = None
        self.finish_update = self._worker.finish_update
        self.begin_save = self._worker.begin_save_reference
        self.saving = self._worker.saving
        self.finish_save = self._worker.finish_save
        self.load = self._worker.load_reference
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

    def load_bucket(self, handle: BucketHandle) -> None:
        """Take some of the version's tensors. Raises ChecksumError if one is not as it was sent."""
        if self._receiver is None:
            raise RuntimeError("A bucket handle came before open_transport.")
        self._worker.load_bucket(self._receiver.receive(handle))
        self._receiver.release()

    def compute(self, dealt: Dealt) -> tuple[int, list[LogProbs]] | None:
        """Data-parallel rank and its log-probs, from the process that reports for it; None from others."""
        dp_rank = self._worker.place.dp
        results = self._worker.compute(dealt[dp_rank])
        return None if results is None else (dp_rank, results)


class ActorProcess(Sending):
    """One process of the actor."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous) -> None:
        self._actor = Actor(
            rendezvous,
            config.model,
            config.actor.parallel,
            config.actor.optimizer,
            objective(config),
            total_steps=actor_steps(config),
            seed=config.trainer.seed,
        )
        self._actor.load_hf(config.model.path)
        super().__init__(self._actor.place, config.cluster.sync_bucket_bytes, self._actor.export)
        self.begin_save = self._actor.begin_save
        self.saving = self._actor.saving
        self.finish_save = self._actor.finish_save
        self.load = self._actor.load
        self.end_step = self._actor.end_step
        self.offload = functools.partial(self._actor.offload, config.output_dir)
        self.restore = self._actor.restore

    def accumulate(self, dealt: Dealt, last: bool) -> Accumulated:
        """Add the gradient of this data-parallel rank's micro-batches, the `last` of an optimiser step or not."""
        return self._actor.accumulate(dealt[self._actor.place.dp], last)

    def apply(self) -> Applied:
        """Take one optimiser step."""
        return self._actor.apply()

    def device_name(self) -> str:
        """Name of the device, as its driver gives it."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class CriticProcess:
    """One process of the critic."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous) -> None:
        self._critic = Critic(
            rendezvous,
            config.model,
            config.critic.parallel,
            config.critic.optimizer,
            ValueLoss(config.critic.value_clip),
            total_steps=config.trainer.steps * config.trainer.mini_batches,
            seed=config.trainer.seed,
        )
        self._critic.load_hf(config.model.path)
        self.apply = self._critic.apply
        self.begin_save = self._critic.begin_save
        self.saving = self._critic.saving
        self.finish_save = self._critic.finish_save
        self.load = self._critic.load
        self.offload = functools.partial(self._critic.offload, config.output_dir)
        self.restore = self._critic.restore

    def compute(self, dealt: Dealt) -> tuple[int, list[NDArray[np.float32]]] | None:
        """Data-parallel rank and its values, from the process that reports for it; None from others."""
        dp_rank = self._critic.place.dp
        results = self._critic.compute(dealt[dp_rank])
        return None if results is None else (dp_rank, results)

    def accumulate(self, dealt: Dealt, last: bool) -> Accumulated:
        """Add the gradient of this data-parallel rank's micro-batches, the `last` of an optimiser step or not."""
        return self._critic.accumulate(dealt[self._critic.place.dp], last)


def objective(config: RunConfig) -> Objective:
    """What the actor minimises."""
    algorithm = config.algorithm
    whole_vocabulary = sums_over_vocabulary(algorithm) and algorithm.kl_topk_tokens is None
    return Objective(
        loss=policy_loss(algorithm),
        temperature=config.rollout.sampling.temperature,
        aggregation=algorithm.aggregation,
        loss_length=loss_length(config),
        divergence=divergence_of(algorithm),
        reference=reference_plan(algorithm) if whole_vocabulary else None,
    )


def actor_steps(config: RunConfig) -> int:
    """Optimiser steps of the actor, which begins when the critic's warm-up has ended."""
    warmup = config.critic.warmup_steps if has_critic(config.algorithm) else 0
    return max(0, config.trainer.steps - warmup) * config.trainer.mini_batches


def reference_plan(algorithm: AlgorithmConfig) -> ReferencePlan | None:
    """How the reference follows the policy; None without one."""
    if not has_reference(algorithm):
        return None
    return ReferencePlan(
        algorithm.ref_policy_ema_tau,
        algorithm.ref_policy_ema_update_period,
        algorithm.ref_policy_reset_period,
    )


def pick_plan(algorithm: AlgorithmConfig) -> PickPlan | None:
    """The tokens that the KL term sums over; None if it sums over none, or over the whole vocabulary."""
    k = algorithm.kl_topk_tokens
    if k is None or not sums_over_vocabulary(algorithm):
        return None
    return PickPlan(k, forward=algorithm.kl_estimator is KlEstimator.full_forward)


Process = InferenceProcess | ActorProcess | CriticProcess

_KINDS: Mapping[str, Callable[[RunConfig, Rendezvous], Process]] = {
    "inference": InferenceProcess,
    "actor": ActorProcess,
    "critic": CriticProcess,
}


def make_process(kind: str, config: RunConfig, rendezvous: tuple) -> Process:
    """Build one process of the group `kind`: inference, actor or critic; `rendezvous` as in `Rendezvous`."""
    return _KINDS[kind](config, Rendezvous(*rendezvous))
