"""The attention function that Transformers calls for a backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .. import hf, streaming
from ..kernels.host import gpu
from ..kernels.spec import Spec, is_plain
from . import linear, masks, packed, refuse, runners, training
from . import step as steps
from .backend import get


def attention_forward(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    key_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for Transformers: query (batch, num_heads, q_len, head_dim) -> ((batch, q_len, num_heads,
    head_dim), None).

    `attention_mask` is the result of the mask function, or a user's 4-D mask. Under autocast q, k and v are cast as in torch's
    sdpa. With gradients the ops of `training` run, or the dense path if the backend does not support their gradients
    or dropout. key_bias: (batch, num_heads, kv_len), added to the scores (`kernels.biased`). Raises ValueError, TypeError or
    RuntimeError, with the reason, for arguments that would be ignored.
    """
    compiling, backend = torch.compiler.is_compiling(), get(name)
    refuse.tracing(name, attention_mask)
    # A mask includes causality and window. Without a mask there is no window, whatever the value of sliding_window.
    mask, causal = attention_mask, False
    if kwargs:
        cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if cu_q is not None or cu_k is not None:
            mask = packed.separated(backend, mask, cu_q, cu_k)
        refuse.unknown_arguments(name, module, kwargs)
    if (prompts := steps.packed()) is not None:
        mask = packed.of_prompts(backend, mask, prompts, query)
    if (rows := steps.ragged()) is not None:
        rows.check(mask)
    if not compiling:
        refuse.other_than_stored(key, value)
        refuse.pages_without_mask(mask, key)
        refuse.weights(name)
    if backend.linear:
        refused: dict[str, object] = {
            "a bias of keys": key_bias,
            "softcap": softcap,
            "sink logits": s_aux,
            "sliding_window": sliding_window,
        }
        refused |= {"dropout": dropout or None if module.training else None, "rows in pages": rows}
        return linear.forward(module, query, key, value, attention_mask, scaling, is_causal, refused), None
    window, sinks, inv_freq, interleaved = None, 0, None, False
    if backend.streaming:
        inv_freq, interleaved = streaming.rotation(module, query, key)
        settings = streaming.Settings.of(module.config)  # type: ignore[arg-type]
        window, sinks = settings.window, settings.sinks
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and 1 < query.shape[2] != key.shape[2]:
            refuse.missing_mask(name, module, query, key)
        if causal and steps.captured():  # the keys are all slots of a buffer, and a mask says which of them hold tokens
            raise ValueError(f"{type(module).__name__} attends without a mask")
    elif isinstance(mask, masks.Mask):
        causal = isinstance(mask, masks.PlainMask)
        # In a compiled graph only the shape is symbolic. Elsewhere reading the shape is slow.
        sizes = mask.sizes if not compiling else refuse.sizes_of(mask)
        fits = rows is not None or (query.shape[0], query.shape[2], key.shape[2]) == sizes
        if not fits and not (causal and sizes[1] == query.shape[2] == 1):
            mask, causal = masks.broadcast(mask, refuse.other_sizes(mask, query, key)), False  # a single query sees all keys
    elif mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"An attention mask must be bool (True where attended) or float (added to the scores); got {mask.dtype}.")
    in_spans = mask is None or isinstance(mask, (masks.SpansMask, masks.PlainMask))
    if backend.streaming and not in_spans:
        raise ValueError(
            f"attn_implementation={name!r} was given a mask that it cannot combine with its window (a custom 4-D mask, packed "
            "sequences or chunked attention). Pass the 2-D attention_mask, or use another backend."
        )
    refuse.transforms(query, key, value, s_aux)
    if not 1 == query.stride(-1) == key.stride(-1) == value.stride(-1):
        query, key, value = steps.channels_last(query, key, value)
    dropped = dropout != 0 and module.training
    spec = Spec(scaling, causal, window, softcap, sinks, interleaved, dropout if dropped else 0.0)
    given = query, key, value, s_aux, mask, key_bias
    of_graph = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if dropped or of_graph:
        refuse.other_forms(name, steps.kv_of(key, value))
        lacks = training.why_not(backend, query, value, in_spans, dropped, key_bias)
        if lacks is not None:
            return runners.trained(backend, lacks, query, key, value, mask, spec, s_aux, key_bias)
    if isinstance(mask, masks.PlainMask):
        mask = None
    elif isinstance(mask, masks.Mask) and not compiling:
        mask = mask.content
    device_type = gpu.autocast_type(query.device)
    autocast = torch.is_autocast_enabled(device_type)
    if autocast:
        if is_plain(steps.kv_of(key, value).form):
            key, value = _autocast(device_type, key, value)
        (query,) = _autocast(device_type, query)
    if dropped or of_graph:
        if query.is_cuda and query.dtype == torch.float32 and not compiling:
            hf.warn_once(
                f"attn_implementation={name!r} trains in float32, without tensor cores: several times slower than in bfloat16. "
                "Load the model in bfloat16, or train under torch.autocast."
            )
        out, _ = training.attend(backend, query, key, value, spec, mask, s_aux, key_bias)
        return out.transpose(1, 2), None
    with torch.autocast(device_type, enabled=False) if autocast else nullcontext():  # the reference computes in fp32
        if compiling:
            out = torch.ops.hf_fastattn.attention(name, query, key, value, mask, s_aux, inv_freq, key_bias, *spec)
        else:
            out = runners.attend(backend, query, key, value, spec, mask, s_aux, inv_freq, key_bias)
    return out.transpose(1, 2), None


def _autocast(device_type: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast tensors as torch's autocast does for sdpa: to its dtype, except float64."""
    dtype = torch.get_autocast_dtype(device_type)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
