"""Rows of the kernel benchmark that time attention with gradients: forward, backward and peak memory.

Every rival's output and gradients are checked against the fp32 reference before it is timed. Tensors are stored as
(batch, length, heads, head_dim), as in models.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch.nn.attention import SDPBackend

from hf_fastattn import registry
from hf_fastattn.attention import training
from hf_fastattn.kernels import TritonKernel, reference, spans
from hf_fastattn.kernels.spec import KV, Spec
from hf_fastattn.registry import Backend
from hf_fastattn.report.tables import thousands

from . import timing
from .prefill import TAIL, standard, visible_pairs
from .shapes import DTYPE, Shape, WrongResult, ratios, sdpa, sdpa_masked

METHOD = "CUDA events around loops of calls over inputs larger than L2, rivals alternating, median"
RATE = 2.5e8  # flops per microsecond, to estimate the time of a call
WHOLE = 8 << 10  # of longer causal inputs only the gradients of the last queries are checked
ROUNDED = {"standard", "eager"}  # they round the scores to 16 bits, and are allowed four times the error
FLEX = 8 << 10  # the length for which flex_attention is compiled, which is slow
LEAN = registry.get("lean")  # its kernels are those of the other exact backends
# With the portable kernel for dK and dV on Hopper too.
PORTABLE = replace(LEAN, backward=TritonKernel("backward", twin=reference.backward, portable=True))
OURS = "ours", "ours_portable"


@dataclass(frozen=True)
class Trained:
    """One layer's attention with gradients.

    window: keys that a query sees; sinks: whether there are learned sink logits; documents: the mean length of the sequences that
    are packed into the row; rivals: keys of RIVALS.
    """

    shape: Shape
    rivals: tuple[str, ...]
    dtype: torch.dtype = DTYPE
    window: int | None = None
    sinks: bool = False
    documents: int | None = None

    def __str__(self) -> str:
        name = str(self.shape)
        if self.documents:
            name += f", documents of about {thousands(self.documents)}"
        return name if self.window is None else f"{name}, window {thousands(self.window)}"

    @property
    def cuts(self) -> list[int]:
        """The beginnings of packed sequences, and the end of the last one."""
        length = self.shape.q_len
        if not self.documents:
            return [0, length]
        noise = torch.Generator().manual_seed(0)
        inner = torch.randperm(length - 1, generator=noise)[: length // self.documents - 1] + 1
        return [0, *sorted(inner.tolist()), length]

    @property
    def flops(self) -> int:
        """Flops of the forward pass; by convention the backward pass has 2.5 times as many, whatever is recomputed."""
        shape, cuts = self.shape, self.cuts
        lengths = [b - a for a, b in itertools.pairwise(cuts)]
        pairs = sum(visible_pairs(n, n, self.window) if shape.causal else n * n for n in lengths)
        return 4 * shape.batch * shape.num_heads * shape.head_dim * pairs


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call, the gradient of its output, and data that depend only on the case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    dout: torch.Tensor
    case: Trained

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [x for x in (self.q, self.k, self.v, self.sinks) if x is not None]


def make(case: Trained, device: torch.device) -> Inputs:
    shape = case.shape
    new = lambda heads, length: torch.randn(  # noqa: E731
        shape.batch, length, heads, shape.head_dim, device=device, dtype=case.dtype
    ).transpose(1, 2)
    q, dout = new(shape.num_heads, shape.q_len), new(shape.num_heads, shape.q_len)
    k, v = new(shape.num_kv_heads, shape.kv_len), new(shape.num_kv_heads, shape.kv_len)
    sinks = torch.randn(shape.num_heads, device=device, dtype=case.dtype) if case.sinks else None
    for x in (q, k, v, sinks):
        if x is not None:
            x.requires_grad_()
    return Inputs(q, k, v, sinks, dout, case)


# ---- rivals ----


@cache
def _cuts(case: Trained, device: torch.device) -> torch.Tensor:
    return torch.tensor(case.cuts, dtype=torch.int32, device=device)


@cache
def _spans(case: Trained, device: torch.device) -> torch.Tensor | None:
    if not case.documents:
        return None
    length = case.shape.q_len
    whole = spans.build_spans(1, length, length, device, q_offset=0, causal=case.shape.causal, window=case.window)
    return spans.with_rows(whole, *spans.segments_of_lengths(_cuts(case, device), length))


@lru_cache(maxsize=2)
def _mask(case: Trained, device: torch.device, hidden: bool) -> torch.Tensor:
    """The dense mask: True where a query sees a key, or, if `hidden`, where it does not."""
    shape = case.shape
    given = _spans(case, device)
    seen = reference.visible(shape.q_len, shape.kv_len, device, given, causal=shape.causal, window=case.window)[0]
    return seen.logical_not_() if hidden else seen


def _ours(backend: Backend, x: Inputs) -> torch.Tensor:
    spec = Spec(causal=x.case.shape.causal, window=x.case.window)
    return training.attend(backend, x.q, x.k, x.v, spec, _spans(x.case, x.q.device), x.sinks)[0]


def _sdpa(backend: SDPBackend, x: Inputs) -> torch.Tensor:
    k, v = x.k, x.v
    if backend == SDPBackend.EFFICIENT_ATTENTION:  # it needs as many KV heads as query heads
        k, v = (t.repeat_interleave(x.q.shape[1] // t.shape[1], 1) for t in (k, v))
    return sdpa(backend, x.q, k, v, x.case.shape.causal)


def _sdpa_masked(x: Inputs) -> torch.Tensor:
    return sdpa_masked(x.q, x.k, x.v, _mask(x.case, x.q.device, False))


def _standard(x: Inputs) -> torch.Tensor:
    return standard(x.q, x.k, x.v, _mask(x.case, x.q.device, True) if x.case.shape.causal else None)


def _varlen(x: Inputs) -> torch.Tensor:
    """FlashAttention-2 of torch for packed sequences."""
    case, cuts = x.case, _cuts(x.case, x.q.device)
    longest = max(b - a for a, b in itertools.pairwise(case.cuts))
    q, k, v = (t[0].transpose(0, 1) for t in (x.q, x.k, x.v))
    out = torch.ops.aten._flash_attention_forward(q, k, v, cuts, cuts, longest, longest, 0.0, case.shape.causal, False)[0]
    return out.transpose(0, 1)[None]


@lru_cache(maxsize=1)
def _eager_mask(case: Trained, device: torch.device) -> torch.Tensor:
    hidden = _mask(case, device, True)
    return torch.zeros(1, 1, *hidden.shape, device=device, dtype=case.dtype).masked_fill_(hidden, torch.finfo(case.dtype).min)


def _eager(x: Inputs) -> torch.Tensor:
    """The eager attention of GPT-OSS in Transformers, the only one with sinks that supports training."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = types.SimpleNamespace(num_key_value_groups=x.q.shape[1] // x.k.shape[1], sinks=x.sinks, training=True)
    out, _ = eager_attention_forward(module, x.q, x.k, x.v, _eager_mask(x.case, x.q.device), x.q.shape[3] ** -0.5)
    return out.transpose(1, 2)


@cache
def _flex_call(case: Trained, device: torch.device) -> Callable:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # a graph is differentiated repeatedly
    length = case.shape.q_len
    which = torch.zeros(length, dtype=torch.int32, device=device)
    which[_cuts(case, device)[1:-1].long()] = 1
    which = which.cumsum(0)

    def sees(b, h, i, j):
        return (i >= j) & (which[i] == which[j]) if case.documents else i >= j

    mask = create_block_mask(sees, None, None, length, length, device=device) if case.shape.causal else None
    gqa = case.shape.num_heads != case.shape.num_kv_heads
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=gqa)


def _flex(x: Inputs) -> torch.Tensor:
    if not x.q.is_cuda:
        raise RuntimeError("Compiled flex_attention has gradients only on GPUs.")
    return _flex_call(x.case, x.q.device)(x.q, x.k, x.v)


RIVALS: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "ours": partial(_ours, LEAN),
    "ours_portable": partial(_ours, PORTABLE),
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_masked": _sdpa_masked,
    "flash_varlen": _varlen,
    "flex": _flex,
    "eager": _eager,
    "standard": _standard,
}


# ---- checks ----


def _gradients(rival: Callable[[Inputs], torch.Tensor], x: Inputs, dout: torch.Tensor) -> list[torch.Tensor]:
    out = rival(x)
    return [out.detach(), *torch.autograd.grad(out, x.leaves, dout)]


def _tail(case: Trained) -> int:
    """The number of last queries that are checked; 0 for all."""
    return TAIL if case.shape.q_len > WHOLE and not case.documents else 0


def exact(x: Inputs, dout: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients in fp32; with `_tail`, only of the last queries, for a `dout` that is 0 elsewhere."""
    tail = _tail(x.case)
    q, dout = (t[:, :, -tail:].detach().float() for t in (x.q, dout))
    kv, sinks = KV(x.k.detach().float(), x.v.detach().float()), None if x.sinks is None else x.sinks.detach().float()
    given, spec = _spans(x.case, x.q.device), Spec(causal=x.case.shape.causal, window=x.case.window)
    out, lse = reference.attention(q, kv, spec, given, sink_logits=sinks, return_lse=True)
    found = reference.backward(q, kv, spec, given, out=out, lse=lse, dout=dout, sink_logits=sinks)
    return [out, *(grad for grad in found if grad is not None)]


def check(name: str, found: list[torch.Tensor], expected: list[torch.Tensor], tail: int) -> dict[str, list[float]]:
    """Refuse wrong outputs and gradients, and return [largest, mean] error of each: at most 4 units of rounding of the largest
    value; of a rival in ROUNDED, 16."""
    errors = {}
    for what, got, want in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
        part = got[:, :, -tail:] if what in ("out", "dq") else got
        error = (part.float() - want).abs()
        allowed = (16 if name in ROUNDED else 4) * torch.finfo(got.dtype).eps * want.abs().max().item()
        if what == "dsinks":  # a sum over all queries, whose terms cancel
            allowed *= 4
        errors[what] = [error.max().item(), error.mean().item()]
        if not errors[what][0] <= allowed:  # also for NaN
            raise WrongResult(f"{what} of {name} is wrong: error {errors[what][0]:.2e}, allowed {allowed:.2e}.")
    return errors


# ---- rows ----


def peak_bytes(rival: Callable[[Inputs], torch.Tensor], x: Inputs) -> int | None:
    """Peak memory of forward and backward, including output and gradients; None on the CPU."""
    if not x.q.is_cuda:
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(x.q.device)
    before = torch.cuda.memory_allocated(x.q.device)
    _gradients(rival, x, x.dout)
    return torch.cuda.max_memory_allocated(x.q.device) - before


def _loop(call: Callable[[int], object], calls: int, sets: int) -> timing.Run:
    def run() -> None:
        for i in range(calls):
            call(i % sets)  # its result is dropped at once: an output holds what its backward pass needs

    return run


@torch.inference_mode(False)
@torch.enable_grad()
def trained_row(case: Trained, device: torch.device) -> dict:
    """Microseconds of forward and backward of all rivals ("us": their sum), peak bytes, and errors against fp32."""
    shape, runs, errors, wrong, peak = case.shape, {}, {}, {}, {}
    long = case.flops > 2e13  # seconds a call, over gigabytes
    sets = 1 if long else timing.num_sets(4 * shape.batch * shape.num_heads * shape.q_len * shape.head_dim * case.dtype.itemsize)
    inputs = [make(case, device) for _ in range(sets)]
    tail, dout = _tail(case), inputs[0].dout.clone()
    if tail:
        dout[:, :, :-tail] = 0
    expected = exact(inputs[0], dout)
    calls = timing.num_calls(sets, case.flops / RATE)
    for name in case.rivals:
        rival = RIVALS[name]
        try:
            errors[name] = check(name, _gradients(rival, inputs[0], dout), expected, tail)
            peak[name] = peak_bytes(rival, inputs[0])
        except Exception as error:  # any error: the others are still timed
            if name in OURS:
                raise
            wrong[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            continue
        runs[f"{name} forward"] = _loop(lambda i, rival=rival: rival(inputs[i]), calls, sets)
    del expected, dout
    for name in list(errors):
        # What a rival stores for its backward pass is itself larger than L2, or small enough to have all sets of it.
        few = sets if peak[name] is None else min(sets, timing.num_sets(peak[name]))
        outs = [RIVALS[name](x) for x in inputs[:few]]
        grad = lambda i, outs=outs: torch.autograd.grad(outs[i], inputs[i].leaves, inputs[i].dout, retain_graph=True)  # noqa: E731
        runs[f"{name} backward"] = _loop(grad, calls, few)
    found = timing.medians(timing.time_rivals(runs, calls, device, *((2, 3) if long else ())))
    by_pass = {what: {name: found["us"][f"{name} {what}"] for name in errors} for what in ("forward", "backward")}
    ranges = {name: [found["us_range"][f"{name} {what}"] for what in by_pass] for name in errors}
    row = shape.row() | {"shape": str(case), "dtype": str(case.dtype).removeprefix("torch."), "flops": case.flops}
    row |= {"window": case.window, "documents": len(case.cuts) - 1, "forward_us": by_pass["forward"]}
    row |= {"backward_us": by_pass["backward"], "us": {n: by_pass["forward"][n] + by_pass["backward"][n] for n in errors}}
    row |= {"us_range": {name: [sum(x) for x in zip(*both, strict=True)] for name, both in ranges.items()}}
    row |= {"peak_bytes": peak, "errors_of": errors, "errors": wrong}
    peers = [name for name in case.rivals if name not in OURS]
    for what, ours, peer in itertools.product(("us", "forward_us", "backward_us"), OURS, peers):
        if ours in case.rivals:
            row[f"{peer}_over_{ours}_{what}"] = row[what][peer] / row[what][ours] if {peer, ours} <= row[what].keys() else None
    return row


def trained_summary(rows: list[dict]) -> dict:
    """The time of every peer over ours, for forward, backward and both."""
    names = dict.fromkeys(name for row in rows for name in row if "_over_ours" in name)
    return {name: ratios(rows, name) for name in names}


# ---- shapes ----


def _peers(head_dim: int, length: int) -> tuple[str, ...]:
    """The slow ones where they are quick enough."""
    names = (*OURS, "sdpa_flash", "sdpa_cudnn")
    names += ("sdpa_efficient",) if length <= FLEX else ()
    return names + (("flex",) if length == FLEX and head_dim < 256 else ())


LENGTHS = [
    Trained(Shape(batch, heads, kv_heads, head_dim, length, length), _peers(head_dim, length))
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 32, 8), (256, 16, 8))
    for batch, length in ((8, 2 << 10), (2, FLEX), (1, 32 << 10))
]
LENGTHS.append(Trained(Shape(1, 32, 8, 128, 128 << 10, 128 << 10), _peers(128, 128 << 10)))
PACKED = [
    Trained(
        Shape(1, heads, kv_heads, head_dim, length, length),
        (*OURS, "flash_varlen", "flex", "sdpa_masked"),
        documents=1 << 10,
    )
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 32, 8))
    for length in (32 << 10,)
]
GPT_OSS = [Trained(Shape(1, 64, 8, 64, FLEX, FLEX), ("ours", "eager"), window=window, sinks=True) for window in (128, None)]
# The lengths and head_dim of a published table of fused attention, and the layer of its figure: GPT-J's.
FUSED = [
    Trained(Shape(16, 16, 16, head_dim, length, length, causal=False), ("ours", "standard"), torch.float16)
    for length, head_dim in ((1920, 64), (2048, 128))
]
LAYER = [
    Trained(Shape(1, 16, 16, 256, length, length), ("ours", "standard"), torch.float16)
    for length in (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 20_000)
]
PARTS = {
    "training": LENGTHS,
    "training_packed": PACKED,
    "training_gpt_oss": GPT_OSS,
    "training_fused": FUSED,
    "training_layer": LAYER,
}
