"""The first session of a fresh process: how much longer its calls take than the same calls later, by what Triton's cache has.

    python -m benchmarks.session --shape 1b

Each kind is a process of its own. It creates the model, patches it, and makes the calls of `phases`: prompts of many lengths, a
chat, several rows, padding, beams. Then it makes them again. "stall" is what a call takes longer than its repetition. Kinds:

    empty      an empty cache, and calls right after patch()
    later      an empty cache, and the first call WAIT seconds after patch()
    stock      generate() with sdpa, without patch()
    imported   an empty cache into which `hf-fastattn warm --import` has read the kernels that `warm --export` has compiled
    lazy       an empty cache, with compile="lazy"
    two cores  as "empty", on two cores; "one core" on one
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import torch
from transformers import DynamicCache

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from .models import SHAPES, dtype_for, load
from .results import Results, add_options, check_names, clocks, command, conditions, find_device, listed, need_gpu
from .runs import synchronize

METHOD = "a fresh process each; whole calls of 8 new tokens, by the host's clock"
CORES = {"two cores": 2, "one core": 1}
KINDS = ("empty", "later", "stock", "imported", "lazy", *CORES)
WAIT, LONGEST, LIMIT = 8.0, 32000, 200
CHILD = "import sys; sys.path.insert(0, sys.argv.pop(1)); from benchmarks.session import child; child(*sys.argv[1:])"
WARM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hf_fastattn_cli import main; sys.exit(main(sys.argv[1:]))"
ROOT = Path(__file__).parent.parent


def phases(model, vocab: int, tiny: bool, stock: bool) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """The name and the calls of each phase, the same in each turn."""
    drawn, device, part = random.Random(5), model.device, 100 if tiny else 1
    draw = lambda rows, tokens: torch.randint(5, vocab, (rows, tokens), device=device)  # noqa: E731

    def call(tokens: int, rows: int = 1, **options) -> Callable[[], object]:
        ids = draw(rows, max(3, tokens // part))
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | options
        return lambda: model.generate(ids, **options)

    yield "first call, 100 tokens", [call(100)]
    yield "same again", [call(100)] * 2
    yield "prompts of 10 to 4,000 tokens", [call(drawn.randint(10, 4000)) for _ in range(25)]
    turns, made = [drawn.randint(5, 400) // part + 1 for _ in range(25)], {}
    text = draw(1, sum(turns))

    def turn(number: int) -> None:
        if number == 0:
            made["cache"] = DynamicCache(config=model.config) if stock else PreallocatedCache(model, text.shape[1] + 16)
        cache, end = made["cache"], sum(turns[: number + 1])
        cache.crop(-max(0, cache.get_seq_length() - (end - turns[number])))
        model.generate(text[:, :end], past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    yield "chat of 25 turns", [lambda number=number: turn(number) for number in range(25)]
    yield "2 to 24 rows", [call(200, rows) for rows in (2, 3, 4, 6, 8, 12, 16, 24)]
    yield "prompts of up to 30,000 tokens", [call(tokens) for tokens in (8000, 16000, 30000)]
    mask = torch.ones(4, max(3, 300 // part), dtype=torch.int64, device=device)
    mask[0, : mask.shape[1] // 3] = 0
    yield "4 rows with padding", [call(300, 4, attention_mask=mask)] * 2
    yield "beams, prompt lookup", [call(300, num_beams=4), call(300, prompt_lookup_num_tokens=8)]


def session(shape: str, kind: str, device: torch.device) -> dict:
    """The calls of this process, in two turns."""
    if kind in CORES:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: CORES[kind]])
    tiny = shape.startswith("tiny")
    torch.manual_seed(0)
    subject = load(shape, dtype_for(device), device, 0 if tiny else LONGEST + 64)
    model, compiled = subject.model, Mock()  # a function of this file would be code of the user, whose step is captured anew
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    try:
        from triton import knobs

        knobs.compilation.listener = compiled
    except ImportError:  # Triton is not available for every CPU
        pass
    rows: list[dict] = []
    synchronize(device)
    began = time.perf_counter()
    under = nullcontext() if kind == "stock" else patch(model, "lean", compile="lazy" if kind == "lazy" else "ahead")
    with under as patched, warnings.catch_warnings(action="ignore"):  # "reasons" has why a step ran uncaptured
        patched_s = time.perf_counter() - began
        if kind == "later" and not tiny:
            time.sleep(WAIT)
        for turn in ("first_s", "again_s"):
            for number, (name, calls) in enumerate(phases(model, subject.text_config.vocab_size, tiny, kind == "stock")):
                compiled.reset_mock()
                seconds = []
                for each in calls:
                    start = time.perf_counter()
                    each()
                    synchronize(device)
                    seconds.append(time.perf_counter() - start)
                if turn == "first_s":
                    own = sum(not each.kwargs["cache_hit"] for each in compiled.call_args_list)
                    rows.append({"phase": name, "compiled": own})
                rows[number][turn] = seconds
        reasons = [] if patched is None else list(patched.reasons)
    for row in rows:
        row["stall_s"] = [first - again for first, again in zip(row["first_s"], row["again_s"], strict=True)]
    return {"patch_s": patched_s, "phases": rows, "reasons": reasons, "clocks": clocks(device)}


def run(code: str, arguments: list[str], cache: Path, seconds: float) -> str:
    """The last line that a new process prints, with `cache` as the folder of Triton's cache. Raises RuntimeError if it fails."""
    line = [sys.executable, "-c", code, str(ROOT), *arguments]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} failed with {done.returncode}: {done.stderr.strip()[-800:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def imported(shape: str, device: torch.device, folder: Path, full: Path, cache: Path, limit: float) -> float:
    """Write the kernels of a full cache to a file and read it into another cache. Returns the seconds of the latter."""
    model = folder / "model"
    with torch.device("meta"):
        subject = load(shape, dtype_for(device), torch.device("meta"), LONGEST + 64)
    subject.model.config.save_pretrained(model)
    run(WARM, ["warm", str(model), "--dtype", "bfloat16", "--export", str(folder / "kernels")], full, limit)
    began = time.perf_counter()
    run(WARM, ["warm", "--import", str(folder / "kernels")], cache, limit)
    return time.perf_counter() - began


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.session") -> int:
    """Measure the chosen kinds. Returns 0, or 1 if one failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1b", choices=SHAPES, help="default: %(default)s")
    parser.add_argument("--kinds", type=listed, default=[*KINDS], help=f"of {', '.join(KINDS)}; default all")
    parser.add_argument("--keep", action="store_true", help="keep the other kinds in the JSON")
    add_options(parser, seconds=400)
    args = parser.parse_args(argv)
    check_names(parser, args.kinds, KINDS, "kinds")
    need_gpu(parser, args, {args.shape})
    device = find_device(args.device)
    head = {"conditions": conditions(device, METHOD) | {"cores": len(os.sched_getaffinity(0))}, "shape": args.shape, "failed": []}
    results = Results(args.out / f"session_{args.shape}.json", args.seconds, command(prog, argv), **head)
    if args.keep:
        results.take_over(parser)
    results.data["rows"] = [row for row in results.data["rows"] if row["kind"] not in args.kinds]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        caches = {kind: folder / kind.replace(" ", "_") for kind in args.kinds}
        for kind in args.kinds:
            limit, row = min(LIMIT, max(30, results.left())), {"kind": kind}
            try:
                if kind == "imported":
                    full = caches["empty"] if "empty" in args.kinds[: args.kinds.index(kind)] else folder / "full"
                    row["import_s"] = imported(args.shape, device, folder, full, caches[kind], limit)
                row |= json.loads(run(CHILD, [args.shape, kind, str(device)], caches[kind], limit))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                results.add({}, kind, f"{kind} failed: {error}", False)
                continue
            stalls, compiled = ([x for p in row["phases"] for x in p["stall_s"]], sum(p["compiled"] for p in row["phases"]))
            every = sum(max(0, stall) for stall in stalls)
            said = f"first call {row['phases'][0]['first_s'][0]:.2f} s, longest other stall {max(stalls[1:]):.2f} s, all "
            said += f"{every:.1f} s, {compiled} compiled by its process, patch() {row['patch_s']:.3f} s"
            results.add(row, kind, f"{kind}: {said}" + (f", import {row['import_s']:.1f} s" if "import_s" in row else ""))
    results.save()
    return 1 if results.data["failed"] else 0


def child(shape: str, kind: str, device: str) -> None:
    """What the process of a kind runs."""
    print(json.dumps(session(shape, kind, find_device(device))))


if __name__ == "__main__":
    raise SystemExit(main())
