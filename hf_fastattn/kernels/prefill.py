"""FlashAttention-2 forward: one program per (block of query rows, head, batch row), K/V streamed past it.

Portable Triton. The longest causal blocks start first; K/V heads are shared by their query heads without expansion.
Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import checks, launch
from .rotate import rotate
from .softmax import attend, block_bounds, finalize, load_spans, row_bounds, sink_stop
from .spans import NO_WINDOW


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window"])
def prefill_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
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
    num_heads,
    q_len,
    kv_len,
    window,
    scale_log2,
    cap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    q_start, kv_start, kv_stop, window, causal, holes = load_spans(
        Spans + row * stride_sb, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL
    )
    offs_m = tl.minimum(first + tl.arange(0, BLOCK_M), q_len - 1)
    row_mask = first + tl.arange(0, BLOCK_M) < q_len
    sink_lo, sink_hi = kv_start, sink_stop(q_start + offs_m, kv_start, kv_stop, causal, SINKS)
    kv_start += SINKS
    row_lo, row_hi = row_bounds(q_start + offs_m, kv_start, kv_stop, window, causal)
    lo, hi, full_lo, full_hi = block_bounds(
        q_start + first, q_start + tl.minimum(first + BLOCK_M, q_len) - 1, kv_start, kv_stop, window, causal
    )

    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d[None, :] < HEAD_DIM
    kv_head = (head // GROUP).to(tl.int64)
    acc, m, l = attend(
        Q,
        row * stride_qb + head.to(tl.int64) * stride_qh + offs_m.to(tl.int64) * stride_qm,
        K + row * stride_kb + kv_head * stride_kh,
        V + row * stride_vb + kv_head * stride_vh,
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
        0,
        tl.cdiv(hi - lo, BLOCK_N),
        scale_log2,
        cap_log2,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        HAS_SPANS,
        HAS_SOFTCAP,
        IEEE,
        False,  # FEW_ROWS
        QSinks,
        sink_lo,
        sink_hi,
        True,
        0,  # places and what else turns queries: those at QSinks are turned
        0,
        SINKS,
        0,
        False,
    )
    out, lse = finalize(acc, m, l, SinkLogits + head + offs_m * 0, row_mask, HAS_SINK_LOGITS)
    # Out is (batch, q_len, num_heads, HEAD_DIM), contiguous.
    out_rows = (row * q_len + offs_m) * num_heads + head
    tl.store(Out + out_rows[:, None] * HEAD_DIM + offs_d[None, :], out.to(Out.dtype.element_ty), mask=row_mask[:, None] & d_mask)
    if WRITE_LSE:
        tl.store(Lse + (row * num_heads + head) * q_len + offs_m, lse, mask=row_mask)


def prefill(
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
    """Exact attention of many query rows; arguments, result and errors as in `kernels.reference.attention`."""
    if inv_freq is not None and 0 in q.stride():
        q = q.contiguous()  # queries in one place may be turned to several
    start = _prepare((q, k, v, spans, sink_logits, inv_freq), scale, causal, window, softcap, sinks, return_lse)
    q_sinks = q
    if inv_freq is not None:
        q_sinks = rotate(q, k.shape[2], spans, inv_freq, window=window, sinks=sinks, interleaved=interleaved)
    out, lse = checks.empty_outputs(q, return_lse)
    start(
        q,
        k,
        v,
        out,
        lse,
        q if spans is None else spans,
        q_sinks if sinks else None,
        q if sink_logits is None else sink_logits,
    )
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, scale, causal, window, softcap, sinks, return_lse) -> launch.Launch:
    """The launch for these arguments, once they are checked."""
    q, k, v, spans, sink_logits, inv_freq = tensors
    scale = checks.check(
        q, k, v, spans, scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, inv_freq=inv_freq
    )
    batch, num_heads, q_len, head_dim = q.shape
    config = launch.prefill(q.device, q.dtype, head_dim, q_len)
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    return launch.Launch(
        prefill_kernel,
        (triton.cdiv(q_len, config.BLOCK_M), num_heads, batch),
        **checks.strides(q, k, v, spans),
        num_heads=num_heads,
        q_len=q_len,
        kv_len=k.shape[2],
        window=NO_WINDOW if window is None else window,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_D=launch.block_d(head_dim),
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
