"""Which kernels a Megatron model is made of, from what was asked for and what the machine has. Pure.

A CPU gets none of the fused ones: the fields are then Megatron's own defaults. What each needs, of Megatron-core 0.16:

- SwiGLU in one kernel (`bias_activation_fusion`), which saves a copy of its input: torch's compiler, on a GPU.
- Rotary positions (`apply_rope_fusion`) and the sorting of tokens by expert (`moe_permute_fusion`): Transformer Engine.
- Weight gradients that a matrix product adds to their float32 buffer (`gradient_accumulation_fusion`): apex, because
  Megatron's output layer has them from there, with Transformer Engine's layers too.

Nothing is to be had from `bias_dropout_fusion` (no biases, no dropout) or `persist_layer_norm` (no LayerNorm).
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.transformer.enums import AttnBackend

from rlsys.config.schema import Layers, ModelConfig
from rlsys.errors import UserError
from rlsys.observe.capabilities import Capabilities

FP8_RECIPE: dict[str, Any] = {
    "fp8": "hybrid",
    # Scales of each tensor as it is: there is no history of maxima that a checkpoint or a forward pass would have to keep.
    "fp8_recipe": "tensorwise",
    # Every micro-batch quantises the weights anew. Megatron would tell Transformer Engine which is the first of a pass:
    # it would keep the copies on the GPU, also while the model is offloaded, and with fused accumulation would have that
    # one overwrite the gradient, which here is a sum over several passes.
    "disable_parameter_transpose_cache": True,
}

_log = logging.getLogger(__name__)


def choose_layers(layers: Layers, here: Capabilities) -> Layers:
    """Resolve `auto`. Raises UserError if `te` is asked for and cannot be."""
    if layers is Layers.auto:
        if here.layers is Layers.local and here.cuda_devices:
            _log.warning("Transformer Engine is not installed: training uses the slower local layers.")
        return here.layers
    if layers is Layers.te and here.layers is not Layers.te:
        lacks = "there is no GPU" if here.transformer_engine else "transformer_engine is not installed"
        raise UserError(f"model.layers is te but {lacks}; install what is missing or use local.")
    return layers


def kernel_settings(model: ModelConfig, layers: Layers, here: Capabilities) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; `layers` is resolved. Raises UserError for FP8 that cannot be."""
    te = layers is Layers.te
    if model.fp8 and not te:
        raise UserError("model.fp8 is true but the layers are not Transformer Engine's; set it to false.")
    if not here.cuda_devices:
        return {"batch_p2p_comm": False}  # Which gloo has not.
    fusions = {
        "bias_activation_fusion": True,
        "apply_rope_fusion": here.transformer_engine is not None,
        "moe_permute_fusion": te,
        "gradient_accumulation_fusion": here.apex,
    }
    return {
        "batch_p2p_comm": True,
        # Local layers have an attention of their own.
        "attention_backend": AttnBackend[model.attention] if te else AttnBackend.auto,
        **(fusions if model.fusions else {}),
        **(FP8_RECIPE if model.fp8 else {}),
    }
