"""The refusals and warnings of the attention and the mask function. Each message names the alternative."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from .. import hf
from ..hf import warn_once
from ..kernels.spec import KV, is_plain
from . import masks
from . import step as steps


def sizes_of(mask: masks.Mask) -> masks.Sizes:
    return mask.shape[0], mask.shape[-2], mask.shape[-1]


def tracing(name: str, mask: torch.Tensor | None) -> None:
    """Raise RuntimeError under torch.jit.trace, which records no kernels of Triton, and under torch.export, whose graphs cannot
    have a mask of this package as an argument."""
    if torch.compiler.is_dynamo_compiling():  # where torch 2.11 takes is_exporting() for true
        return
    if torch._C._is_tracing() or (torch.compiler.is_exporting() and isinstance(mask, masks.Mask)):
        raise RuntimeError(
            f"attn_implementation={name!r} cannot be recorded by torch.export, torch.jit.trace and torch.onnx.export. Call "
            'model.set_attn_implementation("sdpa") before; torch.compile supports it.'
        )


def transforms(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError under a transform of torch.func, and for forward-mode differentiation, whose tangents would be 0."""
    if torch.compiler.is_compiling():
        return
    in_forward_mode = getattr(forward_ad, "_current_level", 0) >= 0
    if torch._C._are_functorch_transforms_active() or (
        in_forward_mode and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    ):
        raise RuntimeError(
            "Attention of hf_fastattn has no forward-mode derivatives (torch.autograd.forward_ad) and does not run under "
            "transforms of torch.func (grad, vmap, jvp, jacrev). Use torch.autograd.grad, or "
            'attn_implementation="eager" for them.'
        )


def other_sizes(mask: masks.Mask, query: torch.Tensor, key: torch.Tensor) -> masks.Sizes:
    """The sizes of attention, (batch, q_len, kv_len). Raises ValueError if torch's sdpa does not broadcast the mask to them."""
    name, model = mask.made_for
    sizes, needed = sizes_of(mask), (query.shape[0], query.shape[2], key.shape[2])
    if not all(size in (1, wanted) for size, wanted in zip(sizes, needed, strict=True)):
        raise ValueError(
            f"{model} uses a mask made for {sizes[0]} rows of {sizes[1]} queries and {sizes[2]} keys on {needed[0]} rows of "
            f"{needed[1]} queries and {needed[2]} keys, and attn_implementation={name!r} cannot tell which of them it applies "
            "to. Load this model without attn_implementation."
        )
    if sizes[2] != needed[2] and not torch.compiler.is_compiling():
        warn_once(
            f"{model} applies a mask of one key to more keys, and attn_implementation={name!r} broadcasts it, as sdpa does. In "
            "rows with padding it says nothing about the padding."
        )
    return needed


def missing_mask(name: str, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """A causal module without a mask: with eager each query sees all keys, with sdpa causality is aligned at the first key."""
    raise ValueError(
        f"{type(module).__name__} is causal and gives attn_implementation={name!r} no mask for {query.shape[2]} queries and "
        f"{key.shape[2]} keys, which leaves open what each query sees. Pass a mask, or load this model with "
        'attn_implementation="eager", where each query sees all keys.'
    )


def unknown_arguments(name: str, module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for unsupported arguments, and for any tensor that scores may depend on."""
    if kwargs.get("output_attentions"):
        weights(name)
    if not isinstance(kwargs.get("cache"), hf.Cache | None):
        raise ValueError(f"{name!r} does not run in continuous batching (generate_batch); use generate().")
    for key, value in kwargs.items():
        if key not in hf.BESIDE_ATTENTION and _carries_tensor(value):
            raise ValueError(
                f"{type(module).__name__} hands {key}= to its attention, which {name!r} does not support and would ignore; "
                "load this model without attn_implementation."
            )


def other_forms(name: str, kv: KV) -> None:
    """Raise RuntimeError for gradients or dropout if K and V are not plain tensors."""
    if not is_plain(kv.form):
        raise RuntimeError(
            f"attn_implementation={name!r} supports gradients and dropout only with plain K and V, and this cache has the form "
            f"{kv.form.name!r}. Run under torch.no_grad() and call model.eval(), or pass use_cache=False."
        )


def _carries_tensor(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_carries_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(_carries_tensor(item) for item in value.values())
    return isinstance(value, torch.Tensor)


def weights(name: str) -> None:
    """Raise ValueError if the caller asks for attention weights."""
    if hf.asks_for_weights():
        raise ValueError(
            f"{name!r} never forms the attention weights that output_attentions=True requests. "
            'Load the model with attn_implementation="eager" to get them.'
        )


def pages_without_mask(mask: torch.Tensor | None, key: torch.Tensor) -> None:
    """Refuse the keys of whole pages without a mask of them, which would attend to slots behind the text."""
    step = steps.innermost()
    if step is None or step.shown is None or step.shown[0] is not key or step.mode != steps.EAGER:
        return
    known = (
        step.shown_tokens == key.shape[2] if mask is None else not isinstance(mask, masks.Mask) or mask.sizes[2] == key.shape[2]
    )
    if not known:
        raise ValueError(
            "The model attends to K and V in pages without a mask, or by one that was made without its cache. Use a "
            "PreallocatedCache."
        )


def other_than_stored(key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse K and V other than those that the model's cache stored in pages or in 8 bits, as of a model that repeats heads."""
    if key.dtype == torch.uint8 and is_plain(steps.kv_of(key, value).form):
        raise ValueError(
            "The model changes K and V after they are stored in 8 bits, where attention reads them. Leave out kv_dtype=."
        )
    step = steps.innermost()
    if step is None or step.kv is None or (step.ragged is None and step.shown is None):
        return
    if is_plain(steps.kv_of(key, value).form):
        raise ValueError(
            "The model changes K and V after they are stored in pages, where attention reads them. Use generate() without pages."
        )
