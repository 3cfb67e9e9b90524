"""Which run measured a figure. A ratio, or a statement about peers, uses figures of one run only.

Each row or rival has the id of its run as "run", and "measured_by" of the result has the command and the conditions of each run.
Older results have only "commands", and notes on the rivals that were added to a row later. There the command identifies the run,
if these determine it.
"""

from __future__ import annotations

import argparse
import itertools
import shlex

from .grid import ADDED, CASES, DEFAULT_RIVALS, OURS, RIVALS, UNPADDED


def run_of(result: dict, row: dict, name: str | None = None) -> str | None:
    """The run that measured the row, or its rival of this name: an id, in older results a command; None if it is not known."""
    measured = row if name is None else row["rivals"].get(name) or {}
    if "run" in measured:
        return measured["run"]
    known = {run["command"] for run in result.get("measured_by", {}).values()}
    older = [command for command in result["commands"] if command not in known]
    if name is not None:
        older = _could_measure(older, row, OURS if name == UNPADDED else name)
    return older[0] if len(older) == 1 else None


def _could_measure(commands: list[str], row: dict, name: str) -> list[str]:
    """The commands of `bench generate` that may have measured the rival, according to the notes of its row."""
    notes = row.get("notes", [])
    added = [  # after the note of a run that had no time for the case, another note reports this
        note.removesuffix(ADDED).split(", ")
        for note, then in itertools.zip_longest(notes, notes[1:], fillvalue="")
        if note.endswith(ADDED) and not then.startswith("not run:")
    ]
    added = [rivals for rivals in added if name in rivals]
    if len(added) > 1:
        return []
    asked = {command: _asked(command) for command in commands}
    return [
        command
        for command, (adds, cases, rivals) in asked.items()
        if row["case"] in cases and name in rivals and (adds and rivals == added[0] if added else not adds)
    ]


def _asked(command: str) -> tuple[bool, list[str], list[str]]:
    """--add, --cases and --rivals of a command."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rivals", default=",".join(DEFAULT_RIVALS))
    options, _ = parser.parse_known_args(shlex.split(command))
    cases, rivals = ([item for item in text.split(",") if item] for text in (options.cases, options.rivals))
    return options.add, cases, list(RIVALS) if rivals == ["all"] else rivals


def of_one_run(result: dict, row: dict, *names: str) -> bool:
    """Whether one run measured all these rivals of the row."""
    runs = {run_of(result, row, name) for name in names}
    return len(runs) == 1 and None not in runs


def ratio(result: dict, row: dict, name: str, over: str, what: str = "ms") -> float | None:
    """The figure of a rival over that of another; None if one is missing or if two runs measured them."""
    ours, theirs = ((row["rivals"].get(each) or {}).get(what) for each in (over, name))
    return theirs / ours if ours and theirs and of_one_run(result, row, name, over) else None


def told(result: dict, run: str) -> str:
    """A run as text: its command, versions that are not those above the table, and its driver and clocks if they are known."""
    of = result.get("measured_by", {}).get(run)
    if of is None:
        return f"`{run}`"
    at = of["conditions"]
    head = result.get("conditions", {})
    other = [
        f"{key} {at[key]}" for key in ("device", "torch", "triton", "transformers") if key in at and at[key] != head.get(key)
    ]
    words = [f"`{of['command']}`", *other, *([f"driver {at['driver']}"] if "driver" in at else [])]
    for what, key in (("SM", "sm_mhz"), ("memory", "memory_mhz")):
        if key in at:
            words.append(f"{what} clock {' to '.join(dict.fromkeys(map(str, at[key])))} MHz")
    return ", ".join(words)


def noted(result: dict, runs: list[str]) -> str:
    """Runs as footnotes, which `report` numbers and puts at the end of the page."""
    return "".join(dict.fromkeys(f"[^{told(result, run)}]" for run in runs))


def older(result: dict) -> str:
    """A sentence on the figures that were measured with code that has changed since; "" if there are none.

    The result's "older" has the version, the dates if the rows have no ids of runs, which begin with theirs, and in "rows", by
    the name of a field, the values that select rows; without it all rows are older. Rows whose run has a version are not.
    """
    found, runs = result.get("older"), result.get("measured_by", {})
    if found is None:
        return ""
    chosen, rows = found.get("rows", {}), result.get("rows", [])
    rows = [row for row in rows if all(row[name] in values for name, values in chosen.items())]
    rows = [row for row in rows if "version" not in runs.get(row.get("run"), {})]
    if not rows and "rows" in result:  # measured again
        return ""
    days = {row["run"][:8] for row in rows if "run" in row}
    dates = found.get("dates") or sorted(f"{day[:4]}-{day[4:6]}-{day[6:]}" for day in days)
    which = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in chosen.items())
    what = f"The rows of {which} were measured" if which else "Measured"
    return f"{what} on {' and '.join(dates)} with hf_fastattn {found['version']}. The code has changed since."


def by(result: dict, rows: list[dict] | None = None) -> str:
    """The runs of rows that were each measured by one run, as text."""
    runs = list(dict.fromkeys(run_of(result, row) for row in (result["rows"] if rows is None else rows)))
    if len(runs) == 1 and None not in runs:
        return f"one run{noted(result, runs)}"
    return f"runs{noted(result, result['commands'] if None in runs else runs)}, each row of one"


def columns(result: dict, rows: list[dict], labels: dict[str, str]) -> str:
    """Which run measured which columns of which rows of a table of rivals, as text."""
    cells = {(row["case"], name): run_of(result, row, name) for row in rows for name in labels if _timed(row, name)}
    runs = sorted(set(cells.values()), key=lambda run: run is None)
    if not runs:
        return ""
    if len(runs) == 1 and runs[0] is not None:
        return f"All columns are of one run{noted(result, runs)}."
    order = [*result["commands"], *result.get("measured_by", {}), None]
    lines = []
    for i, run in enumerate(sorted(runs, key=lambda run: order.index(run) if run in order else len(order)), 1):
        shared: dict[str, list[str]] = {}  # rows by the columns that this run measured
        for row in rows:
            its = [labels[name] for name in labels if (row["case"], name) in cells and cells[row["case"], name] == run]
            if its:
                shared.setdefault(" and ".join(filter(None, [", ".join(its[:-1]), its[-1]])), []).append(row["case"])
        what = "; ".join(f"{names} of {', '.join(cases)}" for names, cases in shared.items())
        lines.append(f"- unknown run: {what}" if run is None else f"- run {i}{noted(result, [run])}: {what}")
    return "Columns come from several runs; ratios only compare figures of one run.\n\n" + "\n".join(lines)


def _timed(row: dict, name: str) -> bool:
    return (row["rivals"].get(name) or {}).get("ms") is not None
