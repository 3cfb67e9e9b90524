"""Residual additions with the norms before and after them in one launch: each line is optional.

    y = x summed over ranks;  y = norm(y);  y = y * factor, or y * sigmoid(gate);  y = y + first;  y = y + second;  out = norm(y)

Alone, these take less time than the gap between two launches. Weights are read before the wait for the previous launch
(`host.overlap`), so it is only for decode graphs, whose launches write no weights.

Rounds: each line, to x's dtype, and stores it, because other layers may read it; norms as in rms_norm.py. Limits: `fits`,
`fits_norm`. Oracle: the operations of torch one by one.

Source: the decoder layers of Transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..checks import DTYPES
from ..host import launch
from ..host.overlap import let_next_begin, wait_for_inputs
from .all_reduce import LIMIT, MANY_BYTES, Peers, sum_over_ranks
from .rms_norm import MAX_SIZE, load_row, normalise, row_launch, why_not


class Normed(NamedTuple):
    """A norm in the chain. options: centred, late, one, as in rms_norm.run."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    options: tuple[bool, bool, str]
    out: torch.Tensor


class Chain(NamedTuple):
    """x and the operations on it in their order, with the tensors for their results. All are contiguous and have x's shape.

    gate: logits of each element or of each row, and the tensor for their sigmoid, by which x is multiplied in place of factor.
    peers: the memory of the ranks over which x is summed first, in place; None: no sum.
    """

    x: torch.Tensor
    before: Normed | None = None
    factor: float = 1.0
    scaled: torch.Tensor | None = None  # the result of the product; None: no product
    sums: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # at most two (residual, result)
    peers: Peers | None = None
    gate: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def out(self) -> torch.Tensor:
        """The last result before a norm that may follow."""
        if self.sums:
            return self.sums[-1][1]
        if self.scaled is not None:
            return self.scaled
        return self.x if self.before is None else self.before.out


@triton.jit(do_not_specialize=["rows", "eps_before", "factor", "eps"])
def residual_kernel(
    X,  # (rows, SIZE), also written with Addresses
    Addresses,  # (WORLD,), int64: the memory of each rank, which is written and read; or None: no sum
    Counts,  # (PROGRAMS,), int32, read and written, or None
    BeforeWeight,  # (SIZE,) or None
    BeforeBias,  # (SIZE,) or None
    Before,  # (rows, SIZE), written, or None
    Gate,  # (rows,), with WIDE (rows, SIZE), or None
    Sigmoid,  # (rows,), with WIDE (rows, SIZE), written, or None
    Scaled,  # (rows, SIZE), written, or None
    First,  # (rows, SIZE) or None
    FirstSum,  # (rows, SIZE), written, or None
    Second,  # (rows, SIZE) or None
    SecondSum,  # (rows, SIZE), written, or None
    Weight,  # (SIZE,) or None
    Bias,  # (SIZE,) or None
    Out,  # (rows, SIZE), written, or None
    rows, eps_before, factor, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BEFORE_CENTRED: tl.constexpr, BEFORE_LATE: tl.constexpr,
    BEFORE_ONE: tl.constexpr, CENTRED: tl.constexpr, LATE: tl.constexpr, ONE: tl.constexpr, ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr, TWICE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PEER_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows. A result that is None is not computed."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    inside = offs < SIZE
    mask = (row < rows) & inside
    at = row * SIZE + offs
    before_weight = load_row(BeforeWeight, offs, inside)
    before_bias = load_row(BeforeBias, offs, inside)
    weight = load_row(Weight, offs, inside)
    bias = load_row(Bias, offs, inside)
    if ONE_ROW:  # the next launch, a linear layer, reads weights while the previous one ends; linear_rows would be slower
        let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    if not ONE_ROW:
        let_next_begin(EARLY)
    x = tl.load(X + at, mask=mask, other=0.0)
    if Gate is not None:
        gate_at = at if WIDE else row
        gate_mask = mask if WIDE else row < rows
        gate = tl.load(Gate + gate_at, mask=gate_mask, other=0.0)
    # All loads come before the first store, for which a later one would wait.
    if FirstSum is not None:
        first = tl.load(First + at, mask=mask, other=0.0)
    if SecondSum is not None:
        second = tl.load(Second + at, mask=mask, other=0.0)
    if Addresses is not None:
        words: tl.constexpr = SIZE * x.dtype.primitive_bitwidth // 32
        here = rows - tl.program_id(0) * BLOCK_M
        x = sum_over_ranks(x, X, here, words, Addresses, Counts, TWICE, RANK, WORLD, PEER_BLOCK, LIMIT)
        tl.store(X + at, x, mask=mask)
    if Before is not None:
        x = normalise(x, before_weight, before_bias, eps_before, mask, SIZE, BEFORE_CENTRED, BEFORE_LATE, BEFORE_ONE)
        x = tl.where(mask, x, 0.0)
        tl.store(Before + at, x, mask=mask)
    if Scaled is not None:
        if Gate is not None:
            factor = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(x.dtype)
            tl.store(Sigmoid + gate_at, factor, mask=gate_mask)
            factor = factor.to(tl.float32)
        x = (x.to(tl.float32) * factor).to(x.dtype)
        tl.store(Scaled + at, x, mask=mask)
    if FirstSum is not None:
        x = (x.to(tl.float32) + first.to(tl.float32)).to(x.dtype)
        tl.store(FirstSum + at, x, mask=mask)
    if SecondSum is not None:
        x = (x.to(tl.float32) + second.to(tl.float32)).to(x.dtype)
        tl.store(SecondSum + at, x, mask=mask)
    if Out is not None:
        y = normalise(x, weight, bias, eps, mask, SIZE, CENTRED, LATE, ONE)
        tl.store(Out + at, y, mask=mask)


def fits(*tensors: torch.Tensor) -> bool:
    """Whether the kernel supports these tensors as x and residuals."""
    x = tensors[0]
    return (
        x.dtype in DTYPES
        and x.dim() > 0
        and 0 < x.shape[-1] <= MAX_SIZE
        and x.numel() > 0
        and all(
            t.shape == x.shape
            and t.dtype == x.dtype
            and t.device == x.device
            and t.is_contiguous()
            and not (t.requires_grad and torch.is_grad_enabled())
            for t in tensors
        )
    )


def fits_norm(x: torch.Tensor, norm: Normed) -> bool:
    """Whether the kernel supports this norm of x. Heads, of 4 dimensions, need not be contiguous: `run` copies them."""
    return fits(norm.out) and (x.is_contiguous() or x.dim() == 4) and why_not(x, norm.weight, norm.bias) is None


def run(chain: Chain, after: Normed | None = None) -> None:
    """Compute the results of a chain, and of a norm after it. Its tensors must be those that `fits` and `fits_norm` accept."""
    none = Normed(None, None, 0.0, (False, False, ""), None)  # type: ignore[arg-type]
    first, last = chain.before or none, after or none
    (residual, total), (second, second_total) = (*chain.sums, (None, None), (None, None))[:2]
    peers = chain.peers
    tensors = (
        chain.x.contiguous(),
        *((None, None) if peers is None else (peers.addresses, peers.counts)),
        *(first.weight, first.bias, first.out),
        *(chain.gate or (None, None)),
        chain.scaled,
        *(residual, total, second, second_total),
        *(last.weight, last.bias, last.out),
    )
    ranks = (0, 1, 0) if peers is None else (peers.rank, peers.world, peers.block)
    _prepare(tensors, first.eps, chain.factor, last.eps, first.options, last.options, ranks)(*tensors)


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor | None, ...],
    eps_before: float,
    factor: float,
    eps: float,
    before: tuple[bool, bool, str],
    after: tuple[bool, bool, str],
    ranks: tuple[int, int, int],
) -> launch.Launch:
    x, gate = tensors[0], tensors[6]
    assert x is not None
    return row_launch(
        residual_kernel,
        x,
        eps_before=eps_before,
        factor=factor,
        eps=eps,
        BEFORE_CENTRED=before[0],
        BEFORE_LATE=before[1],
        BEFORE_ONE=before[2],
        CENTRED=after[0],
        LATE=after[1],
        ONE=after[2],
        ONE_ROW=x.numel() == x.shape[-1] and ranks[1] == 1,
        WIDE=gate is not None and gate.numel() == x.numel(),
        TWICE=ranks[1] > 2 and x.nbytes >= MANY_BYTES,
        RANK=ranks[0],
        WORLD=ranks[1],
        PEER_BLOCK=ranks[2],
        LIMIT=LIMIT,
    )
