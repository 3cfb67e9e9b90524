"""The JSON of models that several GPUs share, as Markdown."""

from __future__ import annotations

from hf_fastattn.tables import table

from .ranks import NAMES
from .words import by_method, figure

COUNTS = (2, 4, 8)  # numbers of GPUs: those that were not run have rows without figures


def ranks(result: dict) -> str:
    measured = result["rows"]
    counts = sorted({*COUNTS, *(row["ranks"] for row in measured)})
    rows = []
    for case in dict.fromkeys(row["case"] for row in measured):
        by_count = {row["ranks"]: row for row in measured if row["case"] == case}
        for name, words in NAMES.items():
            if name.startswith("one"):
                found = next((row for row in by_count.values() if name in row["rivals"]), {})
                rows.append([case, 1, words, *_figures(found, name)])
        for count in counts:
            for name, words in NAMES.items():
                if not name.startswith("one"):
                    rows.append([case, count, words, *_figures(by_count.get(count, {}), name)])
    head = ["batch x prompt", "GPUs", "", "floor", "ms a token", "replay", "launches", "first token"]
    return (
        f"**Tensor parallelism, {result['shape']} with {result['layers']} layers, milliseconds**, random weights, the floor of "
        f"one GPU's share at 4.5 TB/s; rows without figures were not run {by_method(result)}:\n\n{table(head, rows)}"
    )


def _figures(row: dict, name: str) -> list:
    floor = None if name.startswith("one") or not row else figure(row["floor_ms"], 2)
    report = row.get("rivals", {}).get(name)
    if report is None:
        return [floor, None, None, None, None]
    launches, first = report.get("launches"), figure(report["first_token_ms"])
    return [floor, figure(report["ms"], 2), figure(report.get("replay_ms"), 2), launches, first]
