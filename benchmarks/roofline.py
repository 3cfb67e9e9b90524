"""The batch from which a decode step is bound by compute, measured, beside what explain() says.

    python -m benchmarks.roofline --shape 8b

A row is the replay of a captured step of so many rows, each behind PROMPT tokens, so that K and V are small beside the weights.
A step of one row is bound by reading them. From the batch that explain() names, a further row takes as long as its products.
"""

from __future__ import annotations

import argparse

import torch

from hf_fastattn.explanation import explain
from hf_fastattn.patches import patch

from . import families
from .models import Subject
from .results import Results, command
from .runs import Rival, check, make_prompt, resumed, step_times

METHOD = "replays of captured steps of greedy generate(), by events around ten; medians"
PROMPT, TOKENS, REPEATS = 16, 24, 3
CASES = {f"{rows} rows": rows for rows in (1, 16, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)}
CASES |= {"tiny 1 row": 1, "tiny 4 rows": 4}


def measure(subject: Subject, name: str, device: torch.device) -> dict:
    """The row of one case. Raises RuntimeError if captured steps differ from uncaptured ones."""
    prompt = make_prompt([PROMPT] * CASES[name], subject.text_config.vocab_size, device)
    with patch(subject.model, "lean") as patched:
        first, again = resumed(subject.model, prompt, TOKENS)
        checked = check(Rival("patched", subject.model, prompt, TOKENS, patch=patched), first.cache, subject.model)
        if not checked["passed"]:
            raise RuntimeError(f"captured steps differ from uncaptured ones: {checked}")
        row = {"case": name, "rows": CASES[name], "check": checked} | step_times(patched, again, REPEATS, profiled=False)
    gpu = "h200" if device.type != "cuda" else None
    return row | {"explained": explain(subject.model, gpu=gpu, batch=CASES[name], length=PROMPT).as_dict()["roofline"]}


def add(results: Results, row: dict) -> None:
    results.data["explained"] = row.pop("explained")
    results.add(row, row["case"], f"{row['case']}: {row['ms']:.3f} ms a token, replay {row.get('replay_ms', 0):.3f}")


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.roofline") -> int:
    """Measure the chosen batches. Returns 0, or 1 if there was no time for one."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = families.read_cases(parser, argv, CASES, reserve=15, seconds=120)
    head = {"method": METHOD, "unit": "ms a step"}
    return families.run_cases(parser, args, "roofline", command(prog, argv), head, families.each(args, measure, add))


if __name__ == "__main__":
    raise SystemExit(main())
