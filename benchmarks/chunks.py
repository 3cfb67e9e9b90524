"""Time to the first token and peak memory of long prompts, by the number of tokens that are read at once.

    python -m benchmarks.chunks --shape 8b
    python -m benchmarks.chunks --shape mistral-7b          # with a window

Each row is one prompt of one length under patch(): as a whole, in chunks, or as prefill_chunk="auto" decides. A first
generate(), which is not timed, compiles the kernels. "peak" is memory beside the weights and the cache. "pairs" is the number of
scores of the largest chunk and one head: C x L, in a window C x L_w, which attention without tiles would store.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch
from hf_fastattn.patches.calls import chunks

from . import families
from .models import SHAPES, Subject, dtype_for, load
from .results import Results, add_options, command, conditions, find_device, listed, need_gpu, progress
from .runs import free, make_prompt, run

METHOD = (
    "greedy generate() of one row under patch(); host time to the first token, which the device has finished; best of the repeats"
)
LENGTHS = "16384", "65536", "262144"
CHUNKS = "whole", "1024", "4096", "16384", "65536", "auto"


def measure(subject: Subject, tokens: int, asked: str, repeats: int, device: torch.device) -> dict:
    """The row of one prompt. asked: of CHUNKS."""
    model, auto = subject.model, asked == "auto"
    prompt = make_prompt([tokens], subject.text_config.vocab_size, device)
    options = {} if auto or asked == "whole" else {"prefill_chunk_size": int(asked)}
    row: dict = {"tokens": tokens, "asked": asked, "chunk": options.get("prefill_chunk_size")}
    seconds, peaks = [], []
    try:
        with patch(model, prefill_chunk="auto" if auto else None), chosen(row if auto else {}):
            for repeat in range(repeats + 1):
                cache = PreallocatedCache(model, tokens + 1)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                before = 0 if device.type != "cuda" else torch.cuda.memory_allocated(device)
                found = run(model, prompt, 1, cache, **options)
                if repeat:
                    seconds.append(found.first_token_s)
                    if device.type == "cuda":
                        kept = sum(part.tensor.nbytes for part in cache.storage.memory())
                        peaks.append(torch.cuda.max_memory_allocated(device) - before - kept)
                del cache, found
        row |= {"first_token_s": min(seconds), "peak_bytes": max(peaks, default=None)}
    except torch.OutOfMemoryError as error:
        row["failed"] = str(error).partition(". ")[0]
    free(device)
    largest = row["chunk"] or tokens
    window = getattr(subject.text_config, "sliding_window", None)
    seen = tokens if window is None else min(tokens, largest + window)
    return row | {"pairs": largest * seen, "estimate_bytes": largest * chunks.bytes_per_token(model)}


@contextmanager
def chosen(row: dict) -> Iterator[None]:
    """Inside it, row["chunk"] becomes what prefill_chunk="auto" chooses."""
    largest = chunks.largest

    def note(*args):
        row["chunk"] = found = largest(*args)
        return found

    chunks.largest = note
    try:
        yield
    finally:
        chunks.largest = largest


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.chunks") -> int:
    """Measure the chosen prompts. Returns 0, or 1 if there was no time for one; memory that does not suffice is a result."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", choices=SHAPES, help="default: %(default)s")
    parser.add_argument("--lengths", type=listed, default=LENGTHS, help=f"tokens of the prompts (default: {','.join(LENGTHS)})")
    help_ = f"tokens that are read at once, whole or auto (default: {','.join(CHUNKS)})"
    parser.add_argument("--chunks", type=listed, default=CHUNKS, help=help_)
    parser.add_argument("--repeats", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--reserve", type=float, default=60, help="seconds that a row may need (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the other rows in the JSON")
    add_options(parser, seconds=500)
    args = parser.parse_args(argv)
    if wrong := [each for each in args.chunks if each not in ("whole", "auto") and not each.isdecimal()]:
        parser.error(f"--chunks takes numbers, whole and auto; got {wrong[0]}.")
    if wrong := [each for each in args.lengths if not each.isdecimal()]:
        parser.error(f"--lengths takes numbers of tokens; got {wrong[0]}.")
    need_gpu(parser, args, [args.shape])
    device = find_device(args.device)
    head = {"conditions": conditions(device, METHOD), "shape": args.shape, "unit": "s"}
    results = families.begin(parser, args, f"chunks_{args.shape}", command(prog, argv), device, head)
    cases = [(int(tokens), asked) for tokens in args.lengths for asked in args.chunks]
    cases = [(tokens, asked) for tokens, asked in cases if not asked.isdecimal() or int(asked) < tokens]
    results.data["rows"] = [row for row in results.data["rows"] if (row["tokens"], row["asked"]) not in cases]
    subject = load(args.shape, dtype_for(device), device, positions=max(tokens for tokens, _ in cases) + 1)
    for tokens, asked in progress(cases, "prompts in chunks", "prompt"):
        if results.left() < args.reserve:
            results.data["not_run"].append(f"{tokens} {asked}")
            continue
        add(results, measure(subject, tokens, asked, args.repeats, device))
    return families.end(results)


def add(results: Results, row: dict) -> None:
    results.data["rows"].append(row | {"run": results.run})
    read = "whole" if row["chunk"] is None else f"in chunks of {row['chunk']}"
    said = row.get("failed") or f"{row['first_token_s']:.3f} s, peak {(row['peak_bytes'] or 0) / 1e9:.2f} GB"
    results.say(f"{row['tokens']} tokens, {row['asked']}, {read}: {said}, estimated {row['estimate_bytes'] / 1e9:.2f} GB")
    results.save()


if __name__ == "__main__":
    raise SystemExit(main())
