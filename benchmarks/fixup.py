"""Variants of LeanAttention's fix-up: which program merges the partial results of a head that several programs share.

host_waits      that of the paper: the program that begins the head waits for the others, in one launch
last_arriver    the program that finishes last merges, in one launch
stream_k        a second launch merges: `lean` of the package, also where it would use fixed splits

The schedule, the loop over tiles and the merge are device code of the package, and partials are always merged in the order of
their keys, so the results of each variant are bitwise repeatable. The flags with which the programs of a launch wait for one
another are reset to 0 at its end, so that it can be replayed. Launches on a device share them, so they must be on one stream.

Source: Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers" (2024),
algorithm 4. Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_fastattn.kernels import INTERPRETED, reference
from hf_fastattn.kernels.attention.lean import lean_kernel, stream_k
from hf_fastattn.kernels.attention.plan import Call, Plan
from hf_fastattn.kernels.attention.schedule import assign_tiles, program_of, stream_k_config, tiles_of
from hf_fastattn.kernels.device.attend import attend
from hf_fastattn.kernels.device.merge import merge_rows, store_packed, store_partial
from hf_fastattn.kernels.device.tile import head_of
from hf_fastattn.kernels.device.visibility import key_bounds, packed_rows
from hf_fastattn.kernels.host import launch, tables
from hf_fastattn.kernels.host.overlap import early, let_next_begin, wait_for_inputs
from hf_fastattn.kernels.spec import KV, Form, Spec, call

MOST_PROGRAMS = 4096
HOST_WAITS, LAST_ARRIVER, STREAM_K = "host_waits", "last_arriver", "stream_k"


@triton.jit
def wait_for(flags, first, last):
    """Wait until programs first..last have set their flags, and reset the flags."""
    for program in tl.range(first, last + 1):
        while tl.atomic_add(flags + program, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(flags + program, 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["stride_sb", "batch", "kv_heads", "q_len", "kv_len", "window", "num_sms", "stats_start"])
def fixup_kernel(
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
    Flags,
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
    num_sms,
    stats_start,
    scale_log2,
    cap_log2,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
    HOST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`lean_kernel` for few rows, with the merge. HOST: the program that begins a head merges; otherwise the last to finish."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    pid = tl.program_id(0)
    _head_tiles, row_tiles, num_ranges, range_tiles, range_programs, share, extra = assign_tiles(
        Spans, stride_sb, batch, kv_heads, q_len, kv_len, window, tl.num_programs(0), num_sms, BLOCK_B, MIN_TILES, C
    )
    if pid >= range_programs * num_ranges:
        return
    range_index = pid // range_programs
    index = pid - range_index * range_programs
    t = range_index * range_tiles + index * share + tl.minimum(index, extra)
    t_stop = t + share + tl.where(index < extra, 1, 0)

    GROUP: tl.constexpr = C.GROUP
    offs_v = tl.arange(0, C.BLOCK_DV)[None, :]
    rows = tl.arange(0, C.BLOCK_M)
    q_index, group_head, exists = packed_rows(rows, q_len, GROUP)

    while t < t_stop:
        if BLOCK_B > 1:
            offs_b = tl.arange(0, BLOCK_B)
            b = tl.sum((tl.cumsum(row_tiles, 0) <= t).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_b < b, row_tiles, 0), 0)
        else:
            b = t // row_tiles
            before = b * row_tiles
        row = b.to(tl.int64)
        span_ptr = Spans + row * stride_sb
        bounds, sink_bounds = key_bounds(span_ptr, q_index, 0, q_len - 1, q_len, kv_len, window, C)
        sink_lo, sink_hi, first_position = sink_bounds
        positions = first_position + (tl.zeros([1], tl.int32) if C.ONE_QUERY else q_index)
        head_tiles = tiles_of(bounds[2], bounds[3], C)
        kv_head = (t - before) // head_tiles
        tile_start = (t - before) % head_tiles
        tile_stop = tl.minimum(head_tiles, tile_start + t_stop - t)
        kv_head_64 = kv_head.to(tl.int64)
        k_strides, v_strides = (stride_kb, stride_kh, stride_kn), (stride_vb, stride_vh, stride_vn)
        indices = (row, kv_head_64, kv_heads, kv_len)
        k_base, v_base = head_of(K, k_strides, indices, FORM), head_of(V, v_strides, indices, FORM)
        kv = (k_base, v_base, k_strides, v_strides, indices, (Scales, Centre, Pages))
        acc, m, l = attend(
            (Q, row * stride_qb + (kv_head_64 * GROUP + group_head) * stride_qh + q_index * stride_qm),
            kv, span_ptr, bounds, (tile_start, tile_stop), (scale_log2, cap_log2),
            (SinkQuery, sink_lo, sink_hi, tile_start == 0, positions, C.SINKS + window - 1), C, FORM,
        )  # fmt: skip
        if tile_stop - tile_start == head_tiles:
            store_packed(acc, m, l, Out, Lse, SinkLogits, row, kv_head, kv_heads, rows, offs_v, q_len, C)
        else:
            begins = tile_start == 0
            slot = 2 * pid + tl.where(begins, 1, 0)
            store_partial(acc, m, l, Workspace, stats_start, slot * C.BLOCK_M + rows, offs_v, exists, C)
            start = before + kv_head * head_tiles - range_index * range_tiles
            first = range_index * range_programs + program_of(start, share, extra)
            last = range_index * range_programs + program_of(start + head_tiles - 1, share, extra)
            tl.debug_barrier()  # the whole partial is written before one thread sets the flag
            if HOST:
                merges = begins
                if begins:
                    wait_for(Flags, first + 1, last)
                else:
                    tl.atomic_xchg(Flags + pid, 1, sem="release", scope="gpu")
            else:
                merges = tl.atomic_add(Flags + first, 1, sem="acq_rel", scope="gpu") == last - first
                if merges:
                    tl.store(Flags + first, 0)
            if merges:
                for first_row in tl.range(0, q_len * GROUP, ROWS):
                    columns, acc_m, m_m, l_m = merge_rows(
                        Workspace, stats_start, (2 * first + 1) * C.BLOCK_M + first_row, C.BLOCK_M, 2 * C.BLOCK_M, 1,
                        last - first + 1, q_len * GROUP - first_row, ROWS, CHUNK, C,
                    )  # fmt: skip
                    merged = first_row + tl.arange(0, ROWS)
                    store_packed(acc_m, m_m, l_m, Out, Lse, SinkLogits, row, kv_head, kv_heads, merged, columns, q_len, C)
        t += tile_stop - tile_start


@cache
def flags_of(device: torch.device) -> torch.Tensor:
    """Zeroed int32 flags, one for each program, allocated at the first launch, which must not be inside a capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("The first launch on a device must not be captured: its flags are allocated outside of the graph.")
    flags = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # another stream may be the next to use them
    return flags


class OneLaunch(NamedTuple):
    """A launch of fixup_kernel, called like a `Launch`, with the flags after the tensors of the call."""

    launch: launch.Launch
    flags: torch.Tensor

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        self.launch(*tensors, self.flags)


@launch.remember
def prepare(tensors, form: Form, spec: Spec, return_lse: bool, fixup: str, config: tables.Config | None) -> Plan:
    """The launches of a call with few query rows; config None: that of `lean` with stream-K."""
    asked = Call.of(tensors, form, spec, return_lse, decode=True)
    device, heads = asked.q.device, asked.batch * asked.num_kv_heads
    config = config or stream_k_config(device, asked.q.dtype, asked.width, asked.rows, heads, asked.uniform)
    plan = stream_k(asked, config)
    if fixup == STREAM_K:
        return plan
    (programs, *_) = plan.launches.grid
    if programs > MOST_PROGRAMS:
        raise ValueError(f"There are flags for {MOST_PROGRAMS} programs; the launch has {programs}.")
    named = dict(zip(lean_kernel.arg_names[plan.launches.takes :], plan.launches.rest, strict=True))
    del named["team"], named["heads"], named["EARLY"]
    rows_each = min(config.BLOCK_M, 1 << (asked.rows - 1).bit_length(), 16384 // asked.block_dv)
    most = 8 if programs // heads + 2 <= 8 else 128  # partials of a head; two compiled kernels, not one for each number
    one = launch.Launch(
        fixup_kernel,
        (programs,),
        **named,
        HOST=fixup == HOST_WAITS,
        ROWS=rows_each,
        CHUNK=max(1, min(most, 2048 * config.num_warps // (rows_each * asked.block_dv))),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # A cooperative launch is refused if not all programs fit at once, and does not begin early.
        **({"launch_cooperative_grid": True, "EARLY": False} if fixup == HOST_WAITS else early(device)),
    )
    return plan._replace(launches=OneLaunch(one, flags_of(device)))


def attention(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    fixup: str,
    config: tables.Config | None = None,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Exact attention by stream-K with this fix-up; arguments as in `kernels.reference.attention`, which CPU tensors run."""
    if q.device.type == "cpu" and not INTERPRETED:
        return reference.attention(q, kv, spec, spans, sink_logits=sink_logits, inv_freq=inv_freq, return_lse=return_lse)
    plan = prepare((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse, fixup, config)
    return plan.run(q, kv, spec, spans, sink_logits, inv_freq, return_lse)


VARIANTS = {name: partial(call, partial(attention, fixup=name)) for name in (HOST_WAITS, LAST_ARRIVER, STREAM_K)}
