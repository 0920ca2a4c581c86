"""What a step had to learn from, against sums token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.trajectory import Group, Sample
from rlsys.orchestrator.pipeline.step_metrics import (
    advantage_metrics,
    critic_metrics,
    divergence_metrics,
    reward_metrics,
)
from tests.orchestrator.pipeline.build import question, rewarded, trajectory

DIVERGENCES: dict[str, Callable[[float], float]] = {
    "k1": lambda w: -math.log(w),
    "k2": lambda w: 0.5 * math.log(w) ** 2,
    "k3": lambda w: w - 1 - math.log(w),
    "k5": lambda w: w * math.log(w),
    "abs": lambda w: abs(math.log(w)),
}
"""Of a token that the reference finds w times as likely as the policy."""


def sample(mask: Sequence[bool], **arrays: Sequence[float]) -> Sample:
    """A sample with these per-token arrays."""
    one = rewarded(trajectory(range(len(mask)), mask), 0.0)
    return replace(one, **{name: np.array(found, dtype=np.float32) for name, found in arrays.items()})


def test_divergences_are_means_over_trained_tokens_alone() -> None:
    nan = float("nan")
    ratios = [2.0, 0.5, 1.0]
    samples = [
        sample(
            [False, True, True],
            old_logprobs=[nan, -1.0, -2.0],
            ref_logprobs=[nan, -1 + math.log(2), -2 - math.log(2)],
        ),
        sample([False, True, False], old_logprobs=[0.0, -3.0, nan], ref_logprobs=[0.0, -3.0, nan]),
        sample([False, True], old_logprobs=[0.0, -3.0]),
    ]
    expected = {f"kl/{name}": np.mean([of(w) for w in ratios]) for name, of in DIVERGENCES.items()}
    assert divergence_metrics(samples) == pytest.approx(expected, rel=1e-6)
    assert divergence_metrics(samples[2:]) == {}, "no reference, no divergence"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-1e3, 0), st.floats(-1e3, 0)), min_size=1, max_size=8))
def test_divergences_of_any_log_probs_are_numbers(pairs: list[tuple[float, float]]) -> None:
    old, reference = [0.0, *(pair[0] for pair in pairs)], [0.0, *(pair[1] for pair in pairs)]
    one = sample([False] + [True] * len(pairs), old_logprobs=old, ref_logprobs=reference)
    figures = divergence_metrics([one])
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["kl/k3"] >= 0
    assert figures["kl/abs"] >= abs(figures["kl/k1"]) - 1e-9


def test_advantages_of_tokens_that_are_not_trained_count_for_nothing() -> None:
    samples = [
        sample([False, True, True], advantages=[50, 1, 0]),
        sample([False, False, True], advantages=[9, 9, -3]),
    ]
    figures = advantage_metrics(samples)
    mean = (1 + 0 - 3) / 3
    assert figures == {
        "critic/advantages/mean": pytest.approx(mean),
        "critic/advantages/max": 1,
        "critic/advantages/min": -3,
        "critic/advantages/std": pytest.approx(math.sqrt(((1 - mean) ** 2 + mean**2 + (3 + mean) ** 2) / 3)),
        "critic/advantages/zero_share": pytest.approx(1 / 3),
    }
    assert advantage_metrics([sample([False, False])]) == critic_metrics([sample([False, True], returns=[0, 1])]) == {}


def critic(values: Sequence[float], returns: Sequence[float]) -> list[Sample]:
    """One sample of trained tokens with these values and returns, and a token of others that is not trained."""
    return [sample([False] + [True] * len(values), values=[70, *values], returns=[-70, *returns])]


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([1, 2, 4], [1, 2, 4], 1.0),
        ([0, 1, 3], [1, 2, 4], 1.0),  # Off by the same everywhere: a variance does not see it.
        ([2, 2, 2], [1, 2, 3], 0.0),
        ([3, 2, 1], [1, 2, 3], -3.0),
        ([1, 2], [3, 3], math.nan),  # Nothing varies, so there is nothing to explain.
    ],
)
def test_explained_variance_by_hand(values: Sequence[float], returns: Sequence[float], explained: float) -> None:
    figures = critic_metrics(critic(values, returns))
    assert figures["critic/vf_explained_var"] == pytest.approx(explained, nan_ok=True)
    assert (figures["critic/values/max"], figures["critic/values/min"]) == (max(values), min(values))
    assert figures["critic/values/mean"] == pytest.approx(np.mean(values))
    assert (figures["critic/returns/max"], figures["critic/returns/min"]) == (max(returns), min(returns))
    assert figures["critic/returns/mean"] == pytest.approx(np.mean(returns))


def test_a_kl_in_the_reward_shows_beside_the_score() -> None:
    first, second = (rewarded(trajectory(range(5), [False, *mask]), 1.0) for mask in ([1, 1, 0, 0], [1, 1, 1, 1]))
    group = Group(question(1), (replace(first, kl_sum=3.0, kl_coef=0.1), replace(second, kl_sum=-2.0, kl_coef=0.2)))
    figures = reward_metrics([group])
    assert figures["critic/score/mean"] == 1.0
    assert figures["critic/rewards/min"] == pytest.approx(1 - 0.1 * 3)
    assert figures["critic/rewards/max"] == pytest.approx(1 + 0.2 * 2)
    assert figures["critic/rewards/mean"] == pytest.approx(1 + 0.1 / 2)
    assert figures["critic/kl_coef"] == pytest.approx(0.15)
    assert figures["critic/kl"] == pytest.approx((3 / 2 - 2 / 4) / 2), "episodes weigh alike, tokens do not"
