"""What a decode kernel gains at most if it does not look for the maximum of the scores, as FlashDecoding++ proposes.

    python -m benchmarks.unified

FlashDecoding++ subtracts one number, which was chosen in advance for all scores of a layer ("unified maximum"), and computes a
row again if a score is too far from it. Here `split_kv` subtracts zero, which is right for the normal noise of this benchmark,
and nothing is checked or computed again: the whole gain, at no cost. Each variant runs in a process of its own, both on the same
GPU and in turn. Source: Hong et al., "FlashDecoding++: Faster Large Language Model Inference on GPUs" (2023), section 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict

import torch

from hf_fastattn.kernels.decode import sample

from . import timing
from .commits import Answering, reply
from .decode import DECODE, GIB, SPECULATION
from .results import Results, add_options, command, conditions, find_device, need_gpu, progress
from .shapes import READ, SPLIT_KV, Shape, exact, make_inputs
from .shapes import check as check_error

triton, tl = sample.triton, getattr(sample, "tl", None)
KINDS = ("maximum", "unified")
METHOD = f"{timing.METHOD} of {{}} turns; each variant in a process of its own"
TURNS = 4
SHAPES = [shape for shape in (*DECODE, *SPECULATION) if shape.kv_bytes <= 8 * GIB and shape.batch in (1, 16)]
TINY = [Shape(2, 4, 2, 32, 70)]


if triton is not None:

    @triton.jit
    def unified_step(s, v, acc, m, l, MASKED: tl.constexpr, FORM: tl.constexpr, kept=None):
        """(acc, m, l) after a tile of scores s in base 2 and values v of plain K and V, with 0 in place of the maximum."""
        p = tl.exp2(s)
        return (tl.dot(p.to(v[0].dtype), v[0], acc[0], input_precision="ieee"),), tl.zeros_like(m), l + tl.sum(p, 1)


def unify() -> None:
    """Replace the update of the online softmax, for all kernels that this process compiles."""
    from hf_fastattn.kernels.device import attend, online

    attend.softmax_step = online.softmax_step = unified_step


def serve(kind: str, device: torch.device) -> None:
    """The process of one variant. Each line of stdin is a shape, whose result is checked, or "run", which is timed."""
    if kind == "unified":
        unify()
    run, calls = None, 0
    reply(None)
    for line in sys.stdin:
        said = json.loads(line)
        if said == "run":
            reply(timing.elapsed_us(run, device) / calls)
            continue
        run = None
        torch.manual_seed(0)
        shape = Shape(**said)
        sets = timing.num_sets(shape.kv_bytes) if device.type == "cuda" else 2
        inputs = make_inputs(shape, sets, device)
        if device.type != "cuda":  # Triton's interpreter computes bfloat16 wrongly
            inputs = [tuple(x.half() for x in each) for each in inputs]
        call = lambda i, inputs=inputs: SPLIT_KV(*inputs[i])  # noqa: E731
        check_error(kind, call(0), exact(*inputs[0]))
        calls = timing.num_calls(sets, max(5, shape.kv_bytes / READ)) if device.type == "cuda" else 2
        run = timing.record(call, sets, calls, device)
        run()
        reply(None)


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.unified") -> int:
    """Measure both variants. Returns 0, or 1 if there was no time for a shape."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    add_options(parser, seconds=250)
    args = parser.parse_args(argv)
    need_gpu(parser, args)
    device = find_device(args.device)
    if args.kind:
        serve(args.kind, device)
        return 0
    results = Results(
        args.out / "unified.json", args.seconds, command(prog, argv), device, conditions=conditions(device, METHOD.format(TURNS))
    )
    start = [sys.executable, "-m", "benchmarks.unified", "--device", str(device), "--kind"]
    processes = {kind: Answering([*start, kind]) for kind in KINDS}
    try:
        for process in processes.values():
            process.answer()
        left = SHAPES if device.type == "cuda" else TINY
        for shape in progress(left, "unified", "shape"):
            if results.left() < 10:
                results.say(f"no time for {shape}")
                return 1
            for process in processes.values():
                process.ask(asdict(shape))
                process.answer()
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(TURNS):
                for kind in KINDS if turn % 2 else KINDS[::-1]:
                    processes[kind].ask("run")
                    found[kind].append(processes[kind].answer())
            us = {kind: statistics.median(times) for kind, times in found.items()}
            row = shape.row() | {"us": us, "us_range": {kind: [min(t), max(t)] for kind, t in found.items()}}
            said = f"{shape}: {us['maximum']:.1f} us, without the maximum {us['unified']:.1f} us"
            results.add(row | {"gain": us["maximum"] / us["unified"] - 1}, str(shape), said)
    finally:
        for process in processes.values():
            process.process.kill()
    gains = sorted(row["gain"] for row in results.data["rows"])
    results.say(f"gain: median {statistics.median(gains):.2%}, from {gains[0]:.2%} to {gains[-1]:.2%}; -> {results.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
