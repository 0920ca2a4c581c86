import math

import torch

from rlsys.algorithms.kl import k3


def test_hand_computed_values() -> None:
    policy = torch.tensor([0.5, 0.5, 0.5]).log()
    other = torch.tensor([0.5, 0.25, 1.0]).log()
    expected = [0.0, 0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]
    torch.testing.assert_close(k3(policy, other), torch.tensor(expected))


def test_extremes_are_clamped_and_finite() -> None:
    policy = torch.tensor([-100.0, 0.0], requires_grad=True)
    values = k3(policy, torch.tensor([0.0, -100.0]))
    # The first is exp(20)-ish, cut to 10; the second is exp(-20) - 1 + 20 = 19, cut to 10.
    assert values.tolist() == [10.0, 10.0]
    values.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.0]


def test_expectation_under_the_policy_is_the_reverse_kl() -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    other = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (policy * (policy / other).log()).sum()
    torch.testing.assert_close((policy * k3(policy.log(), other.log())).sum(), exact)
