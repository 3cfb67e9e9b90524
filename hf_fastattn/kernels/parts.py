"""Parts: the slots of a sequence that one of several ranks has, and the spans over them.

Blocks of PART slots belong to the ranks in turn, so ranks have equal parts of a text of any length, whatever the capacity of its
buffers. A rank's slots follow each other in a buffer of its own.
"""

from __future__ import annotations

from typing import TypeVar

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .host import gpu, launch
from .spans import DROPPED, FLAGS, KV_START, KV_STOP, NO_WINDOW, Q_START, WINDOW, WORDS, has_rows, num_words

PART = 64  # consecutive slots of a rank
Slot = TypeVar("Slot", int, torch.Tensor)


def part_of(spans: torch.Tensor, q_len: int, length: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(spans over the slots that a rank has, its slots of the queries' own tokens, int64 (1, q_len), -1 without one).

    The buffer of a rank has `length` slots. The rank that has the slot of the first query also gets the tokens of the other
    queries, in the slots that follow: they are free, or are its own. So it alone computes what the queries see of each other, and
    all queries see the same keys of the other ranks. A window is only possible for one query. Raises ValueError for the second
    form, and for more than PART queries.
    """
    if has_rows(spans) or q_len > PART:
        raise ValueError(f"part_of() takes spans without an interval for each query, of at most {PART} queries.")
    rows = spans[:1] if spans.stride(0) == 0 else spans
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    make = _part_of_triton if gpu.on_gpu(spans.device) else _part_of_torch
    own, slots = make(rows, q_len, length, rank, ranks)
    return own.expand(spans.shape[0], -1, -1, -1), slots


def slots_before(stop: Slot, rank: int, ranks: int) -> Slot:
    """How many of the slots below `stop` are those of a rank."""
    whole, rest = stop // (PART * ranks) * PART, stop % (PART * ranks) - rank * PART
    return whole + (rest.clamp(0, PART) if isinstance(rest, torch.Tensor) else min(max(rest, 0), PART))


def _part_of_triton(rows: torch.Tensor, q_len: int, length: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def _part_of_torch(rows: torch.Tensor, q_len: int, length: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    ints = rows[..., :WORDS].clone()
    seen, start, stop, window, flags, dropped = ints.split(1, -1)
    before = slots_before(seen, rank, ranks)
    first = seen // PART % ranks == rank  # whether the first query's slot is here

    def local(slot: torch.Tensor) -> torch.Tensor:
        after = torch.where(first, (slot - seen).clamp(min=0), 0)
        return (slots_before(torch.minimum(slot, seen), rank, ranks) + after).clamp(max=length)

    if q_len == 1:
        start = torch.maximum(start, seen - window + 1)
    unlimited = torch.full_like(window, NO_WINDOW)
    bounds = [before, local(start.clamp(min=0)), local(torch.minimum(stop, seen + q_len))]
    own = torch.cat([*bounds, unlimited, flags, dropped], -1)
    if rows.shape[-1] > WORDS:
        each = PART // 32  # words of a block
        word = torch.arange(num_words(length), device=rows.device)
        block, at = word // each, before // PART
        whole = torch.where(first & (block > at), seen // PART + block - at, block * ranks + rank) * each + word % each
        known = rows[..., WORDS:]
        inside = whole < known.shape[-1]
        own = torch.cat([own, torch.where(inside, known.gather(-1, whole.clamp(max=known.shape[-1] - 1)), 0)], -1)
    token = torch.arange(q_len, device=rows.device)
    slot = seen[0, 0, 0].long() + token
    mine = torch.where(slot // PART % ranks == rank, slots_before(slot, rank, ranks), -1)
    return own.to(torch.int32), torch.where(first[0, 0, 0], before[0, 0, 0] + token, mine).view(1, -1)


if triton is not None:
    from .spans import store_spans

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
