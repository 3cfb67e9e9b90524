"""The experts of a mixture (mixture.py) for 1 to 64 tokens: the weights of each chosen expert are read once, for all its tokens.

    out[t] = sum_j scores[t, j] * (D_e act(G_e x[t]) * (U_e x[t])),  e = experts[t, j], with biases if there are some

Three launches: gate and up with the activation, down, and the sum (experts_sum.py). A program has some rows of one expert, and
finds its tokens from the indices of all: nothing is sorted, no shape depends on data. Each token has a column of the product,
which stays 0 if it has not chosen the expert; tensor cores have time for that while weights are read.

Rounds: as `batched_mm` of Transformers: products, their sums with biases, the activation and its product; sums over elements
are fp32. No atomics: the same bits in every run. Limits: `mixture.why_not`. Oracle: `mixture.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..host import gpu, launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..mixture import PLAIN, Layout, Weights, why_not
from .experts_sum import sum_kernel
from .route import Choice, choose, store_choice

SILU, GELU_TANH, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CHOICES, PAIRS, EXPERTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ACTS = {"silu": SILU, "gelu_tanh": GELU_TANH, "sigmoid": SIGMOID}


@triton.jit
def _tokens_of(
    Experts, slot, tokens,
    SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """(an expert, whether this slot computes it, for each token its first choice that is this expert, or TOP_K).

    SLOTS: what a slot is. CHOICES: a choice of the only token. PAIRS: a pair of a token and a choice, of which the first with an
    expert computes it. EXPERTS: an expert.
    """
    if SLOTS == CHOICES:  # without the search, for which the loads of weights would wait
        expert = tl.load(Experts + slot).to(tl.int32)
        live = (expert >= 0) & (expert < NUM_EXPERTS)
        first = tl.where(tl.arange(0, BLOCK_T) == 0, slot, TOP_K)
    else:
        token, choice = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_TOP)[None, :]
        pair = token * TOP_K + choice
        chosen = tl.load(Experts + pair, mask=(token < tokens) & (choice < TOP_K), other=-1).to(tl.int32)
        if SLOTS == PAIRS:
            expert = tl.load(Experts + slot).to(tl.int32)
            earliest = tl.min(tl.min(tl.where(chosen == expert, pair, BLOCK_T * TOP_K), 1), 0)
            live = (earliest == slot) & (expert >= 0) & (expert < NUM_EXPERTS)
            first = tl.min(tl.where(chosen == expert, choice, TOP_K), 1)
        else:
            expert = slot
            first = tl.min(tl.where(chosen == expert, choice, TOP_K), 1)
            live = tl.min(first, 0) < TOP_K
    return expert, live, first


@triton.jit
def _product(
    X, x_rows, Weight, row, has_row, has_token, begin, end,
    SIZE: tl.constexpr, ROW_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_T): these rows of a weight times these rows of X, over their elements from `begin` to `end`."""
    offs = begin + tl.arange(0, BLOCK_K)
    weights = Weight + row[:, None] * ROW_STRIDE + offs[None, :] * K_STRIDE
    xs = X + x_rows[None, :] * SIZE + offs[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in range(STEPS):
        if EVEN:
            w = tl.load(weights, mask=has_row[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(xs, mask=has_token[None, :], other=0.0)
        else:
            inside = offs + step * BLOCK_K < end
            w = tl.load(weights, mask=has_row[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(xs, mask=has_token[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        weights += BLOCK_K * K_STRIDE
        xs += BLOCK_K
    return acc


@triton.jit
def _gated(gate, up, dtype: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation and its product, in fp32, rounded to dtype wherever the code of the models rounds."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
    if ACT == SILU:
        act = gate / (1.0 + tl.exp(-gate))
    elif ACT == GELU_TANH:  # x (1 + tanh(z)) / 2 = x sigmoid(2 z)
        act = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        scaled = (gate * ALPHA).to(dtype).to(tl.float32)
        act = gate * (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    return (act.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def gate_up_kernel(
    X,  # (tokens, SIZE)
    Experts,  # (tokens, TOP_K), int; written with Logits
    Weight,  # (NUM_EXPERTS, 2 * INNER, SIZE), with TRANSPOSED (NUM_EXPERTS, SIZE, 2 * INNER)
    Bias,  # (NUM_EXPERTS, 2 * INNER) or None
    Hidden,  # (tokens, TOP_K, INNER), written
    Logits,  # (1, NUM_EXPERTS) or None
    Correction,  # (NUM_EXPERTS,), read if FORM is SIGMOID, or None
    Scores,  # (1, TOP_K), written with Logits, or None
    tokens,
    SIZE: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    FORM: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr, BLOCK_E: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_N / 2 elements of h and slot.

    With Logits every program chooses the experts itself (`route.choose`), and the first one stores the choice.
    """
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    if Logits is None:
        expert, live, first = _tokens_of(Experts, tl.program_id(1), tokens, SLOTS, NUM_EXPERTS, TOP_K, BLOCK_T, BLOCK_TOP)
    else:
        scores, chosen = choose(Logits, Correction, 0, NUM_EXPERTS, TOP_K, FORM, NORMALISE, SCALE, BLOCK_E, BLOCK_TOP, WARPS)
        choice = tl.arange(0, BLOCK_TOP)[None, :]
        expert = tl.max(tl.max(tl.where(choice == tl.program_id(1), chosen, 0), 1), 0)
        first = tl.where(tl.arange(0, BLOCK_T) == 0, tl.program_id(1), TOP_K)
        live = True
    if live:
        HALF: tl.constexpr = BLOCK_N // 2
        i = tl.arange(0, BLOCK_N)
        if INTERLEAVED:
            row = tl.program_id(0) * BLOCK_N + i
            has_row = row < 2 * INNER
        else:
            n = tl.program_id(0) * HALF + i % HALF
            row = tl.max_contiguous(n + tl.where(i < HALF, 0, INNER), HALF)
            if INNER % 16 == 0:
                row = tl.multiple_of(row, 16)
            has_row = n < INNER
        token = tl.arange(0, BLOCK_T)
        has_token = first < TOP_K
        if Bias is not None:  # it arrives while the weights are read
            bias = tl.load(Bias + expert * (2 * INNER) + row, mask=has_row, other=0.0).to(tl.float32)
        acc = _product(
            X,
            token,
            Weight + expert.to(tl.int64) * (2 * INNER * SIZE),
            row,
            has_row,
            has_token,
            0,
            SIZE,
            SIZE,
            1 if TRANSPOSED else SIZE,
            2 * INNER if TRANSPOSED else 1,
            (SIZE + BLOCK_K - 1) // BLOCK_K,
            SIZE % BLOCK_K == 0,
            BLOCK_N,
            BLOCK_K,
            BLOCK_T,
        )
        dtype: tl.constexpr = Hidden.dtype.element_ty
        acc = acc.to(dtype).to(tl.float32)
        if Bias is not None:
            acc = (acc + bias[:, None]).to(dtype).to(tl.float32)
        if INTERLEAVED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [HALF, 2, BLOCK_T]), [0, 2, 1]))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, BLOCK_T]), [1, 2, 0]))
        h = _gated(gate, up, dtype, ACT, ALPHA, LIMIT)
        offs = tl.program_id(0) * HALF + tl.arange(0, HALF)
        pair = token * TOP_K + first
        tl.store(Hidden + pair[None, :] * INNER + offs[:, None], h, mask=has_token[None, :] & (offs < INNER)[:, None])
    if Logits is not None and tl.program_id(0) + tl.program_id(1) == 0:
        store_choice(scores, chosen, Scores, Experts, 0, TOP_K)


@triton.jit(do_not_specialize=["tokens"])
def down_kernel(
    Hidden,  # (tokens, TOP_K, INNER)
    Experts,  # (tokens, TOP_K), int
    Weight,  # (NUM_EXPERTS, SIZE, INNER), with TRANSPOSED (NUM_EXPERTS, INNER, SIZE)
    Bias,  # (NUM_EXPERTS, SIZE), or None, as with several splits
    Partial,  # (splits, tokens, TOP_K, SIZE), in Hidden's dtype if it has one split, else fp32, written
    tokens,
    SIZE: tl.constexpr, INNER: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_N elements of the output, slot, and SPLIT elements of h. With one split Bias is added here."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    expert, live, first = _tokens_of(Experts, tl.program_id(1), tokens, SLOTS, NUM_EXPERTS, TOP_K, BLOCK_T, BLOCK_TOP)
    if live:
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        has_row = row < SIZE
        token = tl.arange(0, BLOCK_T)
        has_token = first < TOP_K
        pair = token * TOP_K + first
        if Bias is not None:
            bias = tl.load(Bias + expert * SIZE + row, mask=has_row, other=0.0).to(tl.float32)
        begin = tl.program_id(2) * SPLIT
        acc = _product(
            Hidden,
            pair,
            Weight + expert.to(tl.int64) * (INNER * SIZE),
            row,
            has_row,
            has_token,
            begin,
            INNER,
            INNER,
            1 if TRANSPOSED else INNER,
            SIZE if TRANSPOSED else 1,
            (SPLIT + BLOCK_K - 1) // BLOCK_K,
            INNER % SPLIT == 0 and SPLIT % BLOCK_K == 0,
            BLOCK_N,
            BLOCK_K,
            BLOCK_T,
        )
        at = (tl.program_id(2) * tokens * TOP_K + pair) * SIZE
        y = acc.to(Partial.dtype.element_ty)
        if Bias is not None:
            y = (y.to(tl.float32) + bias[:, None]).to(Partial.dtype.element_ty)
        tl.store(Partial + at[None, :] + row[:, None], y, mask=has_token[None, :] & has_row[:, None])


class Tiles(NamedTuple):
    """A tile of a weight, the number of tiles loaded ahead plus one, and warps."""

    block_n: int
    block_k: int
    stages: int
    warps: int

    def named(self) -> dict[str, int]:
        return {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "num_stages": self.stages, "num_warps": self.warps}


class _Plan(NamedTuple):
    gate_up: launch.Launch
    down: launch.Launch
    sum: launch.Launch
    inner: int
    splits: int


def run(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    weights: Weights,
    layout: Layout = PLAIN,
    choice: Choice | None = None,
) -> torch.Tensor | None:
    """For each token the weighted sum of its chosen experts, (tokens, hidden) in x's dtype; None if `why_not` gives a reason.

    x: (tokens, hidden), 1 to 64 tokens. experts, scores: (tokens, choices), the indices of the experts and their routing weights
    in x's dtype or float32. An index that is of none of these experts counts as 0. All tensors are contiguous. choice: a choice
    whose results are `experts` and `scores`, for the first launch to make (`Choice.is_for`); None: they are computed already.
    """
    plan = _prepare((x, experts, scores, *weights), layout, () if choice is None else choice.constants)
    if plan is None:
        return None
    pairs, size = experts.shape, x.shape[1]
    hidden = x.new_empty(*pairs, plan.inner)
    # The sum of all splits is rounded, and then a bias is added: with one split before it is stored.
    in_down, in_sum = (weights.down_bias, None) if plan.splits == 1 else (None, weights.down_bias)
    partial = x.new_empty(plan.splits, *pairs, size, dtype=x.dtype if plan.splits == 1 else torch.float32)
    out = torch.empty_like(x)
    logits = (None, None, None) if choice is None else (choice.logits, choice.correction, scores)
    plan.gate_up(x, experts, weights.gate_up, weights.gate_up_bias, hidden, *logits)
    plan.down(hidden, experts, weights.down, in_down, partial)
    plan.sum(partial, experts, scores, in_sum, out)
    return out


def tiles(tokens: int, length: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a weight with rows of this length."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 4)
    if tokens > 32:
        return Tiles(128, 64, 3, 4)
    return Tiles(64, 128, 4, 4) if length >= 4096 else Tiles(64, 64, 6, 4)


def _num_splits(programs: int, length: int, device: torch.device) -> int:
    """Into how many parts down's rows are split, so that there are enough programs."""
    wanted = -(-gpu.num_sms(device) // programs)
    return max(1, min(wanted, 8, length // 256))


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@launch.remember
def _prepare(tensors: Tensors, layout: Layout, choice: tuple[tuple[str, float], ...]) -> _Plan | None:
    x, experts, scores, *of = tensors
    weights = Weights(*of)  # type: ignore[arg-type]
    if why_not(x, experts, scores, weights, layout):
        return None
    (tokens, size), choices, count = x.shape, experts.shape[1], weights.gate_up.shape[0]
    inner = weights.down.shape[1 if layout.transposed else 2]
    slots = CHOICES if tokens == 1 else PAIRS if tokens * choices <= count else EXPERTS
    num_slots = count if slots == EXPERTS else tokens * choices
    wide, deep = tiles(tokens, size, x.dtype), tiles(tokens, inner, x.dtype)
    blocks = triton.cdiv(size, deep.block_n)
    splits = _num_splits(blocks * num_slots, inner, x.device)
    split = triton.cdiv(triton.cdiv(inner, splits), deep.block_k) * deep.block_k
    splits = triton.cdiv(inner, split)
    shared = {
        "tokens": tokens,
        "SIZE": size,
        "NUM_EXPERTS": count,
        "TOP_K": choices,
        "BLOCK_TOP": triton.next_power_of_2(choices),
        **early(x.device),
    }
    product = {
        **shared,
        "INNER": inner,
        "SLOTS": slots.value,
        "TRANSPOSED": layout.transposed,
        "BLOCK_T": max(16, triton.next_power_of_2(tokens)),
    }
    gate = {"INTERLEAVED": layout.interleaved, "ACT": _ACTS[layout.act].value, "ALPHA": layout.alpha, "LIMIT": layout.limit}
    gate |= {"FORM": 0, "NORMALISE": False, "SCALE": 1.0, "BLOCK_E": 0, "WARPS": wide.warps, **dict(choice)}
    grid = triton.cdiv(2 * inner, wide.block_n), num_slots
    first = launch.Launch(gate_up_kernel, grid, **product, **wide.named(), **gate)
    second = launch.Launch(down_kernel, (blocks, num_slots, splits), **product, **deep.named(), SPLIT=split)
    grid = triton.cdiv(size, 256), tokens
    last = launch.Launch(sum_kernel, grid, **shared, SPLITS=splits, ONE_TOKEN=tokens == 1, BLOCK_N=256, num_warps=2)
    return _Plan(first, second, last, inner, splits)
