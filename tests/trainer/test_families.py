"""Tests of the Megatron model of every family: logits against transformers, export bit for bit, expert routing."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlsys.config.schema import ParallelConfig
from rlsys.trainer import mesh
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.export import export_plan, load_hf, whole_tensors
from rlsys.trainer.forward import context_shares, forward
from rlsys.trainer.model.layers import ExpertRouter
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import read_architecture
from scripts import models_reference
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import local_model

WIDTH = 120
FAMILIES: dict[str, PretrainedConfig] = {
    "deepseek_v2": tiny_configs.deepseek(),
    "deepseek_v2 with YaRN and latent queries": tiny_configs.deepseek(q_lora_rank=20, yarn=True),
    "gemma3": tiny_configs.gemma3(window=50),
    "gemma3, separate output layer": tiny_configs.gemma3(tied=False),
    "glm4": tiny_configs.glm4(),
    "glm4 without biases, tied": tiny_configs.glm4(tied=True, bias=False),
    "gpt_oss": tiny_configs.gpt_oss(),
    "gpt_oss, truncated YaRN, tied": tiny_configs.gpt_oss(tied=True, window=50, truncate=True, attention_factor=1.3),
    "llama": tiny_configs.llama3(),
    "llama, tied": tiny_configs.llama3(tied=True),
    "mistral": tiny_configs.mistral(),
    "mistral, as long as its window": tiny_configs.mistral(window=WIDTH),
    "mistral, beyond its window": tiny_configs.mistral(window=WIDTH - 1),
    "ministral": tiny_configs.ministral(),
    "phi3": tiny_configs.phi3(),
    "phi3 with a window, tied": tiny_configs.phi3(tied=True, window=40),
    "qwen2": tiny_configs.qwen2(tied=False),
    "qwen2, tied": tiny_configs.qwen2(),
    "qwen3": tiny_configs.qwen3(),
    "qwen3, tied": tiny_configs.qwen3(tied=True),
    "qwen3_moe": tiny_configs.qwen3_moe(),
    "qwen3_moe, weights not normalised": tiny_configs.qwen3_moe(norm_topk=False),
}


def _batch() -> MicroBatch:
    """Two rows of `WIDTH` tokens, of which all but the first are targets."""
    tokens = np.random.default_rng(5).integers(0, tiny_configs.VOCAB, size=(2, WIDTH))
    mask = np.arange(WIDTH)[None, :].repeat(2, axis=0) > 0
    lengths = np.full(2, WIDTH)
    return MicroBatch(tokens, lengths, mask, np.zeros(tokens.shape, np.float32))


def logits_and_export(
    group: Group, folder: Path, names: Sequence[str], family: str | None = None
) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Logits and exported tensors of the models `names` in `folder`; `family` is as in `model.family`."""
    results = {}
    place = mesh.start(group.meet(), ParallelConfig(), seed=1)
    for name in names:
        path = folder / name
        model = PolicyModel(read_architecture(path, family), local_model(path, family=family), ParallelConfig(), place)
        load_hf(model, path)
        (logits,) = forward(model, context_shares(model, [_batch()]), lambda logits, _: logits)
        runs = export_plan(model, bucket_bytes=1)
        # The parts of a tensor of the engine come together, but experts.
        fused = [{(e.layer, e.rule.engine) for e in run if e.rule.engine and e.expert is None} for run in runs]
        assert sum(map(len, fused)) == len(set().union(*fused))
        results[name] = logits, dict(whole_tensors(model, [entry for run in runs for entry in run]))
    return results


def test_logits_of_every_family_equal_transformers(tmp_path: Path) -> None:
    for name, config in FAMILIES.items():
        reference.make_model(config, tmp_path / name)
    (found,) = on_ranks(logits_and_export, 1, tmp_path, list(FAMILIES))
    for name, (logits, exported) in found.items():
        check_model(tmp_path / name, logits, exported)


def check_model(path: Path, logits: Tensor, exported: dict[str, Tensor]) -> None:
    """Assert that the results of `logits_and_export` equal what transformers computes and what the folder holds."""
    torch.testing.assert_close(logits[:, : tiny_configs.VOCAB], _expected(path), rtol=2e-5, atol=5e-5, msg=path.name)
    original = HfReader(path)
    assert original.names() == exported.keys(), path.name
    for tensor, value in exported.items():
        assert torch.equal(original.get(tensor), value), (path.name, tensor)


def _expected(path: Path) -> Tensor:
    """Logits that transformers computes at the position before each target, row by row."""
    with torch.no_grad():
        return reference.load(path)(torch.tensor(_batch().tokens)).logits[:, :-1].flatten(0, 1)


def test_page_of_models_lists_families_and_what_tests_cover() -> None:
    page = models_reference.PAGE.read_text(encoding="utf-8")
    assert models_reference.with_tables(page) == page, f"run `{models_reference.COMMAND}`"


def test_router_weights_in_bfloat16_are_rounded_once() -> None:
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = SimpleNamespace(moe_router_topk=3, moe_router_pre_softmax=False, moe_router_topk_scaling_factor=1.0)
    router: Any = SimpleNamespace(routes=None, config=config)
    weights, chosen = ExpertRouter.routing(router, logits)
    best, where = logits.float().softmax(-1).topk(3)
    assert torch.equal(weights.gather(1, where), (best / best.sum(-1, keepdim=True)).bfloat16())
    assert chosen.sum() == 3 * 7
