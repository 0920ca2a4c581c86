"""Scales of the benchmark, the setting of a part, and the figures that parts report.

Loads no torch, so that `python -m bench.gpu` can say that torch is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsys.config.schema import Device, Dtype

PROJECT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 32
"""Tokens of a prompt of the engine."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the measured work."""

    shape: Path
    """Folder with the model's config.json."""
    sequences: tuple[int, ...]
    """Sequences per micro-batch; training steps are measured with each."""
    length: int
    """Tokens per sequence."""
    trained: float
    """Share of trained tokens."""
    micro_batches: int
    """Micro-batches per optimiser step."""
    steps: int
    """Timed optimiser steps, after one warm-up step."""
    targets: int
    """Rows of logits for the log-prob kernels."""
    hashed_bytes: int
    """Bytes hashed per timed call."""
    bucket_bytes: int
    """Size of the largest bucket of a weight transfer."""
    requests: tuple[int, ...]
    """Concurrent requests to the engine; its speed is measured with each."""
    new_tokens: int
    """Generated tokens per request."""


FULL = Scale(
    shape=PROJECT / "configs/model/shapes/qwen2.5-3b-instruct",
    sequences=(4, 8),
    length=2048,
    trained=0.25,
    micro_batches=4,
    steps=3,
    targets=8192,
    hashed_bytes=4 * 1024**3,
    bucket_bytes=1024**3,
    requests=(1, 256, 512),
    new_tokens=256,
)
"""The published model, with micro-batches of 8,192 and 16,384 tokens; search episodes train about a quarter of them."""
SMALL = Scale(
    shape=PROJECT / "examples/searchr1/tiny/policy",
    sequences=(2, 4),
    length=128,
    trained=0.25,
    micro_batches=2,
    steps=1,
    targets=256,
    hashed_bytes=16 * 1024**2,
    bucket_bytes=2 * 1024**2,
    requests=(1, 4),
    new_tokens=64,
)
"""A smoke test that also runs without a GPU."""
SCALES = {"full": FULL, "small": SMALL}


def work_of(scale: Scale) -> dict[str, Any]:
    """Return the sizes of the measured work, for those who compare figures with formulas."""
    return {**asdict(scale), "shape": scale.shape.name, "prompt_tokens": PROMPT_TOKENS}


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions under which a part measures."""

    part: str
    scale: Scale
    device: Device
    model: Path
    """Folder of the model with random weights."""

    @property
    def on_gpu(self) -> bool:
        """True if the part measures a GPU."""
        return self.device is Device.gpu

    @property
    def torch_device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> Dtype:
        """Type of weights and activations in training and in the engine."""
        return Dtype.bfloat16 if self.on_gpu else Dtype.float32


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, with its baseline and its target if it has them."""

    name: str
    value: float | str
    unit: str = ""
    baseline: str = ""
    """Name of the baseline; empty without one."""
    ratio: float | None = None
    """`value` over the baseline's value."""
    target: str = ""
    """Target for `value` or `ratio`; empty without a target."""
    met: bool | None = None
    """True if the target is met; None without a target."""
    required: bool = False
    """True for a check: the part fails unless its target is met. A missed target of speed or memory is no failure."""


def at_most(name: str, value: float, limit: float, unit: str = "") -> Figure:
    """Return a check that `value` is at most `limit`; NaN is not."""
    return Figure(name, value, unit, target=f"at most {limit:.3g}", met=bool(value <= limit), required=True)


def holds(name: str, truth: bool) -> Figure:
    """Return a check of a yes-or-no question."""
    return Figure(name, "yes" if truth else "no", target="yes", met=bool(truth), required=True)


def compared(
    name: str, value: float, unit: str, baseline: str, reference: float, bounds: tuple[float, float] | None = None
) -> Figure:
    """Return `value` over its `reference`, which is named `baseline`; `bounds` are the least and most for their ratio.

    The bounds are a target of speed or memory, not a check.
    """
    ratio = value / reference
    if bounds is None:
        return Figure(name, value, unit, baseline, ratio)
    least, most = bounds
    return Figure(name, value, unit, baseline, ratio, _range(least, most), least <= ratio <= most)


def _range(least: float, most: float) -> str:
    if most == float("inf"):
        return f"ratio of at least {least:g}"
    return f"ratio of at most {most:g}" if least <= 0 else f"ratio of {least:g} to {most:g}"


class NotHereError(Exception):
    """Raised by a part that cannot run on this machine; the message says what it needs."""


@dataclass(slots=True)
class Outcome:
    """Result of a part: its figures, and the reason if it was skipped or failed."""

    figures: Sequence[Figure] = ()
    seconds: float = 0.0
    skipped: str = ""
    """Requirement that the machine lacks; not a failure."""
    failed: str = ""
    """Reason of a failure, in one sentence. Figures measured before it are kept."""

    @property
    def broken(self) -> list[str]:
        """Names of the checks that failed."""
        return [figure.name for figure in self.figures if figure.required and not figure.met]
