"""Padding, alignment and masks, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlsys.pipeline.micro_batch import collate, round_up
from tests.pipeline.build import sample

LONG = sample(
    [11, 12, 13, 14, 15],
    [False, False, True, False, True],
    advantage=2.0,
    old=[0.0, 0.0, -0.5, 0.0, -1.5],
    reference=[0.0, 0.0, -0.25, 0.0, -2.0],
)
SHORT = sample(
    [21, 22, 23],
    [False, True, True],
    advantage=-1.5,
    old=[0.0, -3.0, -4.0],
    reference=[0.0, -3.5, -4.5],
)


def test_rows_are_padded_on_the_right_to_a_multiple() -> None:
    batch = collate([LONG, SHORT], pad_id=9, multiple_of=4)
    assert_array_equal(batch.tokens, [[11, 12, 13, 14, 15, 9, 9, 9], [21, 22, 23, 9, 9, 9, 9, 9]])
    assert_array_equal(batch.lengths, [5, 3])
    assert_array_equal(batch.loss_mask, [[0, 0, 1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]])
    assert_array_equal(batch.advantages, [[0, 0, 2, 0, 2, 0, 0, 0], [0, -1.5, -1.5, 0, 0, 0, 0, 0]])
    assert batch.old_logprobs is not None
    assert_array_equal(batch.old_logprobs, [[0, 0, -0.5, 0, -1.5, 0, 0, 0], [0, -3, -4, 0, 0, 0, 0, 0]])
    assert batch.ref_logprobs is not None
    assert_array_equal(batch.ref_logprobs, [[0, 0, -0.25, 0, -2, 0, 0, 0], [0, -3.5, -4.5, 0, 0, 0, 0, 0]])
    assert batch.trained_tokens == 4


def test_types_fit_a_tensor() -> None:
    batch = collate([SHORT], pad_id=0)
    assert batch.tokens.dtype == batch.lengths.dtype == np.int64
    assert batch.loss_mask.dtype == np.bool_
    assert batch.advantages.dtype == np.float32
    assert batch.tokens.shape == (1, 3)


def test_no_samples_make_one_row_that_trains_nothing() -> None:
    batch = collate([], pad_id=9, multiple_of=4)
    assert_array_equal(batch.tokens, [[9, 9, 9, 9]])
    assert_array_equal(batch.lengths, [0])
    assert batch.trained_tokens == 0
    assert not batch.advantages.any()


def test_log_probs_that_some_sample_lacks_are_left_out() -> None:
    bare = sample([1, 2], [False, True])
    assert collate([LONG, bare], pad_id=0).old_logprobs is None
    assert collate([bare], pad_id=0).ref_logprobs is None


@pytest.mark.parametrize(
    ("value", "multiple", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)]
)
def test_round_up(value: int, multiple: int, rounded: int) -> None:
    assert round_up(value, multiple) == rounded
