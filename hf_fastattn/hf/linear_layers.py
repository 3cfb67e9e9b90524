"""Layers with a recurrent state in place of K and V: which code they have, and their states in a cache.

The code is that of a class in Transformers if their bytecode and that of all functions they call by name is equal, so copies of
it in other model files are recognised too: Qwen3.5's in its MoE, Bamba's in Granite 4 and Nemotron-H, LFM2's in its MoE.
"""

from __future__ import annotations

import importlib
import inspect
import types
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


def mixer_of(forward: Any) -> Mixer | None:
    """Which known code the forward() of a class has: of a layer that steps one token from its states, or None."""
    inner = inspect.unwrap(forward)
    found = next((item for item in _KNOWN.items() if reads(inner, item[1][0])), None)
    if found is None or not reads(inner, "causal_conv1d_update"):
        return None
    return found[0] if _is_known(forward, tuple(function for *_, function in mixer_calls(forward)), *found[1][1:]) else None


@cache
def _is_known(forward: object, calls: tuple[types.FunctionType, ...], family: str, name: str) -> bool:
    """Whether a forward() has the code of a class, and so have all functions that it calls, which are `calls`."""
    theirs = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name).forward
    known = [function for *_, function in mixer_calls(theirs)]
    same = len(calls) == len(known) and is_same_wrapped(forward, theirs)  # names are part of the code
    return same and all(map(is_same_wrapped, calls, known))


def mixer_calls(forward: Any) -> list[tuple[dict[str, Any], str, types.FunctionType]]:
    """(global names, name, function) of each function that a forward() calls by its name, and of those that these call."""
    found: list[tuple[dict[str, Any], str, types.FunctionType]] = []
    waiting = [inspect.unwrap(forward)]
    for each in waiting:
        found += [(each.__globals__, name, function) for name, function in called(each).items()]
        waiting += [inner for *_, function in found if (inner := inspect.unwrap(function)) not in waiting]
    return found


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
