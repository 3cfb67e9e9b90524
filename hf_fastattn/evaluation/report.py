"""The results of an evaluation: its runs, written as JSON and Markdown, and a verdict in one line."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import hf
from ..report.machine import write_whole
from ..report.tables import table
from . import pairs
from .pairs import Answers, Generated, Measure, Pair
from .rounding import EXACT, Rounding

EQUAL, CLOSE, UNJUDGED, DIFFERENT = "equal", "close", "not judged", "different"
STOCK = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")  # attention functions of Transformers


@dataclass
class Run:
    """One backend with one cache. calls: kernel calls by "<backend>.<phase>"; none for Transformers' attention."""

    backend: str
    cache: str
    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)  # comparisons with the baseline; empty for the baseline
    lacking: list[str] = field(default_factory=list)  # metrics that only this run or only the baseline has
    called: bool = True  # False if a kernel of the package should have run and none did
    generated: dict[tuple[int, ...], list[Generated]] = field(default_factory=dict)  # by the tokens of the prompt

    @property
    def label(self) -> str:
        return f"{self.backend}, {self.cache}"

    def broken(self) -> set[tuple[int, ...]]:
        """The prompts of which a generated token was chosen among logits that are not finite."""
        return {prompt for prompt, made in self.generated.items() if not all(each.finite for each in made)}


class Evaluation:
    """Runs of several backends over the same examples. Print it for the tables and the verdict.

    The baseline is the first run. `dtype` decides which differences are allowed. In float32 every exact attention gives the same
    answers up to `rounding`, which the caller measures after the baseline. In 16 bits backends round differently. There a
    difference counts if it is statistically significant over all comparisons, or if single log-likelihoods differ by more than
    rounding explains, and if it is larger than those between Transformers' own backends.

    An evaluation passes only if every metric was judged. One is not if the baseline has NaN or infinity; a changed score in 16
    bits is not if it has too few examples, is neither a mean nor a perplexity nor bits per byte, or is a score of generated texts
    that is no larger than the smallest detectable difference. NaN or infinity in another run alone is a difference.
    """

    def __init__(
        self,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: hf.PreTrainedTokenizerBase | None = None,
        conditions: Mapping[str, object] | None = None,
    ) -> None:
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.runs: list[Run] = []
        self.rounding = Rounding(torch.finfo(dtype).eps / 2) if self.exact else EXACT
        self.interrupted = False  # whether runs are missing
        self.unsaved: str | None = None  # why the results could not be saved
        self.conditions: dict[str, object] = {
            "model": model,
            "dtype": str(dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": hf.VERSION,
            "python": platform.python_version(),
            **(conditions or {}),
        }

    @property
    def baseline(self) -> Run:
        return self.runs[0]

    @property
    def exact(self) -> bool:
        """Whether only rounding differences are allowed."""
        return self.dtype.itemsize >= torch.float32.itemsize

    def add(self, run: Run) -> None:
        """Add a run, and compare each of its metrics with that of the baseline."""
        if self.runs:
            ours, theirs = ({m.key: m for m in each.measures} for each in (run, self.baseline))
            ran = {task for task, _ in ours} | {its.task for its in run.answers}
            alone = ours.keys() ^ {key for key in theirs if key[0] in ran}
            run.lacking = [f"{task} ({metric})" for task, metric in sorted(alone)]
            rounding = self.rounding if self.exact else EXACT
            ties = pairs.differ_only_at_ties(self.baseline.generated, run.generated, rounding)
            both = [(theirs[key], its) for key, its in ours.items() if key in theirs and its.aggregate != pairs.GROUP]
            run.pairs = [self._pair(base, its, run, rounding, ties) for base, its in both]
        self.runs.append(run)

    def _pair(self, base: Measure, measure: Measure, run: Run, rounding: Rounding, ties: bool) -> Pair:
        each = pairs.pair(base, measure)
        expected, got = (
            next((its for its in of.answers if its.task == measure.task), None) or Answers.read(values)
            for of, values in ((self.baseline, base), (run, measure))
        )
        before, now = pairs.not_finite(base, expected), pairs.not_finite(measure, got)
        each.baseline_not_finite, each.not_finite = len(before), len(now - before)
        if expected is not None and got is not None:
            each.unpaired = max(each.unpaired, len(set(expected.ids) ^ set(got.ids)))
            if not each.unpaired:
                found = pairs.compare_answers(expected, got, self.tokenizer, rounding, ties, each.same)
                vars(each).update(found, examples=len(got.ids))
                each.spread = None if self.exact else pairs.spread(expected, got, self.rounding)
        return each

    # ---- the verdict ----

    @property
    def _comparisons(self) -> int:
        return max(1, sum(len(run.pairs) for run in self.runs))

    def _stock(self, run: Run, each: Pair) -> list[Pair]:
        """The comparisons of Transformers' own backends in this metric, which a backend of the package may differ by."""
        if run.backend in STOCK or self.baseline.backend not in STOCK:
            return []
        return [
            its
            for run in self.runs
            if run.backend in STOCK and run.backend != self.baseline.backend
            for its in run.pairs
            if its.key == each.key
        ]

    def _judge(self, run: Run, each: Pair) -> tuple[str, str]:
        """(result of a comparison, its reason as part of a sentence)."""
        in_nats = each.aggregate in pairs.NATS  # exp() of finite log-likelihoods may be too large for a float
        if each.unpaired:
            return UNJUDGED, f"{each.unpaired} examples are in one run only"
        if not each.examples:
            return UNJUDGED, "it has no examples"
        if each.not_finite:
            return DIFFERENT, f"NaN or infinity in {each.not_finite} of {each.examples} examples"
        if each.baseline_not_finite:
            return UNJUDGED, f"NaN or infinity in {each.baseline_not_finite} of {each.examples} examples of the baseline"
        if not in_nats and not math.isfinite(each.baseline):
            return UNJUDGED, "the score of the baseline is not a finite number"
        if not in_nats and not math.isfinite(each.score):
            return DIFFERENT, "the score is not a finite number"
        if not self.rounding.measured:
            return UNJUDGED, "the effect of rounding on the baseline is not a finite number"
        if each.same:
            return EQUAL, ""
        return (DIFFERENT, self._detail(each)) if self.exact else self._judge_16_bits(run, each)

    def _judge_16_bits(self, run: Run, each: Pair) -> tuple[str, str]:
        stock, comparisons = self._stock(run, each), self._comparisons
        spread = max([1.0, *(its.spread or 0.0 for its in stock)])
        shift = max((abs(its.shift) for its in stock if its.shift is not None and not its.not_finite), default=0.0)
        if each.spread is not None and each.spread > spread:
            return DIFFERENT, f"log-likelihoods differ by {each.spread:.2g} times what rounding explains"
        detectable = each.detectable(comparisons)
        if each.shift is None or detectable is None:
            if each.aggregate not in ("mean", *pairs.NATS):
                return UNJUDGED, f"the score is aggregated by {each.aggregate}, for which there is no interval"
            return UNJUDGED, f"fewer than {pairs.least_examples(comparisons)} examples cannot show a difference"
        if each.beyond_chance(comparisons) and abs(each.shift) > shift:
            return DIFFERENT, self._detail(each)
        if each.spread is None and each.aggregate == "mean" and detectable >= abs(each.baseline):
            return UNJUDGED, f"a score of {each.baseline:.3g} cannot fall by the smallest detectable difference, {detectable:.2g}"
        return CLOSE, ""

    def _findings(self, run: Run) -> list[tuple[str, str]]:
        """(result, the end of a sentence about the run) of the run as a whole and of each comparison."""
        found = [] if run.called else [(DIFFERENT, ": none of its kernels was called")]
        if run is self.baseline:
            return found
        bad, before = run.broken(), self.baseline.broken() & run.generated.keys()
        for prompts, result, whose in ((bad - before, DIFFERENT, ""), (before, UNJUDGED, " of the baseline")):
            where = f"{len(prompts)} of {len(run.generated)} prompts{whose}"
            found += [(result, f": NaN or infinity in the logits of {where}")] if prompts else []
        found += [(UNJUDGED, f": {metric} is missing in one of the two runs") for metric in run.lacking]
        if not run.pairs and not run.lacking:
            found.append((UNJUDGED, ": it has no scores"))
        for each in run.pairs:
            result, why = self._judge(run, each)
            scores = f"{each.metric} {each.score:.6g}, not {each.baseline:.6g}"
            found.append((result, f" in {each.task} ({scores}{why and '; '}{why})"))
        return found

    def _with(self, result: str) -> list[Run]:
        return [run for run in self.runs if any(its == result for its, _ in self._findings(run))]

    def differing(self) -> list[Run]:
        """The runs that differ from the baseline."""
        return self._with(DIFFERENT)

    def not_judged(self) -> list[Run]:
        """The runs that were not, or not in every metric, compared with the baseline."""
        return self._with(UNJUDGED)

    @property
    def passed(self) -> bool:
        """Whether every run was compared with the baseline in every metric and none differs."""
        return len(self.runs) > 1 and not (self.interrupted or self.differing() or self.not_judged())

    def verdict(self) -> str:
        """One line: which runs equal the baseline, and which differ or were not judged and the first reason."""
        if not self.runs:
            return "Nothing was measured."
        differing, unjudged, base = self.differing(), self.not_judged(), self.baseline.label
        parts = [
            f"{name} {base}: {'; '.join(self._why(run, result) for run in runs)}."
            for name, runs, result in (("DIFFERENT from", differing, DIFFERENT), ("NOT JUDGED against", unjudged, UNJUDGED))
            if runs
        ]
        if len(self.runs) == 1:
            parts.append(f"Only {base} was measured; there is nothing to compare it with.")
        if differing or len(self.runs) == 1:
            return " ".join(parts)
        others = [run for run in self.runs[1:] if run not in unjudged]
        measured = any(self._stock(run, each) for run in others for each in run.pairs)
        than = "chance or than between Transformers' own backends" if measured else "chance"
        alike: dict[str, list[str]] = {
            f"EQUAL to {base} in every answer and score": [],
            f"EQUAL to {base} except for answers that were a tie within rounding": [],
            f"No difference larger than {than}": [],
        }
        for run in others:
            tied = any(each.equal not in (None, 1.0) for each in run.pairs)
            list(alike.values())[tied if all(each.same for each in run.pairs) else 2].append(run.label)
        parts += [f"{what}: {'; '.join(labels)}." for what, labels in alike.items() if labels]
        return " ".join(parts)

    def _detectable(self, run: Run, each: Pair) -> float | None:
        """The smallest detectable difference: in float32 of a log-likelihood, in nats, or between two tokens, in logits; else of
        the score. None if every difference is detected, and if the metric was not judged."""
        result = self._judge(run, each)[0]
        if self.exact and result == EQUAL:
            return each.explained if each.explained is not None else 2 * self.rounding.margin or None
        return each.detectable(self._comparisons) if result == CLOSE else None

    def _why(self, run: Run, result: str) -> str:
        first, *more = [why for its, why in self._findings(run) if its == result]
        return f"{run.label}{first}" + (f" and {len(more)} more" if more else "")

    def _detail(self, each: Pair) -> str:
        text = []
        if each.equal is not None and each.equal != 1.0:
            text.append(f"{100 * each.equal:.3g} % of {each.examples} answers equal")
        if each.first is not None:
            text.append(f"first at {_place(each.first)}")
        if each.unexplained is not None:
            text.append(
                "example {example} is {nats:.2g} nats off, of which rounding explains {rounding:.2g}".format(**each.unexplained)
            )
        return ", ".join(text)

    # ---- output ----

    def as_dict(self) -> dict[str, Any]:
        """All results except single examples, as plain numbers and strings.

        JSON has no NaN and no infinity: these are the strings "NaN", "Infinity" and "-Infinity".
        """
        found = {
            "conditions": self.conditions,
            "baseline": self.baseline.label if self.runs else None,
            "verdict": self.verdict(),
            "passed": self.passed,
            "not_judged": [run.label for run in self.not_judged()],
            "interrupted": self.interrupted,
            "rounding": asdict(self.rounding),
            "runs": [
                {name: getattr(run, name) for name in ("backend", "cache", "seconds", "calls")}
                | {
                    "scores": [
                        {"task": m.task, "metric": m.metric, "score": m.score, "stderr": m.stderr, "examples": len(m.items)}
                        for m in run.measures
                    ],
                    "against_baseline": [self._compared(run, each) for each in run.pairs],
                }
                for run in self.runs
            ],
        }
        written: dict[str, Any] = json.loads(json.dumps(found, default=str), parse_constant=str)
        return written

    def _compared(self, run: Run, each: Pair) -> dict[str, Any]:
        result, reason = self._judge(run, each)
        more = {"result": result, "differs": result == DIFFERENT, "reason": reason, "detectable": self._detectable(run, each)}
        return asdict(each) | more

    def save(self, folder: str | Path) -> Path:
        """Write eval.json and eval.md into the folder; each is replaced atomically. Returns the JSON's path."""
        folder = Path(folder)
        write_whole(folder / "eval.json", json.dumps(self.as_dict(), indent=1) + "\n")
        write_whole(folder / "eval.md", f"{self}\n")
        return folder / "eval.json"

    def __str__(self) -> str:
        head = ["task", "metric", "backend", "cache", "score", "stderr", "difference", "95 % interval"]
        keys = dict.fromkeys(its.key for run in self.runs for its in run.measures)
        rows = [self._row(run, its) for key in keys for run in self.runs for its in run.measures if its.key == key]
        parts = [
            ", ".join(f"{name} {value}" for name, value in self.conditions.items() if value is not None),
            table([*head, "detectable", "result", "equal answers", "first"], rows),
            *["Interrupted: these are the completed runs."] * self.interrupted,
            self.verdict(),
        ]
        return "\n\n".join(parts)

    def _row(self, run: Run, its: Measure) -> list[str | None]:
        stderr = None if its.stderr is None else f"{its.stderr:.2g}"
        row = [*its.key, run.backend, run.cache, f"{its.score:.6g}", stderr]
        each = next((each for each in run.pairs if each.key == its.key), None)
        if each is None:
            its_tasks = "see its tasks" if its.aggregate == pairs.GROUP else UNJUDGED
            return [*row, None, None, None, "baseline" if run is self.baseline else its_tasks, None, None]
        interval = None if each.interval is None else " to ".join(map(_signed, each.interval))
        equal = None if each.equal is None else f"{100 * each.equal:.4g} %"
        size, result = self._detectable(run, each), self._judge(run, each)[0]
        first = None if each.first is None else _place(each.first)
        return [*row, _signed(each.difference), interval, None if size is None else f"{size:.2g}", result, equal, first]


def _place(first: dict[str, Any]) -> str:
    """Where answers differ first, from `first` of a Pair."""
    return f"example {first['example']}" + (f", token {first['token']}" if "token" in first else "")


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("+nan", "nan") if value else "0"
