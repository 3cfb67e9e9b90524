"""LeanAttention: decode attention as stream-K, over equal shares of all K/V tiles.

The K/V tiles of all (batch row, KV head) pairs form one line, and the line is cut into equal shares, one per program: every
program does the same work whatever the lengths of the rows. The kernels compute the schedule from lengths on the device, so it
stays right when they change under a captured CUDA graph. Where the host knows that fixed splits of each head do as well (see
`schedule.choose`), Flash-Decoding's kernel runs, which computes no schedule.

Rows of the output that several programs share are merged by a second launch, always in the same order: results are bitwise
repeatable, no program waits for another, and there is no state between launches. The paper merges inside the one kernel;
docs/dev/log.md says why this one does not.

Source: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers"
(2024), sections 4.1 to 4.3. Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..decode.rotate import rotate
from ..device.attend import attend
from ..device.merge import merge_rows, store_packed, store_partial
from ..device.visibility import look, packed_rows
from ..host import gpu, launch, tables
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..spec import KV, Form, Spec
from .plan import Call, Plan
from .schedule import choose, deal, owner, queries_of
from .split_kv import fixed_splits


@triton.jit(do_not_specialize=["stride_sb", "batch", "blocks", "kv_heads", "q_len", "kv_len", "window", "spread", "stats_start"])
def lean_kernel(
    Q,
    K,
    V,
    Scales,
    Centre,
    Pages,
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
    blocks,
    kv_heads,
    q_len,
    kv_len,
    window,
    spread,
    stats_start,
    scale_log2,
    cap_log2,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    C: tl.constexpr,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the rows that one program has whole; of the others partials, two slots a program."""
    let_next_begin(EARLY)  # this kernel itself is not launched early: two of its programs could share a multiprocessor
    pid = tl.program_id(0)
    _tiles_b, line_b, lines, line_tiles, crew, share, extra = deal(
        Spans, stride_sb, batch, blocks, kv_heads, q_len, kv_len, window, tl.num_programs(0), spread, BLOCK_B, MIN_TILES, C
    )
    if pid >= crew * lines:
        return
    line = pid // crew
    member = pid - line * crew
    t = line * line_tiles + member * share + tl.minimum(member, extra)
    t_stop = t + share + tl.where(member < extra, 1, 0)

    GROUP: tl.constexpr = C.GROUP
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    offs_v = tl.arange(0, C.BLOCK_DV)[None, :]

    while t < t_stop:
        # Which item, which KV head, which of its tiles.
        if BLOCK_B > 1:
            offs_b = tl.arange(0, BLOCK_B)
            b = tl.sum((tl.cumsum(line_b, 0) <= t).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_b < b, line_b, 0), 0)
        else:
            b = t // line_b
            before = b * line_b
        block = 0 if C.FEW_ROWS else b % blocks
        row = (b if C.FEW_ROWS else b // blocks).to(tl.int64)
        local = tl.arange(0, BLOCK_M)
        rows = block * BLOCK_M + local
        q_index, group_head, _exists = packed_rows(rows, q_len, GROUP)
        span_ptr = Spans + row * stride_sb
        first, last = 0, q_len - 1
        if not C.FEW_ROWS:
            first, last = queries_of(block, q_len, C)
        sight, sink_sight = look(span_ptr, q_index, first, last, q_len, kv_len, window, C)
        sink_lo, sink_hi, place = sink_sight
        places = place + (tl.zeros([1], tl.int32) if C.ONE_QUERY else q_index)
        row_tiles = tl.maximum((sight[3] - sight[2] + BLOCK_N - 1) // BLOCK_N, 1)
        kv_head = (t - before) // row_tiles
        tile_start = (t - before) % row_tiles
        tile_stop = tl.minimum(row_tiles, tile_start + t_stop - t)
        kv_head_64 = kv_head.to(tl.int64)
        k_base = K + row * stride_kb + kv_head_64 * stride_kh
        v_base = V + row * stride_vb + kv_head_64 * stride_vh
        kv = (k_base, v_base, stride_kn, stride_vn, (row, kv_head_64, kv_heads, kv_len), (Scales, Centre, Pages))
        acc, m, l = attend(
            (Q, row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm),
            kv, span_ptr, sight, (tile_start, tile_stop), (scale_log2, cap_log2),
            (SinkQuery, sink_lo, sink_hi, tile_start == 0, places, C.SINKS + window - 1), C, LOAD_K, LOAD_V,
        )  # fmt: skip
        if tile_stop - tile_start == row_tiles:
            store_packed(acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v, q_len, C)
        else:
            # A program shares at most two: the one that an earlier program began, and the one that it leaves to later ones.
            slot = 2 * pid + tl.where(tile_start == 0, 1, 0)
            store_partial(acc, m, l, Workspace, stats_start, slot, local, offs_v, q_len * GROUP - block * BLOCK_M, C)
        t += tile_stop - tile_start


@triton.jit(
    do_not_specialize=[
        "stride_sb", "batch", "blocks", "kv_heads", "q_len", "kv_len", "window", "spread", "stats_start", "programs",
    ]
)  # fmt: skip
def lean_merge_kernel(
    Out,
    Lse,
    Workspace,
    Spans,
    SinkLogits,
    stride_sb,
    batch,
    blocks,
    kv_heads,
    q_len,
    kv_len,
    window,
    spread,
    stats_start,
    programs,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program for each ROWS packed rows: merges their partials, in order, where several programs have a part of them."""
    first_row, kv_head, row = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    BLOCK_M: tl.constexpr = C.BLOCK_M
    block = 0 if C.FEW_ROWS else first_row // BLOCK_M
    b = row * blocks + block
    # The spans may be read ahead of the wait: they are older than lean_kernel, which did not begin early.
    tiles_b, line_b, _, line_tiles, crew, share, extra = deal(
        Spans, stride_sb, batch, blocks, kv_heads, q_len, kv_len, window, programs, spread, BLOCK_B, MIN_TILES, C
    )
    if BLOCK_B > 1:
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
    rows, offs_v, acc, m, l = merge_rows(
        Workspace, stats_start, 2 * first + 1, 2 * (first + 1), 2, last - first + 1,
        first_row - block * BLOCK_M, q_len * C.GROUP - block * BLOCK_M, ROWS, CHUNK, C,
    )  # fmt: skip
    rows += block * BLOCK_M
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
    if many_rows and inv_freq is not None and 0 in q.stride():
        q = q.contiguous()  # queries in one place may be re-rotated to several
    plan = _prepare((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse)
    sink_query = q if inv_freq is None else inv_freq
    if many_rows and inv_freq is not None:
        sink_query = rotate(
            q, kv.k.shape[2], spans, inv_freq, window=spec.window, sinks=spec.sinks, interleaved=spec.interleaved
        )  # fmt: skip
    return plan.run(q, kv, spec, spans, sink_logits, sink_query, return_lse)


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, return_lse: bool) -> Plan:
    call = Call.of(tensors, form, spec, return_lse)
    if call.many_rows:
        return shares(call, tables.many_rows(call.q.device, call.q.dtype, call.width, call.rows, call.spec.sinks > 0))
    in_sight = call.kv_len if spec.window is None else min(call.kv_len, spec.window + call.q_len - 1)
    heads = call.batch * call.num_kv_heads
    config, own = choose(call.q.device, call.q.dtype, call.width, call.rows, heads, in_sight, call.alike)
    return fixed_splits(call, config, None) if own else shares(call, config)


def shares(call: Call, config: tables.Config) -> Plan:
    """The launches of a call as stream-K."""
    device, kv_len = call.q.device, call.kv_len
    blocks = triton.cdiv(max(call.rows, 1), config.BLOCK_M)
    items = call.batch * blocks
    heads = items * call.num_kv_heads
    sms = gpu.num_sms(device)
    most = sms * config.programs_per_sm
    programs = min(most, heads * triton.cdiv(kv_len, config.BLOCK_N))
    constants = call.constants(config, packed=True)
    workspace_m = constants.WORKSPACE_M
    if blocks > 1:  # merges enough to fill the GPU a few times
        rows_each = min(16, 1 << (call.rows * call.batch * call.num_kv_heads // (8 * sms)).bit_length())
    else:  # many heads have few partials each, and all their rows make one merge
        rows_each = tables.merge_rows(workspace_m, call.block_dv) if heads > programs else 1
    chunk, merge_warps = tables.merge(rows_each * call.block_dv, most // heads + 2)
    overlap, arguments = early(device), call.arguments()
    schedule = {
        **{name: arguments[name] for name in ("stride_sb", "q_len", "kv_len", "window")},
        "batch": call.batch,
        "blocks": blocks,
        "kv_heads": call.num_kv_heads,
        "spread": sms,
        "stats_start": 2 * programs * workspace_m * call.block_dv,
        "BLOCK_B": 1 if call.alike and blocks == 1 else triton.next_power_of_2(items),
        "MIN_TILES": config.MIN_TILES,
        "C": constants,
        "EARLY": overlap["EARLY"],
    }
    merge = launch.Launch(
        lean_merge_kernel,
        (triton.cdiv(call.rows, rows_each), call.num_kv_heads, call.batch),
        **schedule | overlap,
        programs=programs,
        ROWS=rows_each,
        CHUNK=chunk,
        num_warps=merge_warps,
    )
    launches = launch.Launch(
        lean_kernel, (programs,), merge, **arguments | schedule, num_warps=config.num_warps, num_stages=config.num_stages
    )
    return Plan(launches, 2 * programs * workspace_m * (call.block_dv + 2))
