"""Re-rotation of queries from one position to another by the frequencies of the rotary embedding; see `decode.rotate`."""

import math

import triton
import triton.language as tl


@triton.jit
def partners(offs_d, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each dimension: (the other dimension of its pair, the index of the pair, whether it is the first of the pair)."""
    if INTERLEAVED:
        return offs_d ^ 1, offs_d // 2, offs_d % 2 == 0
    else:
        first = offs_d < PAIRS
        partner = tl.where(first, offs_d + PAIRS, offs_d - PAIRS)
        return partner, tl.minimum(offs_d, partner), first


@triton.jit
def rerotate(x, partner, token, inv_freq, first, last_position, QUARTER: tl.constexpr = math.pi / 2):
    """x at position `token` of its row, re-rotated to min(token, last_position). partner: the values of the paired dimensions."""
    near = tl.minimum(token, last_position)
    from_angle, to_angle = token.to(tl.float32) * inv_freq, near.to(tl.float32) * inv_freq
    quarters = (from_angle.to(tl.float64) - to_angle.to(tl.float64)) * (1 / QUARTER)
    whole = tl.floor(quarters + 0.5)
    angle = (quarters - whole).to(tl.float32) * QUARTER
    # sinf and cosf of Cephes for the remainder, at most pi / 4.
    z = angle * angle
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * angle + angle
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    whole = whole.to(tl.int64)
    odd = (whole & 1) != 0
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, sin, cos)
    sin = tl.where((whole & 2) != 0, -sin, sin)
    cos = tl.where(((whole + 1) & 2) != 0, -cos, cos)
    return x.to(tl.float32) * cos + partner.to(tl.float32) * tl.where(first, sin, -sin)
