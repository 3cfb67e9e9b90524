"""The merge of shares of a block of query rows: in a fixed order, by a second launch.

    m = max_i m_i;  l = sum_i 2^(m_i - m) l_i;  out = sum_i 2^(m_i - m) acc_i / l;  lse = log(l) + m log(2)

Rounds: the result; all else is fp32. Limits: shares of `prefill_hopper`. Oracle: `kernels.reference.attention`, of the whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...device.constants import Output
from ...device.merge import merge_rows, store_rows
from ...host import tables
from ...host.launch import Launch
from ...host.overlap import early, let_next_begin, wait_for_inputs
from ..plan import Call
from ..schedule import seen_keys, tiles_of
from .order import block_at, live_blocks


@triton.jit(
    do_not_specialize=[
        "stride_sb", "num_blocks", "num_packs", "total_packs", "group", "log_pack", "section", "whole", "splits", "q_len",
        "kv_len", "window", "stats_start", "tile_align",
    ]
)  # fmt: skip
def merge_shares_kernel(
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Workspace,  # (floats,), fp32: `device.merge.store_partial`
    Spans,  # (batch, 1, 1, integers), int32
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    stride_sb, num_blocks, num_packs, total_packs, group, log_pack, section, whole, splits, q_len, kv_len, window, stats_start,
    tile_align,
    C: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for each ROWS rows of a block with shares. Share i of the n-th of these blocks is in slot i * blocks + n.

    log_pack: log2 of the number of heads in a pack. It follows from the number of queries: as a constant it would make variants.
    """
    first_row, which = tl.program_id(0) * ROWS, tl.program_id(1)
    pack_heads, queries = 1 << log_pack, BLOCK_M >> log_pack
    # The spans may be read before the wait: they were written before the previous launch, which did not begin early.
    live, splits = live_blocks(Spans, q_len, kv_len, window, queries, whole, splits, num_blocks, num_packs, total_packs)
    blocks = live * total_packs - whole
    block, pack, row = block_at(whole + tl.minimum(which, blocks - 1), live, num_packs, total_packs, section)
    first, last = block * queries, tl.minimum((block + 1) * queries, q_len) - 1
    lo, hi = seen_keys(Spans + row.to(tl.int64) * stride_sb, first, last, q_len, kv_len, window, C, MAY_PAD=True)
    tiles = tiles_of(lo, hi, tile_align, C)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    if which >= blocks:  # a block of padding
        return
    step, left = blocks * BLOCK_M, (q_len << log_pack) - block * BLOCK_M - first_row
    offs_v, acc, m, l = merge_rows(
        Workspace, stats_start, which * BLOCK_M + first_row, step, step, 1, tl.minimum(splits, tiles), left, ROWS, CHUNK, C
    )  # fmt: skip
    rows = block * BLOCK_M + first_row + tl.arange(0, ROWS)
    packs_each = (group + pack_heads - 1) >> log_pack
    kv_head = pack // packs_each
    offs_m, offs_h = rows >> log_pack, ((pack - kv_head * packs_each) << log_pack) + (rows & (pack_heads - 1))
    exists = (offs_m < q_len) & (offs_h < group)
    head, heads = kv_head * group + tl.minimum(offs_h, group - 1), num_packs // packs_each * group
    store_rows(acc, m, l, Out, Lse, SinkLogits, row, head, heads, tl.minimum(offs_m, q_len - 1), exists, offs_v, q_len, C)


def merge_shares(
    call: Call, pack: int, order: tuple[int, ...], splits: int, BLOCK_M: int, BLOCK_N: int, align: int, stats_start: int
) -> Launch:
    """The launch that merges the shares of `call`; its tensors are out, lse, the workspace, spans and sink logits.

    order: the sizes of `order.block_at`, and the number of whole blocks. align: tiles begin at its multiples. stats_start: where
    m and l begin in the workspace.
    """
    num_blocks, num_packs, total_packs, section, whole = order
    blocks, rows = num_blocks * total_packs - whole, min(call.q_len * pack, BLOCK_M)
    merge_form = tables.merge_of_shares(call.q.device, call.block_dv, blocks * rows)
    return Launch(
        merge_shares_kernel,
        (triton.cdiv(rows, merge_form["ROWS"]), blocks),
        stride_sb=0 if call.spans is None else call.spans.stride(0),
        num_blocks=num_blocks,
        num_packs=num_packs,
        total_packs=total_packs,
        group=call.group,
        log_pack=pack.bit_length() - 1,
        section=section,
        whole=whole,
        splits=splits,
        q_len=call.q_len,
        kv_len=call.kv_len,
        window=call.window,
        stats_start=stats_start,
        tile_align=align,
        C=Output(**call.output(BLOCK_N)),
        BLOCK_M=BLOCK_M,
        **merge_form,
        **early(call.q.device),
    )
