"""Tests of distributed checkpoints, which are written without Megatron and can be read whichever program wrote them.

`tests/weights/convert/test_grid.py` exchanges them with Megatron itself.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_by_torch

from rlsys.config.schema import ParallelConfig
from rlsys.errors import RunError
from rlsys.weights.checkpoint.megatron_reader import TensorOnDisk, name_of, open_checkpoint
from rlsys.weights.checkpoint.store import CheckpointInfo
from rlsys.weights.checkpoint.torch_dist_writer import FileJob, TorchDistWriter
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import Cut, Entry, WeightMap, read_architecture
from tests.support.hf_models import assert_same_tensors
from tests.support.refusals import refused

UNEVEN = ParallelConfig(tp=2, pp=2, pp_layers=[1, 2])


@pytest.fixture(scope="module")
def weights(hf: Path) -> WeightMap:
    return WeightMap(read_architecture(hf))


def written(writer: TorchDistWriter, folder: Path, hf: Path, jobs: list[FileJob]) -> Path:
    """Write a checkpoint's files in the order of `jobs`; returns the checkpoint's folder."""
    reader = HfReader(hf)

    def parts_of(entry: Entry) -> list[Tensor]:
        return [reader.get(name) for name in entry.hf]

    writer.finish(folder, [writer.write(folder, job, parts_of) for job in jobs], CheckpointInfo(step=5))
    return folder


def test_files_do_not_depend_on_write_order_and_hold_one_stage_each(
    hf: Path, weights: WeightMap, tmp_path: Path
) -> None:
    writer = TorchDistWriter(weights, lambda _: torch.float32, UNEVEN, file_bytes=60_000)
    one = written(writer, tmp_path / "one", hf, writer.files)
    two = written(writer, tmp_path / "two", hf, writer.files[::-1])
    files = sorted(file.name for file in one.iterdir())
    assert files == sorted(file.name for file in two.iterdir())
    for file in {file for file in files if file != ".metadata"}:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    megatron_to_hf(two, tmp_path / "back", hf, processes=1)
    assert_same_tensors(hf, tmp_path / "back")
    assert len(writer.files) > 4
    for job in writer.files:
        assert len(job.entries) == 1 or job.nbytes <= 60_000
        stages = {entry.layer if entry.layer is None else min(entry.layer, 1) for entry in job.entries} - {None}
        assert len(stages) <= 1


def test_layers_of_different_dtypes_are_refused(weights: WeightMap) -> None:
    with refused("mismatch", "model.layers.1.input_layernorm.weight"):
        TorchDistWriter(weights, lambda entry: torch.bfloat16 if entry.layer == 1 else torch.float32, ParallelConfig())


def test_full_disk_is_reported_with_the_file(hf: Path, weights: WeightMap, tmp_path: Path) -> None:
    writer = TorchDistWriter(weights, lambda _: torch.float32, ParallelConfig())
    (job,) = writer.files
    (tmp_path / f".{job.name}.partial").symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{tmp_path / job.name} .*No space left") as raised:
        written(writer, tmp_path, hf, [job])
    assert raised.value.code == "no_room"
    assert list(tmp_path.iterdir()) == []


def is_mapped(folder: Path) -> bool:
    """Tell if a file of `folder` is mapped into the memory of this process."""
    return str(folder) in Path("/proc/self/maps").read_text()


def test_weights_are_mapped_while_in_use_and_writes_reach_no_file(hf: Path, weights: WeightMap, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    hf_to_megatron(hf, folder, dtype="bfloat16", processes=1)
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    checkpoint, expected = open_checkpoint(folder), HfReader(hf)
    fused = 0
    for entry in weights.entries():
        parts = checkpoint.parts(entry, weights)
        assert all(torch.equal(part, expected.get(name).bfloat16()) for name, part in parts)
        # Query, key and value are interleaved in one tensor, so they are copied; other tensors are mapped.
        assert is_mapped(folder) == (entry.rule.cut is not Cut.QKV), entry.name
        fused += len(parts) == 2
        parts[0][1].zero_()
        del parts
        assert not is_mapped(folder), entry.name
    assert fused == 3
    assert {file: file.read_bytes() for file in before} == before


@settings(max_examples=40)
@given(
    offset=st.integers(0, 5000),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    rows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_tensor_is_read_from_any_offset(
    offset: int, sizes: list[int], dtype: torch.dtype, rows: tuple[int, int]
) -> None:
    count = math.prod(sizes)
    expected = torch.arange(count).to(dtype).reshape(sizes)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(b"x" * offset + bytes(expected.flatten().view(torch.uint8).tolist()))
        place = TensorOnDisk(file, offset, tuple(sizes), expected.stride(), dtype)
        assert torch.equal(place.read(), expected)
        start, stop = sorted(min(row, sizes[0]) for row in rows)
        some = place.rows(start, stop).read()
        assert torch.equal(some, expected[start:stop])
        assert some.data_ptr() % dtype.itemsize == 0
        if count:
            os.truncate(file, offset + count * dtype.itemsize - 1)
            with refused("malformed", file):
                place.read()
            file.unlink()
            with refused("not_found", file):
                place.read()


@pytest.mark.parametrize(
    ("key", "numbers", "name"),
    [
        ("mlp.experts.experts.linear_fc1.weight", (3, 7), "3.mlp.experts.local_experts.7.linear_fc1.weight"),
        ("3.mlp.experts.experts.linear_fc2.weight", (7,), "3.mlp.experts.local_experts.7.linear_fc2.weight"),
        ("3.mlp.experts.experts.7.linear_fc1.weight_w", (), "3.mlp.experts.local_experts.7.linear_fc1.weight"),
    ],
)
def test_expert_keys_of_any_stacking_give_one_name(key: str, numbers: tuple[int, ...], name: str) -> None:
    assert name_of(f"decoder.layers.{key}", numbers) == f"decoder.layers.{name}"


def test_numbered_layers_and_split_halves_are_read(hf: Path, weights: WeightMap, tmp_path: Path) -> None:
    """Megatron writes such tensors if layers differ or have separate shards; an optimiser's tensors are ignored."""
    tensors: dict[str, Tensor] = {}
    reader = HfReader(hf)
    for entry in weights.entries():
        parts = [reader.get(name) for name in entry.hf]
        if entry.name.endswith("linear_fc1.weight"):
            tensors |= {f"module.{entry.name}_w": parts[0], f"module.{entry.name}_v": parts[1]}
        else:
            tensors[f"module.{entry.name}"] = weights.shard(entry, parts, 0, 1)
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(64)
    tensors["chained_0.optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(64)
    folder = tmp_path / "iter_0000120"
    save_by_torch(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("120\n")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.folder, checkpoint.step) == (folder, 120)
    megatron_to_hf(tmp_path, tmp_path / "back", hf, processes=1)
    assert_same_tensors(hf, tmp_path / "back")


def test_checkpoint_of_another_model_is_refused(hf: Path, tmp_path: Path) -> None:
    hf_to_megatron(hf, tmp_path / "mg", parallel=UNEVEN, processes=1)
    checkpoint, architecture = open_checkpoint(tmp_path / "mg"), read_architecture(hf)
    changes = ({"layers": 4}, {"layers": 2}, {"qk_norm": False}, {"qkv_bias": True}, {"hidden": 96})
    for other in (*(WeightMap(replace(architecture, **change)) for change in changes), WeightMap(architecture, True)):
        with refused("mismatch", checkpoint.folder):
            checkpoint.check(other)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_layout_that_does_not_divide_the_model_is_refused(weights: WeightMap, axis: str) -> None:
    with refused("mismatch", axis):
        TorchDistWriter(weights, lambda _: torch.float32, ParallelConfig(**{axis: 5}))
