"""What K and V in 8 bits take: decode calls of attention, and tokens of generate() with their memory, beside 16 bits.

    python -m benchmarks.kv_dtype_speed
    python -m benchmarks.kv_dtype_speed --only 1x65536,8x32768

A case is a decode call of attention, named by its K and V in 16 bits, or a generate() of ROWSxTOKENS. Calls of all formats are
replays of CUDA graphs in one run, each checked against fp64 attention over the values that it stores. generate() continues from
caches that are filled with noise. Its captured steps are compared with uncaptured ones over the same cache. "peak_bytes" is the
most memory that torch has allocated in steps. Beside them runs stock generate() with sdpa, a DynamicCache and each QuantizedCache
of Transformers that is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from transformers.cache_utils import DynamicLayer

from hf_fastattn import hf
from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.caches.layers import AT_ONCE
from hf_fastattn.kernels import TritonKernel, eight_bits
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.spec import KV, Spec
from hf_fastattn.patches import patch

from . import families, timing
from .kv_dtype import OWN, STOCK, formats
from .models import Subject
from .results import Results, command
from .runs import Rival, check, free, last_graph, make_prompt, rewind, run, step_times, twin
from .shapes import DTYPE, READ, Shape, WrongResult, make_inputs

METHOD = f"calls: {timing.METHOD}; generate(): greedy, 6th new token to last, replays by events around ten, medians"
KINDS = (None, *OWN)
TOKENS, REPEATS, STOCK_TOKENS = 24, 3, 10

CALLS = {
    "call 256 MiB": Shape(8, 32, 8, 128, 8 << 10),
    "call 1 GiB": Shape(8, 32, 8, 128, 32 << 10),
    "call 4 GiB": Shape(32, 32, 8, 128, 32 << 10),
    "call 1 GiB MQA": Shape(32, 32, 1, 128, 64 << 10),
    "call 1 GiB head_dim 64": Shape(16, 32, 8, 64, 32 << 10),
    "call 1 GiB head_dim 256": Shape(8, 32, 8, 256, 16 << 10),
    "call 1x262144": Shape(1, 32, 4, 128, 256 << 10),
    "tiny call": Shape(2, 4, 2, 32, 70),
}
# name: rows, tokens
GENERATE = {"8x32768": (8, 32768), "1x65536": (1, 65536), "tiny": (2, 40)}
CASES = (*CALLS, *GENERATE)


def stored(k: torch.Tensor, v: torch.Tensor, kv_dtype: str | None) -> KV:
    """K and V (batch, num_kv_heads, kv_len, head_dim) in this format."""
    if kv_dtype is None:
        return KV(k, v)
    kv = eight_bits.eight_bits(*eight_bits.empty(k, v), k.mean(2, dtype=torch.float32).to(k.dtype), kv_dtype)
    for begin in range(0, k.shape[2], AT_ONCE):
        slot = torch.full((1,), begin, device=k.device)
        append(kv, k[:, :, begin : begin + AT_ONCE], v[:, :, begin : begin + AT_ONCE], slot)
    return kv


def exact(q: torch.Tensor, kv: KV, row: int) -> torch.Tensor:
    """fp64 attention of one row over what it stores, (num_heads, 1, head_dim)."""
    its = KV(*(x if x is None or isinstance(x, type(kv.form)) else x[row : row + 1] for x in kv))
    k, v = (x.double()[0].repeat_interleave(q.shape[1] // x.shape[1], 0) for x in eight_bits.widened(its, torch.float32).plain())
    scores = q[row].double() @ k.mT * q.shape[3] ** -0.5
    return scores.softmax(-1) @ v


def call_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds of a decode call over each format. Raises WrongResult if one differs from fp64 by more than 4 units of
    rounding of the largest value."""
    sets = timing.num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    calls, lean, runs, errors = timing.num_calls(sets, shape.kv_bytes / READ), TritonKernel("lean"), {}, {}
    for kv_dtype in KINDS:
        held = [stored(k, v, kv_dtype) for _, k, v in inputs]

        def call(i: int, held=held) -> torch.Tensor:
            return lean(inputs[i][0], held[i], Spec())

        name = kv_dtype or "16 bits"
        found = call(0)
        for row in {0, shape.batch - 1}:
            expected = exact(inputs[0][0], held[0], row)
            error, allowed = (found[row].double() - expected).abs().max(), 4 * torch.finfo(DTYPE).eps * expected.abs().max()
            if not error <= allowed:  # also for NaN
                raise WrongResult(f"{name} of {shape} is wrong: error {float(error):.2e}, allowed {float(allowed):.2e}.")
            errors[name] = max(errors.get(name, 0.0), float(error))
        runs[name] = timing.record(call, sets, calls, device)
    found = timing.medians(timing.time_rivals(runs, calls, device))
    us = found["us"]
    bits = {"16 bits": shape.kv_bytes} | {name: shape.kv_bytes // 2 + shape.kv_bytes // shape.dims * 2 for name in OWN}
    row = shape.row() | found | {"largest_error": errors, "tb_per_s": {name: bits[name] / us[name] / 1e6 for name in us}}
    return row | {"over_16_bits": {name: us["16 bits"] / us[name] for name in OWN}}


def fill(cache: hf.Cache, subject: Subject, rows: int, tokens: int) -> hf.Cache:
    """The cache with so many tokens of noise in each row."""
    device, dtype = subject.model.device, subject.model.dtype
    torch.manual_seed(0)
    for index, shape in enumerate(subject.facts.shapes):
        k, v = (
            torch.randn(rows, shape.num_kv_heads, tokens, width, device=device, dtype=dtype)
            for width in (shape.head_dim, shape.value_dim)
        )
        cache.layers[index].update(k, v)
    return cache


def peak(device: torch.device, function: Callable[[], object]) -> int | None:
    """The most bytes that torch has allocated while it runs; None on the CPU."""
    if device.type != "cuda":
        function()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return torch.cuda.max_memory_allocated(device)


def ours(subject: Subject, rows: int, tokens: int, kv_dtype: str | None, device: torch.device) -> dict:
    """Milliseconds of a token, of a replay, and the memory of steps, with K and V in this format."""
    prompt = make_prompt([tokens] * rows, subject.text_config.vocab_size, device)
    model = twin(subject.model, "sdpa")
    with patch(model, "lean", kv_dtype=kv_dtype) as patched:
        cache = fill(PreallocatedCache(model, tokens + 64, kv_dtype=kv_dtype), subject, rows, tokens - 1)

        def again():
            return run(model, prompt, TOKENS, rewind(cache, prompt))

        again()
        verdict = check(Rival("patched", model, prompt, TOKENS, patch=patched), cache, subject.model)
        if not verdict["passed"]:
            raise WrongResult(f"captured steps with kv_dtype={kv_dtype} differ from uncaptured ones: {verdict}")
        free(device)
        bytes_ = peak(device, again)
        held = sum(part.tensor.nbytes for part in cache.storage.memory())
        row = {"check": verdict, "peak_bytes": bytes_, "cache_bytes": held, "captured": last_graph(patched) is not None}
        return row | step_times(patched, again, REPEATS, profiled=False)


def stock(subject: Subject, rows: int, tokens: int, make: Callable[[int], hf.Cache], device: torch.device) -> dict:
    """The same of stock generate() with this cache."""
    prompt = make_prompt([tokens] * rows, subject.text_config.vocab_size, device)
    model, found = twin(subject.model, "sdpa"), {}

    def once():
        cache = fill(make(tokens), subject, rows, tokens - 1)
        free(device)
        found["peak_bytes"] = peak(device, lambda: found.update(ms=run(model, prompt, STOCK_TOKENS, cache).ms))

    once()  # the first call in a process is several times slower
    once()
    return found


def generate_row(subject: Subject, rows: int, tokens: int, device: torch.device) -> dict:
    row: dict = {"rows": rows, "tokens": tokens, "failed": {}}
    made, row["missing"] = formats(subject.model, tuple(STOCK))
    rivals = {kv_dtype or "16 bits": partial(ours, subject, rows, tokens, kv_dtype, device) for kv_dtype in KINDS}
    caches = {"DynamicCache": lambda tokens: hf.Cache(layers=[DynamicLayer() for _ in subject.facts.shapes])}
    caches |= {name: made[name] for name in STOCK if name in made}
    rivals |= {name: partial(stock, subject, rows, tokens, make, device) for name, make in caches.items()}
    for name, measure in rivals.items():
        try:
            row[name] = measure()
        except Exception as error:  # the other rivals are still useful
            if name in ("16 bits", *OWN):
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
        free(device)
    return row


def measure(subject: Subject, case: str, device: torch.device) -> dict:
    """The row of one case."""
    with torch.inference_mode():
        found = call_row(CALLS[case], device) if case in CALLS else generate_row(subject, *GENERATE[case], device)
    return {"case": case, **found}


def add(results: Results, row: dict) -> None:
    results.data["rows"].append(row | {"run": results.run})
    if "us" in row:
        said = [f"{name} {us:.1f} us ({row['tb_per_s'][name]:.2f} TB/s)" for name, us in row["us"].items()]
    else:
        timed = {name: its for name, its in row.items() if isinstance(its, dict) and "ms" in its}
        said = [f"{name} {its['ms']:.2f} ms, {(its['peak_bytes'] or 0) / 2**30:.1f} GiB" for name, its in timed.items()]
        said += [f"no {name}: {why}" for name, why in (row["missing"] | row["failed"]).items()]
    results.say("; ".join([row["case"], *said]))
    results.save()


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.kv_dtype_speed") -> int:
    """Measure the chosen cases. Returns 0, or 1 if there was no time for one."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = families.read_cases(parser, argv, CASES, reserve=20, seconds=240)
    head = {"method": METHOD, "unit": "us a call, ms a token"}
    name = "kv_dtype_speed" if args.shape == "8b" else f"kv_dtype_speed_{args.shape}"
    return families.run_cases(parser, args, name, command(prog, argv), head, families.each(args, measure, add))


if __name__ == "__main__":
    raise SystemExit(main())
