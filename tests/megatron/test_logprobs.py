"""Log-probs, entropy and their gradients equal torch's log_softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from rlsys.megatron import logprobs as module
from rlsys.megatron.logprobs import VocabShard, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_log_softmax(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vocab, padded, seq = 23, 32, 50
    # 21 positions: several chunks, whose edges fall inside rows, and a last one that is not full.
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 21 * padded)
    logits = (4 * torch.randn(3, seq, padded)).requires_grad_()
    tokens = torch.randint(0, vocab, (3, seq))
    weight_l, weight_h = torch.randn(2, 3, seq).unbind()

    def gradient(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        total = (weight_l * logprobs + weight_h * entropy).sum()
        (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
        return grad

    logprobs, entropy = token_logprobs(logits, tokens, VocabShard(None, 0, vocab), temperature)
    actual = gradient(logprobs, entropy)
    of_each = [torch.autograd.grad(part.sum(), logits, retain_graph=True)[0] for part in (logprobs, entropy)]

    log_p = torch.log_softmax(logits[:, :-1, :vocab].double() / temperature, dim=-1)
    expected_l = torch.nn.functional.pad(log_p.gather(-1, tokens[:, 1:, None])[..., 0], (1, 0)).float()
    expected_h = torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), (1, 0)).float()
    torch.testing.assert_close(logprobs, expected_l, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_h, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, gradient(expected_l, expected_h), rtol=1e-4, atol=1e-5)
    for grad, part in zip(of_each, (expected_l, expected_h), strict=True):
        expected = torch.autograd.grad(part.sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert not actual[..., vocab:].any(), "padding columns have no probability and get no gradient"


def test_logits_far_apart_stay_finite_in_bfloat16() -> None:
    logits = torch.tensor([[[0.0, 3e4, -3e4], [0.0, 0.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 2]]), VocabShard(None, 0, 3), 1.0)
    assert logprobs.tolist() == [[0.0, pytest.approx(-59904.0)]]
    assert entropy.tolist() == [[0.0, 0.0]]
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.dtype == torch.bfloat16
