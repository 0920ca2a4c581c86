"""One point of the grid: a model of a family, and a group of processes that loads, computes with and saves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithms.losses import ValueLoss
from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.trainer.actor import Actor, Critic
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.forward import forward
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous
from tests.trainer.hosts import HostedGroup
from tests.weights.convert.models import logits_by_transformers, make_model

LAYERS = 5
STAGES = {1: None, 2: [2, 3], 3: [1, 2, 2]}
"""Layers of each stage, uneven wherever there are several."""
WIDTH = 48
"""Tokens of a row: three times the context that the rotary scaling of `models` stretches."""


@dataclass(frozen=True)
class Cut:
    """How a model is cut."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(tp=self.tp, pp=self.pp, ep=self.ep, pp_layers=STAGES[self.pp])

    @property
    def processes(self) -> int:
        """As few as hold the model and spread its experts."""
        return self.pp * max(self.tp, self.ep)

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-ep{self.ep}"


@dataclass(frozen=True)
class Model:
    """A random model as transformers saved it."""

    folder: Path
    family: str
    """A key of `models.configs`."""
    critic: bool
    dtype: Dtype

    @classmethod
    def make(cls, folder: Path, family: str, critic: bool, dtype: Dtype) -> Model:
        make_model(folder, family, getattr(torch, dtype.value), critic, layers=LAYERS)
        return cls(folder, family, critic, dtype)

    @property
    def experts(self) -> bool:
        return "moe" in self.family

    def logits(self, dtype: Dtype = Dtype.float32) -> Tensor:
        """[row, token but the last, vocabulary or 1] float32 of the probe, by transformers computing in `dtype`."""
        tokens, of_weights = torch.tensor(probe().tokens), getattr(torch, dtype.value)
        return logits_by_transformers(self.folder, tokens, self.critic, of_weights)[:, :-1].float()


def probe() -> MicroBatch:
    """Two rows, every token of which but the first is a target."""
    tokens = np.random.default_rng(5).integers(0, 100, size=(2, WIDTH))
    tokens[0, :2] = 0, 99
    mask = np.arange(WIDTH)[None, :].repeat(2, axis=0) > 0
    return MicroBatch(tokens, np.full(2, WIDTH), mask, np.zeros(tokens.shape, np.float32))


class Bench:
    """One process of a group: an actor or a critic, with undefined weights."""

    def __init__(self, rank: int, world: int, port: int, model: Model, parallel: ParallelConfig) -> None:
        config = ModelConfig(str(model.folder), Layers.local, model.dtype)
        adam = OptimizerConfig(lr=3e-3, weight_decay=0.1)
        place = rendezvous(rank, world, port)
        self._learner: Actor | Critic = (
            Critic(place, config, parallel, adam, ValueLoss(0.3), total_steps=9, seed=1)
            if model.critic
            else Actor(place, config, parallel, adam, OBJECTIVE, total_steps=9, seed=1)
        )
        self._model = self._learner._model

    def load(self, folder: str) -> None:
        """As a run does that begins with a converted model."""
        self._learner.load(folder)

    def load_hf(self, folder: str) -> None:
        self._learner.load_hf(folder)

    def train(self) -> None:
        """One step, the same on every data-parallel rank."""
        self._learner.accumulate(reference.make_batches(2))
        self._learner.apply()

    def logits(self) -> np.ndarray[Any, Any] | None:
        """[target, columns of this process] of the probe, on the last stage of the first data-parallel rank."""
        found = forward(self._model, [probe()], lambda output, _: output.float().numpy())
        return found[0] if found and self._learner.place.dp == 0 else None

    def save(self, folder: str) -> None:
        self._learner.begin_save(folder)
        self._learner.finish_save()


async def group_of(pipes: Sequence[Connection], model: Model, cut: Cut) -> HostedGroup:
    """A group of the first of `pipes`, with a bench in each process."""
    parallel = cut.parallel
    # Tensor-parallel ranks that hold experts must have it.
    parallel.sequence_parallel = cut.tp > 1 and model.experts
    group = HostedGroup("grid", pipes[: cut.processes])
    _, port = await group.free_address(60.0)
    ranks = range(cut.processes)
    await group.build(Bench, [(rank, cut.processes, port, model, parallel) for rank in ranks], 120.0)
    return group


async def logits_of(group: HostedGroup, model: Model) -> Tensor:
    """As `Model.logits`, by the group."""
    columns = [found for found in await group.call("logits") if found is not None]
    # Every tensor-parallel rank has all the values, but only its part of the vocabulary.
    whole = columns[0][:, None] if model.critic else np.concatenate(columns, axis=1)[:, : reference.VOCAB]
    return torch.tensor(whole).unflatten(0, (2, WIDTH - 1))
