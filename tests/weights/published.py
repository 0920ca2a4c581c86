"""Published config.json of models, and their numbers of parameters."""

from __future__ import annotations

import json

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_7B = json.loads("""{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window": 4096,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 152064}""")
LLAMA_8B = json.loads("""{"model_type": "llama", "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "vocab_size": 128256}""") | {"rope_scaling": LLAMA3}
QWEN3_0_6B = QWEN_7B | json.loads("""{"model_type": "qwen3", "attention_bias": false, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16,
    "num_key_value_heads": 8, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
    "vocab_size": 151936}""")
QWEN3_30B_A3B = QWEN3_0_6B | json.loads("""{"model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
    "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "tie_word_embeddings": false}""")
MISTRAL_7B = json.loads("""{"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "vocab_size": 32768}""")
PHI_4 = json.loads("""{"model_type": "phi3", "attention_bias": false, "embd_pdrop": 0.0, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "pad_token_id": 100349, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
    "tie_word_embeddings": false, "vocab_size": 100352}""")
GEMMA3_1B = json.loads("""{"model_type": "gemma3_text", "attention_bias": false, "attn_logit_softcapping": null,
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144}""")
MINISTRAL_8B = MISTRAL_7B | json.loads("""{"head_dim": 128, "intermediate_size": 12288, "num_hidden_layers": 36,
    "rope_theta": 100000000.0, "sliding_window": 32768, "vocab_size": 131072}""")
GLM4_9B = json.loads("""{"model_type": "glm4", "attention_bias": true, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 151552}""")
DEEPSEEK_V2_LITE = json.loads("""{"model_type": "deepseek_v2", "attention_bias": false, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400}""")
GPT_OSS_20B = json.loads("""{"model_type": "gpt_oss", "attention_bias": true, "attention_dropout": 0.0,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088}""")
GPT_OSS_20B |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
MXFP4 = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
PUBLISHED = {
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "Gemma-3-1B": (GEMMA3_1B, 999_885_952),
    "GLM-4-9B-0414": (GLM4_9B, 9_400_279_040),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "Ministral-8B": (MINISTRAL_8B, 8_019_808_256),
    "Mistral-7B-v0.3": (MISTRAL_7B, 7_248_023_552),
    "Mistral-7B-v0.1": (MISTRAL_7B | {"sliding_window": 4096, "vocab_size": 32000}, 7_241_732_096),
    "Phi-4": (PHI_4, 14_659_507_200),
    "DeepSeek-R1-Distill-Qwen-7B": (QWEN_7B, 7_615_616_512),
    "DeepSeek-R1-Distill-Llama-8B": (LLAMA_8B, 8_030_261_248),
    "Qwen3-0.6B": (QWEN3_0_6B, 596_049_920),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
}
"""Model -> (its published config.json, its number of parameters)."""
