"""Device code that every attention kernel shares: what a row sees, the online softmax over K/V tiles, the merge of partials.

For one block of query rows and the keys of one KV head, with s = scale * q k^T (softcapped where asked):

    m = max_j s_j      l = sum_j exp(s_j - m)      acc = sum_j exp(s_j - m) v_j      out = acc / l

(m, l, acc) over disjoint sets of keys merge exactly (up to rounding), so a kernel only decides which program visits
which tiles. Everything is kept in base 2: exp(x) = exp2(x * log2(e)), with log2(e) folded into the scale.

A row sees the keys of one interval [row_lo, row_hi) of cache slots, less the holes of the packed key mask. Causality,
sliding window, padding and the live length are all bounds of that interval. With sinks it also sees the slots before that
interval where a row begins, scored with a query of their own: one more small tile for whoever has the interval's first.

Sources: Dao, "FlashAttention-2" (2023), section 3.1 and algorithm 1; Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023) for the merge.
"""

import triton
import triton.language as tl

from .rotate import partners, turn_back
from .spans import CAUSAL, DROPPED, FLAGS, HOLES, KV_START, KV_STOP, Q_START, WINDOW, WORDS

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SINK_BLOCK = 16  # slots in a tile of sinks, the fewest a product takes
# Constants enter device code as default arguments: Triton compares every global a kernel reads at every launch.


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
    """The integers of one row (scalar `span_ptrs`) or of many (a block of pointers), or what they are without spans.

    Returns (q_start, kv_start, kv_stop, window, causal, holes), kv_start and kv_stop inside the buffer of `kv_len` slots.
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
    """Over the queries first_pos..last_pos: [lo, hi) that any of them sees and [full_lo, full_hi) that all of them see."""
    lo, full_hi = row_bounds(first_pos, kv_start, kv_stop, window, causal)
    full_lo, hi = row_bounds(last_pos, kv_start, kv_stop, window, causal)
    # A query whose window begins past the last live slot has an empty interval beyond it; nothing there may be loaded.
    return lo, tl.maximum(lo, tl.minimum(hi, kv_stop)), full_lo, full_hi


@triton.jit
def sink_stop(pos, kv_start, kv_stop, causal, SINKS: tl.constexpr):
    """Where the sinks that a query at slot `pos` sees end: they are the slots from kv_start on."""
    stop = tl.minimum(kv_start + SINKS, kv_stop)
    return tl.where(causal, tl.minimum(stop, pos + 1), stop)


@triton.jit
def _scores(
    q, k, scale_log2, cap_log2, HAS_SOFTCAP: tl.constexpr, IEEE: tl.constexpr, LN_2: tl.constexpr = LN_2
):  # fmt: skip
    """Scores in base 2 of a block of rows against a tile of keys; with a softcap c: c * tanh(s / c).

    With a softcap, `scale_log2` is 2 * log2(e) * scale / c and `cap_log2` is c * log2(e): tanh(x) = 1 - 2 / (1 + e^2x).
    """
    if IEEE:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k))
    s = s * scale_log2
    if HAS_SOFTCAP:
        capped = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s))
        if IEEE:
            # The difference of two near caps loses digits that fp32 has; near 0 a polynomial (Cephes' tanhf) keeps them.
            x = s * (0.5 * LN_2)
            z = x * x
            p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            capped = tl.where(tl.abs(x) < 0.625, cap_log2 * (x + x * z * (p - 3.33332819422e-1)), capped)
        return capped
    return s


@triton.jit
def _load_tile(k_base, v_base, k_offs, v_offs, stride_kn, stride_vn, offs_n, d_mask, first, stop):
    """K and V of the slots first + offs_n that lie below `stop`, and zeros."""
    start = first.to(tl.int64)
    kv_mask = (first + offs_n < stop)[:, None] & d_mask
    k = tl.load(k_base + start * stride_kn + k_offs, mask=kv_mask, other=0.0)
    v = tl.load(v_base + start * stride_vn + v_offs, mask=kv_mask, other=0.0)
    return k, v


@triton.jit
def _masked_tile(
    q, k, v, offs_slot, span_ptr, words_stop, row_lo, row_hi, acc, m, l, scale_log2, cap_log2,
    HAS_SPANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IEEE: tl.constexpr,
    WORDS: tl.constexpr = WORDS,
):  # fmt: skip
    """(acc, m, l) after one tile more: K and V of the slots `offs_slot`, of which each row sees those within [row_lo, row_hi)."""
    s = _scores(q, k, scale_log2, cap_log2, HAS_SOFTCAP, IEEE)
    visible = (offs_slot[None, :] >= row_lo[:, None]) & (offs_slot[None, :] < row_hi[:, None])
    if HAS_SPANS:
        words = tl.load(span_ptr + WORDS + (offs_slot >> 5), mask=offs_slot < words_stop, other=-1)
        visible = visible & (((words >> (offs_slot & 31)) & 1) != 0)[None, :]
    s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing yet has m_new = -inf; subtracting 0 instead keeps its weights 0, not NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if IEEE:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, m_new, l


@triton.jit
def attend(
    Q,
    q_rows,
    k_base,
    v_base,
    stride_kn,
    stride_vn,
    span_ptr,
    row_lo,
    row_hi,
    lo,
    hi,
    full_lo,
    full_hi,
    holes,
    tile_start,
    tile_stop,
    scale_log2,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IEEE: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    SinkQuery,
    sink_lo,
    sink_hi,
    takes_sinks,
    places,
    last_place,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SINK_BLOCK: tl.constexpr = SINK_BLOCK,
    DROPPED: tl.constexpr = DROPPED,
):
    """Online softmax of the rows at Q + q_rows [BLOCK_M] over tiles tile_start..tile_stop-1 of the keys [lo, hi).

    Tile t holds the keys lo + t * BLOCK_N onward. Tiles that every row sees whole run in a loop without a mask; the few
    others (window edge, diagonal, tail; all of them where the row has holes) run in a second loop with one. Beginning a loop
    costs more than a tile where memory decides and not arithmetic, FEW_ROWS: there a tail that is the same for all rows runs in
    the first loop, as a whole tile that ends with the keys and leaves out those that the tile before has.
    `k_base`, `v_base` point at slot 0 of the KV head. With SINKS, the one program of these rows that `takes_sinks` ends with
    the slots from sink_lo, for each row those before `sink_hi` [BLOCK_M]. The queries for these are at SinkQuery + q_rows; with
    PAIRS they are Q's, turned back (`rotate`) by the frequencies at SinkQuery to `last_place` from `places` [BLOCK_M or 1], which
    counts slots from sink_lo. Returns (acc, m, l) with m in base 2; a row that sees nothing returns (0, -inf, 0).
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
    v_offs = offs_n[:, None] * stride_vn + offs_d[None, :]
    d_mask = offs_d[None, :] < HEAD_DIM

    if SINKS:
        # Fetched ahead of the tiles and used after them, so that nobody waits for them; a large q_sinks has no room meanwhile.
        offs_s = tl.arange(0, SINK_BLOCK)
        k_sink_offs = offs_s[:, None] * stride_kn + offs_d[None, :]
        v_sink_offs = offs_s[:, None] * stride_vn + offs_d[None, :]
        sinks_stop = tl.where(takes_sinks, tl.max(sink_hi, 0), sink_lo)
        k_sinks, v_sinks = _load_tile(
            k_base, v_base, k_sink_offs, v_sink_offs, stride_kn, stride_vn, offs_s, d_mask, sink_lo, sinks_stop
        )
        if PAIRS:
            partner, pair, is_first = partners(offs_d, PAIRS, INTERLEAVED)
            turns = offs_d < tl.where(sinks_stop > sink_lo, 2 * PAIRS, 0)
            inv_freq = tl.load(SinkQuery + pair, mask=turns, other=0.0)
            if HAS_SPANS:
                places += tl.load(span_ptr + DROPPED)
        else:
            q_sinks_ptrs = SinkQuery + q_rows[:, None] + offs_d[None, :]
            if BLOCK_M == 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=offs_d[None, :] < tl.where(sinks_stop > sink_lo, HEAD_DIM, 0), other=0.0)
    q = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Tiles [full_start, full_stop) need no mask.
    full_start = tl.minimum(tl.maximum((full_lo - lo + BLOCK_N - 1) // BLOCK_N, tile_start), tile_stop)
    full_keys = tl.maximum(full_hi - lo, 0)
    if FEW_ROWS:
        full_keys += tl.where((full_hi == hi) & (hi - lo >= BLOCK_N), BLOCK_N - 1, 0)
    full_stop = tl.where(holes, full_start, tl.minimum(full_keys // BLOCK_N, tile_stop))
    full_stop = tl.maximum(full_stop, full_start)

    for tile in tl.range(full_start, full_stop):
        first = lo + tile * BLOCK_N
        known = first - tl.minimum(first, hi - BLOCK_N) if FEW_ROWS else 0
        start = (first - known).to(tl.int64)
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_base + start * stride_kn + k_offs)
            v = tl.load(v_base + start * stride_vn + v_offs)
        else:
            k = tl.load(k_base + start * stride_kn + k_offs, mask=d_mask, other=0.0)
            v = tl.load(v_base + start * stride_vn + v_offs, mask=d_mask, other=0.0)
        s = _scores(q, k, scale_log2, cap_log2, HAS_SOFTCAP, IEEE)
        if FEW_ROWS:
            s = tl.where((offs_n >= known)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if IEEE:
            acc = tl.dot(p, v, acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        m = m_new

    n_before = full_start - tile_start
    words_stop = tl.where(holes, hi, lo)  # a row without holes reads no words
    if n_before + tile_stop - full_stop > 0:  # skips the loop's prologue where every tile is full
        for i in tl.range(0, n_before + tile_stop - full_stop):
            tile = tl.where(i < n_before, tile_start + i, full_stop + i - n_before)
            k, v = _load_tile(k_base, v_base, k_offs, v_offs, stride_kn, stride_vn, offs_n, d_mask, lo + tile * BLOCK_N, hi)
            acc, m, l = _masked_tile(
                q, k, v, lo + tile * BLOCK_N + offs_n, span_ptr, words_stop, row_lo, row_hi, acc, m, l, scale_log2, cap_log2,
                HAS_SPANS, HAS_SOFTCAP, IEEE,
            )  # fmt: skip

    if SINKS:  # noqa: SIM102 (known when compiling; the next is not)
        if sinks_stop > sink_lo:
            if PAIRS:
                y = tl.load(Q + q_rows[:, None] + partner[None, :], mask=turns[None, :], other=0.0)
                x = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)
                q_sinks = turn_back(x, y, places[:, None], inv_freq[None, :], is_first[None, :], last_place).to(x.dtype)
            elif BLOCK_M != 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=d_mask, other=0.0)
            words_stop = tl.where(holes, sinks_stop, sink_lo)
            everything = tl.zeros_like(sink_hi)
            for i in tl.range(0, tl.cdiv(SINKS, SINK_BLOCK), num_stages=1):
                first = sink_lo + i * SINK_BLOCK
                if i > 0:
                    k_sinks, v_sinks = _load_tile(
                        k_base, v_base, k_sink_offs, v_sink_offs, stride_kn, stride_vn, offs_s, d_mask, first, sinks_stop
                    )
                acc, m, l = _masked_tile(
                    q_sinks, k_sinks, v_sinks, first + offs_s, span_ptr, words_stop, everything, sink_hi, acc, m, l,
                    scale_log2, cap_log2, HAS_SPANS, HAS_SOFTCAP, IEEE,
                )  # fmt: skip
    return acc, m, l


@triton.jit
def finalize(
    acc, m, l, sink_ptrs, row_mask,
    HAS_SINK_LOGITS: tl.constexpr,
    LOG2_E: tl.constexpr = LOG2_E,
    LN_2: tl.constexpr = LN_2,
):  # fmt: skip
    """(acc, m, l) -> (out, lse). A learned sink logit adds exp(logit) to the denominator; a row that saw nothing gives 0."""
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_ptrs, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        m_new = tl.maximum(m, sink)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw nothing, and a sink turned off with -inf
        alpha = tl.exp2(m - m_safe)
        acc = acc * alpha[:, None]
        l = l * alpha + tl.exp2(sink - m_safe)
        m = m_new
    l_safe = tl.where(l == 0.0, 1.0, l)
    out = acc / l_safe[:, None]
    lse = (m + tl.log2(l_safe)) * LN_2
    return out, lse


@triton.jit
def packed_rows(rows, q_len, GROUP: tl.constexpr):
    """Row r of a packed block is query r // GROUP of head r % GROUP: all queries that share one KV head, read once for all.

    Returns (query index, head within the group, mask of the rows that exist); rows past the end repeat the last query.
    """
    return tl.minimum(rows // GROUP, q_len - 1), rows % GROUP, rows < q_len * GROUP


@triton.jit
def store_packed(
    acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_d, q_len,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Finish packed rows and write them: Out is (batch, q_len, num_heads, HEAD_DIM), Lse (batch, num_heads, q_len).

    acc [X, Y] holds columns offs_d [X or 1, Y] of `rows` [X].
    """
    q_index, group_head, row_mask = packed_rows(rows, q_len, GROUP)
    head = kv_head * GROUP + group_head
    out, lse = finalize(acc, m, l, SinkLogits + head, row_mask, HAS_SINK_LOGITS)
    out_rows = (row.to(tl.int64) * q_len + q_index) * (kv_heads * GROUP) + head
    tl.store(
        Out + out_rows[:, None] * HEAD_DIM + offs_d,
        out.to(Out.dtype.element_ty),
        mask=row_mask[:, None] & (offs_d < HEAD_DIM),
    )
    if WRITE_LSE:
        tl.store(Lse + (row.to(tl.int64) * (kv_heads * GROUP) + head) * q_len + q_index, lse, mask=row_mask)


@triton.jit
def store_partial(acc, m, l, Acc, Stats, slot, rows, offs_d, num_rows, WORKSPACE_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the partial of packed rows to workspace slot `slot`: Acc is (slots, WORKSPACE_M, BLOCK_D) and Stats
    (slots, 2, WORKSPACE_M), fp32; WORKSPACE_M is the number of packed rows rounded up to a power of two."""
    row_mask = rows < num_rows
    acc_ptrs = Acc + (slot.to(tl.int64) * WORKSPACE_M + rows)[:, None] * BLOCK_D + offs_d
    tl.store(acc_ptrs, acc, mask=row_mask[:, None])
    tl.store(Stats + slot * 2 * WORKSPACE_M + rows, m, mask=row_mask)
    tl.store(Stats + (slot * 2 + 1) * WORKSPACE_M + rows, l, mask=row_mask)


@triton.jit
def merge_rows(
    Acc, Stats, first_slot, next_slot, step, count, first_row, num_rows,
    ROWS: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge `count` partials of packed rows, always in the same order: slots first_slot, next_slot, next_slot + step, ...

    CHUNK at a time: their loads do not wait on one another. Returns (rows [ROWS], columns [1, BLOCK_D], acc, m, l).
    """
    offs_c = tl.arange(0, CHUNK)
    offs_d = tl.arange(0, BLOCK_D)
    rows = first_row + tl.arange(0, ROWS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(0, count, CHUNK):
        i = start + offs_c
        slots = tl.where(i == 0, first_slot, next_slot + (i - 1) * step)
        mask = (i < count)[:, None] & (rows < num_rows)[None, :]
        stat_ptrs = Stats + (slots * 2 * WORKSPACE_M)[:, None] + rows[None, :]
        m_i = tl.load(stat_ptrs, mask=mask, other=float("-inf"))
        l_i = tl.load(stat_ptrs + WORKSPACE_M, mask=mask, other=0.0)
        acc_rows = (slots.to(tl.int64) * WORKSPACE_M)[:, None] + rows[None, :]
        acc_i = tl.load(Acc + acc_rows[:, :, None] * BLOCK_D + offs_d[None, None, :], mask=mask[:, :, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_i, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        beta = tl.exp2(m_i - m_safe[None, :])
        l = l * alpha + tl.sum(l_i * beta, 0)
        acc = acc * alpha[:, None] + tl.sum(acc_i * beta[:, :, None], 0)
        m = m_new
    return rows, offs_d[None, :], acc, m, l
