"""What the two backward kernels do with a tile of scores, and how they load rows of queries."""

import triton
import triton.language as tl

from ...spans import WORDS


@triton.jit
def dot(a, b, IEEE: tl.constexpr):
    """a b in fp32."""
    if IEEE:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def add_dot(a, b, acc, IEEE: tl.constexpr):
    """acc + a b; a, in fp32, is rounded to b's dtype."""
    if IEEE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def weights(s, lse_log2, visible, MASKED: tl.constexpr):
    """P = exp(S - lse) of a tile of scores in base 2. visible: None where everything is seen, and every lse finite."""
    p = tl.exp2(s - lse_log2)
    if MASKED:  # a row that sees nothing has lse = -inf
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def slopes(p, s, dp, delta, visible, cap_log2, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """dS of a tile, still to be scaled: P * (dP - delta), times the slope of the softcap, by which `s` is capped."""
    ds = p * (dp - delta)
    if HAS_SOFTCAP:
        tanh = s / cap_log2
        ds *= 1.0 - tanh * tanh
    if MASKED:  # K and V may hold anything where nobody sees them
        ds = tl.where(visible, ds, 0.0)
    return ds


@triton.jit
def load_rows(base, stride, offs_row, offs_d, row_mask, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of a matrix of DIM columns, 0 past them and, where MASKED, outside `row_mask`."""
    ptrs = base + offs_row.to(tl.int64)[:, None] * stride + offs_d[None, :]
    if MASKED:
        return tl.load(ptrs, mask=row_mask[:, None] & (offs_d[None, :] < DIM), other=0.0)
    elif DIM == BLOCK:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=offs_d[None, :] < DIM, other=0.0)


@triton.jit
def live_keys(span_ptr, offs_slot, lo, hi, holes, C: tl.constexpr, WORDS: tl.constexpr = WORDS):
    """The slots that are in [lo, hi) and no holes; -1 in place of the others, where no row sees anything."""
    live = (offs_slot >= lo) & (offs_slot < hi)
    if C.HAS_SPANS and not C.ROWS:
        words_stop = tl.where(holes, hi, 0)  # a row without holes reads no words
        words = tl.load(span_ptr + WORDS + (offs_slot >> 5), mask=offs_slot < words_stop, other=-1)
        live = live & (((words >> (offs_slot & 31)) & 1) != 0)
    return tl.where(live, offs_slot, -1)


@triton.jit
def tile_at(i, before, lo, full_stop, BLOCK: tl.constexpr):
    """Where the i-th tile that needs a mask begins: `before` of them lie ahead of the others, which go on from `full_stop`."""
    return lo + tl.where(i < before, i, full_stop + i - before) * BLOCK


@triton.jit
def split_tiles(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr):
    """The tiles of [lo, hi), the first at lo: (how many need a mask before the full ones, one past the last full one, all)."""
    tiles = tl.cdiv(hi - lo, BLOCK)
    before = tl.minimum(tl.cdiv(full_lo - lo, BLOCK), tiles)
    return before, tl.maximum(before, tl.minimum(tl.maximum(full_hi - lo, 0) // BLOCK, tiles)), tiles
