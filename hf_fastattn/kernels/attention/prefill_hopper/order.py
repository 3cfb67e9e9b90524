"""The order of blocks in the Hopper prefill kernel: plain integer code, compiled by Triton for the merge, by Gluon otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

from ...spans import FLAGS, KV_STOP, PADDING
from ..schedule import MAX_SPLITS, MIN_SPLIT


@triton.jit
def block_at(index, num_blocks, num_packs, total_packs, section):
    """(block of rows, pack, batch row) at a place in the order: section by section of packs, in each the last blocks of all packs
    first."""
    per_section = num_blocks * section
    which = index // per_section
    rest = index - which * per_section
    width = tl.minimum(section, total_packs - which * section)
    step = rest // width
    flat = which * section + rest - step * width
    row = flat // num_packs
    return num_blocks - 1 - step, flat - row * num_packs, row


@triton.jit
def live_blocks(
    Spans, q_len, kv_len, window, queries, whole, splits, num_blocks, num_packs, total_packs,
    KV_STOP: tl.constexpr = KV_STOP,
    FLAGS: tl.constexpr = FLAGS,
    PADDING: tl.constexpr = PADDING,
    MIN_SPLIT: tl.constexpr = MIN_SPLIT,
    MAX_SPLITS: tl.constexpr = MAX_SPLITS,
):  # fmt: skip
    """(blocks of a pack without those of padding alone, shares of each block), if each has `splits` shares with the padding.

    Programs that would compute padding compute more shares of the other blocks, if there is one batch row and all blocks have
    shares; in other launches padding counts as other queries do. queries: of a block.
    """
    live = num_blocks
    if (whole == 0) & (num_packs == total_packs):
        padding = tl.load(Spans + FLAGS, cache_modifier=".cg") >> PADDING
        live = tl.maximum((q_len - padding + queries - 1) // queries, 1)
        if live < num_blocks:  # each of the others is one item
            most = (num_blocks * (splits - 1) + live) // live
            keys = tl.minimum(tl.minimum(tl.load(Spans + KV_STOP, cache_modifier=".cg"), kv_len), window)
            splits = tl.maximum(tl.minimum(tl.minimum(most, MAX_SPLITS), keys // MIN_SPLIT), splits)
    return live, splits
