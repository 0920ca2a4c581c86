"""Bounds on what truncated sampling hides, against the filters themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlsys.report.drift import joined_sampler, log_kept_mass, sampler_drift

SIZES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


def kept_mass(probabilities: list[float], top_p: float, top_k: int) -> tuple[list[int], float]:
    """The tokens that pass both filters, each on the whole vocabulary as SGLang applies them, and their mass."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if before <= top_p and (top_k < 0 or rank < top_k):
            kept.append(token)
        before += probabilities[token]
    return kept, sum(probabilities[token] for token in kept)


@given(SIZES, st.floats(0.05, 1.0), st.sampled_from([-1, 1, 2, 5]), st.data())
def test_the_kept_mass_is_within_its_bounds(sizes: list[float], top_p: float, top_k: int, data: st.DataObject) -> None:
    probabilities = [one / sum(sizes) for one in sizes]
    kept, mass = kept_mass(probabilities, top_p, top_k)
    drawn = probabilities[data.draw(st.sampled_from(kept))]
    assume(abs(drawn - top_p) > 1e-9)
    (low,), (high,) = log_kept_mass(np.log([drawn]), top_p, top_k)
    assert low - 1e-9 <= np.log(mass) <= high + 1e-9
    if low == high:
        assert low == pytest.approx(np.log(mass), abs=1e-9)
    if drawn > top_p or top_k == 1:
        assert low == high, "it is known"


def test_without_filters_the_sampler_adds_nothing_at_any_temperature() -> None:
    found = sampler_drift(np.array([-0.5, -9.0]), {"temperature": 0.3, "top_p": 1.0, "top_k": -1})
    assert not found.truncated
    assert (found.least, found.most, found.exact, found.tokens) == (0.0, 0.0, 2, 2)


def test_settings_that_are_null_or_damaged_are_the_defaults() -> None:
    for setting in (None, "0.", [None], float("nan"), True):
        found = sampler_drift(np.array([-0.5]), dict.fromkeys(("temperature", "top_p", "top_k"), setting))
        assert (found.temperature, found.top_p, found.top_k, found.truncated) == (1.0, 1.0, -1, False)


@given(st.lists(st.lists(st.floats(-9.0, 0.0), max_size=5), max_size=4))
def test_parts_are_joined_to_the_whole(parts: list[list[float]]) -> None:
    sampling = {"top_p": 0.5}
    whole = sampler_drift(np.array([value for part in parts for value in part]), sampling)
    found = joined_sampler([sampler_drift(np.array(part), sampling) for part in parts], sampling)
    assert (found.tokens, found.exact) == (whole.tokens, whole.exact)
    assert (found.least, found.most) == pytest.approx((whole.least, whole.most))


def test_means_of_the_bounds() -> None:
    found = sampler_drift(np.log([0.75, 0.1]), {"temperature": 1.0, "top_p": 0.5, "top_k": -1})
    assert found.truncated
    assert found.exact == 1
    assert found.least == pytest.approx((np.log(0.75) + np.log(0.5)) / 2)
    assert found.most == pytest.approx(np.log(0.75) / 2)
