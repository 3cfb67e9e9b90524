"""RMSNorm in one launch, with the roundings of Llama's code: y = weight * round(x / sqrt(mean(x^2) + eps)).

The code of the models needs six launches, each of which reads and writes the whole tensor.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; for the roundings LlamaRMSNorm of
Transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs

MAX_SIZE = 16384  # elements of a row, which one program loads at once


@triton.jit(do_not_specialize=["rows", "eps"])
def rms_norm_kernel(
    X,
    Weight,
    Out,
    rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per BLOCK_M rows."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (offs < SIZE)
    x = tl.load(X + row * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(Weight + offs, mask=offs < SIZE, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    y = (x * scale[:, None]).to(X.dtype.element_ty)
    tl.store(Out + row * SIZE + offs, weight * y, mask=mask)


def why_not(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why these inputs need another path, or None."""
    if weight.dtype != x.dtype:
        return f"x is {x.dtype} and weight {weight.dtype}; they must have one dtype."
    if weight.device != x.device:
        return f"x is on {x.device} and weight on {weight.device}."
    if weight.dim() != 1 or x.shape[-1] != weight.shape[0] or not 0 < weight.shape[0] <= MAX_SIZE or x.numel() == 0:
        return f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; rows and weight must have 1 to {MAX_SIZE} elements."
    if weight.stride(0) != 1 and weight.shape[0] > 1:
        return f"weight has stride {weight.stride(0)}; it must be contiguous."
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "x or weight requires grad, and this kernel has no backward pass."
    return None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, contiguous, in x's dtype; the mean and the quotient in fp32.

    x: (..., size); weight: (size,) of the same dtype and device. Raises ValueError with the reason of `why_not`.
    """
    out = run(x, weight, eps)
    if out is None:
        raise ValueError(why_not(x, weight))
    return out


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """`rms_norm`, or None if `why_not` gives a reason."""
    start = _prepare((x, weight), eps)
    if start is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    start(x, weight, out)
    return out


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, torch.Tensor], eps: float) -> launch.Launch | None:
    x, weight = tensors
    if why_not(x, weight):
        return None
    size = x.shape[-1]
    rows = x.numel() // size
    block = triton.next_power_of_2(size)
    block_m = max(1, 1024 // block)
    return launch.Launch(
        rms_norm_kernel,
        (triton.cdiv(rows, block_m),),
        rows=rows,
        eps=eps,
        SIZE=size,
        BLOCK=block,
        BLOCK_M=block_m,
        **early(x.device),
        num_warps=max(2, min(16, block // 512)),
    )
