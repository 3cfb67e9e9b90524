"""Loads and stores of K and V in pages (`kernels.paged`), with the signatures in tile.py; one pair for each size of a page.

The page of a slot is Pages[row, slot // PAGE], int32, at row * (kv_len // PAGE) because kv_len is max_pages * PAGE.
"""

import triton
import triton.language as tl

from ..host import gpu

INTERPRETED = gpu.INTERPRETED  # the interpreter runs no assembly


@triton.jit
def page_at(ptr, INTERPRETED: tl.constexpr = INTERPRETED):
    """The numbers at `ptr`, all of which must be in the table: a number below 0 as 0.

    In assembly, because of loads whose address depends on a `tl.load` in the loop the compiler keeps half as many in flight.
    Pages do not change during a launch, and attention reads them after its wait.
    """
    if INTERPRETED:
        page = tl.load(ptr)
    else:
        page = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=True, pack=1)
    return tl.maximum(page, 0).to(tl.int64)


@triton.jit
def load(base, strides, first, offs_n, offs_d, mask, indices, extra, PAGE: tl.constexpr):
    """`tile.load_plain` from pages. `first` is a multiple of the size of the tile, or the tile within one page.

    So the pages of a tile are found by the place of a slot in it. Slots outside of the live ones are read as the nearest of
    these: no mask is needed against NaN, which takes more instructions for each slot.
    """
    row, _, _, kv_len = indices
    lo, last = extra[3], extra[4]
    table, page = extra[2] + row * (kv_len // PAGE), tl.minimum(tl.maximum(first // PAGE, lo // PAGE), last // PAGE)
    slots, in_tile = tl.minimum(tl.maximum(offs_n, lo - first), last - first), tl.arange(0, offs_n.shape[0])
    pages = page_at(table + page)
    if offs_n.shape[0] > PAGE:
        for i in tl.static_range(1, offs_n.shape[0] // PAGE):
            following = tl.minimum(tl.maximum(first // PAGE + i, lo // PAGE), last // PAGE)
            pages = tl.where(in_tile < i * PAGE, pages, page_at(table + following))
        ptrs = (base + pages * strides[0])[:, None] + ((slots & (PAGE - 1))[:, None] * strides[2] + offs_d[None, :])
    else:
        ptrs = base + (pages * strides[0] + (first - page * PAGE) * strides[2]) + (slots[:, None] * strides[2] + offs_d[None, :])
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store(
    k, v, bases, strides, slot, mask, indices, extra,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Nothing is written where the table has no page."""
    row, kv_head, _, kv_len = indices
    slot += 0 * kv_head  # the interpreter needs a block in a mask
    page = tl.load(extra[2] + row * (kv_len // PAGE) + slot // PAGE, mask=mask, other=-1).to(tl.int64)
    mask = mask & (page >= 0)
    offs_d = tl.arange(0, k.shape[1])[None, :]
    k_ptrs = bases[0] + page * strides[0][0] + (slot & (PAGE - 1)) * strides[0][2]
    v_ptrs = bases[1] + page * strides[1][0] + (slot & (PAGE - 1)) * strides[1][2]
    tl.store(k_ptrs + offs_d, k, mask=mask & (offs_d < HEAD_DIM))
    tl.store(v_ptrs + offs_d, v, mask=mask & (offs_d < VALUE_DIM))


# Written out, as Triton finds neither a function made by another one nor its constants.


@triton.jit
def load_16(base, strides, first, offs_n, offs_d, mask, indices, extra):
    return load(base, strides, first, offs_n, offs_d, mask, indices, extra, 16)


@triton.jit
def store_16(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 16)


@triton.jit
def load_32(base, strides, first, offs_n, offs_d, mask, indices, extra):
    return load(base, strides, first, offs_n, offs_d, mask, indices, extra, 32)


@triton.jit
def store_32(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 32)


@triton.jit
def load_64(base, strides, first, offs_n, offs_d, mask, indices, extra):
    return load(base, strides, first, offs_n, offs_d, mask, indices, extra, 64)


@triton.jit
def store_64(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 64)


@triton.jit
def load_128(base, strides, first, offs_n, offs_d, mask, indices, extra):
    return load(base, strides, first, offs_n, offs_d, mask, indices, extra, 128)


@triton.jit
def store_128(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 128)


@triton.jit
def load_256(base, strides, first, offs_n, offs_d, mask, indices, extra):
    return load(base, strides, first, offs_n, offs_d, mask, indices, extra, 256)


@triton.jit
def store_256(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 256)
