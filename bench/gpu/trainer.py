"""Makes an actor of one process and random micro-batches for it."""

from __future__ import annotations

import logging
import socket
import warnings

import numpy as np

from bench.gpu.figures import Scale
from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import Device, Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.observe.environment import detect
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.mesh import Rendezvous


def make_actor(folder: str, device: Device, dtype: Dtype, recompute: bool) -> Actor:
    """Return an actor with this process as its only rank: the policy of `folder` with GRPO's loss and a KL term."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    actor = Actor(
        Rendezvous(0, 1, "127.0.0.1", port, device, timeout_s=120.0),
        ModelConfig(folder, layers_here(), dtype, recompute),
        ParallelConfig(),
        OptimizerConfig(lr=1e-6),
        Objective(policy_loss(AlgorithmConfig(kl_coef=0.001)), temperature=1.0),
        total_steps=10,
        seed=0,
    )
    actor.load_hf(folder)
    return actor


def layers_here() -> Layers:
    """Return Transformer Engine's layers if this machine can use them, else the local ones."""
    here = detect()
    return Layers.te if here.cuda_devices and here.transformer_engine else Layers.local


def random_micro_batch(scale: Scale, vocab: int, seed: int) -> MicroBatch:
    """Return packed sequences of equal length whose last tokens are trained."""
    draw = np.random.default_rng(seed)
    rows = (1, scale.sequences * scale.length)
    trained = np.zeros((scale.sequences, scale.length), dtype=np.bool_)
    trained[:, -round(scale.trained * scale.length) :] = True
    mask = trained.reshape(rows)
    logprobs = np.where(mask, -draw.exponential(2.0, rows), 0.0).astype(np.float32)
    return MicroBatch(
        tokens=draw.integers(0, vocab, rows),
        lengths=np.full(scale.sequences, scale.length),
        loss_mask=mask,
        advantages=np.where(mask, draw.normal(size=rows), 0.0).astype(np.float32),
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        packed=True,
    )
