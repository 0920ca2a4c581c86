"""Log-probs, entropy and their gradients equal torch's log_softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from rlsys.trainer.model import logprobs as vocabulary
from rlsys.trainer.model.logprobs import VocabShard, lay_out, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_log_softmax(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vocab, padded, count = 23, 32, 150
    # 21 targets: several chunks, and a last one that is not full.
    monkeypatch.setitem(vocabulary.CHUNK_ELEMENTS, "cpu", 21 * padded)
    logits = (4 * torch.randn(count, padded)).requires_grad_()
    targets = torch.randint(0, vocab, (count,))
    weight_l, weight_h = torch.randn(2, count).unbind()

    def gradient(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        total = (weight_l * logprobs + weight_h * entropy).sum()
        (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
        return grad

    shard = VocabShard(None, 0, vocab)
    logprobs, entropy = token_logprobs(logits, targets, shard, temperature, with_entropy=True)
    assert entropy is not None
    actual = gradient(logprobs, entropy)
    alone, nothing = token_logprobs(logits, targets, shard, temperature)
    assert nothing is None
    parts = (logprobs, entropy, alone)
    of_each = [torch.autograd.grad(part.sum(), logits, retain_graph=True)[0] for part in parts]

    log_p = torch.log_softmax(logits[:, :vocab].double() / temperature, dim=-1)
    expected_l = log_p.gather(-1, targets[:, None])[:, 0].float()
    expected_h = -(log_p.exp() * log_p).sum(-1).float()
    torch.testing.assert_close(logprobs, expected_l, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone, expected_l, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_h, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, gradient(expected_l, expected_h), rtol=1e-4, atol=1e-5)
    for grad, part in zip(of_each, (expected_l, expected_h, expected_l), strict=True):
        expected = torch.autograd.grad(part.sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert not actual[..., vocab:].any(), "padding columns have no probability and get no gradient"


def test_logits_far_apart_stay_finite_in_bfloat16() -> None:
    logits = torch.tensor([[0.0, 3e4, -3e4]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2]), VocabShard(None, 0, 3), 1.0, True)
    assert entropy is not None
    assert logprobs.tolist() == [pytest.approx(-59904.0)]
    assert entropy.tolist() == [0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.dtype == torch.bfloat16


def test_no_targets_give_no_log_probs_and_no_gradient() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.zeros(0, dtype=torch.long), VocabShard(None, 0, 8), 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert logits.grad is not None


def test_values_are_laid_out_row_by_row() -> None:
    mask = torch.tensor([[False, True, False], [False, True, True]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (lay_out(values, mask) * torch.tensor([[7.0, 10.0, 7.0], [7.0, 20.0, 30.0]])).sum().backward()
    assert lay_out(values, mask).tolist() == [[0.0, 1.0, 0.0], [0.0, 2.0, 3.0]]
    assert values.grad is not None
    assert values.grad.tolist() == [10.0, 20.0, 30.0]
