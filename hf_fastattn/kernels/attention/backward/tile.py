"""The operations of the two backward kernels on a tile of scores, and the loading of query rows."""

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
def probabilities(s, lse_log2, visible, MASKED: tl.constexpr):
    """P = exp(S - lse) of a tile of scores in base 2, exactly 0 where not visible. visible: None if all keys are."""
    s -= lse_log2
    if MASKED:  # also if lse is -inf, for a row that sees no key
        s = tl.where(visible, s, float("-inf"))
    return tl.exp2(s)


@triton.jit
def score_gradients(p, s, dp, delta, cap_log2, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """dS of a tile before scaling: P * (dP - delta), times the derivative of the softcap, which `s` includes."""
    ds = p * (dp - delta)
    if HAS_SOFTCAP:
        tanh = s / cap_log2
        ds *= 1.0 - tanh * tanh
    if MASKED:  # K and V may contain NaN in slots that no query sees
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit
def within(slots, lo, stop):
    """Whether lo <= slots < stop, in one comparison; lo <= stop, and lo is at least 0, so that a slot of -1 never is."""
    return (slots - lo).to(tl.uint32, bitcast=True) < (stop - lo).to(tl.uint32, bitcast=True)


@triton.jit
def load_rows(base, stride, offs_row, offs_d, row_mask, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load [rows, BLOCK] of a matrix with DIM columns; 0 past them and, if MASKED, outside of `row_mask`."""
    ptrs = base + offs_row.to(tl.int64)[:, None] * stride + offs_d[None, :]
    if MASKED:
        return tl.load(ptrs, mask=row_mask[:, None] & (offs_d[None, :] < DIM), other=0.0)
    elif DIM == BLOCK:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=offs_d[None, :] < DIM, other=0.0)


@triton.jit
def store_pairs(ptrs, lse_log2, delta, mask):
    """Store (lse in base 2, delta) of query rows for `load_pairs`."""
    tl.store(ptrs, lse_log2, mask=mask)
    tl.store(ptrs + 1, delta, mask=mask)


@triton.jit
def load_pairs(base, offs_row, row_mask, MASKED: tl.constexpr):
    """(lse in base 2, delta) of query rows, a pair in one 64-bit integer.

    Transposed tiles have queries as columns, so each thread loads the pairs of all its columns: one load costs half of two.
    """
    ptrs = base + offs_row
    if MASKED:
        pairs = tl.load(ptrs, mask=row_mask, other=0)
    else:
        pairs = tl.load(ptrs)
    return pairs.to(tl.int32).to(tl.float32, bitcast=True), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def live_keys(span_ptr, offs_slot, lo, hi, holes, C: tl.constexpr, WORDS: tl.constexpr = WORDS):
    """The slots in [lo, hi) that are not holes; -1 for all others, which no row sees."""
    live = (offs_slot >= lo) & (offs_slot < hi)
    if C.HAS_WORDS:
        words_stop = tl.where(holes, hi, 0)  # without holes no words of the bit mask are read
        words = tl.load(span_ptr + WORDS + (offs_slot >> 5), mask=offs_slot < words_stop, other=-1)
        live = live & (((words >> (offs_slot & 31)) & 1) != 0)
    return tl.where(live, offs_slot, -1)


@triton.jit
def tile_at(i, before, lo, full_stop, BLOCK: tl.constexpr):
    """The start of the i-th tile that needs a mask: `before` of them precede the full tiles, the others begin at `full_stop`."""
    return lo + tl.where(i < before, i, full_stop + i - before) * BLOCK


@triton.jit
def split_tiles(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr):
    """The tiles of [lo, hi): (number of masked tiles before the full ones, end of the full tiles, number of all tiles)."""
    tiles = tl.cdiv(hi - lo, BLOCK)
    before = tl.minimum(tl.cdiv(full_lo - lo, BLOCK), tiles)
    return before, tl.maximum(before, tl.minimum(tl.maximum(full_hi - lo, 0) // BLOCK, tiles)), tiles
