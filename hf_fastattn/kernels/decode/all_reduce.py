"""The sum of a tensor over the ranks of a decode graph, on GPUs that write to each other's memory: device functions.

    total = sum over the ranks of x, in their order

Each program has a block of rows. It writes the block to a slot of its own in the memory of every other rank, reads those of
the others in its own memory until they have come, and adds them. The time is one write between GPUs, and `let_next_begin`
comes before it. Of many rows on more than two ranks the links limit the time: each block is added by one rank, which writes
the sum to the others, so that each rank writes about 2 (N - 1) / N of its rows instead of N - 1 times all of them.

Data and flag are one word of 8 bytes, which a GPU writes at once: 4 bytes of the block, and the number of the exchange. So no
fence is between them, and no order of the words matters. Two slots alternate: exchange n + 2 of a program writes the slot of
exchange n. It begins after the program has read exchange n + 1, which the other rank sends only after it has read exchange n,
or which a rank sends that has heard so from the other. Numbers only increase, and are never reset.

All ranks must run the same launches in the same order, at most one at a time. A launch has at most PROGRAMS programs, so that
all of them run at once. If a rank does not come within LIMIT checks, of at least 0.3 us, the kernel stops with an error.
Before that, the host has ended the call (`patches/ranks/exchange.py`).

Rounds: the sum, which is fp32, so all ranks have the same bits. Limits: `Peers.why_not`. Oracle: a sum in the order of the
ranks.

Source: the one-shot and two-shot all-reduce of NVIDIA, "TensorRT-LLM" (custom all-reduce), 2024; words with flags: the
protocol "LL" of NVIDIA, "NCCL".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import checks

PROGRAMS = 64
SLOTS = tl.constexpr(PROGRAMS)  # blocks of a rank in the memory of another, one for each program
STOP_BYTES = 16
HEAD = tl.constexpr(STOP_BYTES)  # the memory begins with an int32, which is not 0 after a failure
LIMIT = (1 << 31) - 1  # checks of a block, the most that an int32 counts
MIN_BLOCK = 1024  # elements: short rows share a program
MANY_BYTES = 256 << 10  # of a sum over more than two ranks, from which on one rank adds each block


@dataclass(frozen=True)
class Peers:
    """Memory of several ranks, which all of them can write.

    memory: uint8, that of this rank, zeroed before any rank used it. addresses: int64 (world,), those of all ranks' memory as
    this rank sees them. counts: int32 (PROGRAMS,), zeroed, the exchanges of each program. block: bytes of a program's
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
            self.memory[:STOP_BYTES].view(torch.int32).fill_(1)

    def why_not(self, x: torch.Tensor) -> str | None:
        """The reason why this tensor cannot be summed in this memory, or None."""
        size = x.shape[-1] if x.dim() else 0
        if not size or x.dtype not in checks.DTYPES or size * x.element_size() % 4:
            return f"x is {tuple(x.shape)} of {x.dtype}; rows must be a multiple of 4 bytes."
        if x.numel() > PROGRAMS * size or block_bytes(size, x.dtype) > self.block:
            return f"x is {tuple(x.shape)}; the memory has room for {PROGRAMS} rows of {self.block} bytes."
        return checks.why_not_inference(x, self.memory)


def block_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of a program's block for rows of so many elements."""
    return -(max(size, MIN_BLOCK) * dtype.itemsize // -16) * 16


def memory_bytes(world: int, block: int) -> int:
    """Bytes of memory that each of `world` ranks needs for blocks of so many bytes."""
    return STOP_BYTES + 2 * world * PROGRAMS * 2 * block


def heads_of_a_block(total: int, head_bytes: int, block: int) -> int:
    """The number of heads that a program exchanges at once: as few as let all programs work, if a block has room for them."""
    wanted = 1 << (-(total // -PROGRAMS) - 1).bit_length()
    return min(wanted, 1 << (block // head_bytes).bit_length() - 1)


@triton.jit
def _stop():
    """End the kernel with an error."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _words_at(X, address):
    """A pointer to words of 8 bytes. Relative to X, an aligned pointer, so that 16 bytes are accessed at once."""
    words = X.to(tl.pointer_type(tl.int64), bitcast=True)
    return words + tl.multiple_of((address - X.to(tl.int64, bitcast=True)) // 8, 2)


@triton.jit
def _place(x, rows, size):
    """The places of the words for x in a block, and their mask, in one dimension. size: 4 bytes in a row of the block."""
    WIDTH: tl.constexpr = x.shape[-1] * x.dtype.primitive_bitwidth // 32
    offs = tl.arange(0, x.numel * x.dtype.primitive_bitwidth // 32)
    row, column = offs // WIDTH, offs % WIDTH
    return row * size + column, (row < rows) & (column < size)


@triton.jit
def _pack(x):
    """The elements of x as int32, 4 bytes each, in one dimension."""
    if x.dtype.primitive_bitwidth == 32:
        packed = tl.reshape(x, (x.numel,)).to(tl.int32, bitcast=True)
    else:
        even, odd = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.numel // 2, 2)))
        packed = (even.to(tl.int32) & 0xFFFF) | (odd.to(tl.int32) << 16)
    return packed


@triton.jit
def _unpack(packed, x):
    """The inverse of `_pack`, for a tensor of x's shape and dtype."""
    if x.dtype.primitive_bitwidth == 32:
        unpacked = tl.reshape(packed.to(x.dtype, bitcast=True), x.shape)
    else:
        both = tl.join(packed.to(tl.int16), (packed >> 16).to(tl.int16))
        unpacked = tl.reshape(both, x.shape).to(x.dtype, bitcast=True)
    return unpacked


@triton.jit
def _block_of(rank, number, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """The word at which the memory of a rank has the block that `rank` writes for this program."""
    return HEAD // 8 + (((number & 1) * WORLD + rank) * SLOTS + tl.program_id(0)).to(tl.int64) * (BLOCK // 4)


@triton.jit
def send_to(rank, x, X, rows, size, first, Addresses, number, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Write x to one rank, which may be this one, from the word `first` of the block on. Other arguments as in `send`."""
    word = (_pack(x).to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    place, inside = _place(x, rows, size)
    words = _words_at(X, tl.load(Addresses + rank)) + _block_of(RANK, number, WORLD, BLOCK)
    tl.store(words + first + place, word, mask=inside)


@triton.jit
def send(x, X, rows, size, Addresses, number, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Write x to all other ranks.

    x: (rows, columns) or (columns,), more than the block has. X: an aligned pointer of any type. rows: of the block. size:
    4 bytes in each row. number: that of the exchange in this program. Addresses and the constants: those of `Peers`.
    """
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            send_to(rank, x, X, rows, size, 0, Addresses, number, RANK, WORLD, BLOCK)


@triton.jit
def _when_come(words, inside, number, stop, LIMIT: tl.constexpr):
    """The words, when all of them have come."""
    word = tl.load(words, mask=inside, other=0, volatile=True)
    late = tl.max((inside & ((word >> 32).to(tl.int32) != number)).to(tl.int32))
    checks = 0
    while late > 0:
        word = tl.load(words, mask=inside, other=0, volatile=True)
        late = tl.max((inside & ((word >> 32).to(tl.int32) != number)).to(tl.int32))
        checks += 1
        if tl.load(stop, volatile=True) != 0:
            late = 0
        if checks == LIMIT:
            _stop()
    return word


@triton.jit
def receive(
    x, X, rows, size, Addresses, number, rank,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """What `rank` has sent, when it has come. Arguments as in `send`; x: a tensor of the same shape and dtype."""
    here = tl.load(Addresses + RANK)
    place, inside = _place(x, rows, size)
    words = _words_at(X, here) + _block_of(rank, number, WORLD, BLOCK) + place
    word = _when_come(words, inside, number, here.to(tl.pointer_type(tl.int32)), LIMIT)
    return _unpack(word.to(tl.int32), x)


@triton.jit
def receive_every(
    x, X, rows, size, first, Addresses, number,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """What each rank has sent by `send_to`, this one too, when all of it has come.

    x: a tensor of the dtype of what is sent, and of its shape behind a dimension for the ranks, of a power of two.
    """
    PART: tl.constexpr = x.numel // x.shape[0] * x.dtype.primitive_bitwidth // 32
    WIDTH: tl.constexpr = x.shape[-1] * x.dtype.primitive_bitwidth // 32
    offs = tl.arange(0, x.shape[0] * PART)
    rank, place = offs // PART, offs % PART
    row, column = place // WIDTH, place % WIDTH
    inside = (rank < WORLD) & (row < rows) & (column < size)
    here = tl.load(Addresses + RANK)
    words = _words_at(X, here) + _block_of(rank, number, WORLD, BLOCK) + first + row * size + column
    word = _when_come(words, inside, number, here.to(tl.pointer_type(tl.int32)), LIMIT)
    return _unpack(word.to(tl.int32), x)


@triton.jit
def _sum_of_parts(
    x, X, rows, size, Addresses, number, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr
):
    """x and what the other ranks have sent, added in the order of the ranks."""
    total = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            part = x
        else:
            part = receive(x, X, rows, size, Addresses, number, rank, RANK, WORLD, BLOCK, LIMIT)
        total += part.to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def sum_over_ranks(
    x, X, rows, size, Addresses, Counts,
    TWICE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The sum of x over the ranks, rounded to x's dtype. Called once in a launch, after its wait. Arguments as in `receive`.

    TWICE: whether one rank adds a block and sends the sum to the others, two exchanges instead of one.
    """
    number = tl.load(Counts + tl.program_id(0)) + 1
    if TWICE:
        adds = tl.program_id(0) % WORLD
        if adds == RANK:
            total = _sum_of_parts(x, X, rows, size, Addresses, number, RANK, WORLD, BLOCK, LIMIT)
            send(total, X, rows, size, Addresses, number + 1, RANK, WORLD, BLOCK)
        else:
            send_to(adds, x, X, rows, size, 0, Addresses, number, RANK, WORLD, BLOCK)
            total = receive(x, X, rows, size, Addresses, number + 1, adds, RANK, WORLD, BLOCK, LIMIT)
        number += 1
    else:
        send(x, X, rows, size, Addresses, number, RANK, WORLD, BLOCK)
        total = _sum_of_parts(x, X, rows, size, Addresses, number, RANK, WORLD, BLOCK, LIMIT)
    tl.store(Counts + tl.program_id(0), number)
    return total
