"""The output of a whole block of query rows, as a consumer stores it. Shares are stored by `product.store_partial`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .item import heads_and_queries
from .pipe import empty, matrix, tma_store, warpgroup_barrier
from .product import store_parts
from .tile import normaliser


@gluon.jit
def normaliser_of(
    args, indices, m, l,
    C: gl.constexpr, HAS_SINK_LOGITS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """The factor of each row of the output. The lse is stored."""
    _out_desc, Lse, _Workspace, _Spans, SinkLogits, _q_ring, _k_ring, _v_ring, _o_smem, _next_ring, sizes, _scale, _cap = args
    _stride_sb, _num_items, num_packs, _total_packs, group, _section, _whole, q_len, _kv_len, _window = sizes
    _first, _kv_head, _group_head, row = indices
    s_rows: gl.constexpr = m.type.layout
    heads, offs_m, exists = heads_and_queries(indices, sizes, C, s_rows)
    inverse, lse = normaliser(m, l, SinkLogits + heads, HAS_SINK_LOGITS)
    if WRITE_LSE:
        num_heads = num_packs // ((group + C.pack - 1) // C.pack) * group
        gl.store(Lse + (row.to(gl.int64) * num_heads + heads) * q_len + offs_m, lse, mask=exists)
    return inverse


@gluon.jit
def store_out(args, indices, out, q_buffer, WG: gl.constexpr, C: gl.constexpr):
    """Store the rows of consumer WG by TMA, through its own buffer or that of Q, which is released."""
    out_desc, _Lse, _Workspace, _Spans, _SinkLogits, q_ring, _k_ring, _v_ring, o_smem, _next_ring, _sizes, _scale, _cap = args
    first, kv_head, group_head, row = indices
    if C.own_out:
        tma.store_wait(0)  # the store of the previous item has read the buffer
    o_buffer = WG if C.own_out else q_buffer
    warpgroup_barrier()
    store_parts(out, matrix(o_smem.index(o_buffer)), C.v_width)
    fence_async_shared()
    warpgroup_barrier()
    tma_store(out_desc, [row, kv_head, first, group_head, 0], o_smem.index(o_buffer))
    if not C.own_out:
        tma.store_wait(0)
        warpgroup_barrier()
        mbarrier.arrive(empty(q_ring, q_buffer), count=1)
