"""Functions that change the layers of a family wrongly; the tests write the files that name them."""

from __future__ import annotations

from typing import Any

import torch

from rlsys.trainer.model.layers import RMSNorm


def fails(layer: Any, config: Any) -> Any:  # noqa: ARG001
    raise ZeroDivisionError("one\ntwo")


def returns_nothing(layer: Any, config: Any) -> Any:
    """Changes the layer in place, and forgets to return it."""


def cannot_be_built(layer: Any, config: Any) -> Any:  # noqa: ARG001
    layer.submodules.pre_mlp_layernorm = torch.nn.Linear
    return layer


def adds_a_tensor(layer: Any, config: Any) -> Any:  # noqa: ARG001
    layer.submodules.self_attention.submodules.q_layernorm = RMSNorm
    return layer


def changes_nothing(layer: Any, config: Any) -> Any:  # noqa: ARG001
    return layer


def changes_a_shape(layer: Any, config: Any) -> Any:
    config.ffn_hidden_size *= 2
    return layer


def takes_one(layer: Any) -> Any:
    return layer


def asks_for(layer: Any, config: Any, *, share: float) -> Any:  # noqa: ARG001
    return layer


not_a_function = 3
