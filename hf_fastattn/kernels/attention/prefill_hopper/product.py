"""The two matrix products of a tile, in parts.

Tensors have a power of two columns, but head_dim may be any multiple of 8. In shared memory a head is in a buffer of a power of
two columns, which TMA pads with zeros. A product uses the columns of the head, rounded up to a multiple of 16, in parts of a
power of two columns: the scores are a sum over the parts of K, and the output has an accumulator for each part of V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .tile import operand


@gluon.constexpr_function
def num_parts(width):
    """The number of powers of two that sum to `width`."""
    return width.bit_count()


@gluon.constexpr_function
def _part(width, i):
    """(first column, columns) of part i, the widest first."""
    begin = 0
    for _ in range(i):
        begin += 1 << ((width - begin).bit_length() - 1)
    return begin, 1 << ((width - begin).bit_length() - 1)


@gluon.constexpr_function
def _layout(width, i):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _part(width, i)[1], 16])


@gluon.constexpr_function
def _operand_layout(width, i):
    return gl.DotOperandLayout(0, _layout(width, i), 2)


@gluon.constexpr_function
def _begin(width, i):
    return _part(width, i)[0]


@gluon.constexpr_function
def _columns(width, i):
    return _part(width, i)[1]


@gluon.jit
def _part_of(smem, WIDTH: gl.constexpr, I: gl.constexpr):
    """Part I of the columns of a buffer."""
    if smem.shape[1] == WIDTH:
        return smem
    else:
        return smem.slice(_begin(WIDTH, I), _columns(WIDTH, I), dim=1)


@gluon.jit
def product(q, k, zeros, WIDTH: gl.constexpr):
    """Issues Q K^T: one result to wait for, whatever the number of parts."""
    s = warpgroup_mma(_part_of(q, WIDTH, 0), _part_of(k, WIDTH, 0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, num_parts(WIDTH)):
        s = warpgroup_mma(_part_of(q, WIDTH, i), _part_of(k, WIDTH, i).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def zero_columns(WIDTH: gl.constexpr):
    """Zeros as an output [64, WIDTH], in parts."""
    acc = ()
    for i in gl.static_range(num_parts(WIDTH)):
        acc += (gl.zeros([64, _columns(WIDTH, i)], gl.float32, _layout(WIDTH, i)),)  # type: ignore[assignment]
    return acc


@gluon.jit
def add_products(p, v, acc, WIDTH: gl.constexpr):
    """Issues acc + P V, one product for each part."""
    tokens = ()
    for i in gl.static_range(num_parts(WIDTH)):
        weights = operand(p, v.dtype, _operand_layout(WIDTH, i))
        tokens += (warpgroup_mma(weights, _part_of(v, WIDTH, i), acc[i], is_async=True),)  # type: ignore[assignment]
    return tokens


@gluon.jit
def wait_for(tokens):
    """The parts of the output once all products are done."""
    if len(tokens) == 1:
        return (warpgroup_mma_wait(0, tokens),)
    else:
        return warpgroup_mma_wait(0, tokens)


@gluon.jit
def scaled(acc, factor, dtype: gl.constexpr):
    """acc with every row multiplied by its factor, in parts of this dtype."""
    out = ()
    for i in gl.static_range(len(acc)):
        x = acc[i]
        out += ((x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]).to(dtype),)  # type: ignore[assignment]
    return out


@gluon.jit
def store_parts(out, smem, WIDTH: gl.constexpr):
    """Write the parts of the output to a buffer."""
    for i in gl.static_range(len(out)):
        _part_of(smem, WIDTH, i).store(out[i])


@gluon.constexpr_function
def block_dv(width):
    """Columns of an output in the workspace."""
    return 1 << (width - 1).bit_length()


@gluon.jit
def store_partial(acc, m, l, Workspace, stats_start, slot, first_row, exists, WIDTH: gl.constexpr, WORKSPACE_M: gl.constexpr):
    """Store 64 rows of a partial, from `first_row` on, like `device.merge.store_partial`; exists [64]: which rows are queries."""
    Stats = Workspace + stats_start + 2 * (slot * WORKSPACE_M + first_row + gl.arange(0, 64, m.type.layout))
    gl.store(Stats, m, mask=exists)
    gl.store(Stats + 1, l, mask=exists)
    for i in gl.static_range(len(acc)):
        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, _layout(WIDTH, i)))
        cols = _begin(WIDTH, i) + gl.arange(0, _columns(WIDTH, i), gl.SliceLayout(0, _layout(WIDTH, i)))
        ptrs = Workspace + (slot.to(gl.int64) * WORKSPACE_M + rows)[:, None] * block_dv(WIDTH) + cols[None, :]
        gl.store(ptrs, acc[i], mask=gl.convert_layout(exists, gl.SliceLayout(1, _layout(WIDTH, i)))[:, None])
