"""Which keys the rows of a block see.

A query row sees one interval [row_lo, row_hi) of slots, except holes of the key mask. Causality, sliding window, padding, the
live length and the query's own interval are bounds of that interval. With sinks it also sees the first live slots of the batch
row. No bound decreases from one query to the next, so the queries that see a key are also an interval.
"""

import triton
import triton.language as tl

from ..spans import CAUSAL, FLAGS, HOLES, KV_START, KV_STOP, Q_START, WINDOW, WORDS


@triton.jit
def load_spans(
    span_ptrs, q_len, kv_len, window,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    Q_START: tl.constexpr = Q_START,
    KV_START: tl.constexpr = KV_START,
    KV_STOP: tl.constexpr = KV_STOP,
    WINDOW: tl.constexpr = WINDOW,
    FLAGS: tl.constexpr = FLAGS,
    CAUSAL: tl.constexpr = CAUSAL,
    HOLES: tl.constexpr = HOLES,
):  # fmt: skip
    """The spans of one row (`span_ptrs` is a scalar) or of several (a block of pointers), or their values if there are no spans.

    Returns (q_start, kv_start, kv_stop, window, causal, holes). kv_start and kv_stop are clamped to the buffer of `kv_len` slots.
    """
    if HAS_SPANS:
        q_start = tl.load(span_ptrs + Q_START)
        kv_start = tl.maximum(tl.load(span_ptrs + KV_START), 0)
        kv_stop = tl.minimum(tl.load(span_ptrs + KV_STOP), kv_len)
        window = tl.minimum(tl.load(span_ptrs + WINDOW), window)
        flags = tl.load(span_ptrs + FLAGS)
        holes = (flags & HOLES) != 0
        causal = (flags & CAUSAL) != 0
        if IS_CAUSAL:
            causal = causal | True
    else:
        q_start = kv_len - q_len
        kv_start = q_start * 0
        kv_stop = kv_len
        holes = tl.full([], False, tl.int1)
        causal = tl.full([], IS_CAUSAL, tl.int1)
    return q_start, kv_start, kv_stop, window, causal, holes


@triton.jit
def row_bounds(pos, kv_start, kv_stop, window, causal):
    """The interval [lo, hi) of slots that a query at slot `pos` sees (a scalar or a block of them)."""
    lo = tl.maximum(kv_start, pos - window + 1)
    hi = tl.minimum(kv_stop, pos + tl.where(causal, 1, window))
    return lo, tl.maximum(lo, hi)


@triton.jit
def block_bounds(first_pos, last_pos, kv_start, kv_stop, window, causal):
    """For the queries first_pos..last_pos: [lo, hi), which any of them sees, and [full_lo, full_hi), which all of them see."""
    lo, full_hi = row_bounds(first_pos, kv_start, kv_stop, window, causal)
    full_lo, hi = row_bounds(last_pos, kv_start, kv_stop, window, causal)
    # If its window begins past the last live slot, a query has an empty interval there; those slots must not be loaded.
    return lo, tl.maximum(lo, tl.minimum(hi, kv_stop)), full_lo, full_hi


@triton.jit
def narrowed(lo, hi, span_ptr, q_index, q_len, ROWS: tl.constexpr, WORDS: tl.constexpr = WORDS):
    """The bounds [lo, hi) of the queries `q_index`, restricted to the interval of each query if the spans have one."""
    if ROWS:
        lo = tl.maximum(lo, tl.load(span_ptr + WORDS + q_index))
        hi = tl.maximum(lo, tl.minimum(hi, tl.load(span_ptr + 2 * WORDS + q_len + q_index)))
    return lo, hi


@triton.jit
def sink_stop(pos, kv_start, kv_stop, causal, SINKS: tl.constexpr):
    """The end of the sinks that a query at slot `pos` sees; they begin at kv_start."""
    stop = tl.minimum(kv_start + SINKS, kv_stop)
    return tl.where(causal, tl.minimum(stop, pos + 1), stop)


@triton.jit
def key_bounds(
    span_ptr, q_index, first, last, q_len, kv_len, window,
    C: tl.constexpr,
):  # fmt: skip
    """The bounds of the keys that the queries `q_index` (a block) of one batch row see; first, last: the range of the block.

    Returns (bounds, sink_bounds). bounds = (row_lo, row_hi, lo, hi, full_lo, full_hi, holes): the bounds of each query, of any
    query and of all queries, and whether the batch row has holes. sink_bounds = (sink_lo, sink_hi, q_start - sink_lo).
    """
    SINKS: tl.constexpr = C.SINKS
    q_start, kv_start, kv_stop, window, causal, holes = load_spans(span_ptr, q_len, kv_len, window, C.HAS_SPANS, C.IS_CAUSAL)
    sink_lo, sink_hi = kv_start, sink_stop(q_start + q_index, kv_start, kv_stop, causal, SINKS)
    kv_start += SINKS
    row_lo, row_hi = row_bounds(q_start + q_index, kv_start, kv_stop, window, causal)
    lo, hi, full_lo, full_hi = block_bounds(q_start + first, q_start + last, kv_start, kv_stop, window, causal)
    if C.ROWS:
        row_lo, row_hi = narrowed(row_lo, row_hi, span_ptr, q_index, q_len, True)
        lo, full_hi = narrowed(lo, full_hi, span_ptr, first, q_len, True)
        full_lo, last_hi = narrowed(full_lo, hi, span_ptr, last, q_len, True)
        hi = tl.maximum(lo, tl.minimum(last_hi, kv_stop))
    return (row_lo, row_hi, lo, hi, full_lo, full_hi, holes), (sink_lo, sink_hi, q_start - sink_lo)


@triton.jit
def _count_up_to(ptr, q_len, limit, STEPS: tl.constexpr = 512):
    """How many of the q_len sorted numbers at `ptr` are at most `limit`, by a search over 512 of them at once."""
    known = limit * 0  # so many are at most `limit`
    left = q_len  # so many after them are undecided
    offs = tl.arange(0, STEPS)
    while left > 0:
        stride = tl.cdiv(left, STEPS)
        ends = (offs + 1) * stride - 1  # the last one of each part
        below = tl.load(ptr + known + ends, mask=ends < left, other=2147483647) <= limit
        parts = tl.sum(below.to(tl.int32), 0)
        known += parts * stride
        left = tl.where(stride == 1, 0, tl.minimum(left - parts * stride, stride - 1))
    return known


@triton.jit
def query_bounds(
    span_ptr, first_key, last_key, q_len, kv_len, window,
    C: tl.constexpr,
    WORDS: tl.constexpr = WORDS,
):  # fmt: skip
    """The queries that see the keys first_key..last_key: (bounds of queries, spans, holes).

    The bounds are (lo, hi, full_lo, full_hi): the queries [lo, hi) that see any of these keys, and those that see all of them.
    No query sees keys before KV_START or from KV_STOP on.
    """
    q_start, kv_start, kv_stop, window, causal, holes = load_spans(span_ptr, q_len, kv_len, window, C.HAS_SPANS, C.IS_CAUSAL)
    whole = (first_key >= kv_start) & (last_key < kv_stop)
    first_key, last_key = tl.maximum(first_key, kv_start), tl.minimum(last_key, kv_stop - 1)
    ahead = tl.where(causal, 0, window - 1) + q_start
    lo, full_lo = first_key - ahead, last_key - ahead
    hi, full_hi = last_key - q_start + window, first_key - q_start + window
    if C.ROWS:
        LO, HI = span_ptr + WORDS, span_ptr + 2 * WORDS + q_len
        lo = tl.maximum(lo, _count_up_to(HI, q_len, first_key))
        full_lo = tl.maximum(full_lo, _count_up_to(HI, q_len, last_key))
        hi = tl.minimum(hi, _count_up_to(LO, q_len, last_key))
        full_hi = tl.minimum(full_hi, _count_up_to(LO, q_len, first_key))
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
