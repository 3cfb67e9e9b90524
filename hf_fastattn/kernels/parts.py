"""Parts: the slots of a sequence that one of several ranks has, and the spans over them.

Blocks of PART slots belong to the ranks in turn, so ranks have equal parts of a text of any length, whatever the capacity of its
buffers. A rank's slots follow each other in a buffer of its own.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from .host import gpu
from .spans import NO_WINDOW, WORDS, has_rows, num_words

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
    make = _part_of_torch
    if gpu.on_gpu(spans.device):
        from .decode.part_of import run as make
    own, slots = make(rows, q_len, length, rank, ranks)
    return own.expand(spans.shape[0], -1, -1, -1), slots


def slots_before(stop: Slot, rank: int, ranks: int) -> Slot:
    """How many of the slots below `stop` are those of a rank."""
    whole, rest = stop // (PART * ranks) * PART, stop % (PART * ranks) - rank * PART
    return whole + (rest.clamp(0, PART) if isinstance(rest, torch.Tensor) else min(max(rest, 0), PART))


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
