"""Sequences packed into one row, which kernels get as an interval of keys for each query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import hf, masks
from .kernels import spans


def of_runs(
    mask_function: Callable[..., Any],
    window: int | None,
    sizes: tuple[int, int, int],
    device: torch.device | str,
    made_for: tuple[str, str],
    chunk: int | None,
) -> masks.Mask:
    """The mask for a pattern of `hf.runs_pattern`. sizes: (batch, q_len, kv_len), with q_len == kv_len.

    chunk: the size of its chunks if packed sequences have not been detected yet.
    """
    first = hf.run_starts(mask_function, sizes[0], sizes[1], device)
    rows = torch.ops.hf_fastattn.intervals(None, *spans.segments(first), sizes[2], window)
    mask = masks.of_runs(rows, sizes, made_for)
    if chunk is not None:
        mask.chunk_size, mask.fresh = chunk, True
    return mask


def separated(mask: masks.Mask, arguments: dict[str, Any]) -> masks.Mask:
    """`mask` with packed sequences separated, which the cu_seq_lens or position_ids in a layer's arguments define.

    Transformers separates them itself if position_ids restart, but not with a cache, and not for cu_seq_lens alone.
    The result is stored with the mask, for the other layers that share it.
    """
    if torch.compiler.is_compiling():
        return _separated(mask, arguments)
    if mask.separated is None:
        result = _separated(mask, arguments)
        if result is mask:
            mask.fresh = False  # the other layers need not check
            return mask
        mask.separated = result
    return mask.separated


def _separated(mask: masks.Mask, arguments: dict[str, Any]) -> masks.Mask:
    batch, _, q_len, kv_len = mask.shape
    chunk = mask.chunk_size
    cu_q, cu_k, position_ids = (arguments.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
    if cu_q is not None and batch == 1 and q_len == kv_len and (_is_simple(mask) or chunk is not None):
        lo, hi = spans.segments_of_lengths(cu_q, cu_q if cu_k is None else cu_k, q_len)
    elif mask.fresh and isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == q_len:
        again = spans.restarts(position_ids)
        # This synchronises with the device, once for each mask. A compiled graph always uses intervals.
        if not torch.compiler.is_compiling() and not again.any():
            return mask
        lo, hi = spans.segments(torch.nn.functional.pad(again, (1, 0), value=True))
    else:
        return mask
    if chunk is not None:
        lo, hi = spans.segments((torch.arange(q_len, device=lo.device) - lo) % chunk == 0)
    rows = torch.ops.hf_fastattn.intervals(mask, lo.expand(batch, -1), hi.expand(batch, -1), kv_len, None)
    return masks.of_runs(rows, (batch, q_len, kv_len), mask.made_for)


def _is_simple(mask: masks.Mask) -> bool:
    """Whether it has spans without padding and without intervals."""
    if mask.fresh or isinstance(mask, masks.PlainMask):
        return True
    return isinstance(mask, masks.SpansMask) and mask.content.shape[2:] == (1, spans.WORDS)


def _intervals(
    first_form: torch.Tensor | None, lo: torch.Tensor, hi: torch.Tensor, kv_len: int, window: int | None
) -> torch.Tensor:
    """`spans.with_rows`. first_form: None for lower-right causal attention within `window`."""
    if first_form is None:
        batch, q_len = lo.shape
        first_form = spans.build_spans(batch, q_len, kv_len, lo.device, q_offset=kv_len - q_len, window=window)
    else:  # tokens in a static cache belong to the first sequence
        q_start = first_form[:, 0, 0, spans.Q_START, None]
        lo, hi = torch.where(lo > 0, lo + q_start, 0), hi + q_start
    return spans.with_rows(first_form, lo, hi)


_intervals_op = torch.library.custom_op("hf_fastattn::intervals", _intervals, mutates_args=())


@_intervals_op.register_fake
def _(first_form: torch.Tensor | None, lo: torch.Tensor, hi: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    return lo.new_empty(lo.shape[0], 1, 2, spans.WORDS + lo.shape[1], dtype=torch.int32)
