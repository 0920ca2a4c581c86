"""How Megatron's distributed checkpoints name a weight: layers, and experts within them, are stacked.

A weight of a layer lies under a key without the layer's number, whose tensor has all layers as its first axis; that of
an expert has all experts as the next one. Checkpoints of layers that are not alike number the layers in the key
instead. Here a key and the numbers along its leading axes become the name of one weight, and back.
"""

from __future__ import annotations

import re

LAYERS = "decoder.layers."
LAYER_STATE = "_extra_state"
"""In the key of what a layer of Transformer Engine keeps beside its weights; without FP8 there is nothing in it."""
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_EXPERTS, _LOCAL = ".mlp.experts.experts.", ".mlp.experts.local_experts."
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(?!\d)")
_WRAPPERS = re.compile(r"^(?:model\.|module\.)+")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|master)\.")
_HALVES = {"linear_fc1.weight_w": 0, "linear_fc1.weight_v": 1}
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms lie under the name that Transformer Engine gives them, where it fuses them into the next linear layer."""


def is_weight(key: str) -> bool:
    """Whether what lies under `key` is a weight of the model, not the optimiser's nor a `LAYER_STATE`."""
    return not _OPTIMIZER.match(key) and LAYER_STATE not in key


def unwrapped(key: str) -> str:
    """`key` without what wrappers around the model put before it."""
    return _WRAPPERS.sub("", key)


def leading_axes(key: str) -> int:
    """How many axes count layers and experts."""
    return bool(_STACKED_LAYERS.match(key)) + bool(_STACKED_EXPERTS.search(key))


def half_of(key: str) -> int | None:
    """0 or 1 for a key that holds the gate or the up projection alone, which are one weight elsewhere."""
    return next((half for ending, half in _HALVES.items() if key.endswith(ending)), None)


def name_of(key: str, numbers: tuple[int, ...]) -> str:
    """The weight at `numbers` along the leading axes of `key`, with its global layer and expert numbers."""
    if half_of(key) is not None:
        key = key[:-2]
    rest = iter(numbers)
    if _STACKED_LAYERS.match(key):
        key = f"{LAYERS}{next(rest)}.{key.removeprefix(LAYERS)}"
    if found := _STACKED_EXPERTS.search(key):
        return f"{key[: found.start()]}{_LOCAL}{next(rest)}.{key[found.end() :]}"
    return key.replace(_EXPERTS, _LOCAL)


def key_of(name: str, mixture: bool) -> str:
    """The stacked key of a weight; `mixture`: the layers have experts, before which no norm is fused."""
    if not name.startswith(LAYERS):
        return name
    _, _, rest = name.removeprefix(LAYERS).partition(".")
    rest = re.sub(r"^mlp\.experts\.local_experts\.\d+\.", _EXPERTS.removeprefix("."), rest)
    fused = rest if mixture and rest.startswith("pre_mlp") else _NORMS.get(rest, rest)
    return LAYERS + fused
