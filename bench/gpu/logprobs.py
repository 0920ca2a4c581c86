"""Compares the log-prob kernel over a large vocabulary with a float32 log_softmax of all logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.figures import Figure, Scale
from rlsys.config.schema import Device
from rlsys.trainer.model.logprobs import VocabShard, token_logprobs
from rlsys.weights.weight_map import read_architecture

REPEATS = 5
Score = Callable[[Tensor, Tensor], Tensor]


def measure(scale: Scale, device: Device, folder: Path) -> list[Figure]:
    """Return time and memory of a forward and backward pass with both, and the largest difference of the results."""
    on_gpu = device is Device.gpu
    where = torch.device("cuda" if on_gpu else "cpu")
    vocab = read_architecture(str(folder)).vocab
    torch.manual_seed(0)
    logits = torch.randn(scale.targets, vocab, device=where, dtype=torch.bfloat16)
    targets = torch.randint(vocab, (scale.targets,), device=where)
    shard = VocabShard(group=None, start=0, valid=vocab)

    def ours(values: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(values, tokens, shard, 1.0)[0]

    def plain(values: Tensor, tokens: Tensor) -> Tensor:
        return values.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    apart = float((ours(logits, targets) - plain(logits, targets)).abs().max())
    fast, slow = _run(ours, logits, targets, on_gpu), _run(plain, logits, targets, on_gpu)
    figures = [
        Figure("logprobs", "seconds", fast[0], "s", "log_softmax", fast[0] / slow[0], "ratio of at most 1"),
        Figure("logprobs", "largest difference", apart, "nats"),
    ]
    if on_gpu:
        figures.append(
            Figure(
                "logprobs",
                "memory",
                fast[1] / 2**30,
                "GiB",
                "log_softmax",
                fast[1] / slow[1],
                "ratio of at most 0.5",
            )
        )
    return figures


def _run(score: Score, logits: Tensor, targets: Tensor, on_gpu: bool) -> tuple[float, int]:
    """Return the seconds of the fastest of `REPEATS` passes, and the peak bytes allocated besides the logits."""
    values = logits.requires_grad_()
    best, peak = float("inf"), 0
    for _ in range(REPEATS):
        values.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        started = time.perf_counter()
        score(values, targets).sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - held)
        best = min(best, time.perf_counter() - started)
    return best, peak
