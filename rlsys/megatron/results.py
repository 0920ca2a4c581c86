"""What the Megatron workers return. Plain data: a driver can import this without Megatron."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Of one micro-batch. Entry [b, t] is log p(token t | tokens before it); column 0 is 0."""

    policy: NDArray[np.float32]
    """[batch, seq]"""
    reference: NDArray[np.float32] | None
    """[batch, seq]; None without a reference."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """One data-parallel rank's share of a mini-batch."""

    stats: dict[str, float]
    """What the loss returned, joined over micro-batches; empty except where `Place.reports` is true."""
    tokens: int
    """Tokens worked on, padding left out; the same on all ranks of the data-parallel rank."""
    padded_tokens: int
    """Tokens worked on, padding included."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One optimiser step; the same on every rank."""

    step: int
    """How many optimiser steps there have been."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """The rate of this step."""
    trained_tokens: int
    """Tokens that the gradient is a mean over."""
