"""Safetensors are read as the library and transformers write them, and written so that these read them."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rlsys.errors import UserError
from rlsys.weights.hf_io import DTYPES, INDEX, HfReader, TensorSpec, file_bytes, write_safetensors


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Also where a number is none."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape) * 10
    return (numbers > 0) if dtype is torch.bool else numbers.abs().to(dtype)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint made by transformers."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_what_transformers_wrote_is_read(original: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).state_dict()
    reader = pickle.loads(pickle.dumps(HfReader(original)))
    assert len(reader.files()) > 1
    assert reader.names() == expected.keys()
    for name, tensor in expected.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert torch.equal(reader.get(name), tensor), name


def test_every_dtype_goes_both_ways(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(dtype): of_dtype(dtype, 3, 5) for dtype in DTYPES.values()}
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    for name, tensor in tensors.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert same_bytes(reader.get(name), tensor), name

    written = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    specs = [spec_of(*item) for item in written]
    write_safetensors(tmp_path / "again.safetensors", specs, iter(written))
    assert (tmp_path / "again.safetensors").stat().st_size == file_bytes(specs)
    back = load_file(tmp_path / "again.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same_bytes(back[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "again.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses files that do not say so"


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(max_examples=40)
@given(
    contents=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), shapes),
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
        assert same_bytes(reader.get(name), tensor)


def test_views_are_written_as_they_read(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    views = {"columns": whole[:, 2:4], "turned": whole.T}
    write_safetensors(tmp_path / "model.safetensors", [spec_of(*item) for item in views.items()], iter(views.items()))
    back = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(back[name], view) for name, view in views.items())


def test_a_tensor_is_a_copy_to_whoever_writes_to_it(original: Path) -> None:
    name = "model.norm.weight"
    before = HfReader(original).get(name).clone()
    HfReader(original).get(name).fill_(7)
    assert torch.equal(HfReader(original).get(name), before)


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", torch.zeros(2)), ("c", torch.zeros(3))],
        [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.float16))],
        [("a", torch.zeros(2))],
    ],
)
def test_other_tensors_than_announced_make_no_file(tensors: list[tuple[str, Tensor]], tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (3,))]
    with pytest.raises(ValueError, match="was to hold"):
        write_safetensors(tmp_path / "model.safetensors", specs, iter(tensors))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        raise RuntimeError("the source is gone")

    specs = [TensorSpec(name, torch.float32, (2,)) for name in "ab"]
    with pytest.raises(RuntimeError, match="gone"):
        write_safetensors(tmp_path / "model.safetensors", specs, broken())
    assert list(tmp_path.iterdir()) == []


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


ODD_SHAPES = ("[-1, -2]", "[2.0]", "[true, 2]", '"2"', "2")
F32 = '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, %d]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        header(b"{}", 10**15),
        header(b"not json"),
        header(b"[]"),
        header(b'{"a": 3}'),
        header((F32 % 8).encode()),
        header((F32 % 4).encode()) + bytes(8),
        header((F32 % 8).replace("F32", "Q2").encode()) + bytes(8),
        *(header((F32 % 8).replace("[2]", shape).encode()) + bytes(8) for shape in ODD_SHAPES),
        header((F32 % 8).replace("8]", "8.0]").encode()) + bytes(8),
        header(b'{"a": {"dtype": "F32", "shape": [0, 99999999999999999999], "data_offsets": [0, 0]}}'),
        header(b"[" * 200_000),
    ],
)
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="no whole safetensors file") as error:
        HfReader(tmp_path)
    assert "\n" not in str(error.value)
    assert "model.safetensors" in str(error.value)


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no safetensors"):
        HfReader(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        HfReader(tmp_path)
    save_file({"b": torch.zeros(1)}, tmp_path / "gone.safetensors")
    with pytest.raises(UserError, match="does not hold a"):
        HfReader(tmp_path)
    for damaged in ([1], {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": 3}):
        (tmp_path / INDEX).write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="damaged"):
            HfReader(tmp_path)
    (tmp_path / INDEX).write_text("[" * 200_000)
    with pytest.raises(UserError, match="damaged"):
        HfReader(tmp_path)


def test_an_index_names_files_of_its_own_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (str(tmp_path / "elsewhere.safetensors"), "../elsewhere.safetensors", 3, None):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(UserError, match="no file beside it"):
            HfReader(folder)


def test_a_header_is_not_read_that_no_file_has(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(b"", 1_500_000_000))
    with path.open("r+b") as file:
        file.truncate(2_000_000_000)
    tracemalloc.start()
    with pytest.raises(UserError, match="a header of 1500000000 bytes"):
        HfReader(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_folder_in_place_of_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read \(Is a directory\)"):
        HfReader(tmp_path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Nothing says which of two files counts."""
    for file in ("model.safetensors", "old.safetensors"):
        save_file({"a": torch.zeros(1), file: torch.zeros(1)}, tmp_path / file)
    with pytest.raises(UserError, match=r"/model\.safetensors and .*/old\.safetensors both hold a,"):
        HfReader(tmp_path)


def test_a_whole_model_beside_an_index_of_other_files_is_refused(original: Path, tmp_path: Path) -> None:
    """transformers reads the one and other programs the others."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has model\.safetensors, which .*index\.json does not name"):
        HfReader(tmp_path)


def test_a_file_that_changes_after_it_was_opened_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10_000)}, path)
    reader = HfReader(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors has become shorter"):
        reader.get("a")
    path.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        reader.get("a")


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    gate, up, down = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    stacked = {
        f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1),
        f"{experts}.down_proj": down.clone(),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 5),
    }
    save_file(stacked, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert len(reader.names()) == 3 * 3 + 1
    for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        for number, matrix in enumerate(matrices):
            assert torch.equal(reader.get(f"{experts}.{number}.{name}.weight"), matrix)
    save_file({f"{experts}.1.up_proj.weight": up[1].clone()}, tmp_path / "more.safetensors")
    with pytest.raises(UserError, match=r"both hold .*experts\.1\.up_proj"):
        HfReader(tmp_path)


def test_more_stacked_experts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """Each costs a few bytes on the disk, and hundreds in memory."""
    experts = 1_000_000
    for number in range(3):
        stack = {
            "dtype": "U8",
            "shape": [experts, 2, 1],
            "data_offsets": [0, 2 * experts],
        }
        head = json.dumps({f"layers.{number}.experts.gate_up_proj": stack}).encode()
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + 2 * experts)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="more than 262,144 tensors"):
            HfReader(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
