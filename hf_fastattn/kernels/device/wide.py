"""The loop over tiles for wide heads, whose tile of K does not fit at once: scores are summed over parts of head_dim.

Queries are read again for every tile, K is read in parts of BLOCK_D dimensions, and every tile is masked. This loop is simple
rather than fast.
"""

import triton
import triton.language as tl

from .online import masked_step, scaled
from .rerotate import partners, rerotate
from .tile import begin_of, ends_of, live_slots, words_end

SINK_BLOCK = 16  # slots in a tile of sinks, the smallest size for tl.dot


@triton.jit
def _scores(
    Q, q_rows, kv, first, offs_n, slot_mask, scales, inv_freq_ptr, positions, last_position,
    REROTATE: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Scores of a block of rows and the slots first + offs_n. REROTATE: the rows are re-rotated with `rerotate`."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    HEAD_DIM: tl.constexpr = C.HEAD_DIM
    s = tl.zeros([BLOCK_M, offs_n.shape[0]], tl.float32)
    for start in tl.range(0, HEAD_DIM, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        d_mask = offs_d[None, :] < HEAD_DIM
        q = tl.load(Q + q_rows[:, None] + offs_d[None, :], mask=d_mask, other=0.0)
        if REROTATE:
            partner, pair, is_first = partners(offs_d, C.PAIRS, C.INTERLEAVED)
            rotated = offs_d < 2 * C.PAIRS
            inv_freq = tl.load(inv_freq_ptr + pair, mask=rotated, other=0.0)
            y = tl.load(Q + q_rows[:, None] + partner[None, :], mask=rotated[None, :], other=0.0)
            q = rerotate(q, y, positions[:, None], inv_freq[None, :], is_first[None, :], last_position).to(q.dtype)
        k = FORM.load_k(kv[0], kv[2], first, offs_n, offs_d, slot_mask & d_mask, kv[4], kv[5])
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    return scaled(s, scales, C.HAS_SOFTCAP, C.IEEE)


@triton.jit
def attend_wide(
    queries, kv, span_ptr, bounds, tiles, scales, sinks,
    C: tl.constexpr,
    FORM: tl.constexpr,
    SINK_BLOCK: tl.constexpr = SINK_BLOCK,
):  # fmt: skip
    """`attend.attend` for wide heads."""
    Q, q_rows = queries
    k_base, v_base, k_strides, v_strides, indices, extra = kv
    row_lo, row_hi, lo, hi, _, _, holes = bounds
    tile_start, tile_stop = tiles
    SinkQuery, sink_lo, sink_hi, takes_sinks, positions, last_position = sinks
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    offs_n = tl.arange(0, BLOCK_N)
    offs_v = tl.arange(0, BLOCK_DV)
    v_mask = offs_v[None, :] < VALUE_DIM
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = (tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),)

    begin = begin_of(lo, C.TILE_ALIGN)
    words_stop = words_end(begin, hi, holes, indices[3], C)
    if FORM.paged:
        kv = (k_base, v_base, k_strides, v_strides, indices, extra + ends_of(lo, hi, indices[3]))
    for tile in tl.range(tile_start, tile_stop):
        first = begin + tile * BLOCK_N
        slot_mask = live_slots(first + offs_n, lo, hi, C)[:, None]
        s = _scores(Q, q_rows, kv, first, offs_n, slot_mask, scales, Q, 0, 0, False, C, FORM)
        v = FORM.load_v(v_base, v_strides, first, offs_n, offs_v, slot_mask & v_mask, indices, kv[5])
        acc, m, l = masked_step(s, (v,), first + offs_n, span_ptr, words_stop, row_lo, row_hi, acc, m, l, C, FORM)

    if C.SINKS:
        offs_s = tl.arange(0, SINK_BLOCK)
        sinks_stop = tl.where(takes_sinks, tl.max(sink_hi, 0), sink_lo)
        first_slot = tl.zeros_like(sink_hi)
        begin = sink_lo
        if FORM.paged:  # a tile is within one page
            first_slot += sink_lo
            begin = tl.where(sinks_stop > sink_lo, sink_lo // SINK_BLOCK * SINK_BLOCK, sinks_stop)
            kv = (k_base, v_base, k_strides, v_strides, indices, extra + ends_of(sink_lo, sinks_stop, indices[3]))
        words_stop = words_end(begin, sinks_stop, holes, indices[3], C)
        for i in tl.range(0, tl.cdiv(sinks_stop - begin, SINK_BLOCK)):
            first = begin + i * SINK_BLOCK
            slot_mask = live_slots(first + offs_s, sink_lo, sinks_stop, C)[:, None]
            if C.PAIRS:
                s = _scores(
                    Q, q_rows, kv, first, offs_s, slot_mask, scales, SinkQuery, positions,
                    last_position, True, C, FORM,
                )  # fmt: skip
            else:
                s = _scores(SinkQuery, q_rows, kv, first, offs_s, slot_mask, scales, Q, 0, 0, False, C, FORM)
            v = FORM.load_v(v_base, v_strides, first, offs_s, offs_v, slot_mask & v_mask, indices, kv[5])
            acc, m, l = masked_step(s, (v,), first + offs_s, span_ptr, words_stop, first_slot, sink_hi, acc, m, l, C, FORM)
    return acc[0], m, l
