"""Linear layers on one token: a weight read once, at the speed of memory, in one launch that begins early.

    y = x W^T + b,   or for a gated MLP in one launch   y = silu(x W^T) * (x U^T)

A decode step of one row is little else: every weight of the model meets a single token. Libraries run it as a matrix product made
for tiles of tokens, some of them in two launches. Here a program takes few rows of W, and loads the first of them while the kernel
ahead, which makes x, still runs.

Sums are taken in fp32 and rounded where the model's own code rounds: y, and in the gated form both factors and the activation.

Sources: gemv of BLAS (Dongarra et al., "An Extended Set of FORTRAN Basic Linear Algebra Subprograms", 1988); for loading ahead of
the wait, NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; for the roundings LlamaMLP of Transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .overlap import early, let_next_begin, wait_for_inputs

DTYPES = (torch.float16, torch.bfloat16)
MAX_BLOCK = 2048  # elements of a row that a program loads at once


@triton.jit(do_not_specialize=["out_features"])
def linear_kernel(
    X,
    Weight,
    Up,
    Bias,
    Out,
    out_features,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N elements of the output a program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    live = row < out_features
    at = row[:, None] * SIZE + offs[None, :]
    # Ahead of the wait: nothing in a decode step writes weights. They are read once, and need not stay in L2.
    mask = live[:, None] & (offs < SIZE)[None, :]
    w = tl.load(Weight + at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(Up + at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    x = tl.load(X + offs, mask=offs < SIZE, other=0.0).to(tl.float32)[None, :]
    acc = w.to(tl.float32) * x
    if GATED:
        up_acc = u.to(tl.float32) * x
    for k in range(BLOCK_K, SIZE, BLOCK_K):
        mask = live[:, None] & (k + offs < SIZE)[None, :]
        w = tl.load(Weight + at + k, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(X + k + offs, mask=k + offs < SIZE, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * x
        if GATED:
            u = tl.load(Up + at + k, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc += u.to(tl.float32) * x
    dtype = Out.dtype.element_ty
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(Bias + row, mask=live, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if GATED:
        gate = y.to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype) * tl.sum(up_acc, 1).to(dtype)
    tl.store(Out + row, y, mask=live)


def why_not(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> str | None:
    """Why these inputs need another path, in a sentence, or None."""
    if weight.dim() != 2 or x.dim() == 0 or x.numel() != x.shape[-1] or x.shape[-1] != weight.shape[1] or weight.numel() == 0:
        return (
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; one token of as many elements as a row of weight is taken."
        )
    if up is not None and up.shape != weight.shape:
        return f"weight is {tuple(weight.shape)} and up {tuple(up.shape)}; they must have one shape."
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias is {tuple(bias.shape)}, and weight {tuple(weight.shape)} asks for {weight.shape[0]} elements."
    for tensor in (x, weight, up, bias):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.dtype not in DTYPES:
            return f"All tensors must share one dtype out of float16 and bfloat16; got {x.dtype} and {tensor.dtype}."
        if tensor.device != x.device:
            return f"All tensors must be on one device; got {x.device} and {tensor.device}."
        if not tensor.is_contiguous():
            return f"Every tensor must be contiguous; got strides {tensor.stride()}."
        if torch.is_grad_enabled() and tensor.requires_grad:
            return "A tensor requires grad, and this kernel has no backward pass."
    return None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, up: torch.Tensor | None = None
) -> torch.Tensor:
    """x weight^T + bias; with `up`, silu(x weight^T + bias) * (x up^T). In x's dtype, each factor rounded to it.

    x: (..., in_features) of one token; weight, up: (out_features, in_features); bias: (out_features,); float16 or bfloat16,
    contiguous. Returns (..., out_features). Weights must be older than the launch ahead: they are read before it has ended.
    Raises ValueError for what `why_not` names.
    """
    out = run(x, weight, bias, up=up)
    if out is None:
        raise ValueError(why_not(x, weight, up, bias))
    return out


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, up: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`linear`, or None where `why_not` has something to say."""
    start = _prepare((x, weight, up, bias))
    if start is None:
        return None
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    start(x, weight, up, bias, out)
    return out


@launch.remember
def _prepare(tensors) -> launch.Launch | None:
    x, weight, up, bias = tensors
    if why_not(x, weight, up, bias):
        return None
    rows, size = weight.shape
    block_k = min(MAX_BLOCK, max(16, triton.next_power_of_2(size)))
    # Long rows in twos leave too few bytes in flight to a thread once the first of them are there.
    long = size > 2 * MAX_BLOCK and up is None
    block_n = max(4 if long else 2, 1024 // block_k)
    return launch.Launch(
        linear_kernel,
        (triton.cdiv(rows, block_n),),
        out_features=rows,
        SIZE=size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATED=up is not None,
        HAS_BIAS=bias is not None,
        **early(x.device),
        num_warps=4 if long else max(2, block_n * block_k // 512),
    )
