"""dK and dV for Hopper (sm_90) in Gluon, warp-specialized: a producer warp loads, two warpgroups compute; formulas in `dkdv`.

The producer streams tiles of Q and dO through shared memory by TMA, and copies lse and delta there. Tiles of scores are
transposed, [keys, queries], so that P and dS are operands of dV and dK without leaving registers. With heads of at most 128
dimensions a program has 128 keys of one KV head, 64 in each consumer, which computes P while dP = V dO^T runs, and dS while dV
+= P^T dO runs. With wider heads a consumer has registers for one sum: both have the same 64 keys, the first computes S, P and
dV, and passes P through shared memory to the second, which computes dP, dS and dK. Keys that no query sees may contain NaN: it
only reaches rows of S and dP in which P is masked.

Rounds: as `dkdv`. Limits: `supports` in the folder's `__init__.py`; no dropout. Oracle: `kernels.reference.backward`.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), section 3 and
appendix B.1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....spans import WORDS
from ...prefill_hopper.pipe import matrix, phase_of, stage_of
from .tile import load_keys, produce, query_bounds, shared_memory, store


@gluon.constexpr_function
def _layout(columns):
    """The layout of an accumulator of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _operand_layout(columns):
    """The layout of P or dS as an operand of a product with so many columns."""
    return gl.DotOperandLayout(0, _layout(columns), 2)


@gluon.jit
def _live_keys(first_key, spans, span_ptr, ROWS: gl.constexpr, HAS_WORDS: gl.constexpr, WORDS: gl.constexpr = WORDS):
    """64 slots from `first_key` on; -1 for those that are not live or are holes."""
    _q_start, kv_start, kv_stop, _window, _causal, holes = spans
    keys = first_key + gl.arange(0, 64, ROWS)
    live = (keys >= kv_start) & (keys < kv_stop)
    if HAS_WORDS:
        words = gl.load(span_ptr + WORDS + (keys >> 5), mask=live & holes, other=-1)
        live = live & (((words >> (keys & 31)) & 1) != 0)
    return gl.where(live, keys, -1)


@gluon.jit
def _probabilities(s, stage, ring, keys, scale_log2, cap_log2, MASKED: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """(P, softcapped scores in base 2) of the products of keys and the queries of a stage."""
    _q_smem, _do_smem, stats_smem, bounds_smem, _q_full, _do_full, _empty = ring
    queries: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    minus_lse = stats_smem.index(2 * stage).load(queries)
    if HAS_SOFTCAP:
        s = cap_log2 - 2.0 * cap_log2 / (1.0 + gl.exp2(s * scale_log2))
        x = s + minus_lse[None, :]
    else:
        x = gl.fma(s, scale_log2, minus_lse[None, :])
    if MASKED:
        # One comparison of unsigned integers, which is false for a key of -1.
        distance = keys[:, None] - bounds_smem.index(2 * stage).load(queries)[None, :]
        visible = bounds_smem.index(2 * stage + 1).load(queries)[None, :]
        x = gl.where(distance.to(gl.uint32, bitcast=True) < visible.to(gl.uint32, bitcast=True), x, float("-inf"))
    return gl.exp2(x), s


@gluon.jit
def _consume(
    args, WG: gl.constexpr, heads, C: gl.constexpr, HAS_WORDS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Consumer WG: dK and dV of keys 64 * WG .. 64 * WG + 63 of the block."""
    DK, DV, kv_buffers, ring, _passed, spans, span_ptr, tiles, sizes, scale, scale_log2, cap_log2 = args
    k_smem, v_smem, kv_full = kv_buffers
    q_smem, do_smem, stats_smem, _bounds, q_full, do_full, empty = ring
    first_key, _first_row, _row_stride, _kv_len, _splits = sizes
    _lo, before, full_stop, masked = tiles
    dtype: gl.constexpr = k_smem.dtype
    WIDTH_K: gl.constexpr = k_smem.shape[4]
    WIDTH_V: gl.constexpr = v_smem.shape[4]
    BLOCK_M: gl.constexpr = C.BLOCK_M
    s_layout: gl.constexpr = _layout(BLOCK_M)
    queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    keys = _live_keys(first_key + 64 * WG, spans, span_ptr, gl.SliceLayout(1, s_layout), HAS_WORDS)

    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([64, WIDTH_K], gl.float32, _layout(WIDTH_K))
    dv = gl.zeros([64, WIDTH_V], gl.float32, _layout(WIDTH_V))
    mbarrier.wait(kv_full.index(0), 0)
    k = matrix(k_smem.index(WG))
    v = matrix(v_smem.index(WG))
    n = 0
    for MASKED in gl.static_range(2):
        count = heads * (masked if MASKED else full_stop - before)
        for _ in range(count):
            stage = stage_of(n, C.stages)
            phase = phase_of(n, C.stages)
            mbarrier.wait(q_full.index(stage), phase)
            q = matrix(q_smem.index(stage))
            s_token = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            do = matrix(do_smem.index(stage))
            dp_token = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, [s_token])
            p, s = _probabilities(s, stage, ring, keys, scale_log2, cap_log2, MASKED, HAS_SOFTCAP)
            p_operand = gl.convert_layout(p.to(dtype), _operand_layout(WIDTH_V))
            dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, [dp_token])
            ds = p * (dp - stats_smem.index(2 * stage + 1).load(queries)[None, :])
            if HAS_SOFTCAP:
                tanh = s / cap_log2
                ds *= 1.0 - tanh * tanh
            if MASKED:
                ds = gl.where(p == 0.0, 0.0, ds)
            ds_operand = gl.convert_layout(ds.to(dtype), _operand_layout(WIDTH_K))
            dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)
            # Sums for which the iteration does not wait would be copied between registers.
            dk, dv = warpgroup_mma_wait(0, [dk_token, dv_token])
            mbarrier.arrive(empty.index(stage), count=1)
            n += 1
    store(DK, dk * scale, first_key + 64 * WG, sizes, C.head_dim)
    store(DV, dv, first_key + 64 * WG, sizes, C.value_dim)


@gluon.jit
def _consume_values(
    args, heads,
    C: gl.constexpr, HAS_WORDS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The first consumer of wide heads: S, P and dV. It passes on P, times the derivative of the softcap."""
    _DK, DV, kv_buffers, ring, passed, spans, span_ptr, tiles, sizes, _scale, scale_log2, cap_log2 = args
    k_smem, v_smem, kv_full = kv_buffers
    q_smem, do_smem, _stats, _bounds, q_full, do_full, empty = ring
    p_smem, p_full, p_empty = passed
    first_key, _first_row, _row_stride, _kv_len, _splits = sizes
    _lo, before, full_stop, masked = tiles
    WIDTH: gl.constexpr = v_smem.shape[4]
    BLOCK_M: gl.constexpr = C.BLOCK_M
    s_layout: gl.constexpr = _layout(BLOCK_M)
    keys = _live_keys(first_key, spans, span_ptr, gl.SliceLayout(1, s_layout), HAS_WORDS)

    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dv = gl.zeros([64, WIDTH], gl.float32, _layout(WIDTH))
    mbarrier.wait(kv_full.index(0), 0)
    k = matrix(k_smem.index(0))
    n = 0
    for MASKED in gl.static_range(2):
        count = heads * (masked if MASKED else full_stop - before)
        for _ in range(count):
            stage = stage_of(n, C.stages)
            phase = phase_of(n, C.stages)
            mbarrier.wait(q_full.index(stage), phase)
            q = matrix(q_smem.index(stage))
            s_token = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s_token])
            p, s = _probabilities(s, stage, ring, keys, scale_log2, cap_log2, MASKED, HAS_SOFTCAP)
            mbarrier.wait(do_full.index(stage), phase)
            p_operand = gl.convert_layout(p.to(k_smem.dtype), _operand_layout(WIDTH))
            dv_token = warpgroup_mma(p_operand, matrix(do_smem.index(stage)), dv, is_async=True)
            if HAS_SOFTCAP:
                tanh = s / cap_log2
                p = gl.where(p == 0.0, 0.0, p * (1.0 - tanh * tanh))
            mbarrier.wait(p_empty.index(0), (n & 1) ^ 1)
            p_smem.store(p)
            mbarrier.arrive(p_full.index(0), count=1)  # one arrival per warpgroup: it synchronises its threads first
            dv = warpgroup_mma_wait(0, [dv_token])
            mbarrier.arrive(empty.index(stage), count=1)
            n += 1
    store(DV, dv, first_key, sizes, C.value_dim)


@gluon.jit
def _consume_keys(args, heads, C: gl.constexpr):
    """The second consumer of wide heads: dP, dS and dK."""
    DK, _DV, kv_buffers, ring, passed, _spans, _span_ptr, tiles, sizes, scale, _scale_log2, _cap_log2 = args
    k_smem, v_smem, kv_full = kv_buffers
    q_smem, do_smem, stats_smem, _bounds, _q_full, do_full, empty = ring
    p_smem, p_full, p_empty = passed
    first_key, _first_row, _row_stride, _kv_len, _splits = sizes
    _lo, before, full_stop, masked = tiles
    WIDTH: gl.constexpr = k_smem.shape[4]
    BLOCK_M: gl.constexpr = C.BLOCK_M
    s_layout: gl.constexpr = _layout(BLOCK_M)

    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([64, WIDTH], gl.float32, _layout(WIDTH))
    mbarrier.wait(kv_full.index(0), 0)
    v = matrix(v_smem.index(0))
    for n in range(heads * (masked + full_stop - before)):
        stage = stage_of(n, C.stages)
        mbarrier.wait(do_full.index(stage), phase_of(n, C.stages))
        do = matrix(do_smem.index(stage))
        dp_token = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(p_full.index(0), n & 1)
        p = p_smem.load(s_layout)
        mbarrier.arrive(p_empty.index(0), count=1)
        delta = stats_smem.index(2 * stage + 1).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(0, [dp_token])
        ds = gl.where(p == 0.0, 0.0, p * (dp - delta[None, :]))
        ds_operand = gl.convert_layout(ds.to(k_smem.dtype), _operand_layout(WIDTH))
        # Q is loaded, because P was computed with it.
        dk_token = warpgroup_mma(ds_operand, matrix(q_smem.index(stage)), dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk_token])
        mbarrier.arrive(empty.index(stage), count=1)
    store(DK, dk * scale, first_key, sizes, C.head_dim)


@gluon.jit(do_not_specialize=["stride_sb", "batch", "num_kv_heads", "splits", "q_len", "kv_len", "window"])
def dkdv_hopper_kernel(
    q_desc,  # (batch, num_heads, q_len, head_dim), boxes of BLOCK_M queries
    k_desc,  # (batch, num_kv_heads, kv_len, head_dim), boxes of 64 keys
    v_desc,  # (batch, num_kv_heads, kv_len, value_dim), boxes of 64 keys
    do_desc,  # (batch, num_heads, q_len, value_dim), boxes of BLOCK_M queries
    Lse,  # (batch, num_heads, q_len), fp32
    Delta,  # (batch, num_heads, q_len), fp32, from dq_kernel
    Spans,  # (batch, 1, 1 or 2, integers), int32
    DK,  # (splits, batch, kv_len, num_kv_heads, head_dim), contiguous, fp32 if splits > 1, written
    DV,  # (splits, batch, kv_len, num_kv_heads, value_dim), contiguous, fp32 if splits > 1, written
    stride_sb, batch, num_kv_heads, splits, q_len, kv_len, window, scale, scale_log2, cap_log2,
    C: gl.constexpr, GROUP: gl.constexpr, HAS_WORDS: gl.constexpr, HAS_ROWS: gl.constexpr, IS_CAUSAL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """splits: number of programs that share the heads of a group; each writes its sums to its own part of DK and DV."""
    heads = GROUP // splits
    BLOCK_N: gl.constexpr = C.BLOCK_N
    # In causal attention the first keys have the most queries: the first blocks of all heads come first.
    shares = num_kv_heads * splits
    index = gl.program_id(0)
    block = index // (shares * batch)
    rest = index - block * shares * batch
    row = rest // shares
    share = rest - row * shares
    kv_head = share // splits
    part = share - kv_head * splits
    first_key = block * BLOCK_N
    kv_buffers, ring, passed = shared_memory(q_desc, k_desc, v_desc, do_desc, C)
    load_keys(k_desc, v_desc, kv_buffers, row, kv_head, first_key, C)
    span_ptr = Spans + row.to(gl.int64) * stride_sb
    last_key = gl.minimum(first_key + BLOCK_N, kv_len) - 1
    bounds, spans = query_bounds(span_ptr, first_key, last_key, q_len, kv_len, window, IS_CAUSAL, HAS_ROWS)
    lo, hi, full_lo, full_hi = bounds
    num_tiles = (hi - lo + C.BLOCK_M - 1) // C.BLOCK_M
    before = gl.minimum((full_lo - lo + C.BLOCK_M - 1) // C.BLOCK_M, num_tiles)
    full_stop = gl.maximum(before, gl.minimum(gl.maximum(full_hi - lo, 0) // C.BLOCK_M, num_tiles))
    tiles = (lo, before, full_stop, before + num_tiles - full_stop)
    first_row = (part * batch + row).to(gl.int64) * kv_len * num_kv_heads + kv_head

    limits = (hi, spans, span_ptr, q_len)
    indices = (row, kv_head * GROUP + part * heads, num_kv_heads * GROUP)
    loads = (q_desc, do_desc, Lse, Delta, ring, indices, tiles, limits)
    sizes = (first_key, first_row, num_kv_heads, kv_len, splits)
    shared = (DK, DV, kv_buffers, ring, passed, spans, span_ptr, tiles, sizes, scale, scale_log2, cap_log2)
    # Warps, and registers per thread, of the second consumer and the producer. The first consumer gets the rest, also 240.
    if C.wide:
        gl.warp_specialize(
            [
                (_consume_values, (shared, heads, C, HAS_WORDS, HAS_SOFTCAP)),
                (_consume_keys, (shared, heads, C)),
                (produce, (loads, heads, C, HAS_ROWS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, heads, C, HAS_WORDS, HAS_SOFTCAP)),
                (_consume, (shared, 1, heads, C, HAS_WORDS, HAS_SOFTCAP)),
                (produce, (loads, heads, C, HAS_ROWS)),
            ],
            [4, 1],
            [240, 24],
        )
