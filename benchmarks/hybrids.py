"""A decode step of hybrids, whose layers have recurrent states, compared with the least time for its bytes.

    python -m benchmarks.hybrids                           # all shapes, two cases each
    python -m benchmarks.hybrids --only qwen3.6-27b --cases 8xpadded

Models have the width of the named ones, random weights and, but for LFM2, 8 of their layers, so the head is a larger part of a
step than in the whole model. The method is that of benchmarks/families.py. The floor counts states twice, as a step reads and
writes them. Each call reads its prompt, since no token can be removed from a state. If flash-linear-attention is installed, stock
generate() and prompts use it.
"""

from __future__ import annotations

import argparse

from .families import run_shapes
from .results import version

CASES = ["1x8192", "8xpadded"]
FLA = "flash-linear-attention"

_LONG = {"max_position_embeddings": 131072}
_QWEN = {"vocab_size": 248320, "num_hidden_layers": 8, "head_dim": 256}  # 3 of 4 layers are linear
_TINY = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MAMBA, _FULL, _CONV = "linear_attention", "full_attention", "conv"

# name: model type and configuration, as in the published configurations
HYBRIDS: dict[str, tuple[str, dict]] = {
    "qwen3.6-35b-a3b": (
        "qwen3_5_moe_text",
        _QWEN | _LONG | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32},
    ),
    "qwen3.6-27b": (
        "qwen3_5_text",
        _QWEN
        | _LONG
        | {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4}
        | {"linear_num_value_heads": 48},
    ),
    "granite-4-h-small": (
        "granitemoehybrid",
        _LONG
        | {"vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 8}
        | {"layer_types": [*[_MAMBA] * 5, _FULL, *[_MAMBA] * 2]}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536}
        | {"num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_state": 128}
        | {"attention_multiplier": 1 / 128, "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22}
        | {"tie_word_embeddings": True},
    ),
    "lfm2-1.2b": (
        "lfm2",
        _LONG
        | {"vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8}
        | {"layer_types": [_FULL if i in (2, 5, 8, 10, 12, 14) else _CONV for i in range(16)]},
    ),
    "tiny": (  # for trials
        "qwen3_5_text",
        _TINY
        | {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "head_dim": 16}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
}


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.hybrids") -> int:
    """Measure the chosen shapes. Returns 0, or 1 if a row failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    return run_shapes(parser, argv, "hybrids", HYBRIDS, {"": CASES}, **{FLA: version(FLA)})


if __name__ == "__main__":
    raise SystemExit(main())
