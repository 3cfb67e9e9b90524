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
import json
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import compat
from ..patches import patch
from .runs import Prompt, Rival, check, compare, free, make_prompt, replay_ms, rewind, run, synchronize, timed_captures, twin

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
FEW = 12  # new tokens where only the prompt matters, and of a rival too slow for more
COMPILE_SECONDS = 65  # what a warm-up of Transformers' compile takes at most
FLOPS = 5.5e14  # a second: prefill, for the estimates that decide what fits into --seconds; figures do not depend on it


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

    def no_time(self, row: dict, name: str, seconds: float, reserve: float = 0.0) -> bool:
        """Whether this many seconds are not left any more beside those kept for later cases, which is then noted."""
        if not self.cuda or seconds + reserve <= self.left():
            return False
        row["rivals"][name] = None
        kept = f", {reserve:.0f} s of them kept for later cases" if reserve else ""
        row["notes"].append(f"{name} not run: needs about {seconds:.0f} s, {self.left():.0f} s left{kept}")
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
        compiled = any(hasattr(rival.model, "_compiled_call") for rival in rivals)
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
        few = [max(1, length * 256 // max(256, *prompt.lengths)) for length in prompt.lengths]
        short = make_prompt(few, self.model.config.vocab_size, self.device)
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
        if resume and sdpa.failed and "dynamic" in caches:  # its steps can still be timed, from the cache that lean made
            sdpa.failed, sdpa.new = False, FEW
            row["rivals"][SDPA] = sdpa.report
            sdpa.report["prompt_error"] = sdpa.report.pop("error", "no time left")
        if not resume:
            caches.clear()

        if row["case"] in self.args.compile_cases:
            spent = (self.args.repeats + 4) * (first.wall_s + new * 0.03 if first else 0.0)
            if not self.no_time(row, STATIC, COMPILE_SECONDS + spent, reserve):
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
            report["slowest_step_ms"] = max(run.slowest_ms for run in rival.runs)
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
