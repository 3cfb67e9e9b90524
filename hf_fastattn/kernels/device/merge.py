"""Partial results of packed rows: storing them, merging them in a fixed order, writing the output."""

import triton
import triton.language as tl

from .online import finalize, safe
from .visibility import packed_rows


@triton.jit
def store_rows(
    acc, m, l, Out, Lse, SinkLogits, row, head, heads, q_index, row_mask, offs_v, q_len,
    C: tl.constexpr,
):  # fmt: skip
    """Normalise rows and write them to Out (batch, q_len, num_heads, VALUE_DIM) and Lse (batch, num_heads, q_len).

    acc [X, Y] has the columns offs_v [X or 1, Y] of the queries q_index [X] of the heads head [X], out of `heads`.
    """
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    out, lse = finalize(acc, m, l, SinkLogits + head, row_mask, C.HAS_SINK_LOGITS)
    out_rows = (row.to(tl.int64) * q_len + q_index) * heads + head
    tl.store(
        Out + out_rows[:, None] * VALUE_DIM + offs_v,
        out.to(Out.dtype.element_ty),
        mask=row_mask[:, None] & (offs_v < VALUE_DIM),
    )
    if C.WRITE_LSE:
        tl.store(Lse + (row.to(tl.int64) * heads + head) * q_len + q_index, lse, mask=row_mask)


@triton.jit
def store_packed(
    acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v, q_len,
    C: tl.constexpr,
):  # fmt: skip
    """`store_rows` of the packed rows `rows` of a KV head."""
    GROUP: tl.constexpr = C.GROUP
    q_index, group_head, row_mask = packed_rows(rows, q_len, GROUP)
    head = kv_head * GROUP + group_head
    store_rows(acc, m, l, Out, Lse, SinkLogits, row, head, kv_heads * GROUP, q_index, row_mask, offs_v, q_len, C)


@triton.jit
def store_partial(acc, m, l, Workspace, stats_start, partials, offs_v, row_mask, C: tl.constexpr):
    """Write partial results of rows to the places `partials` of the workspace, in fp32: acc to (places, BLOCK_DV) at its
    beginning, m and l to (places, 2) at stats_start."""
    tl.store(Workspace + partials.to(tl.int64)[:, None] * C.BLOCK_DV + offs_v, acc, mask=row_mask[:, None])
    stat_ptrs = Workspace + stats_start + 2 * partials
    tl.store(stat_ptrs, m, mask=row_mask)
    tl.store(stat_ptrs + 1, l, mask=row_mask)


@triton.jit
def merge_rows(
    Workspace, stats_start, first, following, step, row_step, count, num_rows,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Merge `count` partial results of each of ROWS rows in a fixed order.

    Those of the first row are at the places first, first + following, first + following + step, ..., and those of the next row
    are row_step further. Rows from num_rows on are not read. CHUNK results are loaded at once, so that their loads overlap.
    Returns (columns [1, BLOCK_DV], acc, m, l).
    """
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    # Offsets from the first place have 32 bits.
    Stats = Workspace + stats_start + 2 * first
    Sums = Workspace + first.to(tl.int64) * BLOCK_DV
    offs_c = tl.arange(0, CHUNK)
    offs_v = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, ROWS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for start in tl.range(0, count, CHUNK):
        # All loads come first: the maximum and the sum over partial results have barriers, which loads do not pass.
        i = start + offs_c
        places = tl.where(i == 0, 0, following + (i - 1) * step)
        if ROWS == 1:  # the warps share the partial results
            mask = (i < count) & (rows < num_rows)
            m_i = tl.load(Stats + 2 * places, mask=mask, other=float("-inf"))
            l_i = tl.load(Stats + 2 * places + 1, mask=mask, other=0.0)
            acc_i = tl.load(Sums + places[:, None] * BLOCK_DV + offs_v[None, :], mask=mask[:, None], other=0.0)
            m_new = tl.maximum(m, tl.max(m_i, 0))
            m_safe = safe(m_new)
            alpha, beta = tl.exp2(m - m_safe), tl.exp2(m_i - tl.max(m_safe, 0))
            l = l * alpha + tl.sum(l_i * beta, 0)
            acc = acc * alpha[:, None] + tl.sum(acc_i * beta[:, None], 0)[None, :]
        else:  # the warps share the rows: one tile for each partial result, because a tile of all has another layout
            stat_ptrs = Stats + 2 * (places[None, :] + (rows * row_step)[:, None])
            mask = (rows < num_rows)[:, None] & (i < count)[None, :]
            m_i = tl.load(stat_ptrs, mask=mask, other=float("-inf"))
            l_i = tl.load(stat_ptrs + 1, mask=mask, other=0.0)
            tiles = ()
            for c in tl.static_range(CHUNK):
                own = tl.where(start + c == 0, 0, following + (start + c - 1) * step) + rows * row_step
                seen = (rows < num_rows) & (rows * 0 + start + c < count)
                own_m = tl.load(Stats + 2 * own, mask=seen, other=float("-inf"))
                own_acc = tl.load(Sums + own[:, None] * BLOCK_DV + offs_v[None, :], mask=seen[:, None], other=0.0)
                tiles += ((own_acc, own_m),)  # type: ignore[assignment]
            m_new = tl.maximum(m, tl.max(m_i, 1))
            m_safe = safe(m_new)
            alpha = tl.exp2(m - m_safe)
            l = l * alpha + tl.sum(l_i * tl.exp2(m_i - m_safe[:, None]), 1)
            acc *= alpha[:, None]
            for c in tl.static_range(CHUNK):
                acc += tiles[c][0] * tl.exp2(tiles[c][1] - m_safe)[:, None]
        m = m_new
    return offs_v[None, :], acc, m, l
