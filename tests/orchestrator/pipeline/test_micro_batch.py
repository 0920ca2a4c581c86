"""Padding, packing, alignment and masks, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlsys.data.trajectory import Sample, TopkLogprobs, response_tokens
from rlsys.trainer.batches import collate, round_up
from tests.orchestrator.pipeline.build import sample

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


def test_packed_sequences_follow_each_other_and_padding_comes_last() -> None:
    batch = collate([LONG, SHORT], pad_id=9, multiple_of=6, packed=True)
    assert_array_equal(batch.tokens, [[11, 12, 13, 14, 15, 21, 22, 23, 9, 9, 9, 9]])
    assert_array_equal(batch.lengths, [5, 3])
    assert_array_equal(batch.loss_mask, [[0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0]])
    assert_array_equal(batch.advantages, [[0, 0, 2, 0, 2, 0, -1.5, -1.5, 0, 0, 0, 0]])
    assert batch.old_logprobs is not None
    assert_array_equal(batch.old_logprobs, [[0, 0, -0.5, 0, -1.5, 0, -3, -4, 0, 0, 0, 0]])
    assert batch.ref_logprobs is not None
    assert_array_equal(batch.ref_logprobs, [[0, 0, -0.25, 0, -2, 0, -3.5, -4.5, 0, 0, 0, 0]])
    assert_array_equal(batch.targets, [13, 15, 22, 23])
    assert batch.packed
    assert batch.boundaries.dtype == np.int32
    assert_array_equal(batch.boundaries, [0, 5, 8, 12])
    assert_array_equal(collate([LONG, SHORT], pad_id=9, packed=True).boundaries, [0, 5, 8])


def test_packed_sequences_are_padded_one_by_one_where_each_is_cut() -> None:
    batch = collate([LONG, SHORT], pad_id=9, multiple_of=8, packed=True, room_multiple=4)
    assert_array_equal(batch.tokens, [[11, 12, 13, 14, 15, 9, 9, 9, 21, 22, 23, 9, 9, 9, 9, 9]])
    assert_array_equal(batch.loss_mask, [[0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]])
    assert_array_equal(batch.sequence_numbers, [[0] * 5 + [-1] * 3 + [1] * 3 + [-1] * 5])
    assert_array_equal(batch.boundaries, [0, 8, 12, 16])
    assert_array_equal(batch.targets, [13, 15, 22, 23])
    assert_array_equal(batch.trained_lengths, [2, 2])
    assert [part.tolist() for part in batch.split(batch.tokens)] == [[11, 12, 13, 14, 15], [21, 22, 23]]
    with pytest.raises(ValueError, match="A row of 6 tokens cannot be cut into sequences of 4"):
        collate([LONG], pad_id=9, multiple_of=6, packed=True, room_multiple=4)


@pytest.mark.parametrize("packed", [False, True])
def test_results_come_back_by_sequence(packed: bool) -> None:
    batch = collate([SHORT, LONG, SHORT], pad_id=9, multiple_of=4, packed=packed)
    parts = batch.split(batch.tokens)
    assert [part.tolist() for part in parts] == [[21, 22, 23], [11, 12, 13, 14, 15], [21, 22, 23]]


@pytest.mark.parametrize("packed", [False, True])
def test_advantages_are_weighted_token_by_token(packed: bool) -> None:
    weights = np.array([np.nan, np.inf, 0.5, np.nan, 0.0], dtype=np.float32)
    batch = collate([replace(LONG, weights=weights), SHORT], pad_id=0, packed=packed)
    long, short = batch.split(batch.advantages)
    assert_array_equal(long, [0, 0, 1, 0, 0])
    assert_array_equal(short, [0, -1.5, -1.5])


@pytest.mark.parametrize("packed", [False, True])
def test_each_token_has_its_own_advantage_where_it_is_trained(packed: bool) -> None:
    advantages = np.array([np.nan, 7, 3, np.inf, -4], dtype=np.float32)
    batch = collate([SHORT, replace(LONG, advantages=advantages)], pad_id=0, packed=packed)
    assert_array_equal(batch.split(batch.advantages)[1], [0, 0, 3, 0, -4])


@pytest.mark.parametrize("packed", [False, True])
def test_values_and_returns_are_laid_out_as_tokens_are(packed: bool) -> None:
    def valued(one: Sample, first: float) -> Sample:
        values = np.arange(first, first + len(one.trajectory.tokens), dtype=np.float32)
        return replace(one, values=values, returns=-values)

    batch = collate([valued(SHORT, 10), valued(LONG, 20)], pad_id=0, multiple_of=6, packed=packed)
    assert batch.values is not None
    assert batch.returns is not None
    assert [one.tolist() for one in batch.split(batch.values)] == [[10, 11, 12], [20, 21, 22, 23, 24]]
    assert_array_equal(batch.returns, -batch.values)
    assert batch.values.dtype == np.float32
    assert collate([SHORT, valued(LONG, 20)], pad_id=0, packed=packed).values is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_ones_own_says_what_the_targets_are(packed: bool) -> None:
    batch = collate([LONG, SHORT], pad_id=0, packed=packed, mask_of=response_tokens)
    assert_array_equal(batch.targets, [12, 13, 14, 15, 22, 23])
    assert_array_equal(batch.trained_lengths, [4, 2])
    assert_array_equal(np.concatenate(batch.split(batch.advantages)), [0, 0, 2, 0, 2, 0, -1.5, -1.5])


@pytest.mark.parametrize("packed", [False, True])
def test_picks_are_in_the_order_of_targets(packed: bool) -> None:
    def picking(one: Sample) -> Sample:
        """The picks of a trained token are made from it."""
        trained = one.trajectory.tokens[one.trajectory.loss_mask]
        return replace(one, picks=TopkLogprobs(np.stack([trained, trained + 100], 1), -np.stack([trained] * 2, 1) / 2))

    batch = collate([picking(SHORT), picking(LONG)], pad_id=0, multiple_of=4, packed=packed)
    assert batch.pick_tokens is not None
    assert batch.pick_logprobs is not None
    assert_array_equal(batch.pick_tokens, np.stack([batch.targets, batch.targets + 100], 1))
    assert_array_equal(batch.pick_logprobs, np.stack([-batch.targets / 2] * 2, 1))
    assert collate([picking(SHORT), LONG], pad_id=0, packed=packed).pick_tokens is None
    with pytest.raises(ValueError, match="picks for 2 tokens, but 4 are targets"):
        collate([picking(LONG)], pad_id=0, packed=packed, mask_of=response_tokens)


def test_sequences_are_numbered_and_counted() -> None:
    padded, packed = (collate([LONG, SHORT], pad_id=9, multiple_of=6, packed=packed) for packed in (False, True))
    assert_array_equal(padded.sequence_numbers, [[0, 0, 0, 0, 0, -1], [1, 1, 1, -1, -1, -1]])
    assert_array_equal(packed.sequence_numbers, [[0] * 5 + [1] * 3 + [-1] * 4])
    for batch in (padded, packed):
        assert_array_equal(batch.trained_lengths, [2, 2])
        assert batch.trained_lengths.dtype == batch.sequence_numbers.dtype == np.int64
        spread = batch.spread(np.array([0.5, 0.25]))
        assert_array_equal(spread == 0.5, batch.sequence_numbers == 0)
        assert_array_equal(spread == 0.25, batch.sequence_numbers == 1)
        assert_array_equal(spread == 0.0, batch.sequence_numbers == -1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trained_first_token_is_refused(packed: bool) -> None:
    """Packed, it would be predicted by the last token of another sequence."""
    headless = sample([7, 8], [True, True])
    with pytest.raises(ValueError, match="first token"):
        collate([SHORT, headless], pad_id=0, packed=packed)


def test_types_fit_a_tensor() -> None:
    batch = collate([SHORT], pad_id=0)
    assert batch.tokens.dtype == batch.lengths.dtype == np.int64
    assert batch.loss_mask.dtype == np.bool_
    assert batch.advantages.dtype == np.float32
    assert batch.tokens.shape == (1, 3)


@pytest.mark.parametrize("packed", [False, True])
def test_no_samples_make_one_row_that_trains_nothing(packed: bool) -> None:
    batch = collate([], pad_id=9, multiple_of=4, packed=packed)
    assert_array_equal(batch.tokens, [[9, 9, 9, 9]])
    assert_array_equal(batch.lengths, [])
    assert_array_equal(batch.boundaries, [0, 4])
    assert batch.split(batch.tokens) == []
    assert batch.trained_tokens == 0
    assert not batch.advantages.any()
    assert batch.old_logprobs is not None
    assert_array_equal(batch.trained_lengths, [])
    assert_array_equal(batch.sequence_numbers, [[-1] * 4])
    assert_array_equal(batch.spread(np.zeros(0)), np.zeros((1, 4)))


def test_log_probs_that_some_sample_lacks_are_left_out() -> None:
    bare = sample([1, 2], [False, True])
    assert collate([LONG, bare], pad_id=0).old_logprobs is None
    assert collate([bare], pad_id=0).ref_logprobs is None


@pytest.mark.parametrize(("value", "multiple", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)])
def test_round_up(value: int, multiple: int, rounded: int) -> None:
    assert round_up(value, multiple) == rounded
