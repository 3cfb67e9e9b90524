"""dQ, and delta, for `dkdv` in pairs with lse: one program per (block of query rows, head, batch row), which loops over K and V.

    delta = rowsum(dO * O) - dlse      P = exp(S + bias - lse)
    dS = P * (Z * dO V^T - delta) * softcap'(S)      dQ = scale * dS K

A program accumulates its part of dQ in registers, so nothing is accumulated in memory. Z, bias: as in `dkdv`.

Rounds: dS to K's dtype for its product; sums and delta are fp32, and dQ is rounded once. Limits: head_dim up to 256. Oracle:
`kernels.reference.backward`.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 2 with
exchanged loops.
"""

import triton
import triton.language as tl

from ...device.dropout import aligned, kept
from ...device.online import scaled
from ...device.tile import aligned_strides
from ...device.visibility import key_bounds
from .tile import add_dot, dot, live_keys, load_rows, probabilities, score_gradients, split_tiles, store_pairs, tile_at, within


@triton.jit
def _tile(
    dq, q, do, lse_log2, delta, kv, first, bounds, span_ptr, scales, dropout, place, offs_m,
    MASKED: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """dq after adding a tile of keys, from slot `first` on."""
    k_base, v_base, stride_kn, stride_vn, indices, extra = kv
    row_lo, row_hi, lo, hi, _, _, holes = bounds
    offs_n = first + tl.arange(0, C.BLOCK_N)
    visible = None
    live = None
    if MASKED:
        keys = live_keys(span_ptr, offs_n, lo, hi, holes, C)
        visible = within(keys[None, :], row_lo[:, None], row_hi[:, None])
        live = keys >= 0
    k = load_rows(k_base, stride_kn, offs_n, tl.arange(0, C.BLOCK_D), live, MASKED, C.HEAD_DIM, C.BLOCK_D)
    v = load_rows(v_base, stride_vn, offs_n, tl.arange(0, C.BLOCK_DV), live, MASKED, C.VALUE_DIM, C.BLOCK_DV)
    s = scaled(dot(q, tl.trans(k), C.IEEE), scales, C.HAS_SOFTCAP, C.IEEE)
    dp = dot(do, tl.trans(v), C.IEEE)
    if C.DROPOUT:
        dp = tl.where(kept(dropout, place, offs_m, first, C.BLOCK_N), dp * dropout[2], 0.0)
    biased = s
    if FORM.weights is not None:
        _, shift, _ = FORM.weights(None, offs_n, indices, extra)
        biased = s + shift[None, :]
    p = probabilities(biased, lse_log2[:, None], visible, MASKED)
    ds = score_gradients(p, s, dp, delta[:, None], scales[1], MASKED, C.HAS_SOFTCAP)
    return add_dot(ds, k, dq, C.IEEE)


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "drop_below"])
def dq_kernel(
    Q,  # (batch, num_heads, q_len, head_dim)
    K,  # (batch, num_kv_heads, kv_len, head_dim)
    V,  # (batch, num_kv_heads, kv_len, value_dim)
    Out,  # (batch, q_len, num_heads, value_dim), contiguous
    DOut,  # (batch, num_heads, q_len, value_dim)
    Lse,  # (batch, num_heads, q_len), fp32
    DLse,  # (batch, num_heads, q_len), fp32, read with HAS_DLSE
    Spans,  # (batch, 1, 1 or 2, integers), int32
    DQ,  # (batch, q_len, num_heads, head_dim), contiguous, written with WRITE_DQ
    Stats,  # (batch, num_heads, q_len, 2), fp32: lse in base 2, delta; without PAIRS (batch, num_heads, q_len): delta; written
    Seed,  # (1,), int64; None without dropout
    Bias,  # of FORM, or None
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh,
    stride_om, stride_sb, num_heads, q_len, kv_len, window, scale, scale_log2, cap_log2, drop_below, keep_scale,
    C: tl.constexpr, FORM: tl.constexpr, HAS_DLSE: tl.constexpr, WRITE_DQ: tl.constexpr, PAIRS: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    HEAD_DIM: tl.constexpr = C.HEAD_DIM
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    # The longest causal blocks start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_m = tl.minimum(first + tl.arange(0, BLOCK_M), q_len - 1)
    row_mask = first + tl.arange(0, BLOCK_M) < q_len
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, C.BLOCK_DV)

    stride_qb, stride_qh, stride_qm = aligned_strides(stride_qb, stride_qh, stride_qm, C.ALIGN)
    stride_ob, stride_oh, stride_om = aligned_strides(stride_ob, stride_oh, stride_om, C.ALIGN)
    stride_kb, stride_kh, stride_kn = aligned_strides(stride_kb, stride_kh, stride_kn, C.ALIGN)
    stride_vb, stride_vh, stride_vn = aligned_strides(stride_vb, stride_vh, stride_vn, C.ALIGN)
    stats = (row * num_heads + head) * q_len + offs_m
    do_base = DOut + row * stride_ob + head.to(tl.int64) * stride_oh
    do = load_rows(do_base, stride_om, offs_m, offs_v, row_mask, False, VALUE_DIM, C.BLOCK_DV)
    out = load_rows(Out + (row * q_len * num_heads + head) * VALUE_DIM, num_heads * VALUE_DIM, offs_m, offs_v, row_mask, False,
                    VALUE_DIM, C.BLOCK_DV)  # fmt: skip
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLse + stats)
    lse_log2 = tl.load(Lse + stats) * LOG2_E
    if PAIRS:
        store_pairs(Stats + 2 * stats, lse_log2, delta, row_mask)
    else:
        tl.store(Stats + stats, delta, mask=row_mask)

    if WRITE_DQ:
        span_ptr = Spans + row * stride_sb
        bounds, _ = key_bounds(span_ptr, offs_m, first, tl.minimum(first + BLOCK_M, q_len) - 1, q_len, kv_len, window, C)
        _, _, lo, hi, full_lo, full_hi, holes = bounds
        kv_head = (head // C.GROUP).to(tl.int64)
        kv = (K + row * stride_kb + kv_head * stride_kh, V + row * stride_vb + kv_head * stride_vh, stride_kn, stride_vn,
              (row, kv_head, num_heads // C.GROUP, kv_len), (Bias,))  # fmt: skip
        scales = (scale_log2, cap_log2)
        q_base = Q + row * stride_qb + head.to(tl.int64) * stride_qh
        q = load_rows(q_base, stride_qm, offs_m, offs_d, row_mask, False, HEAD_DIM, BLOCK_D)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dropout = (0, drop_below, keep_scale)
        if C.DROPOUT:
            dropout = (tl.load(Seed), drop_below, keep_scale)
            lo = aligned(lo)
        place = tl.program_id(2) * num_heads + head
        before, full_stop, tiles = split_tiles(lo, hi, full_lo, tl.where(holes, lo, full_hi), BLOCK_N)
        for tile in tl.range(before, full_stop):
            at = lo + tile * BLOCK_N
            dq = _tile(dq, q, do, lse_log2, delta, kv, at, bounds, span_ptr, scales, dropout, place, offs_m, False, C, FORM)
        for i in tl.range(0, before + tiles - full_stop):
            at = tile_at(i, before, lo, full_stop, BLOCK_N)
            dq = _tile(dq, q, do, lse_log2, delta, kv, at, bounds, span_ptr, scales, dropout, place, offs_m, True, C, FORM)
        rows = (row * q_len + offs_m) * num_heads + head
        dq_ptrs = DQ + rows[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(dq_ptrs, (dq * scale).to(DQ.dtype.element_ty), mask=row_mask[:, None] & (offs_d[None, :] < HEAD_DIM))
