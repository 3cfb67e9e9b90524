"""LeanAttention: decode attention as stream-K, over equal shares of all K/V tiles.

The K/V tiles of all (batch row, KV head) pairs stand in one line, and the line is cut into equal shares, one per program:
every program does the same work whatever the lengths of the rows. The schedule is computed inside the kernels from
the device's own lengths, so it stays right when they change under a captured CUDA graph. Where it is known beforehand that parts
of each head are shares as equal, or short and nearly so, the kernel is Flash-Decoding's, which has nothing to find out.

Rows of the output that several programs share are merged by a second launch, always in the same order: results are bitwise
repeatable, nobody waits for anybody and there is no state between launches. The paper merges inside the one kernel, in a block
that waits for its peers. Merging there, by whoever arrives last, took longer here wherever programs outnumber heads: a fence, an
atomic and one program's loads in place of a launch that all multiprocessors share and that is set up meanwhile.

Source: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers"
(2024), sections 4.1 to 4.3. Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import checks, launch
from .overlap import early, let_next_begin, wait_for_inputs
from .softmax import (
    attend,
    block_bounds,
    load_spans,
    merge_rows,
    packed_rows,
    row_bounds,
    sink_stop,
    store_packed,
    store_partial,
)
from .spans import NO_WINDOW
from .split_kv import Plan, make_plan, run

# Tiles of a share. Beginning another head costs a program about as much as a tile or two; so a share as short as this is better
# kept within one head, at the price of up to three tenths of the programs.
SHORT = 90


@triton.jit
def _row_tiles(
    span_ptrs, q_len, kv_len, window,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Tiles of one KV head of a row, or of each row of a block. An empty row has one, for its sinks or its zeros."""
    q_start, kv_start, kv_stop, window, causal, _ = load_spans(span_ptrs, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL)
    lo, hi, _, _ = block_bounds(q_start, q_start + q_len - 1, kv_start + SINKS, kv_stop, window, causal)
    return tl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 1)


@triton.jit
def _owner(t, share, extra):
    """Which member of a crew has tile t of its line in its share."""
    longer = extra * (share + 1)
    return tl.where(t < longer, t // (share + 1), extra + (t - longer) // share)


@triton.jit
def _schedule(
    Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, programs, spread,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Who has which tiles: (tiles_b, line_b, lines, line_tiles, crew, share, extra).

    tiles_b, line_b [BLOCK_B]: tiles of one KV head and of all KV heads of each row; without spans rows are alike and these are
    numbers. There are `lines` lines of `line_tiles` tiles, each dealt to a crew of `crew` programs: `share` tiles to every member
    and one more to each of the first `extra`.
    """
    if HAS_SPANS:
        offs_b = tl.arange(0, BLOCK_B)
        span_ptrs = Spans + tl.minimum(offs_b, batch - 1).to(tl.int64) * stride_sb
        tiles_b = _row_tiles(span_ptrs, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL, BLOCK_N, SINKS)
        line_b = tl.where(offs_b < batch, tiles_b * kv_heads, 0)
        total = tl.sum(line_b, 0)
        alike = tl.max(line_b, 0) * batch == total
    else:
        tiles_b = _row_tiles(Spans, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL, BLOCK_N, SINKS)
        line_b = tiles_b * kv_heads
        total = line_b * batch
        alike = tl.full([], True, tl.int1)

    # Fewer programs than there are when there is little work, so that a share is worth its merge.
    programs = tl.minimum(programs, tl.maximum(total // MIN_TILES, tl.minimum(total, spread)))
    # Where rows are alike each head may have a line and a crew of its own, so that no share goes on to a second head. That is
    # worth it where few programs are left over for it, or not many and shares are SHORT.
    heads = batch * kv_heads
    in_crews = programs // heads * heads
    short = (in_crews * 10 >= programs * 7) & (total <= programs * SHORT)
    own = alike & (in_crews > 0) & ((in_crews * 16 >= programs * 15) | short)
    lines = tl.where(own, heads, 1)
    line_tiles = total // lines
    crew = programs // lines
    longest = (line_tiles + crew - 1) // crew
    crew = (line_tiles + longest - 1) // longest  # whoever does not shorten the longest share only adds to the merge
    share = line_tiles // crew  # this form stays in 32 bits, where dividing is cheap
    return tiles_b, line_b, lines, line_tiles, crew, share, line_tiles - share * crew


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread", "stats_start"])
def lean_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Workspace,
    Spans,
    QSinks,
    SinkLogits,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_sb,
    batch,
    kv_heads,
    q_len,
    kv_len,
    window,
    spread,
    stats_start,
    scale_log2,
    cap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    IEEE: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the rows that one program has whole; of the others partials, two slots a program."""
    let_next_begin(EARLY)  # which this one did not: set up ahead of time, two of its programs may find room on one multiprocessor
    pid = tl.program_id(0)
    _, line_b, lines, line_tiles, crew, share, extra = _schedule(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, tl.num_programs(0), spread,
        BLOCK_B, BLOCK_N, MIN_TILES, SHORT, HAS_SPANS, IS_CAUSAL, SINKS,
    )  # fmt: skip
    if pid >= crew * lines:
        return
    line = pid // crew
    member = pid - line * crew
    t = line * line_tiles + member * share + tl.minimum(member, extra)
    t_stop = t + share + tl.where(member < extra, 1, 0)

    rows = tl.arange(0, BLOCK_M)
    q_index, group_head, _ = packed_rows(rows, q_len, GROUP)
    offs_d = tl.arange(0, BLOCK_D)[None, :]

    while t < t_stop:
        # Which row, which KV head, which of its tiles.
        if HAS_SPANS:
            offs_b = tl.arange(0, BLOCK_B)
            b = tl.sum((tl.cumsum(line_b, 0) <= t).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_b < b, line_b, 0), 0)
        else:
            b = t // line_b
            before = b * line_b
        row = b.to(tl.int64)
        q_start, kv_start, kv_stop, row_window, causal, holes = load_spans(
            Spans + row * stride_sb, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL
        )
        sink_lo, sink_hi = kv_start, sink_stop(q_start + q_index, kv_start, kv_stop, causal, SINKS)
        kv_start += SINKS
        lo, hi, full_lo, full_hi = block_bounds(q_start, q_start + q_len - 1, kv_start, kv_stop, row_window, causal)
        row_tiles = tl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 1)
        kv_head = (t - before) // row_tiles
        tile_start = (t - before) % row_tiles
        tile_stop = tl.minimum(row_tiles, tile_start + t_stop - t)
        kv_head_64 = kv_head.to(tl.int64)
        row_lo, row_hi = row_bounds(q_start + q_index, kv_start, kv_stop, row_window, causal)
        acc, m, l = attend(
            Q,
            row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm,
            K + row * stride_kb + kv_head_64 * stride_kh,
            V + row * stride_vb + kv_head_64 * stride_vh,
            stride_kn,
            stride_vn,
            Spans + row * stride_sb,
            row_lo,
            row_hi,
            lo,
            hi,
            full_lo,
            full_hi,
            holes,
            tile_start,
            tile_stop,
            scale_log2,
            cap_log2,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            HAS_SPANS,
            HAS_SOFTCAP,
            IEEE,
            QSinks,
            sink_lo,
            sink_hi,
            tile_start == 0,
            SINKS,
        )
        if tile_stop - tile_start == row_tiles:
            store_packed(
                acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_d, q_len,
                GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
            )  # fmt: skip
        else:
            # A program shares at most two: the one that an earlier program began, and the one that it leaves to later ones.
            slot = 2 * pid + tl.where(tile_start == 0, 1, 0)
            store_partial(acc, m, l, Workspace, Workspace + stats_start, slot, rows, offs_d, q_len * GROUP, WORKSPACE_M, BLOCK_D)
        t += tile_stop - tile_start


@triton.jit(
    do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread", "stats_start", "programs"]
)
def lean_merge_kernel(
    Out,
    Lse,
    Workspace,
    Spans,
    SinkLogits,
    stride_sb,
    batch,
    kv_heads,
    q_len,
    kv_len,
    window,
    spread,
    stats_start,
    programs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program for each ROWS packed rows: merges their partials, in order, where several programs have a part of them."""
    first_row, kv_head, b = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    # The spans may be read ahead of the wait: they are older than lean_kernel, which did not begin early.
    tiles_b, line_b, _, line_tiles, crew, share, extra = _schedule(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, programs, spread,
        BLOCK_B, BLOCK_N, MIN_TILES, SHORT, HAS_SPANS, IS_CAUSAL, SINKS,
    )  # fmt: skip
    if HAS_SPANS:
        offs_b = tl.arange(0, BLOCK_B)
        row_tiles = tl.sum(tl.where(offs_b == b, tiles_b, 0), 0)
        before = tl.sum(tl.where(offs_b < b, line_b, 0), 0)
    else:
        row_tiles = tiles_b
        before = b * line_b
    start = before + kv_head * row_tiles
    line = start // line_tiles
    start -= line * line_tiles
    first = line * crew + _owner(start, share, extra)
    last = line * crew + _owner(start + row_tiles - 1, share, extra)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    if first == last:
        return
    rows, offs_d, acc, m, l = merge_rows(
        Workspace, Workspace + stats_start, 2 * first + 1, 2 * (first + 1), 2, last - first + 1, first_row, q_len * GROUP,
        ROWS, WORKSPACE_M, BLOCK_D, CHUNK,
    )  # fmt: skip
    store_packed(
        acc, m, l, Out, Lse, SinkLogits, b, kv_head, kv_heads, rows, offs_d, q_len,
        GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
    )  # fmt: skip


def lean(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sinks: int = 0,
    q_sinks: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Exact attention of few query rows in one launch or two; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `launch.MAX_DECODE_ROWS`.
    """
    plan = _prepare((q, k, v, spans, sink_logits, q_sinks), scale, causal, window, softcap, sinks, return_lse)
    return run(plan, q, k, v, spans, sink_logits, sinks, q_sinks, return_lse)


def shares_within_heads(device: torch.device, config: launch.Config, heads: int, kv_len: int | None) -> bool:
    """Whether programs of their own serve `heads` KV heads of rows that are alike better than one line of tiles.

    As `_schedule` decides on the device. kv_len: keys in sight, or None: whether it is so at any length.
    """
    programs = config.programs_per_sm * launch.num_sms(device)
    of_heads = launch.programs_each(device, config, heads) * heads
    short = kv_len is not None and heads * triton.cdiv(kv_len, config.BLOCK_N) <= programs * SHORT
    return of_heads > 0 and (16 * of_heads >= 15 * programs or (10 * of_heads >= 7 * programs and short))


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, return_lse) -> Plan:
    q, k, v, spans, sink_logits, q_sinks = tensors
    scale = checks.check(
        q, k, v, spans, decode=True,
        scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, q_sinks=q_sinks,
    )  # fmt: skip
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    heads, group = batch * kv_heads, num_heads // kv_heads
    config = launch.decode(q.device, q.dtype, head_dim, q_len * group, heads)
    in_sight = kv_len if window is None else min(kv_len, window + q_len - 1)
    alike = spans is None or batch == 1
    if alike and shares_within_heads(q.device, config, heads, in_sight if spans is None else None):
        return make_plan(tensors, config, None, scale, causal, window, softcap, sinks, return_lse)
    workspace_m, block_d = triton.next_power_of_2(q_len * group), launch.block_d(head_dim)
    most = launch.num_sms(q.device) * config.programs_per_sm
    programs = min(most, heads * triton.cdiv(kv_len, config.BLOCK_N))
    # Many heads have few partials each, and all their rows make one merge.
    merge_rows = workspace_m if heads > programs else 1
    chunk, merge_warps = launch.merge(merge_rows * block_d, most // heads + 2)
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    overlap = early(q.device)
    both = {
        "stride_sb": 0 if spans is None else spans.stride(0),
        "batch": batch,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "window": NO_WINDOW if window is None else window,
        "spread": launch.num_sms(q.device),
        "stats_start": 2 * programs * workspace_m * block_d,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_B": triton.next_power_of_2(batch),
        "WORKSPACE_M": workspace_m,
        "BLOCK_N": config.BLOCK_N,
        "BLOCK_D": block_d,
        "MIN_TILES": config.MIN_TILES,
        "SHORT": SHORT,
        "HAS_SPANS": spans is not None,
        "IS_CAUSAL": causal,
        "HAS_SINK_LOGITS": sink_logits is not None,
        "WRITE_LSE": return_lse,
        "SINKS": sinks,
        "EARLY": overlap["EARLY"],
    }
    attend = launch.Launch(
        lean_kernel,
        (programs,),
        **checks.strides(q, k, v, spans) | both,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        BLOCK_M=config.BLOCK_M,
        HAS_SOFTCAP=softcap is not None,
        IEEE=q.dtype == torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge = launch.Launch(
        lean_merge_kernel,
        (triton.cdiv(q_len * group, merge_rows), kv_heads, batch),
        **both | overlap,
        programs=programs,
        ROWS=merge_rows,
        CHUNK=chunk,
        num_warps=merge_warps,
    )
    return Plan(attend, merge, 2 * programs * workspace_m * (block_d + 2))
