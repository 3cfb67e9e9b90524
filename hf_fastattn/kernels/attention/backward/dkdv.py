"""dK and dV: one program per (block of keys, KV head, batch row), which loops over the queries of all heads of its group.

    P = exp(S + bias - lse)      dV = (Z * P)^T dO      dS = P * (Z * dO V^T - delta) * softcap'(S)      dK = scale * dS^T Q

Z is 1 / (1 - dropout) where a weight is kept, else 0. bias: of a key, if the form of K and V has one (`kernels.biased`). A
program sums the heads of its group in registers, in a fixed order. If there are too few KV heads for the GPU, several programs
share a group, and their sums are added later, also in a fixed order. Tiles are transposed, [keys, queries].

Rounds: P and dS to the dtype of the tensors for their products; sums are fp32 and rounded once. Limits: head_dim up to 256.
Oracle: `kernels.reference.backward`.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 2.
"""

import triton
import triton.language as tl

from ...device.dropout import kept
from ...device.online import scaled
from ...device.tile import aligned_strides
from ...device.visibility import narrowed, query_bounds, row_bounds
from .tile import add_dot, dot, live_keys, load_pairs, load_rows, probabilities, score_gradients, split_tiles, tile_at, within


@triton.jit
def _tile(
    dk, dv, k, v, keys, shift, queries, first, hi, spans, span_ptr, q_len, scales, dropout, place, first_key,
    DK: tl.constexpr, DV: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(dk, dv) after adding a tile of queries of one head, from `first` on; queries from `hi` on are ignored.

    keys: the slots of the block, -1 for slots that are not live. shift: their bias in base 2, or None. DK, DV: which of the two
    to sum.
    """
    q_base, do_base, stride_qm, stride_om, stats = queries
    q_start, kv_start, kv_stop, window, causal = spans
    offs_m = first + tl.arange(0, C.BLOCK_M)
    visible = None
    row_mask = None
    if MASKED:
        row_mask = offs_m < hi
        row_lo, row_hi = row_bounds(q_start + offs_m, kv_start, kv_stop, window, causal)
        row_lo, row_hi = narrowed(row_lo, row_hi, span_ptr, tl.minimum(offs_m, q_len - 1), q_len, C.ROWS)
        row_hi = tl.where(row_mask, row_hi, row_lo)
        visible = within(keys[:, None], row_lo[None, :], row_hi[None, :])
    lse_log2, delta = load_pairs(stats + first, tl.arange(0, C.BLOCK_M), row_mask, MASKED)
    q = load_rows(q_base, stride_qm, offs_m, tl.arange(0, C.BLOCK_D), row_mask, MASKED, C.HEAD_DIM, C.BLOCK_D)
    do = load_rows(do_base, stride_om, offs_m, tl.arange(0, C.BLOCK_DV), row_mask, MASKED, C.VALUE_DIM, C.BLOCK_DV)
    s = scaled(dot(k, tl.trans(q), C.IEEE), scales, C.HAS_SOFTCAP, C.IEEE)
    if DK:  # issued with the scores, so that it overlaps with their exponentials
        dp = dot(v, tl.trans(do), C.IEEE)
    biased = s
    if shift is not None:
        biased = s + shift[:, None]
    p = probabilities(biased, lse_log2[None, :], visible, MASKED)
    if C.DROPOUT:
        is_kept = tl.trans(kept(dropout, place, offs_m, first_key, C.BLOCK_N).to(tl.int8)) != 0
        if DK:
            dp = tl.where(is_kept, dp * dropout[2], 0.0)
    if DV:
        if C.DROPOUT:
            dv = add_dot(tl.where(is_kept, p * dropout[2], 0.0), do, dv, C.IEEE)
        else:
            dv = add_dot(p, do, dv, C.IEEE)
    if DK:
        ds = score_gradients(p, s, dp, delta[None, :], scales[1], MASKED, C.HAS_SOFTCAP)
        dk = add_dot(ds, q, dk, C.IEEE)
    return dk, dv


@triton.jit
def _sums(
    k, v, keys, shift, pointers, strides, row, first_head, heads, num_heads, bounds, spans, span_ptr, q_len, scales, dropout,
    first_key, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(dk, dv) of a block of keys over all queries of `heads` heads, in order; 0 if it is not to be summed."""
    Q, DOut, Stats = pointers
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om = strides
    lo, hi, full_lo, full_hi = bounds
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    dk = 0
    dv = 0
    if DK:
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if DV:
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    before, full_stop, tiles = split_tiles(lo, hi, full_lo, full_hi, BLOCK_M)
    full = full_stop - before
    for i in tl.range(0, heads * full):
        head = first_head + i // full
        stats = (row * num_heads + head) * q_len
        queries = (Q + row * stride_qb + head * stride_qh, DOut + row * stride_ob + head * stride_oh, stride_qm, stride_om,
                   Stats + stats)  # fmt: skip
        at = lo + (before + i % full) * BLOCK_M
        dk, dv = _tile(dk, dv, k, v, keys, shift, queries, at, hi, spans, span_ptr, q_len, scales, dropout,
                       (row * num_heads + head).to(tl.int32), first_key, DK, DV, False, C)  # fmt: skip
    masked = before + tiles - full_stop
    for i in tl.range(0, heads * masked):
        head = first_head + i // masked
        stats = (row * num_heads + head) * q_len
        queries = (Q + row * stride_qb + head * stride_qh, DOut + row * stride_ob + head * stride_oh, stride_qm, stride_om,
                   Stats + stats)  # fmt: skip
        at = tile_at(i % masked, before, lo, full_stop, BLOCK_M)
        dk, dv = _tile(dk, dv, k, v, keys, shift, queries, at, hi, spans, span_ptr, q_len, scales, dropout,
                       (row * num_heads + head).to(tl.int32), first_key, DK, DV, True, C)  # fmt: skip
    return dk, dv


@triton.jit
def _store(Out, x, first_key, sizes, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of dK or dV, in fp32 if there are several splits, through a pointer of one type: another would be another
    compiled kernel."""
    part, batch, row, kv_len, kv_heads, kv_head, splits = sizes
    offs_n = first_key + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK)[None, :]
    rows = ((part * batch + row) * kv_len + offs_n) * kv_heads + kv_head
    places, mask = rows[:, None] * DIM + offs, (offs_n < kv_len)[:, None] & (offs < DIM)
    if splits > 1:
        tl.store(Out.to(tl.pointer_type(tl.float32)) + places, x, mask=mask)
    else:
        tl.store(Out + places, x.to(Out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window", "drop_below", "splits"])
def dkdv_kernel(
    Q,  # (batch, num_heads, q_len, head_dim)
    K,  # (batch, num_kv_heads, kv_len, head_dim)
    V,  # (batch, num_kv_heads, kv_len, value_dim)
    DOut,  # (batch, num_heads, q_len, value_dim)
    Stats,  # (batch, num_heads, q_len, 2), fp32: lse in base 2, delta, from dq_kernel
    Spans,  # (batch, 1, 1 or 2, integers), int32
    DK,  # (splits, batch, kv_len, num_kv_heads, head_dim), contiguous, fp32 if splits > 1, written
    DV,  # (splits, batch, kv_len, num_kv_heads, value_dim), contiguous, fp32 if splits > 1, written
    Seed,  # (1,), int64; None without dropout
    Bias,  # of FORM, or None
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh,
    stride_om, stride_sb, q_len, kv_len, window, scale, scale_log2, cap_log2, drop_below, keep_scale, splits,
    C: tl.constexpr, SPLIT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """SPLIT: two programs for each block of keys, one for dK and one for dV, if registers cannot hold both.

    splits: number of programs that share the heads of a group; each writes its sums to its own part of DK and DV.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    HEAD_DIM: tl.constexpr = C.HEAD_DIM
    VALUE_DIM: tl.constexpr = C.VALUE_DIM
    # In causal attention the first keys have the most queries.
    program = tl.program_id(0)
    first_key = (program // 2 if SPLIT else program) * BLOCK_N
    heads = C.GROUP // splits
    kv_heads = tl.num_programs(1) // splits
    kv_head = (tl.program_id(1) // splits).to(tl.int64)
    part = tl.program_id(1) % splits
    row = tl.program_id(2).to(tl.int64)
    offs_n = first_key + tl.arange(0, BLOCK_N)

    span_ptr = Spans + row * stride_sb
    last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
    bounds, spans, holes = query_bounds(span_ptr, first_key, last_key, q_len, kv_len, window, C)
    keys = live_keys(span_ptr, offs_n, spans[1], spans[2], holes, C)
    stride_qb, stride_qh, stride_qm = aligned_strides(stride_qb, stride_qh, stride_qm, C.ALIGN)
    stride_ob, stride_oh, stride_om = aligned_strides(stride_ob, stride_oh, stride_om, C.ALIGN)
    stride_kb, stride_kh, stride_kn = aligned_strides(stride_kb, stride_kh, stride_kn, C.ALIGN)
    stride_vb, stride_vh, stride_vn = aligned_strides(stride_vb, stride_vh, stride_vn, C.ALIGN)
    k = load_rows(K + row * stride_kb + kv_head * stride_kh, stride_kn, offs_n, tl.arange(0, C.BLOCK_D), keys >= 0, True,
                  HEAD_DIM, C.BLOCK_D)  # fmt: skip
    v = load_rows(V + row * stride_vb + kv_head * stride_vh, stride_vn, offs_n, tl.arange(0, C.BLOCK_DV), keys >= 0, True,
                  VALUE_DIM, C.BLOCK_DV)  # fmt: skip
    shift = None
    if FORM.weights is not None:
        shift = FORM.weights(None, keys, (row, kv_head, kv_heads, kv_len), (Bias,))[1]
    sizes = (part, tl.num_programs(2), row, kv_len, kv_heads, kv_head, splits)
    first_head, num_heads = kv_head * C.GROUP + part * heads, kv_heads * C.GROUP
    pointers = (Q, DOut, Stats.to(tl.pointer_type(tl.int64)))
    strides = (stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om)
    scales = (scale_log2, cap_log2)
    dropout = (0, drop_below, keep_scale)
    if C.DROPOUT:
        dropout = (tl.load(Seed), drop_below, keep_scale)
    if SPLIT:
        if program % 2 == 0:
            dk, _ = _sums(
                k, v, keys, shift, pointers, strides, row, first_head, heads, num_heads, bounds, spans, span_ptr, q_len, scales,
                dropout, first_key, True, False, C,
            )  # fmt: skip
            _store(DK, dk * scale, first_key, sizes, HEAD_DIM, BLOCK_N, C.BLOCK_D)
        else:
            _, dv = _sums(
                k, v, keys, shift, pointers, strides, row, first_head, heads, num_heads, bounds, spans, span_ptr, q_len, scales,
                dropout, first_key, False, True, C,
            )  # fmt: skip
            _store(DV, dv, first_key, sizes, VALUE_DIM, BLOCK_N, C.BLOCK_DV)
    else:
        dk, dv = _sums(
            k, v, keys, shift, pointers, strides, row, first_head, heads, num_heads, bounds, spans, span_ptr, q_len, scales,
            dropout, first_key, True, True, C,
        )  # fmt: skip
        _store(DK, dk * scale, first_key, sizes, HEAD_DIM, BLOCK_N, C.BLOCK_D)
        _store(DV, dv, first_key, sizes, VALUE_DIM, BLOCK_N, C.BLOCK_DV)
