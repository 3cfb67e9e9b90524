"""Named shapes of well-known models: model_type and configuration, without a download."""

from __future__ import annotations

from typing import Any

_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = _SIZES | {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_OPT = {"num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048, "dropout": 0.0}
_GPT3 = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 50257}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_MISTRAL = {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1b": ("llama", _LLAMA | _1B),  # Llama-3.2-1B
    "8b": ("llama", _LLAMA),  # Llama-3.1-8B
    "70b": ("llama", _LLAMA | _70B),  # Llama-3.1-70B
    "gpt3": ("gpt2", _GPT3),  # 175B
    "mistral-7b": ("mistral", _SIZES | _MISTRAL),  # v0.1, the one with a window
    "opt-1.3b": ("opt", _OPT | {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_hidden_layers": 24}),
    "opt-6.7b": ("opt", _OPT | {"hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384, "num_hidden_layers": 32}),
}
