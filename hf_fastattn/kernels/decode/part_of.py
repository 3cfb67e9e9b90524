"""The launch of `parts.part_of`.

Rounds: nothing. Limits: those of `parts.part_of`. Oracle: `parts._part_of_torch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..host import launch
from ..parts import PART
from ..spans import DROPPED, FLAGS, KV_START, KV_STOP, NO_WINDOW, Q_START, WINDOW, WORDS, num_words
from .build_spans import store_spans


def run(rows: torch.Tensor, q_len: int, length: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = num_words(length) if rows.shape[-1] > WORDS else 0
    own = torch.empty(rows.shape[0], 1, 1, WORDS + words, dtype=torch.int32, device=rows.device)
    slots = torch.empty(1, q_len, dtype=torch.int64, device=rows.device)
    launch.start(
        _part_of_kernel,
        (rows.shape[0],),
        own,
        slots,
        rows,
        rows.stride(0),
        rows.shape[-1] - WORDS,
        words,
        q_len,
        length,
        rank,
        ranks,
        PART=PART,
        BLOCK=128,
        num_warps=4,
    )
    return own, slots


@triton.jit
def _slots_before(stop, rank, ranks, PART: tl.constexpr):
    rest = stop % (PART * ranks) - rank * PART
    return stop // (PART * ranks) * PART + tl.minimum(tl.maximum(rest, 0), PART)


@triton.jit
def _local(slot, seen, first, length, rank, ranks, PART: tl.constexpr):
    """The slot of this rank for a slot of the whole, one past the last key of a query or its first."""
    after = tl.where(first, tl.maximum(slot - seen, 0), 0)
    return tl.minimum(_slots_before(tl.minimum(slot, seen), rank, ranks, PART) + after, length)


@triton.jit(do_not_specialize=["stride", "whole_words", "words", "q_len", "length", "rank", "ranks"])
def _part_of_kernel(
    Own,  # (rows, 1, 1, WORDS + words), int32, written
    Slots,  # (1, q_len), int64, written
    Spans,  # (rows, 1, 1, WORDS + whole_words), int32
    stride, whole_words, words, q_len, length, rank, ranks,
    PART: tl.constexpr, BLOCK: tl.constexpr, Q_START: tl.constexpr = Q_START, KV_START: tl.constexpr = KV_START,
    KV_STOP: tl.constexpr = KV_STOP, WINDOW: tl.constexpr = WINDOW, FLAGS: tl.constexpr = FLAGS,
    DROPPED: tl.constexpr = DROPPED, WORDS: tl.constexpr = WORDS, NO_WINDOW: tl.constexpr = NO_WINDOW,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    spans, own = Spans + row * stride, Own + row * (WORDS + words)
    seen = tl.load(spans + Q_START)
    start = tl.load(spans + KV_START)
    stop = tl.minimum(tl.load(spans + KV_STOP), seen + q_len)
    window = tl.load(spans + WINDOW)
    if q_len == 1:
        start = tl.maximum(start, seen - window + 1)
    start = tl.maximum(start, 0)
    before = _slots_before(seen, rank, ranks, PART)
    first = seen // PART % ranks == rank
    kv_start = _local(start, seen, first, length, rank, ranks, PART)
    kv_stop = _local(stop, seen, first, length, rank, ranks, PART)
    store_spans(own, before, kv_start, kv_stop, NO_WINDOW, tl.load(spans + FLAGS), tl.load(spans + DROPPED))
    for w in tl.range(0, words, BLOCK):
        word = w + tl.arange(0, BLOCK)
        block = word // (PART // 32)
        at = before // PART
        block = tl.where(first & (block > at), seen // PART + block - at, block * ranks + rank)
        whole = block * (PART // 32) + word % (PART // 32)
        bits = tl.load(spans + WORDS + whole, mask=(word < words) & (whole < whole_words), other=0)
        tl.store(own + WORDS + word, bits, mask=word < words)
    if row == 0:
        token = tl.arange(0, PART)
        slot = seen + token
        mine = tl.where(slot // PART % ranks == rank, _slots_before(slot, rank, ranks, PART), -1)
        tl.store(Slots + token, tl.where(first, before + token, mine).to(tl.int64), mask=token < q_len)
