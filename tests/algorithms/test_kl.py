"""Tests of KL estimators against the exact KL of small softmax policies, and of the KL coefficient over steps."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.kl import SAMPLED, KlController, importance_weights, kl_control
from rlsys.config.algorithm import AlgorithmConfig, KlControl, SampledKl

TABLE = {
    "k1": (True, False, False),
    "k2": (False, True, False),
    "k3": (True, False, False),
    "k3++": (True, True, False),
    "k4": (True, True, False),
    "k5": (True, True, True),
    "abs": (False, False, False),
}
"""Estimator -> (unbiased in value, unbiased in gradient, estimates the forward KL), from `rlsys.algorithms.kl`."""
FAR = 0.01
"""Smallest relative error of a biased estimator."""


def policies() -> tuple[Tensor, Tensor]:
    """Logits of a policy and log-probs of another one, close enough that no clamp applies."""
    draw = torch.Generator().manual_seed(5)
    logits, other = (0.5 * torch.randn(2, 5, generator=draw, dtype=torch.float64)).unbind()
    return logits.requires_grad_(), torch.log_softmax(other, dim=0)


def exact_kl(logprobs: Tensor, other: Tensor, forward_kl: bool) -> Tensor:
    if forward_kl:
        return (other.exp() * (other - logprobs)).sum()
    return (logprobs.exp() * (logprobs - other)).sum()


def expected_gradient(estimator: str, logits: Tensor, other: Tensor) -> Tensor:
    """Expected gradient of the estimate: sum_y pi(y) d est(y) / d logits."""
    logprobs = torch.log_softmax(logits, dim=0)
    return sum(
        p * torch.autograd.grad(SAMPLED[estimator](logprobs[y], other[y]), logits, retain_graph=True)[0]
        for y, p in enumerate(logprobs.detach().exp().tolist())
    )


def test_every_sampled_estimator_of_the_schema_has_a_function_and_a_row() -> None:
    assert set(TABLE) == set(SAMPLED) == set(get_args(get_type_hints(SampledKl)["kind"]))


@pytest.mark.parametrize("name", TABLE)
def test_estimator_bias_matches_the_table_by_enumeration(name: str) -> None:
    unbiased_value, unbiased_gradient, forward_kl = TABLE[name]
    logits, other = policies()
    logprobs = torch.log_softmax(logits, dim=0)
    exact = exact_kl(logprobs, other, forward_kl)
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)

    mean = (logprobs.exp() * SAMPLED[name](logprobs, other)).sum()
    error = float(((mean - exact).abs() / exact).detach())
    assert error < 1e-13 if unbiased_value else error > FAR

    error = float((expected_gradient(name, logits, other) - gradient).norm() / gradient.norm())
    assert error < 1e-13 if unbiased_gradient else error > FAR


@pytest.mark.parametrize(("name", "beyond"), [("k3", 0.0), ("k3++", 10.0)])
def test_k3_is_clamped_at_ten_nats(name: str, beyond: float) -> None:
    ratios = torch.tensor([13.46, 13.74], dtype=torch.float64)
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    values = SAMPLED[name](logprobs, ratios.log())
    values.sum().backward()
    assert 9.8 < float(values[0].detach()) < 10
    assert float(values[1].detach()) == 10
    assert logprobs.grad is not None
    assert logprobs.grad[0] != 0
    assert logprobs.grad[1] == beyond


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 3.0])
def test_k5_has_the_gradient_of_the_forward_kl_however_far_the_reference(spread: float) -> None:
    """The gradient of KL(r || p) with respect to the logits of p is p - r."""
    noise = torch.randn(2, 60, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    logits, far = noise[0].requires_grad_(), noise[0].detach() + spread * noise[1]
    p, r = logits.detach().softmax(0), far.softmax(0)
    assert 5.73 < float((r / p).max()) < math.exp(20) or spread < 1
    gradient = expected_gradient("k5", logits, far.log_softmax(0))
    assert torch.allclose(gradient, p - r, rtol=0, atol=1e-13)


def test_derivative_of_k5_is_one_minus_the_ratio_up_to_the_clamp_of_its_logarithm() -> None:
    log_w = torch.tensor([-19.9, -1.0, 0.0, 1.7, 1.8, 5.0, 19.9, 20.1, 500.0], dtype=torch.float64)
    logprobs = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    SAMPLED["k5"](logprobs, log_w).sum().backward()
    assert logprobs.grad is not None
    expected = [1 - math.exp(value) for value in log_w[:7].tolist()] + [1.0, 1.0]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_importance_weights_are_bounded_constants() -> None:
    logprobs = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([0.5, 0.5, 0.3, math.exp(-1e3)], dtype=torch.float64).log().clamp(min=-1e3)
    plain = [0.2, 1.0, 3.0, math.exp(20)]
    for lower, upper in ((None, None), (0.5, None), (None, 2.0), (0.5, 2.0)):
        weights = importance_weights(logprobs, old, lower, upper)
        bounded = [min(max(w, lower or -math.inf), upper or math.inf) for w in plain]
        assert weights.tolist() == pytest.approx(bounded)
        assert not weights.requires_grad


def adaptive() -> AlgorithmConfig:
    return AlgorithmConfig(kl_coef=0.1, kl_control=KlControl.adaptive, kl_target=0.05, kl_horizon=1000)


def test_fixed_coefficient_never_changes() -> None:
    control = kl_control(AlgorithmConfig(kl_coef=0.03, kl_control=KlControl.fixed))
    control.observe(100.0, 512)
    control.restore({"coef": 7.0})
    assert control.coef == 0.03
    assert control.state() == {"coef": 0.03}


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.055, 0.1 * (1 + 0.1 * 0.5)), (50.0, 0.1 * (1 + 0.2 * 0.5)), (-3.0, 0.1 * (1 - 0.2 * 0.5))]
)
def test_adaptive_coefficient_after_one_step_by_hand(kl: float, expected: float) -> None:
    control = kl_control(adaptive())
    control.observe(kl, 500)
    assert control.coef == pytest.approx(expected, rel=1e-12)


def test_restored_coefficient_continues_exactly() -> None:
    straight, again = kl_control(adaptive()), kl_control(adaptive())
    straight.observe(0.1, 200)
    again.restore(straight.state())
    for control in (straight, again):
        control.observe(0.02, 200)
    assert again.coef == straight.coef != 0.1


def test_nan_kl_and_too_short_horizon_are_refused() -> None:
    control = KlController(0.1, 0.05, 1000)
    with pytest.raises(ValueError, match="finite"):
        control.observe(float("nan"), 10)
    with pytest.raises(ValueError, match="kl_horizon=1000"):
        control.observe(0.1, 5000)
    assert control.coef == 0.1
