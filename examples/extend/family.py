"""The layers of a model family of your own: EXAONE 4.0, whose norms all come after attention and MLP.

family.yaml names this function, and model.family names family.yaml.
"""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def norms_after_only(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Remove the norms before attention and MLP, and rotary positions in layers without a window between those with one."""
    if config.window_attn_skip_freq is not None:
        config.no_rope_freq = [int(not local) for local in config.window_attn_skip_freq]
    parts = layer.submodules
    if parts.input_layernorm is IdentityOp:
        # Transformer Engine's layers fuse the norms into the next linear layer.
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        parts.self_attention.submodules.linear_qkv = parts.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    return layer
