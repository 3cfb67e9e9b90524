"""The rivals of benchmarks/ranks.py: how each is checked and timed."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hf_fastattn import hf
from hf_fastattn.patches import Patch, patch

from .ranks_group import Group
from .runs import SKIP, Prompt, Run, free, resumed, rewind, run, step_times, verdict

OURS = {  # rivals that patch the shared model: arguments of patch()
    "patch": {},
    "collectives": {"peer_memory": False},
    "sequence": {"kv_sharding": "sequence"},
}
NAMES = {  # of the rivals, in words
    "patch": "`patch()`",
    "collectives": "`patch(peer_memory=False)`",
    "sequence": '`patch(kv_sharding="sequence")`',
    "sdpa": "stock `generate()`",
    "static": "stock, static cache, compiled",
    "batch": "stock `generate_batch()`",
    "one_patch": "one GPU, `patch()`",
    "one_sdpa": "one GPU, stock `generate()`",
    "device_map": "`device_map`, stock `generate()`",
}
# The models in the order of their rivals. Rivals of one tuple alternate, case by case. Those that have ended or stopped a process
# group are the last.
MODELS = (
    ("shared", ("patch", "collectives", "sequence", "sdpa")),
    ("one", ("one_patch", "one_sdpa")),
    ("device_map", ("device_map",)),
    ("shared", ("batch",)),
    ("shared", ("static",)),
)
SHARED = [name for kind, names in MODELS if kind == "shared" for name in names]
NO_TIME = "there was no time left"
# A batch of up to OFTEN tokens is read CALLS times before its first token is timed: patch() captures a short prompt in the third
# call.
CALLS, OFTEN = 3, 100_000
MORE = {"static": 60.0}  # seconds that compilation takes


def fills(lengths: list[int], args: argparse.Namespace) -> bool:
    """Whether prompts of these lengths are too long to read."""
    return max(lengths) > args.fill


def why_not(name: str, lengths: list[int], args: argparse.Namespace) -> str | None:
    """Why a rival cannot run a case; None if it can."""
    filled = fills(lengths, args) and name not in (*OURS, "one_patch")
    return "it reads the prompt, for which there is no time" if filled else None


@contextmanager
def set_up(name: str, model: hf.PreTrainedModel, **options) -> Iterator[Patch | None]:
    """The model as a rival needs it. options: further arguments of patch()."""
    if name in OURS or name == "one_patch":
        with patch(model, **{"backend": "lean", **OURS.get(name, {}), **options}) as patched:
            yield patched
        return
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield None
    finally:
        model.set_attn_implementation(before)


def filled(model: hf.PreTrainedModel, prompt: Prompt) -> object:
    """A cache of the patched model with random K and V for all tokens of the prompt, the same in each call."""
    few = Prompt(prompt.ids[:, -64:], prompt.mask[:, -64:], [min(64, n) for n in prompt.lengths])
    cache = run(model, few, 2, keep=True).cache
    cache.reset()
    cache.reserve(prompt.ids.shape[1] + 128)
    copies, whole = hf.heads_of_ranks(model)
    ranks = 1 if whole else hf.num_ranks(model)
    rows, tokens = prompt.ids.shape
    options = {"dtype": model.dtype, "device": model.device, "generator": torch.Generator(model.device).manual_seed(7)}
    for index, shape in enumerate(hf.layer_shapes(model.config)):
        heads = shape.num_kv_heads * copies // ranks  # of this rank
        k, v = (torch.randn(rows, heads, tokens, width, **options) for width in (shape.head_dim, shape.value_dim))
        cache.update(k, v, index)  # at once: an empty cache only stores them
    return cache


def start(
    model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, tokens: int
) -> tuple[Run | None, Callable[[], Run]]:
    """As `resumed`, with a filled cache for a long prompt, and then without a first call."""
    if not fills(prompt.lengths, args):
        return resumed(model, prompt, tokens)
    cache = filled(model, prompt)

    def again() -> Run:
        return run(model, prompt, tokens, rewind(cache, prompt))

    again()
    return None, again


def measure(name: str, model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, group: Group) -> dict:
    """The times of one rival."""
    if name == "batch":
        return measure_batch(model, prompt, args, group)
    if name == "static":
        return measure_static(model, prompt, args, group)
    with set_up(name, model) as patched:
        calls = CALLS if prompt.ids.numel() <= OFTEN else 0
        before = [1e3 * run(model, prompt, 8).first_token_s for _ in range(calls)]
        first, again = start(model, prompt, args, args.stock_tokens if patched is None else args.tokens)
        row = {} if first is None else {"first_token_ms": 1e3 * first.first_token_s, "calls_before": calls, "earlier_ms": before}
        if patched is None:
            ms = again().ms
            row |= {"ms": ms, "all_ms": [ms]}
        else:
            row |= step_times(patched, again, args.repeats) | {"captures": patched.captures}
            row["changes"] = [str(change) for change in patched.changes if "all ranks" in str(change)]
    if name == "device_map" and (where := getattr(model, "hf_device_map", None)):
        row["devices"] = sorted({str(device) for device in where.values()})
    return row


def measure_static(model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, group: Group) -> dict:
    """Transformers' static cache with its compiled decode step: calls until no rank compiles."""
    cache, calls, options = None, [], {"cache_implementation": "static"}
    with set_up("static", model):
        try:
            while len(calls) < 4:
                calls.append(run(model, prompt, args.stock_tokens, rewind(cache, prompt), keep=True, **options))
                cache, options = calls[-1].cache, {}
                if max(group.gather(calls[-1].slowest_ms)) < 1000 and len(calls) > 1:  # all ranks make as many calls
                    break
            compiled = hasattr(model, "_compiled_call")
        finally:
            vars(model).pop("_compiled_call", None)
            torch.compiler.reset()
    first, last = calls[0], calls[-1]
    return {
        "first_token_ms": 1e3 * first.first_token_s,
        "ms": last.ms,
        "all_ms": [each.ms for each in calls],
        "compiled": compiled,
    }


def measure_batch(model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, group: Group) -> dict:
    """Transformers' continuous batching: the median time between two tokens of a row, from where all rows have 6 new tokens.

    Prompts are read in parts, between tokens of the rows that have begun, which therefore generate more.
    """
    parts = len(prompt.ids) > 1 and sum(prompt.lengths) // 2048
    config = hf.GenerationConfig(max_new_tokens=SKIP + args.tokens + parts, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(prompt.ids, prompt.mask, strict=True)]
    before = model.config._attn_implementation
    sizes = {}
    if model.device.type != "cuda":  # the default sizes are of free memory, which on a CPU other processes share
        blocks = sum(1 + (n + config.max_new_tokens) // 256 for n in prompt.lengths)
        sizes = {"max_batch_tokens": max(256, sum(prompt.lengths)), "num_blocks": blocks}
    settings = hf.ContinuousBatchingConfig(cpu_group_timeout=60.0, **sizes)
    options = {"generation_config": config, "continuous_batching_config": settings, "record_timestamps": True}
    try:
        found = model.generate_batch(rows, **options).values()
    finally:
        model.set_attn_implementation(before)
    if not group.first:
        return {}
    if error := next((each.error for each in found if each.error), None):
        raise RuntimeError(error)
    times = [each.timestamps or [] for each in found]
    if len(times) < len(rows) or min(map(len, times)) <= SKIP + 1:
        raise RuntimeError("generate_batch() returned without all tokens.")
    begin, end = max(each[SKIP] for each in times), min(each[-1] for each in times)
    gaps = [1e3 * (b - a) for each in times for a, b in itertools.pairwise(each) if begin <= a and b <= end]
    if not gaps:
        raise RuntimeError("generate_batch() ended a row before it had read the last one.")
    return {"ms": statistics.median(gaps), "all_ms": [statistics.mean(gaps)], "gaps": len(gaps)}


def check(name: str, model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, group: Group) -> dict:
    """Captured steps of a rival compared with uncaptured ones, and the tokens of all ranks with each other.

    The difference that is allowed is that of sdpa from uncaptured steps; of filled caches, over one with the heads of the ranks;
    with more ranks than KV heads, which Transformers cannot run, that of `fa2`.
    """
    long = fills(prompt.lengths, args)
    few_heads = min(shape.num_kv_heads for shape in hf.layer_shapes(model.config)) < group.size

    def steps(rival: str, tokens: int, calls: int = 1, **options) -> tuple[list[Run], int]:
        cache = None
        if long and rival == "sdpa":  # over a cache of patch()
            with set_up("patch", model, graph=False, fuse=False):
                cache = filled(model, prompt)
        with set_up(rival, model, **options) as patched:
            if long and patched is not None:
                cache = filled(model, prompt)
            found = [run(model, prompt, tokens, rewind(cache, prompt), logits=True) for _ in range(calls)]
            replays = 0 if patched is None else patched.replays
        cache = None
        free(model.device)
        return found, replays

    (*_, ours, again), replayed = steps(name, 12, calls=CALLS + 1)  # both read the prompt by the same graph, if it has one
    (uncaptured,), _ = steps(name, 12, graph=False, fuse=False)
    if few_heads:
        (stock,), _ = steps(name, 6, backend="fa2", graph=False, fuse=False)
        beside = uncaptured
    else:
        (stock,), _ = steps("sdpa", 6)
        beside = steps("patch", 6, graph=False, fuse=False)[0][0] if long else uncaptured
    tokens = group.gather(ours.tokens.tolist())
    found = verdict(ours, uncaptured, stock, model.dtype, beside)
    same = all(each == tokens[0] for each in tokens) and torch.equal(ours.tokens, again.tokens)
    return found | {"passed": found["passed"] and same, "steps_replayed": replayed}
