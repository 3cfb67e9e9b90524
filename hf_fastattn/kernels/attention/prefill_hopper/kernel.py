"""The warps of the Hopper prefill kernel: one producer warp and two consumer warpgroups of four warps.

Producer and consumers are synchronised by a full and an empty mbarrier per buffer alone. A consumer issues S = Q K^T of tile i
+ 1 and O += P V of tile i together, and computes the softmax of tile i + 1 while the second product runs (section 3.2 of the
source). By named barriers the consumers take turns: one uses the tensor cores while the other computes exponentials (section
3.1).

Slots from a row's KV_STOP on may contain NaN, and 0 * NaN is NaN. TMA loads zeros past the end of a buffer. If the live keys
end earlier, only the first tile of an item can extend past them, and its consumers zero those rows of V in shared memory: both
may do so, as they write the same zeros to rows that nothing else reads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .item import BLOCK_M, item_of, place_of, rows_of
from .output import normaliser_of, store_out
from .pipe import (
    CONSUMERS,
    FIRST_TURN,
    await_empty,
    empty,
    full,
    let_next_begin,
    load_pages,
    matrix,
    named_barrier,
    numbers_of,
    phase_of,
    receive_item,
    reread,
    send_item,
    shared_memory,
    stage_of,
    tma_load,
    warpgroup_barrier,
)
from .plan import tile_start
from .product import add_products, block_dv, num_parts, product, scaled, store_partial, wait_for, zero_columns
from .tile import cap, mask, pack, softmax_step, zero_rows


@gluon.jit
def _produce(args, C: gl.constexpr, IS_CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr = CONSUMERS):
    """The producer warp: for each item it loads Q once, and K and V tile by tile as their buffers become empty."""
    q_desc, k_desc, v_desc, Spans, Counters, Pages, q_ring, k_ring, v_ring, next_ring, sizes = args
    _stride_sb, num_items, _num_packs, _total_packs, _group, _section, _whole, _q_len, kv_len, _window = sizes
    q_smem, _q_barriers = q_ring
    k_smem, _k_barriers = k_ring
    v_smem, _v_barriers = v_ring
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    tile_count = 0  # tiles of earlier items
    item_count = 0  # earlier items
    while index < num_items:
        following = gl.atomic_add(Counters, 1) + programs
        indices, _span_ptr, _spans, tiles, share, _slot = item_of(index, Spans, sizes, C, IS_CAUSAL)
        first, kv_head, group_head, row = indices
        skipped, num_tiles = share
        for wg in gl.static_range(CONSUMERS):
            buffer = stage_of(item_count, C.q_stages) * CONSUMERS + wg
            await_empty(q_desc, q_ring, buffer, phase_of(item_count, C.q_stages) ^ 1)
            q_at = [row, kv_head, first + wg * 64 // C.pack, group_head, 0]
            tma_load(q_desc, q_at, full(q_ring, buffer), q_smem.index(buffer))
        if C.page:
            Table = Pages + row * (kv_len // C.page)
            numbers = numbers_of(Table, tile_start(skipped, tiles, C.BLOCK_N, C.box), kv_len // C.page, C)
        for i in range(num_tiles):
            start = tile_start(skipped + i, tiles, C.BLOCK_N, C.box)
            stage = stage_of(tile_count + i, C.stages)
            phase = phase_of(tile_count + i, C.stages) ^ 1
            if C.page:
                slot = start % C.page
                load_pages(k_desc, k_ring, stage, phase, numbers, kv_head, slot, C)
                of_v = numbers
                # The next numbers arrive while V waits for its buffer.
                numbers = numbers_of(Table, tile_start(skipped + i + 1, tiles, C.BLOCK_N, C.box), kv_len // C.page, C)
                load_pages(v_desc, v_ring, stage, phase, of_v, kv_head, slot, C)
            else:
                await_empty(k_desc, k_ring, stage, phase)
                tma_load(k_desc, [row, kv_head, start, 0], full(k_ring, stage), k_smem.index(stage))
                await_empty(v_desc, v_ring, stage, phase)
                tma_load(v_desc, [row, kv_head, start, 0], full(v_ring, stage), v_smem.index(stage))
        send_item(next_ring, following, item_count)  # only now, because the atomic operation takes as long as a load
        tile_count += num_tiles
        item_count += 1
        index = following

    # Each program increments the second counter after its last item; the last program resets both for the next launch.
    if gl.atomic_add(Counters + 1, 1) == programs - 1:
        gl.store(Counters, 0)
        gl.store(Counters + 1, 0)


@gluon.jit
def _attend(
    args, index, rows, s_scale, zeros, tile_count, item_count,
    WG: gl.constexpr, C: gl.constexpr, HAS_WORDS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINK_LOGITS: gl.constexpr,
    WRITE_LSE: gl.constexpr, BLOCK_M: gl.constexpr = BLOCK_M, CONSUMERS: gl.constexpr = CONSUMERS,
    FIRST_TURN: gl.constexpr = FIRST_TURN,
):  # fmt: skip
    """Attention of consumer WG for its rows of one item. tile_count, item_count: numbers of earlier tiles and items.

    (acc, m, l) of a share is stored in the workspace.
    """
    _out, _Lse, Workspace, Spans, _SinkLogits, q_ring, k_ring, v_ring, _o_smem, _next_ring, sizes, scale_log2, cap_log2 = args
    q_smem, _q_barriers = q_ring
    k_smem, _k_barriers = k_ring
    v_smem, _v_barriers = v_ring
    _stride_sb, num_items, _num_packs, _total_packs, _group, _section, whole, q_len, kv_len, _window = sizes
    indices, kv_stop, tiles, share, _slot, seen = rows
    lo, _hi, _num_tiles, _num_after, num_masked = tiles
    skipped, num_tiles = share
    BLOCK_N: gl.constexpr = C.BLOCK_N
    STAGES: gl.constexpr = C.stages
    dtype: gl.constexpr = q_smem.dtype
    s_rows: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    # Named barriers: a consumer waits for its turn at MY_TURN, until the other consumer arrives there.
    MY_TURN: gl.constexpr = FIRST_TURN + WG
    NEXT_TURN: gl.constexpr = FIRST_TURN + 1 - WG

    # The first tile: S and its softmax. Rows of V that are not live are zeroed.
    q_buffer = stage_of(item_count, C.q_stages) * CONSUMERS + WG
    mbarrier.wait(full(q_ring, q_buffer), phase_of(item_count, C.q_stages))
    q = matrix(q_smem.index(q_buffer))
    stage = stage_of(tile_count, STAGES)
    phase = phase_of(tile_count, STAGES)
    mbarrier.wait(full(k_ring, stage), phase)
    k = matrix(k_smem.index(stage))
    s_token = product(q, k, zeros, C.k_width)
    start = tile_start(skipped, tiles, BLOCK_N, C.box)
    first_live = 0
    if C.page:
        dead = (start + BLOCK_N > kv_stop) | (start < lo)
        first_live = lo - start
    else:
        dead = (start + BLOCK_N > kv_stop) & (kv_stop < kv_len)
    if dead:
        mbarrier.wait(full(v_ring, stage), phase)
        zero_rows(matrix(v_smem.index(stage)), first_live, kv_stop - start)
        fence_async_shared()
        warpgroup_barrier()
    s = warpgroup_mma_wait(0, [s_token])
    mbarrier.arrive(empty(k_ring, stage), count=1)  # one arrival per warpgroup: it synchronises its threads first
    s = cap(s, scale_log2, cap_log2, HAS_SOFTCAP)
    if C.split:
        num_masked = gl.minimum(gl.maximum(num_masked - skipped, 0), num_tiles)
    if num_masked > 0:
        s = mask(s, start, seen, HAS_WORDS)
    m = gl.full([64], float("-inf"), gl.float32, s_rows)
    l = gl.zeros([64], gl.float32, s_rows)
    p, m, l, alpha = softmax_step(s, m, l, s_scale, True, 0)
    p = pack(p, dtype)
    acc = zero_columns(C.v_width)

    # Issue S of tile i, then O += P V of tile i - 1; compute the softmax of tile i while the second product runs.
    for MASKED in gl.static_range(1, -1, -1):
        if MASKED:
            begin = 1
            end = num_masked
        else:
            begin = gl.maximum(num_masked, 1)
            end = num_tiles
        for i in range(begin, end):
            stage = stage_of(tile_count + i, STAGES)
            v_stage = stage_of(tile_count + i - 1, STAGES)
            mbarrier.wait(full(k_ring, stage), phase_of(tile_count + i, STAGES))
            named_barrier("sync", MY_TURN)
            k = matrix(k_smem.index(stage))
            s_token = product(q, k, zeros, C.k_width)
            mbarrier.wait(full(v_ring, v_stage), phase_of(tile_count + i - 1, STAGES))
            v = matrix(v_smem.index(v_stage))
            o_tokens = add_products(p, v, acc, C.v_width)
            named_barrier("arrive", NEXT_TURN)
            s = warpgroup_mma_wait(num_parts(C.v_width), [s_token])
            mbarrier.arrive(empty(k_ring, stage), count=1)
            s = cap(s, scale_log2, cap_log2, HAS_SOFTCAP)
            if MASKED:
                start = tile_start(skipped + i, tiles, BLOCK_N, C.box)
                s = mask(s, start, seen, HAS_WORDS)
            p, m, l, alpha = softmax_step(s, m, l, s_scale, MASKED, C.exp2_on_fma)
            acc = wait_for(o_tokens)
            mbarrier.arrive(empty(v_ring, v_stage), count=1)
            p = pack(p, dtype)
            acc = scaled(acc, alpha, gl.float32)
            if MASKED and C.page:  # noqa: SIM102 (known at compile time; the next is not)
                if start < lo:
                    mbarrier.wait(full(v_ring, stage), phase_of(tile_count + i, STAGES))
                    zero_rows(matrix(v_smem.index(stage)), lo - start, BLOCK_N)
                    fence_async_shared()
                    warpgroup_barrier()

    # O += P V of the last tile; meanwhile the row sums are completed.
    if C.own_out:
        mbarrier.arrive(empty(q_ring, q_buffer), count=1)  # the last S is computed: the next Q may be loaded
    last = tile_count + num_tiles - 1
    stage = stage_of(last, STAGES)
    mbarrier.wait(full(v_ring, stage), phase_of(last, STAGES))
    v = matrix(v_smem.index(stage))
    o_tokens = add_products(p, v, acc, C.v_width)
    if C.split:
        acc = wait_for(o_tokens)
        mbarrier.arrive(empty(v_ring, stage), count=1)
        indices, slot = place_of(reread(index), Spans, sizes, WG, C)
        if slot >= 0:
            stats_start = (num_items - whole) * BLOCK_M * block_dv(C.v_width)
            exists = gl.arange(0, 64, s_rows) < (q_len - indices[0]) * C.pack
            store_partial(acc, m, l, Workspace, stats_start, slot, WG * 64, exists, C.v_width, BLOCK_M)
            if not C.own_out:
                mbarrier.arrive(empty(q_ring, q_buffer), count=1)
        else:
            inverse = normaliser_of(args, indices, m, l, C, HAS_SINK_LOGITS, WRITE_LSE)
            store_out(args, indices, scaled(acc, inverse, dtype), q_buffer, WG, C)
    else:
        inverse = normaliser_of(args, indices, m, l, C, HAS_SINK_LOGITS, WRITE_LSE)
        acc = wait_for(o_tokens)
        mbarrier.arrive(empty(v_ring, stage), count=1)
        store_out(args, indices, scaled(acc, inverse, dtype), q_buffer, WG, C)


@gluon.jit
def _skip(
    args, num_tiles, tile_count, item_count,
    WG: gl.constexpr, C: gl.constexpr, CONSUMERS: gl.constexpr = CONSUMERS, FIRST_TURN: gl.constexpr = FIRST_TURN,
):  # fmt: skip
    """An item without rows for consumer WG, all of them past the last query: it releases the buffers and takes its turns."""
    (
        _out_desc,
        _Lse,
        _Workspace,
        _Spans,
        _SinkLogits,
        q_ring,
        k_ring,
        v_ring,
        _o_smem,
        _next_ring,
        _sizes,
        _scale_log2,
        _cap_log2,
    ) = args
    q_buffer = stage_of(item_count, C.q_stages) * CONSUMERS + WG
    mbarrier.wait(full(q_ring, q_buffer), phase_of(item_count, C.q_stages))
    mbarrier.arrive(empty(q_ring, q_buffer), count=1)
    for i in range(num_tiles):
        stage = stage_of(tile_count + i, C.stages)
        phase = phase_of(tile_count + i, C.stages)
        mbarrier.wait(full(k_ring, stage), phase)
        mbarrier.arrive(empty(k_ring, stage), count=1)
        if i > 0:
            named_barrier("sync", FIRST_TURN + WG)
            named_barrier("arrive", FIRST_TURN + 1 - WG)
        mbarrier.wait(full(v_ring, stage), phase)
        mbarrier.arrive(empty(v_ring, stage), count=1)


@gluon.jit
def _consume(
    args,
    WG: gl.constexpr, C: gl.constexpr, HAS_WORDS: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINK_LOGITS: gl.constexpr, WRITE_LSE: gl.constexpr, CONSUMERS: gl.constexpr = CONSUMERS,
    FIRST_TURN: gl.constexpr = FIRST_TURN,
):  # fmt: skip
    """Consumer warpgroup WG: rows 64 * WG .. 64 * WG + 63 of each item's block."""
    (
        _out_desc,
        _Lse,
        _Workspace,
        Spans,
        _SinkLogits,
        _q_ring,
        _k_ring,
        _v_ring,
        _o_smem,
        next_ring,
        sizes,
        scale_log2,
        _cap_log2,
    ) = args
    _stride_sb, num_items, _num_packs, _total_packs, _group, _section, _whole, q_len, _kv_len, _window = sizes
    s_scale = scale_log2
    if HAS_SOFTCAP:
        s_scale = scale_log2 * 0.0 + 1.0  # capped scores are scaled already
    BLOCK_N: gl.constexpr = C.BLOCK_N
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    index = gl.program_id(0)
    tile_count = 0  # tiles of earlier items
    item_count = 0  # earlier items
    if WG == 1:
        named_barrier("arrive", FIRST_TURN)  # the first turn is consumer 0's
    while index < num_items:
        rows = rows_of(index, Spans, sizes, WG, s_rows, C, IS_CAUSAL)
        indices, _kv_stop, _tiles, share, _slot, _seen = rows
        first, _kv_head, _group_head, _row = indices
        _skipped, num_tiles = share
        if first < q_len:
            _attend(
                args, index, rows, s_scale, zeros, tile_count, item_count, WG, C,
                HAS_WORDS, HAS_SOFTCAP, HAS_SINK_LOGITS, WRITE_LSE,
            )  # fmt: skip
        else:
            _skip(args, num_tiles, tile_count, item_count, WG, C)
        index = receive_item(next_ring, item_count)
        tile_count += num_tiles
        item_count += 1

    tma.store_wait(0)
    if WG == 0:
        named_barrier("sync", FIRST_TURN)  # matches the last arrival of the other consumer


@gluon.jit(
    do_not_specialize=[
        "stride_sb", "num_items", "num_packs", "total_packs", "group", "section", "whole", "q_len", "kv_len",
        "window",
    ]
)  # fmt: skip
def prefill_hopper_kernel(
    q_desc,  # (batch, num_kv_heads, q_len, group, head_dim), boxes of 64 / pack queries and pack heads
    k_desc,  # (batch, num_kv_heads, kv_len, head_dim), boxes of BLOCK_N keys; or the pages, boxes of 64 columns
    v_desc,  # (batch, num_kv_heads, kv_len, value_dim), likewise
    out_desc,  # (batch, num_kv_heads, q_len, group, value_dim), boxes as of q_desc, written
    Lse,  # (batch, num_heads, q_len), fp32, written with WRITE_LSE
    Workspace,  # (floats,), fp32: acc (shares, 128, BLOCK_DV), then m and l (shares, 128, 2), written with split
    Spans,  # (batch, 1, 1 or 2, integers), int32
    SinkLogits,  # (num_heads,), read with HAS_SINK_LOGITS
    Counters,  # (2,), int32: the next item, and programs that have ended; 0 between launches
    Pages,  # (batch, kv_len / page), int32, or None
    stride_sb, num_items, num_packs, total_packs, group, section, whole, q_len, kv_len, window, scale_log2, cap_log2,
    C: gl.constexpr, HAS_WORDS: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINK_LOGITS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):  # fmt: skip
    if C.split:
        let_next_begin()
    q_ring, k_ring, v_ring, o_smem, next_ring = shared_memory(q_desc, k_desc, v_desc, out_desc, C)
    sizes = (stride_sb, num_items, num_packs, total_packs, group, section, whole, q_len, kv_len, window)
    loads = (q_desc, k_desc, v_desc, Spans, Counters, Pages, q_ring, k_ring, v_ring, next_ring, sizes)
    shared = (out_desc, Lse, Workspace, Spans, SinkLogits, q_ring, k_ring, v_ring, o_smem, next_ring, sizes, scale_log2, cap_log2)
    gl.warp_specialize(
        [
            (_consume, (shared, 0, C, HAS_WORDS, IS_CAUSAL, HAS_SOFTCAP, HAS_SINK_LOGITS, WRITE_LSE)),
            (_consume, (shared, 1, C, HAS_WORDS, IS_CAUSAL, HAS_SOFTCAP, HAS_SINK_LOGITS, WRITE_LSE)),
            (_produce, (loads, C, IS_CAUSAL)),
        ],
        # Warps, and registers per thread, of the second consumer and the producer. The first consumer gets the rest, also 240.
        [4, 1],
        [240, 24],
    )
