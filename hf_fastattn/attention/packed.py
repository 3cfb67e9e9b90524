"""Sequences packed into one row, which kernels get as an interval of keys for each query.

Transformers separates them by position_ids in its mask function, if there is neither a cache nor an attention_mask. It does not
read cu_seq_lens, which separate them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from .. import hf
from ..kernels import spans
from . import masks
from .backend import Backend
from .step import Packed, Unpackable


def of_runs(
    mask_function: Callable[..., Any], runs: hf.Runs, sizes: masks.Sizes, device: torch.device | str, made_for: masks.Names
) -> masks.Mask:
    """The mask for a pattern of `hf.runs_pattern`. sizes: with q_len == kv_len."""
    window, chunk = runs
    first = hf.run_starts(mask_function, sizes[0], sizes[1], device)
    rows = torch.ops.hf_fastattn.intervals(None, *spans.segments(first), sizes[2], window)
    return masks.of_runs(rows, sizes, made_for, chunk)


def separated(backend: Backend, mask: torch.Tensor | None, cu_q: Any, cu_k: Any) -> masks.Mask:
    """`mask` with the sequences of cu_seq_lens separated, besides those that it separates already; stored for the other layers.

    cu_q, cu_k: the same cumulative lengths, (sequences + 1,), int32 or int64, from 0 to q_len and never decreasing; cu_k may be
    None. Raises TypeError and ValueError for others. Values on a GPU are checked there, without synchronisation: a wrong one is
    an assertion on the device.
    """
    name = backend.name
    if not backend.packed:
        raise ValueError(f"{name!r} does not separate packed sequences by cu_seq_lens. Use another backend, such as 'lean'.")
    if not _is_one_row(mask):
        raise ValueError(
            f"{name!r} got packed sequences as cu_seq_lens, which it supports for one row without an attention_mask and without "
            "tokens in a cache. Leave out attention_mask, and pass use_cache=False; for several rows of a decoder, pass "
            "position_ids that restart at 0, and use_cache=False, instead of cu_seq_lens."
        )
    if torch.compiler.is_compiling():
        return _separated(mask, cu_q, cu_k)
    if mask.separated is None:
        mask.separated = _separated(mask, cu_q, cu_k)
    return mask.separated


def of_prompts(backend: Backend, mask: torch.Tensor | None, prompts: Packed, query: torch.Tensor) -> masks.Mask:
    """The same for prompts that a step reads as one row. Raises Unpackable if these queries or their mask are others."""
    prompts.attended += 1
    if query.shape[2] != prompts.row.shape[0] or not _is_one_row(mask):
        raise Unpackable("its layers have other masks")
    ends = prompts.ends.to(query.device)
    return separated(backend, mask, ends, ends)


def _is_one_row(mask: torch.Tensor | None) -> TypeGuard[masks.Mask]:
    return isinstance(mask, masks.Mask) and mask.shape[0] == 1 and mask.shape[2] == mask.shape[3] and _is_unpadded(mask)


def _is_unpadded(mask: masks.Mask) -> bool:
    first_form = isinstance(mask, masks.SpansMask) and mask.content.shape[3] == spans.WORDS
    return first_form or isinstance(mask, masks.RunsMask | masks.PlainMask)


_REMEDY = "Pass torch.tensor([0, *lengths], device=input_ids.device).cumsum(0) as both."


def _separated(mask: masks.Mask, cu_q: Any, cu_k: Any) -> masks.Mask:
    q_len, chunk = mask.shape[2], mask.chunk_size
    cu_k = cu_q if cu_k is None else cu_k
    for which, cu in (("q", cu_q), ("k", cu_k)):
        if not isinstance(cu, torch.Tensor) or cu.dtype not in (torch.int32, torch.int64):
            got = cu.dtype if isinstance(cu, torch.Tensor) else type(cu).__name__
            raise TypeError(f"cu_seq_lens_{which} must be a tensor of int32 or int64; got {got}. {_REMEDY}")
        if cu.dim() != 1 or cu.shape[0] < 2 or cu.shape != cu_q.shape or cu.device != mask.device:
            raise ValueError(
                f"cu_seq_lens_q and cu_seq_lens_k must be of one shape, (sequences + 1,), and on {mask.device}; got "
                f"cu_seq_lens_{which} of {tuple(cu.shape)} on {cu.device}. {_REMEDY}"
            )
    lo, hi = torch.ops.hf_fastattn.segments_of_lengths(cu_q, cu_k, q_len)
    if chunk is not None:
        lo, hi = spans.segments((torch.arange(q_len, device=lo.device) - lo) % chunk == 0)
    rows = torch.ops.hf_fastattn.intervals(mask if chunk is None else None, lo, hi, q_len, None)
    return masks.of_runs(rows, (1, q_len, q_len), mask.made_for)


def _segments_of_lengths(cu_q: torch.Tensor, cu_k: torch.Tensor, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`spans.segments_of_lengths` after a check of the values."""
    right = (cu_q[0] == 0) & (cu_q[-1] == q_len) & (cu_q.diff() >= 0).all() & (cu_q == cu_k).all()
    rule = f"cu_seq_lens_q and cu_seq_lens_k must be equal, begin with 0, never decrease, and end with the {q_len} tokens"
    if not right.is_cpu:
        torch._assert_async(right, rule)
    elif not right:
        raise ValueError(f"{rule}; got {cu_q.tolist()} and {cu_k.tolist()}. {_REMEDY}")
    return spans.segments_of_lengths(cu_q, q_len)


_segments_op = torch.library.custom_op("hf_fastattn::segments_of_lengths", _segments_of_lengths, mutates_args=())


@_segments_op.register_fake
def _(cu_q: torch.Tensor, cu_k: torch.Tensor, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cu_q.new_empty(1, q_len), cu_q.new_empty(1, q_len)


def _intervals(
    first_form: torch.Tensor | None, lo: torch.Tensor, hi: torch.Tensor, kv_len: int, window: int | None
) -> torch.Tensor:
    """`spans.with_rows`. first_form: spans whose first query is at slot 0, and whose intervals, if they have any, also apply;
    None for causal attention within `window`."""
    if first_form is None:
        batch, q_len = lo.shape
        first_form = spans.build_spans(batch, q_len, kv_len, lo.device, window=window)
    elif spans.has_rows(first_form):
        lo, hi = torch.maximum(lo, first_form[:, 0, 0, spans.WORDS :]), torch.minimum(hi, first_form[:, 0, 1, spans.WORDS :])
    return spans.with_rows(first_form[:, :, :1], lo, hi)


_intervals_op = torch.library.custom_op("hf_fastattn::intervals", _intervals, mutates_args=())


@_intervals_op.register_fake
def _(first_form: torch.Tensor | None, lo: torch.Tensor, hi: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    return lo.new_empty(lo.shape[0], 1, 2, spans.WORDS + lo.shape[1], dtype=torch.int32)
