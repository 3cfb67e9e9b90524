"""LeanAttention: decode attention as stream-K, over equal shares of all K/V tiles.

The K/V tiles of all (batch row, KV head) pairs stand in one line, and the line is cut into equal shares, one per program:
every program does the same work whatever the lengths of the rows. The schedule is computed inside the kernels from
the device's own lengths, so it stays right when they change under a captured CUDA graph.

Rows of the output that several programs share are merged by a second launch, a program for each, always in the same order:
results are bitwise repeatable, nobody waits for anybody and there is no state between launches. The paper merges inside the one
kernel, in a block that waits for its peers. Merging there, by whoever arrives last, was slower here at every size: a fence, an
atomic and one program's loads in place of a launch that all multiprocessors share, and that on Hopper is set up meanwhile.

Source: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers"
(2024), sections 4.1 to 4.3. Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import checks, launch
from .overlap import early, wait_for_inputs
from .softmax import (
    attend,
    block_bounds,
    load_spans,
    merge_row,
    packed_rows,
    row_bounds,
    sink_stop,
    store_packed,
    store_partial,
)
from .spans import NO_WINDOW

SHORT = 24  # tiles of a share


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
    MERGE: tl.constexpr,
):  # fmt: skip
    """Who has which tiles: (tiles_b, line_b, lines, line_tiles, crew, share, extra).

    tiles_b, line_b [BLOCK_B]: tiles of one KV head and of all KV heads of each row; without spans rows are alike and these are
    numbers. There are `lines` lines of `line_tiles` tiles, each dealt to a crew of `crew` programs: `share` tiles to every member
    and one more to each of the first `extra`. Without MERGE every head is one program's own.
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
    # worth it where few programs are left over for it, or where a share is so short that beginning a second head costs more.
    heads = batch * kv_heads
    if not MERGE:
        programs = heads
    in_crews = programs // heads * heads
    own = alike & (in_crews > 0) & ((in_crews * 16 >= programs * 15) | (total <= programs * SHORT))
    lines = tl.where(own, heads, 1)
    line_tiles = total // lines
    crew = programs // lines
    longest = (line_tiles + crew - 1) // crew
    crew = (line_tiles + longest - 1) // longest  # whoever does not shorten the longest share only adds to the merge
    share = line_tiles // crew  # this form stays in 32 bits, where dividing is cheap
    return tiles_b, line_b, lines, line_tiles, crew, share, line_tiles - share * crew


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread"])
def lean_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Acc,
    Stats,
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
    MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the rows that one program has whole; of the others partials, two slots a program."""
    if HAS_SPANS:
        wait_for_inputs(EARLY, MERGE)
    pid = tl.program_id(0)
    _, line_b, lines, line_tiles, crew, share, extra = _schedule(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, tl.num_programs(0), spread,
        BLOCK_B, BLOCK_N, MIN_TILES, SHORT, HAS_SPANS, IS_CAUSAL, SINKS, MERGE,
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
        if not HAS_SPANS:
            wait_for_inputs(EARLY, MERGE)
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
            store_partial(acc, m, l, Acc, Stats, slot, rows, offs_d, q_len * GROUP, WORKSPACE_M, BLOCK_D)
        t += tile_stop - tile_start


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "spread", "programs"])
def lean_merge_kernel(
    Out,
    Lse,
    Acc,
    Stats,
    Spans,
    SinkLogits,
    stride_sb,
    batch,
    kv_heads,
    q_len,
    kv_len,
    window,
    spread,
    programs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per packed row: merges its partials, in order, where several programs have a part of it."""
    packed_row, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The spans may be read ahead of the wait: they are older than lean_kernel, which waited.
    tiles_b, line_b, _, line_tiles, crew, share, extra = _schedule(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, programs, spread,
        BLOCK_B, BLOCK_N, MIN_TILES, SHORT, HAS_SPANS, IS_CAUSAL, SINKS, True,
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
    if first == last:
        return
    rows, offs_d, acc, m, l = merge_row(
        Acc, Stats, 2 * first + 1, 2 * (first + 1), 2, last - first + 1, packed_row, WORKSPACE_M, BLOCK_D, CHUNK
    )
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
    """Exact attention of few query rows in two launches; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `launch.MAX_DECODE_ROWS`.
    """
    start, merge, acc_size, stats_size = _prepare(
        (q, k, v, spans, sink_logits, q_sinks), scale, causal, window, softcap, sinks, return_lse
    )
    out, lse = checks.empty_outputs(q, return_lse)
    acc = torch.empty(acc_size, device=q.device, dtype=torch.float32)
    stats = torch.empty(stats_size, device=q.device, dtype=torch.float32)
    spans = q if spans is None else spans
    q_sinks = None if not sinks else q if q_sinks is None else q_sinks
    sink_logits = q if sink_logits is None else sink_logits
    start(q, k, v, out, lse, acc, stats, spans, q_sinks, sink_logits)
    if merge is not None:
        merge(out, lse, acc, stats, spans, sink_logits)
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, return_lse) -> tuple[launch.Launch, launch.Launch | None, int, int]:
    """The launches for these arguments, once they are checked, and the floats of workspace between them.

    The second is None where no lengths could make programs share a row: with a program for each KV head and rows alike.
    """
    q, k, v, spans, sink_logits, q_sinks = tensors
    scale = checks.check(
        q, k, v, spans, decode=True,
        scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, q_sinks=q_sinks,
    )  # fmt: skip
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group, heads = num_heads // kv_heads, batch * kv_heads
    config = launch.decode(q.device, q.dtype, head_dim, q_len * group, heads, kv_len)
    workspace_m, block_d = triton.next_power_of_2(q_len * group), launch.block_d(head_dim)
    most = launch.num_sms(q.device) * config.programs_per_sm
    programs = min(most, heads * triton.cdiv(kv_len, config.BLOCK_N))
    chunk, merge_warps = launch.merge(block_d, most // heads + 2)
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    alone = spans is None and programs // heads == 1 and 16 * heads >= 15 * programs
    both = {
        "stride_sb": 0 if spans is None else spans.stride(0),
        "batch": batch,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "window": NO_WINDOW if window is None else window,
        "spread": launch.num_sms(q.device),
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
        **early(q.device),
    }
    start = launch.Launch(
        lean_kernel,
        (programs,),
        **checks.strides(q, k, v, spans) | both,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        BLOCK_M=config.BLOCK_M,
        HAS_SOFTCAP=softcap is not None,
        IEEE=q.dtype == torch.float32,
        MERGE=not alone,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge = launch.Launch(
        lean_merge_kernel, (q_len * group, kv_heads, batch), **both, programs=programs, CHUNK=chunk, num_warps=merge_warps
    )
    slots = 2 * programs * workspace_m
    return start, None if alone else merge, slots * block_d, slots * 2
