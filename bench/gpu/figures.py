"""Scales of the benchmark, and the metrics and outcomes that its parts report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the measured work."""

    shape: str
    """Folder with the model's config.json."""
    sequences: int
    """Sequences per micro-batch."""
    length: int
    """Tokens per sequence."""
    trained: float
    """Share of trained tokens."""
    micro_batches: int
    """Micro-batches per optimiser step."""
    steps: int
    """Timed optimiser steps, after one warm-up step."""
    targets: int
    """Rows of logits for the log-prob kernel."""
    requests: int
    """Concurrent requests to the engine."""
    new_tokens: int
    """Generated tokens per request."""


FULL = Scale(
    shape=str(PROJECT / "configs/model/shapes/qwen2.5-3b-instruct"),
    sequences=8,
    length=2048,
    trained=0.25,
    micro_batches=4,
    steps=3,
    targets=8192,
    requests=256,
    new_tokens=256,
)
"""The published model, with micro-batches of 16,384 tokens; search episodes train about a quarter of their tokens."""
SMALL = Scale(
    shape=str(PROJECT / "examples/searchr1/tiny/policy"),
    sequences=4,
    length=128,
    trained=0.25,
    micro_batches=2,
    steps=1,
    targets=256,
    requests=4,
    new_tokens=8,
)
"""A smoke test that also runs without a GPU."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric and its baseline."""

    part: str
    name: str
    value: float
    unit: str
    baseline: str = ""
    """Name of the baseline; empty without one."""
    ratio: float | None = None
    """`value` over the baseline's value."""
    aim: str = ""
    """Target for `ratio` or `value`, starting with that word; empty without a target."""


class NotHereError(Exception):
    """Raised by a part that cannot run on this machine; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a part: its metrics, or the reason why there are none."""

    figures: tuple[Figure, ...] = ()
    needs: str = ""
    """Requirement that the machine lacks; not a failure."""
    failed: str = ""
    """Error of a failed part."""


def to_json(outcome: Outcome) -> str:
    """Return `outcome` as one line of JSON."""
    return json.dumps(asdict(outcome))


def from_json(line: str) -> Outcome:
    """Return the outcome in `line`, as written by `to_json`."""
    fields: dict[str, Any] = json.loads(line)
    return Outcome(**fields | {"figures": tuple(Figure(**row) for row in fields["figures"])})
