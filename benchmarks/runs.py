"""One generate() call: its time, its cache, its graph, and whether its tokens are correct."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from hf_fastattn import hf
from hf_fastattn.caches.stored import StoredCache
from hf_fastattn.patches import Patch, patch
from hf_fastattn.patches.graphs import graphs as graph

SKIP = 5  # the time of a token is measured from new token SKIP + 1 on


class Clock:
    """Records, inside a `with`, the host time of each new token of generate(), of the first one after the device has finished it.
    also: called after each token.

    It uses the criterion of the length, which each generate() has. A criterion of its own would be code between the steps, which
    may change the model: patch() would compare the model in each step.
    """

    def __init__(self, device: torch.device, also: Callable[[], None] | None = None):
        self.device, self.also = device, also
        self.at: list[float] = []

    def __enter__(self):
        self.original = original = hf.MaxLengthCriteria.__call__

        def call(criterion, *args, **kwargs):
            if not self.at:
                synchronize(self.device)
            self.at.append(time.perf_counter())
            if self.also is not None:
                self.also()
            return original(criterion, *args, **kwargs)

        hf.MaxLengthCriteria.__call__ = call
        return self

    def __exit__(self, *error):
        hf.MaxLengthCriteria.__call__ = self.original


@dataclass
class Prompt:
    """ids and mask, int64 (rows, width), left-padded; lengths: live tokens of each row."""

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]


@dataclass
class Run:
    """One generate(): new tokens (rows, new), logits (new, rows, vocab) if requested, seconds, ms per token, cache if kept."""

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
    model: hf.PreTrainedModel | None
    prompt: Prompt
    new: int  # tokens of a repeat
    options: dict = field(default_factory=dict)
    patch: Patch | None = None
    cache: object = None  # a separate one, for every generate() that processes the prompt
    report: dict = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)
    first: Run | None = None
    failed: bool = False

    def empty_cache(self):
        """Its separate cache, without tokens; None if generate() creates one."""
        if self.cache is not None:
            self.cache.reset()
        return self.cache


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def twin(model, attention: str):
    """A second model with its own configuration over the same weights."""
    # bitsandbytes stores the weight of an 8-bit layer in its attribute state.
    states = [module.state for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    other = copy.deepcopy(model, {id(kept): kept for kept in (*model.parameters(), *model.buffers(), *states)})
    other.set_attn_implementation(attention)
    return other


def make_prompt(lengths: list[int], vocab_size: int, device: torch.device) -> Prompt:
    """Random tokens, left-padded to the longest row."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return Prompt(ids.where(mask, 0).to(device), mask.long().to(device), lengths)


def run(model, prompt: Prompt, new: int, cache=None, keep: bool = False, logits: bool = False, also=None, **options) -> Run:
    """generate() `new` tokens, greedily by default, with times; with a cache, after its tokens. also: as in `Clock`."""
    device = prompt.ids.device
    if cache is not None:
        options[hf.CACHE] = cache
    options.setdefault("do_sample", False)
    if keep or logits:
        options |= {"return_dict_in_generate": True, "output_logits": logits}
    synchronize(device)
    began = time.perf_counter()
    with Clock(device, also) as clock:
        out = model.generate(prompt.ids, attention_mask=prompt.mask, max_new_tokens=new, min_new_tokens=new, **options)
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
        cache=hf.cache_in(out) if keep else None,
    )


def has_states(cache) -> bool:
    """Whether a cache of hf_fastattn has recurrent states, from which no token can be removed."""
    return isinstance(cache, StoredCache) and bool(cache.storage.states())


def rewind(cache, prompt: Prompt):
    """The cache, if there is one, cropped to all tokens of the prompt except the last; empty if it has recurrent states."""
    if cache is None:
        return None
    if has_states(cache):
        cache.reset()
        return cache
    more = int(cache.get_seq_length()) - (prompt.ids.shape[1] - 1)
    if more > 0 and hasattr(cache.layers[0], "cumulative_length"):  # Transformers' static cache has no crop()
        for layer in cache.layers:
            layer.cumulative_length.sub_(more)
    elif more > 0:
        cache.crop(-more)
    return cache


def resumed(model, prompt: Prompt, tokens: int) -> tuple[Run, Callable[[], Run]]:
    """The first call, which reads the prompt and keeps its cache, and a function that generates so many tokens from that cache.

    If the cache has recurrent states, each call reads the prompt into a cache of its own. The function has run once: under
    patch() this captures the decode step.
    """
    first = run(model, prompt, 8, keep=True)

    def again() -> Run:
        return run(model, prompt, tokens, None if has_states(first.cache) else rewind(first.cache, prompt))

    again()
    return first, again


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
        upto = different[0] + 1 if different else steps  # after it the rows have different tokens
        difference = (ours.logits[:upto].float() - theirs.logits[:upto].float()).abs().max()
        found["largest_logit_difference"] = difference.item()
    return found


def uncaptured_of(model, backend: str):
    """A model over the same weights whose steps a backend computes without graphs and fused launches."""
    other = twin(model, backend)
    if hf.own_attention(other):  # whose code does not read attn_implementation
        patch(other, backend, graph=False, fuse=False)
    return other


def check(ours: Rival, cache, model) -> dict:
    """Compares captured with uncaptured steps of one backend over the same cache, and the attention of `model`, which has the
    weights, with these."""
    replayed, steps = ours.patch.replays, min(ours.new, 24)
    stock = twin(model, model.config._attn_implementation)
    few = steps if has_states(cache) else 6  # differences of a state add up
    captured, uncaptured, other = (
        run(each, ours.prompt, new, rewind(cache, ours.prompt), logits=True)
        for each, new in ((ours.model, steps), (uncaptured_of(model, ours.patch.backend), steps), (stock, few))
    )
    rewind(cache, ours.prompt)
    found = verdict(captured, uncaptured, other, ours.model.dtype)
    return found | {"steps_replayed": ours.patch.replays - replayed}


def verdict(captured: Run, uncaptured: Run, stock: Run, dtype: torch.dtype, beside: Run | None = None) -> dict:
    """Compares captured steps, and steps with stock attention, with uncaptured steps. beside: the uncaptured steps that stock
    attention is compared with, if its cache is another.

    "passed": whether the logits differ by at most twice the difference of stock attention, plus 4 eps of the largest logit, and
    that is less than the largest logit: beyond it rounding alone changes everything, and the comparison shows nothing.
    """
    found = {
        "against_uncaptured": compare(captured, uncaptured),
        "stock_against_uncaptured": compare(stock, beside or uncaptured),
    }
    largest = uncaptured.logits.abs().max().item()
    allowed = 2 * found["stock_against_uncaptured"]["largest_logit_difference"] + 4 * torch.finfo(dtype).eps * largest
    passed = found["against_uncaptured"]["largest_logit_difference"] <= allowed < largest
    return found | {"largest_logit": largest, "allowed": allowed, "passed": passed}


@contextmanager
def timed_captures(seconds: list[float]) -> Iterator[None]:
    """Inside, each capture of a decode graph appends its seconds to the list."""
    original = graph.CudaGraph.capture

    def capture(self, body):
        synchronize(self.device)
        began = time.perf_counter()
        result = original(self, body)
        synchronize(self.device)
        seconds.append(time.perf_counter() - began)
        return result

    with mock.patch.object(graph.CudaGraph, "capture", capture):
        yield


def last_graph(patched: Patch) -> graph.Entry | None:
    """The entry whose graph of a decode step was used last."""
    entries = [e for held in patched._graphs.entries.values() for e in held if e.graph is not None and e.tokens == 1]
    return max(entries, key=lambda e: e.used, default=None)


@contextmanager
def beside_generate(entry: graph.Entry) -> Iterator[int]:
    """Inside, the entry's graph may be replayed at most so many times; the next generate() resets its cache and counts."""
    storage = entry.storage()
    storage.sync(entry.device)
    mark = storage.mark()
    yield min(track.capacity - track.image[0] for track in storage.tracks)
    storage.rewind(mark)  # the replays counted tokens on the device


def replay_ms(patched: Patch) -> float | None:
    """Milliseconds of one replay of the last used graph, by events around several replays; None if there is none."""
    entry = last_graph(patched)
    if entry is None:
        return None
    with beside_generate(entry) as room:
        count = max(1, min(10, room))
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            entry.graph.replay()
        stop.record()
        stop.synchronize()
    return start.elapsed_time(stop) / count


def step_kernels(patched: Patch) -> list[dict] | None:
    """The kernels of one replay of the last used graph, the longest first: name, launches, total microseconds."""
    entry = last_graph(patched)
    if entry is None:
        return None
    with beside_generate(entry), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        entry.graph.replay()
        synchronize(entry.device)
    kernels = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return [{"kernel": e.key, "launches": e.count, "us": e.self_device_time_total} for e in kernels if e.self_device_time_total]


def step_times(patched: Patch, again: Callable[[], Run], repeats: int, *, profiled: bool = True) -> dict:
    """Times of a captured step, as fields of a row. again: a generate() that replays it, from the same cache each time.

    "ms" of a token is the median, "all_ms" are all. On a GPU "replay_ms" is the median time of the replay, and, if profiled,
    "launches" and "kernels" are those of one replay, the longest kernels first.
    """
    runs, replays = [], []
    for _ in range(repeats):
        found = again()
        runs.append(found.ms)
        if found.tokens.is_cuda:
            replays.append(replay_ms(patched))
    row = {"ms": sorted(runs)[repeats // 2], "all_ms": runs, "reasons": list(patched.reasons)}
    if replays and replays[0] is not None:
        row["replay_ms"] = sorted(replays)[repeats // 2]
        if profiled:
            kernels = step_kernels(patched)
            row |= {"launches": sum(kernel["launches"] for kernel in kernels), "kernels": kernels[:12]}
    return row
