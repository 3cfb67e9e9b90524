"""Linear layers on 2 to 64 tokens, several weights together on up to 128: each weight is read once, at memory bandwidth.

    y = x W^T + b   for up to four weights in one launch, or for a gated MLP   y = act(x W^T) * (x U^T)

A tile is BLOCK_N rows of a weight, in the gated form half of W and half the same rows of U, and x^T is the second operand.
Each tile is divided into equal splits of the in_features. The program that finishes a tile last adds their sums in the order
of the splits, so the result does not depend on which program that is. A row of it depends on its row of x, the weights, the
GPU and the numbers of tokens and features, which select the splits.

Rounds: as in `linear`. Limits: in_features a multiple of MULTIPLE; `linear.why_not`. Oracle: `torch.nn.functional.linear` in
float64.

Source: split-K as in Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on
the GPU", 2023, section 3.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from ..host import gpu, launch
from ..host.counters import COUNTERS, counters_of
from ..host.overlap import early, let_next_begin, request, wait_for_inputs

MAX_TOKENS = 64
MAX_FUSED_TOKENS = 128  # of several weights in one launch on Hopper; with one weight cuBLAS is faster
MAX_WEIGHTS = 4
MULTIPLE = 16  # in_features must be a multiple, so that 16 bytes are loaded at once
Tensors = tuple[torch.Tensor, ...]


class Start(Protocol):
    """Launches a kernel for inputs of one layout. It writes outs, and after, the result of the operation on outs[0]."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: Tensors,
        biases: Tensors,
        outs: Tensors,
        residual: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> None: ...


class Tile(NamedTuple):
    """Rows of weights, tokens and in_features of a tile; splits of the in_features, each of which has a program."""

    BLOCK_N: int
    BLOCK_M: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    splits: int


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """The activation of fp32 values: "relu", "silu", "gelu" or "gelu_tanh"."""
    if ACT == "relu":
        act = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu":
        act = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # tanh(u) = 2 sigmoid(2 u) - 1
        tl.static_assert(ACT == "gelu_tanh")
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate / (1.0 + tl.exp(-2.0 * u))
    return act


@triton.jit
def followed(y, residual, factor, THEN: tl.constexpr):
    """In fp32 the sum of rounded values with a residual ("add"), their product with a factor ("mul"), or their activation."""
    if THEN == "add":
        after = residual.to(tl.float32) + y.to(tl.float32)
    elif THEN == "mul":
        after = y.to(tl.float32) * factor
    else:
        after = activated(y.to(tl.float32), THEN)
    return after


@triton.jit
def distance(a, b):
    """The number of 16-bit elements from pointer a to pointer b."""
    return (b.to(tl.int64, bitcast=True) - a.to(tl.int64, bitcast=True)) // 2


@triton.jit
def of_tile(tile, begins, values, PARTS: tl.constexpr):
    """The value for the weight of a tile. begins: the first tiles of the second weight to the fourth; values: of all four."""
    value = values[0]
    for i in tl.static_range(1, PARTS):
        value = tl.where(tile < begins[i - 1], value, values[i])
    return value


@triton.jit
def offset(tile, begins, A, A1, A2, A3, PARTS: tl.constexpr):
    """The number of 16-bit elements from A to that pointer which belongs to the weight of a tile."""
    none = tile.to(tl.int64) * 0
    return of_tile(tile, begins, (none, distance(A, A1), distance(A, A2), distance(A, A3)), PARTS)


@triton.jit
def _load_chunk(w_ptrs, x_ptrs, left, seen, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """The next BLOCK_K columns of a tile, and as many rows of x^T. left: number of columns that remain."""
    if EVEN:
        w = tl.load(w_ptrs, eviction_policy="evict_first")  # a step reads a weight once
        x = tl.load(x_ptrs, mask=seen, other=0.0)
    else:
        live = tl.arange(0, BLOCK_K) < left
        w = tl.load(w_ptrs, mask=live[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs, mask=live[:, None] & seen, other=0.0)
    return w, x


@triton.jit
def _sum_of_splits(acc, Partial, Counter, tile, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """(Whether this program is the last of its tile, the sum over all splits if it is)."""
    offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    parts = Partial + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + offs
    tl.store(parts + tl.program_id(1) * (BLOCK_N * BLOCK_M), acc)
    tl.debug_barrier()  # all threads have stored before one of them counts
    last = tl.atomic_add(Counter + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(Counter + tile, 0)
        acc = tl.load(parts)
        for split in tl.static_range(1, SPLITS):  # their loads are under way together
            acc += tl.load(parts + split * (BLOCK_N * BLOCK_M))
    return last, acc


@triton.jit
def _gated(acc, DTYPE: tl.constexpr, ACT: tl.constexpr):
    """act(gate) * up for a tile whose first half is the gate; each factor and the activation are rounded."""
    half: tl.constexpr = acc.shape[0] // 2
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, half, acc.shape[1]]), [1, 2, 0]))
    act = activated(gate.to(DTYPE).to(tl.float32), ACT).to(DTYPE).to(tl.float32)
    return act * up.to(DTYPE).to(tl.float32)


# 16 bytes of a result are stored at once if the numbers of rows allow it
@triton.jit(do_not_specialize=["tokens", "factor"])
def linear_rows_kernel(
    X,  # (tokens, size)
    Weight,  # (rows, size)
    Weight1,  # (rows1, size), from two PARTS on; with ACT (rows, size): up
    Weight2,  # (rows2, size), from three PARTS on
    Weight3,  # (rows3, size), with four PARTS
    Bias,  # (rows,), read with HAS_BIAS
    Bias1,  # (rows1,)
    Bias2,  # (rows2,)
    Bias3,  # (rows3,)
    Out,  # (tokens, rows), written
    Out1,  # (tokens, rows1), written
    Out2,  # (tokens, rows2), written
    Out3,  # (tokens, rows3), written
    Residual,  # (tokens, rows), read if THEN is "add"
    After,  # (tokens, rows), written if there is a THEN
    Partial,  # (tiles, SPLITS, BLOCK_N, BLOCK_M), fp32, written and read with several SPLITS
    Counter,  # (tiles,), int32, 0 between launches
    tokens, rows, rows1, rows2, rows3, size, split_size, factor,
    PARTS: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, THEN: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per tile and split. PARTS: number of weights whose tiles follow each other; ACT: Weight1 is used with Weight.

    THEN: After is this operation on Out (`followed`).
    """
    tile = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    seen = token[None, :] < tokens
    second = tl.cdiv(rows, BLOCK_N)
    third = second + tl.cdiv(rows1, BLOCK_N)
    fourth = third + tl.cdiv(rows2, BLOCK_N)
    begins = (second, third, fourth)
    rows_of = of_tile(tile, begins, (rows, rows1, rows2, rows3), PARTS)
    if ACT != "":
        row = tile * (BLOCK_N // 2) + n % (BLOCK_N // 2)
        start = tl.where(n < BLOCK_N // 2, 0, distance(Weight, Weight1))
    else:
        row = (tile - of_tile(tile, begins, (0, second, third, fourth), PARTS)) * BLOCK_N + n
        start = offset(tile, begins, Weight, Weight1, Weight2, Weight3, PARTS)
    start += tl.minimum(row, rows_of - 1).to(tl.int64) * size
    offs_k = tl.program_id(1) * split_size + tl.arange(0, BLOCK_K)
    w_ptrs = Weight + tl.multiple_of(start, 8)[:, None] + offs_k[None, :]
    x_ptrs = X + token[None, :] * size + offs_k[:, None]
    left = size - tl.program_id(1) * split_size
    if EARLY and BLOCK_M == 16:  # requests for more columns delay the previous launch
        columns = tl.program_id(1) * split_size + tl.arange(0, BLOCK_K // 64) * 64
        request(Weight + start[:, None] + tl.minimum(columns, size - 1)[None, :])
    if HAS_BIAS and PARTS == 1:  # it arrives while weights are read
        bias = tl.load(Bias + row, mask=row < rows_of, other=0.0)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, tl.minimum(left, split_size), BLOCK_K):
        w, x = _load_chunk(w_ptrs + k, x_ptrs + k, left - k, seen, EVEN, BLOCK_K)
        acc = tl.dot(w, x, acc)
    residual = None
    if THEN == "add":  # not after the sum of the splits and the store of y, for which it would wait
        live = row < rows
        residual = tl.load(Residual + token[None, :] * rows + row[:, None], mask=live[:, None] & seen, other=0.0)
    last = True
    if SPLITS > 1:
        last, acc = _sum_of_splits(acc, Partial, Counter, tile, SPLITS, BLOCK_N, BLOCK_M)
    if last:
        dtype: tl.constexpr = Out.dtype.element_ty
        if ACT != "":
            half: tl.constexpr = BLOCK_N // 2
            row_out = tile * half + tl.arange(0, half)
            live = row_out < rows
            y = _gated(acc, dtype, ACT).to(dtype)
            tl.store(Out + token[None, :] * rows + row_out[:, None], y, mask=live[:, None] & seen)
        else:
            live = row < rows_of
            if HAS_BIAS:
                if PARTS > 1:
                    bias = tl.load(Bias + offset(tile, begins, Bias, Bias1, Bias2, Bias3, PARTS) + row, mask=live, other=0.0)
                acc += bias.to(tl.float32)[:, None]
            out = offset(tile, begins, Out, Out1, Out2, Out3, PARTS)  # of new, aligned tensors
            offs, y = token[None, :] * rows_of + row[:, None], acc.to(dtype)
            tl.store(Out + out // 8 * 8 + offs, y, mask=live[:, None] & seen)
            if THEN != "":
                live = row < of_tile(tile, begins, (rows, 0, 0, 0), PARTS)
                tl.store(After + offs, followed(y, residual, factor, THEN).to(dtype), mask=live[:, None] & seen)


def most_tokens(arch: int, weights: int) -> int:
    """The most tokens of a launch with so many weights."""
    return MAX_FUSED_TOKENS if weights > 1 and arch in (0, 90) else MAX_TOKENS


def tiles(arch: int, sms: int, tokens: int, rows: list[int], size: int, gated: bool) -> Tile:
    """The tiles for weights with these numbers of rows; gated: with a second weight of the same size."""
    block_m = max(16, triton.next_power_of_2(tokens))
    tile = Tile(32, block_m, 64, 4, 1, 1) if arch == 0 else Tile(64, block_m, 128, 4, 4 if block_m == 16 else 3, 1)
    resident = 2  # programs on each multiprocessor
    if arch == 90 and block_m > MAX_TOKENS:  # x is as large as a tile of a weight
        tile = Tile(128, block_m, 64, 4, 3, 1) if gated else Tile(64, block_m, 64, 4, 4, 1)
    number = sum(triton.cdiv((1 + gated) * n, tile.BLOCK_N) for n in rows)
    if arch == 90 and (block_m <= MAX_TOKENS or gated):
        # About 200 KB of shared memory for buffers. One program on each multiprocessor has them all, which needs fewer splits.
        resident = 1 if number <= sms and (block_m > MAX_TOKENS or not gated) else 2
        tile = tile._replace(num_stages=(6 if block_m >= 64 else 8) // resident)
    if number > COUNTERS:
        return tile
    # As many programs as fit at once, if a split has at least four chunks.
    return tile._replace(splits=max(1, min(resident * sms // number, triton.cdiv(size, 4 * tile.BLOCK_K))))


def aligned(weights: Tensors) -> bool:
    """Whether 16 bytes can be loaded at once from each weight."""
    return all(weight.data_ptr() % 16 == 0 for weight in weights)


def four(tensors: Tensors) -> Tensors:
    """The tensors, and the first one in place of missing ones, which are not read."""
    return (*tensors, *tensors[:1] * (MAX_WEIGHTS - len(tensors)))


def numbers(rows: list[int]) -> dict[str, int]:
    """The arguments for the numbers of rows of weights."""
    return dict(zip(("rows", "rows1", "rows2", "rows3"), (*rows, 0, 0, 0), strict=False))


def prepare(x: torch.Tensor, weights: Tensors, has_bias: bool, act: str, then: str, factor: float | None) -> Start:
    """The launch for several tokens. act: if not empty, the weights are a gate and up. then, factor: as in the kernel."""
    size, gated = x.shape[-1], bool(act)
    tokens, rows = x.numel() // size, [weight.shape[0] for weight in weights[: 1 if gated else None]]
    tile = tiles(gpu.arch(x.device), gpu.num_sms(x.device), tokens, rows, size, gated)
    split_size = triton.cdiv(triton.cdiv(size, tile.splits), tile.BLOCK_K) * tile.BLOCK_K
    splits = triton.cdiv(size, split_size)
    number = sum(triton.cdiv((1 + gated) * n, tile.BLOCK_N) for n in rows)
    run = launch.Launch(
        linear_rows_kernel,
        (number, splits),
        tokens=tokens,
        **numbers(rows),
        size=size,
        split_size=split_size,
        factor=factor,
        PARTS=len(rows),
        ACT=act,
        HAS_BIAS=has_bias,
        THEN=then,
        SPLITS=splits,
        EVEN=size % tile.BLOCK_K == 0,
        BLOCK_N=tile.BLOCK_N,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_K=tile.BLOCK_K,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early(x.device),
    )
    sums = number * splits * tile.BLOCK_N * tile.BLOCK_M

    def start(
        x: torch.Tensor,
        weights: Tensors,
        biases: Tensors,
        outs: Tensors,
        residual: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> None:
        partial, counter = x, x  # not read
        if splits > 1:
            partial, counter = x.new_empty(sums, dtype=torch.float32), counters_of(x.device)
        others = (x if residual is None else residual, x if after is None else after, partial, counter)
        run(x, *four(weights), *four(biases or weights), *four(outs), *others)

    return start
