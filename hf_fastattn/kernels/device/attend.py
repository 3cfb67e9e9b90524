"""The loop over tiles of K and V for a block of query rows."""

import triton
import triton.language as tl

from ..spans import DROPPED
from .dropout import aligned, kept
from .online import masked_step, scores_of, softmax_step
from .rerotate import partners, rerotate
from .wide import SINK_BLOCK, attend_wide


@triton.jit
def attend(
    queries, kv, span_ptr, bounds, tiles, scales, sinks,
    C: tl.constexpr,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    dropout=None,
):  # fmt: skip
    """Online softmax of a block of rows over the tiles [tile_start, tile_stop) of the keys [lo, hi). Returns (acc, m, l), m in
    base 2; (0, -inf, 0) for a row that sees no key.

    queries: (Q, q_rows [BLOCK_M], the offset of each row). kv: (k_base, v_base, stride_kn, stride_vn, indices, extra), k_base and
    v_base at slot 0 of the KV head, the others as in `tile.load_plain`, whose signature LOAD_K and LOAD_V have. bounds: see
    `visibility.key_bounds`. tiles: (tile_start, tile_stop); tile t begins at key lo + t * BLOCK_N. scales: (scale_log2,
    cap_log2). sinks: (SinkQuery, sink_lo, sink_hi [BLOCK_M], takes_sinks, positions [BLOCK_M or 1], last_position).

    With SINKS, the one program of these rows with takes_sinks also processes the sinks, the slots from sink_lo to sink_hi of each
    row. Without PAIRS, the queries that score them are at SinkQuery + q_rows. With PAIRS, they are the queries at Q, re-rotated
    from `positions` (counted from sink_lo) to at most `last_position` with the frequencies at SinkQuery (see `rerotate`).

    dropout: (arguments of `dropout.kept`, place, queries [BLOCK_M]) with DROPOUT, for heads of at most BLOCK_D dimensions and
    without sinks. Tiles then begin at `aligned(lo)` instead of lo. The caller scales acc.
    """
    if C.HEAD_DIM > C.BLOCK_D:
        return attend_wide(queries, kv, span_ptr, bounds, tiles, scales, sinks, C, LOAD_K, LOAD_V)
    else:
        return _attend(queries, kv, span_ptr, bounds, tiles, scales, sinks, C, LOAD_K, LOAD_V, dropout)


@triton.jit
def _attend(
    queries, kv, span_ptr, bounds, tiles, scales, sinks,
    C: tl.constexpr,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    dropout=None,
    SINK_BLOCK: tl.constexpr = SINK_BLOCK,
    DROPPED: tl.constexpr = DROPPED,
):  # fmt: skip
    """`attend` for heads whose tile of K is loaded at once.

    Tiles that are fully visible to every row run in a loop without a mask. The others (window edge, diagonal, tail; all tiles if
    the row has holes) run in a second loop with a mask. With FULL_TAIL a tail with the same end for all rows runs in the first
    loop, as a full tile that ends at the last key and skips the keys of the tile before: if memory is the limit, the start of a
    loop costs more than a tile.
    """
    Q, q_rows = queries
    k_base, v_base, stride_kn, stride_vn, indices, extra = kv
    row_lo, row_hi, lo, hi, full_lo, full_hi, holes = bounds
    tile_start, tile_stop = tiles
    SinkQuery, sink_lo, sink_hi, takes_sinks, positions, last_position = sinks
    HEAD_DIM: tl.constexpr = C.HEAD_DIM
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    SINKS: tl.constexpr = C.SINKS
    PAIRS: tl.constexpr = C.PAIRS
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d[None, :] < HEAD_DIM
    offs_v = tl.arange(0, BLOCK_DV)
    v_mask = offs_v[None, :] < VALUE_DIM

    if SINKS:
        # Loaded before the tiles and used after them, so that the loads overlap with them. A large q_sinks would take too many
        # registers meanwhile.
        offs_s = tl.arange(0, SINK_BLOCK)
        sinks_stop = tl.where(takes_sinks, tl.max(sink_hi, 0), sink_lo)
        sink_mask = (sink_lo + offs_s < sinks_stop)[:, None]
        k_sinks = LOAD_K(k_base, stride_kn, sink_lo, offs_s, offs_d, sink_mask & d_mask, indices, extra)
        v_sinks = LOAD_V(v_base, stride_vn, sink_lo, offs_s, offs_v, sink_mask & v_mask, indices, extra)
        if PAIRS:
            partner, pair, is_first = partners(offs_d, PAIRS, C.INTERLEAVED)
            rotated = offs_d < tl.where(sinks_stop > sink_lo, 2 * PAIRS, 0)
            inv_freq = tl.load(SinkQuery + pair, mask=rotated, other=0.0)
            if C.HAS_SPANS:
                positions += tl.load(span_ptr + DROPPED)
        else:
            q_sinks_ptrs = SinkQuery + q_rows[:, None] + offs_d[None, :]
            if BLOCK_M == 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=offs_d[None, :] < tl.where(sinks_stop > sink_lo, HEAD_DIM, 0), other=0.0)
    q = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    if C.DROPOUT:
        numbers, place, queries = dropout
        first_live, lo = lo, aligned(lo)

    # Tiles [full_start, full_stop) need no mask.
    full_start = tl.minimum(tl.maximum((full_lo - lo + BLOCK_N - 1) // BLOCK_N, tile_start), tile_stop)
    full_keys = tl.maximum(full_hi - lo, 0)
    if C.FULL_TAIL:
        full_keys += tl.where((full_hi == hi) & (hi - lo >= BLOCK_N), BLOCK_N - 1, 0)
    full_stop = tl.where(holes, full_start, tl.minimum(full_keys // BLOCK_N, tile_stop))
    full_stop = tl.maximum(full_stop, full_start)

    for tile in tl.range(full_start, full_stop):
        first = lo + tile * BLOCK_N
        overlap = first - tl.minimum(first, hi - BLOCK_N) if C.FULL_TAIL else 0
        if HEAD_DIM == BLOCK_D:
            k = LOAD_K(k_base, stride_kn, first - overlap, offs_n, offs_d, None, indices, extra)
        else:
            k = LOAD_K(k_base, stride_kn, first - overlap, offs_n, offs_d, d_mask, indices, extra)
        if VALUE_DIM == BLOCK_DV:
            v = LOAD_V(v_base, stride_vn, first - overlap, offs_n, offs_v, None, indices, extra)
        else:
            v = LOAD_V(v_base, stride_vn, first - overlap, offs_n, offs_v, v_mask, indices, extra)
        s = scores_of(q, k, scales, C.HAS_SOFTCAP, C.IEEE)
        if C.FULL_TAIL:
            s = tl.where((offs_n >= overlap)[None, :], s, float("-inf"))
        is_kept = None
        if C.DROPOUT:
            is_kept = kept(numbers, place, queries, first, BLOCK_N)
        acc, m, l = softmax_step(s, v, acc, m, l, False, C.IEEE, is_kept)

    n_before = full_start - tile_start
    words_stop = tl.where(holes, hi, lo)  # without holes no words of the bit mask are read
    if n_before + tile_stop - full_stop > 0:  # skips the prologue of the loop if every tile is full
        for i in tl.range(0, n_before + tile_stop - full_stop):
            tile = tl.where(i < n_before, tile_start + i, full_stop + i - n_before)
            first = lo + tile * BLOCK_N
            kv_mask = (first + offs_n < hi)[:, None]
            is_kept = None
            if C.DROPOUT:
                kv_mask = kv_mask & (first + offs_n >= first_live)[:, None]
                is_kept = kept(numbers, place, queries, first, BLOCK_N)
            k = LOAD_K(k_base, stride_kn, first, offs_n, offs_d, kv_mask & d_mask, indices, extra)
            v = LOAD_V(v_base, stride_vn, first, offs_n, offs_v, kv_mask & v_mask, indices, extra)
            s = scores_of(q, k, scales, C.HAS_SOFTCAP, C.IEEE)
            acc, m, l = masked_step(s, v, first + offs_n, span_ptr, words_stop, row_lo, row_hi, acc, m, l, C, is_kept)

    if SINKS:  # noqa: SIM102 (a constant; the next condition is not)
        if sinks_stop > sink_lo:
            if PAIRS:
                y = tl.load(Q + q_rows[:, None] + partner[None, :], mask=rotated[None, :], other=0.0)
                x = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)
                q_sinks = rerotate(x, y, positions[:, None], inv_freq[None, :], is_first[None, :], last_position).to(x.dtype)
            elif BLOCK_M != 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=d_mask, other=0.0)
            words_stop = tl.where(holes, sinks_stop, sink_lo)
            first_slot = tl.zeros_like(sink_hi)
            for i in tl.range(0, tl.cdiv(SINKS, SINK_BLOCK), num_stages=1):
                first = sink_lo + i * SINK_BLOCK
                if i > 0:
                    further = (first + offs_s < sinks_stop)[:, None]
                    k_sinks = LOAD_K(k_base, stride_kn, first, offs_s, offs_d, further & d_mask, indices, extra)
                    v_sinks = LOAD_V(v_base, stride_vn, first, offs_s, offs_v, further & v_mask, indices, extra)
                s = scores_of(q_sinks, k_sinks, scales, C.HAS_SOFTCAP, C.IEEE)
                acc, m, l = masked_step(s, v_sinks, first + offs_s, span_ptr, words_stop, first_slot, sink_hi, acc, m, l, C)
    return acc, m, l
