"""Tests of the causes of drift and their parts: matched tokens, tallies of numbers, bounds of truncated sampling."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from difflib import SequenceMatcher
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rlsys.observe.kept import TrajectoryRecord
from rlsys.report.drift import (
    ERROR,
    HISTOGRAM_EDGES,
    LEAST,
    QUANTILES,
    SHORT,
    Cause,
    CauseDrift,
    DriftReport,
    joined,
    log_kept_mass,
    matched_pairs,
    report_of,
    spread,
    tally,
    tally_step,
)
from tests.report.audit.episodes import (
    CODEC,
    POLICY,
    TOKENIZER,
    by_letter,
    drawn_logprob,
    played,
    trained_logprob,
    with_differences,
)

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
TEXTS = st.lists(
    st.sampled_from(["<search>", "</search>", "東京", "é", " ", "\n\n", ">", "Paris", "x"]), min_size=1, max_size=5
).map("".join)
OUTPUTS = st.one_of(
    TEXTS.map(CODEC.encode), TEXTS.map(by_letter), st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=6)
)
TURNS = st.lists(st.tuples(OUTPUTS, TEXTS), min_size=1, max_size=4)


def drift_report(kept: Iterable[TrajectoryRecord], sampling: dict[str, Any]) -> DriftReport:
    by_step = groupby(kept, key=lambda one: one.step)
    return report_of([tally_step(step, those, sampling) for step, those in by_step], sampling)


def row_of(report: DriftReport, cause: Cause) -> CauseDrift:
    return next(row for row in report.causes if row.cause is cause)


def as_drawn(one: TrajectoryRecord, prompt: str, turns: list[tuple[list[int], str]]) -> dict[int, float]:
    """Position -> engine log-prob, of trained tokens before which all tokens are the same as when they were drawn."""
    text, found = prompt, {}
    tokens = one.token_ids.tolist()
    for number, (ids, observation) in enumerate(turns):
        inputs = CODEC.encode(text)
        for at in range(len(ids)):
            place = len(inputs) + at
            same = tokens[: place + 1] == [*inputs, *ids[: at + 1]]
            if same and one.turn_of_token[place] == number:
                found[place] = drawn_logprob(tokens[: place + 1])
        text += CODEC.decode(ids) + observation
    return found


@settings(max_examples=40)
@given(TEXTS, TURNS, st.lists(st.integers(0, POLICY), min_size=4, max_size=4), st.booleans())
def test_every_trained_token_gets_the_cause_of_its_prefix_and_version(
    prompt: str, turns: list[tuple[list[int], str]], versions: list[int], eos: bool
) -> None:
    one = played(prompt, turns, versions=versions, eos=eos)
    report = drift_report([one], SAMPLING)
    same = as_drawn(one, prompt, turns)
    lags = {place: POLICY - versions[one.turn_of_token[place]] for place in same}
    tokens = {row.cause: row.tokens for row in report.causes}
    trained = int(one.loss_mask.sum())
    assert list(tokens) == list(Cause)
    assert sum(tokens.values()) == report.tokens == trained
    assert tokens[Cause.NUMERICS] == sum(lag == 0 for lag in lags.values())
    assert tokens[Cause.VERSION_LAG] == sum(lag > 0 for lag in lags.values())
    unsampled = sum(version < 0 and own for version, own in zip(one.versions, one.loss_mask, strict=True))
    assert tokens[Cause.UNSAMPLED] == unsampled
    for lag, found in report.by_lag.items():
        values = [trained_logprob(one.token_ids[: at + 1].tolist()) - same[at] for at in same if lags[at] == lag]
        assert found.count == len(values)
        assert found.mean == pytest.approx(np.mean(values), abs=1e-5)
        assert found.rms == pytest.approx(math.sqrt(np.mean(np.square(values))), abs=1e-5)
    assert set(report.by_lag) == set(lags.values())
    for row in report.causes:
        assert sum(row.histogram) == row.differences.count <= row.tokens


def test_retokenised_turn_is_compared_by_its_sum() -> None:
    drawn = [*by_letter("Paris"), *CODEC.encode(" capital")]
    one = played("x\n", [(drawn, "\n"), (CODEC.encode("x"), "\n")])
    report = drift_report([one], SAMPLING)
    places = np.flatnonzero(one.turn_of_token == 0)
    recomputed = sum(trained_logprob(one.token_ids[: at + 1].tolist()) for at in places)
    inputs = CODEC.encode("x\n")
    engine = sum(drawn_logprob([*inputs, *drawn[: at + 1]]) for at in range(len(drawn)))
    assert report.turns_changed.count == report.turns_same.count == 1
    assert report.turns_changed.mean == pytest.approx(recomputed - engine, abs=1e-5)
    # The tokens of " capital" are trained as drawn, but "Paris" before them was drawn letter by letter.
    changed, recut = row_of(report, Cause.CHANGED_PREFIX), row_of(report, Cause.RETOKENISED)
    assert changed.tokens == changed.differences.count > 0
    assert (recut.tokens, recut.differences.count) == (len(places) - changed.tokens, 0)
    lost = drift_report([played("x", [(CODEC.encode("<search>"), "> x"), (CODEC.encode("Paris"), "\n")])], SAMPLING)
    # The tokenizer makes one token of >>, which joins the turn and the observation after it.
    assert (lost.turns_changed.count, lost.turns_same.count, lost.turns_apart) == (0, 1, 1)


def test_version_lag_is_separated_from_numerics() -> None:
    report = drift_report([with_differences({1: 0.5, 2: -0.25, POLICY: 0.125})], SAMPLING)
    assert {lag: spread.mean for lag, spread in report.by_lag.items()} == {0: 0.125, 1: -0.25, 2: 0.5}
    mean_square = (0.5**2 + 0.25**2) / 2
    assert report.beyond_numerics == pytest.approx(math.sqrt(mean_square - 0.125**2), rel=1e-6)
    assert report.steps[0].mean_abs == {"version_lag": 0.375, "numerics": 0.125}
    row = row_of(report, Cause.NUMERICS)
    assert row.histogram[np.searchsorted(HISTOGRAM_EDGES, 0.125)] == row.tokens
    assert drift_report([with_differences({POLICY: 0.125})], SAMPLING).beyond_numerics is None


TOKENS = st.lists(st.integers(0, 5), max_size=30)
APART = [*[0] * SHORT, 10, 11, 12, 13, *[0] * SHORT], [*[1] * SHORT, 12, 10, 11, 13, *[1] * SHORT]
"""Long lists without a common start or end; each of the four tokens in the middle occurs once in both."""


@given(TOKENS, TOKENS, st.integers(0, 3))
@example(*APART, 0)
@settings(max_examples=40)
def test_matched_pairs_have_equal_tokens_in_order(first: list[int], second: list[int], times: int) -> None:
    first, second = first * 4**times, second * 4**times
    pairs = sorted(matched_pairs(first, second))
    assert all(first[a] == second[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert len(list(matched_pairs(first, first))) == len(first)


def test_only_short_pieces_of_repetitive_tokens_are_matched_by_longest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for the longest common runs of all tokens would take hours."""

    def short(junk: None, first: Sequence[int], second: Sequence[int], autojunk: bool) -> SequenceMatcher[int]:
        assert max(len(first), len(second)) <= SHORT
        return SequenceMatcher(junk, first, second, autojunk)

    monkeypatch.setattr("rlsys.report.drift.SequenceMatcher", short)
    first, second = [1, 2] * 2000, [1, 2, 3] * 1300
    assert len(list(matched_pairs(first, second))) < SHORT
    assert len(list(matched_pairs([*first, 9, 8], [*first, 7]))) == len(first)
    assert len(list(matched_pairs([9, 8, *first], [7, *first]))) == len(first)
    assert [APART[0][at] for at, _ in sorted(matched_pairs(*APART))] == [10, 11, 13], "the longest chain in order"


NUMBERS = st.lists(st.floats(-30.0, 30.0) | st.just(float("nan")) | st.floats(-1e-6, 1e-6), max_size=30)


@given(st.lists(NUMBERS, max_size=5))
@settings(max_examples=40)
def test_joined_tallies_have_the_figures_of_all_numbers(parts: list[list[float]]) -> None:
    numbers = [value for part in parts for value in part]
    found, exact = joined([tally(part) for part in parts]).spread(), spread(numbers)
    if not exact.count:
        assert found == exact
        return
    *figures, quantiles = astuple(found)
    *expected, _ = astuple(exact)
    assert figures == pytest.approx(expected, rel=1e-9, abs=1e-9)
    known = np.sort(np.array(numbers)[np.isfinite(numbers)])
    sizes, ratios = np.abs(known), np.exp(np.clip(known, -20, 20))
    by_numpy = [known.mean(), sizes.mean(), sizes.max(), np.sqrt((known**2).mean()), ratios.mean()]
    assert [exact.mean, exact.mean_abs, exact.largest, exact.rms, exact.exp_mean] == pytest.approx(by_numpy)
    of_all = np.quantile(known, QUANTILES).tolist()
    assert exact.quantiles == pytest.approx(of_all)
    for share, quantile, value in zip(QUANTILES, quantiles, of_all, strict=True):
        rank = share * (len(known) - 1)
        largest = max(abs(known[int(np.floor(rank))]), abs(known[int(np.ceil(rank))]))
        assert abs(quantile - value) <= ERROR * largest * 1.001 + LEAST


SIZES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


def kept_mass(probabilities: list[float], top_p: float, top_k: int) -> tuple[list[int], float]:
    """Tokens that pass both filters, and their mass; SGLang applies each filter to the whole vocabulary."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if before <= top_p and (top_k < 0 or rank < top_k):
            kept.append(token)
        before += probabilities[token]
    return kept, sum(probabilities[token] for token in kept)


@given(SIZES, st.floats(0.05, 1.0), st.sampled_from([-1, 1, 2, 5]), st.data())
@settings(max_examples=40)
def test_kept_mass_is_within_its_bounds(sizes: list[float], top_p: float, top_k: int, data: st.DataObject) -> None:
    probabilities = [one / sum(sizes) for one in sizes]
    kept, mass = kept_mass(probabilities, top_p, top_k)
    drawn = probabilities[data.draw(st.sampled_from(kept))]
    assume(abs(drawn - top_p) > 1e-9)
    (low,), (high,) = log_kept_mass(np.log([drawn]), top_p, top_k)
    assert low - 1e-9 <= np.log(mass) <= high + 1e-9
    if low == high:
        assert low == pytest.approx(np.log(mass), abs=1e-9)
    if drawn > top_p or top_k == 1:
        assert low == high, "the mass is known exactly"
