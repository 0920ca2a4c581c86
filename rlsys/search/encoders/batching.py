"""Token sequences to padded batches: rows of about one length together, so that little of a pass is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a forward pass costs on a kind of device, in units of one token more."""

    most_tokens: int
    """Of one pass, padding included."""
    fixed_tokens: int
    """Cost of a pass that does not depend on its size: on a CPU the weights are read from memory, on a GPU
    kernels are launched."""


_CPU = PassCost(most_tokens=2048, fixed_tokens=20)
"""Measured on MiniLM with one thread. More than that spills out of a core's cache; the fixed part takes 3 ms, a
token 0.14 ms, and both grow alike with a model."""
_DEVICE = PassCost(most_tokens=65536, fixed_tokens=4096)


def pass_cost(device: torch.device) -> PassCost:
    """What a pass costs on `device`."""
    return _CPU if device.type == "cpu" else _DEVICE


def length_buckets(lengths: Sequence[int], cost: PassCost) -> list[NDArray[np.int64]]:
    """Cut rows, shortest first, into the passes that cost least: padding against the fixed part of a pass.

    Each row is in exactly one pass. A pass stays within `cost.most_tokens`, padding included, but for a row that is
    longer than that, which has one of its own.
    """
    order = np.argsort(lengths, kind="stable")
    widths, first_rows = np.unique(np.asarray(lengths)[order], return_index=True)
    ends = np.append(first_rows[1:], len(order))
    # least[k]: cost of all rows of the k smallest widths; begins[k]: the first width of the last bucket of these.
    least = np.zeros(len(widths) + 1)
    begins = np.zeros(len(widths) + 1, dtype=np.int64)
    for last, width in enumerate(widths):
        tokens = (ends[last] - first_rows[: last + 1]) * width
        costs = least[: last + 1] + tokens + cost.fixed_tokens * np.ceil(tokens / cost.most_tokens)
        begins[last + 1] = np.argmin(costs)
        least[last + 1] = costs[begins[last + 1]]
    buckets: list[NDArray[np.int64]] = []
    end = len(widths)
    while end:
        begin = int(begins[end])
        rows = order[first_rows[begin] : ends[end - 1]]
        most_rows = max(1, cost.most_tokens // int(widths[end - 1]))
        buckets[:0] = [rows[first : first + most_rows] for first in range(0, len(rows), most_rows)]
        end = begin
    return buckets


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
