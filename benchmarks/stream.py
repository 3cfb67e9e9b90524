"""Unbounded generation: a model that reads a million tokens through a rolling cache, and parts of this.

    python -m benchmarks.stream                  # all parts
    python -m benchmarks.stream --parts ring,update

read: the text is read in chunks under patch(model, "streaming"). At some points tokens are generated in captured steps, in blocks
that alternate with blocks over a dense preallocated cache with as many tokens as the rolling one keeps. ms per token is measured
as in bench generate; memory is the allocation of torch at the end of the block. update: GPU time of writing one token into the
caches of all layers, compared with Transformers' StaticSlidingWindowLayer. ring: the decode kernel over a full ring, compared
with lean over dense K/V of the same size.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from functools import partial

import torch

from hf_fastattn import hf
from hf_fastattn.attention import step as steps
from hf_fastattn.caches import PreallocatedCache, RollingCache
from hf_fastattn.caches.rolling import Ring
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spans import CAUSAL, NO_WINDOW
from hf_fastattn.kernels.spec import call
from hf_fastattn.patches import patch
from hf_fastattn.streaming import Settings

from . import shapes, timing
from .models import SHAPES, Subject, dtype_for, load
from .results import Results, add_options, check_names, command, conditions, find_device, need_gpu, progress
from .runs import Prompt, compare, free, make_prompt, rewind, run, synchronize, twin

PARTS = ("read", "ring", "update")  # in this order: the last needs a profiler, which slows all later launches
POINTS = [10_000, 100_000, 300_000, 1_000_000]
BLOCK = 100  # tokens of one generate()
METHOD = "greedy generate() under patch(), 6th new token to last, streaming and dense blocks alternating, median"


class Reader:
    """A patched model, its rolling cache, and the text that it reads."""

    def __init__(self, subject: Subject, settings: Settings, longest: int, device: torch.device):
        options = {"window": settings.window, "sinks": settings.sinks}
        self.device = device
        self.model, self.plain, self.dense = (twin(subject.model, "sdpa") for _ in range(3))
        self.patches = [
            patch(self.model, "streaming", **options),
            patch(self.plain, "streaming", graph=False, **options),
            patch(self.dense, "lean"),
        ]
        self.whole = make_prompt([longest], subject.text_config.vocab_size, device)
        self.cache = RollingCache(self.model)
        keeps = settings.window + settings.sinks
        self.dense_prompt = Prompt(self.whole.ids[:, :keeps], self.whole.mask[:, :keeps], [keeps])
        self.copied: RollingCache | None = None
        self.dense_cache = PreallocatedCache(self.dense, keeps + 2 * BLOCK)

    @property
    def seen(self) -> int:
        return self.cache.get_seq_length()

    def read(self, upto: int, chunk: int) -> float:
        """Read up to this token, in chunks. Returns the seconds."""
        synchronize(self.device)
        began = time.perf_counter()
        with torch.no_grad():
            while self.seen < upto:
                ids = self.whole.ids[:, self.seen : min(upto, self.seen + chunk)]
                self.model(input_ids=ids, logits_to_keep=1, **{hf.CACHE: self.cache})
        synchronize(self.device)
        return time.perf_counter() - began

    def block(self, new: int = BLOCK, model=None, cache=None, **options):
        """generate() `new` tokens after the next token of the text."""
        stop = self.seen + 1
        prompt = Prompt(self.whole.ids[:, stop - 1 : stop], self.whole.mask[:, :stop], [stop])
        return run(model or self.model, prompt, new, cache or self.cache, **options)

    def dense_block(self):
        return run(self.dense, self.dense_prompt, BLOCK, rewind(self.dense_cache, self.dense_prompt))

    def _copy(self) -> RollingCache:
        """A copy of the cache, always in the same memory: its graph stays valid, and no more memory is allocated."""
        if self.copied is None:
            self.copied = copy.deepcopy(self.cache)
        mine, its = self.cache.storage, self.copied.storage
        its.counts.copy_(mine.counts)
        its.seen = mine.seen
        for layer, other in zip(mine.layers, its.layers, strict=True):
            other.keys.copy_(layer.keys)
            other.values.copy_(layer.values)
        return self.copied

    def check(self) -> dict:
        """Compare captured with uncaptured steps, from copies of the cache."""
        captured = self.block(16, cache=self._copy(), logits=True)
        uncaptured = self.block(16, self.plain, self._copy(), logits=True)
        found = compare(captured, uncaptured)
        allowed = 4 * torch.finfo(self.model.dtype).eps * uncaptured.logits.abs().max().item()
        return found | {"allowed": allowed, "passed": found["largest_logit_difference"] <= allowed}

    def close(self) -> None:
        for each in self.patches:
            each.undo()


def measure_point(reader: Reader, point: int, args, results: Results) -> dict | None:
    """Read up to the point and generate args.steps tokens there in blocks; None if captured steps are wrong."""
    before = reader.seen
    row = {"tokens": point, "read_tokens": point - before, "read_s": reader.read(point, args.chunk)}
    row["check"] = reader.check()
    if not row["check"]["passed"]:
        results.say(f"{point}: captured steps differ from uncaptured ones: {row['check']}. They are not timed.")
        return None
    for _ in range(2):  # captures
        reader.block()
        reader.dense_block()
    free(reader.device)
    ours, dense, memory = [], [], []
    for i in range(max(1, args.steps // BLOCK)):
        for stream in (True, False) if i % 2 == 0 else (False, True):
            (ours if stream else dense).append((reader.block() if stream else reader.dense_block()).ms)
        gc.collect()
        if reader.device.type == "cuda":
            memory.append(torch.cuda.memory_allocated(reader.device))
        if results.left() < 5:
            break
    row |= {"steps": BLOCK * len(ours), "ms": statistics.median(ours), "dense_ms": statistics.median(dense)}
    row |= {"all_ms": ours, "all_dense_ms": dense, "memory_bytes": memory}
    row["over_dense"] = row["ms"] / row["dense_ms"]
    return row


def read_summary(rows: list[dict]) -> dict:
    ms, memory = [row["ms"] for row in rows], {size for row in rows for size in row["memory_bytes"]}
    return {
        "slowest_over_fastest": max(ms) / min(ms),
        "largest_over_dense": max(row["over_dense"] for row in rows),
        "memory_bytes": {"smallest": min(memory, default=None), "largest": max(memory, default=None)},
    }


def read(args, results: Results, device: torch.device) -> bool:
    """Read the text and generate at each point. Returns whether all results were correct."""
    results.data["rows"] = []
    dtype = dtype_for(device)
    results.data["dtype"] = str(dtype).removeprefix("torch.")
    subject = load(args.shape, dtype, device)
    settings = Settings(args.window, args.sinks)
    reader = Reader(subject, settings, args.points[-1] + args.steps + 10 * BLOCK, device)
    results.data |= {"shape": subject.name, "window": args.window, "sinks": args.sinks, "chunk": args.chunk}
    try:
        with warnings.catch_warnings(action="ignore"):  # the result has why steps run uncaptured
            for point in progress(args.points, "text", "point"):
                row = measure_point(reader, point, args, results)
                if row is None:
                    return False
                results.data["rows"].append(row | {"run": results.run})
                results.data["summary"] = read_summary(results.data["rows"])
                results.data["reasons"] = [reason for each in (reader.patches[0], reader.patches[2]) for reason in each.reasons]
                results.save()
                allocated = f", {row['memory_bytes'][-1]} bytes" if row["memory_bytes"] else ""
                results.say(f"{point} tokens: {row['ms']:.3f} ms a token, dense {row['dense_ms']:.3f}{allocated}")
                if results.left() < 20:
                    results.say("no time for the remaining points")
                    return False
    finally:
        reader.close()
    return True


def device_us(call, calls: int, device: torch.device) -> float:
    """Microseconds of GPU time per call, without launches; of host time on the CPU."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        return timing.elapsed_us(lambda: [call() for _ in range(calls)], device) / calls
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        synchronize(device)
    total = sum(event.self_device_time_total for event in profile.key_averages())
    if not total:
        raise RuntimeError("The profiler saw no kernel on this GPU; another process may be profiling it.")
    return total / calls


def update(args, results: Results, device: torch.device) -> bool:
    """Write one token into full caches of 16 layers, 8 KV heads of 64, windows of 128 and 4096: rolling and Transformers'."""
    from transformers.cache_utils import StaticSlidingWindowLayer

    layers, heads, head_dim = 16, 8, 64
    calls = {}
    states = lambda n: torch.randn(1, heads, n, head_dim, device=device, dtype=shapes.DTYPE)  # noqa: E731
    token, windows = states(1), (128, 4096)
    for window in windows:
        ring = Ring(layers, Settings(window, args.sinks))
        stock = [StaticSlidingWindowLayer(max_cache_len=1 << 20, sliding_window=window) for _ in range(layers)]

        def ours(ring=ring, states=token):
            step = steps.begin(ring)
            ring.begin(step, 1, states.shape[2], None, device)
            step.asked = True  # no model requests a mask here
            written = [layer.update(states, states) for layer in ring.layers]
            steps.end(step)
            return written

        def theirs(stock=stock, states=token):
            return [layer.update(states, states) for layer in stock]

        prompt = states(window + args.sinks + 8)
        for name, write in (("rolling", ours), ("transformers_static_sliding", theirs)):
            write(states=prompt)
            kept = write()[-1][0]  # the last layer's keys
            if not (kept == token).all(-1).any(-1).all():
                results.say(f"{name}, window {window}: the token is not in the cache. It is not timed.")
                return False
            calls[name, window] = write
    with torch.no_grad():
        times: dict = {key: [] for key in calls}
        for _ in range(5):
            for key, call in calls.items():
                times[key].append(device_us(call, 20, device))
    found = {f"{name}, window {window}": statistics.median(values) for (name, window), values in times.items()}
    small, large = windows
    over = {
        name: found[f"{name}, window {large}"] / found[f"{name}, window {small}"]
        for name in ("rolling", "transformers_static_sliding")
    }
    results.data["update"] = {"unit": f"us of GPU time a token, {layers} layers", "us": found, f"{large}_over_{small}": over}
    results.data["update"]["run"] = results.run
    results.save()
    results.say("update: " + "  ".join(f"{name} {us:.1f} us" for name, us in found.items()))
    return True


def ring(args, results: Results, device: torch.device) -> bool:
    """The decode kernel over a full ring, with re-rotation for the sinks, and lean over dense K/V of the same size."""
    rows = results.data["ring"] = []
    options = {"window": args.window, "sinks": args.sinks}
    for batch, head_dim in ((1, 64), (1, 128), (16, 128)):
        shape = shapes.Shape(batch, 32, 8, head_dim, args.window + args.sinks)
        sets, us = timing.num_sets(shape.kv_bytes), max(7, shape.kv_bytes / shapes.READ)
        inputs = shapes.make_inputs(shape, sets, device)
        inv_freq = 500000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
        ints = [shape.kv_len - 1, 0, shape.kv_len, NO_WINDOW, CAUSAL, 100_000]  # number of dropped tokens
        spans = torch.tensor(ints, dtype=torch.int32, device=device).expand(batch, 1, 1, -1)  # without padding

        def over_ring(i, kernel=shapes.LEAN, inputs=inputs, spans=spans, inv_freq=inv_freq):
            return kernel(*inputs[i], spans, inv_freq=inv_freq, **options)

        def dense(i, kernel=shapes.LEAN, inputs=inputs):
            return kernel(*inputs[i])

        calls = timing.num_calls(sets, us)
        runs = {}
        for name, timed in (("dense", dense), ("ring", over_ring)):
            shapes.check(name, timed(0), timed(0, kernel=partial(call, reference.attention)).float())
            runs[name] = timing.record(timed, sets, calls, device)
        row = shape.row() | timing.medians(timing.time_rivals(runs, calls, device))
        row["ring_over_dense"] = row["us"]["dense"] / row["us"]["ring"]
        rows.append(row | {"run": results.run})
        results.save()
        results.say(f"ring {row['shape']}: " + "  ".join(f"{name} {us:.1f} us" for name, us in row["us"].items()))
    return True


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.stream") -> int:
    """Run the parts. Returns 0, 1 if a result was wrong or time ran out, or 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}; default all"
    )
    parser.add_argument("--shape", default="1b", help="as of bench generate (default: %(default)s)")
    parser.add_argument("--window", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--sinks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per chunk (default: %(default)s)")
    help_ = "tokens, growing; default " + ",".join(map(str, POINTS))
    parser.add_argument("--points", type=lambda text: [int(n) for n in text.split(",")], default=POINTS, help=help_)
    parser.add_argument("--steps", type=int, default=2000, help="tokens generated at each point (default: %(default)s)")
    add_options(parser, seconds=280)
    args = parser.parse_args(argv)
    check_names(parser, args.parts, PARTS, "parts")
    spent = args.steps + 5 * BLOCK  # the next point begins after the tokens that a point generates
    if any(b - a < spent for a, b in zip([args.window, *args.points], args.points, strict=False)):
        parser.error(
            f"--points must increase by at least {spent} tokens, from the window of {args.window} on; got {args.points}."
        )
    size = {f"a chunk of {args.chunk} tokens over {args.window}": args.chunk * (args.chunk + args.window)}
    need_gpu(parser, args, {args.shape} & SHAPES.keys(), size)
    device = find_device(args.device)
    torch.manual_seed(0)
    head = {"conditions": conditions(device, METHOD), "unit": "ms a token"}
    results = Results(args.out / "stream.json", args.seconds, command(prog, argv), device, **head)
    results.take_over(parser)  # other parts are kept
    parts = {"read": read, "ring": ring, "update": update}
    try:
        return 0 if all([parts[part](args, results, device) for part in PARTS if part in args.parts]) else 1
    except KeyboardInterrupt:
        results.say("interrupted")
        return 130
    finally:
        results.say(f"-> {results.path}")


if __name__ == "__main__":
    raise SystemExit(main())
