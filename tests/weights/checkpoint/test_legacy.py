"""Checkpoints of one file a rank, as a writer makes them that follows Megatron-LM's layout."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import WeightMap, read_architecture
from tests.support.refusals import refused
from tests.trainer import reference
from tests.weights.checkpoint.checkpoints import Evil, assert_holds
from tests.weights.megatron_shards import expected_shard

Stages = Sequence[Sequence[int]]
"""Layers of each chunk of each pipeline rank."""
RANK_FILE = "model_optim_rng.pt"


@dataclass(frozen=True)
class Written:
    """How a checkpoint is laid out."""

    tp: int = 1
    stages: Stages = ((3,),)
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism of the experts; none: as of the rest."""
    te: bool = False
    """Names of Transformer Engine, with its states and grouped experts."""
    prefix: str = ""

    @property
    def name(self) -> str:
        return f"tp{self.tp}-pp{len(self.stages)}-vpp{len(self.stages[0])}-ep{self.ep}-{self.te}"


EXTRA = io.BytesIO(b"state")
OF_ENGINE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine's names of norms, which it fuses into the linear layer behind them."""


class Writer:
    """Names and cuts a model's tensors the way Megatron-LM's ranks hold them."""

    def __init__(self, hf: Path, layout: Written) -> None:
        self.layout, self.arch, reader = layout, read_architecture(hf), HfReader(hf)
        self.hf = {name: reader.get(name) for name in reader.names()}

    def vocabulary(self, name: str, tp: int) -> Tensor:
        padding = torch.full((128 * self.layout.tp - self.arch.vocab, self.arch.hidden), 9.0)
        return torch.cat([self.hf[name], padding])[tp * 128 : (tp + 1) * 128].clone()

    def layer(self, number: int, local: int, tp: int, ep: int, etp: int) -> dict[str, Any]:
        source, arch, te = f"decoder.layers.{number}.", self.arch, self.layout.te
        names = ["input_layernorm", "pre_mlp_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj"]
        names += ["self_attention.q_layernorm", "self_attention.k_layernorm"] if arch.qk_norm else []
        names += ["mlp.router"] if arch.experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
        names = [f"{name}.weight" for name in names] + ["self_attention.linear_qkv.bias"] * arch.qkv_bias
        state: dict[str, Any] = {}
        for name in names:
            fused = te and not (arch.experts and name.startswith("pre_mlp"))
            held = OF_ENGINE.get(name, name) if fused else name
            state[held] = expected_shard(arch, source + name, self.hf, tp, self.layout.tp).clone()
        state["self_attention.linear_proj._extra_state"] = EXTRA if te else None
        count = arch.experts // self.layout.ep
        for index, part in product(range(count), ("linear_fc1", "linear_fc2")):
            name = f"mlp.experts.local_experts.{ep * count + index}.{part}.weight"
            shard = expected_shard(arch, source + name, self.hf, etp, self.layout.etp or self.layout.tp)
            grouped, single = f"{part}.weight{index}", f"local_experts.{index}.{part}.weight"
            state[f"mlp.experts.{grouped if te else single}"] = shard.clone()
        return {f"decoder.layers.{local}.{name}": value for name, value in state.items()}

    def chunk(self, layers: range, first: bool, last: bool, tp: int, ep: int, etp: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if first:
            state["embedding.word_embeddings.weight"] = self.vocabulary("model.embed_tokens.weight", tp)
        for local, number in enumerate(layers):
            state |= self.layer(number, local, tp, ep, etp)
        if last:
            state["decoder.final_layernorm.weight"] = self.hf["model.norm.weight"].clone()
            if not (self.arch.tied and first):
                output = "model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"
                state["output_layer.weight"] = self.vocabulary(output, tp)
        return {self.layout.prefix + name: value for name, value in state.items()}


def _ranks(layout: Written) -> list[tuple[int, int, int]]:
    """Tensor, expert and expert-tensor rank of the files of a stage, as ranks fall to them in Megatron."""
    etp = layout.etp or layout.tp
    world = range(layout.tp * layout.ep * etp)
    return sorted({(rank % layout.tp, rank // etp % layout.ep, rank % etp) for rank in world})


def write(folder: Path, hf: Path, layout: Written) -> Path:
    """As `iter_0000040`, with everything that Megatron-LM puts beside the weights; the folder of that."""
    writer, stages = Writer(hf, layout), layout.stages
    virtual = len(stages[0])
    order = [(chunk, stage) for chunk in range(virtual) for stage in range(len(stages))]
    begins, before = {}, 0
    for chunk, stage in order:
        begins[chunk, stage] = before
        before += stages[stage][chunk]
    for stage, (tp, ep, etp) in product(range(len(stages)), _ranks(layout)):
        chunks = []
        for chunk in range(virtual):
            begin, place = begins[chunk, stage], (chunk, stage)
            layers = range(begin, begin + stages[stage][chunk])
            chunks.append(writer.chunk(layers, place == order[0], place == order[-1], tp, ep, etp))
        models = {"model": chunks[0]} if virtual == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}
        name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if len(stages) > 1 else "")
        name += f"_{ep:03d}" if layout.ep > 1 else ""
        save(folder / "iter_0000040" / name, layout, models)
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder / "iter_0000040"


def save(folder: Path, layout: Written, models: Mapping[str, Any]) -> None:
    settings = argparse.Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=len(layout.stages),
        expert_model_parallel_size=layout.ep,
        params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
    )
    state = {
        "args": settings,
        "checkpoint_version": 3.0,
        "iteration": 40,
        **models,
        "optimizer": {
            "state": {0: {"exp_avg": torch.zeros(50)}},
            "param_groups": [{"lr": 1e-6, "params": [0]}],
        },
        "rng_state": [
            {
                "random_rng_state": (3, (1, 2), None),
                "np_rng_state": np.random.default_rng(0).bit_generator.state["state"],
                "array": np.arange(4, dtype=np.uint32),
                "torch_rng_state": torch.get_rng_state(),
            }
        ],
    }
    folder.mkdir(parents=True)
    torch.save(state, folder / RANK_FILE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: reference.make_model(make(layers=6), folder / name) for name, make in reference.TINY.items()}


UNEVEN_VIRTUAL = ((1, 2), (2, 1))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", Written(tp=2, stages=UNEVEN_VIRTUAL)),
        ("llama", Written(stages=((1,), (3,), (2,)), te=True, prefix="module.")),
        ("qwen3", Written(tp=4, stages=((6,),), te=True)),
        ("qwen3_moe", Written(tp=2, stages=UNEVEN_VIRTUAL, ep=2, te=True)),
        ("qwen3_moe", Written(stages=((6,),), ep=4)),
        ("qwen3_moe", Written(tp=2, stages=((2,), (4,)), ep=4, etp=1, te=True)),
        ("qwen3_moe", Written(tp=4, stages=((6,),), ep=2, etp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_layout_is_read_bit_for_bit(
    models: Mapping[str, Path], family: str, layout: Written, tmp_path: Path
) -> None:
    folder = write(tmp_path, models[family], layout)
    checkpoint = pickle.loads(pickle.dumps(open_checkpoint(tmp_path)))
    assert (checkpoint.folder, checkpoint.format, checkpoint.step) == (folder, "mp_rank", 40)
    assert f"tp {layout.tp}, pp {len(layout.stages)}, ep {layout.ep}" in checkpoint.layout
    assert_holds(checkpoint, models[family])


def test_a_file_that_would_run_code_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "good", models["qwen2"], Written(stages=((6,),)))
    file, mark = folder / "mp_rank_00" / RANK_FILE, tmp_path / "mark"
    torch.save({"model": {}, "args": Evil(mark)}, file)
    with refused("unsafe", file):
        open_checkpoint(folder)
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the pickle is one that would have run"


def _change(file: Path, how: Callable[[Tensor], Tensor]) -> None:
    state = torch.load(file, weights_only=False)
    state["model"] = {
        name: how(value) if isinstance(value, Tensor) else value for name, value in state["model"].items()
    }
    torch.save(state, file)


def _holding(value: object, zipped: bool = True) -> Callable[[Path], object]:
    return lambda file: torch.save(value, file, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (Path.unlink, "not_found"),
        (lambda file: shutil.rmtree(file.parent), "not_found"),
        (lambda file: os.truncate(file, file.stat().st_size - 1000), "malformed"),
        (_holding([1]), "malformed"),
        (_holding({"iteration": 1}), "malformed"),
        (_holding({"model": 5}), "malformed"),
        (_holding({"model": {5: torch.zeros(1)}}), "malformed"),
        (_holding({"model0": {}, "model1": "x"}), "malformed"),
        (_holding({"model": {"language_model": {}}}), "unsupported"),
        (_holding({"model": {"w": torch.eye(3).to_sparse()}}), "unsupported"),
        (_holding({"model": {}}, zipped=False), "unsupported"),
    ],
    ids=range(11),
)
def test_a_rank_that_is_not_whole_is_named(
    models: Mapping[str, Path], tmp_path: Path, harm: Callable[[Path], object], code: Code
) -> None:
    folder = write(tmp_path, models["qwen2"], Written(tp=2, stages=((2,), (4,))))
    file = folder / "mp_rank_01_001" / RANK_FILE
    harm(file)
    with refused(code, file):
        open_checkpoint(folder)


def test_ranks_of_different_dtypes_are_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, models["qwen2"], Written(tp=2, stages=((6,),)))
    _change(folder / "mp_rank_01" / RANK_FILE, torch.Tensor.half)
    with refused("mismatch", folder):
        open_checkpoint(folder)


@pytest.fixture(params=["with Megatron", "without"])
def _safe_globals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Classes that torch makes of a pickle: Megatron tells it of some where it is loaded, of settings too."""
    known = get_safe_globals()
    if request.param == "without":
        clear_safe_globals()
    yield
    add_safe_globals(known)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("_safe_globals")
@pytest.mark.parametrize(("axis", "size"), [("expert", 2), ("pipeline", 10**18), ("tensor", 10**18)])
@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_settings_of_more_ranks_than_there_are_files_are_refused(
    kind: type, axis: str, size: int, tmp_path: Path
) -> None:
    """No rank is counted out, however many are said."""
    (tmp_path / "mp_rank_00").mkdir()
    settings = kind(**{f"{axis}_model_parallel_size": size})
    weights = {"embedding.word_embeddings.weight": torch.zeros(1)}
    torch.save({"model": weights, "args": settings}, tmp_path / "mp_rank_00" / RANK_FILE)
    with refused("not_found", tmp_path) as caught:
        open_checkpoint(tmp_path)
    assert f"{axis}_model_parallel_size={size}" in str(caught.value)


def test_a_rank_of_another_model_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, models["qwen3"], Written(tp=2, stages=((6,),)))
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(read_architecture(models["llama"])))
    file = folder / "mp_rank_01" / RANK_FILE
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.layers.2.mlp.linear_fc2.weight"] = torch.zeros(64, 47)
    torch.save(state, file)
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(read_architecture(models["qwen3"])))


def test_a_vocabulary_that_is_too_large_to_be_padded_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    """A tensor-parallel rank is padded by less than 128 rows."""
    folder = write(tmp_path, models["qwen2"], Written(tp=2, stages=((6,),)))
    checkpoint, architecture = open_checkpoint(folder), read_architecture(models["qwen2"])
    rows = 256
    checkpoint.check(WeightMap(replace(architecture, vocab=1)))
    assert sum(shape[0] for shape in checkpoint.names()["embedding.word_embeddings.weight"].shapes) == rows
    for rank in (0, 1):
        _change(
            folder / f"mp_rank_0{rank}" / RANK_FILE,
            lambda tensor: torch.cat([tensor, tensor]) if len(tensor) == rows // 2 else tensor,
        )
    with refused("mismatch", folder):
        open_checkpoint(folder).check(WeightMap(architecture))


def test_an_output_layer_that_is_no_copy_is_not_dropped(models: Mapping[str, Path], tmp_path: Path) -> None:
    """The last pipeline stage of a tied model has one, and a config may say tied that is not the model's."""
    folder = write(tmp_path, models["qwen2"], Written(stages=((2,), (4,))))
    first, last = (folder / f"mp_rank_00_00{stage}" / RANK_FILE for stage in (0, 1))
    untied = replace(read_architecture(models["qwen2"]), tied=False)
    tied = WeightMap(replace(untied, tied=True))
    embedding = torch.load(first, weights_only=False)["model"]["embedding.word_embeddings.weight"]
    state = torch.load(last, weights_only=False)
    # The last row is padding.
    for row in (None, -1, 0):
        output = embedding.clone()
        if row is not None:
            output[row] += 1
        state["model"]["output_layer.weight"] = output
        torch.save(state, last)
        checkpoint = open_checkpoint(folder)
        checkpoint.check(tied)
        checkpoint.check_copies(WeightMap(untied))
        if row != 0:
            checkpoint.check_copies(tied)
    with refused("mismatch", folder):
        checkpoint.check_copies(tied)
