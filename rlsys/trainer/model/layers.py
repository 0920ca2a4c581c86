"""Configures a model's layers: Transformer Engine's layers ("te"), or Megatron's own ("local") with two replacements.

The replacements are `RMSNorm`, which allows sequence parallelism, and `CausalAttention`, which holds no [seq, seq]
matrix. `complete` adds what Megatron's config cannot say. Weights and checkpoints of the two kinds of layers are
interchangeable. Both kinds route a mixture of experts like transformers and SGLang.

Fused kernels depend on `model.fusions` and on the machine. A CPU gets no fused kernels and keeps Megatron's defaults.
Requirements in Megatron-core 0.16:

    bias_activation_fusion:         SwiGLU in one kernel, which saves a copy of its input   torch.compile, GPU
    apply_rope_fusion:              rotary positions                                        Transformer Engine
    moe_permute_fusion:             sorting of tokens by expert                             Transformer Engine's layers
    gradient_accumulation_fusion:   weight gradients added directly to float32 buffers      apex
    `fuse_accumulation`:            the same without the output layer                       Transformer Engine's layers.

`bias_dropout_fusion` and `persist_layer_norm` stay off: these models have no dropout and no LayerNorm, and few have
biases to fuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from functools import partial
from math import ceil, floor, log, pi
from typing import Any

import numpy as np
import torch
from megatron.core.activations import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import gelu, linear, pad, rms_norm, scaled_dot_product_attention, silu

from rlsys.config.custom import OwnComponent, described
from rlsys.config.schema import Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.environment import Capabilities
from rlsys.trainer.batches import columns_of
from rlsys.weights.weight_map import SINK_DIMS, Architecture, YarnScaling, rotary_dims, stage_layers

FP8_RECIPE: dict[str, Any] = {
    "fp8": "hybrid",
    # Scale each tensor by its current maximum: no history of maxima has to be kept in checkpoints or forward passes.
    "fp8_recipe": "tensorwise",
}

_SWIGLU_LIMIT = 7.0
"""Limit of gate and up in a model with `clamped_swiglu`."""
_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def choose_layers(layers: Layers, here: Capabilities) -> Layers:
    """Resolve `auto`: `te` on a GPU, else `local`. Raises UserError if `te` is needed but unavailable."""
    if layers is Layers.local or (layers is Layers.auto and not here.cuda_devices):
        return Layers.local
    if not here.cuda_devices or here.transformer_engine is None:
        lacks = (
            "Transformer Engine on GPUs, which is not installed: install transformer-engine[pytorch] as in "
            "requirements/gpu.txt, or set model.layers=local, whose layers are several times slower."
            if here.cuda_devices
            else "a GPU, and there is none: set model.layers=local."
        )
        raise UserError(f"model.layers={layers} needs {lacks}", code="not_installed", key="model.layers")
    return Layers.te


def kernel_settings(model: ModelConfig, layers: Layers, here: Capabilities) -> dict[str, Any]:
    """Return the kernel fields of Megatron's TransformerConfig; `layers` is the result of `choose_layers`.

    Raises UserError for FP8 without Transformer Engine's layers.
    """
    te = layers is Layers.te
    if model.fp8 and not te:
        raise UserError(
            "model.fp8 is true, but only the layers of Transformer Engine support FP8: set model.fp8 to false.",
            code="conflict",
            key="model.fp8",
        )
    if not here.cuda_devices:
        return {"batch_p2p_comm": False}  # Not supported by gloo.
    fusions = {
        "bias_activation_fusion": True,
        "apply_rope_fusion": here.transformer_engine is not None,
        "moe_permute_fusion": te,
        "gradient_accumulation_fusion": here.apex,
    }
    return {
        "batch_p2p_comm": True,
        # Local layers always use `CausalAttention`.
        "attention_backend": AttnBackend[model.attention] if te else AttnBackend.auto,
        # Otherwise Megatron would tell Transformer Engine which micro-batch is the first of a pass. With fused
        # accumulation, that micro-batch would overwrite the gradient, which here is a sum over several passes. With
        # FP8, quantised copies of the weights would stay on the GPU while the model is offloaded.
        "disable_parameter_transpose_cache": te,
        **(fusions if model.fusions else {}),
        **(FP8_RECIPE if model.fp8 else {}),
    }


def fuse_accumulation(module: torch.nn.Module, model: ModelConfig, layers: Layers) -> None:
    """Make the layers of Transformer Engine in `module` add weight gradients directly to the float32 buffers.

    Megatron's `gradient_accumulation_fusion` sets the same attribute of these layers, but also makes its output layer
    call a kernel of apex.
    """
    every: Iterator[Any] = module.modules()
    if layers is Layers.te and model.fusions:
        for layer in every:
            if hasattr(layer, "fuse_wgrad_accumulation"):
                layer.fuse_wgrad_accumulation = True


def repeat_empty_states(module: torch.nn.Module) -> None:
    """Make layers of Transformer Engine that hold several experts save their empty state once for each.

    The FP8 recipe has no state between passes, and Transformer Engine 2.20 returns an empty tensor. Megatron would
    search it for the scales of each expert.
    """

    def split(layer: Any, state: Tensor) -> list[Tensor]:
        if state.numel():
            raise ValueError("The FP8 recipe has a state, which must be split between experts.")
        return [state] * layer.num_gemms

    each: Any
    for each in module.modules():
        if hasattr(each, "_split_extra_state"):
            each._split_extra_state = partial(split, each)


def transformer_config(
    architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, kernels: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's config of the model; `kernels` is the result of `kernel_settings`."""
    layout = None  # default: equally many layers per stage
    if parallel.pp_layers is not None:
        layout = [["decoder"] * len(s) for s in stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    dtype = torch.bfloat16 if model.dtype is Dtype.bfloat16 else torch.float32
    kind = MLATransformerConfig if architecture.kv_lora_rank else TransformerConfig
    return kind(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        layernorm_zero_centered_gamma=architecture.norm_plus_one,
        gated_linear_unit=True,
        **_activation(architecture),
        add_bias_linear=architecture.linear_bias,
        add_qkv_bias=architecture.qkv_bias,
        rotary_interleaved=architecture.rope_interleaved,
        softmax_type="learnable" if architecture.sinks else "vanilla",
        softmax_scale=_softmax_scale(architecture),
        **_window_config(architecture),
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
        # With variable lengths, Megatron requires this dispatcher, also for dense models.
        moe_token_dispatcher_type="alltoall",
        **_experts_config(architecture, parallel),
        **_latent_config(architecture),
        # The initial values are overwritten, but initialisation marks weights as TP shards; without the mark, the
        # gradient norm would not count every shard.
        perform_initialization=True,
        # The learner divides the gradient itself, once; see `Learner`.
        calculate_per_token_loss=True,
        **(_FULL_RECOMPUTE if model.recompute else {}),
        **{**kernels, **dict.fromkeys(_unfusable(architecture), False)},
    )


def _unfusable(architecture: Architecture) -> Iterator[str]:
    """Yield the fusions that the model does without.

    Megatron has none for GELU in its tanh form and for MLA's positions without YaRN; that of the clamped SwiGLU has not
    been tried. For packed rows, Megatron does not tell Transformer Engine that positions are interleaved.
    """
    if not architecture.fuses_activation:
        yield "bias_activation_fusion"
    if not architecture.fuses_positions:
        yield "apply_rope_fusion"


def _activation(architecture: Architecture) -> dict[str, Any]:
    if architecture.clamped_swiglu:
        return {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": _SWIGLU_LIMIT,
        }
    return {"activation_func": _gelu if architecture.gelu else silu}


def _gelu(inputs: Tensor) -> Tensor:
    return gelu(inputs, approximate="tanh")


def _softmax_scale(architecture: Architecture) -> float | None:
    """Return the factor of attention scores; None for 1 / sqrt(head_dim).

    It has YaRN's factor of queries and of keys, which Megatron's fused rotary positions would leave out; with MLA,
    Megatron itself has it.
    """
    scale = architecture.query_scale and architecture.query_scale**-0.5
    if architecture.kv_lora_rank or not isinstance(architecture.rope, YarnScaling):
        return scale
    return (scale or architecture.head_dim**-0.5) * architecture.rope.attention_factor**2


def _window_config(architecture: Architecture) -> dict[str, Any]:
    if architecture.window is None:
        return {}
    local = [int(layer in architecture.local_layers) for layer in range(architecture.layers)]
    return {"window_size": (architecture.window - 1, 0), "window_attn_skip_freq": local}


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
        "moe_router_topk_scaling_factor": architecture.routed_scale,
        "moe_shared_expert_intermediate_size": architecture.shared_experts * architecture.expert_ffn or None,
        **({"moe_layer_freq": _with_experts(architecture)} if architecture.dense_layers else {}),
    }


def _with_experts(architecture: Architecture) -> list[int]:
    return [int(layer >= architecture.dense_layers) for layer in range(architecture.layers)]


def _latent_config(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    if not architecture.kv_lora_rank:
        return {}
    scaling = architecture.rope
    yarn = scaling if isinstance(scaling, YarnScaling) else None
    return {
        "kv_lora_rank": architecture.kv_lora_rank,
        "q_lora_rank": architecture.q_lora_rank,
        "qk_head_dim": architecture.qk_nope_head_dim,
        "qk_pos_emb_head_dim": architecture.qk_rope_head_dim,
        "v_head_dim": architecture.v_head_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": architecture.rope_theta,
        # The attention scores are scaled by a power of this factor also without YaRN.
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        **(
            {
                "original_max_position_embeddings": yarn.original_max_positions,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "mscale": yarn.mscale,
                "mscale_all_dim": yarn.mscale_all_dim,
            }
            if yarn
            else {}
        ),
    }


def block_spec(
    config: TransformerConfig,
    layers: Layers,
    numbers: range,
    own: OwnComponent | None = None,
    adapted: bool = False,
) -> TransformerBlockSubmodules:
    """Return the spec of GPTModel's decoder, whose layers have the global `numbers`; `layers` is the result of
    `choose_layers`.

    If the model is `adapted`, no norm is fused into the next linear layer, because adapters need the norm's output.
    `own` is the function of a family whose layers differ (`layer_spec` in its file). It gets the spec of a layer and
    Megatron's config, may change both, and returns the spec. It is called once for each kind of layers in the block:
    with experts, and without.
    """
    frequency = config.moe_layer_freq
    mixture = [not isinstance(frequency, list) or bool(frequency[number]) for number in numbers]
    kinds = {
        routed: _changed(_layer(config, layers, config.num_moe_experts if routed else None, adapted), config, own)
        for routed in sorted({*mixture})
    }
    norm = LayerNormImpl if layers is Layers.te else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[kinds[routed] for routed in mixture], layer_norm=norm)


def _layer(config: TransformerConfig, layers: Layers, experts: int | None, adapted: bool) -> ModuleSpec:
    """Return the spec of a layer with that number of experts; None for an MLP."""
    latent = config.multi_latent_attention
    common: dict[str, Any] = {
        "num_experts": experts,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": latent,
    }
    if layers is Layers.te:
        layer = get_gpt_layer_with_transformer_engine_spec(**common, moe_grouped_gemm=True)
        return _routed(_unfused(layer) if adapted else layer)
    layer = get_gpt_layer_local_spec(**common, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if latent:
        _hold_latents_whole(layer)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    return _routed(layer)


def _hold_latents_whole(layer: ModuleSpec) -> None:
    """Make every TP rank compute the latents of its tokens with whole projections, as Transformer Engine's layers do.

    Megatron's own layers cut these projections. But then the gradient of the positions that all heads share lacks the
    heads of other ranks. The keys of checkpoints become those of Transformer Engine's layers.
    """
    attention = layer.submodules.self_attention.submodules
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    attention.q_layernorm = attention.kv_layernorm = RMSNorm
    layer.submodules.sharded_state_dict_keys_map = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def _unfused(layer: ModuleSpec) -> ModuleSpec:
    """Give `layer` of Transformer Engine norms and linear layers of their own; change it in place and return it."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    parts = layer.submodules
    parts.input_layernorm, parts.self_attention.submodules.linear_qkv = TENorm, TEColumnParallelLinear
    if hasattr(parts.mlp.submodules, "linear_fc1"):  # Experts follow a norm of their own.
        parts.pre_mlp_layernorm, parts.mlp.submodules.linear_fc1 = TENorm, TEColumnParallelLinear
    return layer


def _changed(layer: ModuleSpec, config: TransformerConfig, own: OwnComponent | None) -> ModuleSpec:
    if own is None:
        return layer
    changed = own(layer, config)
    if not isinstance(changed, ModuleSpec):
        raise own.error(f"returned {described(changed)} instead of a ModuleSpec")
    return changed


def _routed(layer: ModuleSpec) -> ModuleSpec:
    """Use `ExpertRouter` in `layer` if it has experts; change `layer` in place and return it."""
    if issubclass(layer.submodules.mlp.module, MoELayer):
        layer.submodules.mlp.submodules.router = ExpertRouter
        # Transformer Engine fuses this norm only into a dense MLP; here checkpoints keep the name of the unfused norm.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return layer


class ExpertRouter(Router):
    """Routes each token to its k most likely experts, without dropping tokens and without a balancing loss.

    Dtypes follow transformers' Qwen3MoeTopKRouter: logits in the model's dtype, softmax over all experts in float32,
    and the k weights rounded to the model's dtype. With `norm_topk_prob` (`moe_router_pre_softmax` false), the k
    weights are normalised to a sum of 1 before the rounding. Last, they are multiplied by the factor of the family.

    Routing replay (R3, arXiv 2510.11370): `routes` replace the choice of experts alone. Their weights, and the gradient
    of the router, are always computed from this router's own logits.
    """

    routes: Tensor | None = None
    """[tokens, k] experts of each token of the next pass, the largest value of the type where they are unknown; None if
    all are. Set by `accept_routes`."""

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (0 for experts not chosen) and the mask of chosen experts, both [tokens, experts]."""
        every = logits.softmax(-1, dtype=torch.float32)
        chosen = every.topk(self.config.moe_router_topk, dim=-1).indices
        if self.routes is not None:
            known = self.routes != torch.iinfo(self.routes.dtype).max
            chosen = torch.where(known, self.routes.to(chosen.dtype), chosen)
        weights = every.gather(-1, chosen)
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.config.moe_router_topk_scaling_factor
        spread = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        return spread, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def forward(self, input: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return `routing` of `input` [seq, batch, hidden], with seq and batch flattened to tokens."""
        return self.routing(linear(input.flatten(0, 1), self.weight, self.bias))


def complete(module: GPTModel, architecture: Architecture) -> None:
    """Add what Megatron's config cannot say: the scale of embeddings, norms after attention and MLP, and the rotary
    positions of local layers.
    """
    if architecture.scaled_embedding and module.pre_process:
        module.embedding.register_forward_hook(lambda *call: call[-1] * _rounded(architecture.hidden**0.5, call[-1]))
    for layer in module.decoder.layers:
        if architecture.post_norms:
            for last in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                last.post_layernorm = RMSNorm(module.config, architecture.hidden, module.config.layernorm_epsilon)
                last.register_forward_hook(_normalised)
        if architecture.linear_bias and isinstance(layer.mlp, MoELayer):
            for expert in layer.mlp.experts.local_experts:
                expert.linear_fc2.register_forward_hook(_copied)
        if architecture.local_rope_theta is not None and layer.layer_number - 1 in architecture.local_layers:
            layer.self_attention.register_forward_pre_hook(
                _LocalPositions(module.rotary_pos_emb, architecture), with_kwargs=True
            )


def _rounded(number: float, like: Tensor) -> float:
    """Return `number` in the precision of `like`, as transformers rounds it."""
    return float(torch.tensor(number, dtype=like.dtype))


def _normalised(layer: Any, _: Any, outputs: tuple[Tensor, Tensor | None]) -> Any:
    return (layer.post_layernorm(outputs[0]), *outputs[1:])


def _copied(_: Any, __: Any, outputs: tuple[Tensor, Tensor | None]) -> Any:
    """Return the outputs, which Megatron may change: it adds an expert's bias in place, which torch forbids otherwise."""
    return (outputs[0].clone(), *outputs[1:])


class _LocalPositions:
    """Hook of an attention layer that gives it the rotary positions of local layers."""

    def __init__(self, positions: RotaryEmbedding, architecture: Architecture) -> None:
        assert architecture.local_rope_theta is not None
        self._positions = copy(positions)
        self._positions.inv_freq = base_frequencies(architecture, architecture.local_rope_theta)

    def __call__(self, _: Any, inputs: Any, named: dict[str, Any]) -> Any:
        # Packed rows, which context parallelism requires, get the table of all positions.
        return inputs, {**named, "rotary_pos_emb": self._positions(len(named["rotary_pos_emb"]), packed_seq=True)}


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Return the rotary frequencies in radians per position, [d / 2] float32 on the CPU, d as in `rotary_dims`.

    Without scaling, they are `base_frequencies`. With scaling, as in `apply_scaling` of Meta's Llama 3.1
    (github.com/meta-llama/llama-models, models/llama3), let n_i = original_max_positions f_i / (2 pi) be the turns within
    the original context:

        s_i = clamp((n_i - low) / (high - low), 0, 1);   f'_i = (1 - s_i) f_i / factor + s_i f_i.

    Fast pairs keep their frequency, slow pairs are divided by `factor`, and pairs in between are interpolated; with
    YaRN, linearly in i (`_yarn_frequencies`).
    """
    frequencies = base_frequencies(architecture, architecture.rope_theta)
    scaling = architecture.rope
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(frequencies, architecture.rope_theta, scaling)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions / (2 * pi / frequencies)
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    # Select instead of clamping: clamped, the two terms would not add up to the exact end values.
    slow = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, slow)


def _yarn_frequencies(frequencies: Tensor, theta: float, yarn: YarnScaling) -> Tensor:
    """Return YaRN's frequencies (Peng et al., arXiv:2309.00071, section 3.2), given those without scaling.

    The pair that turns n times within the original context has the number i(n), by which s falls from 1 to 0:

        i(n) = d ln(original_max_positions / (2 pi n)) / (2 ln theta)
        s_i = 1 - clamp((i - i(beta_fast)) / (i(beta_slow) - i(beta_fast)), 0, 1);   f'_i = (1 - s_i) f_i / factor + s_i f_i.
    """
    dims = 2 * len(frequencies)
    first, last = (
        dims * log(yarn.original_max_positions / (turns * 2 * pi)) / (2 * log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / ((last - first) or 0.001)
    share = 1 - ramp.clamp(0, 1)
    # Not a quotient of frequencies, which would be rounded twice.
    slow = 1.0 / (yarn.factor * theta ** _powers(dims))
    return slow * (1 - share) + frequencies * share


def base_frequencies(architecture: Architecture, theta: float) -> Tensor:
    """Return f_i = theta^(-2 i / d), [d / 2] float32 on the CPU (Su et al., RoFormer, arXiv:2104.09864, section 3.2.2)."""
    return 1.0 / theta ** _powers(rotary_dims(architecture))


def _powers(dims: int) -> Tensor:
    return torch.arange(0, dims, 2, dtype=torch.int64).float() / dims


def accept_routes(decoder: Any) -> None:
    """Make each layer of `decoder` give its router its part of the routes [tokens, layers, k].

    Megatron passes them to every layer as `padding_mask`, also when it computes a layer again in the backward pass; so
    a layer has those of its own micro-batch. When routes come to a family's layers that have routers of their own,
    UserError is raised.
    """

    def give(number: int, layer: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes, router = options.pop("padding_mask", None), getattr(layer.mlp, "router", None)
        if isinstance(router, ExpertRouter):
            router.routes = None if routes is None else routes[:, number]
        elif routes is not None:
            raise UserError(
                "algorithm.router_replay=r3 needs the routers of rlsys, but the layers of model.family have others: set "
                "it to none, or keep the router in layer_spec.",
                code="unsupported",
                key="algorithm.router_replay",
            )
        return inputs, options

    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(partial(give, number), with_kwargs=True)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient reduction of sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._plus_one = config.layernorm_zero_centered_gamma

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalised `inputs`; a weight to which 1 is added is multiplied in float32, as transformers does."""
        if not self._plus_one:
            return super().forward(inputs)
        return rms_norm(inputs.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(inputs)


class CausalAttention(MegatronModule):
    """Causal attention with torch's fused kernels, over padded rows or over packed sequences.

    Needs no padding mask: rows are padded on the right, and packed sequences are processed one by one. With context
    parallelism (packed only), keys and values are gathered from all ranks, and each rank attends with its own queries;
    the backward pass sums the gradients of keys and values over the ranks. A local layer attends within the window, in
    blocks of queries, whose masks have at most the window times twice the window. Values with fewer dimensions than
    keys (MLA) are padded with zeros, because torch's fused kernels need equally many.

    A head with a sink z attends with weights exp(s_j) / (exp(z) + sum_j exp(s_j)), as if there were a key before the
    first with the score z for every query and the value 0. `_with_sink` adds this key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale, self._window = softmax_scale, None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self._window = config.window_size[0] + 1
        self.softmax_offset: torch.nn.Parameter | None = None
        """Sinks [heads] of this TP rank, under the name of Megatron's own attention; None without."""
        if config.softmax_type == "learnable":
            self._scale = softmax_scale or config.kv_channels**-0.5
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            # Megatron's mark of a shard: the norm of the gradient counts those of all ranks.
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self._tp_group: ProcessGroup = pg_collection.tp
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
        """Return the attention output: [seq, batch, heads x dim], or packed [seq, heads, dim].

        `query` is [seq, batch, heads, dim]; `key` and `value` have query groups instead of heads. For packed sequences,
        none of the three has a batch dimension, and `packed_seq_params` holds the boundaries of the whole row. Raises
        ValueError for a mask.
        """
        if attention_mask is not None:
            raise ValueError("CausalAttention takes no attention mask.")
        width = value.shape[-1]
        if width < key.shape[-1]:
            value = pad(value, (0, key.shape[-1] - width))
        if packed_seq_params is None:
            return self._attend(query, key, value)[..., :width].flatten(2)
        boundaries = packed_seq_params.cu_seqlens_q
        if self._cp > 1:
            return self._attend_shares(query, *self._gathered(key, value, boundaries), boundaries)[..., :width]
        lengths = boundaries.diff().tolist()
        # A single split over all sequences: its backward pass writes each gradient once instead of accumulating.
        parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        out = torch.cat([self._attend(*(each[:, None] for each in part))[:, 0] for part in parts])
        return out[..., :width]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's description of the sinks, which TP cuts, for a distributed checkpoint."""
        group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=group,
        )
        return state

    def _gathered(self, key: Tensor, value: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of the whole row from all ranks, in the row's order: [seq, groups, dim] each."""
        shares = [columns_of(boundaries.tolist(), self._cp, rank) for rank in range(self._cp)]
        order = torch.tensor(np.argsort(np.concatenate(shares)), device=key.device)
        everyones = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=self._cp_group)
        whole_key, whole_value = everyones.index_select(0, order).unbind(1)
        return whole_key, whole_value

    def _attend_shares(self, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
        """Return the attention of this rank's chunks, `query`, to the whole row, `key` and `value`.

        `query` and the result are [seq / cp, heads, dim].
        """
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
        """Return causal attention; all tensors are [seq, batch, heads, dim].

        Fewer queries than keys are the queries of the last positions: query i is at the position of key
        len(key) - len(query) + i.
        """
        if self._window is not None and len(key) > self._window:
            return self._attend_locally(query, key, value, self._window)
        return self._attend_masked(query, key, value)

    def _attend_locally(self, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Return `_attend` with queries that see the last `window` keys up to their own position."""
        before, parts = len(key) - len(query), []
        masks: dict[tuple[int, int], Tensor] = {}
        for start in range(0, len(query), window):
            end = min(start + window, len(query))
            first, last = max(0, before + start - window + 1), before + end
            size = end - start, last - first
            if size not in masks:
                mask = _window_mask(*size, window, query)
                masks[size] = mask if self.softmax_offset is None else pad(mask, (1, 0))
            parts.append(self._attend_masked(query[start:end], key[first:last], value[first:last], masks[size]))
        return torch.cat(parts)

    def _attend_masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention with `mask` added to the scores, of the sinks too, or causal attention as in `_attend`."""
        dims = value.shape[-1]
        if self.softmax_offset is not None:
            query, key, value = self._with_sink(query, key, value, self.softmax_offset)
        whole = mask is None and len(query) == len(key)
        if mask is None and not whole:
            mask = causal_lower_right(len(query), len(key))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        shared = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=self._scale, enable_gqa=shared)
        return out.permute(2, 0, 1, 3)[..., :dims]

    def _with_sink(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [seq, batch, heads, dim + `SINK_DIMS`], with the sinks' key before the first.

        Query heads share keys, but have sinks of their own: a query has its sink in two more dimensions, the key of the
        sinks has there 1 / scale as the sum of two numbers of the model's dtype, and all other keys have 0.
        """
        assert self._scale is not None
        inverse = torch.full((), 1 / self._scale, device=key.device)
        large = inverse.to(key.dtype)
        first = pad(torch.stack((large, (inverse - large).to(key.dtype))), (value.shape[-1], SINK_DIMS - 2))
        own = pad(sinks[:, None].expand(-1, 2), (0, SINK_DIMS - 2)).expand(*query.shape[:-1], -1)
        key, value = (pad(tensor, (0, SINK_DIMS)) for tensor in (key, value))
        key = torch.cat((first.expand(1, *key.shape[1:]), key))
        return torch.cat((query, own), dim=-1), key, pad(value, (0, 0, 0, 0, 0, 0, 1, 0))


def _window_mask(queries: int, keys: int, window: int, like: Tensor) -> Tensor:
    """Return what is added to the scores of the last `queries` of `keys` positions: 0 within the window, else -inf."""
    ahead = torch.arange(keys, device=like.device) - torch.arange(keys - queries, keys, device=like.device)[:, None]
    return like.new_zeros(queries, keys).masked_fill((ahead > 0) | (ahead <= -window), -torch.inf)
