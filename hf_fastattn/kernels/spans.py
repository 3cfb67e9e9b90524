"""Spans: which keys each row of a batch may attend to, as a few int32 on the device.

One tensor of shape (batch, 1, 1, 6) or (batch, 1, 1, 6 + ceil(kv_len / 32)), dtype int32, replaces a mask of
(batch, 1, q_len, kv_len). All positions are slots of the K/V buffers, so a cache that dropped its oldest tokens needs no offset.
A batch that the host knows to be uniform has one row, expanded: kernels recognise it by its batch stride of 0.

    Q_START   slot of the row's first query; query i is at slot Q_START + i
    KV_START  first live slot (left padding ends here)
    KV_STOP   one past the last live slot (right padding, or the unwritten end of a preallocated cache, begins here)
    WINDOW    query p sees key j only if p - j < WINDOW (and j - p < WINDOW if not causal); NO_WINDOW: no limit
    FLAGS     CAUSAL: query p sees key j only if j <= p.  HOLES: the bit mask below marks the live slots.
              ROWS: each query has its own interval.  FLAGS >> PADDING: so many of the last queries are padding of a captured
              step. A block of queries that has no others visits no keys; what padding gets as its result is not defined
    DROPPED   tokens that a rolling cache dropped between the row's sinks and its window. The mask does not depend on it. It gives
              the position of query i in its row, Q_START + i - KV_START + DROPPED, for the re-rotation that scores the sinks
    WORDS...  bit j % 32 of word j // 32 is 1 if slot j is live. Present only if a 2-D mask was given; read only below KV_STOP and
              only for rows with the HOLES flag

A second form has an interval of slots for each query instead of words: shape (batch, 1, 2, 6 + q_len), flag ROWS. LO and HI
follow the six integers, which the second line repeats: query i sees key j only if LO[i] <= j < HI[i]. Neither decreases with i,
so the queries that see a key are also an interval. Sequences packed into one row are such intervals (`segments`).

A query sees a key if every condition allows it. WINDOW does not hide the first live slots from a kernel with `sinks`. The
integers are built and read on the device, so lengths may change between replays of a CUDA graph.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .host import gpu

Q_START, KV_START, KV_STOP, WINDOW, FLAGS, DROPPED, WORDS = range(7)
CAUSAL, HOLES, ROWS = 1, 2, 4
PADDING = 8
NO_WINDOW = 1 << 30
AT_END = -(1 << 31)  # as Q_START of `no_spans`: queries end with the keys, whose number the launch has


def num_words(kv_len: int) -> int:
    """Number of 32-bit words in a key mask of `kv_len` slots."""
    return (kv_len + 31) // 32


def width_of(window: int | None) -> int:
    """A window as the kernels compare it with distances: at most NO_WINDOW, which is no limit, as None is."""
    return NO_WINDOW if window is None else min(window, NO_WINDOW)


@lru_cache(64)
def no_spans(device: torch.device, causal: bool, q_start: int = AT_END) -> torch.Tensor:
    """What a launch without spans takes in their place, (1, 1, 1, 6): the queries are at the end of the keys, at q_start."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "The first launch without spans must not be captured into a CUDA graph, as they are written outside of it. Run the "
            "model once with inputs of these shapes before capturing it."
        )
    ints = [q_start, 0, NO_WINDOW, NO_WINDOW, CAUSAL if causal else 0, 0]
    return torch.tensor(ints, dtype=torch.int32, device=device).view(1, 1, 1, WORDS)


def has_words(spans: torch.Tensor | None) -> bool:
    """Whether these spans have a key mask."""
    return spans is not None and not has_rows(spans) and spans.shape[3] > WORDS


def has_rows(spans: torch.Tensor | None) -> bool:
    """Whether these spans are of the second form, an interval for each query."""
    return spans is not None and spans.dim() == 4 and spans.shape[2] == 2


def build_spans(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    causal: bool = True,
    window: int | None = None,
    attention_mask: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """Spans (int32, see above) for `q_len` queries over a buffer of `kv_len` slots.

    q_offset: absolute position of the first query, an int or a device tensor, of one element (the length of a static cache) or of
    one for each row (those of rows in pages).
    kv_offset: absolute position of slot 0. attention_mask: bool (batch, seen), True for live positions; positions past its end
    are not live. live: int64 (1,), how many of the first queries are no padding, for causal spans; None for all. Without a mask
    the batch is uniform, unless q_offset has more elements. One launch on a GPU; never synchronises with the host.
    """
    mask, each = attention_mask, isinstance(q_offset, torch.Tensor) and q_offset.numel() > 1
    rows = 1 if mask is None and not each else batch
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != batch):
        raise ValueError(f"attention_mask must be bool of shape ({batch}, positions seen); got {mask.dtype} {tuple(mask.shape)}.")
    if isinstance(q_offset, torch.Tensor) and q_offset.numel() not in (1, batch):
        raise ValueError(f"q_offset has one element, or one for each of {batch} rows; got {tuple(q_offset.shape)}.")
    make = _build_spans_torch
    if gpu.on_gpu(torch.device(device)):
        from .decode.build_spans import run as make  # type: ignore[assignment]
    return make(rows, q_len, kv_len, device, q_offset, kv_offset, causal, window, mask, live).expand(batch, -1, -1, -1)


def _build_spans_torch(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    causal: bool,
    window: int | None,
    attention_mask: torch.Tensor | None,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in PyTorch; compiled graphs on a CPU run this too."""
    q_start = torch.as_tensor(q_offset, device=device).reshape(-1).to(torch.int32) - kv_offset
    q_start = q_start.expand(batch)
    queries = torch.full_like(q_start, q_len) if live is None else live.to(torch.int32).expand(batch)
    end = torch.clamp(q_start + queries, max=kv_len) if causal else torch.full_like(q_start, kv_len)
    start = torch.zeros_like(end)
    flags = ((q_len - queries) << PADDING) + (CAUSAL if causal else 0)
    ints = [q_start, start, end, torch.full_like(end, width_of(window)), flags]
    ints.append(torch.zeros_like(end))
    if attention_mask is None:
        return torch.stack(ints, -1).view(batch, 1, 1, WORDS)

    live = attention_mask[:, kv_offset : kv_offset + kv_len]
    padded = 32 * num_words(kv_len)
    live = torch.nn.functional.pad(live, (0, padded - live.shape[1]))
    slots = torch.arange(padded, device=device, dtype=torch.int32)
    # Slots past the last query are not live.
    seen = live & (slots < end[:, None])
    start = torch.where(seen, slots, kv_len).amin(-1)
    stop = torch.where(seen, slots + 1, 0).amax(-1)
    holes = (seen.sum(-1) < stop - start) & (stop > start)
    ints[1:3] = [start, stop]
    ints[4] = flags | torch.where(holes, HOLES, 0)
    bits = (seen.view(batch, -1, 32).to(torch.int64) << torch.arange(32, device=device)).sum(-1)
    words = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)  # as two's complement
    return torch.cat([torch.stack(ints, -1), words], -1).to(torch.int32).view(batch, 1, 1, -1)


def pack_spans(q_start: torch.Tensor, kv_start: torch.Tensor, kv_stop: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """Causal spans without window or holes, from int64 tensors (batch,)."""
    ints = [q_start, kv_start, kv_stop, torch.full_like(q_start, NO_WINDOW), torch.full_like(q_start, CAUSAL), dropped]
    return torch.stack(ints, -1).to(torch.int32).view(-1, 1, 1, WORDS)


def with_rows(spans: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Spans of the second form: `spans` of the first form, without holes, restricted to lo[i] <= j < hi[i] for query i.

    lo, hi: integers (batch, q_len). Neither decreases from one query to the next.
    """
    batch, q_len = lo.shape
    out = torch.empty(batch, 1, 2, WORDS + q_len, dtype=torch.int32, device=lo.device)
    out[..., :WORDS] = spans[..., :WORDS]
    out[..., FLAGS] |= ROWS
    out[:, 0, 0, WORDS:], out[:, 0, 1, WORDS:] = lo, hi
    return out


def segments(first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lo, hi) of sequences packed into rows, for `with_rows`; first: bool (batch, q_len), True where a sequence begins.

    Query i is at slot i.
    """
    q_len = first.shape[1]
    slots = torch.arange(q_len, device=first.device)
    lo = torch.where(first, slots, 0).cummax(-1).values
    # The next sequence begins at the smallest start after a slot. pad(value=q_len) would fix the length in a compiled graph.
    starts = torch.where(torch.nn.functional.pad(first[:, 1:], (0, 1)), slots + 1, q_len)
    return lo, starts.flip(-1).cummin(-1).values.flip(-1)


def segments_of_lengths(cu: torch.Tensor, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one row, from the cumulative lengths of its sequences, (sequences + 1,): from 0 to q_len, never decreasing."""
    which = torch.searchsorted(cu, torch.arange(q_len, device=cu.device, dtype=cu.dtype), right=True)
    return cu[which - 1][None], cu[which][None]
