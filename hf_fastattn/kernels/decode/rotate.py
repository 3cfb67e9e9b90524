"""Rotate: the queries that score attention sinks, re-rotated by the tokens that a window has dropped.

StreamingLLM counts positions within what a query sees, the first `sinks` and the last `window` tokens. Rotary scores depend on
differences of positions alone, and those within the window are the same in either count. So nothing stored is ever
re-rotated: keys keep the rotation of the position they were read at, and only the sinks are scored with another query,

    q_sinks = R(theta(near) - theta(p)) q,    near = min(p, sinks + window - 1)

where p is the query's position and theta(x) = x * inv_freq. A model computes theta in fp32, which at large x is not
the exact product; both angles here are rounded as the model rounds them, so that the result is the model's own rotation
at `near` and no error grows with p. (Between queries and window keys it does: both carry roundings of theta(p), at
most p * inv_freq / 2**24 radians each.) The difference is taken and reduced in fp64.

Prefill kernels read these queries from memory, where `rotate` puts them. Decode kernels have them from the device code below,
in the one program of a row that scores sinks.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu
from ..reference import turned_back
from ..spans import DROPPED, KV_START, NO_WINDOW, Q_START

BLOCK_H = 8  # heads a program rotates


def rotate(
    q: torch.Tensor,
    kv_len: int,
    spans: torch.Tensor | None,
    inv_freq: torch.Tensor,
    *,
    window: int | None,
    sinks: int,
    interleaved: bool,
) -> torch.Tensor:
    """q_sinks, of q's shape, dtype and strides, for `q` (batch, num_heads, q_len, head_dim) over `kv_len` slots.

    Query i is the row's token Q_START + i - KV_START + DROPPED of `spans`; without, kv_len - q_len + i. inv_freq: fp32
    (rotary_dim / 2,) on q's device; dimensions from rotary_dim on are not rotated. Pair i of a rotation is dimensions
    (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where interleaved.
    """
    if triton is None or not (INTERPRETED or gpu.on_gpu(q.device)):
        return turned_back(q, kv_len, spans, inv_freq, window=window, sinks=sinks, interleaved=interleaved)
    batch, num_heads, q_len, head_dim = q.shape
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
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
            sinks + (NO_WINDOW if window is None else window) - 1,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            PAIRS=inv_freq.shape[0],
            INTERLEAVED=interleaved,
            HAS_SPANS=spans is not None,
            BLOCK_H=BLOCK_H,
            **early(q.device),
            num_warps=4,
        )
    return out


if triton is not None:
    from ..device.turn import partners, turn_back
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    @triton.jit(do_not_specialize=["stride_sb", "num_heads", "q_len", "kv_len", "last_place"])
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
        last_place,
        HEAD_DIM: tl.constexpr,
        BLOCK_D: tl.constexpr,
        PAIRS: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HAS_SPANS: tl.constexpr,
        BLOCK_H: tl.constexpr,
        EARLY: tl.constexpr,
        Q_START: tl.constexpr = Q_START,
        KV_START: tl.constexpr = KV_START,
        DROPPED: tl.constexpr = DROPPED,
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
        offs_d = tl.arange(0, BLOCK_D)
        partner, pair, first = partners(offs_d, PAIRS, INTERLEAVED)
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        offs = (row * stride_b + head.to(tl.int64) * stride_h + i.to(tl.int64) * stride_m)[:, None]
        # All loads before the arithmetic, which their time covers.
        mask, turns = (head < num_heads)[:, None] & (offs_d < HEAD_DIM)[None, :], offs_d < 2 * PAIRS
        x = tl.load(Q + offs + offs_d[None, :], mask=mask, other=0.0)
        y = tl.load(Q + offs + partner[None, :], mask=mask & turns[None, :], other=0.0)
        inv_freq = tl.load(InvFreq + pair, mask=turns, other=0.0)
        turned = turn_back(x, y, token, inv_freq[None, :], first[None, :], last_place)
        tl.store(Out + offs + offs_d[None, :], turned.to(Out.dtype.element_ty), mask=mask)
