"""The Megatron model of every family says what transformers' does, and comes back from it bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlsys.config.schema import Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import mesh
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.export import export_plan, load_hf, whole_tensors
from rlsys.trainer.forward import forward
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import read_architecture
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import rendezvous, run_group

WIDTH = 120
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": reference.tiny_llama3(),
    "llama, tied": reference.tiny_llama3(tied=True),
    "qwen2": reference.tiny_config(tied=False),
    "qwen2, tied": reference.tiny_config(),
    "qwen3": reference.tiny_qwen3(),
    "qwen3, tied": reference.tiny_qwen3(tied=True),
    "qwen3_moe": reference.tiny_qwen3_moe(),
    "qwen3_moe, shares as they are": reference.tiny_qwen3_moe(norm_topk=False),
}


def _batch() -> MicroBatch:
    """Two rows as long as the longest positions asked for, every token but the first a target."""
    tokens = np.random.default_rng(5).integers(0, reference.VOCAB, size=(2, WIDTH))
    mask = np.arange(WIDTH)[None, :].repeat(2, axis=0) > 0
    lengths = np.full(2, WIDTH)
    return MicroBatch(tokens, lengths, mask, np.zeros(tokens.shape, np.float32))


def _on_the_way_through(rank: int, _: int, folder: str, port: int) -> None:
    place = mesh.start(rendezvous(rank, 1, port), ParallelConfig(), seed=1)
    for name in FAMILIES:
        path = f"{folder}/{name}"
        model = PolicyModel(
            read_architecture(path), ModelConfig(path, Layers.local, Dtype.float32), ParallelConfig(), place
        )
        load_hf(model, path)
        (logits,) = forward(model, [_batch()], lambda logits, _: logits)
        runs = export_plan(model, bucket_bytes=50_000)
        exported = dict(whole_tensors(model, [entry for run in runs for entry in run]))
        torch.save({"logits": logits, "exported": exported}, f"{path}.pt")
    mesh.stop()


def test_logits_of_every_family_equal_transformers(tmp_path: Path) -> None:
    for name, config in FAMILIES.items():
        reference.make_model(config, tmp_path / name)
    run_group(_on_the_way_through, 1, str(tmp_path), free_port())
    for name in FAMILIES:
        found = torch.load(tmp_path / f"{name}.pt")
        logits = found["logits"][:, : reference.VOCAB]
        torch.testing.assert_close(logits, _expected(tmp_path / name), rtol=2e-5, atol=5e-5, msg=name)
        original = HfReader(tmp_path / name)
        assert original.names() == found["exported"].keys(), name
        for tensor, exported in found["exported"].items():
            assert torch.equal(original.get(tensor), exported), (name, tensor)


def _expected(path: Path) -> Tensor:
    """In the order of the targets: row by row, of the position before each."""
    with torch.no_grad():
        return reference.load(path)(torch.tensor(_batch().tokens)).logits[:, :-1].flatten(0, 1)


def _load_tied_with_another_output_layer(rank: int, _: int, path: str, port: int) -> None:
    place = mesh.start(rendezvous(rank, 1, port), ParallelConfig(), seed=1)
    model = PolicyModel(
        read_architecture(path), ModelConfig(path, Layers.local, Dtype.float32), ParallelConfig(), place
    )
    with pytest.raises(UserError, match=r"lm_head\.weight with other numbers than model\.embed_tokens\.weight"):
        load_hf(model, path)
    mesh.stop()


def test_a_trained_output_layer_is_not_left_out_because_a_config_says_tied(tmp_path: Path) -> None:
    path = reference.make_model(reference.tiny_config(tied=False), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    run_group(_load_tied_with_another_output_layer, 1, str(path), free_port())


def test_long_positions_and_every_expert_matter_in_these_models(tmp_path: Path) -> None:
    llama = reference.load(reference.make_model(FAMILIES["llama"], tmp_path / "llama"))
    frequencies = llama.model.rotary_emb.inv_freq
    plain = 1234.0 ** (-torch.arange(0, 16, 2) / 16)
    ratio = frequencies / plain
    assert ratio.max() == pytest.approx(1.0), "some are kept"
    assert ratio.min() == pytest.approx(1 / 8), "some are slowed down by the factor"
    assert ((ratio > 0.13) & (ratio < 0.99)).any(), "some are in between"
    assert _batch().tokens.shape[1] > 32, "beyond the original context"
    chosen = []
    moe = reference.load(reference.make_model(FAMILIES["qwen3_moe"], tmp_path / "moe"))
    for layer in moe.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    moe(torch.tensor(_batch().tokens))
    assert all(len(layer.unique()) == 4 for layer in chosen)
