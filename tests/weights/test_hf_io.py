"""Tests of safetensors files: exchange with the library and transformers, damage, hostile headers, stacked experts."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from rlsys.errors import Code
from rlsys.weights import hf_io
from rlsys.weights.hf_io import (
    DTYPES,
    INDEX,
    SINGLE,
    HfReader,
    TensorSpec,
    by_expert,
    file_bytes,
    from_mxfp4,
    write_safetensors,
)
from tests.support import tiny_configs
from tests.support.hf_models import make_model
from tests.support.refusals import refused
from tests.support.tensors import raw
from tests.trainer import reference


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers in non-contiguous memory."""
    numbers = (torch.randn((*shape, 2)) * 10)[..., 0]
    return (numbers > 0) if dtype is torch.bool else numbers.abs().to(dtype)


def test_sharded_model_of_transformers_is_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    reader = pickle.loads(pickle.dumps(HfReader(model)))
    assert len(reader.files()) > 1
    assert reader.names() == expected.keys()
    for name, tensor in expected.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert raw(reader.get(name)) == raw(tensor), name


@settings(max_examples=30)
@given(
    contents=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 7), max_size=3).map(tuple)),
        max_size=6,
    )
)
@example(contents={name: (dtype, (3, 5)) for name, dtype in DTYPES.items()})
def test_files_are_exchanged_with_the_safetensors_library(
    contents: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Dtypes come in any order, so that some tensors are unaligned."""
    path = tmp_path_factory.mktemp("any") / SINGLE
    tensors = {name: of_dtype(dtype, *shape) for name, (dtype, shape) in contents.items()}
    specs = [spec_of(*item) for item in tensors.items()]

    def assert_holds_all() -> None:
        reader, by_library = HfReader(path.parent), load_file(path)
        assert by_library.keys() == tensors.keys() == reader.names()
        for spec in specs:
            assert reader.spec(spec.name) == spec
            assert raw(reader.get(spec.name)) == raw(by_library[spec.name]) == raw(tensors[spec.name])

    write_safetensors(path, specs, iter(tensors.items()))
    assert path.stat().st_size == file_bytes(specs)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses files without it"
    assert_holds_all()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    assert_holds_all()


def test_writing_to_a_read_tensor_changes_no_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000.0)}, tmp_path / SINGLE)
    HfReader(tmp_path).get("a").fill_(7)
    assert torch.equal(HfReader(tmp_path).get("a"), torch.arange(1000.0))


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([("a", torch.zeros(2)), ("c", torch.zeros(3))], id="name"),
        pytest.param([("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.float16))], id="dtype"),
        pytest.param([("a", torch.zeros(2))], id="missing"),
    ],
)
def test_tensors_that_differ_from_their_specs_make_no_file(tensors: list[tuple[str, Tensor]], tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.float32, (3,))]
    with pytest.raises(ValueError):  # noqa: PT011
        write_safetensors(tmp_path / SINGLE, specs, iter(tensors))
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / f".{SINGLE}.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=SINGLE) as raised:
        write_safetensors(tmp_path / SINGLE, [TensorSpec("a", torch.float32, (2,))], [("a", torch.zeros(2))])
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / SINGLE))
    assert list(tmp_path.iterdir()) == []


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


F32 = '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, %d]}}'


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"abc", id="short"),
        pytest.param(header(b"{}", 10**15), id="header longer than the file"),
        pytest.param(header(b"not json"), id="no JSON"),
        pytest.param(header(b'{"a": 3}'), id="no entry"),
        pytest.param(header((F32 % 8).encode()), id="cut"),
        pytest.param(header((F32 % 4).encode()) + bytes(8), id="fewer bytes than the shape"),
        pytest.param(header((F32 % 8).replace("F32", "Q2").encode()) + bytes(8), id="dtype"),
        pytest.param(header((F32 % 8).replace("[2]", "[-1, -2]").encode()) + bytes(8), id="negative"),
        pytest.param(header((F32 % 8).replace("[2]", "[true, 2]").encode()) + bytes(8), id="boolean"),
        pytest.param(header((F32 % 0).replace("[2]", f"[0, {10**20}]").encode()), id="huge"),
        pytest.param(header(b"[" * 200_000), id="deep"),
    ],
)
def test_damaged_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with refused("malformed", tmp_path / SINGLE):
        HfReader(tmp_path)


def _index(content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


def _beside_an_index(folder: Path) -> None:
    """Add a single file with other tensors: transformers reads this file; other programs read the index's files."""
    _index({"weight_map": {"b": "part.safetensors"}})(folder)
    save_file({"a": torch.zeros(1)}, folder / SINGLE)


@pytest.mark.parametrize(
    ("make", "code", "key"),
    [
        pytest.param(Path.is_dir, "empty", "", id="empty"),
        pytest.param(lambda folder: folder.rename(folder.with_name("gone")), "not_found", "", id="gone"),
        pytest.param(lambda folder: (folder / SINGLE).mkdir(), "malformed", SINGLE, id="folder"),
        pytest.param(_index({"weight_map": {"a": "gone.safetensors"}}), "not_found", "gone.safetensors", id="no file"),
        pytest.param(_index({"weight_map": {"a": "part.safetensors"}}), "mismatch", "part.safetensors", id="no tensor"),
        pytest.param(_index({"weight_map": ["a"]}), "malformed", INDEX, id="no index"),
        pytest.param(_index("[" * 200_000), "malformed", INDEX, id="deep index"),
        pytest.param(_index({"weight_map": {"a": "../part.safetensors"}}), "unsafe", INDEX, id="outside"),
        pytest.param(_index({"weight_map": {"a": 3}}), "unsafe", INDEX, id="no name"),
        pytest.param(_beside_an_index, "conflict", "", id="file beside the index"),
    ],
)
def test_folder_without_a_sound_model_is_refused(
    make: Callable[[Path], object], code: Code, key: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if key == "part.safetensors":
        save_file({"b": torch.zeros(1)}, folder / key)
    make(folder)
    with refused(code, folder / key):
        HfReader(folder)


def test_duplicate_tensor_is_refused(tmp_path: Path) -> None:
    for file in (SINGLE, "old.safetensors"):
        save_file({"a": torch.zeros(1), file: torch.zeros(1)}, tmp_path / file)
    with refused("conflict", "a"):
        HfReader(tmp_path)


def test_oversized_header_is_refused_without_being_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(header(b"", 1_500_000_000))
    os.truncate(tmp_path / SINGLE, 2_000_000_000)
    tracemalloc.start()
    try:
        with refused("malformed", tmp_path / SINGLE):
            HfReader(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_file_that_changes_after_opening_is_refused(tmp_path: Path) -> None:
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


def test_too_many_stacked_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert takes a few bytes on disk, but hundreds in memory."""
    monkeypatch.setattr(hf_io, "_MAX_TENSORS", 100)
    for experts in (50, 51):
        stack = {"layers.0.experts.gate_up_proj": torch.zeros(experts, 2, 1, dtype=torch.uint8)}
        save_file(stack, tmp_path / SINGLE)
        if experts == 50:
            assert len(HfReader(tmp_path).names()) == 100
    with refused("malformed", tmp_path / SINGLE):
        HfReader(tmp_path)


def test_attention_with_yarn_gets_the_scale_that_transformers_has_for_deepseek_v3() -> None:
    for yarn in (False, True):
        config = tiny_configs.deepseek(yarn=yarn)
        model = hf_io.with_attention_scale(AutoModelForCausalLM.from_config(config))
        sizes = {key: value for key, value in config.to_dict().items() if key != "model_type"}
        expected = DeepseekV3Attention(DeepseekV3Config(**sizes), layer_idx=0).scaling
        assert yarn == (expected > 24**-0.5)
        assert [layer.self_attn.scaling for layer in model.model.layers] == [pytest.approx(expected)] * 3


def test_every_number_of_mxfp4_is_that_of_transformers() -> None:
    """All codes in both halves of a byte, with all scales, also those whose products bfloat16 cannot hold."""
    codes, scales = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)[:, None]
    blocks = (codes | (15 - codes) << 4).expand(256, 1, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    assert len({*expected[127].tolist()}) == 15, "plus and minus 0 are equal"
    assert raw(from_mxfp4(blocks, scales)) == raw(expected)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_stacked_experts_are_one_tensor_per_expert_in_folders_and_models(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, family), dtype=torch.bfloat16)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = reference.by_checkpoint_names(parameters.items())
    reader, views = pickle.loads(pickle.dumps(HfReader(tmp_path))), dict(by_expert(parameters))
    assert reader.names() == views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert reader.spec(name) == spec_of(name, tensor)
        assert raw(reader.get(name)) == raw(views[name]) == raw(tensor), name
        assert views[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), "no copy"
