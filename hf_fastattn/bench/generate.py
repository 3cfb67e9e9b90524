"""End-to-end benchmark: ms a token of plain generate(), stock and patched, on one model with random weights.

    python -m hf_fastattn.bench.generate --shape 8b --cases 1x512,1x8192,8xpadded --seconds 560 --out examples/results

Rivals: sdpa with the dynamic cache; sdpa with the static cache and Transformers' own torch.compile; attn_implementation="lean"
with the dynamic cache and nothing patched; and hf_fastattn.patch(model, "lean"). They share one set of weights and take turns.

A token's time is the host's clock from the 6th new token to the last, divided by the tokens between, so neither the prompt nor
compilation nor capture is in it; those are reported beside it. Where reading the prompt takes more than a second, it is read once
per cache, and each repeat is a generate() that continues from a cache of all its tokens but the last ("repeats_from": "cache").
Before timing, patched tokens and logits are compared with uncaptured ones from the same cache. Without a GPU everything runs but
the compilation, the graph and its figures.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .. import compat
from ..patches import Patch, graph, patch

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},  # Llama-3.1-8B
    "1b": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
COMMON = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1,
    "eos_token_id": None,  # nothing ends early
    "pad_token_id": 0,
}
SDPA, STATIC, LEAN, OURS, UNPADDED = "sdpa_dynamic", "sdpa_static_compile", "lean_dynamic", "patched", "patched_unpadded"
STOCK = (SDPA, STATIC)
SKIP = 5  # a token's time is taken from new token SKIP + 1 on
FEW = 12  # new tokens where only the prompt matters, and of a rival too slow for more
COMPILE_SECONDS = 65  # what a warm-up of Transformers' compile takes at most
FLOPS = 5.5e14  # a second: prefill, for the estimates that decide what fits into --seconds; figures do not depend on it


class Clock(compat.StoppingCriteria):
    """Never stops; notes when each new token was chosen (host seconds; the first only once the device has got there)."""

    def __init__(self):
        self.at: list[float] = []
        self.never: torch.Tensor | None = None

    def __call__(self, input_ids, scores, **kwargs):
        if self.never is None:
            self.never = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
            synchronize(input_ids.device)
        self.at.append(time.perf_counter())
        return self.never


@dataclass
class Prompt:
    """ids and mask, int64 (rows, width), left-padded; lengths: live tokens of each row."""

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]


@dataclass
class Run:
    """One generate(): new tokens (rows, new), logits (new, rows, vocab) if asked for, seconds, ms a token, the cache if kept."""

    tokens: torch.Tensor
    first_token_s: float
    wall_s: float
    ms: float
    slowest_ms: float
    logits: torch.Tensor | None = None
    cache: object = None


@dataclass
class Rival:
    name: str
    model: compat.PreTrainedModel
    prompt: Prompt
    new: int  # tokens of a repeat
    options: dict = field(default_factory=dict)
    patch: Patch | None = None
    report: dict = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)
    first: Run | None = None
    failed: bool = False


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def twin(model, attention: str):
    """A model of its own, configuration included, over the same weights."""
    tensors = [*model.parameters(), *model.buffers()]
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    other.set_attn_implementation(attention)
    return other


def make_prompt(lengths: list[int], vocab_size: int, device: torch.device) -> Prompt:
    """Random tokens, left-padded to the longest row."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return Prompt(ids.where(mask, 0).to(device), mask.long().to(device), lengths)


def run(model, prompt: Prompt, new: int, cache=None, keep: bool = False, logits: bool = False, **options) -> Run:
    """generate() `new` tokens greedily, timed from outside; with a cache, on from the tokens it holds."""
    device = prompt.ids.device
    if cache is not None:
        options["past_key_values"] = cache
    if keep or logits:
        options |= {"return_dict_in_generate": True, "output_logits": logits}
    clock = Clock()
    synchronize(device)
    began = time.perf_counter()
    out = model.generate(
        prompt.ids,
        attention_mask=prompt.mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        stopping_criteria=[clock],
        **options,
    )
    synchronize(device)
    wall = time.perf_counter() - began
    at = clock.at
    skip = max(0, min(SKIP, len(at) - 2))
    gaps = [b - a for a, b in zip(at[skip:], at[skip + 1 :], strict=False)] or [0.0]
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    return Run(
        tokens=sequences[:, prompt.ids.shape[1] :],
        first_token_s=at[0] - began,
        wall_s=wall,
        ms=1e3 * sum(gaps) / len(gaps),
        slowest_ms=1e3 * max(gaps),
        logits=torch.stack(out.logits) if logits else None,
        cache=out.past_key_values if keep else None,
    )


def rewind(cache, prompt: Prompt):
    """The cache, holding all of the prompt but its last token again."""
    more = cache.get_seq_length() - (prompt.ids.shape[1] - 1)
    if more > 0:
        cache.crop(-more)
    return cache


def compare(ours: Run, theirs: Run) -> dict:
    """Share of equal tokens, the first step that differs in any row, and the largest logit difference up to that step."""
    steps = min(ours.tokens.shape[1], theirs.tokens.shape[1])
    same = ours.tokens[:, :steps] == theirs.tokens[:, :steps]
    different = (~same).any(0).nonzero().flatten().tolist()
    found = {
        "tokens": same.numel(),
        "equal": same.double().mean().item(),
        "first_difference": different[0] if different else None,
    }
    if ours.logits is not None and theirs.logits is not None:
        upto = different[0] + 1 if different else steps  # after it the rows no longer read the same tokens
        difference = (ours.logits[:upto].float() - theirs.logits[:upto].float()).abs().max()
        found["largest_logit_difference"] = difference.item()
    return found


def check(ours: Rival, cache, lean, sdpa) -> dict:
    """Captured against uncaptured steps of the same backend over the same cache, beside sdpa against the same.

    "passed": whether the logits differ by at most twice what sdpa's do, plus 4 eps of the largest.
    """
    replayed = ours.patch.replays
    captured, uncaptured, other = (
        run(model, ours.prompt, steps, rewind(cache, ours.prompt), logits=True)
        for model, steps in ((ours.model, min(ours.new, 24)), (lean, min(ours.new, 24)), (sdpa, 6))
    )
    rewind(cache, ours.prompt)
    found = {"against_uncaptured": compare(captured, uncaptured), "sdpa_against_uncaptured": compare(other, uncaptured)}
    largest = uncaptured.logits.abs().max().item()
    allowed = 2 * found["sdpa_against_uncaptured"]["largest_logit_difference"]
    allowed += 4 * torch.finfo(ours.model.dtype).eps * largest
    passed = found["against_uncaptured"]["largest_logit_difference"] <= allowed
    replayed = ours.patch.replays - replayed
    return found | {"largest_logit": largest, "allowed": allowed, "passed": passed, "steps_replayed": replayed}


@contextmanager
def timed_captures(seconds: list[float]) -> Iterator[None]:
    """Inside, each capture of a decode graph appends how long it took."""
    original = graph.CudaGraph.capture

    def capture(self, body):
        synchronize(self.device)
        began = time.perf_counter()
        result = original(self, body)
        synchronize(self.device)
        seconds.append(time.perf_counter() - began)
        return result

    graph.CudaGraph.capture = capture
    try:
        yield
    finally:
        graph.CudaGraph.capture = original


def replay_ms(patched: Patch) -> float | None:
    """Milliseconds of one replay of the graph used last, by events around several; None if there is none."""
    entries = [e for held in patched._graphs.entries.values() for e in held if e.graph is not None]
    if not entries:
        return None
    entry = max(entries, key=lambda e: e.used)
    storage = entry.storage()
    count = max(1, min(10, *(track.capacity - (track.seen - track.base) for track in storage.tracks)))
    for track in storage.tracks:
        track.sync(entry.device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        entry.graph.replay()
    stop.record()
    stop.synchronize()
    for track in storage.tracks:
        track.image = None  # the device has counted on
    return start.elapsed_time(stop) / count


class Bench:
    def __init__(self, args):
        self.began = time.perf_counter()
        self.args = args
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:  # as tensors name it
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.path = args.out / (args.name or f"generate_{args.shape}.json")
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.model = compat.random_model("llama", dtype, self.device, **{**COMMON, **SHAPES[args.shape]})
        synchronize(self.device)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.say(f"{args.shape}: {self.weight_bytes / 1e9:.2f} GB of {dtype} weights on {self.device}, built")
        config = {**COMMON, **SHAPES[args.shape]}
        self.result = {"conditions": self.conditions(), "shape": args.shape, "config": config, "unit": "ms a token", "rows": []}
        embedding = self.model.get_input_embeddings().weight  # of which a step reads a few rows, unless it is the head too
        tied = self.model.config.tie_word_embeddings
        self.bytes_read = self.weight_bytes - (0 if tied else embedding.numel() * embedding.element_size())
        self.result |= {"weight_bytes": self.weight_bytes, "weight_bytes_read_a_token": self.bytes_read}

    def conditions(self) -> dict[str, str]:
        import transformers

        try:
            import triton
        except ImportError:  # not on every CPU
            triton = None
        return {
            "device": torch.cuda.get_device_name(self.device) if self.cuda else platform.processor() or "cpu",
            "torch": torch.__version__,
            "triton": getattr(triton, "__version__", "none"),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "method": "greedy generate() timed from the outside, 6th new token to last, rivals alternating, median",
        }

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.args.seconds - (time.perf_counter() - self.began)

    def save(self) -> None:
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    # ---- what a case is, and what it costs ----

    def lengths(self, case: str) -> list[int]:
        """Live tokens of each row of "ROWSxTOKENS", or of "ROWSxpadded"."""
        rows, _, tokens = case.partition("x")
        if tokens != "padded":
            return [int(tokens)] * int(rows)
        low, high = self.args.padded
        return [round(low + (high - low) * i / max(1, int(rows) - 1)) for i in range(int(rows))]

    def prefill_seconds(self, lengths: list[int]) -> float:
        """Estimate for an H200, of rows as wide as the longest."""
        config = self.model.config
        rows, width = len(lengths), max(lengths)
        layers = self.weight_bytes / 2
        attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * 2 * width
        return rows * width * (2 * layers + attention) / FLOPS if self.cuda else 0.0

    def estimate(self, case: str) -> float:
        """Seconds a case takes without compilation, on an H200."""
        lengths = self.lengths(case)
        if not self.cuda:
            return 0.0
        prefill, repeats = self.prefill_seconds(lengths), self.args.repeats
        decode = self.args.tokens * 0.018
        if prefill < 1:
            return 5 + 3 * (repeats + 3) * (prefill + decode)
        seconds = 5 + 3 * (1 if prefill > 6 else 2) * prefill + 3 * (repeats + 2) * decode
        if len(set(lengths)) > 1:  # sdpa reads the padding, through a mask; and the batch without padding
            seconds += 4 * prefill + 4 * (repeats + 4)
        return seconds

    # ---- one row ----

    @contextmanager
    def guard(self, rival: Rival) -> Iterator[None]:
        """What goes wrong inside is written down and takes this rival out of the row, and nothing else."""
        try:
            yield
        except Exception as error:  # whatever it is: the other figures are still worth having
            rival.failed = True
            rival.report["error"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
            self.say(f"  {rival.name} failed: {rival.report['error'][:300]}")
        if rival.failed:
            free(self.device)

    def no_time(self, row: dict, name: str, seconds: float) -> bool:
        """Whether this many seconds are not left any more, which is then noted."""
        if not self.cuda or seconds <= self.left():
            return False
        row["rivals"][name] = None
        row["notes"].append(f"{name} not run: needs about {seconds:.0f} s, {self.left():.0f} s left")
        self.say("  " + row["notes"][-1])
        return True

    def measure_row(self, case: str, reserve: float) -> None:
        """Check and time one case; `reserve` seconds of the budget belong to later ones."""
        began = time.perf_counter()
        lengths = self.lengths(case)
        new = self.args.tokens
        prompt = make_prompt(lengths, self.model.config.vocab_size, self.device)
        padded = len(set(lengths)) > 1
        kv_bytes = sum(lengths) * self.kv_bytes_per_token()
        row = {"case": case, "rows": len(lengths), "lengths": lengths, "live_tokens": sum(lengths), "padded": padded}
        row |= {"kv_bytes": kv_bytes, "rivals": {}, "notes": []}
        self.result["rows"].append(row)
        rivals, caches = [], {}
        try:
            self._measure(row, prompt, new, reserve, rivals, caches)
        except Exception as error:  # a mistake in one row is no reason to lose the others
            row["error"] = f"{type(error).__name__}: {error}"
            self.say(f"  {case} failed: {row['error'][:300]}")
        for rival in rivals:
            if rival.patch is not None:
                rival.patch.undo()
        compiled = any(rival.report.get("compiled") for rival in rivals)
        rivals.clear()
        caches.clear()
        if compiled:
            torch.compiler.reset()
        free(self.device)
        row["seconds"] = time.perf_counter() - began
        self.save()

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        config = self.model.config
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize

    def _measure(self, row: dict, prompt: Prompt, new: int, reserve: float, rivals: list[Rival], caches: dict) -> None:
        def add(name: str, attention: str, its_prompt: Prompt = prompt, patched: bool = False, **options) -> Rival:
            model = twin(self.model, attention)
            rival = Rival(name, model, its_prompt, new, options, patch(model, "lean") if patched else None)
            rivals.append(rival)
            return rival

        prefill = self.prefill_seconds(prompt.lengths)
        sdpa, lean = add(SDPA, "sdpa"), add(LEAN, "lean")
        short = make_prompt([min(256, max(prompt.lengths))] * len(prompt.lengths), self.model.config.vocab_size, self.device)
        for rival in (sdpa, lean):
            if self.no_time(row, rival.name, 5 + prefill * (4 if row["padded"] and rival is sdpa else 1)):
                rival.failed = True
                continue
            row["rivals"][rival.name] = rival.report
            with self.guard(rival):
                run(rival.model, short, 4)  # compiles kernels, loads libraries
                self.prepare(rival, caches, "dynamic")
            self.save()
        first = sdpa.first or lean.first
        resume = row["case"] in self.args.resume or (first is not None and first.first_token_s > 1.0)
        row["repeats_from"] = "cache" if resume else "prompt"
        if not resume:
            caches.clear()

        if row["case"] in self.args.compile_cases:
            spent = (self.args.repeats + 4) * (first.wall_s + new * 0.03 if first else 0.0)
            if not self.no_time(row, STATIC, COMPILE_SECONDS + spent + reserve):  # the cases to come matter more
                static = add(STATIC, "sdpa", cache_implementation="static")
                row["rivals"][STATIC] = static.report
                with self.guard(static):
                    self.prepare_static(static)
                self.save()
        else:
            row["rivals"][STATIC] = None
            row["notes"].append(f"{STATIC} not run: not among --compile-cases")

        ours = [add(OURS, "sdpa", patched=True)]
        if row["padded"]:
            even = [sum(prompt.lengths) // len(prompt.lengths)] * len(prompt.lengths)
            other = make_prompt(even, self.model.config.vocab_size, self.device)
            ours.append(add(UNPADDED, "sdpa", other, patched=True))
        for rival in ours:
            if self.no_time(row, rival.name, 5 + prefill):
                rival.failed = True
                continue
            row["rivals"][rival.name] = rival.report
            with self.guard(rival):
                self.prepare(rival, caches, rival.name)
                checked = rival.report["check"] = check(rival, caches[rival.name], lean.model, sdpa.model)
                if rival.prompt is prompt:
                    for peer in (lean, sdpa):
                        if peer.first is not None:
                            checked[f"against_{peer.name}"] = compare(rival.first, peer.first)
                self.say(f"  {rival.name} checked, {checked['steps_replayed']} steps replayed: {checked['against_uncaptured']}")
                if not checked["passed"]:
                    raise RuntimeError(f"Its logits are not those of uncaptured steps: {checked}. It is not timed.")
            if not resume:
                caches.clear()  # back to the patch's pool, for the next call
            self.save()
        self.time_rivals(row, rivals, caches if resume else {})

    def prepare(self, rival: Rival, caches: dict, key: str) -> None:
        """The first calls: what they cost, and the cache they leave under caches[key]."""
        report, new = rival.report, rival.new if rival.patch else min(rival.new, FEW)
        free(self.device)
        base = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        captures: list[float] = []
        with timed_captures(captures), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why steps run uncaptured stands in the report
            last = rival.first = run(rival.model, rival.prompt, new, keep=True, **rival.options)
            report |= {"first_call_s": last.wall_s, "first_call_new_tokens": new, "prefills": 1}
            if 1.0 < last.first_token_s < 6.0:  # once more, with everything compiled and loaded
                last.cache = None
                last = run(rival.model, rival.prompt, new, keep=True, **rival.options)
                report["prefills"] = 2
        report["ttft_ms"] = 1e3 * last.first_token_s
        if self.cuda:  # of this rival alone: weights, cache and what it computes with
            peak = torch.cuda.max_memory_allocated(self.device) - base + self.weight_bytes
            report["peak_gib"] = peak / 2**30
        if rival.patch is not None:
            report |= {"capture_s": captures, "reasons": list(rival.patch.reasons)}
        elif last.ms > 100:
            rival.new = min(rival.new, max(FEW, int(4000 / last.ms)))
        caches[key], last.cache, rival.first.cache = last.cache, None, None
        self.say(f"  {rival.name}: first token {report['ttft_ms']:.0f} ms, then {last.ms:.2f} ms a token")

    def prepare_static(self, rival: Rival) -> None:
        """Warm up Transformers' compiled static cache until no step compiles any more."""
        free(self.device)
        base, walls = self.allocated(), []
        while len(walls) < 4:
            if self.cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            last = run(rival.model, rival.prompt, rival.new, **rival.options)
            walls.append(last.wall_s)
            if len(walls) > 1 and last.slowest_ms < 1000:
                break
        rival.first = last
        rival.report |= {
            "compiled": hasattr(rival.model, "_compiled_call"),
            "warmup_s": sum(walls) - len(walls) * min(walls),
            "first_call_s": walls[0],
            "ttft_ms": 1e3 * last.first_token_s,
        }
        if self.cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - base + self.weight_bytes
            rival.report["peak_gib"] = peak / 2**30
        self.say(f"  {rival.name}: {rival.report['warmup_s']:.1f} s of warm-up, then {last.ms:.2f} ms a token")

    def time_rivals(self, row: dict, rivals: list[Rival], caches: dict) -> None:
        """Repeats, the rivals taking turns and going first in turn."""
        free(self.device)
        captured = {rival.name: rival.patch.captures for rival in rivals if rival.patch is not None}
        for repeat in range(self.args.repeats):
            for rival in rivals if repeat % 2 == 0 else rivals[::-1]:
                if rival.failed or self.left() < 5:
                    continue
                with self.guard(rival), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    cache = None if rival.name == STATIC else caches.get("dynamic" if rival.patch is None else rival.name)
                    if cache is not None:
                        rewind(cache, rival.prompt)
                    rival.runs.append(run(rival.model, rival.prompt, rival.new, cache, **rival.options))
                    if self.cuda and rival.patch is not None and (ms := replay_ms(rival.patch)):
                        rival.replays.append(ms)
        for rival in rivals:
            if not rival.runs:
                continue
            times = [run.ms for run in rival.runs]
            report = rival.report
            report |= {"ms": statistics.median(times), "all_ms": times, "new_tokens": rival.new}
            report["wall_s"] = statistics.median(run.wall_s for run in rival.runs)
            if row["repeats_from"] == "prompt":
                report["ttft_ms"] = 1e3 * statistics.median(run.first_token_s for run in rival.runs)
            if len(times) < self.args.repeats and not rival.failed:
                row["notes"].append(f"{rival.name}: {len(times)} repeats, then the time was spent")
            if rival.patch is not None:
                report["captures_while_timing"] = rival.patch.captures - captured[rival.name]
                report["steps"] = {"replayed": rival.patch.replays, "uncaptured": rival.patch.uncaptured}
                report["reasons"] = list(rival.patch.reasons)
                report["replay_ms"] = statistics.median(rival.replays) if rival.replays else None
                report["host_ms"] = report["ms"] - report["replay_ms"] if rival.replays else None
        ms = {name: report["ms"] for name, report in row["rivals"].items() if report and "ms" in report}
        if OURS in ms:
            row["ratios"] = {name: other / ms[OURS] for name, other in ms.items() if name != OURS}
            stock = [ms[name] for name in STOCK if name in ms]
            row["ratios"]["best_stock"] = min(stock) / ms[OURS] if stock else None
            row["tb_per_s"] = (self.bytes_read + row["kv_bytes"]) / ms[OURS] / 1e9

    def table(self, rows: list[dict]) -> str:
        """ms a token of each rival, and how many times longer than ours each stock path takes."""
        heads = ("case", "sdpa", "static", "lean", "ours", "replay", "host", "capture s", "warm-up s", "x sdpa", "x static")
        lines = ["".join(f"{head:>11}" for head in (*heads, "x best", "equal", "GiB"))]
        for row in rows:
            rivals = {name: report or {} for name, report in row.get("rivals", {}).items()}
            ours, ratios = rivals.get(OURS, {}), row.get("ratios", {})
            figures = [rivals.get(name, {}).get("ms") for name in (SDPA, STATIC, LEAN, OURS)]
            figures += [ours.get("replay_ms"), ours.get("host_ms"), (ours.get("capture_s") or [None])[0]]
            figures += [rivals.get(STATIC, {}).get("warmup_s"), *(ratios.get(name) for name in (*STOCK, "best_stock"))]
            figures += [ours.get("check", {}).get("against_uncaptured", {}).get("equal"), ours.get("peak_gib")]
            lines.append(f"{row['case']:>11}" + "".join(f"{'-' if x is None else format(x, '.3f'):>11}" for x in figures))
            if UNPADDED in ratios:
                lines.append(f"{'':>11}without padding, as many live tokens: {rivals[UNPADDED]['ms']:.3f} ms")
            errors = [f"{name}: {report['error']}" for name, report in rivals.items() if "error" in report]
            for text in (*row.get("notes", ()), *errors, *ours.get("reasons", ()), row.get("error")):
                if text:
                    lines.append(f"{'':>11}{text[:118]}")
        return "\n".join(lines)

    def main(self) -> None:
        cases = self.args.cases
        for i, case in enumerate(cases):
            wanted, reserve = self.estimate(case), sum(map(self.estimate, cases[i + 1 :]))
            if wanted > self.left():
                note = f"not run: needs about {wanted:.0f} s, {self.left():.0f} s left"
                self.result["rows"].append({"case": case, "rivals": {}, "notes": [note]})
                self.say(f"{case} {note}")
                self.save()
                continue
            self.say(f"{case}: about {wanted:.0f} s without compilation")
            self.measure_row(case, reserve)
            row = self.result["rows"][-1]
            self.say(f"{case}: took {row['seconds']:.0f} s\n{self.table([row])}")
        self.result["seconds"] = time.perf_counter() - self.began
        self.save()
        self.say(f"-> {self.path}\n{self.table(self.result['rows'])}")


def main(arguments: list[str] | None = None) -> None:
    cases = "1x512,1x8192,1x65536,8x8192,8x32768,8xpadded"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = {"type": lambda text: [item for item in text.split(",") if item]}
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--cases", **listed, default=cases.split(","), help=f"ROWSxTOKENS or ROWSxpadded; default {cases}")
    parser.add_argument("--seconds", type=float, default=560, help="what does not fit into this is left out, with a note")
    parser.add_argument("--out", type=Path, default=Path("examples/results"), help="folder for the JSON")
    parser.add_argument("--name", help="its name; default generate_SHAPE.json")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", help="default cuda if there is one, else cpu")
    parser.add_argument("--padded", type=int, nargs=2, metavar=("SHORTEST", "LONGEST"), help="of padded rows; default 1024 32768")
    parser.add_argument("--resume", **listed, default=[], help="cases that read their prompt once, however short")
    help_ = "cases that also time sdpa + static cache + torch.compile, about a minute each"
    parser.add_argument("--compile-cases", **listed, default=["1x512", "1x8192", "8x8192"], help=help_)
    args = parser.parse_args(arguments)
    args.padded = args.padded or ([16, 48] if args.shape == "tiny" else [1024, 32768])
    for case in args.cases:
        rows, _, tokens = case.partition("x")
        if not rows.isdigit() or not (tokens == "padded" or tokens.isdigit()) or not int(rows):
            parser.error(f"a case is ROWSxTOKENS or ROWSxpadded; got {case!r}.")
    Bench(args).main()


if __name__ == "__main__":
    main()
