"""docs/memory.md, and figures of big models worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlsys.cluster.planning.plan import GIB, MicroBatchLoad, group_memory
from rlsys.config.compose import load_config
from rlsys.config.schema import Layers, SyncMode
from rlsys.errors import UserError
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import PAGE, shape_of, with_tables


def test_the_page_is_what_the_experiments_say() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python scripts/memory_tables.py"


def test_a_model_without_a_shape_is_named() -> None:
    with pytest.raises(UserError, match=r"model\.path is models/GPT-9, whose shape is not among llama-3\.2-3b"):
        shape_of("models/GPT-9")


def test_a_3b_actor_by_hand() -> None:
    """Transformer Engine, recomputation, DP 4; 3,085,938,688 parameters, of which the embedding is tied."""
    config = load_config("searchr1_qwen2.5_3b_1node")
    config.model.layers = Layers.te
    model = read_architecture(shape_of(config.model.path))
    tokens, hidden, vocab, parameters = 16384, 2048, 151936, 3_085_938_688
    load = MicroBatchLoad(tokens, targets=1000, width=tokens)
    found = group_memory(config, model, "actor", load).parts
    assert found["parameters"] == 2 * parameters
    assert found["gradients"] == 4 * parameters
    assert found["optimizer"] == 12 * parameters / 4
    # Each layer's input, the rounded-off final norm's output left to the head's targets; 4 bytes of 1/rms a token.
    assert found["activations"] == pytest.approx(36 * tokens * hidden * 2 + tokens * (2 * hidden + 4))
    # Logits, their gradient, and four pieces of 128 MiB.
    assert found["logits"] == 1000 * (2 * 2 * vocab + 2 * hidden) + 4 * 128 * 2**20


def test_a_memory_fraction_is_filled_with_the_cache() -> None:
    config = load_config("searchr1_qwen2.5_3b_1node")
    config.cluster.device_memory_gib, config.rollout.engine.memory_fraction = 80.0, 0.5
    memory = group_memory(config, read_architecture(shape_of(config.model.path)), "rollout")
    assert memory.total == 40 * GIB


def test_what_a_te_layer_keeps_by_hand() -> None:
    """One layer more keeps: of both norms input, output and 4 bytes of 1/rms; of attention queries, keys, values, output
    and 4 bytes of each head's softmax; of the MLP gate, up and their product. 16 heads and 2 key heads of 128."""
    config = load_config("searchr1_qwen2.5_3b_1node")
    config.model.layers, config.model.recompute = Layers.te, False
    model = read_architecture(shape_of(config.model.path))
    load = MicroBatchLoad(1000, targets=10, width=1000)
    layers = (model.layers, model.layers + 1)
    less, more = (group_memory(config, replace(model, layers=n), "actor", load) for n in layers)
    by_hand = 2 * (2 * 2 * 2048 + 4) + 2 * (2048 + 2 * 256 + 2048) + 4 * 16 + 2 * 3 * 11008
    assert more.parts["activations"] - less.parts["activations"] == pytest.approx(1000 * by_hand)


def test_an_engine_that_gets_device_memory_keeps_one_more_model() -> None:
    config = load_config("searchr1_qwen2.5_7b_1node")
    config.rollout.engine.tp = 2
    model = read_architecture(shape_of(config.model.path))
    before = group_memory(config, model, "rollout")
    config.cluster.sync_mode = SyncMode.ipc
    after = group_memory(config, model, "rollout")
    assert after.total - before.total == pytest.approx(2 * 7_615_616_512)  # Parameters of Qwen2.5-7B, in bfloat16.
