"""The order in which the programs of the Hopper prefill kernel compute items and tiles.

A pack is the heads of a KV head whose rows share a block; an item is a block of a pack. The longest causal blocks come first,
pack by pack inside sections of packs whose K and V fit the L2 cache together. Within an item the tiles that need a mask
(diagonal, tail, window edge) come first, from the last keys to the first; those that every row sees completely come last, in a
loop without a mask. With shares, the last blocks of the order are not items themselves: each of their shares is one. These items
come last, and shares of the same part of the keys are consecutive, so that they find K and V in the L2 cache. Blocks of padding
alone, whose result is not defined, come after them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device import visibility
from ...spans import WORDS
from . import order

# These are defined once for all kernels, and compiled here as Gluon.
block_at = gluon.jit(order.block_at.fn)
live_blocks = gluon.jit(order.live_blocks.fn)
load_spans = gluon.jit(visibility.load_spans.fn)
row_bounds = gluon.jit(visibility.row_bounds.fn)
block_bounds = gluon.jit(visibility.block_bounds.fn)
narrowed = gluon.jit(visibility.narrowed.fn)
narrowed_block = gluon.jit(visibility.narrowed_block.fn)


@gluon.jit
def row_spans(
    span_ptr, q_len, kv_len, window,
    HAS_ROWS: gl.constexpr, IS_CAUSAL: gl.constexpr, WORDS: gl.constexpr = WORDS,
):  # fmt: skip
    """The result of `load_spans` for one batch row. No query sees slots from kv_stop on."""
    q_start, kv_start, kv_stop, window, causal, holes, live_stop = load_spans(
        span_ptr, q_len, kv_len, window, IS_CAUSAL, MAY_END=False
    )  # fmt: skip
    if HAS_ROWS:
        kv_stop = gl.minimum(kv_stop, gl.load(span_ptr + 2 * WORDS + 2 * q_len - 1))
    return q_start, kv_start, kv_stop, window, causal, holes, live_stop


@gluon.jit
def tiles_of(
    first, q_len, span_ptr, spans,
    QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, HAS_ROWS: gl.constexpr, ALIGN: gl.constexpr = 1,
):  # fmt: skip
    """The tiles that the QUERIES queries from `first` on visit, at least one: (lo, hi, num_tiles, num_after, num_masked).

    Tile t begins at slot lo + t * BLOCK_N, lo rounded down to a multiple of ALIGN; together they contain the keys [lo, hi) that
    any row sees. num_masked of them need a mask: the last num_after, and the others at the beginning.
    """
    q_start, kv_start, kv_stop, window, causal, holes, live_stop = spans
    first_pos = q_start + first
    last_pos = q_start + gl.minimum(first + QUERIES, q_len) - 1
    bounds = block_bounds(first_pos, last_pos, live_stop, kv_start, kv_stop, window, causal)
    lo, hi, full_lo, full_hi = narrowed_block(bounds, kv_stop, span_ptr, first, last_pos - q_start, q_len, HAS_ROWS)
    begin = lo // ALIGN * ALIGN
    num_tiles = gl.maximum((hi - begin + BLOCK_N - 1) // BLOCK_N, 1)
    full_start = gl.minimum((full_lo - begin + BLOCK_N - 1) // BLOCK_N, num_tiles)
    full_stop = gl.minimum(gl.maximum(full_hi - begin, 0) // BLOCK_N, num_tiles)
    full_stop = gl.maximum(gl.where(holes, full_start, full_stop), full_start)
    num_after = num_tiles - full_stop
    return lo, hi, num_tiles, num_after, num_after + full_start


@gluon.jit
def block_and_share(index, whole, num_cut, splits):
    """(place of its block in the order, index of its share, shares of the block, slot or -1) of one item.

    The first `whole` blocks have one share and no slot; the others, num_cut of them, have `splits`, whose slots are num_cut
    apart. The items after them are blocks of padding alone, and have the places from 0 on among such blocks.
    """
    num_cut = gl.maximum(num_cut, 1)
    slot = gl.maximum(index - whole, 0)
    share = slot // num_cut
    is_share = (index >= whole) & (share < splits)
    place = gl.where(is_share, whole + slot - share * num_cut, gl.where(index < whole, index, slot - splits * num_cut))
    return place, gl.where(is_share, share, 0), gl.where(is_share, splits, 1), gl.where(is_share, slot, -1)


@gluon.jit
def share_of(num_tiles, index, splits):
    """(first tile to visit, tiles) of one of `splits` equal shares of an item's tiles, at least one tile.

    If there are fewer tiles than shares, the surplus shares repeat the last one, and the merge skips them.
    """
    most = gl.minimum(splits, num_tiles)
    index = gl.minimum(index, most - 1)
    begin = index * num_tiles // most
    return begin, (index + 1) * num_tiles // most - begin


@gluon.jit
def tile_start(i, tiles, BLOCK_N: gl.constexpr, ALIGN: gl.constexpr = 1):
    """First slot of the i-th tile to visit: masked at the end, masked at the beginning, then the others, each from the last."""
    lo, _hi, num_tiles, num_after, num_masked = tiles
    middle = num_tiles - num_after - 1 - (i - num_masked)
    begin = lo // ALIGN * ALIGN
    return begin + gl.where(i < num_after, num_tiles - 1 - i, gl.where(i < num_masked, num_masked - 1 - i, middle)) * BLOCK_N
