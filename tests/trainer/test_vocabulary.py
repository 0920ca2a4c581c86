"""What is computed from sharded logits equals float64 softmax and autograd over the whole vocabulary."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.kl import Sampled, TopKKl
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.trainer.model import logprobs as vocabulary
from rlsys.trainer.model.logprobs import (
    VocabShard,
    divergence_of,
    lay_out,
    token_logprobs,
    top_tokens,
    whole_vocabulary_kl,
)
from tests.trainer.harness import on_ranks
from tests.trainer.sharded_logits import DIRECTIONS, Case, Results, everything, sharded

CASES = {
    2: {
        "uneven padding": Case(tp=2, vocab=23, columns=16),
        "a rank of padding": Case(tp=2, vocab=9, columns=9, k=9, chunk_rows=1, temperature=1.3),
        "bfloat16, the most likely token": Case(tp=2, vocab=31, columns=16, k=1, dtype=torch.bfloat16),
        "ties": Case(tp=2, vocab=30, columns=16, k=6, ties=True),
        "no targets": Case(tp=2, vocab=23, columns=16, count=0),
    },
    4: {
        "a rank of padding": Case(tp=4, vocab=23, columns=8, temperature=1.3),
        "all of the vocabulary, row by row": Case(tp=4, vocab=9, columns=8, k=9, chunk_rows=1),
        "ties": Case(tp=4, vocab=30, columns=8, k=6, ties=True),
    },
}
"""By how many ranks they are cut over."""


def joined(parts: list[Results]) -> Results:
    """What every rank has alike, and gradients side by side."""
    for part in parts:
        for name, values in part.items():
            assert name.startswith("d ") or torch.equal(values, parts[0][name]), f"ranks differ in {name}"
    return {
        name: torch.cat([part[name] for part in parts], dim=1) if name.startswith("d ") else values
        for name, values in parts[0].items()
    }


def dense(case: Case, picks: Results) -> Results:
    """The reference. Which of the tokens that tie are picked is taken from `picks`."""
    targets, weights, old, ref = case.rows()
    weights = weights.double()
    whole, reference = (tensor.double() for tensor in case.tensors())
    whole.requires_grad_()
    log_p = (whole[:, : case.vocab] / case.temperature).log_softmax(-1)
    log_r = (reference[:, : case.vocab] / case.temperature).log_softmax(-1)
    results: Results = {}

    def keep(name: str, values: Tensor) -> None:
        results[name] = values.detach()
        weight = weights[:, : values.shape[1]] if values.dim() == 2 else weights[:, 0]
        (results[f"d {name}"],) = torch.autograd.grad((weight * values).sum(), whole, retain_graph=True)

    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    keep("logprobs", logprobs)
    keep("entropy", -(log_p.exp() * log_p).sum(-1))
    results["policy top"], results["reference top"] = log_p.detach().topk(case.k)[0], log_r.topk(case.k)[0]
    asked = torch.cat([targets[:, None], targets[:, None], picks["reference tokens"]], dim=1)
    keep("at", log_p.gather(1, asked))
    for estimator in DIRECTIONS:
        forward_kl = estimator is KlEstimator.full_forward
        first, second = (log_r, log_p) if forward_kl else (log_p, log_r)
        keep(f"{estimator}", (first.exp() * (first - second)).sum(-1))
        tokens = picks["reference tokens" if forward_kl else "policy tokens"]
        sampled = Sampled(logprobs, old.double(), ref.double(), (tokens == targets[:, None]).any(-1))
        config = AlgorithmConfig(kl_estimator=estimator, kl_topk_tokens=case.k, use_kl_iw=True)
        keep(f"{estimator} top", TopKKl(config)(log_p.gather(1, tokens), log_r.gather(1, tokens), sampled))
    return results


def check(case: Case, actual: Results) -> None:
    expected = dense(case, actual)
    assert set(actual) == {*expected, "policy tokens", "reference tokens"}
    for name, values in expected.items():
        rounded = case.dtype is torch.bfloat16 and name.startswith("d ")
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if rounded else {"rtol": 1e-4, "atol": 2e-5}
        assert actual[name].dtype is (case.dtype if rounded else torch.float32), name
        torch.testing.assert_close(
            actual[name].double(), values, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
        if name.startswith("d "):
            assert not actual[name][:, case.vocab :].any(), "padding columns get no gradient"
    for model in ("policy", "reference"):
        tokens = actual[f"{model} tokens"]
        assert tokens.shape == (case.count, case.k)
        assert all(len(set(row)) == case.k and max(row) < case.vocab for row in tokens.tolist())
        logits = case.tensors()[model == "reference"].double()
        log_p = (logits[:, : case.vocab] / case.temperature).log_softmax(-1)
        torch.testing.assert_close(log_p.gather(1, tokens), actual[f"{model} top"].double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_and_gradients_of_sharded_logits_equal_autograd_over_the_whole_vocabulary(ranks: int) -> None:
    cases = CASES[ranks]
    found = on_ranks(sharded, ranks, list(cases.values()))
    for case, *parts in zip(cases.values(), *found, strict=True):
        check(case, joined(parts))


@pytest.mark.parametrize("name", CASES[2])
def test_values_and_gradients_in_one_process_equal_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[2][name]
    monkeypatch.setitem(vocabulary.CHUNK_ELEMENTS, "cpu", case.chunk_rows * case.columns * case.tp)
    check(case, everything(case, VocabShard(None, 0, case.vocab)))


@pytest.mark.parametrize("k", [8, 9, 17])
def test_more_tokens_than_there_are_cannot_be_picked(k: int) -> None:
    with pytest.raises(ValueError, match=str(k)):
        top_tokens(torch.randn(3, 16), VocabShard(None, 0, 7), 1.0, k)


@pytest.mark.parametrize("forward_kl", [False, True])
def test_logits_far_apart_stay_finite_in_bfloat16(forward_kl: bool) -> None:
    logits = torch.tensor([[0.0, 3e4, -3e4], [1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    shard = VocabShard(None, 0, 3)
    same = whole_vocabulary_kl(logits, logits.detach().clone(), shard, 1.0, forward_kl)
    assert same.tolist() == [0.0, 0.0]
    other = torch.tensor([[0.0, -3e4, 3e4], [1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    apart = whole_vocabulary_kl(logits, other, shard, 1.0, forward_kl)
    assert apart.tolist() == [pytest.approx(59904.0), 0.0]
    logprobs, entropy = token_logprobs(logits[:1], torch.tensor([2]), shard, 1.0, True)
    assert entropy is not None
    assert (logprobs.tolist(), entropy.tolist()) == ([pytest.approx(-59904.0)], [0.0])
    (grad,) = torch.autograd.grad(apart.sum() + logprobs.sum() + entropy.sum(), logits)
    assert grad.isfinite().all()
    assert grad.dtype is torch.bfloat16


def test_values_are_laid_out_row_by_row() -> None:
    mask = torch.tensor([[False, True, False], [False, True, True]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (lay_out(values, mask) * torch.tensor([[7.0, 10.0, 7.0], [7.0, 20.0, 30.0]])).sum().backward()
    assert lay_out(values, mask).tolist() == [[0.0, 1.0, 0.0], [0.0, 2.0, 3.0]]
    assert values.grad is not None
    assert values.grad.tolist() == [10.0, 20.0, 30.0]


ARGUMENTS = {name: torch.zeros(2) for name in ("targets", "logprobs", "old_logprobs", "ref_logprobs")} | dict.fromkeys(
    ("pick_tokens", "pick_logprobs", "ref_logits")
)


@pytest.mark.parametrize("k", [None, 4])
def test_a_divergence_without_what_it_compares_is_refused(k: int | None) -> None:
    divergence = divergence_of(AlgorithmConfig(kl_estimator=KlEstimator.full_forward, kl_topk_tokens=k))
    assert divergence is not None
    with pytest.raises(ValueError, match="needs"):
        divergence(torch.zeros(2, 8), VocabShard(None, 0, 8), 1.0, **ARGUMENTS)


def test_other_estimators_and_no_kl_need_no_distributions() -> None:
    full = AlgorithmConfig(kl_estimator=KlEstimator.full_reverse)
    assert divergence_of(AlgorithmConfig()) is divergence_of(dataclasses.replace(full, kl_coef=0.0)) is None
    assert pickle.loads(pickle.dumps(divergence_of(full))) == divergence_of(full)
