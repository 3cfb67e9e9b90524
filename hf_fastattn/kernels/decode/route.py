"""The routing of a mixture in one launch instead of some seven: from logits to the experts of each token and their weights.

    FORM "softmax": scores = top_k(softmax(logits)), as in Qwen3 and Mixtral;  "choice": softmax(top_k(logits)), as in GPT-OSS;
    "sigmoid": sigmoids of the logits, chosen by their sums with a correction, as in DeepSeek V3 without groups

A program of one warp has one token, and selects the largest remaining value for each choice, of equal values the first, as
`torch.topk` does on a GPU. If a logit is NaN, so are all scores of its token. `experts` can choose one token's in its first
launch.

Rounds: the scores; all else is fp32. Limits: `why_not`. Oracle: the routers of Transformers.

Sources: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017), section 2.1;
for the roundings the routers of Qwen3-MoE, Mixtral and GPT-OSS in Transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..host import gpu, launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..mixture import MAX_CHOICES

MAX_EXPERTS = 1024  # one program loads the logits of all
MAX_IN_EXPERTS = 128  # of which each program of `experts` chooses for itself
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SOFTMAX, CHOICE, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CHOSEN = tl.constexpr(-(2**31))  # less than the integer of any float
_FORMS = {"softmax": SOFTMAX, "choice": CHOICE, "sigmoid": SIGMOID}


@triton.jit
def choose(
    Logits, Correction, token,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, FORM: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(scores in fp32, experts) of a token, both (WARPS, BLOCK_TOP): each warp of the program has a row of the same values.

    So no warp waits for another. Values are compared as integers of the same order, of which a warp finds the largest in one
    instruction.
    """
    expert = tl.arange(0, BLOCK_E)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    choice = tl.arange(0, BLOCK_TOP)[None, :]
    known = expert < NUM_EXPERTS
    score = tl.load(Logits + token * NUM_EXPERTS + expert, mask=known, other=float("-inf")).to(tl.float32)
    if FORM == SOFTMAX:
        score = tl.exp(score - tl.max(score, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    elif FORM == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    left = score
    if FORM == SIGMOID:
        left += tl.load(Correction + expert, mask=known, other=0.0).to(tl.float32)
    is_number = known & (left == left)
    left = tl.where(is_number, tl.where(left == 0.0, 0.0, left), float("-inf"))  # one zero; NaN comes last
    key = _ordered(left.to(tl.int32, bitcast=True))  # the first of equals is chosen, so those that are not known come last
    values = tl.zeros([WARPS, BLOCK_TOP], tl.int32)
    chosen = tl.zeros([WARPS, BLOCK_TOP], tl.int32)
    for j in tl.static_range(TOP_K):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, expert, BLOCK_E), 1)[:, None]  # of equal values the first
        if FORM == SIGMOID:  # scores are not negative, so that the largest integer is that of `at`
            top = tl.max(tl.where(expert == at, score.to(tl.int32, bitcast=True), 0), 1)[:, None]
        values = tl.where(choice == j, top, values)
        chosen = tl.where(choice == j, at, chosen)
        key = tl.where(expert == at, CHOSEN, key)
    values = _ordered(values).to(tl.float32, bitcast=True)
    scores = tl.where(choice < TOP_K, values, 0.0)
    if FORM == CHOICE:
        values = tl.where(choice < TOP_K, values, float("-inf"))
        exps = tl.exp(values - tl.max(values, 1)[:, None])
        scores = exps / tl.sum(exps, 1)[:, None]
    elif NORMALISE:
        scores = scores / (tl.sum(scores, 1)[:, None] + (1e-20 if FORM == SIGMOID else 0.0))
    has_nan = tl.sum(is_number.to(tl.int32), 1)[:, None] < NUM_EXPERTS
    return tl.where(has_nan, float("nan"), scores * SCALE), chosen


@triton.jit
def _ordered(bits):
    """The bits of floats as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def store_choice(scores, chosen, Scores, Experts, token, TOP_K: tl.constexpr):
    """Store a result of `choose`."""
    choice = tl.arange(0, chosen.shape[1])[None, :] + tl.zeros(chosen.shape, tl.int32)
    at = token * TOP_K + choice
    tl.store(Scores + at, scores.to(Scores.dtype.element_ty), mask=choice < TOP_K)
    tl.store(Experts + at, chosen.to(Experts.dtype.element_ty), mask=choice < TOP_K)


@triton.jit
def route_kernel(
    Logits,  # (tokens, NUM_EXPERTS)
    Correction,  # (NUM_EXPERTS,), read if FORM is SIGMOID, or None
    Scores,  # (tokens, TOP_K), written
    Experts,  # (tokens, TOP_K), int64, written
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, FORM: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program, of one warp, per token."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    token = tl.program_id(0)
    scores, chosen = choose(Logits, Correction, token, NUM_EXPERTS, TOP_K, FORM, NORMALISE, SCALE, BLOCK_E, BLOCK_TOP, 1)
    store_choice(scores, chosen, Scores, Experts, token, TOP_K)


def why_not(logits: torch.Tensor, choices: int, correction: torch.Tensor | None = None) -> str | None:
    """The reason why these inputs need another path, or None."""
    if logits.dim() != 2 or logits.numel() == 0 or not logits.is_contiguous():
        return f"logits are {tuple(logits.shape)}; they must be (tokens, experts) and contiguous."
    if not 1 <= choices <= min(MAX_CHOICES, logits.shape[1]) or logits.shape[1] > MAX_EXPERTS:
        return f"{choices} of {logits.shape[1]} experts; at most {MAX_CHOICES} of {MAX_EXPERTS} are supported."
    if logits.dtype not in DTYPES:
        return f"logits are {logits.dtype}; they must be float16, bfloat16 or float32."
    if correction is not None and (correction.shape != logits.shape[1:] or not correction.is_contiguous()):
        return f"the correction is {tuple(correction.shape)}; it must have one element for each of {logits.shape[1]} experts."
    if torch.is_grad_enabled() and logits.requires_grad:
        return "logits require grad, and this kernel has no backward pass."
    return None


def route(
    logits: torch.Tensor,
    choices: int,
    form: str,
    *,
    normalise: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scores, experts), both (tokens, choices), of logits (tokens, experts); None if `why_not` gives a reason.

    form: "softmax", "choice" or "sigmoid", of which the last takes a correction (experts,). Scores are in `dtype`, None for the
    logits' dtype; experts are int64, in the order of the choice. normalise: except with "choice", the scores of a token are
    divided by their sum. scale: a factor of all scores.
    """
    choice = prepared(logits, choices, form, normalise=normalise, scale=scale, dtype=dtype, correction=correction)
    if choice is None:
        return None
    choice.launch()
    return choice.scores, choice.experts


class Choice(NamedTuple):
    """A choice that is not launched yet. scores, experts: for its results. constants: those of `choose` and their values."""

    start: launch.Launch
    logits: torch.Tensor
    correction: torch.Tensor | None
    scores: torch.Tensor
    experts: torch.Tensor
    constants: tuple[tuple[str, float], ...]

    def launch(self) -> None:
        self.start(self.logits, self.correction, self.scores, self.experts)

    def is_for(self, experts: torch.Tensor, scores: torch.Tensor, num_experts: int) -> bool:
        """Whether the launch of so many experts can make this choice, and its results are these contiguous tensors."""
        tokens, count = self.logits.shape
        pairs = (experts, self.experts), (scores, self.scores)
        own = all((gpu.address_of(a), a.shape) == (gpu.address_of(b), b.shape) for a, b in pairs)
        return tokens == 1 and count == num_experts <= MAX_IN_EXPERTS and own


def prepared(
    logits: torch.Tensor,
    choices: int,
    form: str,
    *,
    normalise: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    correction: torch.Tensor | None = None,
) -> Choice | None:
    """`route` without the launch."""
    found = _prepare((logits, correction), choices, form, normalise, scale, dtype)
    if found is None:
        return None
    scores = logits.new_empty(logits.shape[0], choices, dtype=dtype)
    experts = logits.new_empty(logits.shape[0], choices, dtype=torch.int64)
    return Choice(found[0], logits, correction, scores, experts, found[1])


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    choices: int,
    form: str,
    normalise: bool,
    scale: float,
    dtype: torch.dtype | None,  # of the scores: another dtype is another launch
) -> tuple[launch.Launch, tuple[tuple[str, float], ...]] | None:
    logits, correction = tensors
    if why_not(logits, choices, correction):
        return None
    count = logits.shape[1]
    own = {
        "FORM": _FORMS[form].value,
        "NORMALISE": normalise,
        "SCALE": scale,
        "BLOCK_E": max(32, triton.next_power_of_2(count)),
    }
    start = launch.Launch(
        route_kernel,
        (logits.shape[0],),
        NUM_EXPERTS=count,
        TOP_K=choices,
        BLOCK_TOP=triton.next_power_of_2(choices),
        **own,
        **early(logits.device),
        num_warps=1,
    )
    return start, tuple(own.items())
