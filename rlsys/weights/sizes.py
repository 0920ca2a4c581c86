"""How large a bucket must be, read from a model's config.json alone: no torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.config.schema import Dtype

ALIGNMENT = 64
"""Bytes; every tensor of a bucket starts at a multiple, so that it can be viewed in its own dtype."""
_ITEM_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


def aligned(nbytes: int) -> int:
    """`nbytes` up to the next multiple of `ALIGNMENT`: what a tensor takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def largest_tensor_bytes(model_path: str | Path, dtype: Dtype) -> int:
    """Bytes of the smallest bucket that the weights of the Hugging Face folder `model_path` can travel in.

    Tensors that are one parameter in training (query, key and value; gate and up) travel together, so they
    count together. `dtype` is the one that is trained in. The folder is one that `read_architecture` takes.
    """
    shape = json.loads((Path(model_path) / "config.json").read_text())
    item = _ITEM_BYTES[dtype]
    return max(sum(aligned(count * item) for count in parts) for parts in _parameters(shape))


def _parameters(shape: dict[str, Any]) -> Iterator[list[int]]:
    """The numbers in the tensors of each large parameter."""
    hidden, heads, ffn = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"]
    head_dim = shape.get("head_dim") or hidden // heads
    kv_heads = shape.get("num_key_value_heads") or heads
    yield [shape["vocab_size"] * hidden]
    yield [rows * head_dim * hidden for rows in (heads, kv_heads, kv_heads)]
    yield [heads * head_dim * hidden]
    yield [ffn * hidden, ffn * hidden]
