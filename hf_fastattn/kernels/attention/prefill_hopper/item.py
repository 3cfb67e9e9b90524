"""One item of the Hopper prefill kernel: the queries and heads that it computes, and the tiles that it visits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...spans import WORDS
from .pipe import CONSUMERS
from .plan import block_and_share, block_at, live_blocks, narrowed, row_bounds, row_spans, share_of, tiles_of

BLOCK_M = 64 * CONSUMERS


@gluon.jit
def item_of(
    index, Spans, sizes,
    C: gl.constexpr, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr = BLOCK_M,
):  # fmt: skip
    """One item: (indices, pointer to the spans of its batch row, spans, tiles of the block, share of these, slot or -1).

    The indices are (first query, KV head, first head of its group, batch row). A share is (first tile to visit, number of tiles).
    The slot is that of a share of a block in the workspace, and -1 of a whole block.
    """
    stride_sb, num_items, num_packs, total_packs, group, section, whole, q_len, kv_len, window = sizes
    QUERIES: gl.constexpr = BLOCK_M // C.pack
    num_blocks = (q_len + QUERIES - 1) // QUERIES
    share_index = 0
    slot = -1
    before = 0
    if C.split:
        splits = (num_items - whole) // gl.maximum(num_blocks * total_packs - whole, 1)
        live, splits = live_blocks(Spans, q_len, kv_len, window, QUERIES, whole, splits, num_blocks, num_packs, total_packs)
        num_cut = live * total_packs - whole
        is_padding = index >= whole + num_cut * splits
        index, share_index, splits, slot = block_and_share(index, whole, num_cut, splits)
        before = gl.where(is_padding, live, 0)
        num_blocks = gl.where(is_padding, num_blocks - live, live)
        index = gl.minimum(index, num_blocks * total_packs - 1)  # some repeat the last block of padding
    block, pack, row = block_at(index, num_blocks, num_packs, total_packs, section)
    block += before
    packs_each = (group + C.pack - 1) // C.pack
    kv_head = pack // packs_each
    group_head = (pack - kv_head * packs_each) * C.pack
    first = block * QUERIES
    span_ptr = Spans + row.to(gl.int64) * stride_sb
    spans = row_spans(span_ptr, q_len, kv_len, window, C.rows, IS_CAUSAL)
    tiles = tiles_of(first, q_len, span_ptr, spans, QUERIES, C.BLOCK_N, C.rows, C.box)
    _lo, _hi, num_tiles, _num_after, _num_masked = tiles
    share = (0, num_tiles)
    if C.split:
        share = share_of(num_tiles, share_index, splits)
    return (first, kv_head, group_head, row), span_ptr, spans, tiles, share, slot


@gluon.jit
def place_of(index, Spans, sizes, WG: gl.constexpr, C: gl.constexpr):
    """(indices of consumer WG's rows in one item, slot or -1), where nothing else is needed."""
    indices, _span_ptr, _spans, _tiles, _share, slot = item_of(index, Spans, sizes, C, False)
    first, kv_head, group_head, row = indices
    return (first + WG * 64 // C.pack, kv_head, group_head, row), slot


@gluon.jit
def rows_of(
    index, Spans, sizes,
    WG: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, IS_CAUSAL: gl.constexpr, WORDS: gl.constexpr = WORDS,
):  # fmt: skip
    """The rows of consumer WG in one item: (indices, end of the live slots, tiles, share, slot, bounds for `mask`)."""
    _stride_sb, _num_items, _num_packs, _total_packs, _group, _section, _whole, q_len, _kv_len, _window = sizes
    indices, span_ptr, spans, tiles, share, slot = item_of(index, Spans, sizes, C, IS_CAUSAL)
    first, kv_head, group_head, row = indices
    q_start, kv_start, kv_stop, window, causal, holes, _live_stop = spans
    _lo, hi, _num_tiles, _num_after, _num_masked = tiles
    offs_m = first + (WG * 64 + gl.arange(0, 64, ROWS)) // C.pack
    query = gl.minimum(offs_m, q_len - 1)
    row_lo, row_hi = row_bounds(q_start + query, kv_start, kv_stop, window, causal)
    row_lo, row_hi = narrowed(row_lo, row_hi, span_ptr, query, q_len, C.rows)
    indices = (first + WG * 64 // C.pack, kv_head, group_head, row)
    return indices, kv_stop, tiles, share, slot, (row_lo, row_hi, span_ptr + WORDS, hi, holes)


@gluon.jit
def heads_and_queries(indices, sizes, C: gl.constexpr, ROWS: gl.constexpr):
    """(head, query, whether it exists) of the rows of a consumer, [64] each; rows past the last head repeat it."""
    _stride_sb, _num_items, _num_packs, _total_packs, group, _section, _whole, q_len, _kv_len, _window = sizes
    first, kv_head, group_head, _row = indices
    local = gl.arange(0, 64, ROWS)
    offs_m = first + local // C.pack
    offs_h = group_head
    exists = local < (q_len - first) * C.pack
    if C.pack > 1:
        offs_h = gl.minimum(group_head + local % C.pack, group - 1)
        exists = exists & (group_head + local % C.pack < group)
    return kv_head * group + offs_h, offs_m, exists
