"""Models and checkpoints that can be evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlsys.apps.evaluation.evaluation_inputs import Model, as_hf, find_model
from rlsys.errors import UserError
from rlsys.weights.checkpoint.store import CheckpointStore
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.support.refusals import refused
from tests.support.tiny_models import POLICY


def hf_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's checkpoint with a manifest and a config."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = store.begin(12)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard.bin").write_bytes(b"12345")
    (folder / "data").mkdir()
    original = hf_folder(tmp_path / "original")
    (folder / "data" / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(original)}}))
    return store.publish(12)


def find(path: Path, hf: Path | None = None) -> Model:
    return find_model(path, hf, f"--model {path}")


def test_a_hugging_face_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    model = find(folder)
    assert model == Model(folder, None)
    with as_hf(model, tmp_path) as path:
        assert path == folder
    with refused("conflict", "--hf"):
        find(folder, folder)


def test_the_runs_config_says_the_original(saved: Path, tmp_path: Path) -> None:
    expected = Model(saved / "actor", tmp_path / "original", 12)
    assert find(saved / "actor") == expected
    assert find(saved) == expected
    other = hf_folder(tmp_path / "other")
    assert find(saved, other).original == other


def test_a_runs_folder_names_its_newest_checkpoint(saved: Path) -> None:
    (saved.parent / "global_step_9").mkdir()
    for folder in (saved.parents[1], saved.parent):
        with refused("mismatch", folder) as caught:
            find(folder)
        assert "global_step_12/actor" in str(caught.value)


def test_a_checkpoint_that_is_not_whole_is_refused(saved: Path) -> None:
    (saved / "actor" / "shard.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"shard\.bin"):
        find(saved / "actor")


def test_a_checkpoint_that_does_not_say_its_original_asks_for_it(saved: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    with refused("missing", "--hf"):
        find(bare)
    with refused("mismatch", tmp_path / "none"):
        find(bare, tmp_path / "none")
    (tmp_path / "original" / "config.json").unlink()
    with refused("mismatch", tmp_path / "original"):
        find(saved / "actor")
    with refused("not_found", tmp_path / "nowhere"):
        find(tmp_path / "nowhere")


def test_a_checkpoint_is_converted_for_as_long_as_it_takes(tmp_path: Path) -> None:
    """The converted folder goes again; the checkpoint says its original itself."""
    hf_to_megatron(POLICY, tmp_path / "megatron", processes=1)
    assert find(tmp_path / "megatron").original == tmp_path / "megatron" / "hf"
    work = tmp_path / "work"
    work.mkdir()
    with as_hf(find(tmp_path / "megatron"), work) as path:
        assert work in path.parents
        got, expected = (load_file(folder / "model.safetensors") for folder in (path, POLICY))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert (path / "tokenizer.json").is_file()
    assert list(work.iterdir()) == []
    with pytest.raises(ZeroDivisionError), as_hf(find(tmp_path / "megatron"), work):
        raise ZeroDivisionError
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("kinds", "speaks"),
    [
        ('["Qwen2ForCausalLM"]', True),
        ('["GPT2LMHeadModel"]', True),
        ("null", True),
        ('["BertForMaskedLM"]', False),
        ("3", False),
    ],
)
def test_a_model_that_says_no_text_is_refused(tmp_path: Path, kinds: str, speaks: bool) -> None:
    folder = hf_folder(tmp_path / "model")
    (folder / "config.json").write_text(f'{{"architectures": {kinds}}}')
    expected = nullcontext() if speaks else refused("unsupported", folder)
    with expected, as_hf(find(folder), tmp_path):
        pass


def test_a_critic_is_not_evaluated_as_a_policy(tmp_path: Path) -> None:
    """One word away from the actor, and every engine would load it with an output layer made up."""
    hf_to_megatron(POLICY, tmp_path / "critic", values=True, processes=1)
    (tmp_path / "work").mkdir()
    of_a_checkpoint = as_hf(find(tmp_path / "critic"), tmp_path / "work")
    with refused("mismatch", tmp_path / "critic"), of_a_checkpoint:
        pass
    megatron_to_hf(tmp_path / "critic", tmp_path / "hf", POLICY, processes=1)
    with refused("mismatch", tmp_path / "hf"), as_hf(find(tmp_path / "hf"), tmp_path / "work"):
        pass
