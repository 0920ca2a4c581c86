"""What the parts of the benchmark share: how large they are, and how a figure is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    shape: str
    """Folder with the config.json of the model."""
    sequences: int
    """Of one micro-batch."""
    length: int
    """Tokens of each."""
    trained: float
    """Share of the tokens that are trained."""
    micro_batches: int
    """Of one optimiser step."""
    steps: int
    """Optimiser steps that are timed, after one that is not."""
    targets: int
    """Rows of logits of the log-prob kernel."""
    requests: int
    """To the engine."""
    new_tokens: int
    """Of each request."""


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
"""The published model; micro-batches of 16,384 tokens, of which a search trajectory trains about a quarter."""
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
"""For a look at whether it runs, on a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, beside what it is compared with."""

    part: str
    name: str
    value: float
    unit: str
    baseline: str = ""
    """What `ratio` is over; empty without one."""
    ratio: float | None = None
    """The value over the baseline's."""
    aim: str = ""
    """What is wanted, beginning with what it is of: `ratio` or `value`; empty without an aim."""


class NotHereError(Exception):
    """A part cannot be measured on this machine; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part: its figures, or in one of the others why there are none."""

    figures: tuple[Figure, ...] = ()
    needs: str = ""
    """What the machine lacks, which is no failure."""
    failed: str = ""


def to_json(outcome: Outcome) -> str:
    """One line."""
    return json.dumps(asdict(outcome))


def from_json(line: str) -> Outcome:
    """The outcome of such a line."""
    fields: dict[str, Any] = json.loads(line)
    return Outcome(**fields | {"figures": tuple(Figure(**row) for row in fields["figures"])})
