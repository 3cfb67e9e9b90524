"""LeanAttention: decode attention as stream-K, in which every program computes an equal share of all K/V tiles.

    out = softmax(scale q K^T) V, and lse

The tiles of all (batch row, KV head) pairs are one sequence, of which each program has an equal share, whatever the lengths of
the rows. The kernels compute the schedule from the lengths on the device, so it stays correct under a captured CUDA graph. If
several blocks of queries see the keys of a head, one program for each of up to `schedule.MAX_TEAM` of them has the same tiles
(a team), which come from memory once. A second launch merges rows that several programs share, in a fixed order: no program
waits for another. Where `schedule.choose` finds fixed splits as fast, the kernel of `split_kv` runs.

Rounds: P to V's dtype, and the result; sums, partials and lse are fp32. Limits: head_dim up to 576, of V 512; no intervals, no
dropout. Oracle: `kernels.reference.attention`.

Sources: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers"
(2024), sections 4.1 to 4.3 (it merges inside the one kernel: docs/dev/log.md); Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..decode.rotate import rotate
from ..device.attend import attend
from ..device.constants import Output
from ..device.merge import merge_rows, store_packed, store_partial
from ..device.tile import aligned_strides, begin_of, head_of
from ..device.visibility import key_bounds, packed_rows
from ..host import gpu, launch, tables
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..spec import KV, Form, Spec
from .plan import Call, Plan
from .schedule import assign_tiles, choose, program_of, queries_of, seen_keys, team_size, tiles_of, visible_keys
from .split_kv import fixed_splits

BLOCKS_B = 8, 64, 256  # of a batch with rows of several lengths


@triton.jit(
    do_not_specialize=["stride_sb", "batch", "team", "heads", "kv_heads", "q_len", "kv_len", "window", "num_sms", "stats_start"]
)
def lean_kernel(
    Q,  # (batch, num_heads, q_len, head_dim)
    K,  # (batch, num_kv_heads, kv_len, head_dim), or as FORM stores it
    V,  # (batch, num_kv_heads, kv_len, value_dim), or as FORM stores it
    Scales,  # of FORM, or None
    Centre,  # of FORM, or None
    Pages,  # of FORM, or None
    SinkQuery,  # (batch, num_heads, q_len, head_dim), for sinks; with PAIRS the frequencies, (PAIRS,), fp32; or None
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Workspace,  # (floats,), fp32: `device.merge.store_partial`, written
    Spans,  # (batch, 1, 1, integers), int32
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_sb, batch, team,
    heads, kv_heads, q_len, kv_len, window, num_sms, stats_start, scale_log2, cap_log2,
    BLOCK_B: tl.constexpr, MIN_TILES: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Stores the rows that one program computes alone in Out, and partials of the others in two workspace slots per program."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    pid = tl.program_id(0)
    teams, which, member = tl.num_programs(0), pid, 0
    if not C.FEW_ROWS:
        teams, which, member = teams // team, pid // team, pid % team
    _head_tiles, row_tiles, num_ranges, range_tiles, range_programs, share, extra = assign_tiles(
        Spans, stride_sb, batch, heads, q_len, kv_len, window, teams, num_sms, C.TILE_ALIGN, BLOCK_B, MIN_TILES, C
    )
    if which >= range_programs * num_ranges:
        return
    range_index = which // range_programs
    index = which - range_index * range_programs
    t = range_index * range_tiles + index * share + tl.minimum(index, extra)
    t_stop = t + share + tl.where(index < extra, 1, 0)

    GROUP: tl.constexpr = C.GROUP
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    offs_v = tl.arange(0, C.BLOCK_DV)[None, :]
    k_strides = aligned_strides(stride_kb, stride_kh, stride_kn, C.ALIGN)
    v_strides = aligned_strides(stride_vb, stride_vh, stride_vn, C.ALIGN)

    while t < t_stop:
        # Tile t: its row, its KV head, and its index in the head.
        if BLOCK_B > 1:
            offs_b = tl.arange(0, BLOCK_B)
            b = tl.sum((tl.cumsum(row_tiles, 0) <= t).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_b < b, row_tiles, 0), 0)
        else:
            b = t // row_tiles
            before = b * row_tiles
        row = b.to(tl.int64)
        span_ptr = Spans + row * stride_sb
        block, first, last = 0, 0, q_len - 1
        if not C.FEW_ROWS:
            lo, hi = seen_keys(span_ptr, 0, q_len - 1, q_len, kv_len, window, C)  # by any block
            head = (t - before) // tiles_of(lo, hi, C.TILE_ALIGN, C)
            block = head % (heads // kv_heads) * team + member
            first, last = queries_of(block, q_len, C)
        local = tl.arange(0, BLOCK_M)
        rows = block * BLOCK_M + local
        q_index, group_head, exists = packed_rows(rows, q_len, GROUP)
        bounds, sink_bounds = key_bounds(span_ptr, q_index, first, last, q_len, kv_len, window, C)
        sink_lo, sink_hi, first_position = sink_bounds
        positions = first_position + (tl.zeros([1], tl.int32) if C.ONE_QUERY else q_index)
        if C.FEW_ROWS:
            lo, hi = bounds[2], bounds[3]
        head_tiles = tiles_of(lo, hi, C.TILE_ALIGN, C)
        kv_head = (t - before) // head_tiles
        tile_start = (t - before) % head_tiles
        tile_stop = tl.minimum(head_tiles, tile_start + t_stop - t)
        start, stop = tile_start, tile_stop
        if not C.FEW_ROWS:  # only tiles with keys that this block sees
            kv_head //= heads // kv_heads
            begin = begin_of(lo, C.TILE_ALIGN)
            start = tl.minimum(tl.maximum(start, (bounds[2] - begin) // BLOCK_N), stop)
            stop = tl.maximum(tl.minimum(stop, (bounds[3] - begin + BLOCK_N - 1) // BLOCK_N), start)
            stop = tl.where(bounds[2] < bounds[3], stop, start)  # none past the last block, or of padding
        kv_head_64 = kv_head.to(tl.int64)
        indices = (row, kv_head_64, kv_heads, kv_len)
        k_base, v_base = head_of(K, k_strides, indices, FORM), head_of(V, v_strides, indices, FORM)
        kv = (k_base, v_base, k_strides, v_strides, indices, (Scales, Centre, Pages))
        acc, m, l = attend(
            (Q, row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm),
            kv, span_ptr, (bounds[0], bounds[1], lo, hi, bounds[4], bounds[5], bounds[6]), (start, stop), (scale_log2, cap_log2),
            (SinkQuery, sink_lo, sink_hi, tile_start == 0, positions, C.SINKS + window - 1), C, FORM,
        )  # fmt: skip
        if tile_stop - tile_start == head_tiles:
            store_packed(acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v, q_len, C)
        else:
            # At most two heads of a program are shared: one that an earlier program began, and one that later programs continue.
            slot = 2 * pid + tl.where(tile_start == 0, 1, 0)
            store_partial(acc, m, l, Workspace, stats_start, slot * BLOCK_M + local, offs_v, exists, C)
        t += tile_stop - tile_start


@triton.jit(
    do_not_specialize=[
        "stride_sb", "batch", "team", "heads", "kv_heads", "q_len", "kv_len", "window", "num_sms", "stats_start", "programs",
        "log_m", "tile_align",
    ]
)  # fmt: skip
def lean_merge_kernel(
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Workspace,  # (floats,), fp32: `device.merge.store_partial`
    Spans,  # (batch, 1, 1, integers), int32
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    stride_sb, batch, team, heads, kv_heads, q_len, kv_len, window, num_sms, stats_start, programs, log_m,
    tile_align,
    BLOCK_B: tl.constexpr, MIN_TILES: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program for each ROWS packed rows: merges their partials in order, if several programs computed them.

    log_m: log2 of the rows in a block of lean_kernel. tile_align: TILE_ALIGN of its constants, which as one here would make
    variants."""
    first_row, kv_head, row = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    num_rows, block, in_block = q_len * C.GROUP, first_row >> log_m, first_row & ((1 << log_m) - 1)
    teams, head, member = programs // team, kv_head * (heads // kv_heads) + block // team, block % team
    # The spans may be read before the wait: every program of lean_kernel has waited for what wrote them.
    head_tiles, row_tiles, _, range_tiles, range_programs, share, extra = assign_tiles(
        Spans, stride_sb, batch, heads, q_len, kv_len, window, teams, num_sms, tile_align, BLOCK_B, MIN_TILES, C
    )
    if BLOCK_B > 1:
        offs_b = tl.arange(0, BLOCK_B)
        before = tl.sum(tl.where(offs_b < row, row_tiles, 0), 0)
        head_tiles = tl.sum(tl.where(offs_b == row, head_tiles, 0), 0)
    else:
        before = row * row_tiles
    start = before + head * head_tiles
    range_index = start // range_tiles
    start -= range_index * range_tiles
    first = range_index * range_programs + program_of(start, share, extra)
    last = range_index * range_programs + program_of(start + head_tiles - 1, share, extra)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    if first == last:
        return
    begin = ((2 * (first * team + member) + 1) << log_m) + in_block
    offs_v, acc, m, l = merge_rows(
        Workspace, stats_start, begin, (2 * team - 1) << log_m, (2 * team) << log_m, 1, last - first + 1,
        num_rows - first_row, ROWS, CHUNK, C,
    )  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    store_packed(acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v, q_len, C)


def lean(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Exact attention in one launch or two; arguments, result and errors as in `kernels.reference.attention`."""
    many_rows = q.shape[2] * q.shape[1] > tables.MAX_DECODE_ROWS * kv.k.shape[1]
    if many_rows and (q.shape[2] * q.stride(2) >= 1 << 31 or (inv_freq is not None and 0 in q.stride())):
        # Offsets of queries have 32 bits. Expanded queries share memory, and their re-rotated copies differ.
        q = q.contiguous()
    plan = _prepare((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse)
    sink_query = q if inv_freq is None else inv_freq
    if many_rows and inv_freq is not None:
        sink_query = rotate(
            q, kv.sizes.kv_len, spans, inv_freq, window=spec.window, sinks=spec.sinks, interleaved=spec.interleaved
        )  # fmt: skip
    return plan.run(q, kv, spec, spans, sink_logits, sink_query, return_lse)


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, return_lse: bool) -> Plan:
    call = Call.of(tensors, form, spec, return_lse)
    keys, heads = visible_keys(call.kv_len, call.q_len, spec), call.batch * call.num_kv_heads
    shape = (call.width, call.rows, heads, keys, call.uniform, spec.sinks > 0, call.page)
    config, fixed = choose(call.q.device, call.dtype, *shape)
    return fixed_splits(call, config, None) if fixed else stream_k(call, config)


def stream_k(call: Call, config: tables.Config) -> Plan:
    """The stream-K launches of a call."""
    device, kv_len = call.q.device, call.kv_len
    blocks = triton.cdiv(max(call.rows, 1), config.BLOCK_M)
    sms = gpu.num_sms(device)
    max_programs = sms * config.programs_per_sm
    team, _ = team_size(blocks, config.BLOCK_M, max_programs)
    groups = triton.cdiv(blocks, team)
    heads = call.batch * call.num_kv_heads * groups
    teams = min(max_programs // team, heads * triton.cdiv(kv_len, config.BLOCK_N))
    programs = teams * team
    few, places = blocks == 1, 2 * programs * config.BLOCK_M
    partials = min(max_programs // team // heads + 2, triton.cdiv(kv_len, config.BLOCK_N))
    merge_form = tables.merge(device, call.block_dv, call.rows * call.batch * call.num_kv_heads, partials)
    arguments = call.arguments()
    schedule = {
        **{name: arguments[name] for name in ("stride_sb", "q_len", "kv_len", "window")},
        "batch": call.batch,
        "team": team,
        "heads": call.num_kv_heads * groups,
        "kv_heads": call.num_kv_heads,
        "num_sms": max(1, sms // team),
        "stats_start": places * call.block_dv,
        "BLOCK_B": 1 if call.uniform else next((b for b in BLOCKS_B if b >= call.batch), triton.next_power_of_2(call.batch)),
        "MIN_TILES": config.MIN_TILES,
        **early(device),
    }
    merge = launch.Launch(
        lean_merge_kernel,
        (triton.cdiv(call.rows, merge_form["ROWS"]), call.num_kv_heads, call.batch),
        **schedule,
        **merge_form,
        programs=programs,
        log_m=config.BLOCK_M.bit_length() - 1,
        tile_align=call.tile_align(config.BLOCK_N),
        C=Output(**call.output(config.BLOCK_N)),
    )
    launches = launch.Launch(
        lean_kernel,
        (programs,),
        merge,
        **arguments | schedule,
        C=replace(call.constants(config, packed=True), FEW_ROWS=few, FULL_TAIL=few),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return Plan(launches, places * (call.block_dv + 2), call.value_dim)
