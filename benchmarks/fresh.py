"""The first call of a fresh process, from the loaded model to the first replay of its decode graph, with a cold and a warm Triton
cache.

Each measurement is a separate process. It creates the model, patches it, and calls generate() twice, with two prompt lengths. The
second call must not capture, and compiles at most the attention kernel that its number of tokens selects.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from hf_fastattn.patches import Patch, patch

from .models import dtype_for, load
from .results import Results, clocks, conditions, find_device
from .runs import make_prompt, run, synchronize

WHAT = "model loaded to first graph replay, Triton's cache cold and warm, and a second call of another length"
METHOD = "a fresh process each; the host's clock from the loaded model to the first replay of the decode graph"
LENGTHS = (2048, 700)  # prompts of the first and the second call
CHILD_SECONDS = 300
# The code of the process: this file, whatever its name here and the folder of the process.
CHILD = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('benchmarks.fresh', run_name='__main__')"
ROOT = Path(__file__).parent.parent


class FirstReplay:
    """Called after each token; records the time at which the device has finished the first replay of a graph."""

    def __init__(self, patched: Patch, device: torch.device):
        self.patched, self.device = patched, device
        self.at: float | None = None

    def __call__(self) -> None:
        if self.at is None and self.patched.replays:
            synchronize(self.device)
            self.at = time.perf_counter()


def count_compiles() -> dict[str, int]:
    """Count, from now on, the kernel variants that Triton compiles and those that it finds on disk."""
    counts = {"compiled": 0, "read_from_disk": 0}

    def hear(*, cache_hit: bool, **_):
        counts["read_from_disk" if cache_hit else "compiled"] += 1

    try:
        from triton import knobs
    except ImportError:  # Triton is not available for every CPU
        return counts
    knobs.compilation.listener = hear
    return counts


def first_calls(shape: str, lengths: list[int], device: torch.device) -> dict:
    """The times and compilations of the two calls of this process."""
    dtype = dtype_for(device)
    began = time.perf_counter()
    subject = load(shape, dtype, device, max(lengths) + 64)
    synchronize(device)
    loaded = time.perf_counter()
    counts, calls = count_compiles(), []
    with patch(subject.model, "lean") as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "reasons" has why a step ran uncaptured
        for length in lengths:
            before, replay = {**counts, "captured": patched.captures}, FirstReplay(patched, device)
            prompt = make_prompt([length], subject.text_config.vocab_size, device)
            start = time.perf_counter()
            done = run(subject.model, prompt, 8, also=replay)
            calls.append(
                {
                    "prompt": length,
                    "first_token_s": done.first_token_s,
                    "to_first_replay_s": replay.at and replay.at - (start if calls else loaded),
                    "seconds": done.wall_s,
                    **{name: count - before[name] for name, count in {**counts, "captured": patched.captures}.items()},
                }
            )
        reasons = list(patched.reasons)
    return {"load_s": loaded - began, "calls": calls, "reasons": reasons, "clocks": clocks(device)}


def child(shape: str, lengths: list[int], device: torch.device, cache: str, seconds: float) -> dict:
    """first_calls() in a new process, with `cache` as the folder of Triton's cache. Raises RuntimeError if it fails."""
    command = [sys.executable, "-c", CHILD, str(ROOT), shape, str(device), *map(str, lengths)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(args: argparse.Namespace, device: torch.device, command: str) -> int:
    """`bench generate --fresh`: a process with a cold cache, then args.repeats with that cache. Returns 1 if one failed."""
    lengths = [64, 24] if args.shape.startswith("tiny") else list(LENGTHS)
    head = {"conditions": conditions(device, METHOD), "shape": args.shape}
    results = Results(args.out / (args.name or "generate_fresh.json"), args.seconds, command, **head)
    with tempfile.TemporaryDirectory() as cache:
        for i in range(1 + args.repeats):
            if results.left() < 60 and i > 1:
                results.say(f"no time for {1 + args.repeats - i} more")
                break
            try:
                row = child(args.shape, lengths, device, cache, min(CHILD_SECONDS, max(30, results.left())))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                results.say(f"failed: {error}")
                return 1
            row = {"triton_cache": "warm" if i else "cold", "run": results.run} | row
            results.data["rows"].append(row)
            results.save()
            for call in row["calls"]:
                replay = "no graph" if call["to_first_replay_s"] is None else f"first replay {call['to_first_replay_s']:.2f} s"
                compiled = f"{call['compiled']} compiled, {call['read_from_disk']} read from disk, {call['captured']} captured"
                results.say(f"{row['triton_cache']} cache, prompt of {call['prompt']}: {replay}, {compiled}")
    results.say(f"-> {results.path}")
    return 0


if __name__ == "__main__":
    name, where, *tokens = sys.argv[1:]
    print(json.dumps(first_calls(name, [int(n) for n in tokens], find_device(where))))
