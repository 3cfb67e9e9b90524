"""RMSNorm and LayerNorm in one launch, instead of six or more that read and write the whole tensor.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps);  out = weight * y + bias;  RMSNorm does not subtract the mean

Rounds: as the model's code: y is fp32 and, unless LATE, rounded before the product; the result is rounded. Limits: `why_not`.
Oracle: the norms of Transformers (`hf.norms`).

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; Ba et al., "Layer Normalization"
(2016), section 3; for the roundings the norms of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs

MAX_SIZE = 16384  # elements of a row, which one program loads at once


@triton.jit(do_not_specialize=["rows", "eps"])
def rms_norm_kernel(
    X,  # (rows, SIZE)
    Weight,  # (SIZE,) or None
    Bias,  # (SIZE,) or None
    Out,  # (rows, SIZE), written
    rows, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, CENTRED: tl.constexpr, LATE: tl.constexpr, ONE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    inside = offs < SIZE
    mask = (row < rows) & inside
    x = tl.load(X + row * SIZE + offs, mask=mask, other=0.0)
    y = normalise(x, load_row(Weight, offs, inside), load_row(Bias, offs, inside), eps, mask, SIZE, CENTRED, LATE, ONE)
    tl.store(Out + row * SIZE + offs, y, mask=mask)


@triton.jit
def load_row(Row, offs, inside):
    """A row of a tensor, or None for None."""
    row = None
    if Row is not None:
        row = tl.load(Row + offs, mask=inside, other=0.0)
    return row


@triton.jit
def normalise(x, weight, bias, eps, mask, SIZE: tl.constexpr, CENTRED: tl.constexpr, LATE: tl.constexpr, ONE: tl.constexpr):
    """The norm of the rows of a tile, in its dtype. Elements outside of the mask must be 0."""
    mean, scale = moments(x, eps, mask, SIZE, CENTRED)
    return scaled(x, mean, scale, weight, bias, LATE, ONE)


@triton.jit
def moments(x, eps, mask, SIZE: tl.constexpr, CENTRED: tl.constexpr):
    """(mean, or 0 if it is not subtracted; 1 / sqrt(mean of squares + eps)) of each row of a tile."""
    y = x.to(tl.float32)
    mean = tl.zeros([x.shape[0], 1], tl.float32)
    if CENTRED:
        mean = (tl.sum(y, 1) / SIZE)[:, None]
        y = tl.where(mask, y - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(y * y, 1) / SIZE + eps)[:, None]


@triton.jit
def scaled(x, mean, scale, weight, bias, LATE: tl.constexpr, ONE: tl.constexpr):
    """(x - mean) * scale, times the weight, plus the bias, with the roundings that the constants say."""
    y = (x.to(tl.float32) - mean) * scale
    if not LATE:
        y = y.to(x.dtype)
    if weight is not None:
        if ONE == "rounded":
            weight = (weight.to(tl.float32) + 1.0).to(x.dtype)
        if LATE:
            weight = weight.to(tl.float32)
        if ONE == "fp32":
            weight += 1.0
        y = weight * y
    if bias is not None:
        y += bias.to(tl.float32)
    return y.to(x.dtype)


def why_not(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> str | None:
    """The reason why these inputs need another path, or None."""
    if x.dim() == 0 or not 0 < x.shape[-1] <= MAX_SIZE or x.numel() == 0:
        return f"x is {tuple(x.shape)}; rows must have 1 to {MAX_SIZE} elements."
    if not x.dtype.is_floating_point or x.dtype == torch.float64:
        return f"x is {x.dtype}, and the kernel computes in float32."
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            return f"x is {x.dtype} and {name} {tensor.dtype}; they must have one dtype."
        if tensor.device != x.device:
            return f"x is on {x.device} and {name} on {tensor.device}."
        if tensor.shape != x.shape[-1:]:
            return f"x is {tuple(x.shape)} and {name} {tuple(tensor.shape)}; {name} must have one element for each of a row."
        if tensor.stride(0) != 1 and tensor.shape[0] > 1:
            return f"{name} has stride {tensor.stride(0)}; it must be contiguous."
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return "x, weight or bias requires grad, and this kernel has no backward pass."
    return None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, contiguous, in x's dtype; the mean and the quotient in fp32.

    x: (..., size); weight: (size,) of the same dtype and device, or None. Raises ValueError with the reason of `why_not`.
    """
    out = run(x, weight, None, eps)
    if out is None:
        raise ValueError(why_not(x, weight))
    return out


def run(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool = False,
    late: bool = False,
    one: str = "",
) -> torch.Tensor | None:
    """The norm of x's rows over the last dimension, contiguous, in x's dtype; None if `why_not` gives a reason.

    x: (..., size); weight, bias: (size,) of the same dtype and device, or None. centred: subtract the mean. late: round only the
    result; otherwise the quotient is rounded to x's dtype before it is multiplied, and there is no bias. one: add 1 to the
    weight, in "fp32" (only if late) or "rounded" to its dtype.
    """
    start = _prepare((x, weight, bias), eps, centred, late, one)
    if start is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    start(x, weight, bias, out)
    return out


def row_launch(kernel: Any, x: torch.Tensor, **own: Any) -> launch.Launch:
    """The launch of a kernel that has whole rows of x in each program. own: its arguments besides the rows and their size."""
    size = x.shape[-1]
    rows = x.numel() // size
    block = triton.next_power_of_2(size)
    block_m = max(1, 1024 // block)
    return launch.Launch(
        kernel,
        (triton.cdiv(rows, block_m),),
        rows=rows,
        SIZE=size,
        BLOCK=block,
        BLOCK_M=block_m,
        **own,
        **early(x.device),
        num_warps=max(2, min(16, block // 512)),
        enable_fp_fusion=False,  # the model rounds each product before it adds to it
    )


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], eps: float, centred: bool, late: bool, one: str
) -> launch.Launch | None:
    x, weight, bias = tensors
    if why_not(x, weight, bias):
        return None
    return row_launch(rms_norm_kernel, x, eps=eps, CENTRED=centred, LATE=late, ONE=one)
