"""How large a bucket must be, read from a model's config.json alone: no torch, no weights."""

from __future__ import annotations

from math import prod
from pathlib import Path

from rlsys.config.schema import Dtype
from rlsys.weights.families import FAMILIES, read_architecture, rules_of

ALIGNMENT = 64
"""Bytes; every tensor of a bucket starts at a multiple, so that it can be viewed in its own dtype."""
_ITEM_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


def aligned(nbytes: int) -> int:
    """`nbytes` up to the next multiple of `ALIGNMENT`: what a tensor takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def largest_tensor_bytes(model_path: str | Path, dtype: Dtype, folder: Path = FAMILIES) -> int:
    """Bytes of the smallest bucket that the weights of the Hugging Face folder `model_path` can travel in.

    Tensors that are one parameter in training (query, key and value; gate and up of an expert) travel together,
    so they count together. `dtype` is the one that is trained in. Raises UserError as `read_architecture` does.
    """
    item = _ITEM_BYTES[dtype]
    rules = rules_of(read_architecture(model_path, folder), folder=folder)
    return max(sum(aligned(prod(shape) * item) for shape in rule.shapes) for rule in rules)
