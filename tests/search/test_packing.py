"""How texts of unequal length are put into forward passes."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.encoders.encoder import Batch, Lines, PassCost, first_fit, length_buckets, plan, shares_lines

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
COSTS = st.builds(PassCost, most_tokens=st.integers(1, 400), fixed_tokens=st.integers(0, 100))


def priced(lengths: list[int], groups: list[list[int]], cost: PassCost) -> float:
    """What passes over groups of rows cost, each group padded to its longest row and cut where it is too large."""
    total = 0.0
    for group in groups:
        tokens = len(group) * max(lengths[row] for row in group)
        total += tokens + cost.fixed_tokens * math.ceil(tokens / cost.most_tokens)
    return total


@settings(max_examples=50)
@given(LENGTHS, COSTS)
def test_buckets_hold_each_row_once_and_keep_the_budget(lengths: list[int], cost: PassCost) -> None:
    buckets = [bucket.tolist() for bucket in length_buckets(lengths, cost)]
    assert sorted(row for bucket in buckets for row in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[row] for row in bucket) <= cost.most_tokens


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 60))
def test_no_other_cut_of_the_sorted_rows_costs_less(lengths: list[int], fixed: int) -> None:
    cost = PassCost(most_tokens=10_000, fixed_tokens=fixed)
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    inner = range(1, len(rows))
    cuts = (cut for count in range(len(rows)) for cut in combinations(inner, count))
    cheapest = min(
        priced(lengths, [rows[a:b] for a, b in zip((0, *cut), (*cut, len(rows)), strict=True)], cost) for cut in cuts
    )
    found = [bucket.tolist() for bucket in length_buckets(lengths, cost)]
    assert priced(lengths, found, cost) == cheapest


@settings(max_examples=50)
@given(LENGTHS, st.integers(60, 200))
def test_lines_hold_each_row_once_and_have_room_for_it(lengths: list[int], width: int) -> None:
    lines = first_fit(lengths, width)
    assert sorted(row for line in lines for row in line) == list(range(len(lengths)))
    filled = [sum(lengths[row] for row in line) for line in lines]
    assert max(filled) <= width
    assert len([tokens for tokens in filled if 2 * tokens <= width]) <= 1, "two such lines would have fitted in one"


@settings(max_examples=50)
@given(LENGTHS, COSTS, st.booleans())
def test_a_plan_has_each_row_once(lengths: list[int], cost: PassCost, share: bool) -> None:
    passes = plan(lengths, cost, share=share)
    assert sorted(row for lines in passes for line in lines for row in line) == list(range(len(lengths)))
    assert share or all(len(line) == 1 for lines in passes for line in lines)


def test_a_batch_is_laid_out_as_drawn() -> None:
    batch = Batch.of([[[11, 12], [21, 22, 23]], [[31]]], filler=0)
    assert batch.ids.tolist() == [[11, 12, 21, 22, 23], [31, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]]
    assert batch.owners.tolist() == [[0, 0, 1, 1, 1], [2, -1, -1, -1, -1]]
    states = torch.tensor(batch.ids, dtype=torch.float32).unsqueeze(-1)
    assert batch.first(states).flatten().tolist() == [11, 21, 31]
    assert batch.last(states).flatten().tolist() == [12, 23, 31]
    assert batch.mean(states).flatten().tolist() == [11.5, 22, 31]


def test_a_bert_gives_a_text_in_a_shared_line_the_states_that_it_has_alone() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=99, **shape)).eval()
    assert shares_lines(model)
    assert not shares_lines(transformers.RobertaModel(transformers.RobertaConfig(vocab_size=99, **shape)))
    for other in ({"attn_implementation": "eager"}, {"is_decoder": True}):
        assert not shares_lines(transformers.BertModel(transformers.BertConfig(vocab_size=99, **shape, **other)))
    texts = [torch.randint(1, 99, (length,)).tolist() for length in (3, 8, 1, 5, 2)]
    lines: Lines = [[1, 0], [3, 2, 4]]
    batch = Batch.of([[texts[row] for row in line] for line in lines], filler=0)
    with torch.inference_mode():
        together = model(**batch.inputs(model.device)).last_hidden_state
        for number, row in enumerate(row for line in lines for row in line):
            alone = model(input_ids=torch.tensor([texts[row]])).last_hidden_state[0]
            np.testing.assert_allclose(batch.mean(together)[number], alone.mean(dim=0), atol=1e-5)
            np.testing.assert_allclose(batch.last(together)[number], alone[-1], atol=1e-5)
