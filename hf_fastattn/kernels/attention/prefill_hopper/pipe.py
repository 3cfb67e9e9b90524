"""Communication between the warps of the Hopper prefill kernel: rings of buffers, the next item, turns at the tensor cores.

A ring is (buffers, full, empty) in shared memory, with two mbarriers per buffer: full[i] completes when TMA has written buffer i,
empty[i] when its readers have released it. Use n of a ring of STAGES buffers is of buffer n % STAGES: its readers wait for phase
n // STAGES & 1 of full, its writer for the other phase of empty, because all buffers are empty at first.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.9 renamed these; both names are the same operation.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
warpgroup_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

SWIZZLED = 64  # columns of 16 bits that are swizzled together: a buffer has them one after the other, of all rows each
CONSUMERS = 2  # warpgroups, of 64 query rows each
FIRST_TURN = 8  # named barriers for the consumers' turns; Triton numbers its own from 0, one or two per partition


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """A full and an empty barrier for each of COUNT buffers, in one array, because its address occupies a register."""
    return gl.allocate_shared_memory(gl.int64, [2 * COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def full(ring, i):
    """The full barrier of buffer i."""
    _buffers, barriers = ring
    return barriers.index(2 * i)


@gluon.jit
def empty(ring, i):
    """The empty barrier of buffer i."""
    _buffers, barriers = ring
    return barriers.index(2 * i + 1)


@gluon.constexpr_function
def _buffers(box, count):
    """The shape of `count` boxes."""
    return [count, *box]


@gluon.constexpr_function
def columns(head_dim):
    """Columns of the buffers for this head_dim."""
    return max(SWIZZLED, 1 << (head_dim - 1).bit_length())


@gluon.constexpr_function
def _tile_box(desc, width, C):
    """(the shape of a tile of K or V, its layout), `width` columns of which are multiplied."""
    if not C.page:
        return desc.block_shape, desc.layout
    box = [1, 1, C.BLOCK_N, columns(width)]
    return box, gl.NVMMASharedLayout.get_default_for(box, desc.dtype)


@gluon.jit
def _tiles(desc, WIDTH: gl.constexpr, C: gl.constexpr):
    """The buffers of K or V."""
    box: gl.constexpr = _tile_box(desc, WIDTH, C)
    return gl.allocate_shared_memory(desc.dtype, _buffers(box[0], C.stages), box[1])


@gluon.jit
def shared_memory(
    q_desc, k_desc, v_desc, out_desc,
    C: gl.constexpr, CONSUMERS: gl.constexpr = CONSUMERS,
):  # fmt: skip
    """The rings of Q (with one buffer per consumer for an item), K and V, the buffers of O, and the ring of the next item.

    The last has one buffer, of one integer.
    """
    STAGES: gl.constexpr = C.stages
    Q_BUFFERS: gl.constexpr = CONSUMERS * C.q_stages
    q_smem = gl.allocate_shared_memory(q_desc.dtype, _buffers(q_desc.block_shape, Q_BUFFERS), q_desc.layout)
    k_smem = _tiles(k_desc, C.k_width, C)
    v_smem = _tiles(v_desc, C.v_width, C)
    o_smem = q_smem
    if C.own_out:
        o_smem = gl.allocate_shared_memory(out_desc.dtype, _buffers(out_desc.block_shape, CONSUMERS), out_desc.layout)
    next_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring, k_ring, v_ring = (q_smem, _barriers(Q_BUFFERS)), (k_smem, _barriers(STAGES)), (v_smem, _barriers(STAGES))
    next_ring = (next_smem, _barriers(1))
    for i in gl.static_range(Q_BUFFERS):
        mbarrier.init(full(q_ring, i), count=1)
        mbarrier.init(empty(q_ring, i), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full(k_ring, stage), count=1)
        mbarrier.init(empty(k_ring, stage), count=CONSUMERS)
        mbarrier.init(full(v_ring, stage), count=1)
        mbarrier.init(empty(v_ring, stage), count=CONSUMERS)
    mbarrier.init(full(next_ring, 0), count=1)
    mbarrier.init(empty(next_ring, 0), count=CONSUMERS)
    fence_async_shared()
    return q_ring, k_ring, v_ring, o_smem, next_ring


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    return n % STAGES


@gluon.jit
def phase_of(n, STAGES: gl.constexpr):
    return (n // STAGES) & 1


@gluon.constexpr_function
def _rows_and_columns(box):
    return [math.prod(box[:-1]), box[-1]]


@gluon.jit
def matrix(buffer):
    """[rows, columns] of a buffer that TMA sees as a box."""
    return buffer.reshape(_rows_and_columns(buffer.shape))


@gluon.jit
def await_empty(desc, ring, i, phase, BOXES: gl.constexpr = 1):
    """Wait for this phase of buffer i's empty barrier; its full barrier then expects boxes of `desc`."""
    mbarrier.wait(empty(ring, i), phase)
    mbarrier.expect(full(ring, i), BOXES * desc.block_type.nbytes)


@gluon.jit
def numbers_of(Pages, start, pages, C: gl.constexpr):
    """The numbers of the pages of the tile that begins at slot `start`, for `load_pages`. Pages: the row's table, of so many
    pages. A page that does not exist is read as any other: no query sees it."""
    at = start // C.page + gl.arange(0, C.BLOCK_N // C.box, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.maximum(gl.load(Pages + gl.maximum(gl.minimum(at, pages - 1), 0)), 0)


@gluon.jit
def load_pages(desc, ring, i, phase, numbers, kv_head, slot, C: gl.constexpr, SWIZZLED: gl.constexpr = SWIZZLED):
    """Wait for buffer i and load a tile from pages, of which it has whole ones, or a part of one from this slot on."""
    smem, _barriers = ring
    tile = smem.index(i)
    COLUMNS: gl.constexpr = tile.shape[3] // SWIZZLED
    BOXES: gl.constexpr = C.BLOCK_N // C.box
    await_empty(desc, ring, i, phase, COLUMNS * BOXES)
    boxes = reinterpret(tile, desc.dtype, _buffers(desc.block_shape, COLUMNS * BOXES), desc.layout)
    which = gl.arange(0, BOXES, numbers.type.layout)
    for box in range(BOXES):
        page = gl.max(gl.where(which == box, numbers, 0), 0)
        for part in gl.static_range(COLUMNS):
            tma_load(desc, [page, kv_head, slot, part * SWIZZLED], full(ring, i), boxes.index(part * BOXES + box))


@gluon.jit
def send_item(next_ring, value, item_count):
    """The producer sends the next item to the consumers."""
    smem, _barriers = next_ring
    mbarrier.wait(empty(next_ring, 0), (item_count & 1) ^ 1)
    smem.store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)
    warpgroup_barrier()
    mbarrier.arrive(full(next_ring, 0), count=1)


@gluon.jit
def receive_item(next_ring, item_count):
    """A consumer receives the next item."""
    smem, _barriers = next_ring
    mbarrier.wait(full(next_ring, 0), item_count & 1)
    value = gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    warpgroup_barrier()
    mbarrier.arrive(empty(next_ring, 0), count=1)
    return value


@gluon.jit
def reread(x):
    """x, without what the compiler knows of it: values computed again from it are not held in registers in between."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin():
    """`overlap.let_next_begin` in Gluon. The launch that merges shares waits for this one."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _bar(op, barrier):
    return f"bar.{op} {barrier}, {128 * CONSUMERS}; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(OP: gl.constexpr, BARRIER: gl.constexpr):
    """`bar.sync` or `bar.arrive` at a barrier of both consumers: one waits, the other arrives."""
    gl.inline_asm_elementwise(_bar(OP, BARRIER), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
