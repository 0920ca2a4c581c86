"""Tests of untrusted distributed checkpoints: the error names the damaged file, and no code in a file runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from rlsys.config.schema import ParallelConfig
from rlsys.errors import Code
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.megatron_reader import open_checkpoint
from rlsys.weights.checkpoint.sharded import require_sound
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.support.refusals import refused

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, hf: Path) -> Path:
    """An undamaged checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    hf_to_megatron(hf, checkpoint, parallel=ParallelConfig(tp=2, pp=2, pp_layers=[1, 2]), processes=1)
    require_sound(checkpoint)
    return checkpoint


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def put_object(folder: Path, value: object, key: str = "_extra_state") -> None:
    """Replace the object stored under `key` by `value`."""
    torch.save(value, folder / "evil.distcp")

    def place_it(metadata: Metadata) -> None:
        places: dict[Any, Any] = metadata.storage_data
        place = next(place for at, place in places.items() if key in at.fqn)
        place.relative_path, place.offset = "evil.distcp", 0
        place.length = (folder / "evil.distcp").stat().st_size

    change_metadata(folder, place_it)


def _in_metadata(folder: Path, evil: Evil) -> None:
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", evil))


def _in_common(folder: Path, evil: Evil) -> None:
    torch.save({"args": evil}, folder / "common.pt")


@pytest.mark.parametrize(
    ("damage", "file"),
    [(_in_metadata, ".metadata"), (_in_common, "common.pt"), (put_object, "evil.distcp")],
)
def test_pickled_code_is_refused_before_loading_for_training(
    folder: Path, tmp_path: Path, damage: Callable[[Path, Evil], None], file: str
) -> None:
    mark = tmp_path / "mark"
    damage(folder, Evil(mark))
    with refused("unsafe", folder / file):
        sharded.load(folder, {})
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists(), "the pickle must be able to run code"


def test_pickled_code_is_refused_before_conversion(folder: Path, hf: Path, tmp_path: Path) -> None:
    mark, legacy = tmp_path / "mark", tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    put_object(folder, Evil(mark), "decoder.final_layernorm.weight")
    with refused("unsafe", folder / "evil.distcp"):
        megatron_to_hf(folder, tmp_path / "out", hf, processes=1)
    _in_metadata(folder, Evil(mark))
    with refused("unsafe", folder / ".metadata"):
        open_checkpoint(folder)
    legacy.parent.mkdir()
    torch.save({"model": {}, "args": Evil(mark)}, legacy)
    with refused("unsafe", legacy):
        open_checkpoint(tmp_path)
    assert not mark.exists()


def test_pickle_inside_a_layer_state_is_refused(folder: Path) -> None:
    """Transformer Engine unpickles the bytes of such a tensor, which is empty without FP8."""
    put_object(folder, [torch.zeros(0, dtype=torch.uint8)])
    require_sound(folder)
    put_object(folder, [torch.frombuffer(bytearray(pickle.dumps(1)), dtype=torch.uint8)])
    with refused("unsafe", folder / "evil.distcp"):
        sharded.load(folder, {})


def _outside(folder: Path) -> None:
    def leave(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"

    change_metadata(folder, leave)


def _claim_huge_stack(folder: Path) -> None:
    def stack(metadata: Metadata) -> None:
        stacked: Any = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
        stacked.size = torch.Size([10**12, *stacked.size[1:]])
        for chunk in stacked.chunks:
            chunk.sizes = torch.Size([10**12, *chunk.sizes[1:]])

    change_metadata(folder, stack)


def _claim_huge_memo(folder: Path) -> None:
    """Write a pickle whose memo index makes unpicklers allocate memory for billions of objects."""
    (folder / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")


def _halved(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _holding(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "code", "key"),
    [
        pytest.param(lambda folder: (folder / "__0_0.distcp").unlink(), "not_found", "__0_0.distcp", id="no file"),
        pytest.param(_halved("__1_0.distcp"), "malformed", "__1_0.distcp", id="half a file"),
        pytest.param(_holding("__0_0.distcp", "0" * 10**6), "malformed", "__0_0.distcp", id="no tensors"),
        pytest.param(lambda folder: (folder / ".metadata").unlink(), "not_found", ".metadata", id="no metadata"),
        pytest.param(_claim_huge_stack, "malformed", ".metadata", id="huge stack"),
        pytest.param(_claim_huge_memo, "malformed", ".metadata", id="huge memo"),
        pytest.param(_outside, "unsafe", None, id="outside"),
        pytest.param(lambda folder: (folder / "metadata.json").unlink(), "malformed", "", id="no backend"),
        pytest.param(_holding("metadata.json", "[" * 200_000), "malformed", "metadata.json", id="deep backend"),
        pytest.param(_holding("metadata.json", '{"sharded_backend": "zarr"}'), "unsupported", "", id="other backend"),
    ],
)
def test_damaged_checkpoint_is_refused(folder: Path, hf: Path, damage: Damage, code: Code, key: str | None) -> None:
    damage(folder)
    with refused(code, None if key is None else folder / key):
        megatron_to_hf(folder, folder.with_name("out"), hf, processes=1)


def _two_steps(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"iter_{step:07d}").mkdir()


LATEST = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("make", "code", "key"),
    [
        pytest.param(Path.is_dir, "empty", "", id="empty"),
        pytest.param(_holding(LATEST, "7"), "not_found", "iter_0000007", id="latest is not there"),
        pytest.param(_holding(LATEST, "²"), "not_found", "²", id="latest is no number"),
        pytest.param(_two_steps, "out_of_range", "", id="two"),
        pytest.param(Path.rmdir, "not_found", "", id="gone"),
    ],
)
def test_folder_without_a_checkpoint_is_refused(tmp_path: Path, make: Damage, code: Code, key: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    make(folder)
    with refused(code, folder / key):
        open_checkpoint(folder)
