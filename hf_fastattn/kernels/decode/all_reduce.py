"""The sum of a tensor over the ranks of a decode graph, on GPUs that write to each other's memory.

Each program has a block of rows. It writes the block to a slot of its own in the memory of every other rank, sets a flag there,
waits for the flags of the others in its own memory, and adds the blocks in the order of the ranks, in fp32. So all ranks have
the same bits. The time is one write between GPUs, and `let_next_begin` comes before it: the next launch loads weights meanwhile.
`all_gather.py` exchanges blocks in the same way.

Two slots alternate. A rank that writes a slot for the third time has seen the flag of the second, which the other rank sets in a
launch after the one that has read the first. Flags are the numbers of the sums, which only increase, and are never reset.

All ranks must run the same launches in the same order, at most one at a time. A launch has at most PROGRAMS programs, so that all
of them run at once. If a rank does not come within some 20 minutes, the kernel stops with an error. Before that, the host has
ended the call (`patches/exchange.py`).

Source: the one-shot all-reduce of NVIDIA, "TensorRT-LLM" (custom all-reduce), 2024; for release and acquire between GPUs,
"PTX ISA", memory consistency model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import checks

PROGRAMS = 64
SLOTS = tl.constexpr(PROGRAMS)  # blocks of a rank in the memory of another, one for each program
FLAG_BYTES = 4
LIMIT = 1 << 30  # checks of a flag
AHEAD = 1 << 30  # how far flags are ahead after a failure
MIN_BLOCK = 1024  # elements: short rows share a program


@dataclass(frozen=True)
class Peers:
    """Memory of several ranks, which all of them can write.

    memory: uint8, that of this rank, zeroed before any rank used it. addresses: int64 (world,), those of all ranks' memory as
    this rank sees them. counts: int32 (PROGRAMS,), zeroed, the number of sums of each program. block: bytes of a program's
    block, a multiple of 16. stream: the one on which `release` writes. owner: an object to keep alive.
    """

    memory: torch.Tensor
    addresses: torch.Tensor
    counts: torch.Tensor
    rank: int
    world: int
    block: int
    stream: torch.cuda.Stream | None = None
    owner: object = None

    def release(self) -> None:
        """End all waits of this rank, now and later, after a failure. The sums are wrong from then on."""
        with torch.cuda.stream(self.stream):
            flags = self.memory[: flags_bytes(self.world)].view(torch.int32).view(PROGRAMS, self.world)
            torch.add(self.counts[:, None].expand_as(flags), AHEAD, out=flags)

    def why_not(self, x: torch.Tensor) -> str | None:
        """The reason why this tensor cannot be summed in this memory, or None."""
        size = x.shape[-1] if x.dim() else 0
        if not size or x.dtype not in checks.DTYPES:
            return f"x is {tuple(x.shape)} of {x.dtype}."
        if x.numel() > PROGRAMS * size or block_bytes(size, x.dtype) > self.block:
            return f"x is {tuple(x.shape)}; the memory has room for {PROGRAMS} rows of {self.block} bytes."
        return checks.why_not_inference(x, self.memory)


def block_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of a program's block for rows of so many elements."""
    return -(max(size, MIN_BLOCK) * dtype.itemsize // -16) * 16


def memory_bytes(world: int, block: int) -> int:
    """Bytes of memory that each of `world` ranks needs for blocks of so many bytes."""
    return flags_bytes(world) + 2 * world * PROGRAMS * block


def flags_bytes(world: int) -> int:
    """Bytes of the flags, with which the memory begins."""
    return PROGRAMS * world * FLAG_BYTES


@triton.jit
def _stop():
    """End the kernel with an error."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_for(flag, number, LIMIT: tl.constexpr):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    checks = 0
    while seen - number < 0:  # the other rank may already be one sum further
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        checks += 1
        if checks == LIMIT:
            _stop()


@triton.jit
def at_address(X, address):
    """A pointer of X's type to an address. Relative to X, so that 16 bytes are accessed at once."""
    SIZE: tl.constexpr = X.dtype.element_ty.primitive_bitwidth // 8
    return X + tl.multiple_of((address - X.to(tl.int64, bitcast=True)) // SIZE, 16 // SIZE)


@triton.jit
def exchange(
    x, X, offs, mask, Addresses, number, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr
):
    """Write x to all other ranks and wait for their blocks. Returns the address of the block of rank 0; rank i's is i *
    PROGRAMS * BLOCK bytes further.

    X: the pointer that x was loaded from. offs: the place of each element of x in the program's block. number: that of the
    exchange in this program. Addresses and the constants: those of `Peers`.
    """
    program = tl.program_id(0)
    here = tl.load(Addresses + RANK)
    first = SLOTS * WORLD * 4 + ((number & 1) * WORLD * SLOTS + program).to(tl.int64) * BLOCK
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            there = tl.load(Addresses + rank) + first + RANK * SLOTS * BLOCK
            tl.store(at_address(X, there) + offs, x, mask=mask)
    tl.debug_barrier()  # all threads have written before one of them sets a flag
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flags = tl.load(Addresses + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + program * WORLD + RANK, number, sem="release", scope="sys")
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            _wait_for(here.to(tl.pointer_type(tl.int32)) + program * WORLD + rank, number, LIMIT)
    tl.debug_barrier()
    return here + first


@triton.jit
def sum_over_ranks(
    x, X, offs, mask, Addresses, Counts, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr
):
    """The sum of x over the ranks, rounded to x's dtype. Called once in a launch, after its wait. Arguments as in `exchange`."""
    number = tl.load(Counts + tl.program_id(0)) + 1
    first = exchange(x, X, offs, mask, Addresses, number, RANK, WORLD, BLOCK, LIMIT)
    total = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            part = x
        else:
            theirs = at_address(X, first + rank * SLOTS * BLOCK) + offs
            part = tl.load(theirs, mask=mask, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(Counts + tl.program_id(0), number)
    return total.to(x.dtype)
