"""The models of the generate() benchmarks: named shapes with random weights, or a checkpoint; and the bytes that a step reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from hf_fastattn import hf, model_shapes
from hf_fastattn.explanation import costs

COMMON = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}  # no generation ends early
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}  # for trials

_EIGHT = {"num_attention_heads": 8, "head_dim": 16}  # a KV head for each of eight ranks

# name: model type and configuration
SHAPES: dict[str, tuple[str, dict]] = {
    **{name: (model_type, COMMON | config) for name, (model_type, config) in model_shapes.SHAPES.items()},
    "tiny": ("llama", COMMON | model_shapes.SHAPES["8b"][1] | _TINY | {"intermediate_size": 96, "num_key_value_heads": 2}),
    "tiny-8": ("llama", COMMON | model_shapes.SHAPES["8b"][1] | _TINY | {"intermediate_size": 96} | _EIGHT),
    "tiny-opt": ("opt", COMMON | model_shapes.SHAPES["opt-1.3b"][1] | _TINY | {"word_embed_proj_dim": 64, "ffn_dim": 96}),
}


@dataclass
class Subject:
    """A model and its origin."""

    name: str
    model: hf.PreTrainedModel
    weights: str
    config: dict = field(default_factory=dict)

    @property
    def text_config(self):
        return self.model.config.get_text_config(decoder=True)

    @cached_property
    def facts(self) -> costs.Facts:
        """Its shapes, windows and bytes. Raises ValueError for a model whose K/V cannot be counted."""
        return costs.count(self.model)


def step_bytes(facts: costs.Facts, lengths: list[int]) -> float:
    """Bytes that a decode step over rows of these many tokens reads: weights, and live K and V."""
    return facts.read_bytes(len(lengths)) + sum(map(facts.kv_bytes, lengths))


def dtype_for(device: torch.device) -> torch.dtype:
    """The dtype of measurements: bfloat16 on a GPU; trials on a CPU run in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def with_heads(config: dict, heads: int) -> dict:
    """The configuration with another number of heads, all widths in proportion; head_dim and the group size do not change."""
    scaled = ("hidden_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim", "num_key_value_heads", "num_attention_heads")
    old = config["num_attention_heads"]
    if wrong := [name for name in scaled if config.get(name, 0) * heads % old]:
        raise ValueError(f"With {heads} heads instead of {old}, {', '.join(wrong)} would not be integers.")
    return config | {name: config[name] * heads // old for name in scaled if name in config}


def with_share(config: dict, ranks: int, of: int) -> dict:
    """The configuration whose share on each of `ranks` GPUs is that of the given one on each of `of`.

    Heads, inner width and vocabulary are divided; head_dim, the hidden size and the number of layers do not change.
    """
    divided = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    if wrong := [name for name in divided if config.get(name, of) % of]:
        raise ValueError(f"The {', '.join(wrong)} of this shape cannot be divided among {of} GPUs.")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {name: config[name] * ranks // of for name in divided if name in config} | {"head_dim": head_dim}


def of_random_weights(
    name: str, model_type: str, config: dict, dtype: torch.dtype, device: torch.device, positions: int
) -> Subject:
    """A model with random weights, whose learned positions, if it has some, are at least so many."""
    config = {**config, "max_position_embeddings": max(config["max_position_embeddings"], positions)}
    model = hf.random_model(model_type, dtype, device, **config)
    return Subject(name, model, "random", {"model_type": model_type, **config})


def load(name: str, dtype: torch.dtype, device: torch.device, positions: int = 0, heads: int | None = None) -> Subject:
    """The model of a named shape, with random weights, or of a checkpoint: a folder, a .gguf file or "smollm2".

    positions: the longest sequence. A random model with a table of learned positions (OPT) gets a table of this length. heads: of
    a random model, the number of attention heads instead of that of the shape (`with_heads`).
    """
    if name in SHAPES:
        model_type, config = SHAPES[name]
        return of_random_weights(
            name, model_type, config if heads is None else with_heads(config, heads), dtype, device, positions
        )
    if heads is not None:
        raise ValueError(f"{name} has the heads it was trained with; --heads is for named shapes: {', '.join(SHAPES)}.")
    model = hf.load_model(name, dtype=dtype, device=device)
    model.generation_config.eos_token_id = None
    config = {"model_type": model.config.model_type, "max_position_embeddings": model.config.max_position_embeddings}
    return Subject(Path(name).stem, model, str(name), config)
