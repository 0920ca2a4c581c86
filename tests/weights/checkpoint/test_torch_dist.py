"""Distributed checkpoints against Megatron itself: what it saves is read, and what is written it loads."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from rlsys.config.schema import Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import RunError, UserError
from rlsys.trainer import mesh
from rlsys.trainer.export import load_hf
from rlsys.trainer.model.stage_model import PolicyModel, StageModel, ValueModel
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, OnDisk, name_of, open_checkpoint
from rlsys.weights.checkpoint.sharded import CheckpointWriter, Content, require_sound
from rlsys.weights.checkpoint.store import About
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import Cut, Entry, WeightMap, read_architecture
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import rendezvous, run_group

ABOUT = About(step=5)
UNEVEN = ParallelConfig(tp=2, pp=2, pp_layers=[1, 2])
WITH_EXPERTS = replace(UNEVEN, ep=2, sequence_parallel=True)
LAYOUTS = {"qwen2": UNEVEN, "qwen3_moe": WITH_EXPERTS}
WRITTEN_FOR = {"whole": ParallelConfig(), "cut": UNEVEN}


def write(
    folder: Path,
    hf: Path,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    values: bool = False,
    file_bytes: int = 1 << 30,
    order: Callable[[list[Any]], list[Any]] = lambda jobs: jobs,
) -> TorchDistWriter:
    """A critic's head is of ones and twos."""
    reader, weights = HfReader(hf), WeightMap(read_architecture(hf), values=values)

    def parts_of(entry: Entry) -> Sequence[Tensor]:
        if entry.name.startswith("value_head"):
            return [torch.ones(1, 64, dtype=dtype) if "weight" in entry.name else torch.full((1,), 2, dtype=dtype)]
        return [reader.get(name).to(dtype) for name in entry.hf]

    writer = TorchDistWriter(weights, lambda _: dtype, parallel or ParallelConfig(), file_bytes)
    receipts = [writer.write(folder, job, parts_of) for job in order(writer.files)]
    writer.finish(folder, json.loads(json.dumps(receipts)), ABOUT)
    return writer


def read(checkpoint: MegatronCheckpoint, hf: Path, values: bool = False) -> dict[str, Tensor]:
    weights = WeightMap(read_architecture(hf), values=values)
    checkpoint.check(weights)
    return {name: part for entry in weights.entries() for name, part in checkpoint.parts(entry, weights)}


def assert_holds(checkpoint: MegatronCheckpoint, hf: Path) -> None:
    found, expected = read(checkpoint, hf), HfReader(hf)
    assert found.keys() == expected.names()
    assert all(torch.equal(part, expected.get(name)) for name, part in found.items())


# --- Megatron writes and loads -------------------------------------------------------------------------------------


def _save(model: StageModel, folder: str) -> None:
    writer = CheckpointWriter()
    writer.begin([Content(Path(folder), {"model": model.sharded_state()}, ABOUT)])
    writer.finish()


def _load(model: StageModel, folder: str) -> bool:
    """Whether the model is the same again after `folder` was loaded over nothing."""
    before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    for parameter in model.parameters.values():
        parameter.data.fill_(torch.nan)
    model.load_checkpoint(folder)
    return all(torch.equal(parameter, before[name]) for name, parameter in model.parameters.items())


def _in_megatron(rank: int, world: int, folder: str, ports: list[int]) -> None:
    equal: dict[str, bool] = {}
    for (family, parallel), port in zip(LAYOUTS.items(), ports, strict=True):
        hf = f"{folder}/{family}/hf"
        place = mesh.start(rendezvous(rank, world, port), parallel, seed=0)
        for kind, values in ((PolicyModel, False), (ValueModel, True)):
            config = ModelConfig(hf, Layers.local, Dtype.float32)
            model = kind(read_architecture(hf), config, parallel, place)
            load_hf(model, hf)
            for name, parameter in model.parameters.items():
                if name.startswith("value_head"):
                    parameter.data.fill_(1.0 if "weight" in name else 2.0)
            _save(model, f"{folder}/{family}/{values}/saved")
            for name in WRITTEN_FOR:
                equal[f"{family} {values} {name}"] = _load(model, f"{folder}/{family}/{values}/{name}")
        mesh.stop()
    torch.save(equal, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family with what Megatron saved, and what was written for it to load."""
    folder = tmp_path_factory.mktemp("megatron")
    for family in LAYOUTS:
        hf = reference.make_model(reference.TINY[family](), folder / family / "hf")
        for values in (False, True):
            for name, parallel in WRITTEN_FOR.items():
                write(folder / family / str(values) / name, hf, parallel, values=values)
    run_group(_in_megatron, 4, str(folder), [free_port() for _ in LAYOUTS])
    return folder


@pytest.mark.parametrize("family", LAYOUTS)
def test_what_megatron_saves_is_read_bit_for_bit(world: Path, family: str) -> None:
    hf = world / family / "hf"
    checkpoint = open_checkpoint(world / family / "False" / "saved")
    assert (checkpoint.format, checkpoint.step) == ("torch_dist", 5)
    assert "tp 2" in checkpoint.layout
    assert_holds(pickle.loads(pickle.dumps(checkpoint)), hf)
    critic = read(open_checkpoint(world / family / "True" / "saved"), hf, values=True)
    assert torch.equal(critic.pop("score.weight"), torch.ones(1, 64))
    assert torch.equal(critic.pop("score.bias"), torch.full((1,), 2.0))
    expected = HfReader(hf)
    assert critic.keys() == expected.names() - {"lm_head.weight"}
    assert all(torch.equal(part, expected.get(name)) for name, part in critic.items())


def test_megatron_loads_what_is_written_for_any_layout(world: Path) -> None:
    for rank in range(4):
        equal = torch.load(world / f"{rank}.pt")
        assert len(equal) == 2 * len(LAYOUTS) * len(WRITTEN_FOR)
        assert all(equal.values()), (rank, equal)


@pytest.mark.parametrize("family", LAYOUTS)
def test_keys_are_those_that_megatron_writes(world: Path, family: str) -> None:
    folder = world / family / "False"
    saved, written = (
        pickle.loads((folder / which / ".metadata").read_bytes()).state_dict_metadata for which in ("saved", "cut")
    )
    assert saved.keys() <= written.keys()
    for key, tensor in saved.items():
        assert type(tensor) is type(written[key])
        assert getattr(tensor, "size", None) == getattr(written[key], "size", None), key


# --- What is written ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.make_model(reference.tiny_qwen3(), tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, hf: Path) -> Path:
    folder = tmp_path_factory.mktemp("written") / "checkpoint"
    write(folder, hf, UNEVEN)
    return folder


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("family", reference.TINY)
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=2, pp=3), ParallelConfig(tp=4)])
def test_what_is_written_is_read_again(family: str, parallel: ParallelConfig, tmp_path: Path) -> None:
    hf = reference.make_model(reference.TINY[family](), tmp_path / "hf")
    write(tmp_path / "checkpoint", hf, parallel)
    assert_holds(open_checkpoint(tmp_path / "checkpoint"), hf)


def test_a_dtype_is_kept(hf: Path, tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", hf, dtype=torch.bfloat16)
    checkpoint, expected = open_checkpoint(tmp_path / "checkpoint"), HfReader(hf)
    for name, part in read(checkpoint, hf).items():
        assert torch.equal(part, expected.get(name).bfloat16())
    entries = WeightMap(read_architecture(hf)).entries()
    assert {checkpoint.dtype(entry) for entry in entries} == {torch.bfloat16}


def test_files_are_the_same_in_any_order_and_hold_what_one_stage_has(hf: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "one", hf, UNEVEN, file_bytes=60_000)
    write(tmp_path / "two", hf, UNEVEN, file_bytes=60_000, order=lambda jobs: jobs[::-1])
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "two").iterdir())
    for file in {file for file in files if file != ".metadata"}:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    assert_holds(open_checkpoint(tmp_path / "two"), hf)
    assert len(first.files) > 4
    for job in first.files:
        assert len(job.entries) == 1 or job.nbytes <= 60_000
        stages = {entry.layer if entry.layer is None else min(entry.layer, 1) for entry in job.entries} - {None}
        assert len(stages) <= 1


def test_layers_must_have_one_dtype(hf: Path) -> None:
    weights = WeightMap(read_architecture(hf))
    with pytest.raises(UserError, match=r"layers.1.*bfloat16 but .*layers.0.*float32"):
        TorchDistWriter(weights, lambda entry: torch.bfloat16 if entry.layer == 1 else torch.float32, ParallelConfig())


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (ParallelConfig(tp=5), "tp is 5, which does not divide"),
        (ParallelConfig(pp=2), "pp is 2, which does not divide"),
        (ParallelConfig(ep=2), "ep is 2, but the model has no experts"),
    ],
)
def test_a_cut_that_is_impossible_is_refused(hf: Path, parallel: ParallelConfig, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        TorchDistWriter(WeightMap(read_architecture(hf)), lambda _: torch.float32, parallel)


def test_a_disk_that_is_full_is_one_sentence(hf: Path, tmp_path: Path) -> None:
    reader, weights = HfReader(hf), WeightMap(read_architecture(hf))
    writer = TorchDistWriter(weights, lambda _: torch.float32, ParallelConfig())
    (job,) = writer.files
    (tmp_path / f".{job.name}.partial").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"__0_0.distcp could not be written: No space left"):
        writer.write(tmp_path, job, lambda entry: [reader.get(name) for name in entry.hf])
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_cannot_be_read_is_not_said_to_be_unwritable(hf: Path, tmp_path: Path) -> None:
    writer = TorchDistWriter(WeightMap(read_architecture(hf)), lambda _: torch.float32, ParallelConfig())

    def locked(_: object) -> list[Tensor]:
        raise PermissionError(13, "Permission denied", "/the/source")

    with pytest.raises(PermissionError, match="/the/source"):
        writer.write(tmp_path, writer.files[0], locked)
    assert list(tmp_path.iterdir()) == []


def is_mapped(folder: Path) -> bool:
    """Whether this process has a file of `folder` in its memory."""
    return str(folder) in Path("/proc/self/maps").read_text()


def test_weights_are_the_file_itself_for_as_long_as_they_are_used(hf: Path, tmp_path: Path) -> None:
    """Also where a piece ends between two tensors of a weight, or before the padding of the vocabulary."""
    write(tmp_path / "checkpoint", hf, dtype=torch.bfloat16)
    checkpoint, weights = open_checkpoint(tmp_path / "checkpoint"), WeightMap(read_architecture(hf))
    expected = HfReader(hf)
    fused = 0
    for entry in weights.entries():
        parts = checkpoint.parts(entry, weights)
        assert all(torch.equal(part, expected.get(name).bfloat16()) for name, part in parts)
        # What is interleaved has to be taken apart.
        assert is_mapped(tmp_path) == (entry.rule.cut is not Cut.QKV), entry.name
        fused += len(parts) == 2
        del parts
        assert not is_mapped(tmp_path), entry.name
    assert fused == 3


def test_writing_to_a_weight_leaves_its_file_as_it_was(written: Path, hf: Path) -> None:
    before = {file.name: file.read_bytes() for file in written.iterdir()}
    for part in read(open_checkpoint(written), hf).values():
        part.zero_()
    assert {file.name: file.read_bytes() for file in written.iterdir()} == before


@given(
    offset=st.integers(0, 5000),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    rows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_a_tensor_is_read_from_wherever_it_lies(
    offset: int, sizes: list[int], dtype: torch.dtype, rows: tuple[int, int]
) -> None:
    count = math.prod(sizes)
    expected = torch.arange(count).to(dtype).reshape(sizes)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(b"x" * offset + bytes(expected.flatten().view(torch.uint8).tolist()))
        place = OnDisk(file, offset, tuple(sizes), expected.stride(), dtype)
        assert torch.equal(place.read(), expected)
        start, stop = sorted(min(row, sizes[0]) for row in rows)
        some = place.rows(start, stop).read()
        assert torch.equal(some, expected[start:stop])
        assert some.data_ptr() % dtype.itemsize == 0
        if count:
            os.truncate(file, offset + count * dtype.itemsize - 1)
            with pytest.raises(UserError, match=r"file is cut short"):
                place.read()
            file.unlink()
            with pytest.raises(UserError, match=r"file cannot be read \(No such file"):
                place.read()


# --- What others write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "numbers", "name"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", (3,), "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", (), "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight_v", (), "decoder.layers.3.mlp.linear_fc1.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (3, 7),
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc2.weight",
            (7,),
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w",
            (),
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        ("decoder.final_layernorm.weight", (), "decoder.final_layernorm.weight"),
    ],
)
def test_keys_name_weights(key: str, numbers: tuple[int, ...], name: str) -> None:
    assert name_of(key, numbers) == name


def test_layers_with_numbers_and_halves_of_their_own_are_read(hf: Path, tmp_path: Path) -> None:
    """As Megatron writes layers that are not alike, and shards that are each a tensor of their own; and optimisers."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    tensors: dict[str, Tensor] = {}
    weights, reader = WeightMap(read_architecture(hf)), HfReader(hf)
    for entry in weights.entries():
        parts = [reader.get(name) for name in entry.hf]
        if entry.name.endswith("linear_fc1.weight"):
            tensors |= {f"module.{entry.name}_w": parts[0], f"module.{entry.name}_v": parts[1]}
        else:
            tensors[f"module.{entry.name}"] = weights.shard(entry, parts, 0, 1)
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(64)
    tensors["chained_0.optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(64)
    folder = tmp_path / "iter_0000120"
    save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("120\n")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.folder, checkpoint.step) == (folder, 120)
    assert_holds(checkpoint, hf)


# --- What is wrong --------------------------------------------------------------------------------------------------


class Evil:
    """Makes a folder where its pickle is read with trust."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_metadata_that_would_run_code_is_refused(written: Path, tmp_path: Path) -> None:
    folder, mark = copy(written, tmp_path / "evil"), tmp_path / "mark"
    _evil_metadata(folder, mark)
    with pytest.raises(UserError, match=r"\.metadata asks for posix.mkdir.*could run code"):
        open_checkpoint(folder)
    assert not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert mark.exists(), "the pickle is one that would have run"


def _evil_metadata(folder: Path, mark: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _evil_common(folder: Path, mark: Path) -> None:
    torch.save({"args": Evil(mark)}, folder / "common.pt")


def _evil_object(folder: Path, mark: Path) -> None:
    _put_object(folder, Evil(mark))


def _put_object(folder: Path, value: object) -> None:
    torch.save(value, folder / "evil.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for at, place in metadata.storage_data.items() if "_extra_state" in at.fqn)
    place.relative_path, place.offset = "evil.distcp", 0
    place.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _unnoticed(folder: Path) -> None:
    """Read with trust, as Megatron and torch do, what a stranger may have written."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.load(folder / "common.pt", weights_only=False)
    for place in metadata.storage_data.values():
        content = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.parametrize(
    ("harm", "file"),
    [(_evil_metadata, r"\.metadata"), (_evil_common, "common.pt"), (_evil_object, "evil.distcp")],
)
def test_nothing_that_would_run_code_is_loaded_for_training(
    written: Path, tmp_path: Path, harm: Callable[[Path, Path], None], file: str
) -> None:
    folder, mark = copy(written, tmp_path / "evil"), tmp_path / "mark"
    require_sound(folder)
    harm(folder, mark)
    with pytest.raises(UserError, match=rf"{file} asks for posix.mkdir.*could run code"):
        sharded.load(folder, {})
    assert not mark.exists()
    _unnoticed(folder)
    assert mark.exists(), "it is one that would have run"


def test_a_pickle_within_a_layers_state_is_refused(written: Path, tmp_path: Path) -> None:
    """Transformer Engine unpickles the bytes of such a tensor; without FP8 it is empty."""
    folder = copy(written, tmp_path / "evil")
    _put_object(folder, [torch.zeros(0, dtype=torch.uint8)])
    require_sound(folder)
    _put_object(folder, [torch.frombuffer(bytearray(pickle.dumps(1)), dtype=torch.uint8)])
    with pytest.raises(UserError, match=r"evil.distcp holds decoder.*_extra_state.*could run code"):
        sharded.load(folder, {})


def test_a_chunk_that_would_run_code_is_refused(written: Path, hf: Path, tmp_path: Path) -> None:
    folder, mark = copy(written, tmp_path / "evil"), tmp_path / "mark"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "decoder.final_layernorm.weight":
            place.relative_path, place.offset = "evil.distcp", 0
            torch.save(Evil(mark), folder / "evil.distcp")
            place.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"evil.distcp asks for posix.mkdir.*could run code"):
        read(open_checkpoint(folder), hf)
    assert not mark.exists()


def test_a_file_outside_of_the_folder_is_refused(written: Path, tmp_path: Path) -> None:
    folder = copy(written, tmp_path / "outside")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"\.\./__0_0.distcp"):
        open_checkpoint(folder)


def _stack_endlessly(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stacked = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    stacked.size = torch.Size([10**12, *stacked.size[1:]])
    for chunk in stacked.chunks:
        chunk.sizes = torch.Size([10**12, *chunk.sizes[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _stack_often(folder: Path) -> None:
    """No chunk has too many, but all together; negative numbers must not count for less than nothing."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "decoder.layers.mlp.linear_fc2.weight"
    stacked = metadata.state_dict_metadata[key]
    (first, *_), properties = stacked.chunks, stacked.properties
    place = metadata.storage_data[MetadataIndex(key, first.offsets)]
    chunks = []
    for number, layers in enumerate([-(10**12)] + [1 << 16] * 64):
        offsets = torch.Size([number * (1 << 16), 0, 0])
        chunks.append(ChunkStorageMetadata(offsets, torch.Size([layers, *first.sizes[1:]])))
        metadata.storage_data[MetadataIndex(key, offsets)] = place
    size = torch.Size([1 << 22, *stacked.size[1:]])
    metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, size, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _number_endlessly(numbering: bytes) -> Callable[[Path], object]:
    """An empty list that is said to be one of billions of objects: the unpickler would make room for all."""
    return lambda folder: (folder / ".metadata").write_bytes(b"\x80\x02]" + numbering + b".")


def _cut_short(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0.distcp is not there"),
        (lambda folder: _cut_short(folder / "__1_0.distcp", 0.5), r"__1_0.distcp is cut short"),
        (lambda folder: _cut_short(folder / ".metadata", 0.5), r"\.metadata is damaged or cut short"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata is not there"),
        (lambda folder: (folder / "metadata.json").unlink(), r"was not written to the end"),
        (lambda folder: (folder / "metadata.json").write_text("{"), r"metadata.json is damaged"),
        (lambda folder: (folder / "metadata.json").write_text("[" * 200_000), r"metadata.json is damaged"),
        (lambda folder: (folder / "complete.json").write_text("{"), r"complete.json is damaged"),
        (lambda folder: (folder / "complete.json").write_text('{"step": "x"}'), r"complete.json is damaged"),
        (lambda folder: (folder / "complete.json").write_text('{"step": null}'), r"complete.json is damaged"),
        (lambda folder: (folder / "complete.json").write_text('{"step": [1]}'), r"complete.json is damaged"),
        (_stack_endlessly, r"metadata is damaged.* more than 1048576 weights"),
        (_stack_often, r"metadata is damaged.* more than 1048576 weights"),
        (_number_endlessly(b"r\xff\xff\xff\x7f"), r"metadata is damaged.* more objects than it has bytes"),
        (_number_endlessly(b"p99999999999\n"), r"metadata is damaged.* more objects than it has bytes"),
        (
            lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            r"was saved as zarr",
        ),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(10**6)), r"__0_0.distcp is damaged"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_one_sentence(
    written: Path, hf: Path, tmp_path: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    folder = copy(written, tmp_path / "harmed")
    assert_holds(open_checkpoint(folder), hf)
    harm(folder)
    with pytest.raises(UserError, match=sentence):
        read(open_checkpoint(folder), hf)


def test_a_checkpoint_of_another_model_is_refused(written: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written)
    for config, sentence in (
        (reference.tiny_qwen3(layers=4), r"lacks 8 weights of this model, first decoder.layers.3"),
        (
            reference.tiny_qwen3(layers=2),
            r"has 8 weights that this model does not have, first decoder.layers.2",
        ),
        (reference.tiny_llama3(), r"has 6 weights that this model does not have, first .*q_layernorm"),
        (reference.tiny_config(), r"lacks 3 weights of this model, first decoder.layers.0.*linear_qkv.bias"),
    ):
        other = reference.make_model(config, tmp_path / f"{config.model_type}-{config.num_hidden_layers}")
        with pytest.raises(UserError, match=sentence):
            checkpoint.check(WeightMap(read_architecture(other)))
    wider = replace(WeightMap(read_architecture(tmp_path / "qwen3-4")).architecture, layers=3, hidden=96)
    with pytest.raises(UserError, match=r"embedding.word_embeddings.weight of shape \[128, 64\]"):
        checkpoint.check(WeightMap(wider))
    with pytest.raises(UserError, match=r"first value_head.weight"):
        checkpoint.check(WeightMap(replace(wider, hidden=64), values=True))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: None, "holds no checkpoint"),
        (
            lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("7"),
            "names 7, but .*iter_0000007",
        ),
        (
            lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("²"),
            "names ², but .*² is not there",
        ),
        (lambda folder: [(folder / f"iter_{n:07d}").mkdir() for n in (1, 2)], "holds 2 checkpoints"),
        (lambda folder: folder.rmdir(), "is not there"),
    ],
)
def test_a_folder_without_a_checkpoint_is_one_sentence(
    tmp_path: Path, make: Callable[[Path], object], sentence: str
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    make(folder)
    with pytest.raises(UserError, match=sentence):
        open_checkpoint(folder)
