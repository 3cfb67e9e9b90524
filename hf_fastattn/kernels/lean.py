"""LeanAttention: decode attention as one stream-K launch over equal K/V tiles.

The K/V tiles of all (batch row, KV head) pairs stand in one line, and the line is cut into equal shares, one per program:
every program does the same work whatever the lengths of the rows. The schedule is computed inside the kernel from
the device's own lengths, so it stays right when they change under a captured CUDA graph.

An output tile that several programs share is merged by whoever arrives last, always in the same order, so results are
bitwise repeatable. Nobody waits for anybody: no grid can deadlock. A tile with many contributors is merged in two levels,
groups of FAN_IN in parallel and then the groups. Counters return to 0 by themselves; launches on one stream share them.

Source: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers"
(2024), sections 4.1 to 4.3; the last-arriver fix-up replaces its waiting host block. Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import checks, launch
from .softmax import (
    attend,
    block_bounds,
    flat_rows,
    load_spans,
    merge_partials,
    packed_rows,
    row_bounds,
    sink_stop,
    store_packed,
    store_partial,
)
from .spans import NO_WINDOW

FAN_IN = 8  # contributors that one program merges; with more, the merge is in two levels


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
def _arrive(counter, size):
    """Publish this program's stores and count it in; True for the last of `size`, which also resets the counter."""
    # Without the barrier, thread 0 may release before the other threads have stored (Triton 3.6 adds none itself).
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == size - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread"])
def lean_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Spans,
    QSinks,
    SinkLogits,
    Workspace,
    Counters,
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
    FAN_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    IEEE: tl.constexpr,
    SINKS: tl.constexpr,
):
    pid = tl.program_id(0)
    Acc = Workspace  # two slots a program
    Stats = Acc + 2 * tl.num_programs(0) * WORKSPACE_M * BLOCK_D

    # The line of tiles. With spans, ends[b] is where row b's tiles (of all its KV heads) end; without, rows are alike.
    if HAS_SPANS:
        offs_b = tl.arange(0, BLOCK_B)
        span_ptrs = Spans + tl.minimum(offs_b, batch - 1).to(tl.int64) * stride_sb
        tiles_b = _row_tiles(span_ptrs, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL, BLOCK_N, SINKS)
        line_b = tl.where(offs_b < batch, tiles_b * kv_heads, 0)
        ends = tl.cumsum(line_b, 0)
        total = tl.sum(line_b, 0)
        alike = tl.max(line_b, 0) * batch == total
    else:
        tiles_b = _row_tiles(Spans, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL, BLOCK_N, SINKS)
        total = batch * kv_heads * tiles_b
        alike = tl.full([], True, tl.int1)

    # Fewer programs than launched when there is little work, so that a share is worth its merge.
    programs = tl.minimum(tl.num_programs(0), tl.maximum(total // MIN_TILES, tl.minimum(total, spread)))
    # Rows that are alike need no line: each head gets a crew of its own, and no share goes on to a second head.
    heads = batch * kv_heads
    lines = tl.where(alike & (programs >= heads), heads, 1)
    line_tiles = total // lines
    crew = programs // lines
    longest = (line_tiles + crew - 1) // crew
    crew = (line_tiles + longest - 1) // longest  # whoever does not shorten the longest share only adds to the merge
    if pid >= crew * lines:
        return
    # The first `extra` of a crew take one tile more than `share`; this form stays in 32 bits, where dividing is cheap.
    line = pid // crew
    share = line_tiles // crew
    extra = line_tiles - share * crew
    member = pid - line * crew
    t = line * line_tiles + member * share + tl.minimum(member, extra)
    t_stop = t + share + tl.where(member < extra, 1, 0)

    rows = tl.arange(0, BLOCK_M)
    num_rows = q_len * GROUP
    q_index, group_head, row_mask = packed_rows(rows, q_len, GROUP)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d[None, :] < HEAD_DIM

    while t < t_stop:
        # Which row, which KV head, which of its tiles.
        if HAS_SPANS:
            b = tl.sum((ends <= t).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_b < b, line_b, 0), 0)
        else:
            b = t // (kv_heads * tiles_b)
            before = b * kv_heads * tiles_b
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
        q_ptrs = Q + row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm
        q = tl.load(q_ptrs[:, None] + offs_d[None, :], mask=row_mask[:, None] & d_mask, other=0.0)
        acc, m, l = attend(
            q,
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
            row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm,
            sink_lo,
            sink_hi,
            tile_start == 0,
            SINKS,
        )

        if tile_stop - tile_start == row_tiles:
            store_packed(
                acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_d[None, :], q_len,
                GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
            )  # fmt: skip
        else:
            # Programs c_first..c_last contribute, in groups of `fan_in` (one group where they are not many).
            head_start = t - tile_start - line * line_tiles
            c_first = line * crew + _owner(head_start, share, extra)
            c_last = line * crew + _owner(head_start + row_tiles - 1, share, extra)
            contributors = c_last - c_first + 1
            fan_in = tl.where(contributors <= 2 * FAN_IN, contributors, FAN_IN)
            group = (pid - c_first) // fan_in
            group_first = c_first + group * fan_in
            group_size = tl.minimum(c_last - group_first + 1, fan_in)
            # A program has at most two shared tiles: slot 2c for the one begun earlier, 2c + 1 for the one it begins.
            slot_first = 2 * c_first + 1
            group_slot = tl.where(group == 0, slot_first, 2 * group_first)
            slot = tl.where(pid == c_first, slot_first, 2 * pid)
            store_partial(acc, m, l, Acc, Stats, slot, rows, offs_d[None, :], num_rows, WORKSPACE_M, BLOCK_D)
            done = _arrive(Counters + group_slot, group_size)
            if done:
                flat, flat_d = flat_rows(0, WORKSPACE_M, BLOCK_D)
                merged, m_1, l_1 = merge_partials(
                    Acc, Stats, group_slot, 2 * group_first + 2, 2, group_size, flat, flat_d, num_rows,
                    WORKSPACE_M, BLOCK_D, CHUNK,
                )  # fmt: skip
                if contributors > fan_in:
                    # The group's first slot has been read by its only reader, and takes the group's sum.
                    tl.debug_barrier()
                    store_partial(merged, m_1, l_1, Acc, Stats, group_slot, flat, flat_d, num_rows, WORKSPACE_M, BLOCK_D)
                    groups = (contributors + fan_in - 1) // fan_in
                    done = _arrive(Counters + 2 * tl.num_programs(0) + slot_first, groups)
                    if done:
                        merged, m_1, l_1 = merge_partials(
                            Acc, Stats, slot_first, 2 * (c_first + fan_in), 2 * fan_in, groups, flat, flat_d, num_rows,
                            WORKSPACE_M, BLOCK_D, CHUNK,
                        )  # fmt: skip
                if done:
                    store_packed(
                        merged, m_1, l_1, Out, Lse, SinkLogits, row, kv_head, kv_heads, flat, flat_d, q_len,
                        GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
                    )  # fmt: skip
        t += tile_stop - tile_start


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
    """Exact attention of few query rows in one launch; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `launch.MAX_DECODE_ROWS`.
    """
    start, workspace_size = _prepare((q, k, v, spans, sink_logits, q_sinks), scale, causal, window, softcap, sinks, return_lse)
    out, lse = checks.empty_outputs(q, return_lse)
    start(
        q,
        k,
        v,
        out,
        lse,
        q if spans is None else spans,
        None if not sinks else q if q_sinks is None else q_sinks,
        q if sink_logits is None else sink_logits,
        torch.empty(workspace_size, device=q.device, dtype=torch.float32),
        launch.counters(q.device),
    )
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, return_lse) -> tuple[launch.Launch, int]:
    """The launch for these arguments, once they are checked, and the floats of workspace it needs."""
    q, k, v, spans, sink_logits, q_sinks = tensors
    scale = checks.check(
        q, k, v, spans, decode=True,
        scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, q_sinks=q_sinks,
    )  # fmt: skip
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = num_heads // kv_heads
    config = launch.decode(q.device, q.dtype, head_dim, q_len * group, batch * kv_heads)
    workspace_m, block_d = triton.next_power_of_2(q_len * group), launch.block_d(head_dim)
    sms = launch.num_sms(q.device)
    programs = min(sms * config.programs_per_sm, batch * kv_heads * triton.cdiv(kv_len, config.BLOCK_N))
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    start = launch.Launch(
        lean_kernel,
        (programs,),
        **checks.strides(q, k, v, spans),
        batch=batch,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        window=NO_WINDOW if window is None else window,
        spread=sms,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_B=triton.next_power_of_2(batch),
        WORKSPACE_M=workspace_m,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_D=block_d,
        MIN_TILES=config.MIN_TILES,
        FAN_IN=FAN_IN,
        CHUNK=launch.merge_chunk(workspace_m, block_d, config.num_warps),
        HAS_SPANS=spans is not None,
        IS_CAUSAL=causal,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINK_LOGITS=sink_logits is not None,
        WRITE_LSE=return_lse,
        IEEE=q.dtype == torch.float32,
        SINKS=sinks,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return start, 2 * programs * workspace_m * (block_d + 2)
