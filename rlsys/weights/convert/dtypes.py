"""Numeric types: which a model's tensors have, and how one becomes another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.hf_io import TensorSpec

WRITTEN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be converted to, by name."""


def chosen(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None keeps each tensor's own. Raises UserError for an unknown one."""
    if name is None:
        return None
    if name not in WRITTEN:
        raise UserError(f"dtype is {name}; give one of {', '.join(WRITTEN)}.")
    return WRITTEN[name]


def name_of(dtype: torch.dtype) -> str:
    """As a config.json names it."""
    return str(dtype).removeprefix("torch.")


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another dtype, rounded to nearest. Raises UserError if a number becomes infinite, or counts."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if not tensor.is_floating_point():
        raise UserError(
            f"{name} is {name_of(tensor.dtype)}, which another dtype would not say the same in; leave --dtype out, "
            "or use weights that are not quantised."
        )
    made = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((made.isinf() & tensor.isfinite()).any()):
        raise UserError(f"{name} has numbers that {name_of(dtype)} cannot hold; give another --dtype.")
    return made


def most(specs: Iterable[TensorSpec]) -> torch.dtype:
    """The dtype that most bytes have: what a config calls that of the model."""
    counts: Counter[torch.dtype] = Counter()
    for spec in specs:
        counts[spec.dtype] += spec.nbytes
    return counts.most_common(1)[0][0]
