"""generate() under patch() with this checkout of the code and with another one, such as an earlier commit.

    git worktree add ../before v0.1.0
    python -m benchmarks.commits --before ../before --cases 1x512,8x8192,8xpadded

Each checkout runs in a separate process with the model loaded, both on the same GPU. They alternate, and the order is reversed in
every second pair. The prompt is processed once for each case and process, and each generate() continues from its cache, so the
figures do not include prefill. A process waits while the other one runs. With --first the figures are the times of calls that
read the whole prompt and generate one token. With --sessions they are those of PROMPTS on a new patch, whose captures count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MARK = "\x1e"  # begins the line of an answer; libraries print other lines
BEFORE, NOW = "before", "now"
METHOD = "greedy generate() under patch(), 6th new token to last, both trees in turn, median"
METHOD_SESSION = "a new patch() and generate() of 12 prompts, with captures and warm kernels, both trees in turn, median"
METHOD_FIRST = "generate(max_new_tokens=1) under patch() without a cache, median of 5 calls, both trees in turn, median"

PROMPTS = 60, 410, 130, 850, 33, 270, 570, 95, 380, 190, 700, 44  # tokens of the prompts of a session
NEW = 32  # tokens of each reply there
SESSIONS: dict[str, tuple[dict, dict]] = {  # the options of patch() and those of generate()
    "greedy": ({}, {}),
    "lookup": ({}, {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 1}),
    "early exit": ({}, {"assistant_early_exit": 4}),
    "beams": ({}, {"num_beams": 4}),
    "chunks": ({}, {"prefill_chunk_size": 128}),
    "streaming": ({"backend": "streaming", "window": 508, "sinks": 4}, {}),
}


def serve(shape: str, device: str, tokens: int) -> None:
    """The process of one checkout. Each line of stdin is a case (row lengths), "run", "first" or the name of a session; each is
    answered in JSON."""
    import torch

    folder = (
        "hf_fastattn.bench" if importlib.util.find_spec("hf_fastattn.bench") else "benchmarks"
    )  # earlier commits had the first
    models, runs = (importlib.import_module(f"{folder}.{name}") for name in ("models", "runs"))
    from hf_fastattn.patches import patch

    where = torch.device(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    if shape not in models.SHAPES:
        families = importlib.import_module(f"{folder}.families")
        model_type, config = families.FAMILIES[shape]
        config = models.COMMON | {"max_position_embeddings": 4096} | config
        subject = models.of_random_weights(shape, model_type, config, dtype, where, 0)
    else:
        subject = models.load(shape, dtype, where)
    model, patched = subject.model, patch(subject.model, "lean")
    if where.type == "cuda" and hasattr(patched, "warm"):
        patched.warm()  # else a thread would list the kernels beside the calls
    prompt = cache = None
    reply({"ready": True})
    for line in sys.stdin:
        said = json.loads(line)
        if said == "first":
            before, calls = patched.captures, [runs.run(model, prompt, 1) for _ in range(5)]
            ms, captures = statistics.median(1e3 * call.wall_s for call in calls), patched.captures - before
            reply({"ms": ms, "replay_ms": None, "captures": captures, "tokens": calls[0].tokens[0].tolist()})
            continue
        if isinstance(said, str) and said in SESSIONS:
            options, given = SESSIONS[said]
            texts = [runs.make_prompt([count], subject.text_config.vocab_size, where).ids for count in PROMPTS]
            new = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **given}
            patched.undo()
            runs.free(where)
            began, replies = time.perf_counter(), []
            patched = patch(model, **{"backend": "lean", "compile": "lazy", **options})
            for ids in texts:
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **new)
                replies += out[0, ids.shape[1] :].tolist()
            ms = 1e3 * (time.perf_counter() - began)
            reply({"ms": ms, "replay_ms": None, "captures": patched.captures, "tokens": replies})
            continue
        if said != "run":
            cache = None
            runs.free(where)
            prompt = runs.make_prompt(said, subject.text_config.vocab_size, where)
            cache = runs.run(model, prompt, 8, keep=True).cache
            runs.run(model, prompt, 8, runs.rewind(cache, prompt))  # captures the decode step
            reply({"ready": True})
            continue
        before = patched.captures
        ran = runs.run(model, prompt, tokens, runs.rewind(cache, prompt))
        replay = runs.replay_ms(patched) if where.type == "cuda" else None
        reply({"ms": ran.ms, "replay_ms": replay, "captures": patched.captures - before, "tokens": ran.tokens[0].tolist()})


def reply(found: object) -> None:
    print(MARK + json.dumps(found), flush=True)


class Answering:
    """A process that answers each line of its stdin, in JSON, and first of all its start."""

    def __init__(self, run: list[str], **options):
        self.process = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def ask(self, what: object) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[1:])
        raise RuntimeError(f"The process of {self.process.args} ended; its output is above.")


class Tree(Answering):
    """A process of the code at `path`."""

    def __init__(self, path: Path, shape: str, device: str, tokens: int):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
        super().__init__([sys.executable, "-P", str(Path(__file__).resolve()), shape, device, str(tokens)], cwd=path, env=env)


def measure(trees: dict[str, Tree], lengths: list[int], pairs: int, what: str) -> dict:
    """Medians and all figures of one case, in milliseconds. what: "run", "first" or a session, see `serve`."""
    for tree in trees.values():
        tree.ask(what if what in SESSIONS else lengths)  # the first session loads the kernels
        tree.answer()
    found: dict[str, list[dict]] = {name: [] for name in trees}
    for pair in range(pairs):
        for name in list(trees) if pair % 2 == 0 else list(trees)[::-1]:
            trees[name].ask(what)
            found[name].append(trees[name].answer())
    row: dict = {"lengths": lengths, "same_tokens": found[BEFORE][0]["tokens"] == found[NOW][0]["tokens"]}
    for name, runs in found.items():
        ms, replay = [run["ms"] for run in runs], [run["replay_ms"] for run in runs if run["replay_ms"]]
        row[name] = {"ms": statistics.median(ms), "all_ms": ms, "captures_while_timing": sum(run["captures"] for run in runs)}
        if replay:
            host = statistics.median(run["ms"] - run["replay_ms"] for run in runs)
            row[name] |= {"replay_ms": statistics.median(replay), "host_ms": host}
    row["now_over_before"] = row[NOW]["ms"] / row[BEFORE]["ms"]
    return row


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.commits") -> None:
    import torch

    from .grid import pairs, row_lengths
    from .models import SHAPES
    from .results import Results, add_options, command, conditions, find_device, need_gpu

    parser = argparse.ArgumentParser(
        prog=prog, description="Compare generate() of this checkout of the code with that of another one."
    )
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--shape", default="8b", help="as of bench generate or families (default: %(default)s)")
    parser.add_argument("--cases", default="1x512,8x8192,8xpadded", help="ROWSxTOKENS or ROWSxpadded (default: %(default)s)")
    parser.add_argument("--padded", type=int, nargs=2, default=[1024, 16384], help="of padded rows (default: 1024 16384)")
    parser.add_argument("--pairs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--sessions", metavar="NAMES", help=f"of {', '.join(SESSIONS)}, in place of cases")
    parser.add_argument("--first", action="store_true", help="time the first token instead, with its prompt")
    add_options(parser, seconds=560)
    args = parser.parse_args(argv)
    sessions = args.sessions.split(",") if args.sessions else []
    if unknown := set(sessions) - SESSIONS.keys():
        parser.error(f"--sessions: {', '.join(sorted(unknown))} is none of {', '.join(SESSIONS)}")
    need_gpu(
        parser,
        args,
        {args.shape} & SHAPES.keys(),
        pairs([f"1x{max(PROMPTS)}"] if sessions else args.cases.split(","), args.padded),
    )
    device = find_device(args.device)
    trees = {BEFORE: args.before, NOW: Path(__file__).parent.parent}
    what, method = ("first", METHOD_FIRST) if args.first else ("run", METHOD)
    method = METHOD_SESSION if sessions else method
    head = {"conditions": conditions(device, method), "shape": args.shape, "trees": {n: commit(p) for n, p in trees.items()}}
    results = Results(args.out / "commits.json", args.seconds, command(prog, argv), device, **head)
    processes = {name: Tree(path.resolve(), args.shape, str(device), args.tokens) for name, path in trees.items()}
    try:
        for tree in processes.values():
            tree.answer()
        for case in sessions or args.cases.split(","):
            if torch.cuda.is_available() and results.left() < 60:
                results.say(f"{case} not run: {results.left():.0f} s left")
                continue
            lengths = list(PROMPTS) if sessions else row_lengths(case, args.padded)
            row = {"case": case} | measure(processes, lengths, args.pairs, case if sessions else what)
            results.add(row, case, json.dumps({name: value for name, value in row.items() if name != "lengths"}))
    finally:
        for tree in processes.values():
            tree.process.kill()


def commit(path: Path) -> str:
    """The commit of a git checkout; otherwise the name of the folder."""
    run = ["git", "-C", str(path), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    found = subprocess.run(run, capture_output=True, text=True).stdout.split("\n")
    return found[1] if Path(found[0]) == path.resolve() else path.resolve().name


if __name__ == "__main__":
    if "-m" in sys.orig_argv:
        main()
    else:
        serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
