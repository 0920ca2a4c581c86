"""The loss against a plain-Python formula, by finite differences, under splits, and with NaN planted."""

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.losses import LossInputs, grpo_loss, reduce_stats
from rlsys.config.schema import AlgorithmConfig

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.05, entropy_coef=0.01)


def random_batch(seed: int, rows: int = 6, width: int = 9) -> tuple[Tensor, Tensor, LossInputs]:
    """Log-probs far enough from the old ones that a good part of the tokens is clipped."""
    draw = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=draw, dtype=torch.float64)

    old = -normal().abs() - 0.1
    logprobs = (old + 0.4 * normal()).requires_grad_()
    mask = torch.rand(rows, width, generator=draw) < 0.6
    return logprobs, normal().abs().requires_grad_(), LossInputs(old, old + 0.5 * normal(), normal(), mask)


def reference(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, config: AlgorithmConfig
) -> dict[str, float]:
    """The formulas once more: one token at a time, by cases, in Python's floats."""
    assert inputs.ref_logprobs is not None
    sums = dict.fromkeys(
        ["tokens", "ratio", "clipped", "approx_kl", "policy_loss", "kl_loss", "entropy"], 0.0
    )
    deviations = []
    for row, column in inputs.mask.nonzero().tolist():
        new, old = float(logprobs[row, column]), float(inputs.old_logprobs[row, column])
        ref, advantage = float(inputs.ref_logprobs[row, column]), float(inputs.advantages[row, column])
        ratio = math.exp(new) / math.exp(old)
        if advantage > 0 and ratio > 1 + config.clip_high:
            used, clipped = 1 + config.clip_high, True
        elif advantage < 0 and ratio < 1 - config.clip_low:
            used, clipped = 1 - config.clip_low, True
        else:
            used, clipped = ratio, False
        deviations.append(abs(ratio - 1))
        sums["tokens"] += 1
        sums["ratio"] += ratio
        sums["clipped"] += clipped
        sums["approx_kl"] += ratio - 1 - math.log(ratio)
        sums["policy_loss"] -= used * advantage
        sums["kl_loss"] += math.exp(ref - new) - 1 - (ref - new)
        sums["entropy"] += float(entropy[row, column])
    sums["ratio_dev_max"] = max(deviations)
    sums["loss"] = (
        sums["policy_loss"] + config.kl_coef * sums["kl_loss"] - config.entropy_coef * sums["entropy"]
    )
    return sums


def test_one_token_by_hand() -> None:
    # ratio 1.5 with advantage 2: clipped to 1.28 -> -2.56. k3 with w = 0.5: 0.5 - 1 + ln 2.
    inputs = LossInputs(
        old_logprobs=torch.tensor([[0.4]]).log(),
        ref_logprobs=torch.tensor([[0.3]]).log(),
        advantages=torch.tensor([[2.0]]),
        mask=torch.tensor([[True]]),
    )
    loss, stats = grpo_loss(CONFIG)(torch.tensor([[0.6]]).log(), torch.tensor([[0.9]]), inputs)
    assert float(loss) == pytest.approx(-2.56 + 0.05 * (math.log(2) - 0.5) - 0.01 * 0.9, rel=1e-5)
    assert float(stats["ratio_dev_max"]) == pytest.approx(0.5, rel=1e-5)
    assert (int(stats["tokens"]), int(stats["clipped"])) == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_statistics_equal_the_plain_formula(seed: int) -> None:
    logprobs, entropy, inputs = random_batch(seed)
    loss, stats = grpo_loss(CONFIG)(logprobs, entropy, inputs)
    expected = reference(logprobs.detach(), entropy.detach(), inputs, CONFIG)
    assert expected["clipped"] > 0
    assert float(loss.detach()) == pytest.approx(expected.pop("loss"), rel=1e-12)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected, rel=1e-9)
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences_of_the_plain_formula(seed: int) -> None:
    logprobs, entropy, inputs = random_batch(seed, rows=2, width=6)
    grpo_loss(CONFIG)(logprobs, entropy, inputs)[0].backward()
    step = 1e-6
    for values in (logprobs, entropy):
        assert values.grad is not None
        numeric = torch.zeros_like(values.grad)
        for row in range(values.shape[0]):
            for column in range(values.shape[1]):
                sides = []
                for sign in (1, -1):
                    moved = values.detach().clone()
                    moved[row, column] += sign * step
                    pair = (moved, entropy) if values is logprobs else (logprobs, moved)
                    sides.append(reference(pair[0].detach(), pair[1].detach(), inputs, CONFIG)["loss"])
                numeric[row, column] = (sides[0] - sides[1]) / (2 * step)
        torch.testing.assert_close(values.grad, numeric, rtol=1e-6, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 5)), order=st.permutations(range(6)))
def test_any_split_and_order_gives_the_same_gradient(seed: int, cuts: set[int], order: list[int]) -> None:
    logprobs, entropy, inputs = random_batch(seed)
    assert inputs.ref_logprobs is not None
    loss_function = grpo_loss(CONFIG)
    whole, whole_stats = loss_function(logprobs, entropy, inputs)
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)

    bounds = [0, *sorted(cuts), 6]
    gradient, parts, total = torch.zeros_like(logprobs), [], 0.0
    for start, stop in pairwise(bounds):
        rows = order[start:stop]
        part = LossInputs(
            inputs.old_logprobs[rows], inputs.ref_logprobs[rows], inputs.advantages[rows], inputs.mask[rows]
        )
        loss, stats = loss_function(logprobs[rows], entropy[rows], part)
        gradient += torch.autograd.grad(loss, logprobs)[0]
        total += float(loss.detach())
        parts.append(stats)
    assert total == pytest.approx(float(whole.detach()), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-12)
    assert reduce_stats(parts) == pytest.approx(reduce_stats([whole_stats]), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_count_for_nothing_whatever_stands_there(poison: float) -> None:
    logprobs, entropy, inputs = random_batch(7)
    assert inputs.ref_logprobs is not None
    clean_loss, clean_stats = grpo_loss(CONFIG)(logprobs, entropy, inputs)
    (clean_gradient,) = torch.autograd.grad(clean_loss, logprobs)

    def poisoned(values: Tensor) -> Tensor:
        return values.detach().masked_fill(~inputs.mask, poison)

    dirty, dirty_entropy = poisoned(logprobs).requires_grad_(), poisoned(entropy).requires_grad_()
    dirty_inputs = LossInputs(
        poisoned(inputs.old_logprobs), poisoned(inputs.ref_logprobs), poisoned(inputs.advantages), inputs.mask
    )
    loss, stats = grpo_loss(CONFIG)(dirty, dirty_entropy, dirty_inputs)
    loss.backward()
    assert dirty.grad is not None
    assert dirty_entropy.grad is not None
    assert torch.equal(dirty.grad[~inputs.mask], torch.zeros_like(dirty.grad[~inputs.mask]))
    assert torch.equal(dirty_entropy.grad[~inputs.mask], torch.zeros_like(dirty.grad[~inputs.mask]))
    assert torch.equal(dirty.grad, clean_gradient)
    assert torch.equal(loss, clean_loss)
    assert stats == clean_stats


def test_a_nan_in_a_trained_token_is_not_hidden() -> None:
    logprobs, entropy, inputs = random_batch(3)
    broken = logprobs.detach().masked_fill(inputs.mask, float("nan"))
    assert grpo_loss(CONFIG)(broken, entropy, inputs)[0].isnan()


def test_a_batch_without_trained_tokens_has_a_zero_loss_that_backpropagates() -> None:
    logprobs, entropy, inputs = random_batch(4)
    loss, stats = grpo_loss(CONFIG)(logprobs, entropy, replace(inputs, mask=torch.zeros_like(inputs.mask)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    assert int(stats["tokens"]) == 0


def test_a_term_with_a_coefficient_needs_its_input() -> None:
    logprobs, entropy, inputs = random_batch(1)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.05"):
        grpo_loss(CONFIG)(logprobs, entropy, replace(inputs, ref_logprobs=None))
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.01"):
        grpo_loss(CONFIG)(logprobs, None, inputs)


def test_without_coefficients_the_loss_is_the_surrogate_alone() -> None:
    logprobs, _, inputs = random_batch(1)
    plain = grpo_loss(replace(CONFIG, kl_coef=0.0, entropy_coef=0.0))
    loss, stats = plain(logprobs, None, replace(inputs, ref_logprobs=None))
    assert torch.equal(loss.detach(), stats["policy_loss"])
    assert {"kl_loss", "entropy"}.isdisjoint(stats)


def test_the_loss_travels_between_processes() -> None:
    loss = grpo_loss(CONFIG)
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_statistics_of_unequal_parts_are_token_means() -> None:
    parts = [
        {"tokens": 1.0, "entropy": 4.0, "ratio_dev_max": 0.1},
        {"tokens": 3.0, "entropy": 0.0, "ratio_dev_max": 0.3},
    ]
    assert reduce_stats(parts) == {"tokens": 4.0, "entropy": 1.0, "ratio_dev_max": 0.3}
    assert math.isnan(reduce_stats([{"tokens": 0.0, "entropy": 0.0}])["entropy"])
