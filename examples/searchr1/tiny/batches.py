"""Turns traces into training batches: one row of tokens per trace, with a weight per target.

Invariant: rows of a batch have about the same length and a batch holds about `budget_tokens` tokens, so that padding is
small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.searchr1.tiny.traces import observation_spans

POOL = 512
"""Number of traces drawn together and sorted by length."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace and the character offset at which the policy's own text begins."""

    text: str
    prompt_chars: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows. `tokens` [batch, seq]; `weights` [batch, seq]: weight of each token as a target."""

    tokens: Tensor
    weights: Tensor


def encode(
    tokenizer: PreTrainedTokenizerFast, traces: Sequence[Trace], context_weight: float
) -> list[tuple[list[int], list[float]]]:
    """Return the token ids and weights of each trace, with the end of text appended.

    The policy's own tokens have weight 1; tokens of the prompt and of observations have weight `context_weight`.
    """
    encoded = tokenizer([trace.text for trace in traces], return_offsets_mapping=True)
    rows = []
    for trace, ids, offsets in zip(traces, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        context = [(0, trace.prompt_chars), *observation_spans(trace.text)]
        weights = [context_weight if any(low <= start < high for low, high in context) else 1.0 for start, _ in offsets]
        rows.append(([*ids, tokenizer.eos_token_id], [*weights, 1.0]))
    return rows


def batches(
    draw: Callable[[], Trace],
    tokenizer: PreTrainedTokenizerFast,
    context_weight: float,
    budget_tokens: int,
    rng: random.Random,
) -> Iterator[Batch]:
    """Yield batches without end, cut from pools of traces sorted by length."""
    while True:
        rows = encode(tokenizer, [draw() for _ in range(POOL)], context_weight)
        rows.sort(key=lambda row: len(row[0]))
        chunks: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in rows:
            if (len(chunks[-1]) + 1) * len(row[0]) > budget_tokens:
                chunks.append([])
            chunks[-1].append(row)
        rng.shuffle(chunks)
        yield from (pad(chunk, tokenizer.pad_token_id) for chunk in chunks)


def pad(rows: Sequence[tuple[list[int], list[float]]], padding: int) -> Batch:
    """Return a batch of `rows`, padded on the right with `padding` at weight 0."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), padding, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, (ids, row_weights) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        weights[index, : len(ids)] = torch.tensor(row_weights)
    return Batch(tokens, weights)
