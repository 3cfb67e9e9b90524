"""RMSNorm of groups of a row, multiplied by the SiLU of a gate before or after it, in one launch instead of nine.

    y = x * silu(gate) if FIRST;  y = weight * y / sqrt(mean(y^2) + eps);  out = y * silu(gate) unless FIRST

Rounds: as the model's code: the quotient and its product with the weight, unless LATE, and the result; all else is fp32.
Limits: `why_not`. Oracle: `kernels.states.gated_norm`, and the norms of Transformers (`hf.gated_norm_of`).

Source: Dao and Gu, "Transformers are SSMs" (2024), section 7.2; for the roundings the norms of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..host import launch
from ..host.overlap import let_next_begin, wait_for_inputs
from . import rms_norm
from .linear_rows import activated


@triton.jit(do_not_specialize=["rows", "eps"])
def gated_norm_kernel(
    X,  # (rows, SIZE)
    Gate,  # (rows / GROUPS, GROUPS * SIZE)
    Weight,  # (GROUPS * SIZE,)
    Out,  # (rows, SIZE), written
    stride_gate, rows, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, FIRST: tl.constexpr,
    LATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_M rows, each of one group."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (offs < SIZE)
    inside = row % GROUPS * SIZE + offs
    x = tl.load(X + row * SIZE + offs, mask=mask, other=0.0)
    gate = tl.load(Gate + row // GROUPS * stride_gate + inside, mask=mask, other=0.0)
    weight = tl.load(Weight + inside, mask=mask, other=0.0).to(tl.float32)
    act, y = activated(gate.to(tl.float32), "silu"), x.to(tl.float32)
    if FIRST:
        y *= act
    _, scale = rms_norm.moments(y, eps, mask, SIZE, False)
    y *= scale
    if LATE:
        y *= weight
    else:
        y = (y.to(x.dtype).to(tl.float32) * weight).to(x.dtype).to(tl.float32)
    if not FIRST:
        y *= act
    tl.store(Out + row * SIZE + offs, y.to(x.dtype), mask=mask)


def why_not(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `run`."""
    if gate.shape != x.shape or gate.dtype != x.dtype or gate.device != x.device:
        return f"x is {x.dtype} {tuple(x.shape)} on {x.device}, and gate {gate.dtype} {tuple(gate.shape)} on {gate.device}."
    if gate.requires_grad and torch.is_grad_enabled():
        return "gate requires grad, and this kernel has no backward pass."
    return rms_norm.why_not(x, weight)


def run(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, first: bool, late: bool, groups: int = 1
) -> torch.Tensor | None:
    """The gated norm of x's rows over the last dimension, contiguous, in x's dtype; None if `why_not` gives a reason.

    x, gate: (..., groups * size); weight: (groups * size,), all of one dtype and device. first: whether the gate comes before the
    norm. late: round only the result.
    """
    if gate.shape != x.shape or x.dim() == 0 or groups < 1 or x.shape[-1] % groups:
        return None
    shape = x.shape
    x, gate = x.reshape(-1, shape[-1]).contiguous(), gate.reshape(-1, shape[-1])
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    start = _prepare((x, gate, weight), eps, first, late, groups)
    if start is None:
        return None
    out = torch.empty_like(x)
    start(x, gate, weight, out)
    return out.view(shape)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...], eps: float, first: bool, late: bool, groups: int) -> launch.Launch | None:
    given: Any = tensors
    x, gate, weight = given
    if why_not(x, gate, weight):
        return None
    parts = x.view(-1, x.shape[1] // groups)
    own = {"GROUPS": groups, "FIRST": first, "LATE": late}
    return rms_norm.row_launch(gated_norm_kernel, parts, stride_gate=gate.stride(0), eps=eps, **own)
