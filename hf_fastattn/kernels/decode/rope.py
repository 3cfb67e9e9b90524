"""Rotary position embedding of queries and keys in one launch, with the roundings of the model's code.

    out = round(round(x * cos) + round(y * sin)),  y = (-x[D/2:], x[:D/2])

The two dimensions of a pair may also be neighbours, the first D of more dimensions may be rotated, and cosines may be stored once
for each pair. The code of the models needs ten launches or more over tensors as large as the queries.

Sources: Su et al., "RoFormer" (2021), section 3.4.2; for the order of dimensions and the roundings the models of Transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..checks import DTYPES
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs

BLOCK_H = 8  # heads that a program rotates after one load of the cosines of their token


@triton.jit(do_not_specialize=["num_heads", "kv_heads", "tokens"])
def rope_kernel(
    Q,
    K,
    Cos,
    Sin,
    OutQ,
    OutK,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_km,
    stride_cb,
    stride_cm,
    stride_oqb,
    stride_oqh,
    stride_oqm,
    stride_okb,
    stride_okh,
    stride_okm,
    num_heads,
    kv_heads,
    tokens,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    OF_PAIR: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token and block of heads; the heads of K follow those of Q."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    of_q = head < num_heads
    of_k = (head >= num_heads) & (head < num_heads + kv_heads)
    kv_head = head - num_heads
    offs = tl.arange(0, BLOCK_D)[None, :]
    d_mask = offs < HEAD_DIM
    turns = offs < WIDTH
    if INTERLEAVED and not APART:
        pair, second = offs // 2, offs % 2
    else:
        pair, second = offs % (WIDTH // 2), offs // (WIDTH // 2)
    if INTERLEAVED:
        own, other = 2 * pair + second, 2 * pair + 1 - second
    else:
        own, other = offs, pair + (1 - second) * (WIDTH // 2)
    if APART:
        own = tl.where(turns, own, offs)
    at = pair if OF_PAIR else offs

    q_ptrs = Q + row * stride_qb + token * stride_qm + head * stride_qh
    k_ptrs = K + row * stride_kb + token * stride_km + kv_head * stride_kh
    x = tl.load(q_ptrs + own, mask=of_q & d_mask, other=0.0) + tl.load(k_ptrs + own, mask=of_k & d_mask, other=0.0)
    y = tl.load(q_ptrs + other, mask=of_q & turns, other=0.0) + tl.load(k_ptrs + other, mask=of_k & turns, other=0.0)
    y = tl.where(second == 0, -y, y)
    cos = tl.load(Cos + row * stride_cb + token * stride_cm + at, mask=turns, other=0.0)
    sin = tl.load(Sin + row * stride_cb + token * stride_cm + at, mask=turns, other=0.0)
    dtype = Q.dtype.element_ty
    by_cos, by_sin = x.to(tl.float32) * cos.to(tl.float32), y.to(tl.float32) * sin.to(tl.float32)
    if not LATE:
        by_cos, by_sin = by_cos.to(dtype).to(tl.float32), by_sin.to(dtype).to(tl.float32)
    out = tl.where(turns, by_cos + by_sin, x.to(tl.float32)).to(dtype)
    tl.store(OutQ + row * stride_oqb + token * stride_oqm + head * stride_oqh + offs, out, mask=of_q & d_mask)
    tl.store(OutK + row * stride_okb + token * stride_okm + kv_head * stride_okh + offs, out, mask=of_k & d_mask)


def why_not(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, doubled: bool = False) -> str | None:
    """The reason why these inputs need another path, or None."""
    if not (q.dtype == k.dtype and cos.dtype == sin.dtype and q.device == k.device == cos.device == sin.device):
        return f"q and k, or cos and sin, differ in dtype or device: {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}."
    if q.dtype not in DTYPES or cos.dtype not in (q.dtype, torch.float32):
        return f"q is {q.dtype} and cos {cos.dtype}, and the kernel computes in float32."
    if q.dim() != 4 or k.dim() != 4 or q.numel() == 0:
        return f"q and k must be (batch, heads, tokens, head_dim); got {tuple(q.shape)} and {tuple(k.shape)}."
    batch, _, tokens, head_dim = q.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:]:
        return f"q and k must agree in all but heads; got {tuple(q.shape)} and {tuple(k.shape)}."
    width = cos.shape[-1] * (1 + doubled)
    if any(t.dim() != 3 or t.shape[0] not in (1, batch) or t.shape[1] != tokens for t in (cos, sin)) or width % 2:
        return f"cos and sin must be (batch or 1, {tokens}, an even width); got {tuple(cos.shape)} and {tuple(sin.shape)}."
    if not 0 < width <= head_dim:
        return f"cos and sin rotate {width} of {head_dim} dimensions."
    if cos.shape != sin.shape or cos.stride() != sin.stride() or any(t.stride(-1) != 1 for t in (q, k, cos)):
        return "cos and sin must have one layout, and the last dimension of all must be contiguous."
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return "q or k requires grad, and this kernel has no backward pass."
    return None


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, (batch, heads, tokens, head_dim) each, rotated as in Llama by cos and sin, (batch or 1, tokens, width).

    Returns new tensors in the layout of q and k. Raises ValueError with the reason of `why_not`.
    """
    out = run(q, k, cos, sin)
    if out is None:
        raise ValueError(why_not(q, k, cos, sin))
    return out


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    apart: bool = False,
    of_pair: bool = False,
    doubled: bool = False,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`rope`, or None if `why_not` gives a reason. Dimensions from the width on are copied.

    interleaved: dimensions 2i and 2i + 1 are a pair, instead of i and i + width/2. apart: after the rotation they are i and
    i + width/2. of_pair: pair i reads cos[i], instead of cos[d] for each dimension d. doubled: cos is half as wide as the rotated
    dimensions (then of_pair). late: round only the result.
    """
    start = _prepare((q, k, cos, sin), interleaved, apart, of_pair, doubled, late)
    if start is None:
        return None
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    start(q, k, cos, sin, out_q, out_k)
    return out_q, out_k


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    interleaved: bool,
    apart: bool,
    of_pair: bool,
    doubled: bool,
    late: bool,
) -> launch.Launch | None:
    q, k, cos, sin = tensors
    if why_not(q, k, cos, sin, doubled):
        return None
    batch, num_heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    laid_out = (("q", q), ("k", k), ("oq", torch.empty_like(q)), ("ok", torch.empty_like(k)))
    return launch.Launch(
        rope_kernel,
        (batch * tokens, triton.cdiv(num_heads + kv_heads, BLOCK_H)),
        **{f"stride_{name}{axis}": tensor.stride(i) for name, tensor in laid_out for i, axis in enumerate("bhm")},
        stride_cb=cos.stride(0) if cos.shape[0] > 1 else 0,
        stride_cm=cos.stride(1),
        num_heads=num_heads,
        kv_heads=kv_heads,
        tokens=tokens,
        HEAD_DIM=head_dim,
        WIDTH=cos.shape[-1] * (1 + doubled),
        INTERLEAVED=interleaved,
        APART=apart,
        OF_PAIR=of_pair,
        LATE=late,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=BLOCK_H,
        **early(q.device),
        num_warps=2,
        enable_fp_fusion=False,  # the model rounds the product before it adds it
    )
