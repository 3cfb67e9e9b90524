"""End-to-end benchmark of generate(): time to first token, ms per token and memory, of stock paths and of the package.

    python -m benchmarks.generate --shape 8b --cases 1x512,1x8192,8xpadded
    python -m benchmarks.generate --shape 8b --cases 8x32768 --rivals sdpa_static_compile --add

All rivals of a case share one set of weights and alternate. The time of a token is host time from the 6th new token to the last,
divided by the number of tokens, so it includes neither prefill nor compilation nor capture, which are reported separately. If
prefill takes more than a second, the prompt is processed once per cache, and each repeat is a generate() that continues from a
cache of all its tokens but the last ("repeats_from": "cache"). Before timing, tokens and logits under patch() are compared with
those of uncaptured steps from the same cache. Without a GPU everything runs except compilation and graphs.
"""

from __future__ import annotations

import argparse

import torch

from .grid import CASES, DEFAULT_RIVALS, LEAST, MAX_STATIC, METHOD, OURS, RIVALS, STATIC, Bench, pairs, row_lengths
from .models import SHAPES, dtype_for, load
from .results import Results, add_options, command, conditions, find_device, listed, need_gpu, progress
from .shapes import bandwidth


def read(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    help_ = f"{', '.join(SHAPES)}, or a checkpoint: a folder, a .gguf file or smollm2 (default: %(default)s)"
    parser.add_argument("--shape", default="8b", help=help_)
    parser.add_argument("--cases", type=listed, default=CASES.split(","), help=f"ROWSxTOKENS or ROWSxpadded; default {CASES}")
    help_ = f"of {', '.join(RIVALS)}, or all; default {','.join(DEFAULT_RIVALS)}"
    parser.add_argument("--rivals", type=listed, default=DEFAULT_RIVALS, help=help_)
    parser.add_argument("--add", action="store_true", help="add these rivals to the cases that are already in the JSON")
    parser.add_argument("--name", help="of the JSON; default generate_SHAPE")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--padded", type=int, nargs=2, metavar=("SHORTEST", "LONGEST"), help="of padded rows; default 1024 32768")
    help_ = (
        "further prefills of a prompt that is processed once, alternating, for the time to the first token (default: %(default)s)"
    )
    parser.add_argument("--first-tokens", type=int, default=0, help=help_)
    parser.add_argument("--resume", type=listed, default=[], help="cases that process their prompt once, however short it is")
    help_ = f"cases, at most {MAX_STATIC}, that also time {STATIC}, about a minute each; default: the first {MAX_STATIC}"
    parser.add_argument("--compile-cases", type=listed, help=help_)
    add_options(parser, seconds=560)
    args = parser.parse_args(argv)
    tiny = args.shape.startswith("tiny")
    args.padded = args.padded or ([16, 48] if tiny else [1024, 32768])
    args.rivals = list(RIVALS) if args.rivals == ["all"] else args.rivals
    args.compile_cases = args.cases[:MAX_STATIC] if args.compile_cases is None else args.compile_cases
    for case in args.cases:
        rows, _, tokens = case.partition("x")
        if not rows.isdigit() or not (tokens == "padded" or tokens.isdigit()) or not int(rows):
            parser.error(f"a case is ROWSxTOKENS or ROWSxpadded; got {case!r}.")
    if unknown := set(args.rivals) - set(RIVALS):
        parser.error(f"unknown rivals {', '.join(sorted(unknown))}; known are {', '.join(RIVALS)}, and all.")
    if len(args.compile_cases) > MAX_STATIC:
        parser.error(f"--compile-cases takes at most {MAX_STATIC} cases; got {len(args.compile_cases)}.")
    need_gpu(parser, args, {args.shape} & SHAPES.keys(), pairs(args.cases, args.padded))
    return args


def lines(row: dict) -> str:
    """The lines of the log for a row."""
    found = [row["case"]]
    for name, report in row["rivals"].items():
        if report and "ms" in report:
            ratio = row.get("ratios", {}).get(name)
            found.append(
                f"  {name:<26}{report['ms']:9.3f} ms a token{report['tokens_per_s']:9.0f} tokens/s   "
                f"first token {report['ttft_ms']:.0f} ms"
                + (f"   {report['peak_gib']:.1f} GiB" if "peak_gib" in report else "")
                + (f"   {ratio:.2f}x ours" if ratio else "")
                + (f"   host {report['host_ms']:.3f} ms" if report.get("host_ms") else "")
            )
    return "\n".join(found)


def measure(bench: Bench, cases: list[str]) -> None:
    """Measure the cases one after another, as long as there is time."""
    results = bench.results
    for case in progress(cases, results.path.stem, "case"):
        if results.left() < LEAST * bench.cuda:
            bench.note(bench.new_row(case), f"not run: {results.left():.0f} s left")
            results.save()
            continue
        bench.measure(case)
        results.say(lines(next(row for row in results.data["rows"] if row["case"] == case)))
    if bench.cuda and OURS in bench.args.rivals:
        bench.list_kernels()
    results.say(f"-> {results.path}")


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.generate") -> int:
    """Run the benchmark of the command line. Returns 0, or 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = read(parser, argv)
    device = find_device(args.device)
    dtype = dtype_for(device)
    torch.manual_seed(0)
    longest = max(max(row_lengths(case, args.padded)) for case in args.cases) + args.tokens + 64
    try:
        subject = load(args.shape, dtype, device, longest)
        facts = subject.facts
    except (ValueError, OSError) as error:
        parser.error(f"--shape {args.shape}: {error}")
    head = {"conditions": conditions(device, METHOD), "shape": subject.name, "weights": subject.weights, "config": subject.config}
    head |= {"dtype": str(dtype).removeprefix("torch."), "unit": "ms a token"}
    head |= {"weight_bytes": facts.weight_bytes, "weight_bytes_read_a_token": round(facts.read_bytes(1))}
    path = args.out / f"{(args.name or f'generate_{subject.name}').removesuffix('.json')}.json"
    results = Results(path, args.seconds, command(prog, argv), device, **head)
    results.data["tb_per_s"] = bandwidth(device)
    if args.add:
        results.take_over(parser)
    results.say(f"{subject.name}: {facts.weight_bytes / 1e9:.2f} GB of {dtype} weights ({subject.weights}) on {device}")
    try:
        measure(Bench(args, subject, results, device), args.cases)
    except KeyboardInterrupt:
        results.say(f"interrupted; the measured cases are in {results.path}")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
