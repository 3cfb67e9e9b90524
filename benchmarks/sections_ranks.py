"""The JSON of models that several GPUs share, as Markdown."""

from __future__ import annotations

from hf_fastattn.tables import table

from .ranks import NAMES
from .words import by_method, figure


def ranks(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        for name, report in row["rivals"].items():
            gpus = 1 if name.startswith("one") else result["ranks"]
            floor = figure(row["floor_ms"], 2) if gpus > 1 else None
            figures = [figure(report["ms"], 2), figure(report.get("replay_ms"), 2), report.get("launches")]
            rows.append([row["case"], gpus, NAMES[name], floor, *figures, figure(report["first_token_ms"])])
    head = ["batch x prompt", "GPUs", "", "floor", "ms a token", "replay", "launches", "first token"]
    return (
        f"**Tensor parallelism, {result['shape']} with {result['layers']} layers, milliseconds**, random weights, the floor of "
        f"one GPU's share at 4.5 TB/s {by_method(result)}:\n\n{table(head, rows)}"
    )
