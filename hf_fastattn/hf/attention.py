"""Transformers' registry of attention functions, and the models that use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import hf_fastattn_autoload

from .caches import CACHES
from .own_code import own_attention
from .source import modeling_source

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # private; without it, output_attentions is noticed only if a model passes it on
    _active_collector = None  # type: ignore[assignment]

Function = Callable[..., Any]  # an entry of the registry


def register(name: str, attention: Function, mask: Function) -> None:
    """Register `attn_implementation=name`: always both functions, because without a mask function no mask is applied."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    hf_fastattn_autoload.refuse(name)


def registered(name: str) -> tuple[Function | None, Function | None]:
    """The attention and the mask function that are registered under this name; None for each that is not."""
    return AttentionInterface().get(name), AttentionMaskInterface().get(name)


# Tensors that models pass to attention among the keyword arguments of forward(), and that scores do not depend on.
BESIDE_ATTENTION = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "token_type_ids", "mm_token_type_ids", "seq_idx", *CACHES}
    | {"labels", "shift_labels", "num_items_in_batch", "logits_to_keep"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # read in packed.py
)


def asks_for_weights() -> bool:
    """Whether the caller of the current forward requested attention weights.

    Most models do not pass output_attentions=True on: Transformers collects the weights with hooks, and would return an empty
    tuple if the backend computes none.
    """
    collected = None if _active_collector is None else _active_collector.get()
    return bool(collected) and any(key.endswith("attentions") for key in collected)


# Models under torch.compile are checked too, but the check is not traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def why_not_model(config_class: type) -> str | None:
    """The reason why models of this config class cannot run a registered attention function; None if they can.

    Some modelling files compute attention in their own code and do not use the registry. They would silently ignore the
    backend, or add the spans to their scores as if they were a mask. The source is searched, as Transformers itself does.
    """
    return _why_not_source(config_class)


@cache
def _why_not_source(config_class: type) -> str | None:
    source = modeling_source(config_class)
    if re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) and "get_interface(" not in source:
        return (
            f"{config_class.__name__.removesuffix('Config')} computes attention in its own code and never asks Transformers' "
            "attention interface, so no registered backend can run in it; load this model without attn_implementation."
        )
    if "prepare_dynamic_mask(" in source:
        return (
            f"{config_class.__name__.removesuffix('Config')} adds a mask of its own to the one it is given, which must be dense; "
            "load this model without attn_implementation."
        )
    return None


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is the self-attention of a layer, which calls a registered attention function."""
    return hasattr(module, "layer_idx") and hasattr(module, "config") and "Attention" in type(module).__name__


def set_attention(model: PreTrainedModel, name: str) -> None:
    """set_attn_implementation(name), also for parts with a copy of the model's configuration (T5's encoder and decoder).

    Transformers 5.17 does not change those.
    """
    if own_attention(model) is not None:  # it refuses names that are not Transformers', and shares one configuration
        model.config._attn_implementation = name
        return
    model.set_attn_implementation(name)
    for part in unset_parts(model):
        part.set_attn_implementation(name)


def unset_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Parts with a copy of the model's configuration that set_attn_implementation() has not changed."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config)]
    return [part for part in parts if part.config._attn_implementation != model.config._attn_implementation]


def attention_names() -> list[str]:
    """All valid values of attn_implementation, including those of other packages, except those for continuous batching."""
    return ["eager", *(name for name in AttentionInterface().valid_keys() if "|" not in name)]
