"""hf-fastattn generate."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .commands import Backend, CacheName, Device, DtypeOption, GgufFile, KvDtype, Model, Sinks, Traceback, Window

if TYPE_CHECKING:
    import torch

    from hf_fastattn import hf

CACHE = "preallocated: that of patch(), with a decode graph; dynamic: Transformers' cache"


def generate(
    model: Model,
    gguf_file: GgufFile = None,
    dtype: DtypeOption = None,
    device: Device = None,
    prompt: Annotated[str, Option(help='"-" reads it from standard input')] = "Attention is",
    chat: Annotated[bool, Option("--chat", help="put the prompt into the model's chat template")] = False,
    tokens: Annotated[int, Option(help="most new tokens")] = 64,
    backend: Backend = "lean",
    compare: Annotated[
        str | None, Option(metavar="BACKEND", help="also generate with this backend, e.g. sdpa, and compare the tokens")
    ] = None,
    cache: Annotated[CacheName, Option(help=CACHE)] = CacheName.preallocated,
    window: Window = None,
    sinks: Sinks = None,
    kv_dtype: KvDtype = None,
    traceback: Traceback = False,
) -> int:
    import torch

    from hf_fastattn import count_calls, registry
    from hf_fastattn.evaluation import check_names, load, running
    from hf_fastattn.report.tables import table

    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1; got {tokens}.")
    chosen = list(dict.fromkeys([backend, compare or backend]))
    check_names(chosen)
    streams = [name for name in chosen if name in registry.names() and registry.get(name).streaming]
    if streams and window is None:
        raise ValueError(f"{streams[0]!r} needs --window, the number of last tokens to keep, for example 4096.")
    if not streams and (window is not None or sinks is not None):
        raise ValueError(f"--window and --sinks are for streaming backends, and {chosen[0]!r} is not one.")
    eight = [name for name in chosen if kv_dtype and name in registry.names() and registry.get(name).reads_eight_bits]
    if kv_dtype is not None and (backend not in eight or cache != CacheName.preallocated):
        raise ValueError(
            f"--kv-dtype needs --cache preallocated and a backend whose kernels read 8 bits, as lean; got {cache} and {backend}."
        )
    ranks = int(os.environ["WORLD_SIZE"]) if torch.distributed.is_torchelastic_launched() else 1
    if ranks > 1 and (device is not None or prompt == "-"):
        raise ValueError(
            "Under torchrun each process uses the GPU of its rank, and all need the prompt: no --device, no --prompt -."
        )
    prompt = _text(prompt)
    loaded, tokenizer = load(model, None, gguf_file, dtype, device, ranks)
    inputs = _encode(tokenizer, prompt, chat, loaded.device)
    rows, texts = [], []
    for each in chosen:
        with running(loaded, each, kv_dtype if kv_dtype and each in eight else cache, window=window, sinks=sinks) as patched:
            _generate(loaded, inputs, min(tokens, 4))  # compiles kernels
            replayed = -getattr(patched, "replays", 0)
            with count_calls() as calls:
                new, times = _generate(loaded, inputs, tokens)
            replayed += getattr(patched, "replays", 0)
        texts.append(new)
        ran = [f"{name} {count}" for name, count in sorted(calls.items(), reverse=True)]
        ran += [f"{replayed} graph replays"] if replayed else []
        same = next((i for i, (a, b) in enumerate(zip(new, texts[0], strict=False)) if a != b), min(len(new), len(texts[0])))
        equal = "-" if each == backend else "all" if new == texts[0] else f"first {same}"
        gaps = [b - a for a, b in itertools.pairwise(times[1:])]
        ms = f"{1e3 * statistics.median(gaps):.1f}" if gaps else None
        to_first = f"{1e3 * (times[1] - times[0]):.0f}"
        rows.append([each, len(new), to_first, ms, equal, ", ".join(ran) or "Transformers' own"])
    code = 0 if all(text == texts[0] for text in texts) else 1
    if ranks > 1:
        first = torch.distributed.get_rank() == 0
        torch.distributed.destroy_process_group()
        if not first:
            return code
    print(str(tokenizer.decode(texts[0], skip_special_tokens=True)).strip() + "\n")
    print(table(["backend", "tokens", "first token, ms", "ms a token", "same tokens", "calls counted"], rows))
    if loaded.device.type == "cpu":
        print("\nNo GPU is used: Triton backends run their reference in plain torch, with the same tokens, but not the speed.")
    return code


def _text(prompt: str) -> str:
    """The prompt, or standard input for "-"."""
    where = "standard input" if prompt == "-" else "--prompt"
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # fails for bytes that Python decoded as surrogates
    except UnicodeError as error:
        raise ValueError(f"The prompt, from {where}, is not UTF-8 text: {error}.") from error
    return text


def _encode(tokenizer: hf.PreTrainedTokenizerBase, prompt: str, chat: bool, device: torch.device) -> Mapping[str, torch.Tensor]:
    if not chat:
        inputs = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template is None:
        raise ValueError("This model has no chat template; leave out --chat.")
    else:
        said = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if not inputs["input_ids"].numel():
        raise ValueError("The prompt is empty; pass one with --prompt.")
    on_device: Mapping[str, torch.Tensor] = inputs.to(device)
    return on_device


def _generate(model: hf.PreTrainedModel, inputs: Mapping[str, torch.Tensor], tokens: int) -> tuple[list[int], list[float]]:
    """(new tokens, times of the prompt and of each token) of one greedy run."""
    times: list[float] = []
    clock = SimpleNamespace(put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)  # a streamer
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=clock)  # type: ignore[operator]
    return out[0, inputs["input_ids"].shape[1] :].tolist(), times
