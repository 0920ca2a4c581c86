"""Token sequences to padded batches: rows of about one length together, so that little of a pass is padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_CPU_BATCH_TOKENS = 2048
"""Most tokens, padding included, of one forward pass: more spills out of a core's cache and is slower."""
_DEVICE_BATCH_TOKENS = 65536


def budget_tokens(device: torch.device) -> int:
    """Most tokens, padding included, of one forward pass on `device`."""
    return _CPU_BATCH_TOKENS if device.type == "cpu" else _DEVICE_BATCH_TOKENS


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> list[NDArray[np.int64]]:
    """Cut rows, shortest first, into batches whose padded size stays within `budget_tokens`.

    A row longer than the budget makes a batch of its own. Each row is in exactly one batch.
    """
    batches: list[NDArray[np.int64]] = []
    order = np.argsort(lengths, kind="stable")
    first = 0
    for last, row in enumerate(order):
        if last > first and (last - first + 1) * lengths[row] > budget_tokens:
            batches.append(order[first:last])
            first = last
    if len(order):
        batches.append(order[first:])
    return batches


def pad(sequences: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """[batch, longest] int64: each sequence from the left, `filler` after its end."""
    width = max(map(len, sequences))
    return torch.tensor([[*sequence, *[filler] * (width - len(sequence))] for sequence in sequences])


def mask_of(lengths: Sequence[int]) -> torch.Tensor:
    """[batch, longest] int64: 1 where there is a token, 0 where there is padding."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def clean(texts: Sequence[str]) -> list[str]:
    """The texts as tokenizers take them: `?` in place of what is no character (a lone surrogate)."""
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
