"""The comparison of two runs over the same examples: what differs, by how much, and whether by more than chance.

The confidence interval of a difference is that of paired examples (Miller, "Adding Error Bars to Evals", 2024, section 4):
differences of single examples vary far less than scores. Perplexities are ratios of sums, so their interval comes from the
residuals of a ratio estimator (Cochran, "Sampling Techniques", 1977, section 6.3), transformed by the exponential.

Whatever its size, a difference in one direction needs a number of examples: m of them have one sign by chance in 2 ** (1 - m) of
all cases (the sign test). Fewer examples show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from .. import hf
from .rounding import EXACT, Rounding

Answer = str | int | None  # a text, the index of a choice, or whether a text was the most likely one
LEVEL = 0.05
Z = 1.96  # 95 % of a normal distribution are within this many standard deviations of the mean
NATS = ("perplexity", "bits_per_byte")  # computed from the ratio of the sums of log-likelihoods and weights
GROUP = "group"  # computed from the scores of several tasks, which are compared in its place


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def plain(value: Any) -> Any:
    """The value with Python numbers and lists in place of arrays and tensors, so that == is a truth value."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value)) if isinstance(value, tuple) else list(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def finite(value: Any) -> bool:
    """Whether a plain value contains neither NaN nor infinity."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def unequal(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The first index at which both have items and these differ."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def least_examples(comparisons: int = 1) -> int:
    """The fewest examples with which a difference can be significant over so many comparisons, by the sign test."""
    return 1 + math.ceil(math.log2(comparisons / LEVEL))


@dataclass
class Score:
    """One metric of one task in one run."""

    task: str
    metric: str
    score: float
    stderr: float | None

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.metric


@dataclass
class Measure(Score):
    """A score with its values for the examples. items: of an aggregate in NATS (log-likelihood, weight). ids: of the examples, by
    default their numbers."""

    items: list[Any]
    aggregate: str  # how the score is computed: "mean", one of NATS, GROUP, or another name
    ids: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items = [plain(item) for item in self.items]
        self.ids = self.ids or list(range(len(self.items)))
        if self.stderr is None and self.aggregate in NATS and len(self.items) > 1:
            self.stderr = _ratio_error(self.terms()) * (self.score if self.aggregate == "perplexity" else 1 / math.log(2))

    def terms(self) -> list[tuple[float, float]]:
        """(value, weight) of each example, for the ratio of their sums; empty for an aggregate that is no such ratio."""
        if self.aggregate in NATS:
            return [(-ll, weight) for ll, weight in self.items]
        return [(item, 1.0) for item in self.items] if self.aggregate == "mean" else []


@dataclass
class Answers:
    """The answers of one run in one task, by example: a text, a choice, or None if there is nothing to choose.

    loglikelihoods: of the requests of each example, empty if text was generated. tokens: the number of tokens of each, by default
    one. ids: of the examples, by default their numbers.
    """

    task: str
    answers: list[Answer]
    loglikelihoods: list[list[float]]
    tokens: list[list[int]] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = self.ids or list(range(len(self.answers)))
        self.tokens = self.tokens or [[1] * len(each) for each in self.loglikelihoods]

    @classmethod
    def read(cls, measure: Measure) -> Answers | None:
        """The log-likelihoods of a perplexity, with its weights as tokens. None for another metric."""
        if measure.aggregate not in NATS:
            return None
        lls, weights = [[ll] for ll, _ in measure.items], [[weight] for _, weight in measure.items]
        return cls(measure.task, [None] * len(lls), lls, weights, measure.ids)


@dataclass
class Generated:
    """Tokens of generate(), and the lead of each over the second most likely token in logits; no leads if it sampled.

    finite: whether the largest logit of each token was a finite number.
    """

    tokens: list[int]
    leads: list[float]
    finite: bool = True


@dataclass
class Pair(Score):
    """A score compared with that of the baseline. interval: of the difference, 95 %; None if it cannot be computed.

    shift, error: the mean difference of the examples and its standard error, of an aggregate in NATS in nats per unit of weight;
    None without a formula for the aggregate. largest: the largest absolute value of an example.
    not_finite: the number of examples with NaN or infinity where the baseline has neither; baseline_not_finite: of those with one
    in the baseline. unpaired: of those that only one of the runs has.
    spread: the differences of single log-likelihoods relative to one rounding (`Rounding.once`): their root mean square, or a
    quarter of the largest. explained: the largest difference of a log-likelihood that rounding explains, in nats.
    same: whether there is no difference beyond rounding (see rounding.py). equal: the fraction of `examples` with equal answers;
    None if there are no answers. first: the first unequal answer. largest_loglikelihood_difference: in nats. unexplained: the
    log-likelihood that exceeds rounding the most, if one does.
    """

    baseline: float
    difference: float
    interval: tuple[float, float] | None
    examples: int
    same: bool
    aggregate: str = "other"
    shift: float | None = None
    error: float | None = None
    largest: float = 1.0
    not_finite: int = 0
    baseline_not_finite: int = 0
    unpaired: int = 0
    spread: float | None = None
    explained: float | None = None
    equal: float | None = None
    first: dict[str, Any] | None = None
    largest_loglikelihood_difference: float | None = None
    unexplained: dict[str, float] | None = None

    def _chance(self, comparisons: int) -> float:
        """The largest absolute value of `shift` that is not statistically significant; inf or NaN if it cannot be computed.

        With several comparisons the level of each is corrected (Bonferroni), because 1 of 20 intervals at 95 % misses by chance.
        """
        if self.error is None or self.examples < least_examples(comparisons):
            return math.inf
        return NormalDist().inv_cdf(1 - LEVEL / 2 / comparisons) * self.error

    def beyond_chance(self, comparisons: int = 1) -> bool:
        """Whether the difference is statistically significant; False if that cannot be computed."""
        return self.shift is not None and abs(self.shift) > self._chance(comparisons)

    def detectable(self, comparisons: int = 1) -> float | None:
        """The smallest difference of the score that would be significant with these examples; None if none would be."""
        seen = self._chance(comparisons)
        if not math.isfinite(seen):
            return None
        if self.aggregate == "mean":
            return max(seen, self.largest * least_examples(comparisons) / self.examples)
        return _in_scores(seen, self.aggregate, self.baseline)


def _in_scores(shift: float, aggregate: str, baseline: float) -> float:
    """The difference of the scores for a mean difference of the examples."""
    if aggregate == "perplexity":
        return baseline * (exp(shift) - 1 if shift > 1 else math.expm1(shift))
    return shift / math.log(2) if aggregate == "bits_per_byte" else shift


def pair(base: Measure, other: Measure) -> Pair:
    """Compare the values of one metric in two runs, example by example."""
    shift = error = interval = None
    terms = base.terms()
    if base.ids == other.ids and len(terms) > 1 and base.aggregate == other.aggregate:
        each = [(b - a, weight) for (a, weight), (b, _) in zip(terms, other.terms(), strict=True)]
        shift, error = _ratio(each), _ratio_error(each)
        low, high = (_in_scores(shift + sign * Z * error, base.aggregate, base.score) for sign in (-1, 1))
        interval = low, high
    numbers = [abs(item) for item in (*base.items, *other.items) if isinstance(item, (int, float)) and finite(item)]
    return Pair(
        *(*other.key, other.score, other.stderr),
        baseline=base.score,
        difference=other.score - base.score,
        interval=interval,
        examples=len(other.items),
        same=(other.score, other.items) == (base.score, base.items),
        aggregate=base.aggregate if base.aggregate == other.aggregate else "other",
        shift=shift,
        error=error,
        largest=max(numbers, default=0) or 1,
        unpaired=len(set(base.ids) ^ set(other.ids)),
    )


def _ratio(terms: Sequence[tuple[float, float]]) -> float:
    return sum(value for value, _ in terms) / (sum(weight for _, weight in terms) or math.nan)


def _ratio_error(terms: Sequence[tuple[float, float]]) -> float:
    """Standard error of the ratio of the sums of values and weights over examples; with weights of 1, of the mean."""
    n, ratio = len(terms), _ratio(terms)
    squares = sum((value - ratio * weight) ** 2 for value, weight in terms)
    return math.sqrt(n / (n - 1) * squares) / (sum(weight for _, weight in terms) or math.nan)


def not_finite(measure: Measure, answers: Answers | None) -> set[Any]:
    """Ids of the examples in which a value of the metric or a log-likelihood is NaN or infinite."""
    found = {its for its, item in zip(measure.ids, measure.items, strict=True) if not finite(item)}
    if answers is not None:
        found |= {its for its, each in zip(answers.ids, answers.loglikelihoods, strict=True) if not finite(each)}
    return found


def compare_answers(
    base: Answers,
    other: Answers,
    tokenizer: hf.PreTrainedTokenizerBase | None,
    rounding: Rounding = EXACT,
    only_ties: bool = False,
    same_scores: bool = True,
) -> dict[str, Any]:
    """The fields of a Pair that depend on answers. only_ties: whether texts differ only where two tokens were equally likely.

    same_scores: whether the values of the metric are equal; equal answers with other values are not the same. If there are
    log-likelihoods, only these decide whether the runs are the same: choices and scores are computed from them.
    """
    found: dict[str, Any] = {}
    both = list(zip(base.answers, other.answers, strict=True))
    answered = [(a, b) for a, b in both if a is not None]
    if answered:
        found["equal"] = sum(a == b for a, b in answered) / len(answered)
        if (first := unequal(base.answers, other.answers)) is not None:
            expected, got = both[first]
            found["first"] = {"example": first, "baseline": expected, "got": got}
            if tokenizer is not None and isinstance(expected, str):
                ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (expected, got)]
                at = unequal(*ids)
                found["first"]["token"] = min(map(len, ids)) if at is None else at
    found["same"] = only_ties or (same_scores and found.get("equal", 1.0) == 1.0)
    lls = [(example, nats, rounding.nats(size, tokens)) for example, nats, size, tokens in _requests(base, other)]
    if lls:
        beyond = [each for each in lls if each[1] == math.inf or each[1] > each[2]]
        largest = max(nats for _, nats, _ in lls)
        found["same"] = not beyond and (same_scores or largest > 0)
        found["explained"] = max(explained for _, _, explained in lls)
        found["largest_loglikelihood_difference"] = largest
        if beyond:
            example, nats, explained = max(beyond, key=lambda each: each[1] if each[1] == math.inf else each[1] - each[2])
            found["unexplained"] = {"example": example, "nats": nats, "rounding": explained}
    return found


def _requests(base: Answers, other: Answers) -> Iterator[tuple[int, float, float, int]]:
    """(example, difference, larger absolute value, tokens) of each log-likelihood. The difference is 0 of two equal infinities,
    and inf if one or both are NaN."""
    for example, each in enumerate(zip(base.loglikelihoods, other.loglikelihoods, base.tokens, strict=True)):
        for a, b, tokens in zip(*each, strict=True):
            nats = 0.0 if a == b else math.inf if math.isnan(a - b) else abs(a - b)
            yield example, nats, max(abs(a), abs(b)), tokens


def spread(base: Answers, other: Answers, rounding: Rounding) -> float | None:
    """`spread` of a Pair; None without log-likelihoods, or if rounding was not measured."""
    each = [
        nats / (rounding.once(size, tokens) or math.inf)
        for _, nats, size, tokens in _requests(base, other)
        if rounding.token and math.isfinite(nats + size)
    ]
    return max(math.sqrt(sum(ratio * ratio for ratio in each) / len(each)), max(each) / 4) if each else None


def differ_only_at_ties(
    base: dict[tuple[int, ...], list[Generated]], other: dict[tuple[int, ...], list[Generated]], rounding: Rounding
) -> bool:
    """Whether the texts that two runs generated differ, and each only from a token on that rounding may decide."""
    leads = []
    for prompt, made in base.items():
        if len(made) != len(other.get(prompt, ())):
            return False
        for ours, theirs in zip(made, other[prompt], strict=True):
            if (at := unequal(ours.tokens, theirs.tokens)) is not None:
                leads.append(ours.leads[at] if at < len(ours.leads) else math.nan)  # NaN is no tie
    return bool(leads) and all(map(rounding.ties, leads))
