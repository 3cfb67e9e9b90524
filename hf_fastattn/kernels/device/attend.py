"""The loop over tiles of K and V for a block of query rows."""

import triton
import triton.language as tl

from .dropout import kept
from .online import masked_step, scores_of, shifted, softmax_step
from .rerotate import partners, rerotate
from .tile import begin_of, live_slots, load_tile, queries_of, words_end
from .wide import SINK_BLOCK, attend_wide


@triton.jit
def attend(
    queries, kv, span_ptr, bounds, tiles, scales, sinks,
    C: tl.constexpr,
    FORM: tl.constexpr,
    dropout=None,
):  # fmt: skip
    """Online softmax of a block of rows over the tiles [tile_start, tile_stop) of the keys [lo, hi). Returns (acc, m, l), m in
    base 2; (0, -inf, 0) for a row that sees no key.

    queries: (Q, q_rows [BLOCK_M], the offset of each row). kv: (k_base, v_base, k_strides, v_strides, indices, extra), as in
    `tile.load_plain`. bounds: see `visibility.key_bounds`. tiles: (tile_start, tile_stop); tile t begins at
    `begin_of(lo)` + t * BLOCK_N.
    scales: (scale_log2, cap_log2). sinks: (SinkQuery, sink_lo, sink_hi [BLOCK_M], takes_sinks, positions [BLOCK_M or 1],
    last_position).

    With SINKS, the one program of these rows with takes_sinks also processes the sinks, the slots from sink_lo to sink_hi of each
    row. Without PAIRS, the queries that score them are at SinkQuery + q_rows. With PAIRS, they are the queries at Q, re-rotated
    from `positions` (counted from sink_lo) to at most `last_position` with the frequencies at SinkQuery (see `rerotate`).

    dropout: (arguments of `dropout.kept`, place, queries [BLOCK_M]) with DROPOUT, for heads of at most BLOCK_D dimensions and
    without sinks. The caller scales acc.
    """
    if C.HEAD_DIM > C.BLOCK_D:
        return attend_wide(queries, kv, span_ptr, bounds, tiles, scales, sinks, C, FORM)
    else:
        return _attend(queries, kv, span_ptr, bounds, tiles, scales, sinks, C, FORM, dropout)


@triton.jit
def _attend(
    queries, kv, span_ptr, bounds, tiles, scales, sinks,
    C: tl.constexpr,
    FORM: tl.constexpr,
    dropout=None,
    SINK_BLOCK: tl.constexpr = SINK_BLOCK,
):  # fmt: skip
    """`attend` for heads whose tile of K is loaded at once.

    Tiles that are fully visible to every row run in a loop without a mask. The others (window edge, diagonal, tail; all tiles if
    the row has holes) run in a second loop with a mask. With FULL_TAIL a tail with the same end for all rows runs in the first
    loop, as a full tile that ends at the last key and skips the keys of the tile before: if memory is the limit, the start of a
    loop costs more than a tile. Tiles of pages, which cannot move, then have a mask of scores, for the first tile too.
    """
    Q, q_rows = queries
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
    PARTS: tl.constexpr = FORM.parts
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d[None, :] < HEAD_DIM
    offs_k, offs_v = tl.arange(0, BLOCK_D // PARTS), tl.arange(0, BLOCK_DV // PARTS)
    k_mask, v_mask = offs_k[None, :] < HEAD_DIM // PARTS, offs_v[None, :] < VALUE_DIM // PARTS
    dims = (offs_k, k_mask, offs_v, v_mask)
    full_dims = (offs_k, None if HEAD_DIM == BLOCK_D else k_mask, offs_v, None if VALUE_DIM == BLOCK_DV else v_mask)

    if SINKS:
        # Loaded before the tiles and used after them, so that the loads overlap with them. A large q_sinks would take too many
        # registers meanwhile.
        offs_s = tl.arange(0, SINK_BLOCK)
        sinks_stop = tl.where(takes_sinks, tl.max(sink_hi, 0), sink_lo)
        sinks_begin, num_sinks, first_slot = sink_lo, tl.cdiv(SINKS, SINK_BLOCK), tl.zeros_like(sink_hi)
        if FORM.paged:  # a tile is within one page
            first_slot += sink_lo
            sinks_begin = sink_lo // SINK_BLOCK * SINK_BLOCK
            num_sinks = tl.cdiv(sinks_stop - sinks_begin, SINK_BLOCK)
        sink_mask = live_slots(sinks_begin + offs_s, sink_lo, sinks_stop, C)[:, None]
        k_sinks, v_sinks = load_tile(kv, sinks_begin, offs_s, sink_mask, dims, (sink_lo, sinks_stop), FORM)
        if PAIRS:
            partner, pair, is_first = partners(offs_d, PAIRS, C.INTERLEAVED)
            rotated = offs_d < tl.where(sinks_stop > sink_lo, 2 * PAIRS, 0)
            inv_freq = tl.load(SinkQuery + pair, mask=rotated, other=0.0)
        else:
            q_sinks_ptrs = SinkQuery + q_rows[:, None] + offs_d[None, :]
            if BLOCK_M == 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=offs_d[None, :] < tl.where(sinks_stop > sink_lo, HEAD_DIM, 0), other=0.0)
    q = queries_of(tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0), kv, scales[0], HEAD_DIM, FORM)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = (tl.zeros([BLOCK_M, BLOCK_DV // PARTS], tl.float32),) * PARTS

    if C.DROPOUT:
        numbers, place, queries = dropout
    first_live, lo = lo, begin_of(lo, C.TILE_ALIGN)
    live = (first_live, hi)
    MASKED_TAIL: tl.constexpr = C.FULL_TAIL and FORM.paged

    # Tiles [full_start, full_stop) need no mask, or with MASKED_TAIL one that is the same for all rows.
    if MASKED_TAIL:
        full_lo = tl.where(full_lo == first_live, lo, full_lo)
        full_hi = tl.minimum(full_hi, hi)  # a row without keys
    full_start = tl.minimum(tl.maximum((full_lo - lo + BLOCK_N - 1) // BLOCK_N, tile_start), tile_stop)
    full_keys = tl.maximum(full_hi - lo, 0)
    if C.FULL_TAIL:
        least: tl.constexpr = 1 if MASKED_TAIL else BLOCK_N  # a tile that moves needs as many keys
        full_keys += tl.where((full_hi == hi) & (hi - first_live >= least), BLOCK_N - 1, 0)
    full_stop = tl.where(holes, full_start, tl.minimum(full_keys // BLOCK_N, tile_stop))
    full_stop = tl.maximum(full_stop, full_start)

    for tile in tl.range(full_start, full_stop):
        first = lo + tile * BLOCK_N
        if MASKED_TAIL:
            k, v = load_tile(kv, first, offs_n, None, full_dims, live, FORM)
            is_live = live_slots(first + offs_n, first_live, hi, C)[None, :]
            s = tl.where(is_live, scores_of(q, k, scales[1], C, FORM), float("-inf"))
        else:
            overlap = first - tl.minimum(first, hi - BLOCK_N) if C.FULL_TAIL else 0
            k, v = load_tile(kv, first - overlap, offs_n, None, full_dims, live, FORM)
            s = scores_of(q, k, scales[1], C, FORM)
            if C.FULL_TAIL:
                s = tl.where((offs_n >= overlap)[None, :], s, float("-inf"))
        is_kept = None
        if C.DROPOUT:
            is_kept = kept(numbers, place, queries, first, BLOCK_N)
        acc, m, l = softmax_step(s, v, acc, m, l, False, FORM, is_kept)

    n_before = full_start - tile_start
    words_stop = words_end(lo, hi, holes, kv[4][3], C)
    if n_before + tile_stop - full_stop > 0:  # skips the prologue of the loop if every tile is full
        for i in tl.range(0, n_before + tile_stop - full_stop):
            tile = tl.where(i < n_before, tile_start + i, full_stop + i - n_before)
            first = lo + tile * BLOCK_N
            kv_mask = live_slots(first + offs_n, first_live, hi, C)[:, None]
            is_kept = None
            if C.DROPOUT:
                is_kept = kept(numbers, place, queries, first, BLOCK_N)
            k, v = load_tile(kv, first, offs_n, kv_mask, dims, live, FORM)
            s = scores_of(q, k, scales[1], C, FORM)
            acc, m, l = masked_step(s, v, first + offs_n, span_ptr, words_stop, row_lo, row_hi, acc, m, l, C, FORM, is_kept)

    if SINKS:  # noqa: SIM102 (a constant; the next condition is not)
        if sinks_stop > sink_lo:
            if PAIRS:
                y = tl.load(Q + q_rows[:, None] + partner[None, :], mask=rotated[None, :], other=0.0)
                x = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)
                q_sinks = rerotate(x, y, positions[:, None], inv_freq[None, :], is_first[None, :], last_position).to(x.dtype)
            elif BLOCK_M != 16:
                q_sinks = tl.load(q_sinks_ptrs, mask=d_mask, other=0.0)
            q = queries_of(q_sinks, kv, scales[0], HEAD_DIM, FORM)
            words_stop = words_end(sinks_begin, sinks_stop, holes, kv[4][3], C)
            for i in tl.range(0, num_sinks, num_stages=1):
                first = sinks_begin + i * SINK_BLOCK
                if i > 0:
                    further = (first + offs_s < sinks_stop)[:, None]
                    k_sinks, v_sinks = load_tile(kv, first, offs_s, further, dims, (sink_lo, sinks_stop), FORM)
                s = scores_of(q, k_sinks, scales[1], C, FORM)
                acc, m, l = masked_step(s, v_sinks, first + offs_s, span_ptr, words_stop, first_slot, sink_hi, acc, m, l, C, FORM)
    m = shifted(m, q, C, FORM)
    if PARTS == 1:
        return acc[0], m, l
    else:
        return tl.interleave(acc[0], acc[1]), m, l
