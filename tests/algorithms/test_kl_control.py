"""The weight of the KL term by hand, over steps and over a restart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.kl import KlController, kl_control
from rlsys.config.algorithm import AlgorithmConfig, KlControl


def adaptive(coef: float = 0.1) -> AlgorithmConfig:
    return AlgorithmConfig(kl_coef=coef, kl_control=KlControl.adaptive, kl_target=0.05, kl_horizon=1000)


def test_a_fixed_weight_stays_whatever_is_seen_or_restored() -> None:
    control = kl_control(AlgorithmConfig(kl_coef=0.03, kl_control=KlControl.fixed))
    control.observe(100.0, 512)
    control.restore({"coef": 7.0})
    assert control.coef == 0.03
    assert control.state() == {"coef": 0.03}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.055, 0.1 * (1 + 0.1 * 0.5)),
        (0.045, 0.1 * (1 - 0.1 * 0.5)),
        (50.0, 0.1 * (1 + 0.2 * 0.5)),
        (-3.0, 0.1 * (1 - 0.2 * 0.5)),
    ],
)
def test_one_step_by_hand(kl: float, expected: float) -> None:
    control = kl_control(adaptive())
    control.observe(kl, 500)
    assert control.coef == pytest.approx(expected, rel=1e-12)


def test_a_restored_weight_goes_on_as_if_nothing_had_happened() -> None:
    straight, stopped = kl_control(adaptive()), kl_control(adaptive())
    for kl in (0.1, 0.02, 0.051):
        straight.observe(kl, 200)
    stopped.observe(0.1, 200)
    again = kl_control(adaptive())
    again.restore(stopped.state())
    again.observe(0.02, 200)
    again.observe(0.051, 200)
    assert again.coef == straight.coef != 0.1
    assert again.state() == straight.state()


@given(kls=st.lists(st.floats(-1e3, 1e3), max_size=50))
def test_the_weight_stays_positive_and_moves_to_the_side_that_the_kl_is_on(kls: list[float]) -> None:
    control = kl_control(adaptive())
    for kl in kls:
        before = control.coef
        control.observe(kl, 4999)
        assert 0 < control.coef < math.inf
        assert control.coef >= before if kl > 0.05 else control.coef <= before


def test_a_kl_that_is_no_number_and_a_horizon_that_is_too_near_are_refused() -> None:
    control = KlController(0.1, 0.05, 1000)
    with pytest.raises(ValueError, match="finite"):
        control.observe(float("nan"), 10)
    with pytest.raises(ValueError, match="kl_horizon=1000"):
        control.observe(0.1, 5000)
    assert control.coef == 0.1
