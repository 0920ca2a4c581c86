"""Shape of a tiny Qwen2, in the form of config.json."""

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
