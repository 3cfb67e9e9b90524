"""Batches of ragged and of equal prompts: tokens a second and time to the first token, of stock generate() and under patch().

    python -m benchmarks.prompts                          # the shape of Llama 3.1 8B
    python -m benchmarks.prompts --shape 1b --only job

Each case runs stock generate() with sdpa, and then patch() and patch() with prompts that are read with their padding, in turn, in
one process and over one set of weights. A call reads its prompts anew. "tokens_per_s" counts the new tokens of a whole call. The
first call of each is not timed, and stock generate() is timed once. Before patch() is timed, the logits of the first new token of
some rows are compared with those of eager attention for the row alone: the case fails if the error of patch() is more than twice
that of stock generate(), plus 4 eps of the largest logit.
"""

from __future__ import annotations

import argparse
import math
import statistics
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest import mock

import torch

from hf_fastattn.patches import patch
from hf_fastattn.patches.calls import unpadded

from . import families
from .models import Subject
from .results import Results, command
from .runs import Prompt, Run, free, make_prompt, run, twin

METHOD = "greedy generate() from the prompt on, in one process; under patch() in turn, medians"
RIVALS = ("stock", "padded", "patched")
CHECKED = 4  # rows whose first logits are compared


def geometric(rows: int, low: int, high: int) -> list[int]:
    """Lengths from `low` to `high` of which each is the last one times a constant."""
    return [round(low * (high / low) ** (i / max(1, rows - 1))) for i in range(rows)]


# name: lengths of the prompts, how often each is in the batch, new tokens
CASES: dict[str, tuple[list[int], int, int]] = {
    "job": (geometric(64, 20, 4096), 1, 128),  # 49 thousand tokens; 262 thousand with padding
    "8xpadded": ([1024 + (32768 - 1024) * i // 7 for i in range(8)], 1, 8),
    "8, geometric": (geometric(8, 1024, 32768), 1, 8),
    "2 prompts x 8 samples": ([4096] * 2, 8, 8),
    "2 prompts": ([4096] * 2, 1, 8),
    "no padding": ([2048] * 8, 1, 8),
    "tiny": (geometric(4, 3, 40), 2, 6),
}


def padded() -> AbstractContextManager:
    """A context in which the padding of prompts is read."""
    return mock.patch.object(unpadded, "TILE", 1 << 62)


def measure(subject: Subject, name: str, device: torch.device, repeats: int) -> dict:
    """The row of one case."""
    lengths, copies, new = CASES[name]
    prompt = make_prompt(lengths, subject.text_config.vocab_size, device)
    ids, mask = (x.repeat_interleave(copies, 0) for x in (prompt.ids, prompt.mask))
    prompt = Prompt(ids, mask, [length for length in lengths for _ in range(copies)])
    model = subject.model
    model.set_attn_implementation("sdpa")
    judge = twin(model, "eager")
    found: dict[str, list[Run]] = {rival: [] for rival in RIVALS}
    peaks: dict[str, int] = {}

    def timed(rival: str, keep: bool) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        each = run(model, prompt, new)
        if device.type == "cuda":
            peaks[rival] = torch.cuda.max_memory_allocated(device)
        found[rival] += [each] if keep else []

    logits = {"stock": first_logits(model, prompt)}
    for i in range(2):  # before patch(), whose caches are kept between calls
        timed("stock", keep=i > 0)
    free(device)
    with patch(model, "lean") as under:
        logits["patched"] = first_logits(model, prompt)
        verdict = judged(logits, judge, prompt)
        if not verdict["passed"]:
            return {"case": name, "lengths": lengths} | verdict
        for i in range(1 + repeats):
            for rival in RIVALS[1:] if i % 2 == 0 else RIVALS[:0:-1]:
                with padded() if rival == "padded" else nullcontext():
                    timed(rival, keep=i > 0)
        row: dict = {"case": name, "lengths": lengths, "copies": copies, "new": new, "skipped_tokens": under.skipped_tokens}
        row |= {"captures": under.captures, "reasons": [*under.reasons, *under._graphs.padded]}
    for rival, runs in found.items():
        seconds = statistics.median(each.wall_s for each in runs)
        row[rival] = {"first_token_s": statistics.median(each.first_token_s for each in runs), "wall_s": seconds}
        row[rival] |= {"all_wall_s": [each.wall_s for each in runs], "tokens_per_s": len(prompt.ids) * new / seconds}
        row[rival] |= {"peak_bytes": peaks.get(rival)}
    return row | verdict


def first_logits(model, prompt: Prompt) -> torch.Tensor:
    return run(model, prompt, 1, logits=True).logits[0].float()


@torch.no_grad()
def judged(logits: dict[str, torch.Tensor], judge, prompt: Prompt) -> dict:
    """The largest error of some rows' logits against the judge's for the row alone, and what is allowed."""
    short = sorted(range(len(prompt.lengths)), key=lambda i: prompt.lengths[i])
    short = [i for i in short if prompt.lengths[i] <= 4096]  # eager attention computes all scores
    rows = short[:: max(1, math.ceil(len(short) / CHECKED))]
    errors, largest = dict.fromkeys(logits, 0.0), 0.0
    for i in rows:
        right = judge(prompt.ids[i : i + 1, -prompt.lengths[i] :], logits_to_keep=1, use_cache=False).logits[0, 0].float()
        largest = max(largest, right.abs().max().item())
        for rival, found in logits.items():
            errors[rival] = max(errors[rival], (found[i] - right).abs().max().item())
    allowed = 2 * errors["stock"] + 4 * torch.finfo(judge.dtype).eps * largest
    return {"rows_checked": rows, "errors": errors, "allowed": allowed, "passed": errors["patched"] <= allowed}


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.prompts") -> int:
    """Measure the chosen cases. Returns 0, or 1 if there was no time for one or its logits are wrong."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each (default: %(default)s)")
    args = families.read_cases(parser, argv, CASES, reserve=60, seconds=400)
    head = {"method": METHOD, "unit": "s a call"}
    run = partial(measure, repeats=args.repeats)
    return families.run_cases(parser, args, "prompts", command(prog, argv), head, families.each(args, run, add))


def add(results: Results, row: dict) -> None:
    """Add a row, or a failure if its logits are wrong."""
    said = f"{row['case']}: errors {row['errors']}, allowed {row['allowed']:.3g}"
    if row["passed"]:
        speeds = (f"{rival} {row[rival]['tokens_per_s']:.0f} ({row[rival]['first_token_s']:.3f} s)" for rival in RIVALS)
        said += f"; tokens/s (first token) {', '.join(speeds)}" + "".join(f"; {reason}" for reason in row["reasons"])
    results.add(row, row["case"], said, row["passed"])


if __name__ == "__main__":
    raise SystemExit(main())
