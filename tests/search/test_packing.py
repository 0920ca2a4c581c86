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
def test_a_plan_has_each_row_once_and_keeps_the_budget(lengths: list[int], cost: PassCost, share: bool) -> None:
    passes = plan(lengths, cost, share=share)
    assert sorted(row for lines in passes for line in lines for row in line) == list(range(len(lengths)))
    assert share or all(len(line) == 1 for lines in passes for line in lines)
    for lines in passes:
        width = max(sum(lengths[row] for row in line) for line in lines)
        assert len(lines) == 1 or len(lines) * width <= cost.most_tokens


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
            for pool, expected in ((batch.mean, alone.mean(dim=0)), (batch.first, alone[0]), (batch.last, alone[-1])):
                np.testing.assert_allclose(pool(together)[number], expected, atol=1e-5)
