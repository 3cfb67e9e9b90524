"""Softmax beside softmax: naive, safe, online, and with top-k in one reading; a decode step without a cache beside one with it.

One program a row reads its scores twice (naive: the sum, the quotient), three times (safe: the maximum first) or twice (online:
maximum and sum at once); `kernels.decode.sample` reads them once for the softmax of the top-k and a draw. Without a cache a layer
projects and attends with all tokens for each new one. Source: Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018), algorithms 1 to 4, and section 5 for the sizes.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from functools import partial

import torch

from hf_fastattn.kernels import INTERPRETED, KV
from hf_fastattn.kernels.decode import sample
from hf_fastattn.registry import get

from . import shapes
from .results import Results, add_options, command, conditions, find_device, listed, need_gpu, progress
from .timing import METHOD, elapsed_us, medians, num_calls, num_sets, record, time_rivals

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SIZES = {"batches": "10,4000", "vocab": "10,100,1000,10000,32000,100000,128256", "lengths": "1024,4096,16384"}
KINDS, TOP_K, BLOCK = ("naive", "safe", "online"), 5, 4096
Rivals = dict[str, tuple[Callable, Callable, torch.Tensor]]
SAME = lambda found: found  # noqa: E731 (of a rival: its call, what of the result is compared, the exact value)

triton, tl = sample.triton, getattr(sample, "tl", None)

if triton is not None:

    @triton.jit
    def softmax_kernel(X, Out, vocab, KIND: tl.constexpr, BLOCK: tl.constexpr):
        """Out = softmax of X, fp32 (rows, vocab), contiguous; a program for each row. KIND: an index of KINDS."""
        row, offs = tl.program_id(0).to(tl.int64) * vocab, tl.arange(0, BLOCK)
        X, Out = X + row, Out + row
        top, total = tl.full([BLOCK], -3e38, tl.float32), tl.zeros([BLOCK], tl.float32)
        if KIND == 1:
            for start in range(0, vocab, BLOCK):
                top = tl.maximum(top, tl.load(X + start + offs, mask=start + offs < vocab, other=float("-inf")))
        maximum = 0.0 if KIND == 0 else tl.max(top)
        for start in range(0, vocab, BLOCK):
            x = tl.load(X + start + offs, mask=start + offs < vocab, other=float("-inf"))
            if KIND == 2:
                before = top
                top = tl.maximum(top, x)
                total = total * tl.exp(before - top) + tl.exp(x - top)
            else:
                total += tl.exp(x - maximum)
        if KIND == 2:
            maximum = tl.max(top)
            total *= tl.exp(top - maximum)
        scale = 1.0 / tl.sum(total)
        for start in range(0, vocab, BLOCK):
            x = tl.load(X + start + offs, mask=start + offs < vocab, other=float("-inf"))
            tl.store(Out + start + offs, tl.exp(x - maximum) * scale, mask=start + offs < vocab)


def softmaxes(rows: int, vocab: int, device: torch.device) -> tuple[Rivals, int, dict]:
    """(rivals, sets of inputs, fields of the row) over fp32 scores; those of this file and the package where Triton runs."""
    xs = [torch.randn(rows, vocab, device=device) for _ in range(num_sets(8 * rows * vocab))]
    x, k, out, noise = xs[0], min(TOP_K, vocab), torch.empty_like(xs[0]), torch.empty_like(xs[0]).exponential_()
    fields, want = {"batch": rows, "vocab": vocab, "top_k": k}, x.double().softmax(-1)
    top = want.topk(k)
    found: Rivals = {"torch": (lambda i: xs[i].softmax(-1), SAME, want)}
    found["torch_softmax_topk"] = lambda i: xs[i].softmax(-1).topk(k).values, SAME, top.values
    found["torch_topk_softmax"] = lambda i: xs[i].topk(k).values.softmax(-1), SAME, top.values / top.values.sum(-1, keepdim=True)
    if triton is None or not (x.is_cuda or INTERPRETED):
        return found, len(xs), fields
    sampler, tokens = sample.Sampler(), torch.empty(rows, 1, dtype=torch.int64, device=device)
    sampler._make_room(rows, vocab, device)
    others, block = (noise, *sampler.tensors, tokens), min(BLOCK, triton.next_power_of_2(vocab))
    launch = sample._prepare((x, *others), sample.Settings(top_k=k))

    def one_reading(i: int) -> torch.Tensor:
        launch(xs[i], *others)
        return tokens

    def softmax(i: int, kind: int) -> torch.Tensor:
        softmax_kernel[(rows,)](xs[i], out, vocab, kind, block, num_warps=8 if block == BLOCK else 4)
        return out

    best = (top.values / noise.gather(1, top.indices)).amax(1, keepdim=True)  # the token that is drawn has this quotient
    found["one_reading"] = one_reading, lambda tokens: want.gather(1, tokens) / noise.gather(1, tokens), best
    found |= {name: (partial(softmax, kind=n), SAME, want) for n, name in enumerate(KINDS)}
    return found, len(xs), fields


def steps(length: int, device: torch.device) -> tuple[Rivals, int, dict]:
    """(rivals, sets of inputs, fields of the row) of a layer's attention and projections for the last of `length` tokens."""
    new = lambda *shape: torch.randn(*shape, device=device, dtype=shapes.DTYPE)  # noqa: E731
    heads, attend = (HEADS, KV_HEADS, KV_HEADS), get("lean").attend
    hidden, columns = HEADS * HEAD_DIM, sum(heads) * HEAD_DIM
    project = lambda x, weight: (x @ weight).view(1, -1, sum(heads), HEAD_DIM).transpose(1, 2).split(heads, 1)  # noqa: E731
    x, weight = new(1, length, hidden), new(hidden, columns) / hidden**0.5
    q, k, v = (part.contiguous() for part in project(x, weight))
    inputs = [[part.clone() for part in (weight, k, v)] for _ in range(num_sets(weight.nbytes + 2 * k.nbytes))]

    def cached(i: int) -> torch.Tensor:
        weight, k, v = inputs[i]
        query, k[:, :, -1:], v[:, :, -1:] = project(x[:, -1:], weight)
        return attend(query, KV(k, v))

    def recomputed(i: int) -> torch.Tensor:
        query, *kv = project(x, inputs[i][0])
        return attend(query, KV(*kv))[:, :, -1:]

    want, each = shapes.exact(q[:, :, -1:], k, v), 2 * hidden * columns
    flops = {"no_cache": length * each + 2 * length**2 * hidden, "cache": each + 4 * length * hidden}
    fields = {"length": length, "heads": f"{HEADS}/{KV_HEADS} heads of {HEAD_DIM}", "flops": flops}
    return {"no_cache": (recomputed, SAME, want), "cache": (cached, SAME, want)}, len(inputs), fields


def timed(rivals: Rivals, sets: int, device: torch.device) -> dict:
    """The "us" and "us_range" of the rivals, each checked first. Raises WrongResult for an error above 8 units of rounding."""
    runs, calls = {}, {}
    for name, (call, of, want) in rivals.items():
        found = call(0)
        eps = torch.finfo(found.dtype if found.is_floating_point() else torch.float32).eps
        if not (error := (of(found) - want).abs().max().item()) <= 8 * eps * want.abs().max().item():
            raise shapes.WrongResult(f"{name} is wrong: error {error:.2e}.")
        calls[name] = num_calls(sets, elapsed_us(partial(call, 0), device))
        runs[name] = record(call, sets, calls[name], device)
    return medians(time_rivals(runs, calls, device))


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.softmax") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", default=default, help="default: %(default)s")
    add_options(parser, 300)
    args = parser.parse_args(argv)
    batches, vocabularies, lengths = ([int(n) for n in listed(getattr(args, name))] for name in SIZES)
    cases: list[tuple[int, ...]] = [*itertools.product(batches, vocabularies), *((n,) for n in lengths)]
    need_gpu(parser, args, sizes={f"{case}": math.prod(case) ** (3 - len(case)) for case in cases})
    device = find_device(args.device)
    results = Results(args.out / "softmax.json", args.seconds, command(prog, argv), device, conditions=conditions(device, METHOD))
    torch.manual_seed(0)
    for case in progress(cases, "softmax"):
        if results.left() < 10:
            results.say(f"no time for {case}")
            continue
        rivals, sets, row = softmaxes(*case, device) if len(case) == 2 else steps(*case, device)
        row |= timed(rivals, sets, device)
        results.add(row, f"{case}", f"{case}: " + ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
