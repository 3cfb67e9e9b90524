"""The comparison of two runs over the same examples: what differs, by how much, and whether by more than chance.

The confidence interval of a difference is that of paired examples (Miller, "Adding Error Bars to Evals", 2024, section 4):
differences of single examples vary far less than scores. Perplexities are ratios of sums, so their interval comes from the
residuals of a ratio estimator (Cochran, "Sampling Techniques", 1977, section 6.3), transformed by the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Any

from .. import hf
from .rounding import EXACT, Rounding

Answer = str | int | None  # a text, the index of a choice, or whether a text was the most likely one
Z = 1.96  # 95 % of a normal distribution are within this many standard deviations of the mean


@dataclass
class Measure:
    """One metric of one task in one run. items: its values for the examples; of a perplexity (log-likelihood, weight)."""

    task: str
    metric: str
    score: float
    stderr: float | None
    items: list[Any]
    aggregate: str  # how the score is computed from items: "mean", "perplexity", or another name

    def __post_init__(self) -> None:
        if self.stderr is None and self.aggregate == "perplexity" and len(self.items) > 1:
            lls, weights = zip(*self.items, strict=True)
            self.stderr = self.score * _ratio_error(lls, weights)


@dataclass
class Answers:
    """The answers of one run in one task, by example: a text, a choice, or None if there is nothing to choose.

    loglikelihoods: of the requests of each example, empty if text was generated. tokens: the number of tokens of each, by default
    one.
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
        """The log-likelihoods of a perplexity, with its weights as tokens. None for another metric."""
        if measure.aggregate != "perplexity":
            return None
        lls, weights = zip(*measure.items, strict=True)
        return cls(measure.task, [None] * len(lls), [[ll] for ll in lls], [[weight] for weight in weights])


@dataclass
class Generated:
    """Tokens of generate(), and the lead of each over the second most likely token in logits; no leads if it sampled."""

    tokens: list[int]
    leads: list[float]


@dataclass
class Pair:
    """A metric of a run compared with that of the baseline. interval: of the difference, 95 %; None if it cannot be computed.

    same: whether there is no difference beyond rounding (see rounding.py). equal: the fraction of `examples` with equal answers;
    None if there are no answers. first: the first unequal answer. largest_loglikelihood_difference: in nats. unexplained: the
    log-likelihood that exceeds rounding the most, if one does.
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
        """Whether the difference is statistically significant; False without an interval.

        With several comparisons the level of each is corrected (Bonferroni), because 1 of 20 intervals at 95 % misses by chance.
        """
        if self.interval is None:
            return False
        low, high = self.interval
        widened = NormalDist().inv_cdf(1 - 0.025 / comparisons) / Z
        return abs(low + high) / 2 > widened * (high - low) / 2


def pair(base: Measure, other: Measure) -> Pair:
    """Compare the values of one metric in two runs, example by example."""
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
    """Standard error of sum(values) / sum(weights) over examples; with weights of 1, of the mean."""
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
    """The fields of a Pair that depend on answers. only_ties: whether texts differ only where two tokens were equally likely.

    If there are log-likelihoods, only these decide whether the runs are the same: choices and scores are computed from them.
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
        (example, abs(a - b) if a != b else 0.0, rounding.nats(max(abs(a), abs(b)), tokens))  # two -inf are equal
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


def differ_only_at_ties(
    base: dict[tuple[int, ...], list[Generated]], other: dict[tuple[int, ...], list[Generated]], rounding: Rounding
) -> bool:
    """Whether the texts that two runs generated differ, and each only from a token on that rounding may decide."""
    differ = False
    for prompt, made in base.items():
        if len(made) != len(other.get(prompt, ())):
            return False
        for ours, theirs in zip(made, other[prompt], strict=True):
            at = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b), None)
            if at is None:
                continue
            if at >= len(ours.leads) or not rounding.ties(ours.leads[at]):
                return False
            differ = True
    return differ


def _first_difference(
    example: int, expected: Answer, got: Answer, tokenizer: hf.PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """The difference of two answers to one example; for texts with the index of the first differing token."""
    found: dict[str, Any] = {"example": example, "baseline": expected, "got": got}
    if tokenizer is not None and isinstance(expected, str):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (expected, got)]
        shorter = min(map(len, ids))
        found["token"] = next((i for i in range(shorter) if ids[0][i] != ids[1][i]), shorter)
    return found
