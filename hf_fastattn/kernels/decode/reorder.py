"""Reorder: permutes the rows of many K and V buffers in place, in one launch, as beam search does between two steps.

    x[r, :, j] = x[index[r], :, j] for every row r and every slot j < live

A program reads its slots of all rows before it writes them, and slots belong to one program each. Rows that stay are neither
read nor written. Rounds: nothing. Limits: `fits`. Oracle: `x[index]` of torch.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch, tables

MAX_VALUES = 1 << 14  # of all rows that a program holds
_INTS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def fits(like: torch.Tensor) -> bool:
    """Whether the kernel supports buffers of this kind: a few slots of all rows have to fit into the registers of a program."""
    if triton is None or not (INTERPRETED or gpu.on_gpu(like.device)):
        return False
    return like.stride(3) == 1 and _block(like.shape[0]) * _block(like.shape[3]) <= MAX_VALUES


def _block(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def reorder(addresses: torch.Tensor, like: torch.Tensor, live: int, index: torch.Tensor) -> None:
    """Permute the rows of buffers in place.

    addresses: int64 (n,) on the device, the addresses of n buffers of the shape, strides and dtype of `like`, which is (rows,
    num_kv_heads, capacity, head_dim) with stride(-1) == 1. live: the number of slots to permute. index: int (rows,), for each row
    the row that it becomes. `fits(like)` must hold.
    """
    rows, heads, _, head_dim = like.shape
    block_r, block_d = _block(rows), _block(head_dim)
    block_n = max(1, min(64, MAX_VALUES // (block_r * block_d)))
    launch.start(
        reorder_kernel,
        (triton.cdiv(live, block_n), heads, len(addresses)),
        addresses,
        index.contiguous(),  # beam search passes a column of its indices
        live,
        rows,
        like.stride(0),
        like.stride(1),
        like.stride(2),
        HEAD_DIM=head_dim,
        INT=getattr(tl, _INTS[like.element_size()]),
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        ALIGN=tables.alignment(like),
        num_warps=8,
    )


if triton is not None:
    from ..device.tile import aligned_strides

    @triton.jit(do_not_specialize=["live", "rows"])
    def reorder_kernel(
        Addresses,  # (buffers,), int64: addresses of (rows, num_kv_heads, capacity, head_dim), read and written
        Index,  # (rows,), int: the row that each row becomes
        live, rows, stride_b, stride_h, stride_n,
        HEAD_DIM: tl.constexpr, INT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
        ALIGN: tl.constexpr,
    ):  # fmt: skip
        """One program per BLOCK_N slots of one head of one buffer."""
        buffer = tl.load(Addresses + tl.program_id(2)).to(tl.pointer_type(INT))
        buffer = tl.multiple_of(buffer, 16)  # memory is allocated so
        stride_b, stride_h, stride_n = aligned_strides(stride_b, stride_h, stride_n, ALIGN)
        offs_r = tl.arange(0, BLOCK_R)
        slots = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        source = tl.load(Index + offs_r, mask=offs_r < rows, other=0).to(tl.int64)
        moves = (offs_r < rows) & (source != offs_r)
        inside = (slots < live)[:, None] & (offs_d < HEAD_DIM)[None, :]
        mask = moves[:, None, None] & inside[None, :, :]
        tile = tl.program_id(1).to(tl.int64) * stride_h + (slots.to(tl.int64) * stride_n)[:, None] + offs_d[None, :]
        states = tl.load(buffer + (source * stride_b)[:, None, None] + tile[None, :, :], mask=mask)
        tl.debug_barrier()  # other threads may still read what is written next
        tl.store(buffer + (offs_r.to(tl.int64) * stride_b)[:, None, None] + tile[None, :, :], states, mask=mask)
