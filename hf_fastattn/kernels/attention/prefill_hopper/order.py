"""The order of blocks in the Hopper prefill kernel: plain integer code, compiled by Triton for the merge, by Gluon otherwise."""

from __future__ import annotations

import triton
import triton.language as tl


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
