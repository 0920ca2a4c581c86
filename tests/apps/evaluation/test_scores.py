"""Scores, intervals and pass@k: by hand, against SciPy, and against slow references that share no code with them."""

from __future__ import annotations

import re
import string
from itertools import combinations, product
from math import comb
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlsys.orchestrator.evaluation.scores import (
    AnswerScores,
    bootstrap,
    mean_of,
    pass_at,
    scores_of,
    wilson,
)


def words_of(text: str) -> list[str]:
    """SQuAD's normalisation, character by character and word by word."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(?:a|an|the)\b", " ", kept).split()


def slow(answer: str, accepted: list[str]) -> AnswerScores:
    """Words are struck off one by one; precision and recall are computed as such."""
    said, em, best, inside = words_of(answer), 0.0, 0.0, 0.0
    for gold in map(words_of, accepted):
        if said == gold:
            em = best = inside = 1.0
        if gold and " ".join(gold) in " ".join(said):
            inside = 1.0
        closed = [" ".join(said) in ("yes", "no", "noanswer"), " ".join(gold) in ("yes", "no", "noanswer")]
        if said == gold or any(closed):
            continue
        left, shared = list(gold), 0
        for word in said:
            if word in left:
                left.remove(word)
                shared += 1
        if shared:
            precision, recall = shared / len(said), shared / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return AnswerScores(em, best, inside)


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "f1", "sub_em"),
    [
        ("The Nile.", ["nile"], 1, 1, 1),
        ("Nile", ["the River Nile", "Amazon"], 0, 2 / 3, 0),
        ("no", ["no one"], 0, 0, 0),
        ("yes it is", ["yes", "it is"], 0, 0.8, 1),
        ("", ["Nile"], 0, 0, 0),
        ("the", ["a"], 1, 1, 1),
        ("Nile", ["the"], 0, 0, 0),
        (None, ["", "the"], 0, 0, 0),
    ],
)
def test_scores_by_hand(answer: str | None, accepted: list[str], em: float, f1: float, sub_em: float) -> None:
    got = scores_of(answer, accepted)
    assert (got.em, got.f1, got.sub_em) == pytest.approx((em, f1, sub_em))


TEXT = st.lists(st.sampled_from(["the", "The", "nile", "Nile!", "blue", "yes", "no", "A", ",", "in", "n"]), max_size=5)


@settings(max_examples=50)
@given(TEXT.map(" ".join), st.lists(TEXT.map(" ".join), min_size=1, max_size=3))
def test_scores_are_those_of_the_slow_reference(answer: str, accepted: list[str]) -> None:
    got, expected = scores_of(answer, accepted), slow(answer, accepted)
    assert (got.em, got.f1, got.sub_em) == pytest.approx((expected.em, expected.f1, expected.sub_em))


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (1, 1), (0, 20), (3, 20), (1611, 3610)])
def test_wilson_is_scipys(right: int, asked: int) -> None:
    expected = stats.binomtest(right, asked).proportion_ci(method="wilson")
    got = wilson(right, asked)
    assert (got.mean, got.low, got.high) == pytest.approx((right / asked, expected.low, expected.high), abs=1e-12)


def test_bootstrap_is_near_scipys_and_repeats() -> None:
    values = np.random.default_rng(3).beta(0.5, 0.7, size=300).tolist()
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(1)
    ).confidence_interval
    got = bootstrap(values)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=0.006)
    assert bootstrap(values) == got


def test_the_mean_of_two_sets_covers_what_it_promises() -> None:
    """The exact coverage, over all outcomes of two sets of different sizes."""
    sizes = (15, 40)
    known = [[wilson(right, size) for right in range(size + 1)] for size in sizes]
    for shares in ((0.1, 0.5), (0.3, 0.3), (0.05, 0.9)):
        weights = [stats.binom.pmf(range(size + 1), size, p) for size, p in zip(sizes, shares, strict=True)]
        covered = 0.0
        for a, b in product(range(sizes[0] + 1), range(sizes[1] + 1)):
            one = mean_of([known[0][a], known[1][b]])
            covered += weights[0][a] * weights[1][b] * (one.low <= fmean(shares) <= one.high)
        assert 0.93 < covered < 0.98, shares


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for samples in range(1, 6):
        for right, k in product(range(samples + 1), range(1, samples + 1)):
            drawn = list(combinations([True] * right + [False] * (samples - right), k))
            assert pass_at(k, samples, right) == pytest.approx(sum(map(any, drawn)) / comb(samples, k))
