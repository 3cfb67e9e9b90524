"""Flash-Decoding: the keys of each (batch row, KV head) are divided into a fixed number of splits, whose results are combined.

    out = softmax(scale q K^T) V, and lse

One launch for one split, else two. The splits divide the live range of a row, which is read on the device; the longest row of
a ragged batch determines the time. Blocks of the packed rows of a KV head count as KV heads with the same K and V, mostly read
from L2.

Rounds: P to V's dtype, and the result; sums, partials and lse are fp32. Limits: 64 packed rows, more for `lean`; head_dim up
to 576, of V 512; no intervals, no dropout. Oracle: `kernels.reference.attention`.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from .. import checks
from ..device.attend import attend
from ..device.constants import Output
from ..device.merge import merge_rows, store_packed, store_partial
from ..device.tile import aligned_strides, head_of, tiles_in
from ..device.visibility import key_bounds, packed_rows
from ..host import launch, tables
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..spec import KV, Form, Spec
from .plan import Call, Plan
from .schedule import queries_of, visible_keys


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "splits", "stats_start"])
def split_kv_kernel(
    Q,  # (batch, num_heads, q_len, head_dim)
    K,  # (batch, num_kv_heads, kv_len, head_dim), or as FORM stores it
    V,  # (batch, num_kv_heads, kv_len, value_dim), or as FORM stores it
    Scales,  # of FORM, or None
    Centre,  # of FORM, or None
    Pages,  # of FORM, or None
    SinkQuery,  # (batch, num_heads, q_len, head_dim), for sinks; with PAIRS the frequencies, (PAIRS,), fp32; or None
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written with one split
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE and one split
    Workspace,  # (floats,), fp32: `device.merge.store_partial`, written with several splits
    Spans,  # (batch, 1, 1, integers), int32
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_sb, q_len, kv_len,
    window, splits, stats_start, scale_log2, cap_log2,
    C: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per split, block of rows and batch row."""
    split, block = tl.program_id(0), 0
    if tl.num_programs(0) > splits:  # mostly not, and the division delays the first loads
        block = split // splits
        split -= block * splits
    GROUP: tl.constexpr = C.GROUP
    BLOCK_M: tl.constexpr = C.BLOCK_M
    kv_heads = tl.num_programs(1)
    kv_head = tl.program_id(1).to(tl.int64)
    queries = queries_of(block, q_len, C)
    row = tl.program_id(2).to(tl.int64)

    last_position = C.SINKS + window - 1
    span_ptr = Spans + row * stride_sb
    wait_for_inputs(EARLY)
    if splits > 1:
        let_next_begin(EARLY)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_index, group_head, exists = packed_rows(rows, q_len, GROUP)
    bounds, sink_bounds = key_bounds(span_ptr, q_index, queries[0], queries[1], q_len, kv_len, window, C)
    sink_lo, sink_hi, first_position = sink_bounds
    positions = first_position + (tl.zeros([1], tl.int32) if C.ONE_QUERY else q_index)
    tiles = tiles_in(bounds[2], bounds[3], C)

    offs_v = tl.arange(0, C.BLOCK_DV)
    k_strides = aligned_strides(stride_kb, stride_kh, stride_kn, C.ALIGN)
    v_strides = aligned_strides(stride_vb, stride_vh, stride_vn, C.ALIGN)
    indices = (row, kv_head, kv_heads, kv_len)
    k_base, v_base = head_of(K, k_strides, indices, FORM), head_of(V, v_strides, indices, FORM)
    kv = (k_base, v_base, k_strides, v_strides, indices, (Scales, Centre, Pages))
    tile_start, tile_stop = split * tiles // splits, (split + 1) * tiles // splits
    acc, m, l = attend(
        (Q, row * stride_qb + (kv_head * GROUP + group_head) * stride_qh + q_index * stride_qm),
        kv, span_ptr, bounds, (tile_start, tile_stop), (scale_log2, cap_log2),
        (SinkQuery, sink_lo, sink_hi, split == 0, positions, last_position), C, FORM,
    )  # fmt: skip
    if splits > 1:
        partials = ((tl.program_id(2) * kv_heads + tl.program_id(1)) * q_len * GROUP + rows) * splits + split
        store_partial(acc, m, l, Workspace, stats_start, partials, offs_v[None, :], exists, C)
    else:
        store_packed(acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v[None, :], q_len, C)


@triton.jit(do_not_specialize=["q_len", "splits", "stats_start"])
def combine_kernel(
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Workspace,  # (floats,), fp32: `device.merge.store_partial`
    Spans,  # (batch, 1, 1, integers), not read: all merges have it
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    q_len, splits, stats_start,
    C: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for each ROWS packed rows: merges their splits in order."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    kv_head, kv_heads, first_row = tl.program_id(1), tl.num_programs(1), tl.program_id(0) * ROWS
    num_rows = q_len * C.GROUP
    first = ((tl.program_id(2) * kv_heads + kv_head) * num_rows + first_row) * splits
    offs_v, acc, m, l = merge_rows(Workspace, stats_start, first, 1, 1, splits, splits, num_rows - first_row, ROWS, CHUNK, C)
    rows = first_row + tl.arange(0, ROWS)
    store_packed(acc, m, l, Out, Lse, SinkLogits, tl.program_id(2), kv_head, kv_heads, rows, offs_v, q_len, C)


def split_kv(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    return_lse: bool = False,
    splits: int | None = None,
):
    """Exact attention of few query rows in one or two launches; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `tables.MAX_DECODE_ROWS`. splits: the number of splits; None: as many as fill
    the GPU. With a number, the result of a row does not depend on the batch or on the length of the buffer, bit for bit.
    """
    plan = _prepare((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse, splits)
    return plan.run(q, kv, spec, spans, sink_logits, q if inv_freq is None else inv_freq, return_lse)


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, return_lse: bool, splits: int | None) -> Plan:
    call = Call.of(tensors, form, spec, return_lse, decode=True)
    if splits is not None and not (checks.is_count(splits) and splits >= 1):
        raise ValueError(f"splits is the number of parts of the keys: an integer, at least 1, or None; got {splits!r}.")
    # If `splits` is given, the tile size must not depend on the batch.
    heads = call.batch * call.num_kv_heads if splits is None else 1
    keys = visible_keys(call.kv_len, call.q_len, spec) if splits is None else None
    config = tables.fixed(call.q.device, call.dtype, call.width, call.rows, heads, keys, call.page)
    return fixed_splits(call, config, splits)


def fixed_splits(call: Call, config: tables.Config, splits: int | None) -> Plan:
    """The launches of a call. splits: their number; None: as many as fill the GPU."""
    device, blocks = call.q.device, triton.cdiv(call.rows, config.BLOCK_M)
    heads = call.batch * call.num_kv_heads * blocks
    # With a number of splits, bits must not depend on the batch.
    rows = 0 if splits else call.batch * call.num_kv_heads * call.rows
    keys = visible_keys(call.kv_len, call.q_len, call.spec)
    splits = splits or tables.num_splits(device, config, heads, keys, call.block_dv, call.rows)
    merge_form = tables.merge(device, call.block_dv, rows, splits)
    acc_size = call.batch * call.num_heads * call.q_len * splits * call.block_dv if splits > 1 else 0
    common = {"splits": splits, "stats_start": acc_size, **early(device)}
    merge = None
    if splits > 1:
        merge = launch.Launch(
            combine_kernel,
            (triton.cdiv(call.rows, merge_form["ROWS"]), call.num_kv_heads, call.batch),
            **common,
            **merge_form,
            q_len=call.q_len,
            C=Output(**call.output()),
        )
    launches = launch.Launch(
        split_kv_kernel,
        (splits * blocks, call.num_kv_heads, call.batch),
        merge,
        **call.arguments(),
        **common,
        C=replace(call.constants(config, packed=True), FULL_TAIL=True),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **call.registers(config),
    )
    return Plan(launches, acc_size // call.block_dv * (call.block_dv + 2), call.value_dim)
