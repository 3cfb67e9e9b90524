"""Rotate: re-rotates the queries that score attention sinks by the number of tokens that a window has dropped.

    q_sinks = R(theta(near) - theta(p)) q,  near = min(p, sinks + window - 1),  theta(x) = x * inv_freq,  p: the query's position

StreamingLLM counts positions within the visible tokens. Rotary scores depend only on differences of positions, which are the
same in both counts within the window: stored keys keep their rotation, and only queries that score sinks are re-rotated.
Prefill kernels read these queries from memory; decode kernels compute them by the same device code (`device.rerotate`).

Rounds: both angles to fp32, as a model does, their difference is fp64, and the result is rounded once. So it equals the
model's own rotation at `near`, and its error does not grow with p. (That between queries and keys of the window does: each has
a rounding error of theta(p), at most p * inv_freq / 2**24 radians.) Limits: stride(-1) == 1. Oracle:
`kernels.reference.rerotated`.

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
from ..host import gpu, launch, tables
from ..reference import rerotated
from ..spans import DROPPED, KV_START, Q_START, width_of

BLOCK_H = 8  # heads that a program rotates


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
    """q_sinks in q's shape, dtype and strides, for `q` (batch, num_heads, q_len, head_dim) over `kv_len` slots.

    The position of query i is Q_START + i - KV_START + DROPPED of `spans`; without spans, kv_len - q_len + i. inv_freq: fp32
    (rotary_dim / 2,) on q's device; dimensions from rotary_dim on are not rotated. Pair i of the rotation has the dimensions
    (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if interleaved.
    """
    if triton is None or not (INTERPRETED or gpu.on_gpu(q.device)):
        return rerotated(q, kv_len, spans, inv_freq, window=window, sinks=sinks, interleaved=interleaved)
    if launch.thread.before is not None:
        launch.thread.before((q,))
    batch, num_heads, q_len, head_dim = q.shape
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    launch.start(
        rotate_kernel,
        (q_len, triton.cdiv(num_heads, BLOCK_H), batch),
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
        sinks + width_of(window) - 1,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PAIRS=inv_freq.shape[0],
        INTERLEAVED=interleaved,
        HAS_SPANS=spans is not None,
        BLOCK_H=BLOCK_H,
        ALIGN=tables.alignment(q),
        **early(q.device),
        num_warps=4,
        enable_fp_fusion=True,  # as in a `Launch`
    )
    return out


if triton is not None:
    from ..device.rerotate import partners, rerotate
    from ..device.tile import aligned_strides
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    @triton.jit(do_not_specialize=["stride_sb", "num_heads", "q_len", "kv_len", "last_position"])
    def rotate_kernel(
        Q,  # (batch, num_heads, q_len, head_dim)
        Out,  # (batch, num_heads, q_len, head_dim), with Q's strides, written
        Spans,  # (batch, 1, 1 or 2, integers), int32, not read without HAS_SPANS
        InvFreq,  # (PAIRS,), fp32
        stride_b, stride_h, stride_m, stride_sb, num_heads, q_len, kv_len, last_position,
        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_SPANS: tl.constexpr,
        BLOCK_H: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, Q_START: tl.constexpr = Q_START,
        KV_START: tl.constexpr = KV_START, DROPPED: tl.constexpr = DROPPED,
    ):  # fmt: skip
        """One program per query and BLOCK_H heads of a row, which share its angles."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        stride_b, stride_h, stride_m = aligned_strides(stride_b, stride_h, stride_m, ALIGN)
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
        # All loads come before the arithmetic, so that they overlap.
        mask, rotated = (head < num_heads)[:, None] & (offs_d < HEAD_DIM)[None, :], offs_d < 2 * PAIRS
        x = tl.load(Q + offs + offs_d[None, :], mask=mask, other=0.0)
        y = tl.load(Q + offs + partner[None, :], mask=mask & rotated[None, :], other=0.0)
        inv_freq = tl.load(InvFreq + pair, mask=rotated, other=0.0)
        q_rerotated = rerotate(x, y, token, inv_freq[None, :], first[None, :], last_position)
        tl.store(Out + offs + offs_d[None, :], q_rerotated.to(Out.dtype.element_ty), mask=mask)
