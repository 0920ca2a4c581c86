"""Layers and experts lie where Megatron itself puts them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlsys.errors import UserError
from rlsys.weights.weight_map import chunk_layers, expert_block, stage_layers


def _megatron(layers: int, pp: int, virtual: int | None, first: int | None, last: int | None) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "first", "last"),
    [(12, 2, 3, None, None), (12, 3, 2, None, None), (12, 3, 2, 2, 4), (10, 3, 2, 2, None), (8, 4, 1, 1, 3)],
)
def test_chunks_are_where_megatron_puts_them(
    layers: int, pp: int, virtual: int, first: int | None, last: int | None
) -> None:
    config = _megatron(layers, pp, virtual if virtual > 1 else None, first, last)
    stages = [None] if virtual == 1 else list(range(virtual))
    counts = [[get_num_layers_to_build(config, stage, rank) for stage in stages] for rank in range(pp)]
    chunks = chunk_layers(layers, counts)
    for rank in range(pp):
        for stage, held in zip(stages, chunks[rank], strict=True):
            assert held.start == get_transformer_layer_offset(config, stage, rank)
    assert sorted(layer for rank in chunks for held in rank for layer in held) == list(range(layers))


def test_a_pipeline_without_virtual_stages_has_one_chunk_a_rank() -> None:
    assert chunk_layers(6, [[1], [3], [2]]) == [[held] for held in stage_layers(6, 3, [1, 3, 2])]
    assert stage_layers(6, 3, [1, 3, 2]) == [range(1), range(1, 4), range(4, 6)]
    assert stage_layers(6, 2) == [range(3), range(3, 6)]


def test_chunks_may_be_uneven_or_empty() -> None:
    # The second rank's first chunk is empty; passes go rank 0, rank 1, rank 0, rank 1.
    assert chunk_layers(4, [[2, 1], [0, 1]]) == [[range(2), range(2, 3)], [range(2, 2), range(3, 4)]]


@pytest.mark.parametrize("counts", [[[2, 1], [1]], [[2, 1], [1, 1]]])
def test_chunks_that_are_no_model_are_refused(counts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="add up to 4 layers"):
        chunk_layers(4, counts)


@pytest.mark.parametrize(("layers", "pp", "pp_layers"), [(5, 2, None), (5, 2, [5]), (5, 2, [5, 0]), (5, 2, [2, 2])])
def test_impossible_stages_are_refused(layers: int, pp: int, pp_layers: list[int] | None) -> None:
    with pytest.raises(UserError, match="pp"):
        stage_layers(layers, pp, pp_layers)


def test_experts_lie_in_blocks() -> None:
    assert [expert_block(6, 3, rank) for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert expert_block(0, 1, 0) == range(0)
    with pytest.raises(UserError, match="ep is 4, which does not divide the model's 6 experts"):
        expert_block(6, 4, 0)
