"""The columns of a matrix that several ranks hold in parts, on GPUs that write to each other's memory (`all_reduce.py`).

    out[:, i * size : (i + 1) * size] = x of rank i

A program takes one block of x after another, with an exchange for each. Rounds: nothing. Limits: `why_not`. Oracle:
`torch.cat`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .all_reduce import LIMIT, PROGRAMS, Peers, receive, send

VECTOR = 16  # bytes that are accessed at once; rows of x must be a multiple


@triton.jit(do_not_specialize=["rows"])
def all_gather_kernel(
    X,  # (rows, size)
    Out,  # (rows, WORLD * size), written
    Addresses,  # (WORLD,), int64: the memory of each rank, which is written and read
    Counts,  # (PROGRAMS,), int32: exchanges so far, read and written
    rows, size,
    RANK: tl.constexpr, WORLD: tl.constexpr, PEER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK: elements of a block, which is a part of a row."""
    offs = tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    number = tl.load(Counts + tl.program_id(0))
    blocks = tl.cdiv(size, BLOCK)
    for block in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        number += 1
        row, column = (block // blocks).to(tl.int64), block % blocks * BLOCK + offs
        mask = column < size
        x = tl.load(X + row * size + column, mask=mask, other=0.0)
        words = tl.multiple_of((size - block % blocks * BLOCK) * X.dtype.element_ty.primitive_bitwidth // 32, 4)
        send(x, X, 1, words, Addresses, number, RANK, WORLD, PEER_BLOCK)
        out = Out + row * size * WORLD + column
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                part = x
            else:
                part = receive(x, X, 1, words, Addresses, number, rank, RANK, WORLD, PEER_BLOCK, LIMIT)
            tl.store(out + rank * size, part, mask=mask)
    tl.store(Counts + tl.program_id(0), number)


def why_not(x: torch.Tensor, peers: Peers) -> str | None:
    """The reason why the parts of this tensor need another path, or None."""
    size = x.shape[-1] if x.dim() else 0
    if not x.numel() or x.dtype not in checks.DTYPES:
        return f"x is {tuple(x.shape)} of {x.dtype}."
    if size * x.element_size() % VECTOR or x.numel() >= 1 << 31:
        return f"x is {tuple(x.shape)}; its rows must be a multiple of {VECTOR} bytes."
    return checks.why_not_inference(x, peers.memory)


def all_gather(x: torch.Tensor, peers: Peers) -> torch.Tensor | None:
    """The columns of all ranks, in the order of the ranks; None if `why_not` gives a reason.

    x: (..., size), of the same shape on all ranks. Returns (..., world * size). All ranks must call it at the same place.
    """
    if why_not(x, peers) is not None:
        return None
    out = x.new_empty(*x.shape[:-1], peers.world * x.shape[-1])
    _prepare((x, out, peers.addresses, peers.counts), peers.rank, peers.world, peers.block)(x, out, peers.addresses, peers.counts)
    return out


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...], rank: int, world: int, peer_block: int) -> launch.Launch:
    x = tensors[0]
    size = x.shape[-1]
    rows = x.numel() // size
    block = 1 << (peer_block // x.element_size()).bit_length() - 1
    options: dict[str, Any] = {"RANK": rank, "WORLD": world, "PEER_BLOCK": peer_block, "BLOCK": block, "LIMIT": LIMIT}
    return launch.Launch(
        all_gather_kernel,
        (min(PROGRAMS, rows * triton.cdiv(size, block)),),
        rows=rows,
        size=size,
        **options,
        **early(x.device),
        num_warps=max(2, min(16, block // 512)),
    )
