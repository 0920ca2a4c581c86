"""Tests of the critic's loss against a loop over tokens, its clip by hand, and the explained variance."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.losses import ValueLoss, explained_variance


class Case(NamedTuple):
    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor


def make_case(rows: int, width: int, seed: int, scale: float = 1.0) -> Case:
    random = np.random.default_rng(seed)
    numbers = [torch.tensor(scale * random.standard_normal((rows, width))) for _ in range(3)]
    return Case(*numbers, mask=torch.tensor(random.random((rows, width)) < 0.6))


def by_loop(case: Case, clip: float | None) -> dict[str, float]:
    """Return every sum of the loss and its statistics, computed token by token."""
    found = dict.fromkeys(("tokens", "vf_loss", "vf_clipfrac", "vpred_mean", "value_error"), 0.0)
    for row, column in zip(*np.nonzero(case.mask.numpy()), strict=True):
        v, old, target = (float(part[row, column]) for part in (case.values, case.old_values, case.returns))
        loss = (v - target) ** 2
        if clip is not None:
            near = min(max(v, old - clip), old + clip)
            found["vf_clipfrac"] += (near - target) ** 2 > loss
            loss = max(loss, (near - target) ** 2)
        found["tokens"] += 1
        found["vf_loss"] += loss / 2
        found["vpred_mean"] += v
        found["value_error"] += target - v
    return found


cases = st.builds(
    make_case, st.integers(1, 3), st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e3])
)
clips = st.sampled_from([None, 0.0, 0.2, 0.5, 1e3])


@settings(max_examples=50)
@given(cases, clips)
def test_value_loss_equals_a_loop_over_tokens(case: Case, clip: float | None) -> None:
    loss, stats = ValueLoss(clip)(*case)
    expected = by_loop(case, clip)
    assert float(loss) == pytest.approx(expected["vf_loss"], rel=1e-12, abs=1e-12)
    for name, value in expected.items():
        assert float(stats[name]) == pytest.approx(value, rel=1e-12, abs=1e-9), name
    assert all(math.isfinite(float(value)) for value in stats.values())


def test_value_beyond_the_clip_has_no_gradient() -> None:
    """Old values are 0, returns 1, and the clip is 0.2."""
    values = torch.tensor([[0.1, 0.3, -0.3, 0.0]], requires_grad=True)
    zeros, mask = torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)
    loss, stats = ValueLoss(0.2)(values, zeros, zeros + 1.0, mask)
    loss.backward()
    # Clipped: 0.8, more than 0.7. The third error stays 1.3, as the clipped 1.2 is smaller.
    assert float(loss) == pytest.approx((0.81 + 0.64 + 1.69 + 1.0) / 2)
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([-0.9, 0.0, -1.3, -1.0])
    assert int(stats["vf_clipfrac"]) == 1


def test_masked_values_get_no_gradient_and_change_nothing() -> None:
    case = make_case(2, 6, seed=3)

    def results(fill: float) -> tuple[Tensor, ...]:
        values, old, returns = (one.where(case.mask, torch.full_like(one, fill)) for one in case[:3])
        loss, stats = ValueLoss(0.5)(values.requires_grad_(), old, returns, case.mask)
        (gradient,) = torch.autograd.grad(loss, values)
        assert not gradient[~case.mask].any()
        return loss.detach(), gradient, *stats.values()

    assert all(torch.equal(*pair) for pair in zip(results(0.0), results(math.nan), strict=True))


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        # Relative to this mean, the variance is too small for float32 sums of squares.
        ([1000.0, 1000.0], [1000.0, 1000.25], 0.0),
        ([0.1, 0.7, 0.2], [0.3, 0.3, 0.3], math.nan),
    ],
)
def test_explained_variance_by_hand(values: list[float], returns: list[float], expected: float) -> None:
    found = explained_variance(np.array(values, np.float32), np.array(returns, np.float32))
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
