"""Two runs over the same examples: what differs, by how much, and whether by more than chance.

The interval of a difference is that of paired examples (Miller, "Adding Error Bars to Evals", 2024, section 4): the examples'
own differences vary far less than the scores do. Perplexities are ratios of sums, so theirs comes from the residuals of a ratio
estimator (Cochran, "Sampling Techniques", 1977, section 6.3), carried through the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Any

from .. import hf
from .rounding import EXACT, Rounding

Answer = str | int | None  # a text, a choice by its number, or whether it was the likeliest
Z = 1.96  # of a normal distribution, 95 % lie this many standard deviations around the mean


@dataclass
class Measure:
    """One metric of one task in one run. items: its value for each example, or (log-likelihood, weight) of a perplexity."""

    task: str
    metric: str
    score: float
    stderr: float | None
    items: list[Any]
    aggregate: str  # how items become the score: "mean", "perplexity", or another name

    def __post_init__(self) -> None:
        if self.stderr is None and self.aggregate == "perplexity" and len(self.items) > 1:
            lls, weights = zip(*self.items, strict=True)
            self.stderr = self.score * _ratio_error(lls, weights)


@dataclass
class Answers:
    """What one run answered in one task, by example: a text, a choice, or None where there is nothing to choose.

    loglikelihoods: those of each example's requests, none where text was generated; tokens: how many each of them is of, by
    default one.
    """

    task: str
    answers: list[Answer]
    loglikelihoods: list[list[float]]
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = [[1] * len(each) for each in self.loglikelihoods]

    @classmethod
    def read(cls, measure: Measure) -> Answers | None:
        """What a perplexity was made of: its log-likelihoods, with weights for tokens. None for another metric."""
        if measure.aggregate != "perplexity":
            return None
        lls, weights = zip(*measure.items, strict=True)
        return cls(measure.task, [None] * len(lls), [[ll] for ll in lls], [[weight] for weight in weights])


@dataclass
class Generated:
    """Tokens that generate() made, and by how much each led the next likeliest, among logits; leads are empty if it sampled."""

    tokens: list[int]
    leads: list[float]


@dataclass
class Pair:
    """A run's metric beside the baseline's. interval: of the difference, at 95 %, or None where it has no such form.

    same: no difference, or none that rounding does not explain (see rounding.py). equal: share of examples answered alike, of
    `examples`; None where nothing is answered. first: the first that is not. largest_loglikelihood_difference: in nats.
    unexplained: the log-likelihood furthest beyond rounding, if any is.
    """

    task: str
    metric: str
    score: float
    stderr: float | None
    baseline: float
    difference: float
    interval: tuple[float, float] | None
    examples: int
    same: bool
    equal: float | None = None
    first: dict[str, Any] | None = None
    largest_loglikelihood_difference: float | None = None
    unexplained: dict[str, float] | None = None

    def beyond_chance(self, comparisons: int = 1) -> bool:
        """Whether chance does not explain the difference; False without an interval.

        Of 20 intervals at 95 % one misses by chance, so with many comparisons each must be surer (Bonferroni's correction).
        """
        if self.interval is None:
            return False
        low, high = self.interval
        surer = NormalDist().inv_cdf(1 - 0.025 / comparisons) / Z
        return abs(low + high) / 2 > surer * (high - low) / 2


def pair(base: Measure, other: Measure) -> Pair:
    """The two runs' values of one metric, example by example."""
    if len(base.items) != len(other.items):
        raise ValueError(f"{base.task}: {len(base.items)} and {len(other.items)} examples cannot be paired.")
    return Pair(
        task=other.task,
        metric=other.metric,
        score=other.score,
        stderr=other.stderr,
        baseline=base.score,
        difference=other.score - base.score,
        interval=_interval(base, other),
        examples=len(other.items),
        same=(other.score, other.items) == (base.score, base.items),
    )


def _interval(base: Measure, other: Measure) -> tuple[float, float] | None:
    if len(base.items) < 2:
        return None
    if base.aggregate == "mean":
        each = [b - a for a, b in zip(base.items, other.items, strict=True)]
        centre, half = fmean(each), Z * _ratio_error(each, [1.0] * len(each))
        return centre - half, centre + half
    if base.aggregate == "perplexity":
        weights = [weight for _, weight in base.items]
        each = [a - b for (a, _), (b, _) in zip(base.items, other.items, strict=True)]
        centre, half = sum(each) / sum(weights), Z * _ratio_error(each, weights)
        return base.score * math.expm1(centre - half), base.score * math.expm1(centre + half)
    return None


def _ratio_error(values: Sequence[float], weights: Sequence[float]) -> float:
    """Standard error of sum(values) / sum(weights) over examples; with weights of 1 that of their mean."""
    n, total = len(values), sum(weights)
    ratio = sum(values) / total
    squares = sum((value - ratio * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return math.sqrt(n / (n - 1) * squares) / total


def compare_answers(
    base: Answers,
    other: Answers,
    tokenizer: hf.PreTrainedTokenizerBase | None,
    rounding: Rounding = EXACT,
    only_ties: bool = False,
) -> dict[str, Any]:
    """The fields of a Pair that come from answers. only_ties: texts differ where two tokens were equally likely, and only there.

    Where there are log-likelihoods they alone decide what is the same: choices are made of them, and scores of either.
    """
    found: dict[str, Any] = {}
    both = list(zip(base.answers, other.answers, strict=True))
    answered = [(a, b) for a, b in both if a is not None]
    if answered:
        found["equal"] = sum(a == b for a, b in answered) / len(answered)
        first = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if first is not None:
            found["first"] = _first_difference(first, *both[first], tokenizer)
    found["same"] = only_ties or found.get("equal", 1.0) == 1.0
    lls = [
        (example, abs(a - b) if a != b else 0.0, rounding.nats(max(abs(a), abs(b)), tokens))  # two -inf are the same
        for example, each in enumerate(zip(base.loglikelihoods, other.loglikelihoods, base.tokens, strict=True))
        for a, b, tokens in zip(*each, strict=True)
    ]
    if lls:
        beyond = [each for each in lls if not each[1] <= each[2]]  # a NaN is beyond
        found["same"] = not beyond
        found["largest_loglikelihood_difference"] = max(nats for _, nats, _ in lls)
        if beyond:
            example, nats, explained = max(beyond, key=lambda each: each[1] - each[2])
            found["unexplained"] = {"example": example, "nats": nats, "rounding": explained}
    return found


def part_at_ties(
    base: dict[tuple[int, ...], list[Generated]], other: dict[tuple[int, ...], list[Generated]], rounding: Rounding
) -> bool:
    """Whether all that two runs generated of the same prompts is alike up to where rounding may decide, and something is not."""
    parted = False
    for prompt, made in base.items():
        if len(made) != len(other.get(prompt, ())):
            return False
        for ours, theirs in zip(made, other[prompt], strict=True):
            at = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b), None)
            if at is None:
                continue
            if at >= len(ours.leads) or not rounding.ties(ours.leads[at]):
                return False
            parted = True
    return parted


def _first_difference(
    example: int, expected: Answer, got: Answer, tokenizer: hf.PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Where two answers to one example differ; for texts the index of their first differing token."""
    found: dict[str, Any] = {"example": example, "baseline": expected, "got": got}
    if tokenizer is not None and isinstance(expected, str):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (expected, got)]
        shorter = min(map(len, ids))
        found["token"] = next((i for i in range(shorter) if ids[0][i] != ids[1][i]), shorter)
    return found
