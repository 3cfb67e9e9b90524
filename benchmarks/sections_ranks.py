"""The JSON of models that several GPUs share, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from hf_fastattn.report.tables import table

from .ranks_rivals import NAMES, NO_TIME, SHARED
from .words import bandwidth, by_method, figure

COUNTS = (2, 4, 8)  # numbers of GPUs: one that was not run has a row without figures


def ranks(result: dict, counts: Iterable[int] = COUNTS, cases: Iterable[str] = ()) -> str:
    """The table. Of the runs of a case, each rival has the last one that timed it. counts, cases: at least these numbers of GPUs
    and these cases."""
    measured, rows = result["rows"], []
    counts = sorted({*counts, *(row["ranks"] for row in measured)})
    for case in dict.fromkeys([*(row["case"] for row in measured), *cases]):
        of_case = [row for row in measured if row["case"] == case]
        for name in NAMES:
            if name.startswith("one"):
                rows += [[case, 1, NAMES[name], *cells] for cells in _cells(of_case, name)]
        for count in counts:
            of_count = [row for row in of_case if row["ranks"] == count]
            if not of_count:
                rows.append([case, count, None, *[None] * 5, "not run"])
            for name in NAMES:
                if not name.startswith("one"):
                    rows += [[case, count, NAMES[name], *cells] for cells in _cells(of_count, name)]
    share = f", each GPU with the share of one of {result['share_of']}" if result.get("share_of") else ""
    head = ["batch x prompt", "GPUs", "", "floor", "ms a token", "replay", "launches", "first token", "notes"]
    return (
        f"**Tensor parallelism, {result['shape']} with {result['layers']} layers{share}, milliseconds**, random weights, the "
        f"floor of one GPU's share at {bandwidth(result)}, the first token of a later call if not noted {by_method(result)}:"
        f"\n\n{table(head, rows)}"
    )


def _cells(rows: list[dict], name: str) -> list[list]:
    """One line with the figures of a rival in the last of these rows that has it, or with the reason why there are none. No line
    for a rival that was not asked for."""
    timed = [row for row in rows if name in row["rivals"]]
    if not timed:
        reasons = [row["not_run"][name] for row in rows if name in row["not_run"]]
        return [[None] * 5 + [_short(reasons[-1])]] if reasons else []
    row = timed[-1]
    report, shared = row["rivals"][name], name in SHARED
    figures = [report["ms"], report.get("replay_ms")]
    notes = ["random K and V"] if row.get("filled") else []
    if report.get("first_token_ms") and not report.get("calls_before"):
        notes.append("first call")
    if report.get("compiled") is False:
        notes.append("ran uncompiled")
    if row["check"].get(name, {}).get("passed") is False:
        notes.append("logits differ")
    floor = figure(row["floor_ms"] if shared else None, 2)
    cells = [floor, *(figure(value, 2) for value in figures), report.get("launches"), figure(report.get("first_token_ms"))]
    return [[*cells, ", ".join(notes) or None]]


def _short(reason: str, most: int = 90) -> str:
    """A reason as a cell of a table."""
    if reason == NO_TIME:
        return "no time"
    text = " ".join(reason.replace("|", "/").replace("`", "").split())
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."
