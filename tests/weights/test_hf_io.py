"""Safetensors are read as the library and transformers write them, and written so that these read them."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.errors import Code
from rlsys.weights import hf_io
from rlsys.weights.hf_io import DTYPES, INDEX, SINGLE, HfReader, TensorSpec, file_bytes, write_safetensors
from tests.support.refusals import refused
from tests.weights.convert.models import make_model
from tests.weights.ends import raw


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape) * 10
    return (numbers > 0) if dtype is torch.bool else numbers.abs().to(dtype)


def test_what_transformers_wrote_is_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    reader = pickle.loads(pickle.dumps(HfReader(model)))
    assert len(reader.files()) > 1
    assert reader.names() == expected.keys()
    for name, tensor in expected.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert raw(reader.get(name)) == raw(tensor), name


def test_every_dtype_and_view_goes_both_ways(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(dtype): of_dtype(dtype, 3, 5) for dtype in DTYPES.values()}
    whole = torch.arange(24.0).view(4, 6)
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 4), "columns": whole[:, 2:4], "turned": whole.T}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / SINGLE)
    reader = HfReader(tmp_path)
    for name, tensor in tensors.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert raw(reader.get(name)) == raw(tensor), name

    written = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    specs = [spec_of(*item) for item in written]
    write_safetensors(tmp_path / "again.safetensors", specs, iter(written))
    assert (tmp_path / "again.safetensors").stat().st_size == file_bytes(specs)
    back = load_file(tmp_path / "again.safetensors")
    assert back.keys() == tensors.keys()
    assert all(raw(back[name]) == raw(tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "again.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses files that do not say so"


@settings(max_examples=30)
@given(
    contents=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 7), max_size=3).map(tuple)),
        max_size=6,
    )
)
def test_any_file_is_one_that_the_library_reads(
    contents: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any order of dtypes: then some are not aligned."""
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    tensors = {name: of_dtype(dtype, *shape) for name, (dtype, shape) in contents.items()}
    write_safetensors(path, [spec_of(*item) for item in tensors.items()], iter(tensors.items()))
    reader = HfReader(path.parent)
    assert load_file(path).keys() == tensors.keys() == reader.names()
    for name, tensor in tensors.items():
        assert raw(reader.get(name)) == raw(tensor)


def test_a_tensor_is_a_copy_to_whoever_writes_to_it(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000.0)}, tmp_path / SINGLE)
    HfReader(tmp_path).get("a").fill_(7)
    assert torch.equal(HfReader(tmp_path).get("a"), torch.arange(1000.0))


def _breaks_off() -> Iterator[tuple[str, Tensor]]:
    yield "a", torch.zeros(2)
    raise ValueError


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", torch.zeros(2)), ("c", torch.zeros(3))],
        [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.float16))],
        [("a", torch.zeros(2))],
        _breaks_off(),
    ],
    ids=["name", "shape", "dtype", "missing", "breaks off"],
)
def test_other_tensors_than_announced_make_no_file(tensors: Iterator[tuple[str, Tensor]], tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (3,))]
    with pytest.raises(ValueError):  # noqa: PT011
        write_safetensors(tmp_path / SINGLE, specs, iter(tensors))
    assert list(tmp_path.iterdir()) == []


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


F32 = '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, %d]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"abc",
        header(b"{}", 10**15),
        header(b"not json"),
        header(b"[]"),
        header(b'{"a": 3}'),
        header((F32 % 8).encode()),
        header((F32 % 4).encode()) + bytes(8),
        header((F32 % 8).replace("F32", "Q2").encode()) + bytes(8),
        *(header((F32 % 8).replace("[2]", shape).encode()) + bytes(8) for shape in ("[-1, -2]", "[2.0]", "[true, 2]")),
        header(b'{"a": {"dtype": "F32", "shape": [0, 99999999999999999999], "data_offsets": [0, 0]}}'),
        header(b"[" * 200_000),
    ],
    ids=range(13),
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with refused("malformed", tmp_path / SINGLE):
        HfReader(tmp_path)


def _index(content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


def _two_files(folder: Path) -> None:
    for file in (SINGLE, "old.safetensors"):
        save_file({"a": torch.zeros(1), file: torch.zeros(1)}, folder / file)


def _beside_an_index(folder: Path) -> None:
    """transformers reads the one and other programs the others."""
    _index({"weight_map": {"b": "part.safetensors"}})(folder)
    save_file({"a": torch.zeros(1)}, folder / SINGLE)


@pytest.mark.parametrize(
    ("make", "code", "key"),
    [
        (Path.is_dir, "empty", ""),
        (lambda folder: folder.rename(folder.with_name("gone")), "not_found", ""),
        (lambda folder: (folder / SINGLE).mkdir(), "malformed", SINGLE),
        (_index({"weight_map": {"a": "gone.safetensors"}}), "not_found", "gone.safetensors"),
        (_index({"weight_map": {"a": "part.safetensors"}}), "mismatch", "part.safetensors"),
        (_index([1]), "malformed", INDEX),
        (_index({"weight_map": ["a"]}), "malformed", INDEX),
        (_index("[" * 200_000), "malformed", INDEX),
        (_index({"weight_map": {"a": "../part.safetensors"}}), "unsafe", INDEX),
        (_index({"weight_map": {"a": 3}}), "unsafe", INDEX),
        (_beside_an_index, "conflict", ""),
    ],
    ids=range(11),
)
def test_a_folder_that_is_no_model_is_refused(
    make: Callable[[Path], object], code: Code, key: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if key == "part.safetensors":
        save_file({"b": torch.zeros(1)}, folder / key)
    make(folder)
    with refused(code, folder / key):
        HfReader(folder)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Nothing says which of two files counts."""
    _two_files(tmp_path)
    with refused("conflict", "a"):
        HfReader(tmp_path)


def test_a_header_that_no_model_has_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(header(b"", 1_500_000_000))
    os.truncate(tmp_path / SINGLE, 2_000_000_000)
    tracemalloc.start()
    try:
        with refused("malformed", tmp_path / SINGLE):
            HfReader(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_file_that_changes_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file({"a": torch.zeros(10_000)}, path)
    reader = HfReader(tmp_path)
    os.truncate(path, 5000)
    with refused("malformed", path):
        reader.get("a")
    path.unlink()
    with refused("not_found", path):
        reader.get("a")


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    gate, up, down = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    stacked = {
        f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1),
        f"{experts}.down_proj": down.clone(),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 5),
    }
    save_file(stacked, tmp_path / SINGLE)
    reader = HfReader(tmp_path)
    assert len(reader.names()) == 3 * 3 + 1
    for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        for number, matrix in enumerate(matrices):
            assert torch.equal(reader.get(f"{experts}.{number}.{name}.weight"), matrix)
    save_file({f"{experts}.1.up_proj.weight": up[1].clone()}, tmp_path / "more.safetensors")
    with refused("conflict", f"{experts}.1.up_proj.weight"):
        HfReader(tmp_path)


def test_more_stacked_experts_than_any_model_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a few bytes on the disk, and hundreds in memory."""
    monkeypatch.setattr(hf_io, "_MOST_TENSORS", 100)
    for experts in (50, 51):
        stack = {"layers.0.experts.gate_up_proj": torch.zeros(experts, 2, 1, dtype=torch.uint8)}
        save_file(stack, tmp_path / SINGLE)
        if experts == 50:
            assert len(HfReader(tmp_path).names()) == 100
    with refused("malformed", tmp_path / SINGLE):
        HfReader(tmp_path)
