"""The round trip through real process groups: every family under every cut comes back bit for bit.

Hugging Face -> torch_dist, laid out for one cut -> a gloo group of another loads it, says what transformers says and
saves it -> Hugging Face. `tests/weights/test_weight_map.py` has such a grid through the map alone, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlsys.algorithms.losses import ValueLoss
from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.trainer.actor import Actor, Critic
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.forward import forward
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE
from tests.weights.convert.models import assert_same_logits, assert_same_tensors, make_model

PROCESSES = 8
"""Most of one point."""
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
class Kind:
    """A kind of model; `family` is a key of `models.configs`."""

    family: str
    critic: bool = False
    dtype: Dtype = Dtype.float32

    @property
    def experts(self) -> bool:
        return "moe" in self.family


KINDS = {
    "llama": Kind("llama"),
    "qwen2-tied": Kind("qwen2-tied"),
    "qwen3": Kind("qwen3"),
    "qwen3-moe": Kind("qwen3-moe"),
    "critic": Kind("qwen3", critic=True),
    "bfloat16": Kind("llama-tied", dtype=Dtype.bfloat16),
    "experts-bfloat16": Kind("qwen3-moe", dtype=Dtype.bfloat16),
    "critic-bfloat16": Kind("qwen2", critic=True, dtype=Dtype.bfloat16),
}
NORMAL = (("qwen3-moe", Cut(tp=2, pp=2, ep=2)), ("critic", Cut(tp=2, pp=2)))
"""The points of the normal suite."""


def points() -> Iterator[object]:
    """Every point of the grid (kind, cut of the group, cut that the checkpoint is laid out for): each loads what was laid
    out for the next."""
    for name, kind in KINDS.items():
        spreads = (1, 2) if kind.experts else (1,)
        cuts = [Cut(*sizes) for sizes in product((1, 2, 4), (1, 2, 3), spreads)]
        cuts = [cut for cut in cuts if cut.processes <= PROCESSES]
        for cut, other in zip(cuts, cuts[1:] + cuts[:1], strict=True):
            marks = () if (name, cut) in NORMAL else pytest.mark.slow
            yield pytest.param(name, cut, other, id=f"{name}-{cut}", marks=marks)


def probe() -> MicroBatch:
    """Two rows, every token of which but the first is a target."""
    tokens = np.random.default_rng(5).integers(0, 100, size=(2, WIDTH))
    tokens[0, :2] = 0, 99
    mask = np.arange(WIDTH)[None, :].repeat(2, axis=0) > 0
    return MicroBatch(tokens, np.full(2, WIDTH), mask, np.zeros(tokens.shape, np.float32))


def _load_compute_save(group: Group, folder: str, kind: Kind, cut: Cut) -> None:
    parallel = cut.parallel
    # Tensor-parallel ranks that hold experts must have it.
    parallel.sequence_parallel = cut.tp > 1 and kind.experts
    config = ModelConfig(f"{folder}/model", Layers.local, kind.dtype)
    common: dict[str, Any] = {"total_steps": 9, "seed": 1}
    place, adam = group.meet(), OptimizerConfig()
    learner: Actor | Critic = (
        Critic(place, config, parallel, adam, ValueLoss(0.3), **common)
        if kind.critic
        else Actor(place, config, parallel, adam, OBJECTIVE, **common)
    )
    learner.load(f"{folder}/converted")
    found = forward(learner._model, [probe()], lambda output, _: output.float().numpy())
    if found and learner.place.dp == 0:
        np.save(f"{folder}/columns-{group.rank}.npy", found[0])
    learner.begin_save(f"{folder}/saved")
    learner.finish_save()


@pytest.mark.parametrize(("name", "cut", "laid_out"), points())
def test_a_model_goes_through_a_group_and_comes_back(name: str, cut: Cut, laid_out: Cut, tmp_path: Path) -> None:
    kind, model = KINDS[name], tmp_path / "model"
    make_model(model, kind.family, getattr(torch, kind.dtype), kind.critic, layers=LAYERS)
    hf_to_megatron(model, tmp_path / "converted", parallel=laid_out.parallel, values=kind.critic, processes=1)
    on_ranks(_load_compute_save, cut.processes, str(tmp_path), kind, cut)
    assert_computed(tmp_path, kind)
    megatron_to_hf(tmp_path / "saved", tmp_path / "back", model, processes=1)
    assert_same_tensors(model, tmp_path / "back")


def assert_computed(folder: Path, kind: Kind) -> None:
    """Assert that the group's logits are transformers', to the rounding of the dtype: that which transformers' own have."""
    columns = [np.load(file) for file in sorted(folder.glob("columns-*.npy"))]
    # Every tensor-parallel rank has all the values, but only its part of the vocabulary.
    whole = columns[0][:, None] if kind.critic else np.concatenate(columns, axis=1)[:, : reference.VOCAB]
    found, exact = torch.tensor(whole).unflatten(0, (2, WIDTH - 1)), _by_transformers(folder, kind, Dtype.float32)
    if kind.dtype is Dtype.float32:
        assert_same_logits(found, exact)
    else:
        rounding = (_by_transformers(folder, kind, kind.dtype) - exact).norm()
        assert rounding < 0.1 * exact.norm()
        assert (found - exact).norm() < 1.5 * rounding


@torch.no_grad()
def _by_transformers(folder: Path, kind: Kind, dtype: Dtype) -> Tensor:
    """[row, token but the last, vocabulary or 1] float32 of the probe, computed in `dtype`."""
    auto = AutoModelForTokenClassification if kind.critic else AutoModelForCausalLM
    model = auto.from_pretrained(folder / "model", dtype=getattr(torch, dtype)).eval()
    logits: Tensor = model(torch.tensor(probe().tokens)).logits[:, :-1].float()
    return logits
