"""Checks the kernels over a large vocabulary against torch's log_softmax of all logits in float32, and times both.

The kernels are in `rlsys.trainer.model.logprobs`: log-probs of the targets, with and without entropy, the top k
and their log-probs, and the KL of two distributions in both directions. Gradients are compared by

    max over elements of |found - expected| / (|expected| + mean |expected|).

Both gradients are rounded to bfloat16. Neighbours in bfloat16 differ by at most 2^-7 of their size, and the rounded
gradients may be two neighbours apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from bench.gpu.figures import Figure, Setting, at_most, compared
from rlsys.trainer.model.logprobs import (
    VocabShard,
    logprobs_at,
    token_logprobs,
    top_tokens,
    whole_vocabulary_kl,
)
from rlsys.weights.weight_map import read_architecture

REPEATS, K = 5, 32
VALUE_LIMIT, GRADIENT_LIMIT = 1e-4, 2.0**-6
"""Largest differences of values, in nats, and of gradients, in the measure above."""
_ROWS = 256
"""Rows of gradients that are compared at a time, in float32."""
Kernel = Callable[[Tensor], Tensor]
"""Logits [targets, vocabulary] -> values [targets, any]."""


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield differences of values and gradients, seconds and memory of each kernel and its baseline."""
    torch.manual_seed(0)
    vocab = read_architecture(str(setting.scale.shape)).vocab
    shape = (setting.scale.targets, vocab)
    logits, reference = (torch.randn(shape, device=setting.torch_device, dtype=torch.bfloat16) for _ in range(2))
    tokens = torch.randint(vocab, shape[:1], device=setting.torch_device)
    shard = VocabShard(group=None, start=0, valid=vocab)
    picks, best = top_tokens(logits, shard, 1.0, K)
    yield at_most(f"top {K}: values", float((best - _plain(logits).topk(K).values).abs().max()), VALUE_LIMIT, "nats")
    for name, ours, plain in _kernels(shard, tokens, picks, reference):
        weights = torch.randn_like(ours(logits))
        found, expected = (_value_and_gradient(kernel, logits, weights) for kernel in (ours, plain))
        yield at_most(f"{name}: values", float((found[0] - expected[0]).abs().max()), VALUE_LIMIT, "nats")
        yield at_most(f"{name}: gradients", gradient_difference(found[1], expected[1]), GRADIENT_LIMIT)
        del found, expected
        fast, slow = (_cost(kernel, logits, weights, setting.on_gpu) for kernel in (ours, plain))
        yield compared(f"{name}: time", fast[0], "s", "log_softmax", slow[0], (0, 1))
        if setting.on_gpu:
            memory = (fast[1] / 2**30, slow[1] / 2**30)
            yield compared(f"{name}: memory", memory[0], "GiB", "log_softmax", memory[1], (0, 0.5))


def _plain(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _kernels(
    shard: VocabShard, tokens: Tensor, picks: Tensor, reference: Tensor
) -> Iterator[tuple[str, Kernel, Kernel]]:
    """Yield name, kernel and baseline; the baselines share no code with the kernels."""

    def with_entropy(logits: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(logits, tokens, shard, 1.0, with_entropy=True)
        assert entropy is not None
        return torch.stack([logprobs, entropy], 1)

    def plain_with_entropy(logits: Tensor) -> Tensor:
        log_p = _plain(logits)
        return torch.stack([log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], 1)

    def at(columns: Tensor) -> tuple[Kernel, Kernel]:
        return (
            lambda logits: logprobs_at(logits, columns, shard, 1.0),
            lambda logits: _plain(logits).gather(1, columns),
        )

    def kl(forward: bool) -> tuple[Kernel, Kernel]:
        def plain(logits: Tensor) -> Tensor:
            pair = (_plain(logits), _plain(reference))
            return kl_div(*(pair if forward else pair[::-1]), reduction="none", log_target=True).sum(-1, keepdim=True)

        return lambda logits: whole_vocabulary_kl(logits, reference, shard, 1.0, forward)[:, None], plain

    yield "log-probs", *at(tokens[:, None])
    yield "log-probs and entropy", with_entropy, plain_with_entropy
    yield f"log-probs of the top {K}", *at(picks)
    yield "KL(policy || reference)", *kl(forward=False)
    yield "KL(reference || policy)", *kl(forward=True)


def _value_and_gradient(kernel: Kernel, logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    value = kernel(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, weights)
    return value.detach(), gradient


def gradient_difference(found: Tensor, expected: Tensor) -> float:
    """Return the measure of the module's docstring for two gradients [rows, columns]."""
    pairs = list(zip(found.split(_ROWS), expected.split(_ROWS), strict=True))
    mean = sum(float(part.float().abs().sum()) for _, part in pairs) / expected.numel()
    return max(
        float(((ours.float() - theirs.float()).abs() / (theirs.float().abs() + mean)).max()) for ours, theirs in pairs
    )


def _cost(kernel: Kernel, logits: Tensor, weights: Tensor, on_gpu: bool) -> tuple[float, int]:
    """Return the seconds of the fastest forward and backward pass, and the peak bytes allocated besides the logits."""
    best, peak = float("inf"), 0
    for _ in range(REPEATS):
        held = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        started = time.perf_counter()
        _value_and_gradient(kernel, logits, weights)
        if on_gpu:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - held)
        best = min(best, time.perf_counter() - started)
    return best, peak
