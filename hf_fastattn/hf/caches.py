"""The number of tokens that each layer of a model keeps."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

OTHERS = "use a DynamicCache"


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer that keeps K/V; None for layers that keep all tokens.

    Raises ValueError for configs with other kinds of layers (linear attention, chunks, K/V shared between layers).
    """
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, and these caches are for decoder-only models; {OTHERS}.")
    types, options = get_layer_types_and_kwargs(text)
    if isinstance(options, dict):  # before 5.19, one for all layers
        options = [options] * len(types)
    if getattr(text, "layer_types", None) is None:
        types = getattr(text, "layers_block_type", types)  # the name in RecurrentGemma, 5.17
    types = types[: text.num_hidden_layers]  # early exit lowers only num_hidden_layers
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others or len(types) != text.num_hidden_layers:
        kinds = ", ".join(others) or "layers that share K/V"
        raise ValueError(f"These caches hold full and sliding attention layers, and {name} has {kinds}; {OTHERS}.")
    return [each["sliding_window"] if kind == "sliding_attention" else None for kind, each in zip(types, options, strict=False)]
