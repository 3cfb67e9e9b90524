"""Linear layers on one token: the weight is read once, at memory bandwidth, with programmatic dependent launch.

    y = x W^T + b,   or for a gated MLP in one launch   y = silu(x W^T) * (x U^T)

A decode step of one row mostly reads weights, each for a single token. A program computes few rows of W, and loads the first
of them while the previous kernel, which computes x, still runs. For several tokens see docs/dev/log.md.

Sums are in fp32. Results are rounded as in the code of the model: y, and in the gated form both factors and the activation.

Sources: gemv of BLAS (Dongarra et al., "An Extended Set of FORTRAN Basic Linear Algebra Subprograms", 1988); for loading ahead of
the wait, NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; for the roundings LlamaMLP of Transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs

DTYPES = (torch.float16, torch.bfloat16)
MAX_BLOCK = 2048  # elements of a row of the weight that a program loads at once


@triton.jit
def _load_once(pointers, mask):
    """Load weights, which need not stay in L2: a step reads each of them once."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["out_features"])
def linear_kernel(
    X,
    Weight,
    Bias,
    Out,
    out_features,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per BLOCK_N elements of the output."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    live = row < out_features
    weights = Weight + row[:, None] * SIZE + offs[None, :]
    # Before the wait: no kernel of a decode step writes weights.
    w = _load_once(weights, live[:, None] & (offs < SIZE)[None, :])
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    x = tl.load(X + offs, mask=offs < SIZE, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for k in range(BLOCK_K, SIZE, BLOCK_K):
        inside = k + offs < SIZE
        w = _load_once(weights + k, live[:, None] & inside[None, :])
        x = tl.load(X + k + offs, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(Bias + row, mask=live, other=0.0).to(tl.float32)
    tl.store(Out + row, y.to(Out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["out_features"])
def gated_linear_kernel(
    X,
    Gate,
    Up,
    Out,
    out_features,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
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
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(Out + row, (act * up).to(dtype), mask=live)


def why_not(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, up: torch.Tensor | None = None
) -> str | None:
    """The reason why these inputs need another path, or None."""
    if weight.dim() != 2 or weight.numel() == 0 or x.dim() == 0 or not x.numel() == x.shape[-1] == weight.shape[1]:
        return f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; x must be one token, as long as a row of weight."
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias is {tuple(bias.shape)}, and weight {tuple(weight.shape)} needs {weight.shape[0]} elements."
    if up is not None and up.shape != weight.shape:
        return f"gate is {tuple(weight.shape)} and up {tuple(up.shape)}; they must have one shape."
    for tensor in (x, weight, bias, up):
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


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """x weight^T + bias in x's dtype; None if `why_not` gives a reason.

    x: (..., in_features) of one token; weight: (out_features, in_features); bias: (out_features,); float16 or bfloat16,
    contiguous. Returns (..., out_features). The previous launch must not write the weight: it is read before that launch ends.
    """
    return _run(x, weight, bias, None)


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """silu(x gate^T) * (x up^T), both factors and the activation rounded to x's dtype; otherwise as `linear`."""
    return _run(x, gate, None, up)


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor | None:
    start = _prepare((x, weight, bias, up))
    if start is None:
        return None
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    start(x, weight, bias if up is None else up, out)
    return out


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> launch.Launch | None:
    x, weight, bias, up = tensors
    if why_not(x, weight, bias, up):
        return None
    rows, size = weight.shape
    own: dict[str, int]
    block_k = min(MAX_BLOCK, max(16, triton.next_power_of_2(size)))
    if up is None:
        kernel, own = linear_kernel, {"HAS_BIAS": bias is not None}
        block_n = max(4, 4096 // block_k)
        # For long rows half as many warps: more programs fit and hide each other's start and end.
        warps = block_n * block_k // (2048 if size > 2 * MAX_BLOCK else 1024)
    else:
        kernel, own = gated_linear_kernel, {}
        block_n = max(2, 2048 // block_k)
        warps = block_n * block_k // 512
    own |= {"SIZE": size, "BLOCK_N": block_n, "BLOCK_K": block_k, **early(x.device)}
    return launch.Launch(kernel, (triton.cdiv(rows, block_n),), **own, out_features=rows, num_warps=warps)
