"""Attention with dropout in portable Triton, for training: `prefill` with weights dropped after the softmax.

    O = (P * Z / (1 - p)) V      Z: which weights are kept, recomputed from a seed by the backward kernels (`device.dropout`)

The denominator of P is of all weights, so lse does not depend on dropout.

Source: Dao et al., "FlashAttention" (2022), algorithm 2 (appendix B.3), with the mask recomputed from the state of the generator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import checks
from ..device.dropout import kept
from ..device.online import finalize, safe, scaled
from ..device.visibility import key_bounds
from ..dropout import GROUP, keep_scale, threshold
from ..host import launch, tables
from ..spec import KV, Form, Spec
from .backward.tile import add_dot, dot, live_keys, load_rows, split_tiles, tile_at, within
from .plan import Call


@triton.jit
def _tile(
    acc, m, l, q, kv, first, offs_m, bounds, span_ptr, scales, dropout, place,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of the online softmax after a tile of keys from slot `first` on; acc is still to be scaled by what is kept."""
    k_base, v_base, stride_kn, stride_vn = kv
    row_lo, row_hi, lo, hi, _, _, holes = bounds
    offs_n = first + tl.arange(0, C.BLOCK_N)
    live = None
    if MASKED:
        keys = live_keys(span_ptr, offs_n, lo, hi, holes, C)
        live = keys >= 0
    k = load_rows(k_base, stride_kn, offs_n, tl.arange(0, C.BLOCK_D), live, MASKED, C.HEAD_DIM, C.BLOCK_D)
    v = load_rows(v_base, stride_vn, offs_n, tl.arange(0, C.BLOCK_DV), live, MASKED, C.VALUE_DIM, C.BLOCK_DV)
    s = scaled(dot(q, tl.trans(k), C.IEEE), scales, C.HAS_SOFTCAP, C.IEEE)
    if MASKED:
        s = tl.where(within(keys[None, :], row_lo[:, None], row_hi[:, None]), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = safe(m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    p = tl.where(kept(dropout, place, offs_m, first, C.BLOCK_N), p, 0.0)
    return add_dot(p, v, acc * alpha[:, None], C.IEEE), m_new, l


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "drop_below"])
def dropped_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Spans,
    SinkLogits,
    Seed,
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
    drop_below,
    keep_scale,
    C: tl.constexpr,
    GROUP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = C.BLOCK_M
    HEAD_DIM: tl.constexpr = C.HEAD_DIM
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_m = tl.minimum(first + tl.arange(0, BLOCK_M), q_len - 1)
    row_mask = first + tl.arange(0, BLOCK_M) < q_len
    offs_v = tl.arange(0, BLOCK_DV)

    span_ptr = Spans + row * stride_sb
    bounds, _ = key_bounds(span_ptr, offs_m, first, tl.minimum(first + BLOCK_M, q_len) - 1, q_len, kv_len, window, C)
    _, _, lo, hi, full_lo, full_hi, holes = bounds
    kv_head = (head // C.GROUP).to(tl.int64)
    kv = (K + row * stride_kb + kv_head * stride_kh, V + row * stride_vb + kv_head * stride_vh, stride_kn, stride_vn)
    scales = (scale_log2, cap_log2)
    dropout = (tl.load(Seed), drop_below, keep_scale)
    place = tl.program_id(2) * num_heads + head
    q_base = Q + row * stride_qb + head.to(tl.int64) * stride_qh
    q = load_rows(q_base, stride_qm, offs_m, tl.arange(0, C.BLOCK_D), row_mask, False, HEAD_DIM, C.BLOCK_D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    lo = lo // GROUP * GROUP
    before, full_stop, tiles = split_tiles(lo, hi, full_lo, tl.where(holes, lo, full_hi), C.BLOCK_N)
    for tile in tl.range(before, full_stop):
        at = lo + tile * C.BLOCK_N
        acc, m, l = _tile(acc, m, l, q, kv, at, offs_m, bounds, span_ptr, scales, dropout, place, False, C)
    for i in tl.range(0, before + tiles - full_stop):
        at = tile_at(i, before, lo, full_stop, C.BLOCK_N)
        acc, m, l = _tile(acc, m, l, q, kv, at, offs_m, bounds, span_ptr, scales, dropout, place, True, C)
    out, lse = finalize(acc * keep_scale, m, l, SinkLogits + head + offs_m * 0, row_mask, C.HAS_SINK_LOGITS)
    # Out is (batch, q_len, num_heads, VALUE_DIM), contiguous.
    out_rows = (row * q_len + offs_m) * num_heads + head
    mask = row_mask[:, None] & (offs_v[None, :] < VALUE_DIM)
    tl.store(Out + out_rows[:, None] * VALUE_DIM + offs_v[None, :], out.to(Out.dtype.element_ty), mask=mask)
    tl.store(Lse + (row * num_heads + head) * q_len + offs_m, lse, mask=row_mask)


def dropped(
    q: torch.Tensor,
    kv: KV,
    spec: Spec,
    spans: torch.Tensor | None = None,
    *,
    seed: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Attention with dropout, of heads of at most 256 dimensions; arguments and result as in `kernels.reference.attention`."""
    start = _prepare((q, *kv.tensors, spans, sink_logits, seed), kv.form, spec)
    out, lse = checks.empty_outputs(q, kv.v.shape[3], True)
    start(
        q,
        kv.k,
        kv.v,
        out,
        lse,
        q if spans is None else spans,
        q if sink_logits is None else sink_logits,
        seed,
    )
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, form: Form, spec: Spec) -> launch.Launch:
    """Check the arguments and prepare their launch."""
    q, k, v, *others, spans, sink_logits, seed = tensors
    kv = KV(k, v, form, *others)
    checks.check(q, kv, spec, spans, sink_logits, seed=seed, rows=True, dropout=True)
    checks.check_trained_widths(q, kv)
    call = Call.of((q, *kv.tensors, spans, sink_logits, None), form, spec._replace(dropout=0.0), True, rows=True)
    config = tables.backward_dq(q.device, q.dtype, call.width, call.q_len)
    arguments = call.arguments()
    del arguments["LOAD_K"], arguments["LOAD_V"]
    return launch.Launch(
        dropped_kernel,
        (triton.cdiv(call.q_len, config.BLOCK_M), call.num_heads, call.batch),
        **arguments,
        num_heads=call.num_heads,
        drop_below=threshold(spec.dropout),
        keep_scale=keep_scale(spec.dropout),
        C=call.constants(config, packed=False),
        GROUP=GROUP,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
