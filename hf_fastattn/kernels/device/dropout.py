"""Which attention weights dropout keeps, as in `kernels.dropout`."""

import triton
import triton.language as tl

from ..dropout import GROUP, ROUNDS


@triton.jit
def aligned(slot, GROUP: tl.constexpr = GROUP):
    """The first slot of the group of `slot`, whose random numbers are computed together. Tiles of keys begin at one."""
    return slot // GROUP * GROUP


@triton.jit
def kept(
    dropout, place, queries, first_key,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
    ROUNDS: tl.constexpr = ROUNDS,
):  # fmt: skip
    """Which weights of `queries` and the BLOCK_N keys from `first_key` on, a multiple of 8, are kept.

    dropout: (seed, threshold, factor of what is kept). place: batch row * num_heads + head.
    """
    seed, threshold, _ = dropout
    groups = (first_key // GROUP + tl.arange(0, BLOCK_N // GROUP))[None, :] + queries[:, None] * 0
    rows = queries[:, None] + groups * 0
    a, b, c, d = tl.philox(seed, groups, rows, groups * 0 + place, groups * 0, ROUNDS)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    numbers = tl.interleave(words & 0xFFFF, words >> 16)
    return numbers.to(tl.int32, bitcast=True) >= threshold
