"""Two runs over the same examples: what differs, by how much, and whether by more than chance.

The interval of a difference is that of paired examples (Miller, "Adding Error Bars to Evals", 2024, section 4): the examples'
own differences vary far less than the scores do. Perplexities are ratios of sums, so theirs comes from the residuals of a ratio
estimator (Cochran, "Sampling Techniques", 1977, section 6.3), carried through the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

Z = 1.96  # of a normal distribution, 95 % lie this many standard deviations around the mean
EQUAL = 1e-5  # relative: scores this close are the same


@dataclass
class Measure:
    """One metric of one task in one run. items: its value for each example, or (log-likelihood, weight) of a perplexity."""

    task: str
    metric: str
    score: float
    stderr: float | None
    items: list
    aggregate: str  # how items become the score: "mean", "perplexity", or another name

    def __post_init__(self):
        if self.stderr is None and self.aggregate == "perplexity" and len(self.items) > 1:
            lls, weights = zip(*self.items, strict=True)
            self.stderr = self.score * _ratio_error(lls, weights)


@dataclass
class Answers:
    """What one run answered in one task, by example: a text, a choice, or None where there is nothing to choose.

    loglikelihoods: those of each example's requests, none where text was generated.
    """

    task: str
    answers: list
    loglikelihoods: list[list[float]]


@dataclass
class Pair:
    """A run's metric beside the baseline's. interval: of the difference, at 95 %, or None where it has no such form.

    equal: share of examples answered alike, of `examples`; None where nothing is answered. first: the first that is not.
    """

    task: str
    metric: str
    score: float
    stderr: float | None
    baseline: float
    difference: float
    interval: tuple[float, float] | None
    examples: int
    equal: float | None = None
    first: dict | None = None
    largest_loglikelihood_difference: float | None = None

    @property
    def same(self) -> bool:
        """Every answer and the score are the same."""
        close = abs(self.difference) <= EQUAL * max(abs(self.score), abs(self.baseline))
        return self.equal in (None, 1.0) and close

    def beyond_chance(self, comparisons: int = 1) -> bool:
        """Whether chance does not explain the difference; without an interval there is nothing to say so.

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
        return tuple(base.score * math.expm1(end) for end in (centre - half, centre + half))
    return None


def _ratio_error(values: Sequence[float], weights: Sequence[float]) -> float:
    """Standard error of sum(values) / sum(weights) over examples; with weights of 1 that of their mean."""
    n, total = len(values), sum(weights)
    ratio = sum(values) / total
    squares = sum((value - ratio * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return math.sqrt(n / (n - 1) * squares) / total


def compare_answers(base: Answers, other: Answers, tokenizer) -> dict:
    """The fields of a Pair that come from answers."""
    found: dict = {}
    both = list(zip(base.answers, other.answers, strict=True))
    answered = [(a, b) for a, b in both if a is not None]
    if answered:
        found["equal"] = sum(a == b for a, b in answered) / len(answered)
        first = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if first is not None:
            found["first"] = _first_difference(first, *both[first], tokenizer)
    lls = [(a, b) for x, y in zip(base.loglikelihoods, other.loglikelihoods, strict=True) for a, b in zip(x, y, strict=True)]
    if lls:
        found["largest_loglikelihood_difference"] = max(abs(a - b) for a, b in lls)
    return found


def _first_difference(example: int, expected, got, tokenizer) -> dict:
    """Where two answers to one example part; texts by the number of their first differing token, counted from 0."""
    found = {"example": example, "baseline": expected, "got": got}
    if isinstance(expected, str):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (expected, got)]
        shorter = min(map(len, ids))
        found["token"] = next((i for i in range(shorter) if ids[0][i] != ids[1][i]), shorter)
    return found
