"""Linear layers of a decode step: the weight is read once, at memory bandwidth, with programmatic dependent launch.

    y = x W^T + b,   or for a gated MLP in one launch   y = act(x W^T) * (x U^T);   after: y + residual, y * factor or act(y)

The kernels of this file are for one token: a program computes few rows of W, and loads the first of them while the previous
kernel, which computes x, still runs. `linear_rows` is for several tokens.

Rounds: as the model's code: y and the operation on it, in the gated form both factors and the activation; sums are fp32.
Limits: `why_not`. Oracle: `torch.nn.functional.linear` in float64.

Sources: gemv of BLAS (Dongarra et al., "An Extended Set of FORTRAN Basic Linear Algebra Subprograms", 1988); for loading ahead
of the wait, NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; for the roundings LlamaMLP of Transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import gpu, launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from . import linear_rows
from .linear_rows import activated, followed, four, of_tile, offset

Tensors = tuple[torch.Tensor, ...]
MAX_BLOCK = 2048  # elements of a row of the weight that a program loads at once


@triton.jit
def _load_once(pointers, mask):
    """Load weights, which need not stay in L2: a step reads each of them once."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows", "rows1", "rows2", "rows3", "factor"])
def linear_kernel(
    X,  # (SIZE,)
    Weight,  # (rows, SIZE)
    Weight1,  # (rows1, SIZE), from two PARTS on
    Weight2,  # (rows2, SIZE), from three PARTS on
    Weight3,  # (rows3, SIZE), with four PARTS
    Bias,  # (rows,), read with HAS_BIAS
    Bias1,  # (rows1,)
    Bias2,  # (rows2,)
    Bias3,  # (rows3,)
    Out,  # (rows,), written
    Out1,  # (rows1,), written
    Out2,  # (rows2,), written
    Out3,  # (rows3,), written
    Residual,  # (rows,), read if THEN is "add"
    After,  # (rows,), written if there is a THEN
    rows, rows1, rows2, rows3, factor,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    THEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_N rows of a weight. PARTS: number of weights; THEN: After is this operation on Out (`followed`)."""
    tile = tl.program_id(0)
    second = tl.cdiv(rows, BLOCK_N)
    third = second + tl.cdiv(rows1, BLOCK_N)
    fourth = third + tl.cdiv(rows2, BLOCK_N)
    begins = (second, third, fourth)
    row = (tile - of_tile(tile, begins, (0, second, third, fourth), PARTS)).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    live = row < of_tile(tile, begins, (rows, rows1, rows2, rows3), PARTS)
    start = offset(tile, begins, Weight, Weight1, Weight2, Weight3, PARTS) + row * SIZE
    if PARTS > 1:
        start = tl.multiple_of(start, 8)
    weights = Weight + start[:, None] + offs[None, :]
    # Before the wait: no kernel of a decode step writes parameters.
    w = _load_once(weights, live[:, None] & (offs < SIZE)[None, :])
    if HAS_BIAS and PARTS == 1:  # it arrives while weights are read; of several it would be spilled
        bias = tl.load(Bias + row, mask=live, other=0.0)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    x = tl.load(X + offs, mask=offs < SIZE, other=0.0)
    residual = None
    if THEN == "add":  # not after the store of y, for which it would wait
        residual = tl.load(Residual + row, mask=live, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for k in range(BLOCK_K, SIZE, BLOCK_K):
        inside = k + offs < SIZE
        w = _load_once(weights + k, live[:, None] & inside[None, :])
        x = tl.load(X + k + offs, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        if PARTS > 1:
            bias = tl.load(Bias + offset(tile, begins, Bias, Bias1, Bias2, Bias3, PARTS) + row, mask=live, other=0.0)
        y += bias.to(tl.float32)
    y = y.to(Out.dtype.element_ty)
    out = offset(tile, begins, Out, Out1, Out2, Out3, PARTS)
    tl.store(Out + out + row, y, mask=live)
    if THEN != "":
        live = row < of_tile(tile, begins, (rows, 0, 0, 0), PARTS)
        tl.store(After + row, followed(y, residual, factor, THEN).to(Out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["out_features"])
def gated_linear_kernel(
    X,  # (SIZE,)
    Gate,  # (out_features, SIZE)
    Up,  # (out_features, SIZE)
    Out,  # (out_features,), written
    out_features,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`linear_kernel` for two weights; their next blocks are loaded while the current ones are used."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    live = row < out_features
    gates = Gate + row[:, None] * SIZE + offs[None, :]
    ups = Up + row[:, None] * SIZE + offs[None, :]
    mask = live[:, None] & (offs < SIZE)[None, :]
    next_g, next_u = _load_once(gates, mask), _load_once(ups, mask)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    acc_g, acc_u = tl.zeros([BLOCK_N, BLOCK_K], tl.float32), tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        g, u = next_g, next_u
        mask = live[:, None] & (k + BLOCK_K + offs < SIZE)[None, :]
        next_g, next_u = _load_once(gates + k + BLOCK_K, mask), _load_once(ups + k + BLOCK_K, mask)
        x = tl.load(X + k + offs, mask=k + offs < SIZE, other=0.0).to(tl.float32)[None, :]
        acc_g += g.to(tl.float32) * x
        acc_u += u.to(tl.float32) * x
    dtype = Out.dtype.element_ty
    gate, up = tl.sum(acc_g, 1).to(dtype).to(tl.float32), tl.sum(acc_u, 1).to(dtype).to(tl.float32)
    act = activated(gate, ACT).to(dtype).to(tl.float32)
    tl.store(Out + row, (act * up).to(dtype), mask=live)


def why_not(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors = (),
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `linears`; gated: weights are a gate and up."""
    size = x.shape[-1] if x.dim() else 0
    tokens = x.numel() // size if size else 0
    most = linear_rows.most_tokens(gpu.arch(x.device), len(weights))
    if not 1 <= tokens <= most:
        return f"x is {tuple(x.shape)}; it must hold 1 to {most} tokens."
    if not 1 <= len(weights) <= linear_rows.MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        return f"{len(weights)} weights, {len(biases)} biases; up to {linear_rows.MAX_WEIGHTS} weights need as many or none."
    for weight in weights:
        if weight.dim() != 2 or weight.numel() == 0 or weight.shape[1] != size:
            return f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; a token must be as long as a row of weight."
    if (tokens > 1 or len(weights) > 1 + gated) and size % linear_rows.MULTIPLE:
        return f"in_features is {size}; with several tokens or weights it must be a multiple of {linear_rows.MULTIPLE}."
    for bias, weight in zip(biases, weights, strict=False):
        if bias.shape != weight.shape[:1]:
            return f"bias is {tuple(bias.shape)}, and weight {tuple(weight.shape)} needs {weight.shape[0]} elements."
    if gated and (len(weights) != 2 or biases or weights[0].shape != weights[1].shape):
        return f"gate and up are {[tuple(weight.shape) for weight in weights]}; they must have one shape, and no biases."
    if residual is not None and (len(weights) > 1 or residual.shape != (*x.shape[:-1], weights[0].shape[0])):
        return f"residual is {tuple(residual.shape)}; it must have the shape of the result, of one weight."
    others = *weights, *biases, *(() if residual is None else (residual,))
    for tensor in (x, *others):
        if tensor.dtype != x.dtype or tensor.dtype not in checks.LINEAR_DTYPES:
            return f"All tensors must share one dtype out of float16 and bfloat16; got {x.dtype} and {tensor.dtype}."
    return checks.why_not_inference(x, *others)


class Then(NamedTuple):
    """An operation on the first result: "add" (a residual of its shape), "mul" (by a factor), or an activation."""

    name: str
    residual: torch.Tensor | None = None
    factor: float | None = None


class Layers(NamedTuple):
    """Linear layers that are checked and not launched yet. outs: the tensors for their results."""

    start: linear_rows.Start
    x: torch.Tensor
    weights: Tensors
    biases: Tensors
    outs: Tensors

    def gives(self, x: torch.Tensor) -> bool:
        """Whether x is the first result, in any shape."""
        out = self.outs[0]
        return x.is_contiguous() and (gpu.address_of(x), x.numel()) == (gpu.address_of(out), out.numel())

    def launch(self) -> None:
        self.start(self.x, self.weights, self.biases, self.outs)

    def launch_with(self, then: Then, after: torch.Tensor) -> bool:
        """Launch with an operation, whose result is `after`; not for gated layers. False, without a launch, if it is refused."""
        tensors = (self.x, *self.weights, *self.biases, then.residual)
        start = _prepare(tensors, len(self.weights), "", then.name, then.factor)
        if start is None:
            return False
        start(self.x, self.weights, self.biases, self.outs, then.residual, after)
        return True


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """x weight^T + bias in x's dtype; None if `why_not` gives a reason.

    x: (..., in_features) of 1 to 64 tokens; weight: (out_features, in_features); bias: (out_features,); float16 or bfloat16,
    contiguous. Returns (..., out_features). No launch of the same step may write weight or bias: they are read before it ends.
    """
    outs = linears(x, (weight,), () if bias is None else (bias,))
    return None if outs is None else outs[0]


def linear_and_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(y, residual + y) for the y of `linear`, rounded before and after the sum. residual: of y's shape and dtype."""
    layers, total = prepared(x, (weight,), () if bias is None else (bias,)), torch.empty_like(residual)
    if layers is None or not layers.launch_with(Then("add", residual), total):
        return None
    return layers.outs[0], total


def linears(x: torch.Tensor, weights: Tensors, biases: Tensors = ()) -> Tensors | None:
    """`linear` for up to four weights, with as many biases or none, in one launch.

    On Hopper several weights also take 65 to 128 tokens.
    """
    return _launched(prepared(x, weights, biases))


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, act: str = "silu") -> torch.Tensor | None:
    """act(x gate^T) * (x up^T), both factors and the activation rounded to x's dtype; otherwise as `linear`.

    act: "relu", "silu", "gelu" or "gelu_tanh".
    """
    outs = _launched(prepared(x, (gate, up), act=act))
    return None if outs is None else outs[0]


def prepared(x: torch.Tensor, weights: Tensors, biases: Tensors = (), act: str = "") -> Layers | None:
    """`linears` without the launch, or with an activation `gated_linear`."""
    start = _prepare((x, *weights, *biases, None), len(weights), act, "", None)
    several = x.numel() > x.shape[-1] or len(weights) > 1 + bool(act)
    if start is None or (several and not linear_rows.aligned(weights)):
        return None
    outs = tuple(x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights[: 1 if act else None])
    return Layers(start, x, weights, biases, outs)


def _launched(layers: Layers | None) -> Tensors | None:
    if layers is None:
        return None
    layers.launch()
    return layers.outs


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor | None, ...], count: int, act: str, then: str, factor: float | None
) -> linear_rows.Start | None:
    given: Any = tensors  # only the residual may be None
    x, weights, biases, residual = given[0], given[1 : count + 1], given[count + 1 : -1], given[-1]
    if why_not(x, weights, biases, residual, bool(act)):
        return None
    prepare = linear_rows.prepare if x.numel() > x.shape[-1] else _one_token
    return prepare(x, weights, bool(biases), act, then, factor)


def _one_token(x: torch.Tensor, weights: Tensors, has_bias: bool, act: str, then: str, factor: float | None) -> linear_rows.Start:
    size = x.shape[-1]
    rows = [weight.shape[0] for weight in weights[: 1 if act else None]]
    own: dict[str, Any]
    block_k = min(MAX_BLOCK, max(16, triton.next_power_of_2(size)))
    if not act:
        kernel, own = linear_kernel, {"HAS_BIAS": has_bias, "THEN": then, "factor": factor, "PARTS": len(rows)}
        own |= linear_rows.numbers(rows)
        block_n = max(4, 4096 // block_k)
        # For long rows half as many warps: more programs fit and hide each other's start and end.
        warps = block_n * block_k // (2048 if size > 2 * MAX_BLOCK else 1024)
    else:
        kernel, own = gated_linear_kernel, {"ACT": act, "out_features": rows[0]}
        block_n = max(2, 2048 // block_k)
        warps = block_n * block_k // 512
    own |= {"SIZE": size, "BLOCK_N": block_n, "BLOCK_K": block_k, **early(x.device)}
    if len(rows) > 1 and warps == 8:
        own["maxnreg"] = 64  # four programs fit on a multiprocessor, as with one weight and without a bias
    run = launch.Launch(kernel, (sum(triton.cdiv(n, block_n) for n in rows),), **own, num_warps=warps)

    def start(
        x: torch.Tensor,
        weights: Tensors,
        biases: Tensors,
        outs: Tensors,
        residual: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> None:
        if not act:
            run(x, *four(weights), *four(biases or weights), *four(outs), residual, after)
        else:
            run(x, *weights, *outs)

    return start
