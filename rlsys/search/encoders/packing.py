"""Token sequences to forward passes that cost least: rows of about one length together, or several in one line.

Search queries are a few tokens long, and of unequal length. Padded to the longest of a batch, half of the work is
padding; cut into batches of one length, each batch costs a pass. So short texts share lines: a token attends to the
tokens of its own text, and its position counts from that text's beginning, so the states are those of a text alone. It
needs a model that takes positions and such a mask as they are given (`shares_lines`).

Invariant: a row's tokens stand side by side, in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

Lines = list[list[int]]
"""The rows of each line of a pass."""
_LEAST_WIDTH = 32
"""Of a line that is shared: narrower lines are many, wider ones spend more on attention."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cost of a forward pass on a kind of device, in units of one token more.

    A pass takes at most `most_tokens`, padding included. Of its cost `fixed_tokens` do not depend on its size: a CPU
    reads the weights from memory, a GPU launches kernels.
    """

    most_tokens: int
    fixed_tokens: int


_CPU = PassCost(most_tokens=2048, fixed_tokens=20)
"""Measured on MiniLM with one thread. More than that spills out of a core's cache; the fixed part takes 3 ms, a token
0.14 ms, and both grow alike with a model."""
_GPU = PassCost(most_tokens=65536, fixed_tokens=4096)


def pass_cost(device: torch.device) -> PassCost:
    """The cost of a pass on `device`."""
    return _CPU if device.type == "cpu" else _GPU


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


def clean(texts: Sequence[str]) -> list[str]:
    """The texts as tokenizers take them: `?` in place of what is no character (a lone surrogate)."""
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]


def shares_lines(model: Any) -> bool:
    """True if `model` gives each text the same states when it shares its line; tried with BERT on a CPU.

    Attention other than torch's own takes the mask for numbers to add, and a decoder's is not the one given here.
    """
    return (
        type(model) is transformers.BertModel
        and model.device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and not model.config.is_decoder
    )


def plan(lengths: Sequence[int], cost: PassCost, *, share: bool) -> list[Lines]:
    """The passes that cost least: each row has a line, or with `share` perhaps a part of one."""
    buckets = length_buckets(lengths, cost)
    alone = [[[row] for row in rows.tolist()] for rows in buckets]
    if not share or len(lengths) < 2:
        return alone
    width = max(_LEAST_WIDTH, *lengths)
    lines = first_fit(lengths, width)
    per_pass = max(1, cost.most_tokens // width)
    packed = [lines[first : first + per_pass] for first in range(0, len(lines), per_pass)]
    padded_tokens = sum(len(rows) * lengths[rows[-1]] for rows in buckets)
    cheaper = len(lines) * width + cost.fixed_tokens * len(packed) < padded_tokens + cost.fixed_tokens * len(alone)
    return packed if cheaper else alone


def first_fit(lengths: Sequence[int], width: int) -> Lines:
    """Rows to lines of `width` tokens, the longest rows first, each into the first line that has room for it."""
    lines: Lines = []
    room: list[int] = []
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        line = next((number for number, free in enumerate(room) if free >= lengths[row]), len(lines))
        if line == len(lines):
            lines.append([])
            room.append(width)
        lines[line].append(row)
        room[line] -= lengths[row]
    return lines


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts in lines, ready for a pass. Texts are numbered in the order of their lines.

    [lines, width]: token `ids`, `positions` in the text, `owners` (number of the text; -1 for padding). [texts]:
    `starts` in the flattened lines, `lengths` in tokens.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, lines: Sequence[Sequence[Sequence[int]]], filler: int) -> Batch:
        """The texts (token ids) of each line, from the left, `filler` after the last of a line."""
        width = max(sum(map(len, line)) for line in lines)
        shape = (len(lines), width)
        ids, positions = np.full(shape, filler, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        owners = np.full(shape, -1, dtype=np.int64)
        starts: list[int] = []
        lengths: list[int] = []
        for number, line in enumerate(lines):
            at = 0
            for text in line:
                span = slice(at, at + len(text))
                ids[number, span], positions[number, span] = text, np.arange(len(text))
                owners[number, span] = len(starts)
                starts.append(number * width + at)
                lengths.append(len(text))
                at += len(text)
        return cls(ids, positions, owners, np.array(starts), np.array(lengths))

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arguments of the model."""
        owners = torch.from_numpy(self.owners).to(device)
        inputs = {"input_ids": torch.from_numpy(self.ids).to(device)}
        if len(self.starts) == len(self.ids):
            # Padding comes after the text whatever the tokenizer's side: a causal model then never sees it.
            return inputs | {"attention_mask": (owners >= 0).long()}
        mask = owners[:, None, :, None] == owners[:, None, None, :]
        return inputs | {"position_ids": torch.from_numpy(self.positions).to(device), "attention_mask": mask}

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """[texts, dim], the state of each text's first token, of [lines, width, dim]."""
        return states.flatten(0, 1)[torch.from_numpy(self.starts).to(states.device)]

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """[texts, dim], the state of each text's last token, of [lines, width, dim]."""
        return states.flatten(0, 1)[torch.from_numpy(self.starts + self.lengths - 1).to(states.device)]

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """[texts, dim], the mean over each text's tokens, of [lines, width, dim]."""
        owners = torch.from_numpy(self.owners).to(states.device).flatten()
        taken = owners >= 0
        sums = states.new_zeros(len(self.starts), states.shape[-1])
        sums.index_add_(0, owners[taken], states.flatten(0, 1)[taken])
        return sums / torch.from_numpy(self.lengths).to(states.device).unsqueeze(-1)
