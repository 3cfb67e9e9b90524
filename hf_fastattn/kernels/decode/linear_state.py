"""The step of linear attention in two launches, with one pass over the state, in place.

    U = U + phi(k) v^T;  z = z + phi(k);  out = phi(q) U / (phi(q) . z), or 0 where the denominator is 0

A program has BLOCK_D columns of the state of a row and KV head, which it reads in blocks of features, and serves all query heads
of this KV head: the state is read and written once. All programs of a KV head read z, so the first launch, an addition of torch,
has changed it before.

Rounds: out to its dtype; all else is fp32. Limits: `why_not`.
Oracle: `kernels.linear_attention.step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs

COLUMNS = 32  # of a program at most
MOST_HEADS = 8  # query heads of a KV head, which all are in one block
AT_ONCE = 8192  # products of a block of features: query heads x features x columns


@triton.jit
def linear_state_kernel(
    Fq,  # (rows, kv_heads * GROUP, FEATURES)
    Fk,  # (rows, kv_heads, FEATURES)
    V,  # (rows, kv_heads, DIM)
    U,  # (rows, kv_heads, FEATURES, DIM), read and written
    Z,  # (rows, kv_heads, FEATURES), with the new token
    Out,  # (rows, kv_heads * GROUP, DIM), written
    stride_vr, stride_vh, kv_heads,
    GROUP: tl.constexpr, FEATURES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_D columns of the state of a row and KV head."""
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(0) // blocks
    head = row * kv_heads + kv_head
    offs_g, offs_f = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_F)
    offs_d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_g, in_d = offs_g < GROUP, offs_d < DIM
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    v = tl.load(V + row * stride_vr + kv_head * stride_vh + offs_d, mask=in_d, other=0.0)
    wide = v.to(tl.float32)
    out, total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    for first in range(0, FEATURES, BLOCK_F):
        offs = first + offs_f
        in_f = offs < FEATURES
        fk = tl.load(Fk + head * FEATURES + offs, mask=in_f, other=0.0)
        z = tl.load(Z + head * FEATURES + offs, mask=in_f, other=0.0)
        states = U + (head * FEATURES + offs[:, None]) * DIM + offs_d[None, :]
        mask = in_f[:, None] & in_d[None, :]
        u = tl.load(states, mask=mask, other=0.0) + fk[:, None] * wide[None, :]
        tl.store(states, u, mask=mask)
        fq = Fq + (head * GROUP + offs_g[:, None]) * FEATURES + offs[None, :]
        q = tl.load(fq, mask=in_g[:, None] & in_f[None, :], other=0.0)
        out += tl.sum(q[:, :, None] * u[None, :, :], 1)
        total += tl.sum(q * z[None, :], 1)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    to = Out + (head * GROUP + offs_g[:, None]) * DIM + offs_d[None, :]
    tl.store(to, out.to(v.dtype), mask=in_g[:, None] & in_d[None, :])


def why_not(fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor, u: torch.Tensor, z: torch.Tensor) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `linear_state`."""
    if u.dim() != 4 or u.numel() == 0 or u.shape[0] > launch.MAX_GRID or u.shape[3] > checks.MAX_VALUE_DIM:
        return f"u is {tuple(u.shape)}; it must be (rows, kv_heads, features, value_dim), value_dim at most 256."
    rows, kv_heads, features, dim = u.shape
    if fk.shape != z.shape or fk.shape != u.shape[:3] or v.shape != (rows, kv_heads, dim):
        return f"fk is {tuple(fk.shape)}, z {tuple(z.shape)} and v {tuple(v.shape)}, for a state {tuple(u.shape)}."
    if fq.dim() != 3 or fq.shape[0] != rows or fq.shape[2] != features or fq.shape[1] % kv_heads:
        return f"fq is {tuple(fq.shape)}; it must be ({rows}, a multiple of {kv_heads}, {features})."
    if fq.shape[1] > MOST_HEADS * kv_heads:
        return f"{fq.shape[1] // kv_heads} query heads share a KV head, and the kernel takes at most {MOST_HEADS}."
    if {x.dtype for x in (fq, fk, u, z)} != {torch.float32} or v.dtype not in checks.DTYPES:
        return f"fq is {fq.dtype}, fk {fk.dtype}, u {u.dtype} and z {z.dtype}, all of which must be float32, and v {v.dtype}."
    return checks.why_not_inference(u, fq, fk, z) or checks.why_not_inference(v, u, strided=True)


def linear_state(fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor, u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The result of one new token of each row, (rows, num_heads, value_dim) in v's dtype; u and z change in place.

    fq: features of the queries (rows, num_heads, features); fk: of the keys (rows, kv_heads, features); u: (rows, kv_heads,
    features, value_dim); z: (rows, kv_heads, features); all fp32 and contiguous. v: (rows, kv_heads, value_dim), the last
    contiguous. Raises ValueError with the reason for other inputs.
    """
    out = torch.empty(*fq.shape[:2], v.shape[-1], dtype=v.dtype, device=v.device)
    launch_step = _prepare((fq, fk, v, u, z))  # which may refuse
    z.add_(fk)
    launch_step(fq, fk, v, u, z, out)
    return out


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...]) -> launch.Launch:
    fq, fk, v, u, z = tensors
    if (reason := why_not(fq, fk, v, u, z)) is not None:
        raise ValueError(reason)
    rows, kv_heads, features, dim = u.shape
    group = fq.shape[1] // kv_heads
    block_g, block_d = triton.next_power_of_2(group), min(triton.next_power_of_2(dim), COLUMNS)
    block_f = max(1, min(triton.next_power_of_2(features), AT_ONCE // (block_g * block_d)))
    return launch.Launch(
        linear_state_kernel,
        (kv_heads * triton.cdiv(dim, block_d), rows),
        stride_vr=v.stride(0),
        stride_vh=v.stride(1),
        kv_heads=kv_heads,
        GROUP=group,
        FEATURES=features,
        DIM=dim,
        BLOCK_G=block_g,
        BLOCK_F=block_f,
        BLOCK_D=block_d,
        **early(u.device),
        num_warps=launch.warps_of(block_f * block_d),
    )
