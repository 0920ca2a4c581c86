"""Checkpoints of one file a rank, as an independent writer that follows Megatron-LM's layout makes them."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from torch import Tensor
from transformers import AutoConfig

from rlsys.errors import Code
from rlsys.weights.checkpoint.megatron_reader import open_checkpoint
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import WeightMap, read_architecture
from tests.support.refusals import refused
from tests.trainer import reference
from tests.weights.checkpoint.checkpoints import Evil, assert_holds

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


class Writer:
    """Cuts Hugging Face tensors the way Megatron-LM's ranks hold them; knows nothing of rlsys."""

    def __init__(self, hf: Path, layout: Written) -> None:
        self.hf, self.layout = HfReader(hf), layout
        config = AutoConfig.from_pretrained(hf)
        self.config, self.groups = config, config.num_key_value_heads
        self.experts = getattr(config, "num_experts", 0) or 0

    def get(self, name: str) -> Tensor:
        return self.hf.get(name)

    def vocabulary(self, name: str, tp: int) -> Tensor:
        matrix = self.get(name)
        rows = 128 * self.layout.tp
        padded = torch.cat([matrix, torch.full((rows - len(matrix), matrix.shape[1]), 9.0)])
        return padded[tp * 128 : (tp + 1) * 128]

    def qkv(self, layer: str, kind: str) -> Tensor:
        parts = [self.get(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
        rows = []
        for group in range(self.groups):
            for part in parts:
                size = len(part) // self.groups
                rows.append(part[group * size : (group + 1) * size])
        return torch.cat(rows)

    def rows(self, whole: Tensor, rank: int, size: int) -> Tensor:
        step = len(whole) // size
        return whole[rank * step : (rank + 1) * step].clone()

    def columns(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return self.rows(whole.t(), rank, size).t().contiguous()

    def mlp(self, layer: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
        gate, up, down = (self.get(f"{layer}.{part}_proj.weight") for part in ("gate", "up", "down"))
        fc1 = torch.cat([self.rows(gate, rank, size), self.rows(up, rank, size)])
        return fc1, self.columns(down, rank, size)

    def layer(self, number: int, local: int, tp: int, ep: int, etp: int) -> dict[str, Any]:
        source, to, te = f"model.layers.{number}", f"decoder.layers.{local}", self.layout.te
        size = self.layout.tp
        first, second = "input_layernorm.weight", "pre_mlp_layernorm.weight"
        if te:
            first = "self_attention.linear_qkv.layer_norm_weight"
            second = second if self.experts else "mlp.linear_fc1.layer_norm_weight"
        state: dict[str, Any] = {
            first: self.get(f"{source}.input_layernorm.weight"),
            second: self.get(f"{source}.post_attention_layernorm.weight"),
            "self_attention.linear_qkv.weight": self.rows(self.qkv(source, "weight"), tp, size),
            "self_attention.linear_proj.weight": self.columns(self.get(f"{source}.self_attn.o_proj.weight"), tp, size),
            "self_attention.linear_proj._extra_state": io.BytesIO(b"state") if te else None,
        }
        names = self.hf.names()
        if f"{source}.self_attn.q_proj.bias" in names:
            state["self_attention.linear_qkv.bias"] = self.rows(self.qkv(source, "bias"), tp, size)
        if f"{source}.self_attn.q_norm.weight" in names:
            for part in "qk":
                state[f"self_attention.{part}_layernorm.weight"] = self.get(f"{source}.self_attn.{part}_norm.weight")
        if not self.experts:
            state["mlp.linear_fc1.weight"], state["mlp.linear_fc2.weight"] = self.mlp(f"{source}.mlp", tp, size)
            return {f"{to}.{name}": value for name, value in state.items()}
        state["mlp.router.weight"] = self.get(f"{source}.mlp.gate.weight")
        count = self.experts // self.layout.ep
        for index in range(count):
            number = ep * count + index
            fc1, fc2 = self.mlp(f"{source}.mlp.experts.{number}", etp, self.layout.etp or size)
            for name, tensor in (("linear_fc1", fc1), ("linear_fc2", fc2)):
                local_name = f"local_experts.{index}.{name}.weight"
                state[f"mlp.experts.{f'{name}.weight{index}' if te else local_name}"] = tensor
        return {f"{to}.{name}": value for name, value in state.items()}

    def chunk(self, layers: range, first: bool, last: bool, tp: int, ep: int, etp: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if first:
            state["embedding.word_embeddings.weight"] = self.vocabulary("model.embed_tokens.weight", tp)
        for local, number in enumerate(layers):
            state |= self.layer(number, local, tp, ep, etp)
        if last:
            state["decoder.final_layernorm.weight"] = self.get("model.norm.weight")
            tied = self.config.tie_word_embeddings
            if not (tied and first):
                output = "model.embed_tokens.weight" if tied else "lm_head.weight"
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("axis", ["expert", "pipeline", "tensor"])
@pytest.mark.parametrize("size", [2, 10**18])
def test_settings_of_more_ranks_than_there_are_files_are_refused(axis: str, size: int, tmp_path: Path) -> None:
    """No rank is counted out, however many are said."""
    (tmp_path / "mp_rank_00").mkdir()
    settings = argparse.Namespace(**{f"{axis}_model_parallel_size": size})
    weights = {"embedding.word_embeddings.weight": torch.zeros(1)}
    torch.save({"model": weights, "args": settings}, tmp_path / "mp_rank_00" / RANK_FILE)
    with refused("not_found", tmp_path) as caught:
        open_checkpoint(tmp_path)
    assert f"{axis}_model_parallel_size={size}" in str(caught.value)


def test_a_file_that_is_cut_after_it_was_opened_is_named(models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path, models["qwen2"], Written(stages=((6,),)))
    checkpoint, weights = open_checkpoint(folder), WeightMap(read_architecture(models["qwen2"]))
    os.truncate(folder / "mp_rank_00" / RANK_FILE, 5000)
    with refused("malformed", folder / "mp_rank_00" / RANK_FILE):
        checkpoint.parts(weights.entries()[-1], weights)


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
