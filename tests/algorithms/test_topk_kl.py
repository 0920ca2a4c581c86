"""Tests of EMA-PG's top-k KL by enumeration of every token that could be sampled, in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.kl import SampledLogprobs, TopKKl, join_parts
from rlsys.config.algorithm import AlgorithmConfig, FullKl, KlTail

VOCAB = 7
EXACT, UPSTREAM = KlTail.exact, KlTail.upstream
DIRECTIONS = pytest.mark.parametrize("forward_kl", [False, True], ids=["reverse", "forward"])


def top_k(forward_kl: bool, kind: KlTail | None, *, weighted: bool) -> TopKKl:
    """A top-k KL without bounds on the weights; the tail is left out if `kind` is None."""
    full = FullKl(
        "full_forward" if forward_kl else "full_reverse", topk_tail=kind or EXACT, use_tail_sampling=kind is not None
    )
    return TopKKl(AlgorithmConfig(kl_estimator=full, use_kl_iw=weighted), full)


def distributions(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, then log-probs of the reference and of the policy that sampled, [VOCAB] each."""
    torch.manual_seed(seed)
    logits, ref, old = 1.5 * torch.randn(3, VOCAB, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(-1), (logits.detach() + 0.5 * old).log_softmax(-1)


def dense(log_p: Tensor, log_r: Tensor, forward_kl: bool) -> Tensor:
    """The KL by its definition."""
    first, second = (log_r, log_p) if forward_kl else (log_p, log_r)
    return sum((first[j].exp() * (first[j] - second[j]) for j in range(len(first))), torch.zeros(()))


def expectation(kl: TopKKl, k: int, logits: Tensor, log_r: Tensor, log_old: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the estimate and of its gradient by the logits, over tokens sampled from `log_old`."""
    log_p = logits.log_softmax(-1)
    picks = (log_r if kl.settings.kind == "full_forward" else log_p).topk(k).indices
    total = torch.zeros((), dtype=torch.float64)
    for y in range(VOCAB):
        sampled = SampledLogprobs(log_p[y, None], log_old[y, None], log_r[y, None], (picks == y).any()[None])
        total = total + log_old[y].exp() * kl(log_p[None, picks], log_r[None, picks], sampled)[0]
    (grad,) = torch.autograd.grad(total, logits)
    return total.detach(), grad


def errors(kl: TopKKl, k: int, on_policy: bool) -> tuple[float, float]:
    """Errors of the expected value and of the expected gradient against the exact KL."""
    logits, log_r, log_old = distributions(0)
    log_p = logits.log_softmax(-1)
    exact = dense(log_p, log_r, kl.settings.kind == "full_forward")
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    value, grad = expectation(kl, k, logits, log_r, log_p.detach() if on_policy else log_old)
    return float((value - exact.detach()).abs()), float((grad - exact_grad).abs().max())


@DIRECTIONS
@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_exact_tail_is_unbiased_in_value_and_gradient(forward_kl: bool, k: int) -> None:
    plain = top_k(forward_kl, EXACT, weighted=False)
    weighted = top_k(forward_kl, EXACT, weighted=True)
    for kl, on_policy in ((plain, True), (weighted, True), (weighted, False)):
        assert max(errors(kl, k, on_policy)) < 1e-12
    # Without weights, tokens sampled by another policy must give a bias.
    assert k == VOCAB or min(errors(plain, k, on_policy=False)) > 0.001


@DIRECTIONS
def test_upstream_tail_is_unbiased_in_value_alone(forward_kl: bool) -> None:
    k = 3
    plain = top_k(forward_kl, UPSTREAM, weighted=False)
    weighted = top_k(forward_kl, UPSTREAM, weighted=True)
    for kl, on_policy in ((plain, True), (weighted, False)):
        of_value, of_gradient = errors(kl, k, on_policy)
        assert of_value < 1e-12
        assert of_gradient > 0.01


def test_without_tail_sampling_only_the_head_counts() -> None:
    logits, log_r, _ = distributions(1)
    log_p = logits.log_softmax(-1)[None]
    outside = SampledLogprobs(log_p[:, 6], log_p[:, 6], log_r[None, 6], torch.tensor([False]))
    value = top_k(False, None, weighted=True)(log_p[:, :4], log_r[None, :4], outside)
    assert value.item() == pytest.approx(dense(log_p[0, :4], log_r[:4], False).item())


@pytest.mark.parametrize(("lower", "upper", "weight"), [(None, 3.0, 3.0), (5.0, None, 5.0)])
def test_importance_weight_applies_to_the_tail_and_is_bounded(
    lower: float | None, upper: float | None, weight: float
) -> None:
    full = FullKl(topk_tokens=1)
    config = AlgorithmConfig(kl_estimator=full, use_kl_iw=True, kl_iw_clip_lower=lower, kl_iw_clip_upper=upper)
    p, old, r = (torch.tensor([value]).log() for value in (0.4, 0.1, 0.2))
    picked, ref_picked = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    logprobs = p.requires_grad_()
    values = TopKKl(config, full)(picked, ref_picked, SampledLogprobs(logprobs, old, r, torch.tensor([False])))
    (grad,) = torch.autograd.grad(values.sum(), logprobs)
    log_2 = torch.tensor(2.0).log().item()
    assert values.item() == pytest.approx(0.5 * log_2 + weight * log_2)
    assert grad.item() == pytest.approx(weight * (log_2 + 1)), "the weight must be a constant"


logs = st.floats(-1e3, 0.0)


@given(st.lists(st.tuples(logs, logs, logs, logs, logs, st.booleans()), max_size=5))
def test_extreme_log_ratios_stay_finite(rows: list[tuple[float, ...]]) -> None:
    columns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6).unbind(-1)
    for forward_kl, kind in itertools.product((False, True), KlTail):
        picked, logprobs = columns[0][:, None].clone().requires_grad_(), columns[2].clone().requires_grad_()
        sampled = SampledLogprobs(logprobs, columns[3], columns[4], columns[5].bool())
        values = top_k(forward_kl, kind, weighted=True)(picked, columns[1][:, None], sampled)
        grads = torch.autograd.grad(values.sum(), (picked, logprobs))
        assert all(part.isfinite().all() for part in (values, *grads))


@DIRECTIONS
def test_joined_parts_equal_the_whole_vocabulary(forward_kl: bool) -> None:
    logits, log_r, _ = distributions(3)
    log_p = logits.detach().log_softmax(-1)
    masses, ref_masses, within = [], [], []
    for part, ref_part in zip(log_p.split([3, 1, 3]), log_r.split([3, 1, 3]), strict=True):
        masses.append(part.logsumexp(0))
        ref_masses.append(ref_part.logsumexp(0))
        within.append(dense(part - masses[-1], ref_part - ref_masses[-1], forward_kl))
    # The vocabulary has four parts, of which the last one is empty.
    parts = [torch.stack([*values, torch.tensor(empty)])[:, None].double() for values, empty in
             ((masses, -3e38), (ref_masses, -3e38), (within, 0.0))]  # fmt: skip
    joined = join_parts(*parts, forward_kl)
    torch.testing.assert_close(joined[0], dense(log_p, log_r, forward_kl), rtol=0, atol=1e-12)
