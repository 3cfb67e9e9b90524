"""Common code of the warps: buffers, the order of tiles, the bounds of keys and queries, the producer, the stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....device import visibility
from ....device.online import LOG2_E
from ...prefill_hopper.pipe import phase_of, stage_of, tma_load, warpgroup_barrier

# Visibility is defined once for all kernels; these compile the same source as Gluon.
load_spans = gluon.jit(visibility.load_spans.fn)
row_bounds = gluon.jit(visibility.row_bounds.fn)
narrowed = gluon.jit(visibility.narrowed.fn)
queries_of_keys = gluon.jit(visibility.queries_of_keys.fn)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def shared_memory(q_desc, k_desc, v_desc, do_desc, C: gl.constexpr):
    """The buffers: K and V in blocks of 64 keys; the ring of Q, dO and the copies of `produce`; the buffer that passes P on."""
    STAGES: gl.constexpr = C.stages
    BLOCKS: gl.constexpr = C.BLOCK_N // 64
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [BLOCKS, 1, 1, 64, k_desc.block_shape[3]], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [BLOCKS, 1, 1, 64, v_desc.block_shape[3]], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, C.BLOCK_M, q_desc.block_shape[3]], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, C.BLOCK_M, do_desc.block_shape[3]], do_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C.BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bounds_smem = gl.allocate_shared_memory(gl.int32, [2 * STAGES, C.BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full, q_full, do_full, empty = _barriers(1), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES)
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)  # by TMA, and after the copy of lse and delta
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # by both consumers
    p_smem = stats_smem
    p_full, p_empty = kv_full, kv_full
    if C.wide:
        p_smem = gl.allocate_shared_memory(gl.float32, [64, C.BLOCK_M], gl.SwizzledSharedLayout(2, 1, 4, [1, 0]))
        p_full, p_empty = _barriers(1), _barriers(1)
        mbarrier.init(p_full.index(0), count=1)
        mbarrier.init(p_empty.index(0), count=1)
    fence_async_shared()
    return (
        (k_smem, v_smem, kv_full),
        (q_smem, do_smem, stats_smem, bounds_smem, q_full, do_full, empty),
        (p_smem, p_full, p_empty),
    )


@gluon.jit
def load_keys(k_desc, v_desc, kv_buffers, row, kv_head, first_key, C: gl.constexpr):
    """Begin to load K and V, before the bounds of queries are known."""
    k_smem, v_smem, kv_full = kv_buffers
    BLOCKS: gl.constexpr = C.BLOCK_N // 64
    mbarrier.expect(kv_full.index(0), BLOCKS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for block in gl.static_range(BLOCKS):
        tma_load(k_desc, [row, kv_head, first_key + 64 * block, 0], kv_full.index(0), k_smem.index(block))
        tma_load(v_desc, [row, kv_head, first_key + 64 * block, 0], kv_full.index(0), v_smem.index(block))


@gluon.jit
def query_bounds(
    span_ptr, first_key, last_key, q_len, kv_len, window,
    IS_CAUSAL: gl.constexpr, HAS_ROWS: gl.constexpr, STEPS: gl.constexpr = visibility.STEPS,
):  # fmt: skip
    """`visibility.query_bounds` in Gluon."""
    q_start, kv_start, kv_stop, window, causal, holes, _live_stop = load_spans(span_ptr, q_len, kv_len, window, IS_CAUSAL)
    whole = (first_key >= kv_start) & (last_key < kv_stop)
    first_key = gl.maximum(first_key, kv_start)
    last_key = gl.minimum(last_key, kv_stop - 1)
    ahead = q_start + gl.where(causal, 0, window - 1)
    lo = first_key - ahead
    full_lo = last_key - ahead
    hi = last_key - q_start + window
    full_hi = first_key - q_start + window
    if HAS_ROWS:
        steps = gl.arange(0, STEPS, gl.BlockedLayout([STEPS // 128], [32], [4], [0]))
        by_rows = queries_of_keys(span_ptr, first_key, last_key, q_len, steps)
        lo = gl.maximum(lo, by_rows[0])
        hi = gl.minimum(hi, by_rows[1])
        full_lo = gl.maximum(full_lo, by_rows[2])
        full_hi = gl.minimum(full_hi, by_rows[3])
    lo = gl.maximum(lo, 0)
    hi = gl.maximum(gl.where(first_key <= last_key, gl.minimum(hi, q_len), lo), lo)
    full_hi = gl.where(whole & (not holes), gl.minimum(full_hi, hi), lo)
    return (lo, hi, gl.maximum(full_lo, lo), full_hi), (q_start, kv_start, kv_stop, window, causal, holes)


@gluon.jit
def tile_at(i, tiles, MASKED: gl.constexpr, BLOCK_M: gl.constexpr):
    """(head of the program, first query) of the i-th tile with or without a mask, one head after another."""
    lo, before, full_stop, masked = tiles
    if MASKED:
        head = i // masked
        at = i - head * masked
        return head, lo + gl.where(at < before, at, full_stop + at - before) * BLOCK_M
    else:
        full = full_stop - before
        head = i // full
        return head, lo + (before + i - head * full) * BLOCK_M


@gluon.jit
def _bounds(first, limits, QUERIES: gl.constexpr, HAS_ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(first slot, number of slots) that each query of a tile from `first` on sees; 0 from query `hi` on."""
    hi, spans, span_ptr, q_len = limits
    q_start, kv_start, kv_stop, window, causal, _holes = spans
    offs_m = first + gl.arange(0, BLOCK_M, QUERIES)
    row_lo, row_hi = row_bounds(q_start + offs_m, kv_start, kv_stop, window, causal)
    row_lo, row_hi = narrowed(row_lo, row_hi, span_ptr, gl.minimum(offs_m, q_len - 1), q_len, HAS_ROWS)
    return row_lo, gl.where(offs_m < hi, row_hi - row_lo, 0)


@gluon.jit
def produce(args, heads, C: gl.constexpr, HAS_ROWS: gl.constexpr, LOG2_E: gl.constexpr = LOG2_E):
    """The producer warp: Q, dO, lse and delta, tile by tile as their buffers become empty.

    For tiles with a mask it also computes the bounds of the queries, which consumers would compute in every thread of a column.
    """
    q_desc, do_desc, Lse, Delta, ring, indices, tiles, limits = args
    q_smem, do_smem, stats_smem, bounds_smem, q_full, do_full, empty = ring
    row, first_head, num_heads = indices
    _hi, _spans, _span_ptr, q_len = limits
    _lo, before, full_stop, masked = tiles
    BLOCK_M: gl.constexpr = C.BLOCK_M
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    n = 0
    for MASKED in gl.static_range(2):
        count = heads * (masked if MASKED else full_stop - before)
        for i in range(count):
            head, first = tile_at(i, tiles, MASKED, BLOCK_M)
            head += first_head
            stage = stage_of(n, C.stages)
            mbarrier.wait(empty.index(stage), phase_of(n, C.stages) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            tma_load(q_desc, [row, head, first, 0], q_full.index(stage), q_smem.index(stage))
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            tma_load(do_desc, [row, head, first, 0], do_full.index(stage), do_smem.index(stage))
            offs = first + gl.arange(0, BLOCK_M, layout)
            stats = (row.to(gl.int64) * num_heads + head) * q_len + offs
            lse = gl.load(Lse + stats, mask=offs < q_len, other=0.0)
            delta = gl.load(Delta + stats, mask=offs < q_len, other=0.0)
            stats_smem.index(2 * stage).store(lse * -LOG2_E)
            stats_smem.index(2 * stage + 1).store(delta)
            if MASKED:
                row_lo, visible = _bounds(first, limits, layout, HAS_ROWS, BLOCK_M)
                bounds_smem.index(2 * stage).store(row_lo)
                bounds_smem.index(2 * stage + 1).store(visible)
            warpgroup_barrier()
            mbarrier.arrive(q_full.index(stage), count=1)
            n += 1


@gluon.jit
def store(Out, x, first_key, sizes, DIM: gl.constexpr):
    """Write a block of dK or dV, as in `dkdv`."""
    _block, first_row, row_stride, kv_len, splits = sizes
    offs_n = first_key + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    offs_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    rows = first_row + offs_n.to(gl.int64) * row_stride
    places = rows[:, None] * DIM + offs_d[None, :]
    mask = (offs_n < kv_len)[:, None] & (offs_d < DIM)[None, :]
    if splits > 1:
        gl.store(Out.to(gl.pointer_type(gl.float32)) + places, x, mask=mask)
    else:
        gl.store(Out + places, x.to(Out.dtype.element_ty), mask=mask)
