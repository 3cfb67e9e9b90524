"""Jobs of prompts: tokens a second and memory of generate_batch() and generate(), under patch() and in stock Transformers.

    python -m benchmarks.batch                         # the shape of Llama 3.1 8B
    python -m benchmarks.batch --only job,samples
    python -m benchmarks.batch --shape gpt-oss-20b --only requests   # a shape of benchmarks.families, to a JSON of its own

"batch" is generate_batch() and "generate" generate() of the patched model; "unshared" is "batch" with a prompt for each sample,
which is read and stored for it alone; "stock" is generate() and "continuous" is generate_batch() of the model before, with
sdpa, or eager attention where the model has no other. generate() reads all prompts of a case as one padded batch and generates
as many tokens for each row as for the longest one; its rate counts the tokens that were asked for. The first call of each is
not timed, and has at most WARM new tokens in each text, but that of the stock methods, which compile nothing. They get every
`part`-th request of a case with one, and at most WARM new tokens of each; with fewer rows at once, rate and memory of stock
generate() are less than those of the whole case. "idle" is the share of the time between the first and the last kernel of a
profiled generate_batch(), of at most PROFILED new tokens in each text, in which no kernel ran. A case fails if a greedy text of
generate_batch() has a token whose logit is further below the largest one, by eager attention for the text alone, than twice
what stock generate() of the same prompts alone has, plus 4 eps of the largest logit.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from functools import partial

import torch

from hf_fastattn.patches import patch

from . import families
from .models import SHAPES, Subject
from .prompts import geometric
from .results import Results, check_names, command, listed
from .runs import free, make_prompt, synchronize, twin

METHOD = "whole calls, from lists of ids to lists of tokens; medians of the timed calls"
RIVALS = ("batch", "generate", "unshared", "stock", "continuous")
CHECKED = 4  # texts whose tokens are judged
JUDGED = 512  # tokens of the longest of them
LONGEST = 2048  # tokens of a prompt whose text is judged
WARM, PROFILED = 1024, 128


def log_normal(count: int, mean: float, sigma: float, most: int) -> list[int]:
    """Lengths whose logarithms are normal, in a fixed random order."""
    drawn = random.Random(48)
    return [min(most, max(1, round(drawn.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))) for _ in range(count)]


# name: lengths of the prompts, samples of each, new tokens of each, every how many-th request stock methods get
CASES: dict[str, tuple[list[int], int, list[int], int]] = {
    "job": (geometric(64, 20, 4096), 1, [128] * 64, 1),
    "requests": ([512] * 256, 1, log_normal(256, 256, 0.8, 1024), 4),
    "samples": ([4096] * 8, 16, [512] * 8, 8),
    "long": ([256] * 32, 1, [8192] * 32, 8),
    "tiny": ([3, 9, 30, 17], 1, [6, 3, 6, 4], 2),
}


def generated(model, rival: str, prompts: list[list[int]], copies: int, new: list[int], device: torch.device) -> list[list[int]]:
    """The new tokens of each text of a call."""
    sampling = {"do_sample": True, "num_return_sequences": copies} if copies > 1 else {"do_sample": False}
    if rival == "batch":
        results = model.generate_batch(prompts, max_new_tokens=new, progress_bar=False, **sampling)
        return [result.generated_tokens for result in results.values()]
    if rival in ("continuous", "unshared"):
        from transformers import ContinuousBatchingConfig

        config = type(model.generation_config)(
            max_new_tokens=max(new), **{**sampling, "num_return_sequences": 1}, eos_token_id=-1
        )
        texts = [ids for ids in prompts for _ in range(copies)]
        batching = ContinuousBatchingConfig(allow_block_sharing=rival != "unshared")
        results = model.generate_batch(texts, generation_config=config, continuous_batching_config=batching, progress_bar=False)
        limits = [limit for limit in new for _ in range(copies)]
        return [result.generated_tokens[:limit] for result, limit in zip(results.values(), limits, strict=True)]
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for row, text in enumerate(prompts):
        ids[row, width - len(text) :] = torch.tensor(text)
        mask[row, width - len(text) :] = 1
    found = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=max(new), **sampling)[
        :, width:
    ].tolist()
    return [text[: new[row // copies]] for row, text in enumerate(found)]


def cut(new: list[int], most: int) -> list[int]:
    return [min(each, most) for each in new]


def idle(model, prompts: list[list[int]], copies: int, new: list[int], device: torch.device) -> float | None:
    """The share of a generate_batch() in which the GPU runs no kernel; None on the CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generated(model, "batch", prompts, copies, cut(new, PROFILED), device)
        synchronize(device)
    found = profile.profiler.kineto_results.events()
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns()) for e in found if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0, spans[0][0]
    for start, stop in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def timed(model, rival: str, case: tuple, repeats: int, device: torch.device) -> dict:
    """The seconds, the rate and the memory of the calls of one rival."""
    prompts, copies, new = case
    seconds: list[float] = []
    texts: list[list[int]] = []
    for i in range(repeats):
        free(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        began = time.perf_counter()
        now = new if i or repeats == 1 else cut(new, WARM)
        texts = generated(model, rival, prompts, copies, now, device)
        synchronize(device)
        if i > 0 or repeats == 1:
            seconds.append(time.perf_counter() - began)
    wall = statistics.median(seconds)
    asked = sum(new) * copies
    if sum(map(len, texts)) != asked:
        raise RuntimeError(f"{rival} has generated {sum(map(len, texts))} of {asked} tokens")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"wall_s": wall, "all_wall_s": seconds, "tokens_per_s": asked / wall, "peak_bytes": peak, "texts": texts}


@torch.no_grad()
def shortfall(judge, prompts: list, texts: list | dict, rows: list[int], device: torch.device) -> tuple[float, float]:
    """The most by which the logit of a token is below the largest one, and the largest logit."""
    short = largest = 0.0
    for row in rows:
        text = texts[row][:JUDGED]
        ids = torch.tensor([prompts[row] + text], device=device)
        logits = judge(ids, use_cache=False, logits_to_keep=len(text) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, torch.tensor(text, device=device)[:, None])[:, 0]
        short = max(short, float((logits.amax(1) - chosen).max()))
        largest = max(largest, float(logits.abs().max()))
    return short, largest


def measure(subject: Subject, name: str, device: torch.device, rivals: list[str], repeats: int) -> dict:
    """The row of one case."""
    lengths, copies, new, part = CASES[name]
    model = subject.model
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    made = make_prompt(lengths, subject.text_config.vocab_size, device)
    prompts = [ids[-length:].tolist() for ids, length in zip(made.ids, lengths, strict=True)]
    some = prompts[::part], copies, cut(new[::part], WARM)
    row: dict = {"case": name, "lengths": lengths, "copies": copies, "new": new, "part": part}
    row["stock_attention"] = model.config._attn_implementation
    for rival in ("stock", "continuous"):
        if rival in rivals:
            try:
                row[rival] = timed(model, rival, some, 1, device)
            except Exception as error:  # a peer that does not run here is a row of the table, too
                row[rival] = {"error": f"{type(error).__name__}: {error}"[:300]}
    judge = twin(model, "eager")
    free(device)
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)[:: max(1, len(lengths) // CHECKED)] if copies == 1 else []
    rows = [i for i in rows if lengths[i] <= LONGEST]  # eager attention computes all scores
    alone = {i: generated(model, "stock", [prompts[i]], 1, cut([new[i]], JUDGED), device)[0] for i in rows}
    with patch(model, "lean") as under:
        for rival in ("batch", "generate", *(["unshared"] if copies > 1 else [])):
            if rival in rivals:
                row[rival] = timed(model, rival, (prompts, copies, new), 1 + repeats, device)
        if "batch" in rivals:
            row["idle"] = idle(model, prompts, copies, new, device)
        row |= {"captures": under.captures, "reasons": [*under.reasons]}
    free(device)
    if rows and "batch" in row:
        theirs, _ = shortfall(judge, prompts, alone, rows, device)
        ours, largest = shortfall(judge, prompts, row["batch"]["texts"], rows, device)
        allowed = 2 * theirs + 4 * torch.finfo(judge.dtype).eps * largest
        row |= {"shortfall": {"batch": ours, "stock": theirs}, "allowed": allowed, "passed": ours <= allowed}
    for rival in rivals:
        row.get(rival, {}).pop("texts", None)
    return row


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.batch") -> int:
    """Measure the chosen cases. Returns 0, or 1 if there was no time for one or its tokens are wrong."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--rivals", type=listed, default=[*RIVALS], help=f"of {', '.join(RIVALS)}; default all")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of each (default: %(default)s)")
    args = families.read_cases(parser, argv, CASES, reserve=120, seconds=500, shapes=SHAPES | families.FAMILIES)
    check_names(parser, args.rivals, RIVALS, "rivals")
    head = {"method": METHOD, "unit": "tokens/s"}
    run = partial(measure, rivals=args.rivals, repeats=args.repeats)
    name = "batch" if args.shape == "8b" else f"batch_{args.shape}"
    return families.run_cases(parser, args, name, command(prog, argv), head, families.each(args, run, add))


def add(results: Results, row: dict) -> None:
    """Add a row, or a failure if its tokens are wrong."""
    said = [f"{name} {row[name].get('error') or round(row[name]['tokens_per_s'])}" for name in RIVALS if name in row]
    said = [f"{row['case']}: tokens/s {', '.join(said)}; idle {row.get('idle') or 0:.1%}", *row["reasons"]]
    if not (passed := row.get("passed", True)):
        said.append(f"short of the largest logit by {row['shortfall']}, allowed {row['allowed']:.3g}")
    results.add(row, row["case"], "; ".join(said), passed)


if __name__ == "__main__":
    raise SystemExit(main())
