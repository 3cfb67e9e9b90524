"""The tables of Ring, zigzag and Striped attention."""

from __future__ import annotations

from hf_fastattn.tables import table, thousands

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
    rows = [[thousands(row["tokens"]), str(row["ranks"]), row["order"], figure(row["us"] / 1e3, 2)] for row in result["rows"]]
    return (
        f"**The orders of context parallelism over several GPUs**, {result['shape']}, with communication {by_method(result)}:\n\n"
        f"{table(['tokens', 'GPUs', 'order', 'milliseconds'], rows)}"
    )
