"""Layers with a recurrent state in place of K and V: which code they have, and their states in a cache.

The code is that of a class in Transformers if their bytecode and that of all functions they call by name is equal, so copies of
it in other model files are recognised too: Qwen3.5's in its MoE, Bamba's in Granite 4 and Nemotron-H, LFM2's in its MoE.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Literal

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .caches import CACHES
from .llama import is_same_wrapped, reads
from .rotations import called

Mixer = Literal["gated_delta", "gated_delta_packed", "mamba2", "mamba2_scaled", "short_conv"]
# A name that only this code reads, of the names below; the model file and its class.
_KNOWN: dict[Mixer, tuple[str, str, str]] = {
    "gated_delta": ("in_proj_qkv", "qwen3_5", "Qwen3_5GatedDeltaNet"),
    "gated_delta_packed": ("in_proj_qkvz", "qwen3_next", "Qwen3NextGatedDeltaNet"),
    "mamba2_scaled": ("mup_vector", "falcon_h1", "FalconH1Mixer"),
    "mamba2": ("ssm_state_size", "bamba", "BambaMixer"),
    "short_conv": ("conv", "lfm2", "Lfm2ShortConv"),
}
_CACHES = (*CACHES, "cache_params")
_PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments for packed sequences, which one token cannot be


@cache
def mixer_of(forward: object) -> Mixer | None:
    """Which known code the forward() of a class has: of a layer that steps one token from its states, or None."""
    found = next((item for item in _KNOWN.items() if reads(_innermost(forward), item[1][0])), None)
    if found is None:
        return None
    kind, (_, family, name) = found
    cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    return kind if _calls_the_same(forward, cls.forward) else None


def mixer_calls(forward: object) -> tuple[dict[str, Any], dict[str, object]]:
    """(the global names of a forward(), those of functions that it calls)."""
    inner = _innermost(forward)
    return inner.__globals__, {**called(inner)}


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _calls_the_same(function: object, theirs: object) -> bool:
    if not is_same_wrapped(function, theirs):
        return False
    ours, known = called(_innermost(function)), called(_innermost(theirs))
    return ours.keys() == known.keys() and all(_calls_the_same(ours[name], known[name]) for name in known)


def states_of(module: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(convolution's, recurrent) state of a layer in the cache among its arguments. None if it has none yet, if the cache keeps
    more than the last one, or if other arguments have a meaning for one token."""
    cache = next((kwargs[name] for name in _CACHES if name in kwargs), None)
    if cache is None or any(kwargs.get(name) is not None for name in ("attention_mask", *_PACKED)):
        return None
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or not layer.has_previous_state[0] or layer.record_past:
        return None
    conv = layer.conv_states[0]
    return None if conv is None else (conv, layer.recurrent_states[0])
