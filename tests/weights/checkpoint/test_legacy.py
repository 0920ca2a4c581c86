"""Tests of reading Megatron-LM's legacy checkpoints, which have one file per rank."""

from __future__ import annotations

import argparse
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from rlsys.errors import Code
from rlsys.weights.checkpoint.megatron_reader import open_checkpoint
from rlsys.weights.convert.conversion import megatron_to_hf
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import Cut, Entry, WeightMap, chunk_layers, read_architecture
from tests.support import tiny_configs
from tests.support.hf_models import assert_same_tensors
from tests.support.refusals import refused
from tests.trainer import reference

RANK_FILE = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = 6
BESIDE = {
    "checkpoint_version": 3.0,
    "iteration": 40,
    "optimizer": {"state": {0: {"exp_avg": torch.zeros(50)}}, "param_groups": [{"lr": 1e-6, "params": [0]}]},
    "rng_state": [
        {
            "random_rng_state": (3, (1, 2), None),
            "np_rng_state": np.random.default_rng(0).bit_generator.state["state"],
            "array": np.arange(4, dtype=np.uint32),
            "torch_rng_state": torch.get_rng_state(),
        }
    ],
}
"""Examples of what Megatron-LM saves beside the weights."""


def write(
    folder: Path,
    hf: Path,
    tp: int = 1,
    stages: Sequence[Sequence[int]] = ((LAYERS,),),
    ep: int = 1,
    etp: int | None = None,
    te: bool = False,
    prefix: str = "",
) -> Path:
    """Write a checkpoint of step 40; returns the step's folder.

    `stages` gives the number of layers of each chunk of each pipeline rank. `etp` is the tensor parallelism of experts,
    by default `tp`. With `te`, layers have the names and extra states of Transformer Engine.
    """
    weights, reader = WeightMap(read_architecture(hf)), HfReader(hf)
    vocab, per_rank = weights.architecture.vocab, weights.architecture.experts // ep
    chunks, etp = chunk_layers(LAYERS, stages), etp or tp

    def shard(entry: Entry, rank: int, expert_rank: int) -> Tensor:
        parts = [reader.get(name) for name in entry.hf]
        if entry.rule.cut is Cut.VOCAB:
            padding = torch.full((128 * tp - vocab, parts[0].shape[1]), 9.0)
            return torch.cat([*parts, padding]).chunk(tp)[rank].clone()
        cut = (rank, tp) if entry.expert is None else (expert_rank, etp)
        return weights.shard(entry, parts, *cut).clone()

    def chunk(layers: range, first: bool, last: bool, ranks: tuple[int, int, int]) -> dict[str, Any]:
        rank, expert_rank, expert_cut = ranks
        state: dict[str, Any] = {}
        for entry in [*weights.entries(), *weights.copies()]:
            at_end = first if entry.name == EMBEDDING else last and (entry.rule.exported or not first)
            experts = range(expert_rank * per_rank, (expert_rank + 1) * per_rank)
            if (at_end if entry.layer is None else entry.layer in layers) and entry.expert in (None, *experts):
                expert = None if entry.expert is None else entry.expert - experts.start
                layer = None if entry.layer is None else entry.layer - layers.start
                name = entry.rule.megatron[-1 if te else 0].format(layer=layer, expert=expert)
                state[prefix + name] = shard(entry, rank, expert_cut)
                if te and layer is not None:
                    state[f"{prefix}decoder.layers.{layer}.self_attention.linear_proj._extra_state"] = io.BytesIO(
                        b"state"
                    )
        return state

    # (tensor rank, expert rank, expert-tensor rank) of each rank, in Megatron's order.
    ranks = sorted({(rank % tp, rank // etp % ep, rank % etp) for rank in range(tp * ep * etp)})
    for stage, of_rank in product(range(len(stages)), ranks):
        count = len(stages[stage])
        ends = [((stage, n) == (0, 0), (stage, n) == (len(stages) - 1, count - 1)) for n in range(count)]
        models = [chunk(layers, *end, of_rank) for layers, end in zip(chunks[stage], ends, strict=True)]
        name = f"mp_rank_{of_rank[0]:02d}" + (f"_{stage:03d}" if len(stages) > 1 else "")
        name += f"_{of_rank[1]:03d}" if ep > 1 else ""
        settings = argparse.Namespace(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=len(stages),
            expert_model_parallel_size=ep,
            params_dtype=torch.float32,
            model_type=ModelType.encoder_or_decoder,
        )
        named = {f"model{n}" if count > 1 else "model": model for n, model in enumerate(models)}
        (folder / "iter_0000040" / name).mkdir(parents=True)
        torch.save({"args": settings, **named, **BESIDE}, folder / "iter_0000040" / name / RANK_FILE)
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder / "iter_0000040"


def change(file: Path, how: Callable[[str, Tensor], Tensor]) -> None:
    state = torch.load(file, weights_only=False)
    state["model"] = {name: how(name, tensor) for name, tensor in state["model"].items()}
    torch.save(state, file)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: reference.make_model(make(layers=LAYERS), folder / name) for name, make in tiny_configs.FAMILIES.items()
    }


UNEVEN_VIRTUAL = ((1, 2), (2, 1))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", {"tp": 2, "stages": UNEVEN_VIRTUAL}),
        ("llama", {"stages": ((1,), (3,), (2,)), "te": True, "prefix": "module."}),
        ("qwen3", {"tp": 4, "te": True}),
        ("qwen3_moe", {"tp": 2, "stages": UNEVEN_VIRTUAL, "ep": 2, "te": True}),
        ("qwen3_moe", {"tp": 2, "stages": ((2,), (4,)), "ep": 4, "etp": 1, "te": True}),
        ("qwen3_moe", {"tp": 4, "ep": 2, "etp": 2}),
    ],
    ids=str,
)
def test_legacy_layout_is_read_bit_for_bit(
    models: Mapping[str, Path], family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, models[family], **layout)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.folder, checkpoint.format, checkpoint.step) == (folder, "mp_rank", 40)
    sizes = layout.get("tp", 1), len(layout.get("stages", [1])), layout.get("ep", 1)
    assert "tp {}, pp {}, ep {}".format(*sizes) in checkpoint.layout
    megatron_to_hf(tmp_path, tmp_path / "back", models[family], processes=1)
    assert_same_tensors(models[family], tmp_path / "back")


def _holding(value: object, zipped: bool = True) -> Callable[[Path], object]:
    return lambda file: torch.save(value, file, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        pytest.param(Path.unlink, "not_found", id="no file"),
        pytest.param(lambda file: shutil.rmtree(file.parent), "not_found", id="no rank"),
        pytest.param(lambda file: os.truncate(file, file.stat().st_size - 1000), "malformed", id="cut"),
        pytest.param(_holding([1]), "malformed", id="no mapping"),
        pytest.param(_holding({"model": {5: torch.zeros(1)}}), "malformed", id="no names"),
        pytest.param(_holding({"model0": {}, "model1": "x"}), "malformed", id="no second model"),
        pytest.param(_holding({"model": {"language_model": {}}}), "unsupported", id="old model"),
        pytest.param(_holding({"model": {"w": torch.eye(3).to_sparse()}}), "unsupported", id="sparse"),
        pytest.param(_holding({"model": {}}, zipped=False), "unsupported", id="old torch"),
    ],
)
def test_damaged_rank_file_is_refused_by_its_path(
    models: Mapping[str, Path], tmp_path: Path, damage: Callable[[Path], object], code: Code
) -> None:
    folder = write(tmp_path, models["qwen2"], tp=2, stages=((2,), (4,)))
    file = folder / "mp_rank_01_001" / RANK_FILE
    damage(file)
    with refused(code, file):
        open_checkpoint(folder)


@pytest.fixture(params=["with Megatron", "without"])
def _safe_globals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with and without the classes that torch may unpickle once Megatron is imported, such as the settings."""
    known = get_safe_globals()
    if request.param == "without":
        clear_safe_globals()
    yield
    add_safe_globals(known)


@pytest.mark.usefixtures("_safe_globals")
@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_settings_with_more_ranks_than_files_are_refused(kind: type, tmp_path: Path) -> None:
    """A claim of 10^18 ranks is refused at once, without a loop over the ranks."""
    file = tmp_path / "mp_rank_00" / RANK_FILE
    file.parent.mkdir()
    for axis, size in (("expert", 2), ("pipeline", 10**18), ("tensor", 10**18)):
        setting = f"{axis}_model_parallel_size"
        torch.save({"model": {EMBEDDING: torch.zeros(1)}, "args": kind(**{setting: size})}, file)
        with refused("not_found", tmp_path) as caught:
            open_checkpoint(tmp_path)
        assert f"{setting}={size}" in str(caught.value)


def test_ranks_of_different_models_are_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, models["qwen3"], tp=2)
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(read_architecture(models["llama"])))
    file = folder / "mp_rank_01" / RANK_FILE
    change(file, lambda name, tensor: tensor[:, :-1].clone() if name.endswith("2.mlp.linear_fc2.weight") else tensor)
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(read_architecture(models["qwen3"])))
    change(file, lambda _, tensor: tensor.half())
    with refused("mismatch", folder):
        open_checkpoint(folder)


def test_vocabulary_beyond_its_padding_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    """Padding adds less than 128 rows per tensor-parallel rank."""
    folder = write(tmp_path, models["qwen2"], tp=2)
    checkpoint, architecture = open_checkpoint(folder), read_architecture(models["qwen2"])
    assert sum(shape[0] for shape in checkpoint.names()[EMBEDDING].shapes) == 256
    checkpoint.check(WeightMap(replace(architecture, vocab=1)))
    for rank in (0, 1):
        file = folder / f"mp_rank_0{rank}" / RANK_FILE
        change(file, lambda name, tensor: tensor.repeat(2, 1) if name == EMBEDDING else tensor)
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(architecture))


def test_tied_output_layer_with_other_values_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    """A tied model on several pipeline stages has an output layer; its config may wrongly claim that it is tied."""
    folder = write(tmp_path, models["qwen2"], stages=((2,), (4,)))
    tied = read_architecture(models["qwen2"])

    def add_one(row: int) -> None:
        place = torch.arange(128)[:, None] == row % 128
        change(
            folder / "mp_rank_00_001" / RANK_FILE,
            lambda name, tensor: tensor + place if name == "output_layer.weight" else tensor,
        )

    # The last row is padding, whose values may differ.
    add_one(-1)
    open_checkpoint(folder).check_copies(WeightMap(tied))
    add_one(0)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(WeightMap(tied))
    checkpoint.check_copies(WeightMap(replace(tied, tied=False)))
    with refused("mismatch", folder):
        checkpoint.check_copies(WeightMap(tied))
