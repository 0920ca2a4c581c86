"""Makes workers of one process and random micro-batches for them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.gpu.figures import Scale
from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import AdamwConfig, Device, Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.trainer.mesh import Rendezvous


def make_actor(
    folder: Path, device: Device, dtype: Dtype, recompute: bool = False, layers: Layers = Layers.auto
) -> Actor:
    """Return an actor with this process as its only rank: the policy of `folder` with GRPO's loss and a KL term."""
    actor = Actor(
        _alone(device),
        ModelConfig(str(folder), layers=layers, dtype=dtype, recompute=recompute),
        ParallelConfig(),
        AdamwConfig(lr=1e-6),
        Objective(policy_loss(AlgorithmConfig(kl_coef=0.001)), temperature=1.0),
        total_steps=100,
        seed=0,
        scratch=folder,
    )
    actor.load_hf(folder)
    return actor


def score(
    folder: Path, device: Device, layers: Layers, dtype: Dtype, runs: Sequence[Sequence[MicroBatch]]
) -> list[NDArray[np.float32]]:
    """Return the log-probs of all trained tokens of each run of micro-batches, under the model of `folder`."""
    worker = LogProbWorker(
        _alone(device), ModelConfig(str(folder), layers=layers, dtype=dtype), ParallelConfig(), temperature=1.0, seed=0
    )
    scored = []
    for batches in runs:
        found = worker.compute(batches)
        assert found is not None
        parts = [one.policy[batch.loss_mask] for one, batch in zip(found, batches, strict=True)]
        scored.append(np.concatenate(parts))
    return scored


def _alone(device: Device) -> Rendezvous:
    """Return the rendezvous of a process without others, and silence what Megatron logs about it."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return Rendezvous(0, 1, "127.0.0.1", 0, device, timeout_s=120.0)


def random_micro_batch(scale: Scale, vocab: int, seeds: Iterable[int]) -> MicroBatch:
    """Return packed sequences of equal length, each drawn from its own seed; their last tokens are trained."""
    drawn = [np.random.default_rng(seed) for seed in seeds]
    rows = (1, len(drawn) * scale.length)
    trained = np.zeros((len(drawn), scale.length), dtype=np.bool_)
    trained[:, -round(scale.trained * scale.length) :] = True
    mask = trained.reshape(rows)

    def each(values: list[NDArray[np.float64]]) -> NDArray[np.float32]:
        return np.where(mask, np.concatenate(values)[None], 0.0).astype(np.float32)

    logprobs = each([-draw.exponential(2.0, scale.length) for draw in drawn])
    return MicroBatch(
        tokens=np.concatenate([draw.integers(0, vocab, scale.length) for draw in drawn])[None],
        lengths=np.full(len(drawn), scale.length),
        loss_mask=mask,
        advantages=each([draw.normal(size=scale.length) for draw in drawn]),
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        packed=True,
    )
