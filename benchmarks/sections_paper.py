"""The sections of docs/results.md on the LeanAttention paper, as `sections` has them of everything else."""

from __future__ import annotations

from hf_fastattn.tables import table, thousands

from .provenance import by
from .words import by_method, figure, method, model


def paper_e2e(result: dict) -> str:
    names = ("fa2", "split_kv", "lean")
    head = ["new tokens", *(f"`{name}`, s" for name in names), "`fa2` / `lean`", "`split_kv` / `lean`"]
    rows = [
        [
            thousands(output["new_tokens"]),
            *(figure(output["seconds"][name]) for name in names),
            figure(output["lean_over_fa2"], 2),
            figure(output["lean_over_split_kv"], 2),
        ]
        for output in result["summary"]["outputs"]
    ]
    contexts = ", ".join(thousands(row["context"]) for row in result["rows"])
    return (
        f"**A growing output behind a prompt of {thousands(result['rows'][0]['context'])}**, the LeanAttention paper's figure "
        f"10, {model(result)}, all under `patch()` ({by(result)}; {method(result)}). ms a token is measured at contexts of "
        f"{contexts}; the seconds are integrated between them:\n\n{table(head, rows)}"
    )


def paper(result: dict) -> str:
    found, rows = result["summary"], []
    for name, peer in (("lean_over_fa2", "`fa2`"), ("lean_over_split_kv", "`split_kv`")):
        said, ours = found["published"][name], found[name]
        here = f"{ours['average']:.2f}, up to {ours['largest']:.2f}"
        rows.append([f"`lean` over {peer}", f"{said['average']}, up to {said['largest']}", here])
        rows[-1] += [figure(ours["geometric_mean"], 2), figure(ours["smallest"], 2)]
    balance = ", ".join(f"`{name}` {value:.2f}" for name, value in found["mean_balance"].items())
    values = lambda name: [row[name] for row in result["rows"]]  # noqa: E731
    span = lambda name: f"{thousands(min(values(name)))} to {thousands(max(values(name)))}"  # noqa: E731
    head = ["", f"published, {found['published']['device']}", "here: average", "geometric mean", "smallest"]
    return (
        f"**The LeanAttention paper's own comparison**, its figures 7 and 9 {by_method(result)}: {len(result['rows'])} shapes, "
        f"head_dim {span('head_dim')}, {span('num_heads')} heads, batch {span('batch')}, {span('kv_len')} tokens.\n\n"
        f"{table(head, rows)}\n\n"
        f"How evenly the schedules lay the work on the SMs (its figure 4; 1 is perfect), on average: {balance}."
    )
