"""Shares: the results of attention over parts of the keys, which ranks exchange as one tensor, and their merge in one launch.

    lse = log(sum_n exp(lse_n))      out = sum_n exp(lse_n - lse) out_n

Learned sink logits are one more part, with out 0. The sum is in the order of the parts, so ranks that merge the same parts get
the same bits. Rounds: the result; the sum is fp32. Limits: an even head_dim. Oracle: `kernels.merge.merge`.

Source: Shyam et al., "Tree Attention" (2024), section 4.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch
from ..merge import merge


def pack(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """One tensor (batch, num_heads, q_len, head_dim + 4 bytes) of the dtype of out, with the bits of lse at its end.

    out: (batch, num_heads, q_len, head_dim), of an even head_dim. lse: (batch, num_heads, q_len), float32.
    """
    return torch.cat([out, lse[..., None].contiguous().view(out.dtype)], -1)


def merge_shares(parts: torch.Tensor, head_dim: int, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
    """The merged out, (batch, num_heads, q_len, head_dim), of parts (n, batch, num_heads, q_len, head_dim + 4 bytes).

    parts: results of `pack`, with stride(-1) == 1 and other strides of an even number of elements. sink_logits: (num_heads,), one
    additional logit of each head. The result is stored as (batch, q_len, num_heads, head_dim). Without keys and sinks it is 0.
    """
    lses = parts[..., head_dim:].view(torch.float32)
    outs = parts[..., :head_dim]
    _, batch, heads, q_len, _ = outs.shape
    out = outs.new_empty(batch, q_len, heads, head_dim).transpose(1, 2)
    if triton is None or not (INTERPRETED or gpu.on_gpu(parts.device)):
        out.copy_(_merge_torch(outs, lses[..., 0], sink_logits))
        return out
    tensors = (outs, lses, sink_logits, out)
    _prepare(tensors)(*tensors)
    return out


def _merge_torch(outs: torch.Tensor, lses: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    if sink_logits is not None:
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
        lses = torch.cat([lses, sink_logits.float()[:, None].expand_as(lses[:1])])
    return merge(outs, lses)[0]


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]) -> launch.Launch:
    outs, lses, sink_logits, _ = tensors
    parts, batch, heads, q_len, head_dim = outs.shape
    block_n = 1 << (parts - 1).bit_length()
    return launch.Launch(
        merge_shares_kernel,
        (q_len, heads, batch),
        **{f"stride_o{axis}": outs.stride(i) for i, axis in enumerate("nbhq")},
        **{f"stride_l{axis}": lses.stride(i) for i, axis in enumerate("nbhq")},
        parts=parts,
        heads=heads,
        q_len=q_len,
        HEAD_DIM=head_dim,
        BLOCK_N=block_n,
        BLOCK_D=1 << (head_dim - 1).bit_length(),
        HAS_SINKS=sink_logits is not None,
        **early(outs.device),
        num_warps=1 if block_n <= 8 else 4,
    )


if triton is not None:
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    @triton.jit
    def weights_of(lse, sink, HAS_SINKS: tl.constexpr):
        """The weights of the parts. lse: (parts,) or (parts, heads). sink: a logit, or one of each head; read if HAS_SINKS."""
        top = tl.max(lse, 0)
        if HAS_SINKS:
            top = tl.maximum(top, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(lse - top)
        total = tl.sum(weight, 0)
        if HAS_SINKS:
            total += tl.exp(sink - top)
        return weight / tl.where(total == 0, 1.0, total)

    @triton.jit(do_not_specialize=["parts", "heads", "q_len"])
    def merge_shares_kernel(
        Outs,  # (parts, batch, heads, q_len, HEAD_DIM)
        Lses,  # (parts, batch, heads, q_len), fp32
        Sinks,  # (heads,), read with HAS_SINKS
        Out,  # (batch, q_len, heads, HEAD_DIM), contiguous, written
        stride_on, stride_ob, stride_oh, stride_oq, stride_ln, stride_lb, stride_lh, stride_lq, parts, heads, q_len,
        HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One program per query of a head and row. All parts of it are loaded at once."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        q = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1).to(tl.int64)
        row = tl.program_id(2).to(tl.int64)
        n = tl.arange(0, BLOCK_N).to(tl.int64)
        offs_d = tl.arange(0, BLOCK_D)
        lse = tl.load(
            Lses + n * stride_ln + row * stride_lb + head * stride_lh + q * stride_lq, mask=n < parts, other=float("-inf")
        )
        sink = tl.load(Sinks + head).to(tl.float32) if HAS_SINKS else 0.0
        weight = weights_of(lse, sink, HAS_SINKS)
        outs = tl.load(
            Outs + (n * stride_on + row * stride_ob + head * stride_oh + q * stride_oq)[:, None] + offs_d[None, :],
            mask=(n < parts)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        out = tl.sum(outs.to(tl.float32) * weight[:, None], 0)
        out_ptrs = Out + ((row * q_len + q) * heads + head) * HEAD_DIM + offs_d
        tl.store(out_ptrs, out.to(Out.dtype.element_ty), mask=offs_d < HEAD_DIM)
