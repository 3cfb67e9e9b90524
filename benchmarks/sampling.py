"""A token of generate() that samples, and of a greedy one, under patch() and in stock Transformers.

    python -m benchmarks.sampling --shape 1b
    python -m benchmarks.sampling --shape 8b

A case is a number of rows behind a prompt of 512 tokens each. All settings of a case continue in turn from one cache, in one
process. Each has the settings of Transformers that are named, and no other. "above" is the time of a token beyond that of a
greedy one in the same turn. Weights are random; those of the head are enlarged, so that few tokens are likely, as in a trained
model.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import islice

import torch

from hf_fastattn.patches import patch

from . import families
from .models import Subject
from .results import Results, command
from .runs import free, make_prompt, rewind, run, twin
from .timing import orders

METHOD = "generate() from one cache, 6th new token to last, settings alternating, medians"
GREEDY = "greedy"
SETTINGS: dict[str, dict] = {
    GREEDY: {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-k 20, top-p 0.95, temperature 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
PROMPT, TURNS, ENLARGED = 512, 5, 4.0
CASES = {"1 row": 1, "64 rows": 64, "tiny rows": 2}
TOKENS = {"patched": 60, "stock": 20}


@torch.no_grad()
def enlarge(subject: Subject) -> None:
    """Enlarge the weights of the head."""
    subject.model.get_output_embeddings().weight.mul_(ENLARGED)


def options(setting: str) -> dict:
    """The arguments of generate() of a setting."""
    return {"do_sample": setting != GREEDY, "top_k": None, "top_p": None} | SETTINGS[setting]


def times(model, prompt, new: int) -> dict[str, list[float]]:
    """Milliseconds of a token of each setting in each turn; the first turn, which captures, is left out."""
    cache = run(model, prompt, 8, keep=True).cache
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for order in islice(orders([*SETTINGS]), TURNS + 1):
        for name in order:
            found[name].append(run(model, prompt, new, rewind(cache, prompt), **options(name)).ms)
    return {name: each[1:] for name, each in found.items()}


def measure(subject: Subject, name: str, device: torch.device) -> list[dict]:
    """The rows of one case."""
    tokens = PROMPT if device.type == "cuda" else 16
    prompt = make_prompt([tokens] * CASES[name], subject.text_config.vocab_size, device)
    found = {"stock": times(twin(subject.model, "sdpa"), prompt, TOKENS["stock"])}
    free(device)
    with patch(subject.model, "lean") as under:
        found["patched"] = times(subject.model, prompt, TOKENS["patched"])
        reasons = [*under.reasons]
    rows = []
    for setting in SETTINGS:
        row: dict = {"case": name, "rows": CASES[name], "prompt": tokens, "setting": setting, "reasons": reasons}
        for rival, its in found.items():
            above = [a - b for a, b in zip(its[setting], its[GREEDY], strict=True)]
            row[rival] = {"ms": statistics.median(its[setting]), "above_ms": statistics.median(above), "all_ms": its[setting]}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.sampling") -> int:
    """Measure the chosen cases. Returns 0, or 1 if there was no time for one."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = families.read_cases(parser, argv, CASES, reserve=30, seconds=200)
    head = {"method": METHOD, "unit": "ms"}
    begun = families.each(args, measure, add, prepare=enlarge)
    return families.run_cases(parser, args, f"sampling_{args.shape}", command(prog, argv), head, begun)


def add(results: Results, rows: list[dict]) -> None:
    for row in rows:
        each = (f"{rival} {row[rival]['ms']:.3f} ms, {row[rival]['above_ms']:+.3f}" for rival in TOKENS)
        results.add(row, row["case"], f"{row['case']}, {row['setting']}: {'; '.join(each)}")


if __name__ == "__main__":
    raise SystemExit(main())
