"""New tokens of a step whose K and V are shared out over ranks by sequence, by GPUs that write to each other's memory.

    every_q[:, rank * heads : (rank + 1) * heads] = q of the rank
    keys, values at the slots of the new tokens   = k, v of all KV heads, for the tokens that have one on this rank

One launch exchanges the heads of all ranks and appends K and V as `append` does. A program takes one block of heads after
another, with an exchange for each (`all_reduce.py`). Rounds: nothing. Limits: `why_not`. Oracle: `torch.cat` and `append`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch, tables
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .all_reduce import LIMIT, PROGRAMS, Peers, heads_of_a_block, receive, send


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "tokens", "total", "capacity"])
def gather_heads_kernel(
    Q,  # (batch, q_heads, tokens, K_DIM)
    K,  # (batch, kv_heads, tokens, K_DIM)
    V,  # (batch, kv_heads, tokens, V_DIM)
    EveryQ,  # (batch, WORLD * q_heads, tokens, K_DIM), contiguous, written
    Keys,  # (batch, WORLD / COPIES * kv_heads, capacity, K_DIM), written
    Values,  # (batch, WORLD / COPIES * kv_heads, capacity, V_DIM), written
    Slot,  # (1, tokens), int64
    Addresses,  # (WORLD,), int64: the memory of each rank, which is written and read
    Counts,  # (PROGRAMS,), int32: exchanges so far, read and written
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_keysb,
    stride_keysh, stride_keysn, stride_valuesb, stride_valuesh, stride_valuesn, q_heads, kv_heads, tokens, total, capacity,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, COPIES: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, PEER_BLOCK: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """total: heads of q, k and v in all rows and tokens; HEADS of them are a block."""
    WORDS: tl.constexpr = BLOCK_D * Q.dtype.element_ty.primitive_bitwidth // 32
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    number = tl.load(Counts + tl.program_id(0))
    heads = q_heads + 2 * kv_heads
    for block in range(tl.program_id(0), tl.cdiv(total, HEADS), tl.num_programs(0)):
        number += 1
        index = (block * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        inside = index < total
        token = index // heads % tokens
        row = index // (heads * tokens)
        q_head = index % heads
        k_head = q_head - q_heads
        v_head = k_head - kv_heads
        of_q = inside & (k_head < 0) & (offs_d < K_DIM)
        of_k = inside & (k_head >= 0) & (v_head < 0) & (offs_d < K_DIM)
        of_v = inside & (v_head >= 0) & (offs_d < V_DIM)
        q = tl.load(Q + row * stride_qb + q_head * stride_qh + token * stride_qn + offs_d, mask=of_q, other=0.0)
        k = tl.load(K + row * stride_kb + k_head * stride_kh + token * stride_kn + offs_d, mask=of_k, other=0.0)
        v = tl.load(V + row * stride_vb + v_head * stride_vh + token * stride_vn + offs_d, mask=of_v, other=0.0)
        x = tl.where(of_q, q, tl.where(of_k, k, v))
        rows = tl.minimum(total - block * HEADS, HEADS)
        send(x, EveryQ, rows, WORDS, Addresses, number, RANK, WORLD, PEER_BLOCK)
        slot = tl.load(Slot + token, mask=inside, other=-1)
        fits = (slot >= 0) & (slot < capacity)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                part = x
            else:
                part = receive(x, EveryQ, rows, WORDS, Addresses, number, rank, RANK, WORLD, PEER_BLOCK, LIMIT)
            there = ((row * WORLD + rank) * q_heads + q_head) * tokens + token
            tl.store(EveryQ + there * K_DIM + offs_d, part, mask=of_q)
            if rank % COPIES == 0:
                k_there, v_there = rank // COPIES * kv_heads + k_head, rank // COPIES * kv_heads + v_head
                keys = Keys + row * stride_keysb + k_there * stride_keysh + slot * stride_keysn
                values = Values + row * stride_valuesb + v_there * stride_valuesh + slot * stride_valuesn
                tl.store(keys + offs_d, part, mask=of_k & fits)
                tl.store(values + offs_d, part, mask=of_v & fits)
    tl.store(Counts + tl.program_id(0), number)


def why_not(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, peers: Peers
) -> str | None:
    """The reason why these heads need another path, or None."""
    tensors = (q, k, v, keys, values)
    if not all(x.numel() for x in tensors) or q.dtype not in checks.DTYPES or len({x.dtype for x in tensors}) > 1:
        return f"q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} of {q.dtype}."
    if _block_d(k, v) * q.element_size() > peers.block:
        return f"a head has {_block_d(k, v)} dimensions, and the memory has room for {peers.block} bytes."
    return checks.why_not_inference(*tensors, peers.memory, strided=True)


def gather_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    peers: Peers,
    copies: int = 1,
) -> torch.Tensor | None:
    """The queries of all ranks, (batch, world * heads, tokens, head_dim); None if `why_not` gives a reason.

    q, k, v: (batch, heads, tokens, head_dim) of this rank. keys, values: (batch, world / copies * KV heads, N, head_dim), where k
    and v of all KV heads are stored in `slots`, contiguous int64 (1, tokens). A token whose slot is below 0, or N or more, is not
    stored. copies: the number of consecutive ranks with the same KV heads. All ranks must call it at the same place.
    """
    if why_not(q, k, v, keys, values, peers) is not None:
        return None
    out = q.new_empty(q.shape[0], peers.world * q.shape[1], *q.shape[2:])
    tensors = (q, k, v, out, keys, values, slots, peers.addresses, peers.counts)
    _prepare(tensors, peers.rank, peers.world, peers.block, copies)(*tensors)
    return out


def _block_d(k: torch.Tensor, v: torch.Tensor) -> int:
    return tables.block_d(max(k.shape[3], v.shape[3]))


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...], rank: int, world: int, peer_block: int, copies: int) -> launch.Launch:
    q, k, v, _, keys, values, _, _, _ = tensors
    batch, q_heads, tokens, head_dim = q.shape
    total, block_d = batch * tokens * (q_heads + 2 * k.shape[1]), _block_d(k, v)
    heads = heads_of_a_block(total, block_d * q.element_size(), peer_block)
    laid_out = (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values))
    return launch.Launch(
        gather_heads_kernel,
        (min(PROGRAMS, triton.cdiv(total, heads)),),
        **{f"stride_{name}{axis}": tensor.stride(i) for name, tensor in laid_out for i, axis in enumerate("bhn")},
        q_heads=q_heads,
        kv_heads=k.shape[1],
        tokens=tokens,
        total=total,
        capacity=keys.shape[2],
        K_DIM=head_dim,
        V_DIM=v.shape[3],
        BLOCK_D=block_d,
        HEADS=heads,
        COPIES=copies,
        RANK=rank,
        WORLD=world,
        PEER_BLOCK=peer_block,
        LIMIT=LIMIT,
        **early(q.device),
        num_warps=max(1, min(8, heads * block_d // 256)),
    )
