"""The mask function that Transformers calls for a backend, and its custom op for compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import hf, streaming
from ..kernels import spans
from . import linear, masks, packed
from . import step as steps
from .backend import get


def attention_mask(
    name: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., bool] = hf.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: hf.PreTrainedConfig | None = None,
    **kwargs: Any,
) -> masks.Mask:
    """The mask function for Transformers: plain causal, spans, or dense if spans cannot express it (`masks.Mask`).

    Called once per step and kind of layer. Never synchronises with the device.
    """
    backend, compiling = get(name), torch.compiler.is_compiling()
    if not (compiling or hf.is_causal(mask_function)):
        if steps.captured() and isinstance(q_offset, torch.Tensor):  # not the mask of an encoder, whose length the host knows
            if q_length > 1:
                raise RuntimeError("tokens may see later ones, and those of a graph may be padding")
            mask_function, allow_is_bidirectional_skip = hf.up_to_query(mask_function), False  # later slots are empty
        elif q_length > 1:
            steps.note_later_tokens(config)
    flags = use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip
    pattern = hf.mask_pattern(mask_function, config, q_length, local_size, flags)
    sizes, at = (batch_size, q_length, kv_length), torch.device(device)
    model = "This model" if config is None else type(config).__name__.removesuffix("Config")
    made_for = name, model
    if (rows := steps.ragged()) is not None:
        return rows.mask(pattern, sizes, made_for)
    if backend.linear:
        linear.check_pattern(config, pattern)
        if steps.captured():
            return masks.plain(sizes, at, made_for)
    if backend.streaming:
        made = steps.mask_for(sizes, q_offset)
        streaming.check_mask(name, config, pattern, made is not None)
        if made is not None:
            return made
        if kv_length > q_length and not compiling:
            hf.warn_once(
                f"attn_implementation={name!r} masks dropped tokens, but this cache keeps them and grows with the text. "
                "hf_fastattn.patch() adds a cache that does not grow."
            )
    if pattern is None and backend.packed and attention_mask is None and kv_length == q_length > 1:
        at_start = not isinstance(q_offset, torch.Tensor) and q_offset == kv_offset == 0
        if at_start and (runs := hf.runs_pattern(mask_function, config, local_size, flags)) is not None:
            return packed.of_runs(mask_function, runs, sizes, device, made_for)
    if pattern is None:
        mask = hf.dense_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )
        return masks.of_bools(mask, made_for)
    causal, window = pattern
    on_device = q_offset if isinstance(q_offset, torch.Tensor) else None
    plain = causal and allow_is_causal_skip and (window is None or kv_length <= window) and attention_mask is None
    if plain and on_device is None and not compiling and q_offset + q_length == kv_length + kv_offset:
        return masks.plain(sizes, at, made_for)
    start = int(kv_offset)  # a tensor in assisted decoding, which synchronises at every step anyway
    if compiling:
        on_host = q_offset if on_device is None else 0
        ints = torch.ops.hf_fastattn.build_spans(*sizes, at, attention_mask, on_device, on_host, start, causal, window)
    else:
        options: dict[str, Any] = {"causal": causal, "window": window, "attention_mask": attention_mask}
        if causal and (on_device is not None or not steps.captured()):  # else it is an encoder's
            options["live"] = steps.live(q_length)
        ints = spans.build_spans(*sizes, at, q_offset=q_offset, kv_offset=start, **options)
    return masks.of_spans(ints, sizes, made_for)


def _build_spans(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    attention_mask: torch.Tensor | None,
    on_device: torch.Tensor | None,
    on_host: int,
    kv_offset: int,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """`spans.build_spans` with the strides that a compiled graph needs. on_device: q_offset, if it is a tensor."""
    q_offset = on_host if on_device is None else on_device
    options: dict[str, Any] = {"causal": causal, "window": window, "attention_mask": attention_mask}
    return spans.build_spans(batch, q_len, kv_len, device, q_offset=q_offset, kv_offset=kv_offset, **options).contiguous()


# In a compiled graph it is an opaque op, as is attention (`runners`).
_build_spans_op = torch.library.custom_op("hf_fastattn::build_spans", _build_spans, mutates_args=())


@_build_spans_op.register_fake
def _(
    batch: int, q_len: int, kv_len: int, device: torch.device, attention_mask: torch.Tensor | None, *others: object
) -> torch.Tensor:
    words = 0 if attention_mask is None else spans.num_words(kv_len)
    return torch.empty(batch, 1, 1, spans.WORDS + words, dtype=torch.int32, device=device)
