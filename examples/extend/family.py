"""The layers of a model family of your own: GLM-4, which also normalises what attention and MLP add to their input.

family.yaml names this function, and model.family names family.yaml.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from rlsys.trainer.model.layers import RMSNorm


def norms_after(layer: ModuleSpec, config: TransformerConfig, *, interleaved: bool = True) -> ModuleSpec:
    """Add the norms; with `interleaved`, a rotary position turns neighbouring dimensions instead of the two halves."""
    config.rotary_interleaved = interleaved
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_proj = normalised(attention.linear_proj)
    mlp.linear_fc2 = normalised(mlp.linear_fc2)
    return layer


def normalised(linear: type) -> type:
    """Return a class like `linear`, a row-parallel layer, with a norm of its output."""

    class Normalised(linear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.norm_after = RMSNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, *inputs: Any) -> Any:
            output, bias = super().forward(*inputs)
            return self.norm_after(output), bias

    return Normalised
