"""Rotate: the queries that score attention sinks, turned back by the tokens a window has let go.

StreamingLLM counts positions within what a query sees, the first `sinks` and the last `window` tokens. Rotary scores depend on
differences of positions alone, and those within the window are the same in either count. So nothing stored is ever
turned: keys keep the rotation of the position they were read at, and only the sinks are scored with another query,

    q_sinks = R(theta(near) - theta(p)) q,    near = min(p, sinks + window - 1)

where p is the query's position and theta(x) = x * inv_freq. A model computes theta in fp32, which at large x is not
the exact product; both angles here are rounded as the model rounds them, so that the result is the model's own rotation
at `near` and no error grows with p. (Between queries and window keys it does: both carry roundings of theta(p), at
most p * inv_freq / 2**24 radians each.) The difference is taken and reduced in fp64.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from __future__ import annotations

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from . import INTERPRETED
from .checks import on_device
from .spans import DROPPED, KV_START, Q_START

BLOCK_H = 8  # heads a program turns


def rotate(
    q: torch.Tensor,
    kv_len: int,
    spans: torch.Tensor | None,
    inv_freq: torch.Tensor,
    *,
    window: int,
    sinks: int,
    interleaved: bool,
) -> torch.Tensor:
    """q_sinks, of q's shape, dtype and strides, for `q` (batch, num_heads, q_len, head_dim) over `kv_len` slots.

    Query i is the row's token Q_START + i - KV_START + DROPPED of `spans`; without, kv_len - q_len + i. inv_freq: fp32
    (rotary_dim / 2,) on q's device; dimensions from rotary_dim on are not turned. Pair i of a rotation is dimensions
    (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where interleaved.
    """
    if triton is None or not (q.is_cuda or INTERPRETED):
        return _rotate_torch(q, kv_len, spans, inv_freq, window, sinks, interleaved)
    batch, num_heads, q_len, head_dim = q.shape
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    pairs = inv_freq.shape[0]
    with on_device(q):
        rotate_kernel[(q_len, triton.cdiv(num_heads, BLOCK_H), batch)](
            q,
            out,
            q if spans is None else spans,
            inv_freq,
            q.stride(0),
            q.stride(1),
            q.stride(2),
            0 if spans is None else spans.stride(0),
            num_heads,
            q_len,
            kv_len,
            window,
            PAIRS=pairs,
            REST=head_dim - 2 * pairs,
            SINKS=sinks,
            INTERLEAVED=interleaved,
            HAS_SPANS=spans is not None,
            BLOCK_H=BLOCK_H,
            BLOCK_P=triton.next_power_of_2(pairs),
            BLOCK_R=triton.next_power_of_2(max(1, head_dim - 2 * pairs)),
            **early(q.device),
            num_warps=4,
        )
    return out


def _rotate_torch(q, kv_len, spans, inv_freq, window, sinks, interleaved):
    """The twin in torch operations."""
    q_len, pairs = q.shape[2], inv_freq.shape[0]
    token = torch.arange(q_len, device=q.device)
    if spans is None:
        token = (token + kv_len - q_len)[None]
    else:
        q_start, kv_start, dropped = (spans[:, 0, 0, i, None].long() for i in (Q_START, KV_START, DROPPED))
        token = token + q_start - kv_start.clamp(min=0) + dropped
    near = token.clamp(max=sinks + window - 1)
    there, here = (x[..., None].float() * inv_freq for x in (near, token))
    angle = here.double() - there.double()
    angle = angle - 2 * math.pi * torch.round(angle / (2 * math.pi))
    cos, sin = angle.float().cos()[:, None], angle.float().sin()[:, None]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    out[..., 2 * pairs :] = q[..., 2 * pairs :]
    x, y = q[..., first].float(), q[..., second].float()
    out[..., first] = (x * cos + y * sin).to(q.dtype)
    out[..., second] = (y * cos - x * sin).to(q.dtype)
    return out


if triton is not None:
    from .overlap import early, let_next_begin, wait_for_inputs

    @triton.jit(do_not_specialize=["stride_sb", "q_len", "kv_len", "window"])
    def rotate_kernel(
        Q,
        Out,
        Spans,
        InvFreq,
        stride_b,
        stride_h,
        stride_m,
        stride_sb,
        num_heads,
        q_len,
        kv_len,
        window,
        PAIRS: tl.constexpr,
        REST: tl.constexpr,
        SINKS: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HAS_SPANS: tl.constexpr,
        BLOCK_H: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_R: tl.constexpr,
        EARLY: tl.constexpr,
        Q_START: tl.constexpr = Q_START,
        KV_START: tl.constexpr = KV_START,
        DROPPED: tl.constexpr = DROPPED,
        TWO_PI: tl.constexpr = 2 * math.pi,
    ):
        """One program per query and BLOCK_H heads of a row, which have its angles in common."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        i, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
        if HAS_SPANS:
            span = Spans + row * stride_sb
            token = i + tl.load(span + Q_START) - tl.maximum(tl.load(span + KV_START), 0) + tl.load(span + DROPPED)
        else:
            token = i + kv_len - q_len
        pair = tl.arange(0, BLOCK_P)
        first = 2 * pair if INTERLEAVED else pair
        second = first + 1 if INTERLEAVED else pair + PAIRS
        rest = tl.arange(0, BLOCK_R)
        # All loads before the arithmetic, which their time covers.
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        offs = (row * stride_b + head.to(tl.int64) * stride_h + i.to(tl.int64) * stride_m)[:, None]
        mask = (head < num_heads)[:, None] & (pair < PAIRS)[None, :]
        x = tl.load(Q + offs + first[None, :], mask=mask).to(tl.float32)
        y = tl.load(Q + offs + second[None, :], mask=mask).to(tl.float32)
        inv_freq = tl.load(InvFreq + pair, mask=pair < PAIRS, other=0.0)
        near = tl.minimum(token, SINKS + window - 1)
        here, there = token.to(tl.float32) * inv_freq, near.to(tl.float32) * inv_freq
        angle = here.to(tl.float64) - there.to(tl.float64)
        angle = (angle - TWO_PI * tl.floor(angle / TWO_PI + 0.5)).to(tl.float32)
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
        tl.store(Out + offs + first[None, :], (x * cos + y * sin).to(Out.dtype.element_ty), mask=mask)
        tl.store(Out + offs + second[None, :], (y * cos - x * sin).to(Out.dtype.element_ty), mask=mask)
        if REST:
            mask = (head < num_heads)[:, None] & (rest < REST)[None, :]
            offs += 2 * PAIRS + rest[None, :]
            tl.store(Out + offs, tl.load(Q + offs, mask=mask), mask=mask)
