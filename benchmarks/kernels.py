"""Kernel benchmark: the decode and prefill kernels of the package, and the flash and cuDNN backends of torch's sdpa.

    python -m benchmarks.kernels decode ragged prefill
    python -m benchmarks.kernels decode --only 32/8 --seconds 120

Every result is checked against fp32 attention before it is timed. Each part writes examples/results/kernels_<part>.json after
every few rows, so an interrupted run keeps its rows, and --keep continues from them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from . import decode, pages, paper, prefill, queries, training
from .results import Results, add_options, command, conditions, find_device, need_gpu, progress
from .shapes import DTYPE, Shape
from .timing import METHOD

LEAST_SECONDS = 8  # a row does not begin with less left: compilation and the largest shapes take some
SAVE_EVERY = 4  # seconds, if rows take less
RESERVED = 32 << 30  # of GPU memory that torch may keep from row to row


@dataclass(frozen=True)
class Part:
    """One table: what measures a row, the shapes (str() is the name of the row), the summary, the figures to print."""

    row: Callable[[object, torch.device], dict]
    shapes: list
    summary: Callable[[list[dict]], dict]
    figures: str = "us"
    method: str = METHOD
    dtype: torch.dtype = DTYPE


PARTS = {
    "decode": Part(decode.decode_row, decode.DECODE, decode.decode_summary),
    "speculation": Part(decode.speculation_row, decode.SPECULATION, decode.decode_summary),
    "ragged": Part(decode.ragged_row, decode.RAGGED, decode.ragged_summary),
    "paper": Part(paper.paper_row, paper.SHAPES, paper.paper_summary),
    "paper_ranks": Part(paper.paper_row, paper.SHARED, paper.paper_summary),
    "sweep": Part(paper.sweep_row, paper.SWEEP, paper.sweep_summary),
    "host": Part(decode.host_row, decode.HOST, decode.host_summary, method=decode.HOST_METHOD),
    "queries": Part(queries.queries_row, queries.QUERIES, queries.queries_summary),
    "queries_portable": Part(partial(queries.queries_row, portable=True), queries.QUERIES, queries.queries_summary),
    "prefill": Part(prefill.prefill_row, prefill.PREFILL_SHAPES, prefill.prefill_summary, "tflops"),
    "widths": Part(prefill.prefill_row, prefill.WIDTH_SHAPES, prefill.widths_summary, "tflops"),
    "pages": Part(pages.pages_row, pages.PAGES, pages.pages_summary),
    "window": Part(prefill.window_row, prefill.WINDOWED, prefill.window_summary),
    **{
        name: Part(training.trained_row, cases, training.trained_summary, method=training.METHOD, dtype=cases[0].dtype)
        for name, cases in training.PARTS.items()
    },
}


def measure(part: Part, shapes: list, results: Results, device: torch.device) -> bool:
    """Measure the shapes, one row each. Returns whether all of them were measured and correct."""
    data, saved, new = results.data, 0.0, False
    data["not_run"] += map(str, shapes)  # each until it has run: the file of a run that is killed lists what it lacks

    def save() -> None:
        if data["rows"]:
            data["summary"] = part.summary(data["rows"])
        results.save()

    try:
        for shape in progress(shapes, results.path.stem):
            if results.left() < LEAST_SECONDS:
                continue
            new = True
            try:
                row = part.row(shape, device)
            except Exception as error:  # a wrong result, or no memory: the other shapes are still useful
                data["failed"].append({"shape": str(shape), "error": f"{type(error).__name__}: {str(error).strip()[:300]}"})
                results.say(f"{shape} failed: {data['failed'][-1]['error']}")
            else:
                data["rows"].append(row | {"run": results.run})
                missing = [f"{name} -" for name in row["errors"]]
                results.say("  ".join([row["shape"], *(f"{name} {x:.1f}" for name, x in row[part.figures].items()), *missing]))
            data["not_run"].remove(str(shape))
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > RESERVED:
                torch.cuda.empty_cache()
            if saved - results.left() > SAVE_EVERY or not saved:
                saved = results.left()
                save()
    finally:
        if new or (data["rows"] and data["not_run"]):  # a run that measured nothing must not replace rows
            save()
    if data["not_run"]:
        results.say(f"no time for {len(data['not_run'])} shapes; --keep measures them and keeps these rows")
    return not data["failed"] and not data["not_run"]


def size_of(asked: object) -> int:
    """What `need_gpu` compares: scores of all heads, or bytes of K and V if there are more."""
    if isinstance(asked, decode.Ragged):
        asked = Shape(len(asked.lengths), 32, 8, 128, max(asked.lengths))
    shape = getattr(asked, "shape", asked)
    return max(shape.batch * shape.num_heads * shape.q_len * shape.kv_len, shape.kv_bytes)


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.kernels") -> int:
    """Run the parts named on the command line. Returns 0, or 1 if a kernel was wrong, a shape failed or time ran out."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--only", default="", metavar="TEXT", help='only shapes whose name contains this, such as "32/8"')
    parser.add_argument("--keep", action="store_true", help="keep the rows that are already in the JSON, and measure the others")
    add_options(parser, seconds=580)
    args = parser.parse_args(argv)
    wanted = {name: [shape for shape in PARTS[name].shapes if args.only in str(shape)] for name in args.parts}
    for name, shapes in wanted.items():
        if not shapes:
            example = str(PARTS[name].shapes[0])
            parser.error(f"no shape of {name} has {args.only!r} in its name; an example of a name is {example!r}.")
    need_gpu(parser, args, sizes={f"{name} {shape}": size_of(shape) for name, shapes in wanted.items() for shape in shapes})
    device = find_device(args.device)
    torch.manual_seed(0)
    left, fine = args.seconds, True
    for name, shapes in wanted.items():
        part = PARTS[name]
        head = {"conditions": conditions(device, part.method), "dtype": str(part.dtype).removeprefix("torch.")}
        head["unit"] = "TFLOP/s" if part.figures == "tflops" else "us a call"
        typed = command(prog, [name, *(["--only", args.only] if args.only else [])])
        results = Results(args.out / f"kernels_{name}.json", left, typed, device, **head, summary={}, failed=[], not_run=[])
        if args.keep:
            results.take_over(parser)
            results.data |= {"failed": [], "not_run": []}
        known = {row["shape"] for row in results.data["rows"]}
        shapes = [shape for shape in shapes if str(shape) not in known]
        try:
            with torch.inference_mode():
                fine &= measure(part, shapes, results, device)
        except KeyboardInterrupt:
            results.say(f"interrupted; {len(results.data['rows'])} rows are in {results.path}")
            return 130
        left = results.left()
        results.say(f"{name}: {json.dumps(results.data['summary'], indent=1)}\n-> {results.path}")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
