"""Which keys the rows of a block see.

A query row sees one interval [row_lo, row_hi) of slots, except holes of the key mask. Causality, sliding window, padding, the
live length and the query's own interval are bounds of that interval. With sinks it also sees the first live slots of the batch
row. No bound decreases from one query to the next, so the queries that see a key are also an interval.
"""

import triton
import triton.language as tl

from ..spans import AT_END, CAUSAL, DROPPED, FLAGS, HOLES, KV_START, KV_STOP, PADDING, Q_START, WINDOW, WORDS

STEPS = 512  # numbers that a search compares at once


@triton.jit
def load_spans(
    span_ptrs, q_len, kv_len, window,
    IS_CAUSAL: tl.constexpr,
    Q_START: tl.constexpr = Q_START,
    KV_START: tl.constexpr = KV_START,
    KV_STOP: tl.constexpr = KV_STOP,
    WINDOW: tl.constexpr = WINDOW,
    FLAGS: tl.constexpr = FLAGS,
    CAUSAL: tl.constexpr = CAUSAL,
    HOLES: tl.constexpr = HOLES,
    AT_END: tl.constexpr = AT_END,
    PADDING: tl.constexpr = PADDING,
    MAY_END: tl.constexpr = True,
    PAST_L1: tl.constexpr = False,
):  # fmt: skip
    """The spans of one row (`span_ptrs` is a scalar) or of several (a block of pointers).

    Returns (q_start, kv_start, kv_stop, window, causal, holes, live_stop). kv_start and kv_stop are clamped to the buffer of
    `kv_len` slots. live_stop: one past the slot of the last query that is no padding.
    IS_CAUSAL: whether rows are causal whatever their spans say. MAY_END: whether Q_START may be AT_END (it costs the loops of the
    Hopper kernel registers). PAST_L1: whether the loads go past the L1 cache.
    """
    CACHE: tl.constexpr = ".cg" if PAST_L1 else ""
    q_start = tl.load(span_ptrs + Q_START, cache_modifier=CACHE)
    if MAY_END:
        q_start = tl.where(q_start == AT_END, kv_len - q_len, q_start)
    kv_start = tl.maximum(tl.load(span_ptrs + KV_START, cache_modifier=CACHE), 0)
    kv_stop = tl.minimum(tl.load(span_ptrs + KV_STOP, cache_modifier=CACHE), kv_len)
    window = tl.minimum(tl.load(span_ptrs + WINDOW, cache_modifier=CACHE), window)
    flags = tl.load(span_ptrs + FLAGS, cache_modifier=CACHE)
    causal = (flags & CAUSAL) != 0
    if IS_CAUSAL:
        causal = causal | True
    return q_start, kv_start, kv_stop, window, causal, (flags & HOLES) != 0, q_start + q_len - (flags >> PADDING)


@triton.jit
def row_bounds(pos, kv_start, kv_stop, window, causal):
    """The interval [lo, hi) of slots that a query at slot `pos` sees (a scalar or a block of them)."""
    lo = tl.maximum(kv_start, pos - window + 1)
    hi = tl.minimum(kv_stop, pos + tl.where(causal, 1, window))
    return lo, tl.maximum(lo, hi)


@triton.jit
def block_bounds(first_pos, last_pos, live_stop, kv_start, kv_stop, window, causal):
    """For the queries first_pos..last_pos: [lo, hi), which any of them sees, and [full_lo, full_hi), which all of them see.

    Padding, from live_stop on, does not count: a block of nothing else has lo = hi. live_stop may be None if one of them is none.
    """
    lo, full_hi = row_bounds(first_pos, kv_start, kv_stop, window, causal)
    if live_stop is not None:
        last_pos = tl.minimum(last_pos, live_stop - 1)
    full_lo, hi = row_bounds(last_pos, kv_start, kv_stop, window, causal)
    # If its window begins past the last live slot, a query has an empty interval there; those slots must not be loaded.
    hi = tl.maximum(lo, tl.minimum(hi, kv_stop))
    if live_stop is not None:
        hi = tl.where(first_pos < live_stop, hi, lo)
    return lo, hi, full_lo, full_hi


@triton.jit
def narrowed(lo, hi, span_ptr, q_index, q_len, ROWS: tl.constexpr, WORDS: tl.constexpr = WORDS):
    """The bounds [lo, hi) of the queries `q_index`, restricted to the interval of each query if the spans have one."""
    if ROWS:
        lo = tl.maximum(lo, tl.load(span_ptr + WORDS + q_index))
        hi = tl.maximum(lo, tl.minimum(hi, tl.load(span_ptr + 2 * WORDS + q_len + q_index)))
    return lo, hi


@triton.jit
def narrowed_block(bounds, kv_stop, span_ptr, first, last, q_len, ROWS: tl.constexpr):
    """The result of `block_bounds` for the queries first..last, restricted to their intervals if the spans have them."""
    lo, hi, full_lo, full_hi = bounds
    if ROWS:
        lo, full_hi = narrowed(lo, full_hi, span_ptr, first, q_len, True)
        full_lo, hi = narrowed(full_lo, hi, span_ptr, last, q_len, True)
        hi = tl.maximum(lo, tl.minimum(hi, kv_stop))
    return lo, hi, full_lo, full_hi


@triton.jit
def sink_stop(pos, kv_start, kv_stop, causal, SINKS: tl.constexpr):
    """The end of the sinks that a query at slot `pos` sees; they begin at kv_start."""
    stop = tl.minimum(kv_start + SINKS, kv_stop)
    return tl.where(causal, tl.minimum(stop, pos + 1), stop)


@triton.jit
def key_bounds(
    span_ptr, q_index, first, last, q_len, kv_len, window,
    C: tl.constexpr,
    DROPPED: tl.constexpr = DROPPED,
):  # fmt: skip
    """The bounds of the keys that the queries `q_index` (a block) of one batch row see; first, last: the range of the block.

    Returns (bounds, sink_bounds). bounds = (row_lo, row_hi, lo, hi, full_lo, full_hi, holes): the bounds of each query, of any
    query and of all queries, and whether the batch row has holes. sink_bounds = (sink_lo, sink_hi, position of query 0).
    """
    SINKS: tl.constexpr = C.SINKS
    q_start, kv_start, kv_stop, window, causal, holes, live_stop = load_spans(span_ptr, q_len, kv_len, window, C.IS_CAUSAL)
    sink_lo, sink_hi = kv_start, sink_stop(q_start + q_index, kv_start, kv_stop, causal, SINKS)
    kv_start += SINKS
    row_lo, row_hi = row_bounds(q_start + q_index, kv_start, kv_stop, window, causal)
    row_lo, row_hi = narrowed(row_lo, row_hi, span_ptr, q_index, q_len, C.ROWS)
    of_block = block_bounds(q_start + first, q_start + last, live_stop, kv_start, kv_stop, window, causal)
    lo, hi, full_lo, full_hi = narrowed_block(of_block, kv_stop, span_ptr, first, last, q_len, C.ROWS)
    position = q_start - sink_lo
    if C.PAIRS:
        position += tl.load(span_ptr + DROPPED)
    return (row_lo, row_hi, lo, hi, full_lo, full_hi, holes), (sink_lo, sink_hi, position)


@triton.jit
def _load_ends(ptr, known, left, steps):
    """(the last number of each part of ptr[known : known + left], the size of a part)."""
    size = tl.maximum((left + steps.shape[0] - 1) // steps.shape[0], 1)
    ends = (steps + 1) * size - 1
    return tl.load(ptr + known + ends, mask=ends < left, other=2147483647), size


@triton.jit
def _exclude(known, left, ends, size, limit):
    """(known, left) without the parts that are decided: `known` numbers are at most `limit`, the `left` after them undecided."""
    parts = tl.sum((ends <= limit).to(tl.int32), 0)
    known += parts * size
    return known, tl.where(size == 1, 0, tl.minimum(left - parts * size, size - 1))


@triton.jit
def queries_of_keys(span_ptr, first_key, last_key, q_len, steps, WORDS: tl.constexpr = WORDS):
    """The queries whose intervals contain some or all of the keys first_key..last_key: (lo, hi, full_lo, full_hi).

    Four searches at once, because each waits for memory in every step. steps: 0..n - 1, the parts of one step.
    """
    LO, HI = span_ptr + WORDS, span_ptr + 2 * WORDS + q_len
    none = q_len * 0
    lo, hi, full_lo, full_hi = none, none, none, none
    left_lo, left_hi, left_full_lo, left_full_hi = q_len, q_len, q_len, q_len
    while (left_lo | left_full_lo | left_hi | left_full_hi) > 0:
        ends_lo, size_lo = _load_ends(HI, lo, left_lo, steps)
        ends_full_lo, size_full_lo = _load_ends(HI, full_lo, left_full_lo, steps)
        ends_hi, size_hi = _load_ends(LO, hi, left_hi, steps)
        ends_full_hi, size_full_hi = _load_ends(LO, full_hi, left_full_hi, steps)
        lo, left_lo = _exclude(lo, left_lo, ends_lo, size_lo, first_key)
        full_lo, left_full_lo = _exclude(full_lo, left_full_lo, ends_full_lo, size_full_lo, last_key)
        hi, left_hi = _exclude(hi, left_hi, ends_hi, size_hi, last_key)
        full_hi, left_full_hi = _exclude(full_hi, left_full_hi, ends_full_hi, size_full_hi, first_key)
    return lo, hi, full_lo, full_hi


@triton.jit
def query_bounds(
    span_ptr, first_key, last_key, q_len, kv_len, window,
    C: tl.constexpr,
    STEPS: tl.constexpr = STEPS,
):  # fmt: skip
    """The queries that see the keys first_key..last_key: (bounds of queries, spans, holes).

    The bounds are (lo, hi, full_lo, full_hi): the queries [lo, hi) that see any of these keys, and those that see all of them.
    No query sees keys before KV_START or from KV_STOP on.
    """
    q_start, kv_start, kv_stop, window, causal, holes, _ = load_spans(span_ptr, q_len, kv_len, window, C.IS_CAUSAL)
    whole = (first_key >= kv_start) & (last_key < kv_stop)
    first_key, last_key = tl.maximum(first_key, kv_start), tl.minimum(last_key, kv_stop - 1)
    ahead = tl.where(causal, 0, window - 1) + q_start
    lo, full_lo = first_key - ahead, last_key - ahead
    hi, full_hi = last_key - q_start + window, first_key - q_start + window
    if C.ROWS:
        by_rows = queries_of_keys(span_ptr, first_key, last_key, q_len, tl.arange(0, STEPS))
        lo, hi = tl.maximum(lo, by_rows[0]), tl.minimum(hi, by_rows[1])
        full_lo, full_hi = tl.maximum(full_lo, by_rows[2]), tl.minimum(full_hi, by_rows[3])
    lo = tl.maximum(lo, 0)
    hi = tl.maximum(tl.where(first_key <= last_key, tl.minimum(hi, q_len), lo), lo)
    full_hi = tl.where(whole & ~holes, tl.minimum(full_hi, hi), lo)
    return (lo, hi, tl.maximum(full_lo, lo), full_hi), (q_start, kv_start, kv_stop, window, causal), holes


@triton.jit
def packed_rows(rows, q_len, GROUP: tl.constexpr):
    """Row r of a packed block is query r // GROUP of head r % GROUP, so that all queries of a KV head read its K and V together.

    Returns (query index, head within the group, mask of the valid rows); rows past the end repeat the last query.
    """
    return tl.minimum(rows // GROUP, q_len - 1), rows % GROUP, rows < q_len * GROUP
