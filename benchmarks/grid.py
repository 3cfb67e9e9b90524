"""The grid of the generate() benchmark: for each case, all rivals are checked, timed alternately, and summarized."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch
from hf_fastattn.patches.graphs import policy

from .models import Subject, step_bytes
from .results import Results
from .runs import Prompt, Rival, check, compare, free, make_prompt, replay_ms, rewind, run, step_kernels, timed_captures, twin

SDPA, STATIC, LEAN, OURS, UNPADDED = "sdpa_dynamic", "sdpa_static_compile", "lean_dynamic", "patched", "patched_unpadded"
ROOMY, ROOM = "patched_roomy", 8  # patch() with a cache that has room for so many times the tokens
# name: attn_implementation, and further arguments of generate()
RIVALS = {
    SDPA: ("sdpa", {}),
    "eager_dynamic": ("eager", {}),
    "flash_attention_2_dynamic": ("flash_attention_2", {}),
    "flex_attention_dynamic": ("flex_attention", {}),
    LEAN: ("lean", {}),
    STATIC: ("sdpa", {"cache_implementation": "static"}),
    OURS: ("sdpa", {}),  # under patch(model, "lean")
    ROOMY: ("sdpa", {}),  # also under patch()
}
CASES = "1x512,1x8192,1x65536,8x8192,8x32768,8xpadded"
ADDED = ": added by a run of their own"  # the end of the note of a row that had other rivals
DEFAULT_RIVALS = [SDPA, LEAN, STATIC, OURS]
METHOD = "greedy generate() timed from the outside, 6th new token to last, rivals alternating, median"
MAX_STATIC = 6  # cases: each compiles for a minute
FEW = 12  # new tokens if only the prompt matters, or if a rival is too slow for more
LEAST, COMPILE_SECONDS = 10, 65  # a rival does not begin with fewer seconds left; one that Transformers compiles
LONG = 5.5e14  # FLOPs of a prompt from which repeats continue from a cache, about a second on an H200


def pairs(cases: Iterable[str], padded: list[int]) -> dict[str, int]:
    """Pairs of a query and a key in the prompts of each case, for `results.need_gpu`."""
    lengths = {case: row_lengths(case, padded) for case in cases}
    return {case: len(found) * max(found) ** 2 for case, found in lengths.items()}


def row_lengths(case: str, padded: list[int]) -> list[int]:
    """Live tokens of each row of "ROWSxTOKENS", or of "ROWSxpadded", from the shortest to the longest of `padded`."""
    rows, _, tokens = case.partition("x")
    if tokens != "padded":
        return [int(tokens)] * int(rows)
    low, high = padded
    return [round(low + (high - low) * i / max(1, int(rows) - 1)) for i in range(int(rows))]


class Bench:
    def __init__(self, args, subject: Subject, results: Results, device: torch.device):
        self.args, self.subject, self.results, self.device = args, subject, results, device
        self.model = subject.model
        self.cuda = device.type == "cuda"
        self.rivals: list[Rival] = []  # of the current case
        self.caches: dict[str, object] = {}  # after the prompt, of the current case; stock rivals share "dynamic"

    def resumes(self, case: str) -> bool:
        """Whether repeats continue from a cache, as after long prompts. Caches of Transformers with a window have no crop()."""
        lengths, facts = row_lengths(case, self.args.padded), self.subject.facts
        width = max(lengths)
        flops = len(lengths) * width * (facts.weight_bytes + len(facts.shapes) * facts.num_heads * facts.head_dim * 2 * width)
        return ((self.cuda and flops > LONG) or case in self.args.resume) and not any(facts.windows)

    def no_time(self, row: dict, name: str, seconds: float) -> bool:
        """Whether fewer seconds are left; records this in a note."""
        left = self.results.left()
        if not self.cuda or left >= seconds:
            return False
        row["rivals"][name] = None
        self.note(row, f"{name} not run: {left:.0f} s left")
        return True

    def note(self, row: dict, text: str) -> None:
        row["notes"].append(text)
        self.results.say("  " + text)

    # ---- one case ----

    @contextmanager
    def guard(self, rival: Rival) -> Iterator[None]:
        """An error inside is recorded and removes this rival from the row; the others continue."""
        try:
            yield
        except Exception as error:  # any error: the other figures are still useful
            rival.failed = True
            rival.report["error"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
            self.results.say(f"  {rival.name} failed: {rival.report['error'][:300]}")
        if rival.failed:
            rival.cache = None
            free(self.device)

    def add(self, row: dict, name: str, prompt: Prompt) -> Rival:
        """A rival with its own model over the shared weights. It has failed if its attention is not installed."""
        attention, options = RIVALS[OURS if name == UNPADDED else name]
        rival = Rival(name, None, prompt, self.args.tokens, options, report={"run": self.results.run})
        self.rivals.append(rival)
        row["rivals"][name] = rival.report
        with self.guard(rival):
            rival.model = twin(self.model, attention)
            if name in (OURS, UNPADDED, ROOMY):
                rival.patch = patch(rival.model, "lean")
            if name == ROOMY:
                rival.cache = PreallocatedCache(rival.model, ROOM * (prompt.ids.shape[1] + self.args.tokens))
        return rival

    def new_row(self, case: str) -> dict:
        """The row of a case in the JSON; a new one if there is none (with --add there is one)."""
        rows = self.results.data["rows"]
        for row in rows:
            if row["case"] == case:
                self.note(row, f"{', '.join(self.args.rivals)}{ADDED}")
                return row
        lengths = row_lengths(case, self.args.padded)
        facts = self.subject.facts
        row = {"case": case, "rows": len(lengths), "lengths": lengths, "live_tokens": sum(lengths)}
        row |= {"padded": len(set(lengths)) > 1, "kv_bytes": sum(map(facts.kv_bytes, lengths)), "rivals": {}, "notes": []}
        if bandwidth := self.results.data["tb_per_s"]:
            row["floor_ms"] = step_bytes(facts, lengths) / bandwidth / 1e9
        rows.append(row)
        return row

    def measure(self, case: str) -> None:
        """Check and time one case."""
        row = self.new_row(case)
        row["repeats_from"] = "cache" if self.resumes(case) else "prompt"
        try:
            self._measure(row, make_prompt(row["lengths"], self.subject.text_config.vocab_size, self.device))
        except Exception as error:  # an error in one row must not lose the others
            row["error"] = f"{type(error).__name__}: {error}"
            self.results.say(f"  {case} failed: {row['error'][:300]}")
        finally:
            self.clear()
            self.results.save()

    def list_kernels(self) -> None:
        """List the launches of a captured step. After all timing, because a profiler slows all later launches of the process."""
        case = self.args.cases[0]
        prompt = make_prompt(row_lengths(case, self.args.padded), self.subject.text_config.vocab_size, self.device)
        rival = self.add({"rivals": {}}, OURS, prompt)
        try:
            with self.guard(rival):
                if rival.failed or self.results.left() < LEAST:
                    return
                run(rival.model, rival.prompt, 4)
                self.results.data["step"] = {"case": case, "kernels": step_kernels(rival.patch)}
        finally:
            self.clear()
            self.results.save()

    def clear(self) -> None:
        """Free all that a case has allocated."""
        compiled = any(hasattr(rival.model, "_compiled_call") for rival in self.rivals)
        for rival in self.rivals:
            if rival.patch is not None:
                rival.patch.undo()
        self.rivals.clear()
        self.caches.clear()
        if compiled:
            torch.compiler.reset()
        free(self.device)

    def _measure(self, row: dict, prompt: Prompt) -> None:
        resume, wanted, vocab = row["repeats_from"] == "cache", self.args.rivals, self.subject.text_config.vocab_size
        few = make_prompt([max(1, n * 256 // max(256, *prompt.lengths)) for n in prompt.lengths], vocab, self.device)

        for name in (name for name in RIVALS if name in wanted and name not in (STATIC, OURS, ROOMY)):
            if self.no_time(row, name, LEAST):
                continue
            rival = self.add(row, name, prompt)
            if rival.failed:
                continue
            with self.guard(rival):
                rival.report["warmup_s"] = run(rival.model, few, 4).wall_s  # compiles kernels, loads libraries
                self.prepare(rival, "dynamic")
            self.results.save()
        for rival in self.rivals:
            if resume and rival.failed and rival.model is not None and "dynamic" in self.caches:
                # Its steps can still be timed, from the cache of another rival.
                rival.failed, rival.new = False, FEW
                rival.report["prompt_error"] = rival.report.pop("error")
        if not resume:
            self.caches.clear()

        if prompts := {name: prompt for name in (OURS, ROOMY) if name in wanted}:
            if row["padded"] and OURS in wanted:
                even = [sum(prompt.lengths) // len(prompt.lengths)] * len(prompt.lengths)
                prompts[UNPADDED] = make_prompt(even, vocab, self.device)
            for name, its in prompts.items():
                if not self.no_time(row, name, LEAST):
                    self.prepare_ours(self.add(row, name, its), prompt)
                if not resume:
                    self.caches.clear()  # returns to the pool of the patch, for the next call
                self.results.save()

        # Last: if memory is short, this one must be the one that does not fit.
        if STATIC in wanted and row["case"] in self.args.compile_cases:
            if not self.no_time(row, STATIC, COMPILE_SECONDS):
                static = self.add(row, STATIC, prompt)
                with self.guard(static):
                    self.prepare_static(static, resume)
                self.results.save()
        elif STATIC in wanted:
            row["rivals"][STATIC] = None
            self.note(row, f"{STATIC} not run: not among --compile-cases")
        self.time_rivals(row, resume)
        if resume and self.args.first_tokens:
            self.caches.clear()
            for rival in self.rivals:
                rival.cache = None
            free(self.device)
            self.time_first_tokens(row)

    def prepare(self, rival: Rival, key: str) -> None:
        """The first calls: their times, and their cache in caches[key]."""
        report, new = rival.report, rival.new if rival.patch else min(rival.new, FEW)
        captures: list[float] = []
        # The report has why steps run uncaptured.
        with self.peak(report), timed_captures(captures), warnings.catch_warnings(action="ignore"):
            last = rival.first = run(rival.model, rival.prompt, new, rival.empty_cache(), keep=True, **rival.options)
            report |= {"first_call_s": last.wall_s, "first_call_new_tokens": new, "prefills": 1}
            if 1.0 < last.first_token_s < 6.0:  # again, with everything compiled and loaded
                last.cache = None
                last = run(rival.model, rival.prompt, new, rival.empty_cache(), keep=True, **rival.options)
                report["prefills"] = 2
        report["ttft_ms"] = 1e3 * last.first_token_s
        if rival.patch is not None:
            report |= {"capture_s": captures, "reasons": list(rival.patch.reasons)}
        elif last.ms > 100:
            rival.new = min(rival.new, max(FEW, int(4000 / last.ms)))
        self.caches[key], last.cache, rival.first.cache = last.cache, None, None
        self.results.say(f"  {rival.name}: first token {report['ttft_ms']:.0f} ms, then {last.ms:.2f} ms a token")

    def prepare_static(self, rival: Rival, resume: bool) -> None:
        """Warm up Transformers' compiled static cache until no step compiles."""
        report, walls, cache = rival.report, [], None
        with self.peak(report):
            while len(walls) < 4:
                last = run(rival.model, rival.prompt, rival.new, rewind(cache, rival.prompt), keep=resume, **rival.options)
                walls.append(last.wall_s)
                if rival.first is None:
                    rival.first = last
                if resume and cache is None:  # from now on the cache has the prompt, whose time is not warm-up
                    cache, walls[0], rival.options = last.cache, last.wall_s - last.first_token_s, {}
                if len(walls) > 1 and last.slowest_ms < 1000:
                    break
        rival.first.cache = last.cache = None
        if resume:
            self.caches[STATIC] = cache
        report |= {
            "compiled": hasattr(rival.model, "_compiled_call"),
            "warmup_s": sum(walls) - len(walls) * min(walls),
            "first_call_s": rival.first.wall_s,
            "ttft_ms": 1e3 * (rival.first if resume else last).first_token_s,
        }
        for peer in self.rivals:
            if peer is not rival and peer.first is not None:
                report[f"against_{peer.name}"] = compare(rival.first, peer.first)
        self.results.say(f"  {rival.name}: {report['warmup_s']:.1f} s of warm-up, then {last.ms:.2f} ms a token")

    def prepare_ours(self, rival: Rival, prompt: Prompt) -> None:
        """The first calls, and whether captured and uncaptured steps agree."""
        if rival.failed:
            return
        with self.guard(rival):
            self.prepare(rival, rival.name)
            checked = rival.report["check"] = check(rival, self.caches[rival.name], self.model)
            for peer in self.rivals:
                if peer.patch is None and peer.first is not None and rival.prompt is prompt:
                    checked[f"against_{peer.name}"] = compare(rival.first, peer.first)
            self.results.say(f"  {rival.name}: {checked['steps_replayed']} steps replayed, {checked['against_uncaptured']}")
            if not checked["passed"]:
                raise RuntimeError(f"Its logits differ from those of uncaptured steps: {checked}. It is not timed.")

    @contextmanager
    def peak(self, report: dict) -> Iterator[None]:
        """Record the peak memory inside, of this rival alone: weights, cache and temporary tensors."""
        free(self.device)
        if not self.cuda:
            yield
            return
        base = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        peak = torch.cuda.max_memory_allocated(self.device) - base + self.subject.facts.weight_bytes
        report["peak_gib"] = peak / 2**30

    # ---- timing ----

    def time_rivals(self, row: dict, resume: bool) -> None:
        """Repeats, in which the rivals alternate and each goes first; saves after each repeat."""
        free(self.device)
        if not resume:
            self.capture_prompts()
        before = {rival.name: rival.patch.captures for rival in self.rivals if rival.patch is not None}
        for repeat in range(self.args.repeats):
            for rival in self.rivals if repeat % 2 == 0 else self.rivals[::-1]:
                if rival.failed or (self.cuda and self.results.left() < 5):
                    continue
                with self.guard(rival), warnings.catch_warnings(action="ignore"):
                    cache = None if resume else rival.empty_cache()
                    if resume:
                        cache = rewind(
                            self.caches[rival.name if rival.patch or rival.name == STATIC else "dynamic"], rival.prompt
                        )
                    rival.runs.append(run(rival.model, rival.prompt, rival.new, cache, **rival.options))
                    if self.cuda and rival.patch is not None and (ms := replay_ms(rival.patch)):
                        rival.replays.append(ms)
            self.summarize(row, before)
            self.results.save()
        for rival in self.rivals:
            if not rival.failed and len(rival.runs) < self.args.repeats:
                self.note(row, f"{rival.name}: {len(rival.runs)} repeats, then the time was spent")

    def capture_prompts(self) -> None:
        """Let the rivals capture prompts that graphs read, before they are timed."""
        for rival in self.rivals:
            if rival.failed or rival.patch is None or rival.prompt.ids.numel() > policy.SIZES[-1]:
                continue
            with self.guard(rival):
                for _ in range(3):
                    run(rival.model, rival.prompt, 1, rival.empty_cache(), **rival.options)

    def time_first_tokens(self, row: dict) -> None:
        """Process the prompts again, alternately, if the repeats did not process them."""
        rivals = [rival for rival in self.rivals if not rival.failed and rival.name in (SDPA, LEAN, OURS)]
        times: dict[str, list[float]] = {rival.name: [] for rival in rivals}
        for _ in range(self.args.first_tokens):
            for rival in rivals:
                with self.guard(rival):
                    if not rival.failed and (not self.cuda or self.results.left() > 30):
                        times[rival.name].append(1e3 * run(rival.model, rival.prompt, 1).first_token_s)
        for name, ms in times.items():
            if ms:
                row["rivals"][name] |= {"ttft_ms": statistics.median(ms), "all_ttft_ms": ms}
        self.compare_first_tokens(row)
        self.results.save()

    @staticmethod
    def compare_first_tokens(row: dict) -> None:
        reports = [row["rivals"].get(name) or {} for name in (OURS, SDPA)]
        ours, theirs = (report.get("ttft_ms") for report in reports)
        one_run = len({report.get("run") for report in reports}) == 1
        row["ttft_over_sdpa"] = ours / theirs if ours and theirs and one_run else None

    def summarize(self, row: dict, captures_before: dict[str, int]) -> None:
        """Medians of the repeats so far, and the time of each rival divided by that of patch()."""
        for rival in (rival for rival in self.rivals if rival.runs):
            times, report = [run.ms for run in rival.runs], rival.report
            report |= {"ms": statistics.median(times), "all_ms": times, "new_tokens": rival.new}
            report["tokens_per_s"] = 1e3 * row["rows"] / report["ms"] if report["ms"] else None
            report["slowest_step_ms"] = max(run.slowest_ms for run in rival.runs)
            report["wall_s"] = statistics.median(run.wall_s for run in rival.runs)
            if row["repeats_from"] == "prompt":
                report["ttft_ms"] = 1e3 * statistics.median(run.first_token_s for run in rival.runs)
            if rival.patch is not None:
                report["captures_while_timing"] = rival.patch.captures - captures_before[rival.name]
                report["steps"] = {"replayed": rival.patch.replays, "uncaptured": rival.patch.uncaptured}
                report["reasons"] = list(rival.patch.reasons)
                report["replay_ms"] = statistics.median(rival.replays) if rival.replays else None
                report["host_ms"] = report["ms"] - report["replay_ms"] if rival.replays else None
        timed = {name: report for name, report in row["rivals"].items() if report and "ms" in report}
        if OURS in timed:
            ours = timed[OURS]
            of_its_run = lambda report: report.get("run") == ours.get("run")  # noqa: E731
            row["ratios"] = {
                name: report["ms"] / ours["ms"] for name, report in timed.items() if name != OURS and of_its_run(report)
            }
            stock = [report for name, report in timed.items() if name not in (LEAN, OURS, UNPADDED, ROOMY)]
            best = min(stock, key=lambda report: report["ms"], default=None)
            row["ratios"]["best_stock"] = best["ms"] / ours["ms"] if best and of_its_run(best) else None
            self.compare_first_tokens(row)
            row["tb_per_s"] = step_bytes(self.subject.facts, row["lengths"]) / ours["ms"] / 1e9
