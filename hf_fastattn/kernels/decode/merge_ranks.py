"""Merge over ranks: results of attention over the keys of each rank, exchanged and merged in one launch, by GPUs that write to
each other's memory.

    lse = log(sum_rank exp(lse_rank))      out = sum_rank exp(lse_rank - lse) out_rank

Weights and order of the sum are those of `shares.py`. Each rank receives the parts of its own heads. A program takes one block
of heads after another, with an exchange for each (`all_reduce.py`). Rounds: the result. Limits: `why_not`. Oracle:
`kernels.merge.merge`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .all_reduce import LIMIT, PROGRAMS, Peers, heads_of_a_block, receive_every, send_to
from .shares import weights_of

LSE_BYTES = 16  # of a head in a block


@triton.jit(do_not_specialize=["heads", "tokens", "total"])
def merge_ranks_kernel(
    Parts,  # (batch, WORLD * heads, tokens, HEAD_DIM), with SAME (batch, heads, tokens, HEAD_DIM)
    Lses,  # (batch, WORLD * heads, tokens), with SAME (batch, heads, tokens), fp32
    Sinks,  # (heads,), read with HAS_SINKS
    Out,  # (batch, tokens, heads, HEAD_DIM), contiguous, written
    Addresses,  # (WORLD,), int64: the memory of each rank, which is written and read
    Counts,  # (PROGRAMS,), int32: exchanges so far, read and written
    stride_pb, stride_ph, stride_pn, stride_lb, stride_lh, stride_ln, heads, tokens, total,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, SAME: tl.constexpr,
    HAS_SINKS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PEER_BLOCK: tl.constexpr, LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """heads: of a rank. total: its heads in all rows and tokens, HEADS in a block. SAME: all ranks have the same heads."""
    WORDS: tl.constexpr = BLOCK_D * Parts.dtype.element_ty.primitive_bitwidth // 32
    offs_d = tl.arange(0, BLOCK_D)
    local = tl.arange(0, HEADS)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    number = tl.load(Counts + tl.program_id(0))
    for block in range(tl.program_id(0), tl.cdiv(total, HEADS), tl.num_programs(0)):
        number += 1
        index = (block * HEADS + local).to(tl.int64)
        inside = index < total
        head = index % heads
        token = index // heads % tokens
        row = index // (heads * tokens)
        rows = tl.minimum(total - block * HEADS, HEADS)
        for rank in tl.static_range(WORLD):
            there = head if SAME else head + rank * heads
            lse = tl.load(Lses + row * stride_lb + there * stride_lh + token * stride_ln, mask=inside, other=0.0)
            part = Parts + (row * stride_pb + there * stride_ph + token * stride_pn)[:, None] + offs_d[None, :]
            part = tl.load(part, mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
            send_to(rank, part, Out, rows, WORDS, 0, Addresses, number, RANK, WORLD, PEER_BLOCK)
            send_to(rank, lse, Out, 1, rows, HEADS * WORDS, Addresses, number, RANK, WORLD, PEER_BLOCK)
        like = tl.zeros([BLOCK_N, HEADS], tl.float32)
        lse = receive_every(like, Out, 1, rows, HEADS * WORDS, Addresses, number, RANK, WORLD, PEER_BLOCK, LIMIT)
        lse = tl.where((tl.arange(0, BLOCK_N) < WORLD)[:, None], lse, float("-inf"))
        sink = tl.load(Sinks + head, mask=inside, other=0.0).to(tl.float32) if HAS_SINKS else 0.0
        weight = weights_of(lse, sink, HAS_SINKS)
        like = tl.zeros([BLOCK_N, HEADS, BLOCK_D], Parts.dtype.element_ty)
        parts = receive_every(like, Out, rows, WORDS, 0, Addresses, number, RANK, WORLD, PEER_BLOCK, LIMIT)
        out = tl.sum(parts.to(tl.float32) * weight[:, :, None], 0)
        out_ptrs = Out + (((row * tokens + token) * heads + head) * HEAD_DIM)[:, None] + offs_d[None, :]
        tl.store(out_ptrs, out.to(Out.dtype.element_ty), mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(Counts + tl.program_id(0), number)


def why_not(out: torch.Tensor, lse: torch.Tensor, peers: Peers) -> str | None:
    """The reason why these results need another path, or None."""
    if not out.numel() or out.dtype not in checks.DTYPES:
        return f"out is {tuple(out.shape)} of {out.dtype}."
    if _head_bytes(out) > peers.block:
        return f"a head has {out.shape[3]} dimensions, and the memory has room for {peers.block} bytes."
    return checks.why_not_inference(out, peers.memory, strided=True)


def merge_ranks(
    out: torch.Tensor, lse: torch.Tensor, heads: int, sink_logits: torch.Tensor | None, peers: Peers
) -> torch.Tensor | None:
    """Attention over the keys of all ranks for the heads of this rank; None if `why_not` gives a reason.

    out: (batch, num_heads, q_len, head_dim), the result over the keys of this rank. lse: (batch, num_heads, q_len), float32.
    heads: the number of heads of each rank: num_heads if all ranks have all heads, else num_heads / world. sink_logits: (heads,),
    one additional logit of each head of this rank. Returns (batch, heads, q_len, head_dim), stored as (batch, q_len, heads,
    head_dim). Without keys and sinks it is 0. All ranks must call it at the same place.
    """
    if why_not(out, lse, peers) is not None:
        return None
    batch, every, q_len, head_dim = out.shape
    merged = out.new_empty(batch, q_len, heads, head_dim).transpose(1, 2)
    tensors = (out, lse, sink_logits, merged, peers.addresses, peers.counts)
    _prepare(tensors, heads == every, peers.rank, peers.world, peers.block)(*tensors)
    return merged


def _head_bytes(out: torch.Tensor) -> int:
    """Bytes of a head's results in a block."""
    return (1 << (out.shape[3] - 1).bit_length()) * out.element_size() + LSE_BYTES


@launch.remember
def _prepare(tensors: tuple[torch.Tensor | None, ...], same: bool, rank: int, world: int, peer_block: int) -> launch.Launch:
    out, lse, sink_logits, merged, _, _ = tensors
    assert out is not None and lse is not None and merged is not None
    batch, heads, tokens, head_dim = merged.shape
    total, block_d, block_n = batch * heads * tokens, 1 << (head_dim - 1).bit_length(), 1 << (world - 1).bit_length()
    per_block = heads_of_a_block(total, _head_bytes(out), peer_block)
    return launch.Launch(
        merge_ranks_kernel,
        (min(PROGRAMS, triton.cdiv(total, per_block)),),
        **{f"stride_p{axis}": out.stride(i) for i, axis in enumerate("bhn")},
        **{f"stride_l{axis}": lse.stride(i) for i, axis in enumerate("bhn")},
        heads=heads,
        tokens=tokens,
        total=total,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        HEADS=per_block,
        SAME=same,
        HAS_SINKS=sink_logits is not None,
        RANK=rank,
        WORLD=world,
        PEER_BLOCK=peer_block,
        LIMIT=LIMIT,
        **early(out.device),
        num_warps=max(1, min(8, per_block * block_d * block_n // 512)),
    )
