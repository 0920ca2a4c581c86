"""Weights and divisors by hand; the loss of any split, over ranks and cuts, against the one-batch loss."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.losses import DIVISOR, divisor, policy_loss, reduce_stats, token_weights
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, PolicyLoss
from tests.algorithms.loss_reference import (
    LOSS_LENGTH,
    Flat,
    Layout,
    aggregated,
    episodes,
    packed,
    padded,
    reference_loss,
)

AGGREGATIONS = list(Aggregation)
SLICEABLE = [PolicyLoss.ppo, PolicyLoss.cispo, PolicyLoss.policy_gradient]


def config_of(loss: PolicyLoss, aggregation: Aggregation) -> AlgorithmConfig:
    return AlgorithmConfig(
        policy_loss=loss,
        aggregation=aggregation,
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.05,
        entropy_coef=0.01,
    )


@pytest.mark.parametrize(
    ("name", "weights", "parts"),
    [
        ("token-mean", [1, 0, 1], 5),
        ("seq-mean-token-sum", [1, 0, 1], 2),
        ("seq-mean-token-mean", [0.25, 0, 1], 2),
        ("fixed-length", [1, 0, 1], 2 * LOSS_LENGTH),
    ],
)
def test_weights_and_divisors_by_hand(name: str, weights: list[float], parts: int) -> None:
    lengths = np.array([4, 0, 1])
    assert token_weights(Aggregation(name), lengths).tolist() == weights
    assert divisor(Aggregation(name), lengths, LOSS_LENGTH) == parts
    empty = np.zeros(0, np.int64)
    assert token_weights(Aggregation(name), empty).shape == (0,)
    assert divisor(Aggregation(name), empty, LOSS_LENGTH) == 0


@given(
    aggregation=st.sampled_from(AGGREGATIONS),
    losses=st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=6),
)
def test_weights_and_divisors_give_the_mean_that_is_named(aggregation: Aggregation, losses: list[list[float]]) -> None:
    lengths = np.array([len(one) for one in losses], dtype=np.int64)
    weights, parts = token_weights(aggregation, lengths), divisor(aggregation, lengths, LOSS_LENGTH)
    total = sum(w * value for w, one in zip(weights.tolist(), losses, strict=True) for value in one)
    assert total / max(1, parts) == pytest.approx(aggregated(aggregation, losses), rel=1e-9, abs=1e-9)


def test_a_fixed_length_must_be_positive_where_it_is_used() -> None:
    lengths = np.array([3])
    with pytest.raises(ValueError, match="loss_length"):
        divisor(Aggregation("fixed-length"), lengths, 0)
    assert divisor(Aggregation("token-mean"), lengths, 0) == 3


def context_slices(places: range, ranks: int) -> list[list[int | None]]:
    """What each context-parallel rank holds of a sequence: of 2 x ranks chunks the r-th and the r-th last."""
    chunk = -(-len(places) // (2 * ranks))
    filled = [*places, *[None] * (2 * ranks * chunk - len(places))]
    chunks = [filled[start:stop] for start, stop in pairwise(range(0, len(filled) + 1, chunk))]
    return [chunks[rank] + chunks[-1 - rank] for rank in range(ranks)]


def layouts_of(flat: Flat, sequences: list[int], is_packed: bool, ranks: int) -> list[Layout]:
    """The micro-batch of `sequences` on each context-parallel rank."""
    cuts = [context_slices(flat.places[one], ranks) for one in sequences]
    lay_out = packed if is_packed else padded
    return [lay_out([cut[rank] for cut in cuts]) for rank in range(ranks)]


@settings(max_examples=40)
@given(
    loss=st.sampled_from(PolicyLoss),
    aggregation=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 10**6),
    order=st.permutations(range(6)),
    homes=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    is_packed=st.lists(st.booleans(), min_size=4, max_size=4),
    ranks=st.integers(1, 3),
)
def test_any_split_and_cut_gives_the_loss_and_gradient_of_one_batch(
    loss: PolicyLoss,
    aggregation: Aggregation,
    seed: int,
    order: list[int],
    homes: list[int],
    is_packed: list[bool],
    ranks: int,
) -> None:
    """`homes`: each sequence's micro-batch, of whatever data-parallel rank. A cut may leave a rank none."""
    config, batch = config_of(loss, aggregation), episodes(seed)
    flat, function = Flat(config, batch), policy_loss(config)
    ranks = ranks if loss in SLICEABLE else 1

    whole, whole_stats = function(*flat.at(padded(flat.places)))
    whole_divisor = divisor(aggregation, flat.lengths, LOSS_LENGTH)
    whole = whole / max(1, whole_divisor)
    whole_gradient = torch.autograd.grad(whole, flat.logprobs)[0]
    assert float(whole.detach()) == pytest.approx(reference_loss(config, batch), rel=1e-9, abs=1e-12)

    parts, divisors = [], 0
    for home in range(4):
        sequences = [one for one in order if homes[one] == home]
        share = divisor(aggregation, flat.lengths[sequences], LOSS_LENGTH)
        divisors += share
        for rank, layout in enumerate(layouts_of(flat, sequences, is_packed[home], ranks)):
            total, stats = function(*flat.at(layout))
            total.backward()
            parts.append({**stats, DIVISOR: 0 if rank else share})
    assert divisors == whole_divisor
    assert flat.logprobs.grad is not None
    torch.testing.assert_close(flat.logprobs.grad / max(1, divisors), whole_gradient, rtol=1e-10, atol=1e-12)
    expected = reduce_stats([{**whole_stats, DIVISOR: whole_divisor}])
    assert reduce_stats(parts) == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
