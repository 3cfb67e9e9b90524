"""The LeanAttention paper's end-to-end experiments: a prompt, a growing output, and fa2, split_kv and lean in its decode.

    python -m benchmarks.paper_e2e                                         # figure 10: a prompt of 50k tokens
    python -m benchmarks.paper_e2e --shape opt-1.3b                        # as in the paper, 32 heads
    python -m benchmarks.paper_e2e --shape opt-1.3b --heads 56             # its layers widened: 4.3e9 parameters
    python -m benchmarks.paper_e2e --figure 3                              # a prompt of 1k, outputs of 1/64 to 64 times as many

Sanovar et al., "Lean Attention" (2024), figures 10 and 3, OPT-shaped. Only part of the output is generated: the prompt is timed,
ms per token is measured at some contexts, and the time of an output is its integral, with linear interpolation. All three run
under patch(), with the same cache and decode graph; only attention differs. OPT's table of positions ends at 2048; the model has
random weights and a table as long as the longest context. --heads is another number of heads of the same head_dim: with the 32 of
OPT, fixed splits fill a GPU of 132 SMs, and lean runs split_kv.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from dataclasses import dataclass

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from .models import SHAPES, dtype_for, load
from .results import Results, add_options, command, conditions, find_device, need_gpu, progress
from .runs import Prompt, Rival, check, free, make_prompt, replay_ms, rewind, run, step_kernels, twin

BACKENDS = ("fa2", "split_kv", "lean")
METHOD = "greedy generate() under patch() from one preallocated cache, 6th new token to last, backends alternating, median"
PREFILLS = 3  # of each backend; the first warms up
ATTENTION = ("prefill", "split_kv", "combine", "lean")  # prefixes of the names of attention kernels


@dataclass(frozen=True)
class Figure:
    """Contexts at which ms per token is measured, the prompt first; numbers of new tokens; the name of the results."""

    contexts: list[int]
    outputs: list[int]
    file: str


FIGURES = {
    "10": Figure([n << 10 for n in (50, 51, 58, 82, 114)], [n << 10 for n in (1, 8, 32, 64)], "paper_e2e"),
    "3": Figure([n << 10 for n in (1, 2, 5, 17, 33, 65)], [1 << n for n in range(4, 17)], "paper_share"),
}


def integrate(contexts: list[int], ms: list[float], new: int) -> float:
    """Seconds for `new` tokens after the first context, by the trapezoidal rule between the points."""
    total, stop = 0.0, contexts[0] + new
    for i in range(1, len(contexts)):
        last = min(contexts[i], stop)
        if last > contexts[i - 1]:
            slope = (ms[i] - ms[i - 1]) / (contexts[i] - contexts[i - 1])
            total += (last - contexts[i - 1]) * (ms[i - 1] + slope * (last - contexts[i - 1]) / 2) / 1e3
    return total


def prefill_seconds(rivals: list[Rival], cache, prompt: Prompt, results: Results) -> dict[str, list[float]]:
    """Seconds from an empty cache to the first new token, backends alternating. Afterwards the cache contains the prompt."""
    seconds: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for _ in range(PREFILLS):
        for rival in rivals:
            cache.reset()
            seconds[rival.name].append(run(rival.model, prompt, 1, cache).first_token_s)
    results.say("the prompt: " + "  ".join(f"{name} {statistics.median(s[1:]):.2f} s" for name, s in seconds.items()))
    return seconds


def measure(rivals: list[Rival], cache, context: int, whole: Prompt, model, repeats: int, results: Results) -> dict | None:
    """One context: all backends are checked, then timed alternately. None if a check failed or time ran out."""
    prompt = Prompt(whole.ids[:, :context], whole.mask[:, :context], [context])
    row: dict = {"context": context, "ms": {}, "all_ms": {}, "replay_ms": {}, "check": {}}
    for rival in rivals:
        rival.prompt, rival.runs, rival.replays = prompt, [], []
        # The first call at a context also processes the tokens that the cache lacks; the check and the others find them there.
        run(rival.model, prompt, rival.new, rewind(cache, prompt))
        row["check"][rival.name] = checked = check(rival, cache, model)
        if not checked["passed"]:
            results.say(
                f"{rival.name} at {context}: its logits differ from those of uncaptured steps, {checked}. It is not timed."
            )
            return None
    for repeat in range(repeats):
        for rival in rivals if repeat % 2 == 0 else rivals[::-1]:
            if rival.runs and results.left() < 5:
                continue
            rival.runs.append(run(rival.model, prompt, rival.new, rewind(cache, prompt)))
            if whole.ids.is_cuda and (ms := replay_ms(rival.patch)):
                rival.replays.append(ms)
    for rival in rivals:
        row["all_ms"][rival.name] = [done.ms for done in rival.runs]
        row["ms"][rival.name] = statistics.median(row["all_ms"][rival.name])
        row["replay_ms"][rival.name] = statistics.median(rival.replays) if rival.replays else None
    return row


def summary(rows: list[dict], prefill: dict[str, list[float]], outputs: list[int]) -> dict:
    """Seconds of the outputs within the contexts so far, with and without the prompt, and the share of decode."""
    contexts = [row["context"] for row in rows]
    first = {name: statistics.median(seconds[1:]) for name, seconds in prefill.items()}
    found = []
    for new in (new for new in outputs if contexts[0] + new <= contexts[-1]):
        seconds = {name: integrate(contexts, [row["ms"][name] for row in rows], new) for name in BACKENDS}
        whole = {name: seconds[name] + first[name] for name in BACKENDS}
        found.append({"new_tokens": new, "seconds": seconds, "with_prompt": whole})
        found[-1] |= {
            "decode_share": {name: seconds[name] / whole[name] for name in BACKENDS},
            "lean_over_fa2": seconds["fa2"] / seconds["lean"],
            "lean_over_split_kv": seconds["split_kv"] / seconds["lean"],
            "with_prompt_lean_over_fa2": whole["fa2"] / whole["lean"],
            "with_prompt_lean_over_split_kv": whole["split_kv"] / whole["lean"],
        }
    return {"integrated": "trapezoids between the measured contexts", "prompt_s": first, "outputs": found}


def attention_kernels(rivals: list[Rival]) -> dict[str, list[str]]:
    """The attention kernels in each backend's last decode graph. After all timing, because a profiler slows the process."""
    found = {}
    for rival in rivals:
        kernels = step_kernels(rival.patch) or []
        found[rival.name] = sorted({k["kernel"] for k in kernels if k["kernel"].startswith(ATTENTION)})
    return found


def parse(argv: list[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--figure", choices=list(FIGURES), default="10", help="of the paper (default: %(default)s)")
    parser.add_argument("--shape", default="opt-6.7b", help="as of bench generate (default: %(default)s)")
    parser.add_argument("--heads", type=int, help="attention heads of the same head_dim; default: those of the shape")
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--contexts", type=numbers, help="tokens, increasing, the prompt first; default: those of the figure")
    parser.add_argument("--outputs", type=numbers, help="new tokens; default: those of the figure")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    add_options(parser, seconds=240)
    args = parser.parse_args(argv)
    figure = FIGURES[args.figure]
    args.outputs = args.outputs or figure.outputs
    args.contexts = args.contexts or figure.contexts
    args.file = figure.file if args.figure == "3" or args.shape == "opt-6.7b" else f"{figure.file}_{args.shape}"
    args.file += f"_{args.heads}_heads" if args.heads else ""
    if args.contexts != sorted(set(args.contexts)) or args.contexts[0] < 2:
        parser.error(f"--contexts must increase from at least 2 tokens; got {args.contexts}.")
    need_gpu(parser, args, {args.shape} & SHAPES.keys(), {f"a context of {n} tokens": n * n for n in args.contexts})
    return args


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.paper_e2e") -> int:
    """Run the experiment. Returns 0, 1 if a check failed or time ran out, or 130 if it was interrupted."""
    args = parse(argv, prog)
    device = find_device(args.device)
    dtype = dtype_for(device)
    head = {"conditions": conditions(device, METHOD), "dtype": str(dtype).removeprefix("torch."), "unit": "ms a token"}
    results = Results(args.out / f"{args.file}.json", args.seconds, command(prog, argv), device, **head)
    torch.manual_seed(0)
    longest = args.contexts[-1] + args.tokens + 64
    subject = load(args.shape, dtype, device, longest, args.heads)
    results.data |= {"shape": subject.name, "config": subject.config, "weight_bytes": subject.facts.weight_bytes, "summary": {}}
    results.data["heads"] = subject.facts.num_heads
    results.say(f"{subject.name}: {subject.facts.weight_bytes / 1e9:.2f} GB of weights on {device}")
    whole = make_prompt([args.contexts[-1]], subject.text_config.vocab_size, device)
    cache = PreallocatedCache(subject.model, longest)
    rivals = []
    for name in BACKENDS:
        model = twin(subject.model, "sdpa")
        rivals.append(Rival(name, model, whole, args.tokens, patch=patch(model, name)))
    try:
        with warnings.catch_warnings(action="ignore"):  # the result has why steps run uncaptured
            prompt = Prompt(whole.ids[:, : args.contexts[0]], whole.mask[:, : args.contexts[0]], args.contexts[:1])
            results.data["prompt_s"] = prefill_seconds(rivals, cache, prompt, results)
            for context in progress(args.contexts, "contexts", "context"):
                if results.left() < 10:
                    results.say(f"{context}: no time left")
                    return 1
                row = measure(rivals, cache, context, whole, subject.model, args.repeats, results)
                if row is None:
                    return 1
                results.data["rows"].append(row | {"run": results.run})
                results.data["summary"] = summary(results.data["rows"], results.data["prompt_s"], args.outputs)
                results.data["reasons"] = {rival.name: list(rival.patch.reasons) for rival in rivals}
                results.save()
                results.say(f"{context}: " + "  ".join(f"{name} {ms:.2f} ms a token" for name, ms in row["ms"].items()))
            if device.type == "cuda":
                results.data["attention_kernels"] = attention_kernels(rivals)
                results.save()
                results.say(f"kernels: {results.data['attention_kernels']}")
    except KeyboardInterrupt:
        results.say(f"interrupted; the measured contexts are in {results.path}")
        return 130
    finally:
        for rival in rivals:
            rival.patch.undo()
        rivals.clear()
        free(device)
    for output in results.data["summary"]["outputs"]:
        told = (f"{n} {s:.1f} s, {100 * output['decode_share'][n]:.0f} % decode" for n, s in output["with_prompt"].items())
        results.say(f"{output['new_tokens']} new tokens with the prompt, integrated: {'  '.join(told)}")
    results.say(f"-> {results.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
