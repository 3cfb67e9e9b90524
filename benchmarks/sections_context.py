"""The tables of Ring, zigzag and Striped attention."""

from __future__ import annotations

from hf_fastattn.context_parallel import ORDERS
from hf_fastattn.report.tables import table, thousands

from .sections_ranks import COUNTS
from .words import by_method, figure


def balance(result: dict) -> str:
    rows = [
        [
            thousands(row["tokens"]),
            str(row["ranks"]),
            row["order"],
            figure(row["critical_us"] / 1e3, 2),
            figure(row["balance"], 2),
        ]
        for row in result["rows"]
    ]
    return (
        f"**The orders of context parallelism**, {result['shape']}: the turns of every rank on one GPU, without communication "
        f"{by_method(result)}. The time is the sum over the turns of the slowest rank's; balance is the mean time of the ranks "
        f"divided by it:\n\n{table(['tokens', 'ranks', 'order', 'milliseconds', 'balance'], rows)}"
    )


def times(result: dict) -> str:
    found = {(row["tokens"], row["ranks"], row["order"]): row for row in result["rows"]}
    counts = sorted({*COUNTS, *(ranks for _, ranks, _ in found)})
    rows = []
    for tokens in sorted({tokens for tokens, _, _ in found}):
        for ranks in counts:
            for order in ORDERS:
                row = found.get((tokens, ranks, order), {})
                ms = [figure(row[name] / 1e3, 2) if name in row else None for name in ("us", "compute_us", "send_us")]
                rows.append([thousands(tokens), str(ranks), order, *ms, f"{row['hidden']:.0%}" if "hidden" in row else None])
    return (
        f"**The orders of context parallelism over several GPUs**, {result['shape']}, milliseconds of a call, of its "
        f"computing and of its sending alone; rows without figures were not run {by_method(result)}:\n\n"
        + table(["tokens", "GPUs", "order", "call", "computing", "sending", "sending that is hidden"], rows)
    )


def tree(result: dict) -> str:
    rows = [
        [
            thousands(row["tokens"]),
            str(row["ranks"]),
            *(figure(row["us"][name]) for name in ("tree", "ring")),
            figure(row["ring_over_tree"], 2, "x"),
        ]
        for row in sorted(result["rows"], key=lambda row: (row["tokens"], row["ranks"]))
    ]
    return (
        f"**Tree and Ring in decode**, one row, {result['shape']}, microseconds of an attention call over K and V that the GPUs "
        f"share out by sequence {by_method(result)}:\n\n{table(['tokens', 'GPUs', 'Tree', 'Ring', 'Ring / Tree'], rows)}"
    )
