"""Tests of off-policy corrections by hand and against the formulas token by token."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlsys.algorithms.corrections import CorrectionStats, Floats, correct, measure
from rlsys.config.algorithm import CorrectionConfig, CorrectionKind, CorrectionLevel

BOUNDS = {"low": 0.5, "high": 2.0}
TOKEN_TRUNCATE = CorrectionConfig(CorrectionKind.truncate, CorrectionLevel.token, **BOUNDS)
TOKEN_MASK = replace(TOKEN_TRUNCATE, kind=CorrectionKind.mask)
SEQUENCE_MASK = replace(TOKEN_MASK, level=CorrectionLevel.sequence)
GEOMETRIC_REJECT = replace(TOKEN_MASK, kind=CorrectionKind.reject, level=CorrectionLevel.geometric)
ALL = [
    *(TOKEN_TRUNCATE, TOKEN_MASK, replace(TOKEN_TRUNCATE, level=CorrectionLevel.sequence), SEQUENCE_MASK),
    *(replace(GEOMETRIC_REJECT, level=level) for level in CorrectionLevel),
]
NAN, INF = math.nan, math.inf


def logs(*probabilities: float) -> Floats:
    """Log-probs of `probabilities`; NaN stays NaN."""
    return np.log(np.array(probabilities)).astype(np.float32)


def flags(*values: int) -> NDArray[np.bool_]:
    return np.array(values, dtype=np.bool_)


# A prompt token, ratios 1.5, 3 and 0.25, and a token without a sampled log-prob.
OLD = logs(0.9, 0.6, 0.6, 0.1, 0.5)
ROLLOUT = logs(NAN, 0.4, 0.2, 0.4, NAN)
MASK = flags(0, 1, 1, 1, 1)


def test_correction_statistics_by_hand() -> None:
    stats = correct(OLD, ROLLOUT, MASK, TOKEN_TRUNCATE)[1]
    # Ratios 1.5, 3, 0.25 and weights 1.5, 2, 0.25.
    assert (stats.known, stats.unknown, stats.cut) == (3, 1, 1)
    assert stats.effective_share == pytest.approx(3.75**2 / (3 * (2.25 + 4 + 0.0625)), rel=1e-6)
    assert (stats.cut_share, stats.unknown_share) == (pytest.approx(1 / 3), 1 / 4)
    assert stats.cut_mass == pytest.approx(1 / 4.75, rel=1e-6)
    first, second = (correct(OLD[p], ROLLOUT[p], MASK[p], TOKEN_TRUNCATE)[1] for p in (slice(3), slice(3, None)))
    assert astuple(first + second) == pytest.approx(astuple(stats), rel=1e-12)
    dropped = correct(logs(0.9, 0.9), logs(0.1, 0.1), flags(1, 1), SEQUENCE_MASK)[1]
    assert (dropped.effective_share, dropped.cut_share, dropped.cut_mass) == (0, 1, 1)
    unknown = correct(logs(0.5, 0.5), logs(NAN, NAN), flags(1, 1), TOKEN_MASK)[1]
    assert (unknown.unknown_share, unknown.effective_share, unknown.cut_share, unknown.cut_mass) == (1, 1, 0, 0)
    # Without the upper limit of 1, the share would be 1.0000000000000002.
    alike = correct(np.full(7, -0.1, np.float32), np.zeros(7, np.float32), np.ones(7, np.bool_), TOKEN_MASK)[1]
    assert alike.effective_share == 1
    assert correct(OLD, ROLLOUT, MASK, CorrectionConfig()) == (None, CorrectionStats())


def test_rejection_keeps_a_long_sequence_by_its_geometric_mean() -> None:
    """100 tokens of ratio 1.1: their product is 13,780, their geometric mean 1.1. Ratios of 3 and 0.25 are both off."""
    old, sampled, mask = logs(*[0.55] * 100), logs(*[0.5] * 100), flags(*[1] * 100)
    for level, kept in (("geometric", 1.0), ("sequence", 0.0), ("token", 1.0)):
        weights, stats = correct(old, sampled, mask, replace(GEOMETRIC_REJECT, level=CorrectionLevel(level)))
        assert weights is not None
        assert weights.tolist() == [kept] * 100
        assert stats.cut == (0 if kept else 100)
    token, stats = correct(OLD, ROLLOUT, MASK, replace(GEOMETRIC_REJECT, level=CorrectionLevel.token))
    assert token is not None
    assert token.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert stats.cut_mass == pytest.approx(3.25 / 4.75, rel=1e-6), "of 1.5 + 3 + 0.25, 1.5 is left"


def test_nan_log_probs_and_unequal_lengths_are_refused() -> None:
    old = OLD.copy()
    old[-1] = NAN
    with pytest.raises(ValueError, match="finite"):
        correct(old, ROLLOUT, MASK, TOKEN_TRUNCATE)
    with pytest.raises(ValueError, match="aligned"):
        correct(OLD[:1], ROLLOUT, MASK, TOKEN_TRUNCATE)


Token = tuple[float, float, bool]
known_logprob = st.floats(-6, 0, width=32)
tokens = st.lists(
    st.tuples(known_logprob, st.one_of(known_logprob, st.sampled_from([NAN, INF, -INF])), st.booleans()), max_size=12
)
configs = st.builds(
    CorrectionConfig,
    kind=st.sampled_from([kind for kind in CorrectionKind if kind is not CorrectionKind.none]),
    level=st.sampled_from(list(CorrectionLevel)),
    low=st.floats(0, 1),
    high=st.floats(1, 10),
)


def arrays(rows: list[Token]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    return (
        np.array([row[0] for row in rows], dtype=np.float32),
        np.array([row[1] for row in rows], dtype=np.float32),
        np.array([row[2] for row in rows], dtype=np.bool_),
    )


def one_by_one(rows: list[Token], config: CorrectionConfig) -> tuple[list[float], list[float], float]:
    """Return weights, known ratios and the smallest distance of a ratio to a bound, token by token in Python."""
    known = [old - new for old, new, trained in rows if trained and math.isfinite(new)]
    weights, ratios, distance = [], [], INF
    for old, new, trained in rows:
        has_ratio = trained and math.isfinite(new)
        if trained and config.level is not CorrectionLevel.token and known:
            whole = sum(known) / (len(known) if config.level is CorrectionLevel.geometric else 1)
            ratio = math.exp(min(20.0, max(-20.0, whole)))
        elif has_ratio:
            ratio = math.exp(old - new)
        else:
            weights.append(1.0)
            continue
        distance = min(distance, abs(ratio - config.low), abs(ratio - config.high))
        if config.kind is CorrectionKind.truncate:
            weights.append(config.high if ratio > config.high else ratio)
        else:
            kept = 1.0 if config.kind is CorrectionKind.reject else ratio
            weights.append(0.0 if ratio < config.low or ratio > config.high else kept)
        if has_ratio:
            ratios.append(ratio)
    return weights, ratios, distance


@settings(max_examples=50)
@given(rows=tokens, config=configs)
def test_weights_and_statistics_equal_the_rules_token_by_token(rows: list[Token], config: CorrectionConfig) -> None:
    expected, ratios, distance = one_by_one(rows, config)
    assume(distance > 1e-4)  # At smaller distances, rounding decides on which side of a bound a ratio is.
    weights, stats = correct(*arrays(rows), config)
    assert weights is not None
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    of_known = [weight for weight, row in zip(expected, rows, strict=True) if row[2] and math.isfinite(row[1])]
    assert stats.known == len(of_known)
    assert stats.unknown == sum(row[2] for row in rows) - len(of_known)
    assert stats.weight_sum == pytest.approx(sum(of_known), rel=1e-5)
    assert stats.weight_square_sum == pytest.approx(sum(weight**2 for weight in of_known), rel=1e-5)
    assert stats.ratio_sum == pytest.approx(sum(ratios), rel=1e-5)
    pairs = zip(of_known, ratios, strict=True)
    assert stats.kept_sum == pytest.approx(sum(min(ratio, config.high) for weight, ratio in pairs if weight), rel=1e-5)
    rejects = config.kind is CorrectionKind.reject
    assert stats.cut == sum(weight != (1 if rejects else ratio) for weight, ratio in zip(of_known, ratios, strict=True))
    differences = [row[0] - row[1] for row in rows if row[2] and math.isfinite(row[1])]
    assert stats.abs_log_ratio_sum == pytest.approx(sum(map(abs, differences)), rel=1e-5, abs=1e-6)
    assert stats.k1_sum == pytest.approx(-sum(differences), rel=1e-5, abs=1e-5)
    assert stats.k3_sum == pytest.approx(sum(math.exp(d) - 1 - d for d in differences), rel=1e-5, abs=1e-5)
    assert 0 <= stats.effective_share <= 1
    assert 0 <= stats.cut_mass <= 1
    assert measure(*arrays(rows), weights, config) == stats


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("poison", [NAN, INF, 3e38])
def test_untrained_tokens_are_ignored_whatever_they_hold(poison: float, config: CorrectionConfig) -> None:
    clean, clean_stats = correct(OLD, ROLLOUT, MASK, config)
    assert clean is not None
    old, rollout = OLD.copy(), ROLLOUT.copy()
    old[~MASK], rollout[~MASK] = poison, -poison
    weights, stats = correct(old, rollout, MASK, config)
    assert weights is not None
    assert weights.tolist() == clean.tolist()
    assert stats == clean_stats


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("far", [100.0, 3e38])
def test_distant_policies_do_not_overflow(far: float, config: CorrectionConfig) -> None:
    near, distant = np.zeros(50, np.float32), np.full(50, -far, np.float32)
    for old, rollout in ((near, distant), (distant, near)):
        weights, stats = correct(old, rollout, np.ones(50, np.bool_), config)
        assert weights is not None
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        assert all(map(math.isfinite, astuple(stats)))
        assert 0 <= stats.cut_mass <= 1
