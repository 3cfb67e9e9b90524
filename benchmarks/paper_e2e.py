"""The LeanAttention paper's end-to-end experiment: a long prompt, a growing output, and fa2, split_kv and lean in its decode.

    python -m benchmarks.paper_e2e

Sanovar et al., "Lean Attention" (2024), figure 10: OPT-shaped, a prompt of 50k tokens. Not all of the output is generated: ms a
token is measured at contexts of 50k, 51k, 58k, 82k and 114k tokens, and the time of an output of 1k, 8k, 32k or 64k tokens is the
integral of the straight lines between them. All three run under patch(): the same cache, the same decode graph, and only
attention differs. OPT's table of positions ends at 2048; the model has random weights and a table as long as the longest context.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from .models import load
from .results import Results, add_options, command, conditions, find_device, progress
from .runs import Prompt, Rival, check, free, make_prompt, replay_ms, rewind, run, twin

BACKENDS = ("fa2", "split_kv", "lean")
CONTEXTS = [n << 10 for n in (50, 51, 58, 82, 114)]
METHOD = "greedy generate() under patch() from one preallocated cache, 6th new token to last, backends alternating, median"


def integrate(contexts: list[int], ms: list[float]) -> list[float]:
    """Seconds an output takes that grows from the first context to each of the others: trapezoids between the points."""
    seconds, total = [], 0.0
    for i in range(1, len(contexts)):
        total += (contexts[i] - contexts[i - 1]) * (ms[i] + ms[i - 1]) / 2e3
        seconds.append(total)
    return seconds


def measure(rivals: list[Rival], cache, context: int, whole: Prompt, model, repeats: int, results: Results) -> dict | None:
    """One context: every backend checked, then timed in turn. None where a check failed or the time is spent."""
    prompt = Prompt(whole.ids[:, :context], whole.mask[:, :context], [context])
    row: dict = {"context": context, "ms": {}, "all_ms": {}, "replay_ms": {}, "check": {}}
    for rival in rivals:
        rival.prompt, rival.runs, rival.replays = prompt, [], []
        # The first of a context also reads what the cache does not hold yet; the others, and the check, find it there.
        run(rival.model, prompt, rival.new, rewind(cache, prompt))
        row["check"][rival.name] = checked = check(rival, cache, model)
        if not checked["passed"]:
            results.say(f"{rival.name} at {context}: its logits are not those of uncaptured steps, {checked}. It is not timed.")
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


def summary(rows: list[dict]) -> dict:
    """Seconds of the outputs that the contexts so far allow, and how many times longer than lean's the others are."""
    contexts = [row["context"] for row in rows]
    seconds = {name: integrate(contexts, [row["ms"][name] for row in rows]) for name in BACKENDS}
    outputs = [context - contexts[0] for context in contexts[1:]]
    return {
        "integrated": "trapezoids between the measured contexts",
        "outputs": [
            {
                "new_tokens": new,
                "seconds": {name: seconds[name][i] for name in BACKENDS},
                "lean_over_fa2": seconds["fa2"][i] / seconds["lean"][i],
                "lean_over_split_kv": seconds["split_kv"][i] / seconds["lean"][i],
            }
            for i, new in enumerate(outputs)
        ],
    }


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.paper_e2e") -> int:
    """Run the experiment. Returns 0, 1 where a check failed or time ran out, or 130 where it was interrupted."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="opt-6.7b", help="as of bench generate (default: %(default)s)")
    help_ = "tokens, growing; default " + ",".join(map(str, CONTEXTS))
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=CONTEXTS, help=help_)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    add_options(parser, seconds=240)
    args = parser.parse_args(argv)
    if args.contexts != sorted(set(args.contexts)) or args.contexts[0] < 2:
        parser.error(f"--contexts grow from at least 2 tokens; got {args.contexts}.")
    device = find_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = {"conditions": conditions(device, METHOD), "dtype": str(dtype).removeprefix("torch."), "unit": "ms a token"}
    results = Results(args.out / "paper_e2e.json", args.seconds, command(prog, argv), device, **head)
    torch.manual_seed(0)
    longest = args.contexts[-1] + args.tokens + 64
    subject = load(args.shape, dtype, device, longest)
    results.data |= {"shape": subject.name, "config": subject.config, "weight_bytes": subject.weight_bytes, "summary": {}}
    results.say(f"{subject.name}: {subject.weight_bytes / 1e9:.2f} GB of weights on {device}")
    whole = make_prompt([args.contexts[-1]], subject.text_config.vocab_size, device)
    cache = PreallocatedCache(subject.model, longest)
    rivals = []
    for name in BACKENDS:
        model = twin(subject.model, "sdpa")
        rivals.append(Rival(name, model, whole, args.tokens, patch=patch(model, name)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why steps run uncaptured stands in the result
            for context in progress(args.contexts, "contexts", "context"):
                if results.left() < 10:
                    results.say(f"{context}: no time left")
                    return 1
                row = measure(rivals, cache, context, whole, subject.model, args.repeats, results)
                if row is None:
                    return 1
                results.data["rows"].append(row | {"run": results.run})
                results.data["summary"] = summary(results.data["rows"])
                results.data["reasons"] = {rival.name: list(rival.patch.reasons) for rival in rivals}
                results.save()
                results.say(f"{context}: " + "  ".join(f"{name} {ms:.2f} ms a token" for name, ms in row["ms"].items()))
    except KeyboardInterrupt:
        results.say(f"interrupted; what was measured is in {results.path}")
        return 130
    finally:
        for rival in rivals:
            rival.patch.undo()
        rivals.clear()
        free(device)
    for output in results.data["summary"]["outputs"]:
        results.say(
            f"{output['new_tokens']} new tokens, integrated: " + "  ".join(f"{n} {s:.1f} s" for n, s in output["seconds"].items())
        )
    results.say(f"-> {results.path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
