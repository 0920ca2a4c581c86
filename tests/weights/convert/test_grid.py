"""Tests of the round trip through real process groups for every family and layout, and in bfloat16 for a few, bit for bit.

A Hugging Face model is converted to torch_dist for one layout. A gloo group of another layout loads this checkpoint,
computes the same logits as transformers, and saves a checkpoint, which is converted back.
`tests/weights/test_weight_map.py` tests the map alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlsys.algorithms.losses import ValueLoss
from rlsys.config.schema import AdamwConfig, Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.trainer.actor import Actor, Critic
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.forward import context_shares, forward
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.support import tiny_configs
from tests.support.hf_models import assert_same_logits, assert_same_tensors, logits_by_transformers, make_model
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer.harness import OBJECTIVE

PROCESSES = 8
"""Largest number of processes of a layout."""
LAYERS = 5
STAGES = {1: None, 2: [2, 3], 3: [2, 1, 2]}
"""Number of pipeline stages -> layers of each stage, which are uneven; None for a single stage."""
WIDTH = 48
"""Tokens per row: three times the original context of the models' rotary scaling."""


class Cut(NamedTuple):
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(tp=self.tp, pp=self.pp, ep=self.ep, pp_layers=STAGES[self.pp])

    @property
    def processes(self) -> int:
        """The smallest number of processes that can hold the model and spread its experts."""
        return self.pp * max(self.tp, self.ep)


class Kind(NamedTuple):
    """A kind of model; `family` is a family of `make_model`."""

    family: str
    critic: bool = False
    dtype: Dtype = Dtype.float32

    @property
    def mixture(self) -> bool:
        return "moe" in self.family or self.family == "gpt-oss"


KINDS = {
    "deepseek": Kind("deepseek-moe"),
    "deepseek-yarn": Kind("deepseek-moe-yarn"),
    "llama": Kind("llama"),
    "qwen2-tied": Kind("qwen2-tied"),
    "qwen3": Kind("qwen3"),
    "qwen3-moe": Kind("qwen3-moe"),
    "phi3": Kind("phi3"),
    "gemma3": Kind("gemma3"),
    "glm4": Kind("glm4"),
    "gpt-oss": Kind("gpt-oss"),
    "ministral": Kind("ministral"),
    "mistral": Kind("mistral"),
    "critic": Kind("qwen3", critic=True),
    "bfloat16": Kind("llama-tied", dtype=Dtype.bfloat16),
    "experts-bfloat16": Kind("qwen3-moe", dtype=Dtype.bfloat16),
    "gemma3-bfloat16": Kind("gemma3", dtype=Dtype.bfloat16),
    "critic-bfloat16": Kind("qwen2", critic=True, dtype=Dtype.bfloat16),
}
NORMAL = (
    ("qwen3-moe", Cut(tp=2, ep=2)),
    ("critic", Cut(tp=2, pp=2)),
    ("phi3", Cut(tp=2)),
    ("gemma3", Cut(pp=2)),
)
"""Kinds and layouts of the default suite."""
ROUNDED = (Cut(tp=2, pp=2), Cut(tp=2, pp=2, ep=2), Cut(tp=4), Cut(pp=3))
"""Layouts tested in bfloat16; float32 has all, and differs by rounding alone."""


def points() -> Iterator[object]:
    """Yield the kind, the layout of the group, and the layout of the checkpoint that the group loads: the next one."""
    for name, kind in KINDS.items():
        spreads = (1, 2) if kind.mixture else (1,)
        cuts = [cut for cut in map(Cut._make, product((1, 2, 4), (1, 2, 3), spreads)) if cut.processes <= PROCESSES]
        cuts = [cut for cut in cuts if kind.dtype is Dtype.float32 or cut in ROUNDED]
        for cut, other in zip(cuts, cuts[1:] + cuts[:1], strict=True):
            marks = () if (name, cut) in NORMAL else pytest.mark.slow
            yield pytest.param(kind, cut, other, id="{}-tp{}-pp{}-ep{}".format(name, *cut), marks=marks)


def probe() -> MicroBatch:
    """Two rows, of which all tokens but the first are targets."""
    tokens = np.random.default_rng(5).integers(0, 100, size=(2, WIDTH))
    tokens[0, :2] = 0, 99
    mask = np.arange(WIDTH)[None, :].repeat(2, axis=0) > 0
    return MicroBatch(tokens, np.full(2, WIDTH), mask, np.zeros(tokens.shape, np.float32))


def _load_compute_save(group: Group, folder: str, kind: Kind, cut: Cut) -> None:
    parallel = cut.parallel
    # Tensor parallelism with experts requires sequence parallelism.
    parallel.sequence_parallel = cut.tp > 1 and kind.mixture
    config = ModelConfig(f"{folder}/model", Layers.local, kind.dtype)
    common: dict[str, Any] = {"total_steps": 9, "seed": 1}
    place, adam = group.meet(), AdamwConfig()
    learner: Actor | Critic = (
        Critic(place, config, parallel, adam, ValueLoss(0.3), **common)
        if kind.critic
        else Actor(place, config, parallel, adam, OBJECTIVE, **common)
    )
    learner.load(f"{folder}/converted")
    shares = context_shares(learner._model, [probe()])
    found = forward(learner._model, shares, lambda output, _: output.float().numpy())
    if found and learner.coords.dp == 0:
        np.save(f"{folder}/columns-{group.rank}.npy", found[0])
    learner.begin_save(f"{folder}/saved")
    learner.finish_save()


@pytest.mark.parametrize(("kind", "cut", "written_for"), points())
def test_round_trip_through_a_process_group_is_bit_exact(
    kind: Kind, cut: Cut, written_for: Cut, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_model(model, kind.family, getattr(torch, kind.dtype), kind.critic, layers=LAYERS)
    hf_to_megatron(model, tmp_path / "converted", parallel=written_for.parallel, values=kind.critic, processes=1)
    on_ranks(_load_compute_save, cut.processes, str(tmp_path), kind, cut)
    assert_computed(tmp_path, kind)
    megatron_to_hf(tmp_path / "saved", tmp_path / "back", model, processes=1)
    assert_same_tensors(model, tmp_path / "back")


def assert_computed(folder: Path, kind: Kind) -> None:
    """Assert that the group's logits are near those of transformers in float32.

    In float32, only rounding may differ. In bfloat16, the error may be up to 1.5 times that of transformers.
    """
    columns = [np.load(file) for file in sorted(folder.glob("columns-*.npy"))]
    # Each tensor-parallel rank has all values of a critic, but only a part of a policy's vocabulary.
    whole = columns[0][:, None] if kind.critic else np.concatenate(columns, axis=1)[:, : tiny_configs.VOCAB]
    found = torch.tensor(whole).unflatten(0, (2, WIDTH - 1))
    exact, rounded = (
        logits_by_transformers(folder / "model", torch.tensor(probe().tokens), kind.critic, dtype)[:, :-1]
        for dtype in (torch.float32, getattr(torch, kind.dtype))
    )
    if kind.dtype is Dtype.float32:
        assert_same_logits(found, exact)
    else:
        rounding = (rounded - exact).norm()
        assert rounding < 0.1 * exact.norm()
        assert (found - exact).norm() < 1.5 * rounding
