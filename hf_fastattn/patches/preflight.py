"""What patch() asks of a model and of its arguments before it changes anything: each refusal is a ValueError in a sentence."""

from __future__ import annotations

import torch

from .. import hf, registry
from ..streaming import Settings


def find_model(target):
    """The model whose generate() runs in the end."""
    model = target
    if not isinstance(model, torch.nn.Module) and isinstance(getattr(model, "model", None), torch.nn.Module):
        model = model.model  # a pipeline
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ValueError(
                "A PEFT model with prompt learning brings its own past_key_values and masks, which the preallocated cache does "
                "not take; patch models with LoRA and its relatives, or the base model."
            )
        model = model.get_base_model()
    if not isinstance(model, hf.PreTrainedModel) or not model.can_generate():
        raise TypeError(
            "patch() takes a Transformers model with generate(), a text-generation pipeline or a PEFT model; "
            f"got {type(target).__name__}."
        )
    return model


def which_cache(cache: str | None, backend: registry.Backend, graph: bool) -> str | None:
    """ "static", "rolling" or None, as patch() is asked for with `cache`."""
    if cache == "auto":
        cache = "rolling" if backend.streaming else "static"
    if cache not in ("static", "rolling", None):
        raise ValueError(f'cache must be "static", "rolling", or None for Transformers\' own; got {cache!r}.')
    if cache is not None and (cache == "rolling") != backend.streaming:
        raise ValueError(
            f"cache={cache!r} and {backend.name!r} cannot be combined: a rolling cache drops tokens that only a streaming "
            "backend does not read, and a static cache keeps tokens that a streaming backend never reads. Leave out cache=."
        )
    if graph and cache is None:
        raise ValueError("graph=True needs a preallocated cache, whose addresses stay; pass graph=False with cache=None.")
    return cache


def check_model(model, backend: registry.Backend) -> None:
    """Raise ValueError for a model that cannot run the backend, or whose generate() is not its own."""
    name = type(model).__name__
    if reason := hf.why_not_model(type(model.config)):
        raise ValueError(f"{name} cannot be patched: {reason}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} cannot be patched: it computes attention in its own code and does not let its attn_implementation be set."
        )
    if part := hf.generates_by_another(model):
        raise ValueError(
            f"{name} cannot be patched: its generate() calls that of its {part}. Patch that: hf_fastattn.patch(model.{part})."
        )
    if other := hf.sharer(model):
        raise ValueError(
            f"{name} cannot be patched: a {other} that is alive is built over a part of it, and would be changed too. Delete "
            "that one, or build it over a copy (copy.deepcopy) of the part."
        )
    if reason := _why_no_kernel(model, backend):
        raise ValueError(f"{name} cannot run {backend.name!r}: {reason}")


def _why_no_kernel(model, backend: registry.Backend) -> str | None:
    """Why the backend cannot serve one of the model's layers, in a sentence."""
    for shape in dict.fromkeys(hf.layer_shapes(model.config)):
        if shape.head_dim != shape.value_dim:
            return (
                f"keys have head_dim {shape.head_dim} and values {shape.value_dim}, and these kernels take one for both; "
                "load this model without attn_implementation, and do not patch it."
            )
        reason = backend.why_not(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        if reason:
            return reason
    return None


def which_settings(model, backend: registry.Backend, window: int | None, sinks: int | None, clamped: bool) -> Settings | None:
    """What a streaming backend is to keep of this model's text, checked; None for other backends."""
    if not backend.streaming:
        if window is not None or sinks is not None or clamped:
            raise ValueError(
                f'window, sinks and clamp_positions are for "streaming"; {backend.name!r} sees every token that the model does.'
            )
        return None
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return Settings.asked(backend.name, window, sinks, limit, clamped)


def which_windows(model) -> list[int | None]:
    """The windows of the model's layers, for a cache of ours."""
    if name := hf.overrides_generation(model):
        raise ValueError(f"{type(model).__name__} has its own {name}(), which the cache would replace.")
    return hf.layer_windows(model.config)
