"""The round trip through real process groups: every family under every cut comes back bit for bit.

Hugging Face -> torch_dist, laid out for one cut -> a gloo group of another loads it, says what transformers says and
saves it -> Hugging Face. The same grid through the map alone, in one process, is in `tests/weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from rlsys.apps.cli.convert import app
from rlsys.config.schema import Dtype
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.trainer.hosts import hosts
from tests.weights.convert.grid import Cut, Model, group_of, logits_of
from tests.weights.convert.models import assert_same_tensors, tensors_of

PROCESSES = 8
"""Most of one point."""
MODELS = {
    "llama": ("llama", False, Dtype.float32),
    "qwen2-tied": ("qwen2-tied", False, Dtype.float32),
    "qwen3": ("qwen3", False, Dtype.float32),
    "qwen3-moe": ("qwen3-moe", False, Dtype.float32),
    "critic": ("qwen3", True, Dtype.float32),
    "bfloat16": ("llama-tied", False, Dtype.bfloat16),
    "experts-bfloat16": ("qwen3-moe", False, Dtype.bfloat16),
    "critic-bfloat16": ("qwen2", True, Dtype.bfloat16),
}
NORMAL = [
    ("llama", Cut(tp=4), Cut(pp=3)),
    ("qwen2-tied", Cut(pp=3), Cut(tp=2, pp=2)),
    ("qwen3-moe", Cut(tp=2, pp=2, ep=2), Cut(tp=2, pp=2, ep=2)),
    ("critic", Cut(tp=2, pp=2), Cut(tp=4)),
]
"""(model, cut of the group, cut that hf2mg laid the checkpoint out for). The models have two query groups."""


def grid() -> Iterator[tuple[str, Cut, Cut]]:
    """All points; each loads what was laid out for the next."""
    for name, (family, *_) in MODELS.items():
        spreads = (1, 2) if "moe" in family else (1,)
        cuts = [Cut(*sizes) for sizes in product((1, 2, 4), (1, 2, 3), spreads)]
        cuts = [cut for cut in cuts if cut.processes <= PROCESSES]
        for cut, other in zip(cuts, cuts[1:] + cuts[:1], strict=True):
            yield name, cut, other


def points() -> list[object]:
    """Those of the normal suite, and the rest."""
    normal = {(name, cut) for name, cut, _ in NORMAL}
    rest = [point for point in grid() if point[:2] not in normal]
    named = {point: f"{point[0]}-{point[1]}" for point in (*NORMAL, *rest)}
    slow = dict.fromkeys(rest, pytest.mark.slow)
    return [pytest.param(*point, id=name, marks=slow.get(point, ())) for point, name in named.items()]


@pytest.fixture(scope="module")
def pipes() -> Iterator[list[Connection]]:
    with hosts(PROCESSES) as found:
        yield found


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            made[name] = Model.make(tmp_path_factory.mktemp("models") / name, *MODELS[name])
        return made[name]

    return make


@pytest.mark.parametrize(("name", "cut", "laid_out"), points())
async def test_a_model_goes_through_a_group_and_comes_back(
    name: str,
    cut: Cut,
    laid_out: Cut,
    pipes: list[Connection],
    model_of: Callable[[str], Model],
    tmp_path: Path,
) -> None:
    model = model_of(name)
    converted, saved, back = (tmp_path / folder for folder in ("converted", "saved", "back"))
    hf_to_megatron(model.folder, converted, parallel=laid_out.parallel, values=model.critic, processes=1)
    group = await group_of(pipes, model, cut)
    await group.call("load", str(converted))
    assert_same_logits(await logits_of(group, model), model)
    await group.call("save", str(saved))
    megatron_to_hf(saved, back, model.folder, processes=1)
    assert_same_tensors(model.folder, back)


def assert_same_logits(found: Tensor, model: Model) -> None:
    """To the rounding of the model's dtype: that which transformers' own have."""
    exact = model.logits()
    assert found.shape == exact.shape
    if model.dtype is Dtype.float32:
        torch.testing.assert_close(found, exact, rtol=2e-5, atol=5e-5)
    else:
        rounding = (model.logits(model.dtype) - exact).norm()
        assert rounding < 0.1 * exact.norm()
        assert (found - exact).norm() < 1.5 * rounding


async def test_a_trained_checkpoint_is_verified(
    pipes: list[Connection], model_of: Callable[[str], Model], tmp_path: Path
) -> None:
    """What a group at TP 2 has trained and saved, against folders that are it, or not quite."""
    model = model_of("qwen3")
    group = await group_of(pipes, model, Cut(tp=2))
    await group.call("load_hf", str(model.folder))
    await group.call("train")
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "hf"
    await group.call("save", str(checkpoint))
    megatron_to_hf(checkpoint, folder, model.folder, processes=1)
    tensors = tensors_of(folder)
    before = tensors_of(model.folder)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in tensors.items())

    def verified(**changed: Tensor) -> tuple[int, str]:
        save_file({**tensors, **changed}, folder / "model.safetensors", metadata={"format": "pt"})
        command = ["verify", str(checkpoint), str(folder), "--hf", str(model.folder)]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
        return done.exit_code, done.output

    assert verified()[0] == 0

    name = "model.layers.3.mlp.down_proj.weight"
    flipped = tensors[name].clone()
    flipped.view(torch.int32)[7, 5] ^= 1
    status, said = verified(**{name: flipped})
    assert status == 1
    assert [one for one in tensors if one in said] == [name]

    query, key = (f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qk")
    rows = tensors[key].shape[0]
    swapped = {
        query: torch.cat([tensors[key], tensors[query][rows:]]),
        key: tensors[query][:rows].contiguous(),
    }
    status, said = verified(**swapped)
    assert status == 1
    assert {one for one in tensors if one in said} == {query, key}
