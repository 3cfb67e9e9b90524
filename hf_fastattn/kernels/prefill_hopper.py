"""FlashAttention forward for Hopper (sm_90) in Gluon: warps that load and warps that compute, both always busy.

One program holds 64 query rows per consumer warpgroup. A producer warp streams Q, K and V through shared memory with the tensor
memory accelerator (TMA); full and empty mbarriers per buffer are all that couples it to the consumers. A consumer issues
S = Q K^T of tile i + 1 and O += P V of tile i together, and computes the softmax of tile i + 1 while the second product runs
(section 3.2 of the source); named barriers make the consumers take turns, so that one fills the tensor cores while the other
exponentiates (section 3.1). P never leaves registers.

Order of work: (block of rows, head) items, the longest causal blocks first, head by head inside sections of heads whose K and V
fit the L2 cache together. Within an item the tiles that need a mask (diagonal, tail, window edge) come first, from the top down,
the tiles that every row sees whole come last, in a loop without a mask.

Slots at and past a row's KV_STOP may hold anything, NaN too, and 0 * NaN is NaN. TMA fills zeros past the buffer's end; where the
live keys end earlier, only the item's first tile can reach past them, and consumers zero those rows of V in shared memory before
they use it. Both consumers may do so at once: all write the same zeros to rows that nobody reads otherwise.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1, 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import checks, launch, softmax
from .spans import CAUSAL, FLAGS, HOLES, KV_START, KV_STOP, NO_WINDOW, Q_START, WINDOW, WORDS

# Triton 3.9 has renamed these; both names mean the same operation.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_warpgroup_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_Q_START = gl.constexpr(Q_START)
_KV_START = gl.constexpr(KV_START)
_KV_STOP = gl.constexpr(KV_STOP)
_WINDOW = gl.constexpr(WINDOW)
_FLAGS = gl.constexpr(FLAGS)
_WORDS = gl.constexpr(WORDS)
_CAUSAL = gl.constexpr(CAUSAL)
_HOLES = gl.constexpr(HOLES)
_LOG2_E = gl.constexpr(softmax.LOG2_E)
_LN_2 = gl.constexpr(softmax.LN_2)

# What a row sees is defined once, for all kernels; these compile the same source as Gluon.
_row_bounds = gluon.jit(softmax.row_bounds.fn)


_FIRST_TURN = gl.constexpr(8)  # named barriers of the consumers' turns; Triton's own count up from 0
_CONSUMERS = gl.constexpr(2)
_STAGES = gl.constexpr(2)  # tiles of K, and of V, in flight
_REGISTERS = gl.constexpr((240, 24))  # of a consumer thread, of a producer thread
BLOCK_M = 64 * _CONSUMERS.value

HEAD_DIMS = (64, 128, 256)
MIN_Q_LEN = 65  # below this a block of 128 rows is mostly empty
_L2_BYTES = 32 << 20  # K and V of the heads in one section


@dataclass(frozen=True, slots=True)
class Config:
    """One compiled shape of the kernel.

    BLOCK_N: keys per tile. pingpong: consumers take turns at the tensor cores. own_out: O leaves through a buffer of its own and
    not through Q's. hold_wait: see `_after`. pack_early: P is packed to 16 bits at the end of its step and not at the start of
    the next. exp2_on_fma: see `_exp2`.
    """

    BLOCK_N: int
    pingpong: bool = True
    own_out: bool = True
    hold_wait: bool = True
    pack_early: bool = False
    exp2_on_fma: int = 0


# Measured on an H200 against cuDNN over lengths 2k to 64k, causal and not. At head_dim 64 the exponentials are the limit.
CONFIGS = {
    64: Config(128, exp2_on_fma=8),
    128: Config(128),
    256: Config(64, pingpong=False, own_out=False, hold_wait=False, pack_early=True),
}


@gluon.constexpr_function
def _bar(op, barrier, threads):
    return f"bar.{op} {barrier}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def _named_barrier(OP: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """`bar.sync` or `bar.arrive`; Triton itself uses the barriers from 0 up, one or two per partition."""
    gl.inline_asm_elementwise(_bar(OP, BARRIER, THREADS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _after(x, not_negative):
    """x itself; instructions that wait for products stay behind the computation of x.

    ptxas may move such a wait ahead of arithmetic that it does not depend on, here the softmax that is to run meanwhile; it
    keeps the order of waits and warp barriers. So this is a barrier of all 32 lanes whose mask looks as if it needed x:
    `not_negative` >> 31 is 0, and all bits of 0 - 1 are set.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.s32 t, $2, 31; sub.s32 t, t, 1; or.b32 t, t, $1; bar.warp.sync t; mov.b32 $0, $1; }",
        "=r,r,r",
        [x, not_negative],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_spans(span_ptr, q_len, kv_len, window, HAS_SPANS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """`softmax.load_spans` of one row: (q_start, kv_start, kv_stop, window, causal, holes)."""
    if HAS_SPANS:
        q_start = gl.load(span_ptr + _Q_START)
        kv_start = gl.maximum(gl.load(span_ptr + _KV_START), 0)
        kv_stop = gl.minimum(gl.load(span_ptr + _KV_STOP), kv_len)
        window = gl.minimum(gl.load(span_ptr + _WINDOW), window)
        flags = gl.load(span_ptr + _FLAGS)
        holes = (flags & _HOLES) != 0
        causal = (flags & _CAUSAL) != 0
        if IS_CAUSAL:
            causal = causal | True
    else:
        q_start = kv_len - q_len
        kv_start = q_start * 0
        kv_stop = kv_len
        holes = q_start != q_start
        causal = q_start == q_start
        if not IS_CAUSAL:
            causal = holes
    return q_start, kv_start, kv_stop, window, causal, holes


@gluon.jit
def _item(index, num_blocks, num_heads, total_heads, section):
    """(first block row, head, batch row) of one item: sections of heads in turn, in each the last blocks of all heads first."""
    per_section = num_blocks * section
    which = index // per_section
    rest = index - which * per_section
    width = gl.minimum(section, total_heads - which * section)
    step = rest // width
    flat = which * section + rest - step * width
    row = flat // num_heads
    return num_blocks - 1 - step, flat - row * num_heads, row


@gluon.jit
def _plan(
    span_ptr,
    first,
    q_len,
    kv_len,
    window,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """What the block of rows from `first` on visits: tiles lo + t * BLOCK_N, and how many of them come first, under a mask.

    Returns (lo, hi, num_tiles, num_after, num_masked, q_start, kv_start, kv_stop, window, causal, holes); at least one tile.
    """
    q_start, kv_start, kv_stop, window, causal, holes = _load_spans(span_ptr, q_len, kv_len, window, HAS_SPANS, IS_CAUSAL)
    first_pos = q_start + first
    last_pos = q_start + gl.minimum(first + BLOCK_M, q_len) - 1
    lo, full_hi = _row_bounds(first_pos, kv_start, kv_stop, window, causal)
    full_lo, hi = _row_bounds(last_pos, kv_start, kv_stop, window, causal)
    hi = gl.maximum(gl.minimum(hi, kv_stop), lo)  # rows that see nothing may lie beyond kv_stop
    num_tiles = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 1)
    full_start = gl.minimum((full_lo - lo + BLOCK_N - 1) // BLOCK_N, num_tiles)
    full_stop = gl.minimum(gl.maximum(full_hi - lo, 0) // BLOCK_N, num_tiles)
    full_stop = gl.maximum(gl.where(holes, full_start, full_stop), full_start)
    num_after = num_tiles - full_stop
    return lo, hi, num_tiles, num_after, num_after + full_start, q_start, kv_start, kv_stop, window, causal, holes


@gluon.jit
def _tile(i, num_tiles, num_after, num_masked):
    """The i-th tile to visit: masked ones at the top, masked ones at the bottom, then the rest, each from the top down."""
    middle = num_tiles - num_after - 1 - (i - num_masked)
    return gl.where(i < num_after, num_tiles - 1 - i, gl.where(i < num_masked, num_masked - 1 - i, middle))


@gluon.jit
def _produce(
    args,
    C: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """The producer warp: for each item Q once, K and V tile by tile, as their buffers come free."""
    q_desc, k_desc, v_desc, Spans, Counters, buffers, barriers, sizes = args
    q_smem, k_smem, v_smem, _o_smem, next_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    stride_sb, num_items, num_blocks, num_heads, group, total_heads, section, q_len, kv_len, window = sizes
    BLOCK_M: gl.constexpr = 64 * _CONSUMERS
    BLOCK_N: gl.constexpr = C.BLOCK_N

    programs = gl.num_programs(0)
    index = gl.program_id(0)
    count = index * 0  # tiles of earlier items
    turn = index * 0  # earlier items
    while index < num_items:
        following = gl.atomic_add(Counters, 1) + programs
        mbarrier.wait(next_empty, (turn & 1) ^ 1)
        next_smem.store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + following)
        _warpgroup_barrier()
        mbarrier.arrive(next_full, count=1)

        block, head, row = _item(index, num_blocks, num_heads, total_heads, section)
        first = block * BLOCK_M
        span_ptr = Spans + row.to(gl.int64) * stride_sb
        lo, _hi, num_tiles, num_after, num_masked, _q, _a, _b, _w, _c, _h = _plan(
            span_ptr, first, q_len, kv_len, window, BLOCK_M, BLOCK_N, HAS_SPANS, IS_CAUSAL
        )
        kv_head = head // group
        for wg in gl.static_range(_CONSUMERS):
            mbarrier.wait(q_empty.index(wg), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
            _tma_load(q_desc, [row, head, first + wg * 64, 0], q_full.index(wg), q_smem.index(wg))
        for i in range(num_tiles):
            start = lo + _tile(i, num_tiles, num_after, num_masked) * BLOCK_N
            stage = (count + i) % _STAGES
            phase = (((count + i) // _STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            _tma_load(k_desc, [row, kv_head, start, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            _tma_load(v_desc, [row, kv_head, start, 0], v_full.index(stage), v_smem.index(stage))
        count += num_tiles
        turn += 1
        index = following

    # A program counts itself out after its last ticket; the last one leaves zeros for the next launch.
    if gl.atomic_add(Counters + 1, 1) == programs - 1:
        gl.store(Counters, 0)
        gl.store(Counters + 1, 0)


@gluon.jit
def _mask(s, start, row_lo, row_hi, word_ptr, hi, holes, HAS_WORDS: gl.constexpr):
    """-inf where a row [64] does not see a key of the tile that begins at slot `start`."""
    offs = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs[None, :] >= row_lo[:, None]) & (offs[None, :] < row_hi[:, None])
    s = gl.where(visible, s, float("-inf"))
    if HAS_WORDS:  # noqa: SIM102
        if holes:
            words = gl.load(word_ptr + (offs >> 5), mask=offs < hi, other=0)
            s = gl.where((((words >> (offs & 31)) & 1) != 0)[None, :], s, float("-inf"))
    return s


@gluon.constexpr_function
def _exp2_asm(group):
    """PTX for `group` numbers x <= 0: exp2 of all but the last by the exp2 unit, of the last by the FMA units.

    exp2(n + f) = 2^n * exp2(f), |f| <= 1/2: adding 1.5 * 2^23 rounds x to the integer n and leaves n in the low bits, a cubic
    (relative error 7.5e-5; the weights are then rounded to 2e-3 or 2e-4) gives exp2(f), and n is added to its exponent.
    """
    last = group - 1
    lines = [f"ex2.approx.ftz.f32 ${i}, ${group + i};" for i in range(last)]
    lines += [
        "{ .reg .f32 n, f, p; .reg .b32 i, r;",
        f"max.f32 f, ${group + last}, 0fC2FC0000;",
        "add.rn.f32 n, f, 0f4B400000;",
        "mov.b32 i, n;",
        "sub.rn.f32 n, n, 0f4B400000;",
        "sub.rn.f32 f, f, n;",
        "fma.rn.f32 p, f, 0f3D61FBB0, 0f3E786F0E;",
        "fma.rn.f32 p, p, f, 0f3F31798D;",
        "fma.rn.f32 p, p, f, 0f3F7FFB49;",
        "shl.b32 i, i, 23;",
        "mov.b32 r, p;",
        "add.s32 r, r, i;",
        f"mov.b32 ${last}, r; }}",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _exp2_constraints(group):
    return ",".join(["=&f"] * group + ["f"] * group)


@gluon.jit
def _exp2(x, FMA_SHARE: gl.constexpr):
    """exp2 of x <= 0; one of FMA_SHARE numbers on the FMA units, which have time when the exp2 unit has none (none where 0)."""
    if FMA_SHARE > 0:
        y = gl.inline_asm_elementwise(
            _exp2_asm(FMA_SHARE), _exp2_constraints(FMA_SHARE), [x], dtype=gl.float32, is_pure=True, pack=FMA_SHARE
        )
    else:
        y = gl.exp2(x)
    return y


@gluon.jit
def _softmax(s, m, l, scale_log2, MASKED: gl.constexpr, FMA_SHARE: gl.constexpr):
    """One online-softmax step over scores s [64, BLOCK_N], still to be scaled: (p, m, l, factor of earlier sums)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    m_safe = m_new
    if MASKED:
        # A row that has seen nothing yet has m_new = -inf; subtracting 0 instead keeps its weights 0, not NaN.
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    # Said as fma: whether a * b - c becomes one is a compiler option whose default is about to change.
    x = gl.fma(s, scale_log2, -m_safe[:, None])
    # Masked scores are -inf, whose exp2 must be 0: the exp2 unit's, not the cubic's.
    p = gl.exp2(x) if MASKED else _exp2(x, FMA_SHARE)
    alpha = gl.exp2(m - m_safe)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _cap(s, scale_log2, cap_log2, HAS_SOFTCAP: gl.constexpr):
    """Softcapped scores in base 2, as in `softmax._scores`; without a cap s itself, scaled later."""
    if HAS_SOFTCAP:
        s = cap_log2 - 2.0 * cap_log2 / (1.0 + gl.exp2(s * scale_log2))
    return s


@gluon.jit
def _zero_rows(v_smem, limit, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the rows of a V tile from `limit` on, 16 at a time because few registers are free."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    for chunk in gl.static_range(BLOCK_N // 16):
        if limit < (chunk + 1) * 16:
            part = v_smem.slice(chunk * 16, 16, dim=0)
            rows = chunk * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            v = part.load(layout)
            part.store(gl.where((rows < limit)[:, None], v, gl.zeros_like(v)))


@gluon.jit
def _consume(
    args,
    WG: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    C: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    HAS_WORDS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINK_LOGITS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):
    """Consumer warpgroup WG: rows 64 * WG .. 64 * WG + 63 of each item's block."""
    out_desc, Lse, Spans, SinkLogits, buffers, barriers, sizes, scale_log2, cap_log2 = args
    q_smem, k_smem, v_smem, o_smem, next_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    stride_sb, num_items, num_blocks, num_heads, _group, total_heads, section, q_len, kv_len, window = sizes
    BLOCK_M: gl.constexpr = 64 * _CONSUMERS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    # Named barriers: consumer w waits for its turn at MY_TURN, the one before it arrives there.
    MY_TURN: gl.constexpr = _FIRST_TURN + WG
    NEXT_TURN: gl.constexpr = _FIRST_TURN + (WG + 1) % _CONSUMERS

    index = gl.program_id(0)
    count = index * 0
    turn = index * 0
    if C.pingpong and _CONSUMERS == WG + 1:
        _named_barrier("arrive", _FIRST_TURN, 256)
    s_scale = scale_log2
    if HAS_SOFTCAP:
        s_scale = scale_log2 * 0.0 + 1.0

    zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    while index < num_items:
        mbarrier.wait(next_full, turn & 1)
        following = gl.max(next_smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        _warpgroup_barrier()
        mbarrier.arrive(next_empty, count=1)

        block, head, row = _item(index, num_blocks, num_heads, total_heads, section)
        first = block * BLOCK_M
        span_ptr = Spans + row.to(gl.int64) * stride_sb
        lo, hi, num_tiles, num_after, num_masked, q_start, kv_start, kv_stop, span_window, causal, holes = _plan(
            span_ptr, first, q_len, kv_len, window, BLOCK_M, BLOCK_N, HAS_SPANS, IS_CAUSAL
        )
        word_ptr = span_ptr + _WORDS
        offs_m = first + WG * 64 + gl.arange(0, 64, s_rows)
        row_lo, row_hi = _row_bounds(q_start + gl.minimum(offs_m, q_len - 1), kv_start, kv_stop, span_window, causal)

        # S of the first tile, and V made safe where not all of the tile's slots are live.
        mbarrier.wait(q_full.index(WG), turn & 1)
        q = q_smem.index(WG).reshape([64, HEAD_DIM])
        stage = count % _STAGES
        phase = (count // _STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = k_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])
        s_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        start = lo + _tile(0, num_tiles, num_after, num_masked) * BLOCK_N
        if HAS_SPANS:  # noqa: SIM102
            if (start + BLOCK_N > kv_stop) & (kv_stop < kv_len):
                mbarrier.wait(v_full.index(stage), phase)
                _zero_rows(v_smem.index(stage).reshape([BLOCK_N, HEAD_DIM]), kv_stop - start, BLOCK_N, HEAD_DIM)
                fence_async_shared()
                _warpgroup_barrier()
        s = warpgroup_mma_wait(0, [s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _cap(s, scale_log2, cap_log2, HAS_SOFTCAP)
        if num_masked > 0:
            s = _mask(s, start, row_lo, row_hi, word_ptr, hi, holes, HAS_WORDS)
        m = gl.full([64], float("-inf"), gl.float32, s_rows)
        l = gl.zeros([64], gl.float32, s_rows)
        p, m, l, alpha = _softmax(s, m, l, s_scale, True, 0)
        if C.pack_early:
            p = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)

        for part in gl.static_range(2):
            if part == 0:
                begin = num_tiles * 0 + 1
                end = num_masked
            else:
                begin = gl.maximum(num_masked, 1)
                end = num_tiles
            for i in range(begin, end):
                # S of tile i and O += P V of tile i - 1 one behind the other; then the softmax of tile i while the latter runs.
                stage = (count + i) % _STAGES
                v_stage = (count + i - 1) % _STAGES
                mbarrier.wait(k_full.index(stage), ((count + i) // _STAGES) & 1)
                if C.pingpong:
                    _named_barrier("sync", MY_TURN, 256)
                k = k_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])
                s_token = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), ((count + i - 1) // _STAGES) & 1)
                v = v_smem.index(v_stage).reshape([BLOCK_N, HEAD_DIM])
                if not C.pack_early:
                    p = gl.convert_layout(p.to(dtype), p_layout)
                o_token = warpgroup_mma(p, v, acc, is_async=True)
                if C.pingpong:
                    _named_barrier("arrive", NEXT_TURN, 256)
                s = warpgroup_mma_wait(1, [s_token])
                mbarrier.arrive(k_empty.index(stage), count=1)
                s = _cap(s, scale_log2, cap_log2, HAS_SOFTCAP)
                if part == 0:
                    start = lo + _tile(i, num_tiles, num_after, num_masked) * BLOCK_N
                    s = _mask(s, start, row_lo, row_hi, word_ptr, hi, holes, HAS_WORDS)
                p, m, l, alpha = _softmax(s, m, l, s_scale, part == 0, C.exp2_on_fma)
                if C.hold_wait:
                    l = _after(l, q_len)
                acc = warpgroup_mma_wait(0, [o_token])
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                if C.pack_early:
                    p = gl.convert_layout(p.to(dtype), p_layout)
                acc = acc * gl.convert_layout(alpha, o_rows)[:, None]

        if C.own_out:
            mbarrier.arrive(q_empty.index(WG), count=1)  # the last S is done: the next Q may come
        count += num_tiles
        stage = (count - 1) % _STAGES
        mbarrier.wait(v_full.index(stage), ((count - 1) // _STAGES) & 1)
        v = v_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])
        if not C.pack_early:
            p = gl.convert_layout(p.to(dtype), p_layout)
        o_token = warpgroup_mma(p, v, acc, is_async=True)

        factor = 1.0
        if HAS_SINK_LOGITS:
            sink = gl.load(SinkLogits + head).to(gl.float32) * _LOG2_E
            m_new = gl.maximum(m, sink)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            factor = gl.exp2(m - m_safe)
            l = l * factor + gl.exp2(sink - m_safe)
            m = m_new
        l_safe = gl.where(l == 0.0, 1.0, l)
        inverse = factor / l_safe
        if WRITE_LSE:
            lse = (m + gl.log2(l_safe)) * _LN_2
            gl.store(Lse + (row.to(gl.int64) * num_heads + head) * q_len + offs_m, lse, mask=offs_m < q_len)

        acc = warpgroup_mma_wait(0, [o_token])
        mbarrier.arrive(v_empty.index(stage), count=1)
        out = (acc * gl.convert_layout(inverse, o_rows)[:, None]).to(dtype)
        if C.own_out:
            tma.store_wait(0)  # the store of the item before has read its buffer
        _warpgroup_barrier()
        o_smem.index(WG).reshape([64, HEAD_DIM]).store(out)
        fence_async_shared()
        _warpgroup_barrier()
        _tma_store(out_desc, [row, head, first + WG * 64, 0], o_smem.index(WG))
        if not C.own_out:
            tma.store_wait(0)
            _warpgroup_barrier()
            mbarrier.arrive(q_empty.index(WG), count=1)
        turn += 1
        index = following

    tma.store_wait(0)
    if C.pingpong and WG == 0:
        _named_barrier("sync", _FIRST_TURN, 256)  # the turn that the last consumer has left over


@gluon.jit(
    do_not_specialize=[
        "stride_sb",
        "num_items",
        "num_blocks",
        "num_heads",
        "group",
        "total_heads",
        "section",
        "q_len",
        "kv_len",
        "window",
    ]
)
def prefill_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    Lse,
    Spans,
    SinkLogits,
    Counters,
    stride_sb,
    num_items,
    num_blocks,
    num_heads,
    group,
    total_heads,
    section,
    q_len,
    kv_len,
    window,
    scale_log2,
    cap_log2,
    HEAD_DIM: gl.constexpr,
    C: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    HAS_WORDS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINK_LOGITS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [_CONSUMERS, 1, 1, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [_STAGES, 1, 1, C.BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [_STAGES, 1, 1, C.BLOCK_N, HEAD_DIM], v_desc.layout)
    if C.own_out:
        o_smem = gl.allocate_shared_memory(out_desc.dtype, [_CONSUMERS, 1, 1, 64, HEAD_DIM], out_desc.layout)
    else:
        o_smem = q_smem
    q_full = gl.allocate_shared_memory(gl.int64, [_CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [_CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    next_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=_CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=_CONSUMERS)
    mbarrier.init(next_full, count=1)
    mbarrier.init(next_empty, count=_CONSUMERS)
    fence_async_shared()

    buffers = (q_smem, k_smem, v_smem, o_smem, next_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty)
    sizes = (stride_sb, num_items, num_blocks, num_heads, group, total_heads, section, q_len, kv_len, window)
    shared = (out_desc, Lse, Spans, SinkLogits, buffers, barriers, sizes, scale_log2, cap_log2)
    loads = (q_desc, k_desc, v_desc, Spans, Counters, buffers, barriers, sizes)
    gl.warp_specialize(
        [
            (_consume, (shared, 0, HEAD_DIM, C, HAS_SPANS, HAS_WORDS, IS_CAUSAL, HAS_SOFTCAP, HAS_SINK_LOGITS, WRITE_LSE)),
            (_consume, (shared, 1, HEAD_DIM, C, HAS_SPANS, HAS_WORDS, IS_CAUSAL, HAS_SOFTCAP, HAS_SINK_LOGITS, WRITE_LSE)),
            (_produce, (loads, C, HAS_SPANS, IS_CAUSAL)),
        ],
        [4, 1],
        [_REGISTERS[0], _REGISTERS[1]],
    )


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: int = 0) -> str | None:
    """A sentence on why this kernel cannot take these inputs (or should not: few queries), or None where it can.

    Everything else that `kernels.prefill.prefill` takes (spans, window, softcap, sink logits, scale) it takes as well.
    """
    arch = launch.arch(q.device)
    if arch != 90:
        return f"The Hopper prefill kernel needs compute capability 9.0; {q.device} has {arch / 10:.1f}."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"The Hopper prefill kernel takes float16 and bfloat16, not {q.dtype}."
    if q.shape[3] not in HEAD_DIMS:
        return f"The Hopper prefill kernel takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {q.shape[3]}."
    if q.shape[2] < MIN_Q_LEN:
        return f"The Hopper prefill kernel is for {MIN_Q_LEN} queries or more, not {q.shape[2]}."
    if sinks:
        return f"The Hopper prefill kernel has no tile for sinks, and sinks is {sinks}."
    for name, x in (("q", q), ("k", k), ("v", v)):
        aligned = x.data_ptr() % 16 == 0 and all(
            size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
        if not aligned:
            return (
                "The Hopper prefill kernel reads by TMA, which needs addresses and strides in multiples of 16 bytes; "
                f"{name} has strides {tuple(x.stride())} at an address of {x.data_ptr() % 16} modulo 16."
            )
    return None


@cache
def _layout(rows: int, head_dim: int, dtype: torch.dtype):
    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], element)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of x (batch, heads, length, head_dim) in boxes of `rows` x head_dim of one head."""
    head_dim = x.shape[3]
    # The stride of a dimension of one element says nothing, and may not be what TMA allows.
    strides = [head_dim if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, head_dim], _layout(rows, head_dim, x.dtype))


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
    q_sinks: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """Exact attention of many query rows; arguments, result and errors as in `kernels.reference.attention`.

    Raises ValueError, with the sentence of `why_not`, for inputs that it cannot take.
    """
    scale = checks.check(
        q, k, v, spans, scale=scale, window=window, softcap=softcap, sink_logits=sink_logits, sinks=sinks, q_sinks=q_sinks
    )
    reason = why_not(q, k, v, sinks)
    if reason is not None:
        raise ValueError(reason)
    config = CONFIGS[q.shape[3]]
    if return_lse:  # in fp32, where the polynomial of `_exp2` shows
        config = replace(config, exp2_on_fma=0)
    return run(config, q, k, v, spans, scale, causal, window, softcap, sink_logits, return_lse)


def run(config: Config, q, k, v, spans, scale, causal, window, softcap, sink_logits, return_lse):
    """`prefill` with checked arguments and a chosen config."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = num_heads // kv_heads
    out, lse = checks.empty_outputs(q, return_lse)
    num_blocks = -(-q_len // BLOCK_M)
    num_items = num_blocks * num_heads * batch
    fitting = max(1, _L2_BYTES // (2 * kv_len * head_dim * q.element_size()))
    section = group * (1 << (fitting.bit_length() - 1))
    scale_log2, cap_log2 = checks.log2_scales(scale, softcap)
    with checks.on_device(q):
        prefill_hopper_kernel[(min(num_items, launch.num_sms(q.device)),)](
            _descriptor(q, 64),
            _descriptor(k, config.BLOCK_N),
            _descriptor(v, config.BLOCK_N),
            _descriptor(out, 64),
            lse,
            q if spans is None else spans,
            q if sink_logits is None else sink_logits,
            launch.counters(q.device),
            0 if spans is None else spans.stride(0),
            num_items,
            num_blocks,
            num_heads,
            group,
            batch * num_heads,
            section,
            q_len,
            kv_len,
            NO_WINDOW if window is None else window,
            scale_log2,
            cap_log2,
            HEAD_DIM=head_dim,
            C=config,
            HAS_SPANS=spans is not None,
            HAS_WORDS=spans is not None and spans.shape[3] > WORDS,
            IS_CAUSAL=causal,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINK_LOGITS=sink_logits is not None,
            WRITE_LSE=return_lse,
            num_warps=4,
        )
    return (out, lse) if return_lse else out
