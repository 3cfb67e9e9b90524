"""The launch of `spans.build_spans`, and the device function by which kernels write spans.

Rounds: nothing. Limits: those of `spans.build_spans`. Oracle: `spans._build_spans_torch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..host import launch
from ..spans import CAUSAL, DROPPED, FLAGS, HOLES, KV_START, KV_STOP, PADDING, Q_START, WINDOW, WORDS, num_words, width_of


def run(
    rows: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    causal: bool,
    window: int | None,
    mask: torch.Tensor | None,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    words = 0 if mask is None else num_words(kv_len)
    spans = torch.empty(rows, 1, 1, WORDS + words, dtype=torch.int32, device=device)
    offset = q_offset.contiguous() if isinstance(q_offset, torch.Tensor) else None
    null = torch.empty(0, dtype=torch.int64, device=device)
    launch.start(
        _build_spans_kernel,
        (rows,),
        spans,
        spans if mask is None else mask,
        null if offset is None else offset,
        null if live is None else live,
        q_offset if offset is None else 0,
        0 if mask is None else mask.stride(0),
        1 if mask is None else mask.stride(1),
        0 if mask is None else mask.shape[1],
        words,
        q_len,
        kv_len,
        kv_offset,
        width_of(window),
        EACH=offset is not None and offset.numel() > 1,
        HAS_MASK=mask is not None,
        CAUSAL=CAUSAL if causal else 0,
        HOLES=HOLES,
        NUM_INTS=WORDS,
        BLOCK=128,
        num_warps=8,
    )
    return spans


@triton.jit
def store_spans(
    span_ptrs, q_start, kv_start, kv_stop, window, flags, dropped, mask=None,
    Q_START: tl.constexpr = Q_START, KV_START: tl.constexpr = KV_START, KV_STOP: tl.constexpr = KV_STOP,
    WINDOW: tl.constexpr = WINDOW, FLAGS: tl.constexpr = FLAGS, DROPPED: tl.constexpr = DROPPED,
):  # fmt: skip
    """Write the integers of one row (scalars) or of several rows (blocks with a mask)."""
    tl.store(span_ptrs + Q_START, q_start, mask=mask)
    tl.store(span_ptrs + KV_START, kv_start, mask=mask)
    tl.store(span_ptrs + KV_STOP, kv_stop, mask=mask)
    tl.store(span_ptrs + WINDOW, window, mask=mask)
    tl.store(span_ptrs + FLAGS, flags, mask=mask)
    tl.store(span_ptrs + DROPPED, dropped, mask=mask)


@triton.jit(do_not_specialize=["q_offset", "mask_stride_b", "mask_len", "words", "q_len", "kv_len", "kv_offset", "window"])
def _build_spans_kernel(
    Spans,  # (rows, 1, 1, NUM_INTS + words), int32, written
    Mask,  # (rows, mask_len), bool, read with HAS_MASK
    Offset,  # (1,), or with EACH (rows,), int; null with q_offset
    Live,  # (1,), int64; null if no query is padding
    q_offset, mask_stride_b, mask_stride_n, mask_len, words, q_len, kv_len, kv_offset, window,
    EACH: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr,
    NUM_INTS: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr = PADDING,
):  # fmt: skip
    """One program per row: reads the row's mask once, BLOCK words at a time, up to the slot of the last query."""
    row = tl.program_id(0).to(tl.int64)
    out = Spans + row * (NUM_INTS + words)
    if EACH:
        Offset += row
    q_start = q_offset + tl.load(Offset, mask=Offset.to(tl.int64) != 0, other=0).to(tl.int32) - kv_offset
    queries = tl.load(Live, mask=Live.to(tl.int64) != 0, other=q_len).to(tl.int32)
    if CAUSAL:
        stop = tl.minimum(q_start + queries, kv_len)
    else:
        stop = kv_len
    start = kv_len * 0
    flags = ((q_len - queries) << PADDING) + CAUSAL
    if HAS_MASK:
        first = kv_len
        last = kv_len * 0
        count = kv_len * 0
        bit = tl.arange(0, 32)
        for w in tl.range(0, (stop + 31) // 32, BLOCK):
            offs_w = w + tl.arange(0, BLOCK)
            slots = offs_w[:, None] * 32 + bit[None, :]
            column = slots + kv_offset
            live = tl.load(
                Mask + row * mask_stride_b + column.to(tl.int64) * mask_stride_n,
                mask=(slots < stop) & (column < mask_len),
                other=0,
            )
            seen = live != 0
            tl.store(out + NUM_INTS + offs_w, tl.sum(seen.to(tl.int32) << bit[None, :], 1), mask=offs_w < words)
            first = tl.minimum(first, tl.min(tl.min(tl.where(seen, slots, kv_len), 1), 0))
            last = tl.maximum(last, tl.max(tl.max(tl.where(seen, slots + 1, 0), 1), 0))
            count += tl.sum(tl.sum(seen.to(tl.int32), 1), 0)
        start = first
        stop = last
        if (count < stop - start) & (stop > start):
            flags += HOLES
    store_spans(out, q_start, start, stop, window, flags, 0)
