"""Tests of micro-batches: padding, packing, alignment and masks, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rlsys.data.trajectory import Sample, TopkLogprobs, response_tokens
from rlsys.trainer.batches import collate
from tests.support.trajectories import sample

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


def test_each_packed_sequence_is_padded_if_it_is_cut_over_ranks() -> None:
    batch = collate([LONG, SHORT], pad_id=9, multiple_of=8, packed=True, room_multiple=4)
    assert_array_equal(batch.tokens, [[11, 12, 13, 14, 15, 9, 9, 9, 21, 22, 23, 9, 9, 9, 9, 9]])
    assert_array_equal(batch.loss_mask, [[0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]])
    assert_array_equal(batch.sequence_numbers, [[0] * 5 + [-1] * 3 + [1] * 3 + [-1] * 5])
    assert batch.turn_numbers[batch.loss_mask].tolist() == [0, 1, 2, 2]
    assert_array_equal(batch.boundaries, [0, 8, 12, 16])
    assert_array_equal(batch.targets, [13, 15, 22, 23])
    assert_array_equal(batch.trained_lengths, [2, 2])
    assert [part.tolist() for part in batch.split(batch.tokens)] == [[11, 12, 13, 14, 15], [21, 22, 23]]
    with pytest.raises(ValueError, match="A row of 6 tokens cannot be cut into sequences of 4"):
        collate([LONG], pad_id=9, multiple_of=6, packed=True, room_multiple=4)


@pytest.mark.parametrize("packed", [False, True])
def test_targets_follow_a_given_mask(packed: bool) -> None:
    batch = collate([LONG, SHORT], pad_id=0, packed=packed, mask_of=response_tokens)
    assert_array_equal(batch.targets, [12, 13, 14, 15, 22, 23])
    assert_array_equal(batch.trained_lengths, [4, 2])
    assert_array_equal(np.concatenate(batch.split(batch.advantages)), [0, 0, 2, 0, 2, 0, -1.5, -1.5])


@pytest.mark.parametrize("packed", [False, True])
def test_trained_first_token_is_refused(packed: bool) -> None:
    """The last token of another sequence would predict it in a packed row."""
    headless = sample([7, 8], [True, True])
    with pytest.raises(ValueError, match="first token"):
        collate([SHORT, headless], pad_id=0, packed=packed)


def test_rows_are_padded_on_the_right_and_packed_sequences_at_the_end() -> None:
    padded = collate([LONG, SHORT], pad_id=9, multiple_of=4)
    assert_array_equal(padded.tokens, [[11, 12, 13, 14, 15, 9, 9, 9], [21, 22, 23, 9, 9, 9, 9, 9]])
    assert_array_equal(padded.loss_mask, [[0, 0, 1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]])
    assert_array_equal(padded.advantages, [[0, 0, 2, 0, 2, 0, 0, 0], [0, -1.5, -1.5, 0, 0, 0, 0, 0]])
    assert padded.old_logprobs is not None
    assert_array_equal(padded.old_logprobs, [[0, 0, -0.5, 0, -1.5, 0, 0, 0], [0, -3, -4, 0, 0, 0, 0, 0]])
    assert_array_equal(padded.sequence_numbers, [[0] * 5 + [-1] * 3, [1] * 3 + [-1] * 5])
    packed = collate([LONG, SHORT], pad_id=9, multiple_of=6, packed=True)
    assert_array_equal(packed.tokens, [[11, 12, 13, 14, 15, 21, 22, 23, 9, 9, 9, 9]])
    assert_array_equal(packed.loss_mask, [[0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0]])
    assert_array_equal(packed.advantages, [[0, 0, 2, 0, 2, 0, -1.5, -1.5, 0, 0, 0, 0]])
    assert packed.ref_logprobs is not None
    assert_array_equal(packed.ref_logprobs, [[0, 0, -0.25, 0, -2, 0, -3.5, -4.5, 0, 0, 0, 0]])
    assert_array_equal(packed.boundaries, [0, 5, 8, 12])
    assert_array_equal(packed.sequence_numbers, [[0] * 5 + [1] * 3 + [-1] * 4])
    for batch in (padded, packed):
        assert (batch.trained_tokens, batch.lengths.tolist(), batch.trained_lengths.tolist()) == (4, [5, 3], [2, 2])
        assert_array_equal(batch.targets, [13, 15, 22, 23])
        assert batch.turn_numbers[batch.loss_mask].tolist() == [0, 1, 2, 2], "15 ends one turn, and 22 begins another"
        assert_array_equal(batch.spread(np.array([0.5, 0.25])) == 0.25, batch.sequence_numbers == 1)
    assert collate([LONG, sample([1, 2], [False, True])], pad_id=0).old_logprobs is None, "one sample has none"


@pytest.mark.parametrize("packed", [False, True])
def test_advantages_of_trained_tokens_are_weighted(packed: bool) -> None:
    weights = np.array([np.nan, np.inf, 0.5, np.nan, 0.0], dtype=np.float32)
    advantages = np.array([np.nan, 7, 3, np.inf, -4], dtype=np.float32)
    batch = collate([replace(LONG, weights=weights, advantages=advantages), SHORT], pad_id=0, packed=packed)
    long, short = batch.split(batch.advantages)
    assert_array_equal(long, [0, 0, 1.5, 0, 0])
    assert np.signbit(long).tolist() == [False, False, False, False, True], "a dropped token keeps its sign"
    assert_array_equal(short, [0, -1.5, -1.5])


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_laid_out_as_tokens_and_picks_as_targets(packed: bool) -> None:
    def scored(one: Sample, first: float) -> Sample:
        """Return `one` with values that count up from `first`, and with picks that follow from its trained tokens."""
        values = np.arange(first, first + len(one.trajectory.tokens), dtype=np.float32)
        trained = one.trajectory.tokens[one.trajectory.loss_mask]
        picks = TopkLogprobs(np.stack([trained, trained + 100], 1), -np.stack([trained] * 2, 1) / 2)
        return replace(one, values=values, returns=-values, picks=picks)

    batch = collate([scored(SHORT, 10), scored(LONG, 20)], pad_id=0, multiple_of=6, packed=packed)
    assert batch.values is not None
    assert batch.returns is not None
    assert [one.tolist() for one in batch.split(batch.values)] == [[10, 11, 12], [20, 21, 22, 23, 24]]
    assert_array_equal(batch.returns, -batch.values)
    assert batch.pick_tokens is not None
    assert batch.pick_logprobs is not None
    assert_array_equal(batch.pick_tokens, np.stack([batch.targets, batch.targets + 100], 1))
    assert_array_equal(batch.pick_logprobs, np.stack([-batch.targets / 2] * 2, 1))
    with pytest.raises(ValueError, match="2 tokens but 4 targets"):
        collate([scored(LONG, 0)], pad_id=0, packed=packed, mask_of=response_tokens)
