"""The results of an evaluation: its runs, written as JSON and Markdown, and a verdict in one line."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import hf
from ..machine import write_whole
from ..tables import table
from . import pairs
from .pairs import Answers, Generated, Measure, Pair
from .rounding import EXACT, Rounding

STOCK = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")  # attention functions of Transformers


@dataclass
class Run:
    """One backend with one cache. calls: kernel calls by "<backend>.<phase>"; none for Transformers' attention."""

    backend: str
    cache: str
    seconds: float
    calls: dict[str, int]
    measures: list[Measure] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)  # comparisons with the baseline; empty for the baseline
    called: bool = True  # False if a kernel of the package should have run and none did
    generated: dict[tuple[int, ...], list[Generated]] = field(default_factory=dict)  # by the tokens of the prompt

    @property
    def label(self) -> str:
        return f"{self.backend}, {self.cache}"


class Evaluation:
    """Runs of several backends over the same examples. Print it for the tables and the verdict.

    The baseline is the first run. `dtype` decides which differences are allowed. In float32 every exact attention gives the same
    answers up to `rounding`, which the caller measures after the baseline. In 16 bits backends round differently. There a
    difference counts if it is statistically significant over all comparisons and larger than those between Transformers' own
    backends.
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
        self.interrupted = False
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
        """Add a run, and compare each of its metrics with the first run that has this metric."""
        ties = bool(self.runs) and pairs.differ_only_at_ties(self.baseline.generated, run.generated, self.rounding)
        answers = {its.task: its for its in run.answers}
        for measure in run.measures:
            base = self._first_measure(measure.task, measure.metric)
            if base is None:
                continue
            each = pairs.pair(base, measure)
            expected = self._first_answers(measure.task) or Answers.read(base)
            got = answers.get(measure.task) or Answers.read(measure)
            if expected is not None and got is not None:
                vars(each).update(pairs.compare_answers(expected, got, self.tokenizer, self.rounding, ties))
            run.pairs.append(each)
        self.runs.append(run)

    def _first_measure(self, task: str, metric: str) -> Measure | None:
        return next((m for run in self.runs for m in run.measures if (m.task, m.metric) == (task, metric)), None)

    def _first_answers(self, task: str) -> Answers | None:
        return next((its for run in self.runs for its in run.answers if its.task == task), None)

    # ---- the verdict ----

    def _spread(self, task: str, metric: str) -> float | None:
        """The largest difference of Transformers' own backends from the baseline; None if only one ran."""
        found = [
            abs(each.difference)
            for run in self.runs
            if run.backend in STOCK and run.backend != self.baseline.backend
            for each in run.pairs
            if (each.task, each.metric) == (task, metric)
        ]
        return max(found, default=None) if self.baseline.backend in STOCK else None

    def _differs(self, run: Run, each: Pair) -> bool:
        if each.same:
            return False
        if self.exact:
            return True
        spread = None if run.backend in STOCK else self._spread(each.task, each.metric)
        comparisons = sum(len(run.pairs) for run in self.runs)
        return each.beyond_chance(comparisons) and (spread is None or abs(each.difference) > spread)

    def differing(self) -> list[Run]:
        """The runs that differ from the baseline."""
        return [run for run in self.runs if not run.called or any(self._differs(run, each) for each in run.pairs)]

    @property
    def passed(self) -> bool:
        return not self.differing()

    def verdict(self) -> str:
        """One line: which runs equal the baseline, which differ, and the first difference."""
        if not self.runs:
            return "Nothing was measured."
        others = [run for run in self.runs[1:] if run.pairs]
        if not others:
            return f"Only {self.baseline.label} was measured; there is nothing to compare it with."
        differing = self.differing()
        if differing:
            return f"DIFFERENT from {self.baseline.label}: " + "; ".join(self._why(run) for run in differing) + "."
        equal = [run for run in others if all(each.same for each in run.pairs)]
        close = [run.label for run in others if run not in equal]
        tied = [run.label for run in equal if any(each.equal not in (None, 1.0) for each in run.pairs)]
        identical = [run.label for run in equal if run.label not in tied]
        parts = []
        if identical:
            parts.append(f"EQUAL to {self.baseline.label} in every answer and score: {'; '.join(identical)}.")
        if tied:
            parts.append(f"EQUAL to {self.baseline.label} except for answers that were a tie within rounding: {'; '.join(tied)}.")
        if close:
            measured = any(self._spread(e.task, e.metric) is not None for run in others for e in run.pairs)
            than = "chance or than between Transformers' own backends" if measured else "chance"
            parts.append(f"No difference larger than {than}: {'; '.join(close)}.")
        return " ".join(parts)

    def _why(self, run: Run) -> str:
        if not run.called:
            return f"{run.label}: none of its kernels was called"
        each = next(each for each in run.pairs if self._differs(run, each))
        text = f"{run.label} in {each.task} ({each.metric} {each.score:.6g}, not {each.baseline:.6g}"
        if each.equal is not None and each.equal != 1.0:
            text += f"; {100 * each.equal:.3g} % of {each.examples} answers equal"
        if each.first is not None:
            text += f", first at example {each.first['example']}"
            text += f", token {each.first['token']}" if "token" in each.first else ""
        if each.unexplained is not None:
            text += "; example {example} is {nats:.2g} nats off, of which rounding explains {rounding:.2g}".format(
                **each.unexplained
            )
        return text + ")"

    # ---- output ----

    def as_dict(self) -> dict[str, Any]:
        """All results except single examples, as plain numbers and strings."""
        return {
            "conditions": self.conditions,
            "baseline": self.baseline.label if self.runs else None,
            "verdict": self.verdict(),
            "passed": self.passed,
            "interrupted": self.interrupted,
            "rounding": asdict(self.rounding),
            "runs": [
                {
                    "backend": run.backend,
                    "cache": run.cache,
                    "seconds": run.seconds,
                    "calls": run.calls,
                    "scores": [
                        {"task": m.task, "metric": m.metric, "score": m.score, "stderr": m.stderr, "examples": len(m.items)}
                        for m in run.measures
                    ],
                    "against_baseline": [asdict(each) | {"differs": self._differs(run, each)} for each in run.pairs],
                }
                for run in self.runs
            ],
        }

    def save(self, folder: str | Path) -> Path:
        """Write eval.json and eval.md into the folder; each is replaced atomically. Returns the JSON's path."""
        folder = Path(folder)
        write_whole(folder / "eval.json", json.dumps(self.as_dict(), indent=1, default=str) + "\n")
        write_whole(folder / "eval.md", f"{self}\n")
        return folder / "eval.json"

    def __str__(self) -> str:
        return "\n\n".join(self._paragraphs())

    def _paragraphs(self) -> Iterator[str]:
        yield ", ".join(f"{name} {value}" for name, value in self.conditions.items() if value is not None)
        head = ["task", "metric", "backend", "cache", "score", "stderr", "difference", "95 % interval", "equal answers", "first"]
        yield table(head, list(self._rows()))
        if self.interrupted:
            yield "Interrupted: these are the completed runs."
        yield self.verdict()

    def _rows(self) -> Iterator[list[object]]:
        keys = dict.fromkeys((m.task, m.metric) for run in self.runs for m in run.measures)
        for task, metric in keys:
            for run in self.runs:
                for its in run.measures:
                    if (its.task, its.metric) == (task, metric):
                        yield [task, metric, run.backend, run.cache, *_figures(its), *_compared(run, task, metric)]


def _figures(measure: Measure) -> tuple[str, str | None]:
    return f"{measure.score:.6g}", None if measure.stderr is None else f"{measure.stderr:.2g}"


def _compared(run: Run, task: str, metric: str) -> list[str | None]:
    each = next((each for each in run.pairs if (each.task, each.metric) == (task, metric)), None)
    if each is None:
        return ["baseline", None, None, None]
    first = None
    if each.first is not None:
        first = f"example {each.first['example']}" + (f", token {each.first['token']}" if "token" in each.first else "")
    interval = None if each.interval is None else " to ".join(_signed(end) for end in each.interval)
    equal = None if each.equal is None else f"{100 * each.equal:.4g} %"
    return [_signed(each.difference), interval, equal, first]


def _signed(value: float) -> str:
    return f"{value:+.2g}" if value else "0"
