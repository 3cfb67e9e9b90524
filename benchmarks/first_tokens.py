"""Time to the first token of chats, of a job and of prompts that repeat, of stock generate() and under patch().

    python -m benchmarks.first_tokens --shape 1b
    python -m benchmarks.first_tokens --shape 8b --only chats,job

Each case runs stock generate() with sdpa and then patch(), in one process and over one set of weights. A first life of each,
which is not timed, loads its kernels: under patch() all are compiled before it, and in the second life nothing is captured yet.
Each prompt of the first life has one token more, as prompts of a session have lengths of their own: torch's sdpa takes longer for
lengths that it has not read before. "again" is a further life of stock, which has read them all. "before" and "after" count the
captures of each turn: before its first token, which waits for them, and later. Stock generate() reads the same ids, and generates
few tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from . import families
from .models import SHAPES, Subject
from .results import Results, command
from .runs import Prompt, free, make_prompt, run

METHOD = "greedy generate() of one row, in one process; host time to the first token, which the device has finished"
NEW = 32  # tokens of a reply
PAST = 65536
CHATS = 2


def log_uniform(count: int, low: int, high: int) -> list[int]:
    """Lengths whose logarithms are uniform, in a fixed random order."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(46))
    return [round(low * (high / low) ** float(each)) for each in drawn]


# name: lengths of the prompts; tokens before each of them; whether they follow each other in a chat
CASES: dict[str, tuple[list[int], int, bool]] = {
    "chats": (log_uniform(40, 3, 900), 0, True),
    "job": (log_uniform(100, 20, 3000), 0, False),
    **{f"{tokens} tokens": ([tokens] * 10, 0, False) for tokens in (513, 600, 1025, 1100, 3000)},
    **{f"{tokens} behind 64k": ([tokens] * 10, PAST, False) for tokens in (8, 100)},
    "tiny chats": (log_uniform(6, 3, 40), 0, True),
    "tiny": ([9] * 6, 64, False),
}


def tokens_of(name: str) -> int:
    """The most tokens of one cache in a case."""
    lengths, past, _ = CASES[name]
    return past + sum(lengths) + (NEW + 2) * len(lengths)


def life(subject: Subject, name: str, device: torch.device, under=None, more: int = 0) -> dict[str, list]:
    """The first tokens of one case. under: the Patch; None for stock generate(). more: further tokens of each prompt."""
    lengths, past, chat = CASES[name]
    lengths = [tokens + more for tokens in lengths]
    model, vocab = subject.model, subject.text_config.vocab_size
    found: dict[str, list] = {"first_token_s": [], "before": [], "after": []}
    text = make_prompt([tokens_of(name)], vocab, device).ids
    new = 2 if under is None else NEW

    def ask(ids: torch.Tensor, cache, **options):
        counts = [under.captures] if under is not None else []
        prompt = Prompt(ids, torch.ones_like(ids), [ids.shape[1]])
        each = run(model, prompt, new, cache, also=lambda: under is not None and counts.append(under.captures), **options)
        if under is not None:
            found["before"].append(counts[1] - counts[0])
            found["after"].append(under.captures - counts[1])
        found["first_token_s"].append(each.first_token_s)
        return each

    for _ in range(CHATS if chat and under is not None else 1):
        cache = None
        if under is not None and (chat or past):
            cache = PreallocatedCache(model, text.shape[1])
        seen = 0
        if past:
            cache = run(model, Prompt(text[:, :past], torch.ones_like(text[:, :past]), [past]), 1, cache, keep=True).cache
        for tokens in lengths:
            if chat:  # the same ids for all, whatever the replies are
                seen += tokens + NEW
                cache = ask(text[:, :seen], cache, keep=True).cache
                cache.crop(-max(0, cache.get_seq_length() - seen))
            elif past:
                cache.crop(-max(0, cache.get_seq_length() - past))
                ask(text[:, : past + tokens], cache)
            else:
                ask(text[:, :tokens], None)
        del cache
    return found


def summary(found: dict[str, list], lengths: list[int]) -> dict:
    """Milliseconds: median, 95th percentile and maximum of all turns, of those of up to 256 tokens, and of the last three."""
    ms = [1e3 * each for each in found["first_token_s"]]
    short = [each for each, tokens in zip(ms, lengths * CHATS, strict=False) if tokens <= 256] or [math.nan]
    row = {"median_ms": statistics.median(ms), "p95_ms": at(ms, 0.95), "max_ms": max(ms), "p95_short_ms": at(short, 0.95)}
    return row | {"last_ms": statistics.median(ms[-3:])} | found


def at(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measure(subject: Subject, name: str, device: torch.device) -> dict:
    """The row of one case."""
    lengths, past, _ = CASES[name]
    subject.model.set_attn_implementation("sdpa")
    row: dict = {"case": name, "lengths": lengths, "past": past}
    life(subject, name, device, more=1)
    for rival in ("stock", "again"):
        row[rival] = summary(life(subject, name, device), lengths)
    free(device)
    for more in (1, 0):
        with patch(subject.model, "lean") as under:
            if device.type == "cuda":
                under.warm()  # else a thread would list the kernels beside the calls
            row["patched"] = summary(life(subject, name, device, under, more), lengths)
            row |= {"captures": under.captures, "graph_bytes": under.graph_bytes, "reasons": [*under.reasons]}
    free(device)  # not before either second life, which begins with the memory that torch holds then
    return row


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.first_tokens") -> int:
    """Measure the chosen cases. Returns 0, or 1 if there was no time for one."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = families.read_cases(parser, argv, CASES, reserve=20, seconds=250, shapes=SHAPES | families.FAMILIES)
    head = {"method": METHOD, "unit": "ms"}
    begun = families.each(args, measure, add, max(map(tokens_of, args.only)))
    return families.run_cases(parser, args, f"first_tokens_{args.shape}", command(prog, argv), head, begun)


def add(results: Results, row: dict) -> None:
    said = [f"{row['case']}: {row['captures']} captures"]
    for rival in ("stock", "again", "patched"):
        its = row[rival]
        said.append(f"{rival} median {its['median_ms']:.1f}, p95 {its['p95_ms']:.1f}, max {its['max_ms']:.1f} ms")
    said += [f"before a first token {sum(row['patched']['before'])}", *row["reasons"]]
    results.add(row, row["case"], "; ".join(said))


if __name__ == "__main__":
    raise SystemExit(main())
