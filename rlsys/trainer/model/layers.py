"""The layers that a model is built from: Transformer Engine's, or Megatron's own with two replacements.

Megatron's own ("local") layers lack a norm that allows sequence parallelism and an attention that does not hold a
matrix of [seq, seq]. Weights and checkpoints of the two kinds are interchangeable. A mixture of experts is routed as
transformers and SGLang route it, with either kind.

The fused kernels go by what was asked for and what the machine has. A CPU gets none: the fields are then Megatron's own
defaults. What each needs, of Megatron-core 0.16:

- SwiGLU in one kernel (`bias_activation_fusion`), which saves a copy of its input: torch's compiler, on a GPU.
- Rotary positions (`apply_rope_fusion`) and the sorting of tokens by expert (`moe_permute_fusion`): Transformer Engine.
- Weight gradients that a matrix product adds to their float32 buffer (`gradient_accumulation_fusion`): apex, because
  Megatron's output layer has them from there, with Transformer Engine's layers too.

Nothing is to be had from `bias_dropout_fusion` (no biases, no dropout) or `persist_layer_norm` (no LayerNorm).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from rlsys.config.schema import Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.environment import Capabilities
from rlsys.trainer.batches import columns_of
from rlsys.weights.weight_map import Architecture, stage_layers

FP8_RECIPE: dict[str, Any] = {
    "fp8": "hybrid",
    # Scales of each tensor as it is: there is no history of maxima that a checkpoint or a forward pass would have to
    # keep.
    "fp8_recipe": "tensorwise",
    # Every micro-batch quantises the weights anew. Megatron would tell Transformer Engine which is the first of a pass:
    # it would keep the copies on the GPU, also while the model is offloaded, and with fused accumulation would have
    # that one overwrite the gradient, which here is a sum over several passes.
    "disable_parameter_transpose_cache": True,
}

_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_log = logging.getLogger(__name__)


def choose_layers(layers: Layers, here: Capabilities) -> Layers:
    """Resolve `auto`. Raises UserError if `te` is asked for and cannot be."""
    if layers is Layers.auto:
        if here.layers is Layers.local and here.cuda_devices:
            _log.warning("Transformer Engine is not installed: training uses the slower local layers.")
        return here.layers
    if layers is Layers.te and here.layers is not Layers.te:
        lacks = "there is no GPU" if here.transformer_engine else "transformer_engine is not installed"
        raise UserError(
            f"model.layers is te but {lacks}; install what is missing or use local.",
            code="not_installed",
            key="model.layers",
        )
    return layers


def kernel_settings(model: ModelConfig, layers: Layers, here: Capabilities) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; `layers` is resolved. Raises UserError for FP8 that cannot be."""
    te = layers is Layers.te
    if model.fp8 and not te:
        raise UserError(
            "model.fp8 is true but the layers are not Transformer Engine's; set it to false.",
            code="conflict",
            key="model.fp8",
        )
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


def transformer_config(
    architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, kernels: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's config of the model; `kernels` are `kernel_settings`. Raises UserError if TP or experts forbid it."""
    _check_tp(architecture, parallel)
    layout = None  # of stages that hold as many layers each
    if parallel.pp_layers is not None:
        layout = [["decoder"] * len(s) for s in stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    dtype = torch.bfloat16 if model.dtype is Dtype.bfloat16 else torch.float32
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=model.dtype is Dtype.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_layout=layout,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        # Megatron asks for this dispatcher with variable lengths, also for dense models.
        moe_token_dispatcher_type="alltoall",
        **_experts_config(architecture, parallel),
        # The values are overwritten, but only then are weights marked as cut by TP, and the gradient norm counts each
        # shard.
        perform_initialization=True,
        # Whoever learns divides itself, once; see `Learner`.
        calculate_per_token_loss=True,
        **(_FULL_RECOMPUTE if model.recompute else {}),
        **kernels,
    )


def _check_tp(architecture: Architecture, parallel: ParallelConfig) -> None:
    tp, kv_heads = parallel.tp, architecture.kv_heads
    cut = {"attention heads": architecture.heads} | ({} if architecture.experts else {"MLP width": architecture.ffn})
    for key, size in cut.items():
        if size % tp:
            raise UserError(
                f"tp is {tp}, which does not divide the model's {size} {key}; lower it.", code="mismatch", key="tp"
            )
    if max(tp, kv_heads) % min(tp, kv_heads):
        raise UserError(
            f"tp is {tp} and the model has {kv_heads} key-value heads: one must divide the other.",
            code="mismatch",
            key="tp",
        )
    if architecture.experts and tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"tp is {tp} and the model has experts: set sequence_parallel to true, or every one of the {tp} ranks would "
            "send all tokens to the experts.",
            code="conflict",
            key="sequence_parallel",
        )


def _experts_config(architecture: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    if not architecture.experts:
        return {}
    return {
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn,
        "moe_router_pre_softmax": not architecture.norm_topk,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
    }


def block_spec(config: TransformerConfig, layers: Layers) -> Any:
    """The spec that GPTModel builds its decoder from; `layers` is resolved."""
    if layers is Layers.te:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
        )
        return _routed(layer, config)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[_routed(layer, config)] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )


def _routed(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """`layer`, with our router if it has experts."""
    if config.num_moe_experts is not None:
        layer.submodules.mlp.submodules.router = ExpertRouter
        # Transformer Engine fuses this norm into a dense MLP alone; in checkpoints it is named as there.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return layer


class ExpertRouter(Router):
    """Sends each token to its k most likely experts: none is dropped, no loss balances them.

    In the dtypes of transformers' Qwen3MoeTopKRouter: logits in the model's, probabilities in float32 over all experts,
    their shares among the k (if `norm_topk_prob`, not `moe_router_pre_softmax`) rounded to the model's.
    """

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`logits` [tokens, experts]; of the same shape, weights (0 for experts not chosen), and who is chosen."""
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.config.moe_router_topk, dim=-1)
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        spread = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        return spread, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def forward(self, input: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """As `routing`, of `input` [seq, batch, hidden], flattened."""
        return self.routing(linear(input.flatten(0, 1), self.weight))


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient reduction that sequence parallelism needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):
    """Causal attention by torch's fused kernels, over a rectangle or over packed sequences.

    Neither needs a mask: a rectangle is padded on the right, and packed sequences are attended one by one. With context
    parallelism, which cuts packed sequences, a rank attends with its own tokens to those of all ranks: keys and values
    are gathered, and their gradients summed on the way back.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale
        self._cp_group: ProcessGroup = pg_collection.cp
        self._cp = config.context_parallel_size
        self._cp_rank = self._cp_group.rank() if self._cp > 1 else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """`query` [seq, batch, heads, dim]; `key`, `value` with query groups for heads.

        Packed, they have no batch dimension, and `packed_seq_params` says where the sequences of the whole row begin.
        Returns [seq, batch, heads x dim], or [seq, heads, dim] packed. There is no other mask than causality.
        """
        if attention_mask is not None:
            raise ValueError("CausalAttention takes no attention mask.")
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        boundaries = packed_seq_params.cu_seqlens_q
        if self._cp > 1:
            return self._attend_shares(query, *self._gathered(key, value, boundaries), boundaries)
        lengths = boundaries.diff().tolist()
        # One split for all sequences, whose gradients are then written once and not added up.
        parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._attend(*(each[:, None] for each in part))[:, 0] for part in parts])

    def _gathered(self, key: Tensor, value: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole row in its order, [seq, groups, dim] each, from all ranks' shares."""
        shares = [columns_of(boundaries.tolist(), self._cp, rank) for rank in range(self._cp)]
        order = torch.tensor(np.argsort(np.concatenate(shares)), device=key.device)
        everyones = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=self._cp_group)
        whole_key, whole_value = everyones.index_select(0, order).unbind(1)
        return whole_key, whole_value

    def _attend_shares(self, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
        """`query` of this rank's chunks, `key` and `value` of the whole row; [seq / cp, heads, dim]."""
        lengths = boundaries.diff().tolist()
        chunks = 2 * self._cp
        queries = query.split([length // chunks for length in lengths for _ in range(2)])
        keys, values = key.split(lengths), value.split(lengths)
        parts = []
        for number, length in enumerate(lengths):
            for half, chunk in enumerate((self._cp_rank, chunks - 1 - self._cp_rank)):
                seen = length // chunks * (chunk + 1)
                part = (queries[2 * number + half], keys[number][:seen], values[number][:seen])
                parts.append(self._attend(*(each[:, None] for each in part))[:, 0])
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All [seq, batch, heads, dim]; the queries are those of the last keys; fewer of them make a mask."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        whole = len(query) == len(key)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if whole else causal_lower_right(len(query), len(key)),
            is_causal=whole,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3)
