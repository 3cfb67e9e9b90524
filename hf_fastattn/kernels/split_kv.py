"""Flash-Decoding: the keys of each (batch row, KV head) are cut into a fixed number of splits, then combined.

Two launches, or one where there is nothing to combine. Every row gets the same number of splits, so in a ragged batch the
longest row decides the time; `lean` is the answer to that. The splits share the row's live range as the device knows it.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

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


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "stats_start"])
def split_kv_kernel(
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
    q_len,
    kv_len,
    window,
    stats_start,
    scale_log2,
    cap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    COMBINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if HAS_SPANS:
        wait_for_inputs(EARLY)
    split, splits = tl.program_id(0), tl.num_programs(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)

    last_place = SINKS + window - 1
    q_start, kv_start, kv_stop, window, causal, holes = load_spans(
        Spans + row * stride_sb, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL
    )
    rows = tl.arange(0, BLOCK_M)
    q_index, group_head, _ = packed_rows(rows, q_len, GROUP)
    sink_lo, sink_hi = kv_start, sink_stop(q_start + q_index, kv_start, kv_stop, causal, SINKS)
    places = q_start - sink_lo + (tl.zeros([1], tl.int32) if ONE_QUERY else q_index)
    kv_start += SINKS
    row_lo, row_hi = row_bounds(q_start + q_index, kv_start, kv_stop, window, causal)
    lo, hi, full_lo, full_hi = block_bounds(q_start, q_start + q_len - 1, kv_start, kv_stop, window, causal)
    tiles = tl.cdiv(hi - lo, BLOCK_N)

    offs_d = tl.arange(0, BLOCK_D)
    # Addresses too are ready before the wait.
    k_base = K + row * stride_kb + kv_head * stride_kh
    v_base = V + row * stride_vb + kv_head * stride_vh
    tile_start, tile_stop = split * tiles // splits, (split + 1) * tiles // splits
    if not HAS_SPANS:
        wait_for_inputs(EARLY)
    if COMBINE:
        let_next_begin(EARLY)
    acc, m, l = attend(
        Q,
        row * stride_qb + (kv_head * GROUP + group_head) * stride_qh + q_index * stride_qm,
        k_base,
        v_base,
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
        split == 0,
        places,
        last_place,
        SINKS,
        PAIRS,
        INTERLEAVED,
    )
    if COMBINE:
        slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * splits + split
        store_partial(
            acc, m, l, Workspace, Workspace + stats_start, slot, rows, offs_d[None, :], q_len * GROUP, WORKSPACE_M, BLOCK_D
        )
    else:
        store_packed(
            acc, m, l, Out, Lse, SinkLogits, row, kv_head, tl.num_programs(1), rows, offs_d[None, :], q_len,
            GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_len", "splits", "stats_start"])
def combine_kernel(
    Out,
    Lse,
    Workspace,
    Spans,
    SinkLogits,
    q_len,
    splits,
    stats_start,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WORKSPACE_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per packed row: merges its splits in order. Its tensors are those of every merge; spans it needs none."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    slot = (tl.program_id(2) * kv_heads + kv_head) * splits
    rows, offs_d, acc, m, l = merge_rows(
        Workspace, Workspace + stats_start, slot, slot + 1, 1, splits, tl.program_id(0), q_len * GROUP,
        1, WORKSPACE_M, BLOCK_D, CHUNK,
    )  # fmt: skip
    store_packed(
        acc, m, l, Out, Lse, SinkLogits, tl.program_id(2), kv_head, kv_heads, rows, offs_d, q_len,
        GROUP, HEAD_DIM, HAS_SINK_LOGITS, WRITE_LSE,
    )  # fmt: skip


def split_kv(
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
    splits: int | None = None,
):
    """Exact attention of few query rows in one launch or two; arguments, result and errors as in `kernels.reference.attention`.

    q_len * num_heads / num_kv_heads must be at most `launch.MAX_DECODE_ROWS`. splits: into how many parts the keys of a row are
    split; None: as many as fill the GPU. With a number, a row's bits depend neither on the batch nor on the buffer's length.
    """
    tensors = (q, k, v, spans, sink_logits, inv_freq)
    plan = _prepare(tensors, scale, causal, window, softcap, sinks, interleaved, return_lse, splits)
    return run(plan, q, k, v, spans, sink_logits, sinks, inv_freq, return_lse)


class Plan(NamedTuple):
    """A decode kernel's launches, the one that attends and the one that merges its partials if it leaves any, and the floats of
    workspace between them."""

    launches: launch.Launch
    workspace_size: int


def run(plan: Plan, q, k, v, spans, sink_logits, sinks, inv_freq, return_lse):
    """The result of a plan's launches, for tensors like those that it was made for."""
    out, lse = checks.empty_outputs(q, return_lse)
    workspace = torch.empty(plan.workspace_size, device=q.device, dtype=torch.float32) if plan.workspace_size else None
    spans = q if spans is None else spans
    sink_logits = q if sink_logits is None else sink_logits
    sink_query = None if not sinks else q if inv_freq is None else inv_freq
    plan.launches(q, k, v, sink_query, out, lse, workspace, spans, sink_logits)
    return (out, lse) if return_lse else out


def turning(inv_freq: torch.Tensor | None, interleaved: bool, q_len: int) -> dict:
    """How a decode kernel's query for the sinks is turned back, as its constants."""
    pairs = 0 if inv_freq is None else inv_freq.shape[0]
    return {"PAIRS": pairs, "INTERLEAVED": pairs > 0 and interleaved, "ONE_QUERY": pairs > 0 and q_len == 1}


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, interleaved, return_lse, splits) -> Plan:
    q, k, v, spans, sink_logits, inv_freq = tensors
    scale = checks.check(
        q, k, v, spans, decode=True,
        scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, inv_freq=inv_freq,
    )  # fmt: skip
    # The choice of a tile must not depend on the batch where `splits` is given.
    heads = q.shape[0] * k.shape[1] if splits is None else 1
    config = launch.decode(q.device, q.dtype, q.shape[3], q.shape[2] * q.shape[1] // k.shape[1], heads)
    return make_plan(tensors, config, splits, scale, causal, window, softcap, sinks, interleaved, return_lse)


def make_plan(tensors, config, splits, scale, causal, window, softcap, sinks, interleaved, return_lse) -> Plan:
    """The launches for arguments that have been checked; splits None: as many as fill the GPU."""
    q, k, v, spans, sink_logits, inv_freq = tensors
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    heads, group = batch * kv_heads, num_heads // kv_heads
    most = splits or launch.programs_each(q.device, config, heads)  # at any length, so that none decides what is compiled
    splits = splits or launch.num_splits(q.device, config, heads, kv_len)
    workspace_m, block_d = triton.next_power_of_2(q_len * group), launch.block_d(head_dim)
    slots = heads * splits
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    overlap = early(q.device)
    registers = (config.registers or (config.sink_registers if sinks else 0)) if overlap["EARLY"] else 0
    both = {
        "q_len": q_len,
        "stats_start": slots * workspace_m * block_d,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WORKSPACE_M": workspace_m,
        "BLOCK_D": block_d,
        "HAS_SINK_LOGITS": sink_logits is not None,
        "WRITE_LSE": return_lse,
        **overlap,
    }
    merge = None
    if most > 1:
        chunk, num_warps = launch.merge(block_d, min(most, launch.MAX_SPLITS))
        merge = launch.Launch(
            combine_kernel, (q_len * group, kv_heads, batch), **both, splits=splits, CHUNK=chunk, num_warps=num_warps
        )
    launches = launch.Launch(
        split_kv_kernel,
        (splits, kv_heads, batch),
        merge,
        **checks.strides(q, k, v, spans),
        **both,
        kv_len=kv_len,
        window=NO_WINDOW if window is None else window,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        HAS_SPANS=spans is not None,
        IS_CAUSAL=causal,
        HAS_SOFTCAP=softcap is not None,
        IEEE=q.dtype == torch.float32,
        SINKS=sinks,
        **turning(inv_freq, interleaved, q_len),
        COMBINE=most > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"maxnreg": registers} if registers else {}),
    )
    return Plan(launches, 0 if merge is None else slots * workspace_m * (block_d + 2))
