"""Gradients of attention: the reference by finite differences, the kernels against float64, also where no query sees a key.

As in test_kernels: on a GPU the real kernels run, on a CPU the reference, and with TRITON_INTERPRET=1 the interpreted kernels.
"""

import importlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import tolerance
import torch
from cases import DTYPES, ON_GPU, on_gpu
from conftest import INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fastattn import registry
from hf_fastattn.kernels import HAS_TRITON, TritonKernel, checks, dropout, reference
from hf_fastattn.kernels.biased import biased
from hf_fastattn.kernels.host import gpu, tables
from hf_fastattn.kernels.spans import build_spans, has_rows, segments, segments_of_lengths, with_rows
from hf_fastattn.kernels.spec import KV, Spec

FORWARD, BACKWARD = TritonKernel("prefill"), TritonKernel("backward", twin=reference.backward)
PORTABLE = TritonKernel("backward", twin=reference.backward, portable=True)
# The forward of models, which runs the Hopper kernel there, and the kernels for dK and dV that this device can run.
ATTENTION = registry.get("lean").prefill.unsplit  # what training runs
BACKWARDS = [BACKWARD, PORTABLE] if ON_GPU and gpu.arch(torch.device("cuda")) == 90 else [BACKWARD]
LENGTH = 190 if ON_GPU else 70
SEED = -(1 << 40) + 12345


@dataclass(frozen=True)
class Case(cases.Case):
    """A call with the options of training. starts: per row, where packed sequences begin."""

    q_len: int = LENGTH
    kv_len: int = LENGTH
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    dlse: bool = False
    starts: tuple[tuple[int, ...], ...] | None = None
    expanded: tuple[int, ...] = ()  # dimensions in which dout is expanded: all in the gradient of a sum
    dropout: float = 0.0
    portable: bool = False  # on Hopper too
    biases: int = 0  # rows of a bias of keys (ALiBi), 1 for one of all rows; 0 for none

    @property
    def has_spans(self) -> bool:
        return self.rows is not None or self.starts is not None


_padded = Case(batch=2, rows=((20, LENGTH, 0.0), (0, LENGTH - 9, 0.0)))
_packed = Case(q_len=LENGTH, batch=2, starts=((0, 10, 11, 40), (0, 32)))
CASES = [
    Case(),
    Case(num_heads=4, num_kv_heads=2, batch=2),
    *(Case(dtype=dtype) for dtype in ("fp16", "bf16")),
    Case(causal=False),
    Case(q_len=40),
    Case(q_len=40, causal=False, num_kv_heads=2),
    Case(kv_len=40),  # the first queries see no key
    Case(q_len=3, kv_len=5),
    Case(window=19),
    Case(window=19, causal=False),
    Case(softcap=2.0),
    Case(softcap=2.0, dtype="fp16", scale=0.5),
    Case(sinks=True, dlse=True),
    Case(sinks=True, window=9, dtype="fp16"),
    Case(expanded=(0, 1, 2, 3)),
    Case(expanded=(2,), dtype="fp16"),
    _padded,
    replace(_padded, causal=False, softcap=3.0),
    replace(_padded, window=11, sinks=True, dtype="fp16"),
    Case(batch=2, rows=((0, 0, 0.0), (5, LENGTH, 0.4)), sinks=True),
    Case(batch=2, rows=((0, 0, 0.0), (5, LENGTH, 0.4)), causal=False),
    _packed,
    replace(_packed, causal=False),
    replace(_packed, window=7, softcap=3.0, dtype="fp16"),
    replace(_packed, kv_len=LENGTH + 20, sinks=True),
    Case(dropout=0.3, num_heads=4, num_kv_heads=2, batch=2, sinks=True),
    replace(_padded, dropout=0.3, causal=False, softcap=3.0),
    replace(_packed, dropout=0.3, window=20, dtype="fp16"),
    Case(dropout=0.97, q_len=40, window=19, num_heads=4, num_kv_heads=2, head_dim=24, value_dim=40),
    *(Case(num_kv_heads=2, biases=1, dtype=dtype) for dtype in ("fp32", "fp16")),
    replace(_padded, num_kv_heads=2, biases=2, window=19, sinks=True, dlse=True),
    Case(batch=2, rows=((0, 0, 0.0), (5, LENGTH, 0.4)), num_kv_heads=2, biases=2, causal=False, softcap=2.0),
    replace(_packed, num_kv_heads=2, biases=1, dropout=0.3, dtype="fp16"),
    Case(q_len=33, kv_len=35, num_kv_heads=2, biases=1, head_dim=192, value_dim=128),
    *(Case(head_dim=d, value_dim=dv, q_len=33, kv_len=35) for d, dv in ((24, None), (40, 72), (256, None), (192, 128))),
]
if ON_GPU:
    kinds = [("fp16", False), ("bf16", False), *([("bf16", True)] if len(BACKWARDS) > 1 else [])]
    longer = [replace(c, q_len=c.q_len + 1000, kv_len=c.kv_len + 1000) for c in CASES[:25]]
    longer = [replace(c, head_dim=d, dtype=t, portable=p) for d in (64, 128, 256) for t, p in kinds for c in longer]
    CASES += dict.fromkeys(longer)
elif INTERPRETED:  # Triton's interpreter computes bf16 wrongly
    CASES = [case for case in CASES if case.dtype != "bf16"]


def make(case: Case, device) -> SimpleNamespace:
    """The tensors of a call, its Spec, and what its queries see."""
    x = cases.make(replace(case, q_offset=0) if case.starts else case, device)
    if case.starts:
        first = torch.zeros(case.batch, case.q_len, dtype=torch.bool, device=device)
        for b, starts in enumerate(case.starts):
            first[b, list(starts)] = True
            which = np.searchsorted(starts, np.arange(max(case.q_len, case.kv_len)), "right")
            x.seen[b] &= which[: case.q_len, None] == which[None, : case.kv_len]
            x.seen[b, :, case.q_len :] = False
        x.spans = with_rows(x.spans, *segments(first))
    # Slots before the first visible one and after the last may contain any value.
    by_any = x.seen.any(1)
    outside = ~(np.logical_or.accumulate(by_any, 1) & np.logical_or.accumulate(by_any[:, ::-1], 1)[:, ::-1])
    k, v = (t.masked_fill(torch.as_tensor(outside, device=device)[:, None, :, None], float("nan")) for t in (x.k, x.v))
    bias = None
    if case.biases:  # that of slots outside may be NaN too
        bias = torch.tensor([0.04, 0.01], device=device)[:, None] * torch.arange(case.kv_len, device=device)
        bias = bias.repeat(case.biases, 1, 1)
        if case.biases == case.batch:
            bias.masked_fill_(torch.as_tensor(outside, device=device)[:, None], torch.nan)
    noise, shape = torch.Generator().manual_seed(len(case.id)), (*x.q.shape[:3], v.shape[3])
    dout = torch.randn([1 if i in case.expanded else n for i, n in enumerate(shape)], generator=noise).to(x.q).expand(shape)
    dlse = torch.randn(shape[:3], generator=noise).to(device) if case.dlse else None
    scoring = {name: x.options[name] for name in ("scale", "causal", "window", "softcap")}
    given = {"sink_logits": x.options["sink_logits"], "dout": dout, "dlse": dlse, "spans": x.spans, "seen": x.seen}
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)  # as of a projection
    return SimpleNamespace(q=q, k=k, v=v, bias=bias, spec=Spec(**scoring, dropout=case.dropout), **given)


def kv_of(x: SimpleNamespace, k=None, v=None) -> KV:
    kv = KV(x.k if k is None else k, x.v if v is None else v)
    return kv if x.bias is None else biased(kv, x.bias)


def forward_of(x: SimpleNamespace, forward) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(out, lse, the argument with the seed of dropout)."""
    seed = {"seed": torch.tensor([SEED], device=x.q.device)} if x.spec.dropout else {}
    return *forward(x.q, kv_of(x), x.spec, x.spans, sink_logits=x.sink_logits, return_lse=True, **seed), seed


def gradients(x: SimpleNamespace, forward, backward) -> list[torch.Tensor | None]:
    out, lse, seed = forward_of(x, forward)
    given = seed | {"out": out, "lse": lse, "dout": x.dout, "dlse": x.dlse, "sink_logits": x.sink_logits}
    return list(backward(x.q, kv_of(x), x.spec, x.spans, **given))


def by_autograd(x: SimpleNamespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the formula in torch in `dtype`: exact in float64, the error of torch in the dtype of q."""
    seen = torch.as_tensor(x.seen, device=x.q.device)
    unseen = ~seen.any(1)[:, None, :, None]
    q = x.q.detach().to(dtype).requires_grad_()
    k, v = (t.detach().masked_fill(unseen, 0.0).to(dtype).requires_grad_() for t in (x.k, x.v))
    sinks = None if x.sink_logits is None else x.sink_logits.detach().to(dtype).requires_grad_()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * (q.shape[3] ** -0.5 if x.spec.scale is None else x.spec.scale)
    if x.spec.softcap is not None:
        scores = x.spec.softcap * torch.tanh(scores / x.spec.softcap)
    if x.bias is not None:
        scores = scores + x.bias.to(dtype)[:, :, None]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    sees = (seen.any(2) if sinks is None else torch.ones_like(seen[..., 0]))[:, None, :, None]
    scores = torch.where(sees, scores, 0.0)
    weights = torch.where(sees, torch.softmax(scores, -1), 0.0)[..., : k.shape[2]]
    applied = weights
    if x.spec.dropout:
        places = (torch.arange(n, device=q.device) for n in weights.shape)
        seed = torch.tensor([SEED], device=q.device)
        kept = dropout.kept(seed, x.spec.dropout, q.shape[1], *places)
        applied = weights * kept * dropout.keep_scale(x.spec.dropout)
    out = applied @ v.repeat_interleave(group, 1)
    loss = (out * x.dout.to(dtype)).sum()
    if x.dlse is not None:
        loss = loss + (torch.where(sees[..., 0], torch.logsumexp(scores.to(dtype), -1), 0.0) * x.dlse.to(dtype)).sum()
    loss.backward()
    return [t.grad for t in (q, k, v, sinks) if t is not None]


def scale_of(name: str, want: torch.Tensor, x: SimpleNamespace) -> float:
    """What the rounding error of a gradient is proportional to. That of a sink sums terms of all rows, which may cancel."""
    if name != "dsinks":
        return tolerance.largest(want)
    out, lse, _ = forward_of(x, FORWARD)
    terms = (x.dout.double() * out.double()).sum(-1).abs() + (0.0 if x.dlse is None else x.dlse.double().abs())
    return (torch.exp(x.sink_logits.double()[:, None] - lse.double()) * terms).sum((0, 2)).max().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_against_float64(case, device):
    x = make(case, device)
    found = gradients(x, FORWARD, PORTABLE if case.portable else BACKWARD)
    expected, peers = by_autograd(x, torch.float64), by_autograd(x, DTYPES[case.dtype])
    tensors = [t for t in (x.q, x.k, x.v, x.sink_logits) if t is not None]
    assert (found[3] is None) == (x.sink_logits is None)
    eps = torch.finfo(DTYPES[case.dtype]).eps
    for name, got, want, peer, like in zip(("dq", "dk", "dv", "dsinks"), found, expected, peers, tensors, strict=False):
        assert got.dtype == like.dtype and got.shape == like.shape, name
        tolerance.assert_close(got, want, peer, eps, scale_of(name, want, x), f"{case.id}, {name}")
    unseen = torch.as_tensor(~x.seen.any(1), device=device)[:, None, :, None]
    assert not found[1].masked_fill(~unseen, 0.0).any() and not found[2].masked_fill(~unseen, 0.0).any()  # exactly 0


@pytest.mark.parametrize("case", [CASES[0], _packed], ids=lambda case: case.id)
def test_gradients_that_are_not_needed_are_not_computed(case, device):
    x = make(case, device)
    out, lse = FORWARD(x.q, KV(x.k, x.v), x.spec, x.spans, return_lse=True)
    given = {"out": out, "lse": lse, "dout": x.dout}
    everything = BACKWARD(x.q, KV(x.k, x.v), x.spec, x.spans, **given)
    for needs in ((True, False), (False, True)):
        some = BACKWARD(x.q, KV(x.k, x.v), x.spec, x.spans, **given, needs=needs)
        for got, want, wanted in zip(some, everything, (needs[0], needs[1], needs[1], False), strict=True):
            assert torch.equal(got, want) if wanted else got is None


class Buffers(TorchDispatchMode):
    """The bytes of all tensors that are created without values."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            self.bytes += found.nbytes
        return found


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference keeps scores")
@pytest.mark.parametrize("backward", BACKWARDS)
def test_memory_is_that_of_the_gradients_and_some_bytes_for_each_query_and_head(backward, device):
    x = make(Case(batch=2, num_kv_heads=2, dtype="fp16"), device)
    out, lse = FORWARD(x.q, KV(x.k, x.v), x.spec, return_lse=True)
    with Buffers() as new:
        dq, dk, dv, _ = backward(x.q, KV(x.k, x.v), x.spec, out=out, lse=lse, dout=x.dout)
    on_hopper = ON_GPU and gpu.arch(device) == 90 and backward is BACKWARD
    each = 4 if on_hopper else 8  # delta, or a pair with lse
    assert new.bytes == sum(t.nbytes for t in (dq, dk, dv)) + each * x.q.shape[:3].numel()


def test_dropout_is_philox():
    """The known answers of its authors, with 7 rounds, and the share of what is kept."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    for given, known in ((zero, "5f6fb709 0d893f64 4f121f81 4f730a48"), (ones, "5207ddc2 45165e59 4d8ee751 8c52f662")):
        assert [f"{x.item():08x}" for x in dropout._philox([given] * 4, given, given)] == known.split()
    heads, some = torch.arange(3), torch.arange(400)
    kept = dropout.kept(torch.tensor([SEED]), 0.1, 3, heads[:2], heads, some, some)
    assert abs(kept.double().mean() - 0.9) < 1e-3 and abs(kept.double().mean((0, 1, 2)) - 0.9).max() < 0.03
    assert not torch.equal(kept[0, 0], kept[0, 1]) and not torch.equal(kept[0, 0], kept[1, 0])


def test_the_same_weights_are_dropped_in_every_product(device):
    """All scores are 0, and the inputs are such that each product writes every weight that it applies as a number of its own."""
    q_len, kv_len, heads, width, p = 20, 45, 4, 80, 0.4
    spec, seed = Spec(scale=1.0, window=21, dropout=p), torch.tensor([SEED], device=device)
    seen = reference.visible(q_len, kv_len, device, None, True, spec.window)
    kept = dropout.kept(seed, p, heads, *(torch.arange(n, device=device) for n in (1, heads, q_len, kv_len))) & seen
    assert 0.55 < kept.sum() / (heads * seen.sum()) < 0.65
    want = kept / seen.sum(-1, keepdim=True) * dropout.keep_scale(p)
    no_q, no_k = torch.zeros(1, heads, q_len, width, device=device), torch.zeros(1, 2, kv_len, width, device=device)
    by_query = torch.eye(width, device=device).view(1, heads, q_len, width)  # a dimension for each head and query
    by_key = no_k + torch.eye(width, device=device)[:kv_len]
    one_q, one_k = (x + torch.eye(width, device=device)[0] for x in (no_q, no_k))

    def gradients_without_delta(q, k, dout) -> tuple[torch.Tensor | None, ...]:
        _, lse = FORWARD(q, KV(k, one_k), spec, seed=seed, return_lse=True)
        return BACKWARD(q, KV(k, one_k), spec, out=no_q, lse=lse, dout=dout, seed=seed)

    def of_heads(x) -> torch.Tensor:  # (1, 2, kv_len, width), summed over the heads of a group
        own = x.view(2, kv_len, heads, q_len).permute(2, 0, 3, 1)  # (heads, num_kv_heads, q_len, kv_len)
        return own[range(heads), [0, 0, 1, 1]][None]

    torch.testing.assert_close(FORWARD(no_q, KV(no_k, by_key), spec, seed=seed)[..., :kv_len], want)
    torch.testing.assert_close(gradients_without_delta(no_q, by_key, one_q)[0][..., :kv_len], want)
    torch.testing.assert_close(of_heads(gradients_without_delta(by_query, no_k, one_q)[1]), want)
    torch.testing.assert_close(of_heads(gradients_without_delta(no_q, no_k, by_query)[2]), want)


@pytest.mark.parametrize("p", [0.0, 1e-6, 1 - 1e-9])
def test_dropout_of_nothing_and_of_nearly_everything(p, device):
    x = make(Case(dropout=p, q_len=40, window=19), device)
    given = {"sink_logits": x.sink_logits, "seed": torch.tensor([SEED], device=device)}

    def both(forward, backward, spec=x.spec) -> list[torch.Tensor]:
        out, lse = forward(x.q, KV(x.k, x.v), spec, return_lse=True, **given)
        return [out, lse, *backward(x.q, KV(x.k, x.v), spec, out=out, lse=lse, dout=x.dout, **given)[:3]]

    found = both(FORWARD, BACKWARD)
    same = both(reference.attention, reference.backward, x.spec if p > 0.5 else x.spec._replace(dropout=0.0))
    for got, want in zip(found, same, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * max(1.0, tolerance.largest(want)), rtol=1e-4)


GRADCHECKED = [
    Case(q_len=5, kv_len=7, num_heads=2, head_dim=3, sinks=True, softcap=2.0),
    Case(q_len=6, kv_len=4, head_dim=2, value_dim=3, causal=False, window=2),
    Case(q_len=7, kv_len=7, head_dim=2, batch=2, rows=((0, 0, 0.0), (1, 6, 0.3))),
    Case(q_len=8, kv_len=8, head_dim=2, starts=((0, 3, 4),)),
    Case(q_len=6, kv_len=7, num_heads=2, head_dim=2, dropout=0.4),
    Case(q_len=5, kv_len=7, num_kv_heads=2, head_dim=3, biases=1, softcap=2.0),
]


@pytest.mark.skipif(INTERPRETED, reason="of the reference alone")
@pytest.mark.parametrize("at_once", [1 << 20, 8])
@pytest.mark.parametrize("case", GRADCHECKED, ids=lambda case: case.id)
def test_the_reference_by_finite_differences(case, at_once, monkeypatch):
    monkeypatch.setattr(checks, "DTYPES", (*checks.DTYPES, torch.float64))
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", at_once)
    x = make(case, "cpu")
    seed = {"seed": torch.tensor([SEED])} if case.dropout else {}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sinks):
            out, lse = reference.attention(q, kv_of(x, k, v), x.spec, x.spans, sink_logits=sinks, return_lse=True, **seed)
            ctx.save_for_backward(q, k, v, sinks, out, lse)
            ctx.mark_non_differentiable(lse) if lse.isinf().any() else None
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            q, k, v, sinks, out, lse = ctx.saved_tensors
            dlse = None if lse.isinf().any() else dlse
            return reference.backward(
                q, kv_of(x, k, v), x.spec, x.spans, out=out, lse=lse, dout=dout, dlse=dlse, sink_logits=sinks, **seed
            )  # fmt: skip

    tensors = [None if t is None else t.double().nan_to_num(0.5).requires_grad_() for t in (x.q, x.k, x.v, x.sink_logits)]
    assert torch.autograd.gradcheck(Attention.apply, tensors)


@pytest.mark.parametrize("length, begin, end", [(LENGTH, 23, 50), *on_gpu((1300, 301, 900))])
@pytest.mark.parametrize("head_dim", [16, *on_gpu(64, 128, 256)])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_document_does_not_depend_on_its_neighbours(backward, head_dim, length, begin, end, device):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "dtype": "fp16" if ON_GPU else "fp32"}
    x = make(Case(q_len=length, kv_len=length, starts=((0, begin, end),), **shape), device)
    before = gradients(x, ATTENTION, backward)
    for t in (x.q, x.k, x.v, x.dout):
        t[:, :, :begin] = t[:, :, :begin].flip(2) * 3
        t[:, :, end:] = 1.0
    for got, want in zip(gradients(x, ATTENTION, backward)[:3], before[:3], strict=True):
        assert torch.equal(got[:, :, begin:end], want[:, :, begin:end])
        assert not torch.equal(got[:, :, :begin], want[:, :, :begin])


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("own", [{}, {"starts": ((0, 100, 750), (0,)), "sinks": True}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_results_are_bitwise_repeatable(backward, head_dim, own, device):
    x = make(Case(1000, 1000, 2, num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype="bf16", **own), device)
    first = gradients(x, ATTENTION, backward)
    for _ in range(100):
        for got, want in zip(gradients(x, ATTENTION, backward), first, strict=True):
            assert want is None or torch.equal(got, want)


def test_programs_share_a_group_where_kv_heads_are_few():
    sms = gpu.num_sms(torch.device("cpu"))
    splits = [tables.group_splits(torch.device("cpu"), programs, 8) for programs in (1, sms, sms + 1)]
    assert splits == [4, 2, 1] and tables.group_splits(torch.device("cpu"), 1, 7) == 1


def test_intervals_of_packed_sequences():
    first = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    lo, hi = segments(first)
    assert lo.tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6] and hi.tolist() == [[3, 3, 3, 4, 6, 6], [6] * 6]
    cu = torch.tensor([0, 3, 4, 6, 6], dtype=torch.int32)  # with a sequence of no tokens
    assert all(torch.equal(a, b[:1]) for a, b in zip(segments_of_lengths(cu, 6), (lo, hi), strict=True))
    spans = with_rows(build_spans(2, 6, 6, torch.device("cpu")), lo, hi)
    assert has_rows(spans) and spans.is_contiguous()
    seen = reference.visible(6, 6, torch.device("cpu"), spans, False, None)
    assert seen[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]
    ]  # fmt: skip


if HAS_TRITON:
    import triton
    import triton.language as tl

    from hf_fastattn.kernels.device.visibility import queries_of_keys

    @triton.jit
    def search_kernel(Spans, Out, first_key, last_key, q_len):
        found = queries_of_keys(Spans, first_key, last_key, q_len, tl.arange(0, 8))
        for i in tl.static_range(4):
            tl.store(Out + i, found[i])


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="a device function")
@pytest.mark.parametrize("q_len", [1, 7, 8, 9, 63, 64, 500])
def test_the_queries_of_keys_are_searched_in_steps(q_len, device):
    rng = np.random.default_rng(q_len)
    lo = np.sort(rng.integers(0, 300, q_len))
    hi = np.sort(rng.integers(0, 300, q_len)).clip(lo)
    spans = with_rows(build_spans(1, q_len, q_len, device), *(torch.as_tensor(x, device=device)[None] for x in (lo, hi)))
    for first_key in (-1, 0, 40, 150, 299):
        last_key, out = first_key + 60, torch.zeros(4, dtype=torch.int32, device=device)
        search_kernel[(1,)](spans, out, first_key, last_key, q_len)
        some, every = (hi > first_key) & (lo <= last_key), (hi > last_key) & (lo <= first_key)
        for first, end, which in (*out[:2].tolist(), some), (*out[2:].tolist(), every):
            assert np.arange(first, end).tolist() == np.flatnonzero(which).tolist()


def test_kernels_without_intervals_or_dropout_refuse_them(device):
    q = torch.randn(1, 2, 6, 16, device=device)
    lo, hi = segments(torch.ones(1, 6, dtype=torch.bool, device=device))
    spans = with_rows(build_spans(1, 6, 6, device), lo, hi)
    if INTERPRETED or ON_GPU:
        for name in ("lean", "split_kv"):
            with pytest.raises(ValueError, match=r"reads no spans with an interval for each query .*prefill does"):
                getattr(importlib.import_module(f"hf_fastattn.kernels.attention.{name}"), name)(q, KV(q, q), Spec(), spans)
            with pytest.raises(ValueError, match=r"has no dropout; kernels.attention.prefill has"):
                TritonKernel(name)(q, KV(q, q), Spec(dropout=0.1))
        wide, seed = torch.randn(1, 1, 4, 264, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="head_dim 264 is above 256"):
            FORWARD(wide, KV(wide, wide), Spec(dropout=0.1), seed=seed)
        with pytest.raises(ValueError, match="head_dim 264 is above 256"):
            BACKWARD(wide, KV(wide, wide), out=wide, lse=wide[..., 0], dout=wide)
    with pytest.raises(ValueError, match="must be int32"):
        reference.attention(q, KV(q, q), Spec(), spans[..., :-1])
    with pytest.raises(ValueError, match="without sinks"):
        reference.attention(q, KV(q, q), Spec(window=3, sinks=1), spans)
