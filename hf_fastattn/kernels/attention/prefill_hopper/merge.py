"""What becomes of the shares of a block of query rows: merged in a fixed order by a second launch."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ...device.merge import merge_rows, store_packed
from ...host import gpu, tables
from ..plan import Call
from ..schedule import num_tiles, queries_of


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "blocks", "splits", "stats_start"])
def merge_shares_kernel(
    Out, Lse, Workspace, Spans, SinkLogits,
    stride_sb, q_len, kv_len, window, blocks, splits, stats_start,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A program for each ROWS rows of a head. Share i of block b of the head is its slot i * blocks + b."""
    first_row, head, row = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    BLOCK_M: tl.constexpr = C.BLOCK_M
    block = first_row // BLOCK_M
    first, last = queries_of(block, q_len, C)
    tiles = num_tiles(Spans + row.to(tl.int64) * stride_sb, first, last, q_len, kv_len, window, C)
    slot = (row * heads + head) * blocks * splits + block
    rows, offs_v, acc, m, l = merge_rows(
        Workspace, stats_start, slot, slot + blocks, blocks, tl.minimum(splits, tiles),
        first_row - block * BLOCK_M, q_len - block * BLOCK_M, ROWS, CHUNK, C,
    )  # fmt: skip
    store_packed(acc, m, l, Out, Lse, SinkLogits, row, head, heads, rows + block * BLOCK_M, offs_v, q_len, C)


def workspace_of(call: Call, splits: int, BLOCK_M: int) -> tuple[torch.Tensor, int]:
    """(workspace of all shares, where m and l begin in it)."""
    slots = call.batch * call.num_heads * triton.cdiv(call.q_len, BLOCK_M) * splits
    stats_start = slots * BLOCK_M * call.block_dv
    return torch.empty(stats_start + slots * BLOCK_M * 2, device=call.q.device, dtype=torch.float32), stats_start


def merge_shares(call: Call, splits: int, BLOCK_M: int, BLOCK_N: int, out, lse, workspace, stats_start: int, sink_logits) -> None:
    """Merge the shares of all blocks of `call` into out and lse."""
    constants = call.constants(tables.Config(BLOCK_M, BLOCK_N, 4, 1), packed=True)
    constants = replace(constants, GROUP=1, WORKSPACE_M=BLOCK_M, FEW_ROWS=False)
    rows = call.batch * call.num_heads * call.q_len
    rows_each = min(16, 1 << (rows // (8 * gpu.num_sms(call.q.device))).bit_length())
    chunk, warps = tables.merge(rows_each * call.block_dv, splits)
    merge_shares_kernel[(triton.cdiv(call.q_len, rows_each), call.num_heads, call.batch)](
        out,
        lse,
        workspace,
        call.q if call.spans is None else call.spans,
        call.q if sink_logits is None else sink_logits,
        0 if call.spans is None else call.spans.stride(0),
        call.q_len,
        call.kv_len,
        call.window,
        triton.cdiv(call.q_len, BLOCK_M),
        splits,
        stats_start,
        C=constants,
        ROWS=rows_each,
        CHUNK=chunk,
        num_warps=warps,
    )
