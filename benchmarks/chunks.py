"""Time to the first token and peak memory of long prompts, by the number of tokens that are read at once.

    python -m benchmarks.chunks --shape 8b
    python -m benchmarks.chunks --shape mistral-7b          # with a window
    python -m benchmarks.chunks --occupy 70                 # with 70 GB less memory, to a JSON of its own

Each row is one prompt of one length under patch(): as a whole, in chunks, or as prefill_chunk="auto" decides. A first generate(),
of at most WARM tokens of the prompt, is not timed: it compiles the kernels. "peak" is memory beside the weights and the cache.
"pairs" is the number of scores of the largest chunk and one head: C x L, in a window C x L_w, which attention without tiles would
store.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch
from hf_fastattn.patches.calls import chunks

from . import families
from .models import Subject
from .results import Results, command, find_device
from .runs import free, make_prompt, run

METHOD = (
    "greedy generate() of one row under patch(); host time to the first token, which the device has finished; best of the repeats"
)
WARM = 8192
_CHUNKS = ("whole", "1024", "4096", "16384", "65536", "auto")
# name: tokens of the prompt; how many are read at once, or "whole" or "auto"
CASES: dict[str, tuple[int, str]] = {
    f"{tokens} {asked}": (tokens, asked)
    for tokens in (16384, 65536, 262144)
    for asked in _CHUNKS
    if not asked.isdecimal() or int(asked) < tokens
}
CASES |= {f"tiny {asked}": (300, asked) for asked in ("whole", "100", "auto")}


def measure(subject: Subject, name: str, device: torch.device, repeats: int) -> dict:
    """The row of one case."""
    (tokens, asked), model = CASES[name], subject.model
    auto = asked == "auto"
    short, prompt = (make_prompt([n], subject.text_config.vocab_size, device) for n in (min(tokens, WARM), tokens))
    options = {} if auto or asked == "whole" else {"prefill_chunk_size": int(asked)}
    row: dict = {"case": name, "tokens": tokens, "asked": asked, "chunk": options.get("prefill_chunk_size")}
    seconds, peaks = [], []
    free(device)
    before = 0 if device.type != "cuda" else torch.cuda.memory_allocated(device)  # weights
    try:
        with patch(model, prefill_chunk="auto" if auto else None), chosen(row if auto else {}):
            for repeat in range(repeats + 1):
                cache = PreallocatedCache(model, tokens + 1)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                found = run(model, prompt if repeat else short, 1, cache, **options)
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

    with mock.patch.object(chunks, "largest", note):
        yield


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.chunks") -> int:
    """Measure the chosen prompts. Returns 0, or 1 if there was no time for one; memory that does not suffice is a result."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--occupy", type=int, default=0, metavar="GB", help="GB of memory that another tensor takes (default: 0)")
    args = families.read_cases(parser, argv, CASES, reserve=60, seconds=500)
    taken = torch.empty(args.occupy * 10**9, dtype=torch.uint8, device=find_device(args.device))
    begun = families.each(args, partial(measure, repeats=args.repeats), add, max(CASES[name][0] for name in args.only) + 1)
    name = f"chunks_{args.shape}" + (f"_{args.occupy}gb_less" if args.occupy else "")
    head = {"method": METHOD, "unit": "s", "occupied_bytes": taken.nbytes}
    return families.run_cases(parser, args, name, command(prog, argv), head, begun)


def add(results: Results, row: dict) -> None:
    read = "whole" if row["chunk"] is None else f"in chunks of {row['chunk']}"
    said = row.get("failed") or f"{row['first_token_s']:.3f} s, peak {(row['peak_bytes'] or 0) / 1e9:.2f} GB"
    results.add(row, row["case"], f"{row['case']}, {read}: {said}, estimated {row['estimate_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    raise SystemExit(main())
