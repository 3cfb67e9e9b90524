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
    us = {(row["tokens"], row["ranks"], row["order"]): row["us"] for row in result["rows"]}
    counts = sorted({*COUNTS, *(ranks for _, ranks, _ in us)})
    rows = [
        [thousands(tokens), str(ranks), order, figure(us[at] / 1e3, 2) if (at := (tokens, ranks, order)) in us else None]
        for tokens in sorted({tokens for tokens, _, _ in us})
        for ranks in counts
        for order in ORDERS
    ]
    return (
        f"**The orders of context parallelism over several GPUs**, {result['shape']}, with communication; rows without figures "
        f"were not run {by_method(result)}:\n\n{table(['tokens', 'GPUs', 'order', 'milliseconds'], rows)}"
    )
