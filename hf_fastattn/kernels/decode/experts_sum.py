"""The last launch of `experts`: for each token the weighted sum of the results of its chosen experts.

    out[t] = sum_j scores[t, j] * (sum over splits of partial[:, t, j] + bias[experts[t, j]])

Rounds: the sum of the splits, that with the bias, the product if scores have the output's dtype, and the sum over j, in fp32
and in the order of the choices, once. Limits: those of `experts`. Oracle: `mixture.reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..host.overlap import let_next_begin, wait_for_inputs


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    Partial,  # (SPLITS, tokens, TOP_K, SIZE)
    Experts,  # (tokens, TOP_K), int
    Scores,  # (tokens, TOP_K)
    Bias,  # (NUM_EXPERTS, SIZE), or None if Partial contains it
    Out,  # (tokens, SIZE), written
    tokens,
    SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, ONE_TOKEN: tl.constexpr,
    BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK_N elements of the output.

    If a token has chosen an expert twice, only the first choice has a result, except with one token.
    """
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    token = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs < SIZE
    choice = tl.arange(0, BLOCK_TOP)
    dtype: tl.constexpr = Out.dtype.element_ty
    chosen = tl.load(Experts + token * TOP_K + choice, mask=choice < TOP_K, other=-1).to(tl.int32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(Experts + token * TOP_K + j).to(tl.int32)
        owner = tl.where(inside, expert, -1)
        live = (owner >= 0) & (owner < NUM_EXPERTS)  # others are the experts of other ranks
        first, stored = j, inside
        if not ONE_TOKEN:  # otherwise loads of Partial need not wait for the expert
            first, stored = tl.min(tl.where(chosen == expert, choice, TOP_K), 0), live
        y = tl.zeros([BLOCK_N], tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((split * tokens + token) * TOP_K + first) * SIZE
            y += tl.load(Partial + at + offs, mask=stored, other=0.0).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
        if Bias is not None:
            bias = tl.load(Bias + expert * SIZE + offs, mask=live, other=0.0).to(tl.float32)
            y = (y + bias).to(dtype).to(tl.float32)
        score = tl.load(Scores + token * TOP_K + j).to(tl.float32)
        product = y * score
        if Scores.dtype.element_ty == dtype:
            product = product.to(dtype).to(tl.float32)
        total += tl.where(live, product, 0.0)
    tl.store(Out + token * SIZE + offs, total.to(dtype), mask=inside)
