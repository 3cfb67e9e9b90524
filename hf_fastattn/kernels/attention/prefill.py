"""FlashAttention-2 forward in portable Triton: one program per (block of query rows, head, batch row), which loops over K/V.

    out = (P * Z) V,  P = softmax(scale q K^T),  Z = 1 / (1 - dropout) where a weight is kept, else 0;  lse is that of all weights

The longest causal blocks start first. Query heads share K/V heads without expansion.

Rounds: P to V's dtype, and the result; sums and lse are fp32. Limits: head_dim up to 576, of V 512, with dropout 256. Oracle:
`kernels.reference.attention`.

Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1; for
dropout Dao et al., "FlashAttention" (2022), algorithm 2 (appendix B.3), with random numbers of a weight's place
(`kernels.dropout`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import checks
from ..decode.rotate import rotate
from ..device.attend import attend
from ..device.online import finalize
from ..device.tile import aligned_strides, head_of, tiles_in
from ..device.visibility import key_bounds
from ..host import launch, tables
from ..spans import no_spans
from ..spec import KV, Form, Spec
from .plan import Call


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "drop_below"])
def prefill_kernel(
    Q,  # (batch, num_heads, q_len, head_dim)
    K,  # (batch, num_kv_heads, kv_len, head_dim), or as FORM stores it
    V,  # (batch, num_kv_heads, kv_len, value_dim), or as FORM stores it
    Scales,  # of FORM, or None
    Centre,  # of FORM, or None
    Pages,  # of FORM, or None
    Out,  # (batch, q_len, num_heads, value_dim), contiguous, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Spans,  # (batch, 1, 1 or 2, integers), int32
    QSinks,  # (batch, num_heads, q_len, head_dim) with Q's strides: Q re-rotated for sinks; None without sinks
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    Seed,  # (1,), int64; None without dropout
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_sb, num_heads,
    q_len, kv_len, window, scale_log2, cap_log2, drop_below, keep_scale,
    C: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = C.BLOCK_M
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    span_ptr = Spans + row * stride_sb
    offs_m = tl.minimum(first + tl.arange(0, BLOCK_M), q_len - 1)
    row_mask = first + tl.arange(0, BLOCK_M) < q_len
    bounds, sink_bounds = key_bounds(span_ptr, offs_m, first, tl.minimum(first + BLOCK_M, q_len) - 1, q_len, kv_len, window, C)
    sink_lo, sink_hi, _ = sink_bounds

    offs_v = tl.arange(0, C.BLOCK_DV)
    v_mask = offs_v[None, :] < VALUE_DIM
    kv_head = (head // C.GROUP).to(tl.int64)
    k_strides = aligned_strides(stride_kb, stride_kh, stride_kn, C.ALIGN)
    v_strides = aligned_strides(stride_vb, stride_vh, stride_vn, C.ALIGN)
    indices = (row, kv_head, num_heads // C.GROUP, kv_len)
    k_base, v_base = head_of(K, k_strides, indices, FORM), head_of(V, v_strides, indices, FORM)
    kv = (k_base, v_base, k_strides, v_strides, indices, (Scales, Centre, Pages))
    dropout = None
    if C.DROPOUT:
        dropout = ((tl.load(Seed), drop_below, keep_scale), tl.program_id(2) * num_heads + head, offs_m)
    acc, m, l = attend(
        (Q, row * stride_qb + head.to(tl.int64) * stride_qh + offs_m.to(tl.int64) * stride_qm),
        kv, span_ptr, bounds, (0, tiles_in(bounds[2], bounds[3], C)), (scale_log2, cap_log2),
        (QSinks, sink_lo, sink_hi, True, 0, 0), C, FORM, dropout,
    )  # fmt: skip
    if C.DROPOUT:
        acc *= keep_scale
    out, lse = finalize(acc, m, l, SinkLogits + head + offs_m * 0, row_mask, C.HAS_SINK_LOGITS)
    out_rows = (row * q_len + offs_m) * num_heads + head
    tl.store(Out + out_rows[:, None] * VALUE_DIM + offs_v[None, :], out.to(Out.dtype.element_ty), mask=row_mask[:, None] & v_mask)
    if C.WRITE_LSE:
        tl.store(Lse + (row * num_heads + head) * q_len + offs_m, lse, mask=row_mask)


def prefill(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Exact attention of many query rows; arguments, result and errors as in `kernels.reference.attention`."""
    if inv_freq is not None and 0 in q.stride():
        q = q.contiguous()  # expanded queries share memory, and their re-rotated copies differ
    start = _prepare((q, *kv.tensors, spans, sink_logits, inv_freq, seed), kv.form, spec, return_lse)
    q_sinks, sizes = q, kv.sizes
    if inv_freq is not None:
        q_sinks = rotate(
            q, sizes.kv_len, spans, inv_freq, window=spec.window, sinks=spec.sinks, interleaved=spec.interleaved
        )  # fmt: skip
    out, lse = checks.empty_outputs(q, sizes.value_dim, return_lse)
    start(
        q,
        *kv.tensors,
        out,
        lse,
        no_spans(q.device, spec.causal) if spans is None else spans,
        q_sinks if spec.sinks else None,
        q if sink_logits is None else sink_logits,
        seed,
    )
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, return_lse: bool) -> launch.Launch:
    """Check the arguments and prepare their launch."""
    call = Call.of(tensors[:-1], form, spec, return_lse, rows=True, dropout=True, seed=tensors[-1])
    # With the larger tiles of the table of prefill, random numbers do not fit into registers.
    table = tables.backward_dq if spec.dropout else tables.prefill
    config = table(call.q.device, call.q.dtype, call.width, call.q_len)
    return launch.Launch(
        prefill_kernel,
        (triton.cdiv(call.q_len, config.BLOCK_M), call.num_heads, call.batch),
        **call.arguments(),
        **(call.dropout() if spec.dropout else {"drop_below": None, "keep_scale": None}),
        num_heads=call.num_heads,
        C=call.constants(config, packed=False),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
