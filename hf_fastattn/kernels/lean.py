"""LeanAttention: decode attention as stream-K, over equal shares of all K/V tiles.

The K/V tiles of all (batch row, KV head) pairs stand in one line, and the line is cut into equal shares, one per program:
every program does the same work whatever the lengths of the rows. The schedule is computed inside the kernels from
the device's own lengths, so it stays right when they change under a captured CUDA graph. Where it is known beforehand that parts
of each head are shares as equal, or short and nearly so, or that heads are many and soon done, the kernel is Flash-Decoding's,
which has nothing to find out.

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
from .schedule import choose, deal, owner
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
from .split_kv import Plan, make_plan, run, turning


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread", "stats_start"])
def lean_kernel(
    Q,
    K,
    V,
    SinkQuery,
    Out,
    Lse,
    Workspace,
    Spans,
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
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    IEEE: tl.constexpr,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the rows that one program has whole; of the others partials, two slots a program."""
    let_next_begin(EARLY)  # which this one did not: set up ahead of time, two of its programs may find room on one multiprocessor
    pid = tl.program_id(0)
    _, line_b, lines, line_tiles, crew, share, extra = deal(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, tl.num_programs(0), spread,
        BLOCK_B, BLOCK_N, MIN_TILES, HAS_SPANS, IS_CAUSAL, SINKS,
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
        places = q_start - sink_lo + (tl.zeros([1], tl.int32) if ONE_QUERY else q_index)
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
            True,  # FEW_ROWS
            SinkQuery,
            sink_lo,
            sink_hi,
            tile_start == 0,
            places,
            SINKS + window - 1,
            SINKS,
            PAIRS,
            INTERLEAVED,
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
    tiles_b, line_b, _, line_tiles, crew, share, extra = deal(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, programs, spread,
        BLOCK_B, BLOCK_N, MIN_TILES, HAS_SPANS, IS_CAUSAL, SINKS,
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
    first = line * crew + owner(start, share, extra)
    last = line * crew + owner(start + row_tiles - 1, share, extra)
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
    inv_freq: torch.Tensor | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
):
    """Exact attention of few query rows in one launch or two; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `launch.MAX_DECODE_ROWS`.
    """
    plan = _prepare((q, k, v, spans, sink_logits, inv_freq), scale, causal, window, softcap, sinks, interleaved, return_lse)
    return run(plan, q, k, v, spans, sink_logits, sinks, inv_freq, return_lse)


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, interleaved, return_lse) -> Plan:
    q, k, v, spans, sink_logits, inv_freq = tensors
    scale = checks.check(
        q, k, v, spans, decode=True,
        scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, inv_freq=inv_freq,
    )  # fmt: skip
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    heads, group, sms = batch * kv_heads, num_heads // kv_heads, launch.num_sms(q.device)
    alike = spans is None or batch == 1 or spans.stride(0) == 0
    in_sight = kv_len if window is None else min(kv_len, window + q_len - 1)
    config, own = choose(q.device, q.dtype, head_dim, q_len * group, heads, in_sight, alike)
    if own:
        return make_plan(tensors, config, None, scale, causal, window, softcap, sinks, interleaved, return_lse)
    workspace_m, block_d = triton.next_power_of_2(q_len * group), launch.block_d(head_dim)
    most = sms * config.programs_per_sm
    programs = min(most, heads * triton.cdiv(kv_len, config.BLOCK_N))
    # Many heads have few partials each, and all their rows make one merge.
    rows_each = workspace_m if heads > programs else 1
    chunk, merge_warps = launch.merge(rows_each * block_d, most // heads + 2)
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    overlap = early(q.device)
    both = {
        "stride_sb": 0 if spans is None else spans.stride(0),
        "batch": batch,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "window": NO_WINDOW if window is None else window,
        "spread": sms,
        "stats_start": 2 * programs * workspace_m * block_d,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_B": 1 if spans is None else triton.next_power_of_2(batch),
        "WORKSPACE_M": workspace_m,
        "BLOCK_N": config.BLOCK_N,
        "BLOCK_D": block_d,
        "MIN_TILES": config.MIN_TILES,
        "HAS_SPANS": spans is not None,
        "IS_CAUSAL": causal,
        "HAS_SINK_LOGITS": sink_logits is not None,
        "WRITE_LSE": return_lse,
        "SINKS": sinks,
        "EARLY": overlap["EARLY"],
    }
    merge = launch.Launch(
        lean_merge_kernel,
        (triton.cdiv(q_len * group, rows_each), kv_heads, batch),
        **both | overlap,
        programs=programs,
        ROWS=rows_each,
        CHUNK=chunk,
        num_warps=merge_warps,
    )
    launches = launch.Launch(
        lean_kernel,
        (programs,),
        merge,
        **checks.strides(q, k, v, spans) | both,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        BLOCK_M=config.BLOCK_M,
        HAS_SOFTCAP=softcap is not None,
        IEEE=q.dtype == torch.float32,
        **turning(inv_freq, interleaved, q_len),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return Plan(launches, 2 * programs * workspace_m * (block_d + 2))
