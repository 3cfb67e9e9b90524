"""The name of the argument that is the cache, and the number of tokens that each layer of a model keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import PreTrainedConfig, __version__
from transformers.cache_utils import get_layer_types_and_kwargs

from .source import modeling_source
from .version import number_of

OTHERS = "use a DynamicCache"
CACHE = "cache" if number_of(__version__) >= (5, 24) else "past_key_values"  # the argument and the output of models
CACHES = tuple(dict.fromkeys((CACHE, "past_key_values")))  # Transformers renames the old name


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or of generate(), or None. If both names are given, the present one counts."""
    return next((arguments[name] for name in CACHES if name in arguments), None)


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer that keeps K/V; None for layers that keep all tokens.

    Raises ValueError for configs with other kinds of layers (linear attention, chunks, K/V shared between layers), and for
    models that add layers to their cache.
    """
    text = config.get_text_config(decoder=True)
    config_class: type = type(text)
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, and these caches are for decoder-only models; {OTHERS}.")
    if _adds_layers(config_class):
        raise ValueError(f"{name} adds layers to its cache, in which it runs some of its layers again; {OTHERS}.")
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


@cache
def _adds_layers(config_class: type) -> bool:
    return (
        re.search(r"(?m)^[^#\n]*\b(cache|past_key_values)\.layers( \+=|\.append|\.extend)", modeling_source(config_class))
        is not None
    )
