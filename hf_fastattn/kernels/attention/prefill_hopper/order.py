"""The order of blocks in the Hopper prefill kernel: plain integer code, compiled by Triton for the merge, by Gluon otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

from ...device.visibility import load_spans
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
    MIN_SPLIT: tl.constexpr = MIN_SPLIT, MAX_SPLITS: tl.constexpr = MAX_SPLITS,
):  # fmt: skip
    """(blocks of a pack without those of padding alone, shares of each block), if each has `splits` shares with the padding.

    Programs that would compute padding compute more shares of the other blocks, if there is one batch row and all blocks have
    shares; in other launches padding counts as other queries do. queries: of a block.
    """
    live = num_blocks
    if (whole == 0) & (num_packs == total_packs):
        q_start, _, kv_stop, window, _, _, live_stop = load_spans(
            Spans, q_len, kv_len, window, False, MAY_END=False, PAST_L1=True
        )  # fmt: skip
        live = tl.maximum((live_stop - q_start + queries - 1) // queries, 1)
        if live < num_blocks:  # each of the others is one item
            most = tl.minimum((num_blocks * (splits - 1) + live) // live, MAX_SPLITS)
            splits = tl.maximum(tl.minimum(most, tl.minimum(kv_stop, window) // MIN_SPLIT), splits)
    return live, splits
