"""Tests that need a GPU: bitwise repeatability under real scheduling, CUDA graphs, streams, many rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import oracle
import pytest
import test_kernels
import tolerance
import torch
import triton
from cases import Case, ragged
from conftest import DEVICE
from test_kernels import LEAN, check_case, force_programs

from hf_fastattn.kernels.attention import prefill_hopper
from hf_fastattn.kernels.attention.lean import lean
from hf_fastattn.kernels.decode import rope
from hf_fastattn.kernels.host import counters
from hf_fastattn.kernels.spans import build_spans
from hf_fastattn.kernels.spec import call

if DEVICE != "cuda":
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

CAPACITY = 4096


def inputs(batch=4, num_heads=32, num_kv_heads=8, head_dim=128, kv_len=CAPACITY, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    new = lambda heads, n: torch.randn(  # noqa: E731
        batch, heads, n, head_dim, device="cuda", dtype=dtype, generator=generator
    )
    return new(num_heads, 1), new(num_kv_heads, kv_len), new(num_kv_heads, kv_len)


def ragged_mask(batch: int, kv_len: int) -> torch.Tensor:
    mask = torch.zeros(batch, kv_len, dtype=torch.bool, device="cuda")
    for row, (start, stop, _) in zip(mask, ragged(batch, kv_len, right=False), strict=True):
        row[start:stop] = True
    return mask


class Mismatches:
    """Counts differing results on the device, without synchronising."""

    def __init__(self):
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.count += ~(a == b).all()  # NaN differs from everything

    def none(self) -> bool:
        torch.cuda.synchronize()
        return self.count.item() == 0


class Disturbance:
    """Work on a second stream, which changes the order in which programs end."""

    def __init__(self):
        self.stream, self.noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.noise = (self.noise @ self.noise).tanh()


def assert_all_seen(result, q, k, v, what: str) -> None:
    """Compare (out, lse or None) of queries that see all keys."""
    seen = np.ones((len(q), 1, k.shape[2]), dtype=bool)
    tolerance.assert_attention(result, oracle.attention(q, k, v, seen), q, k, v, None, seen, {}, what)


@pytest.mark.parametrize("masked", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("shape", [(1, 32, 8, 128), (7, 6, 2, 64), (2, 8, 1, 256)], ids=str)
def test_lean_is_bitwise_repeatable(shape, masked):
    batch, num_heads, num_kv_heads, head_dim = shape
    q, k, v = inputs(batch, num_heads, num_kv_heads, head_dim)
    spans = build_spans(batch, 1, CAPACITY, q.device, q_offset=CAPACITY - 1, attention_mask=ragged_mask(batch, CAPACITY))
    spans = spans if masked else None
    first = call(lean, q, k, v, spans)
    disturb, mismatches = Disturbance(), Mismatches()
    for i in range(300):
        if i % 3:
            disturb()
        mismatches.compare(call(lean, q, k, v, spans), first)
    assert mismatches.none()


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left padded with holes"])
def test_lean_in_a_cuda_graph_follows_the_lengths_on_the_device(padded):
    """10,000 replays of one graph, each with another length and query, bitwise equal to eager, with a busy second stream."""
    batch = 3
    q, k, v = inputs(batch)
    length = torch.zeros((), dtype=torch.int64, device="cuda")
    mask = None
    if padded:
        mask = torch.ones(batch, CAPACITY, dtype=torch.bool, device="cuda")
        mask[0, :700] = False
        mask[1, 5:900:3] = False

    def step():
        spans = build_spans(batch, 1, CAPACITY, q.device, q_offset=length, attention_mask=mask)
        return call(lean, q, k, v, spans, causal=False, return_lse=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()

    lengths = np.random.default_rng(0).integers(0, CAPACITY, 10_000).tolist()
    lengths[:4] = [0, CAPACITY - 1, 1, 63]
    queries = torch.randn(17, *q.shape, device="cuda", dtype=q.dtype)
    disturb, mismatches = Disturbance(), Mismatches()
    for i, n in enumerate(lengths):
        if i % 10 == 0:
            disturb()
        length.fill_(n)
        q.copy_(queries[i % 17])
        graph.replay()
        for replayed, eager in zip((out, lse), step(), strict=True):
            mismatches.compare(replayed, eager)
        if i % 2500 == 0:
            seen = oracle.visible(batch, 1, CAPACITY, q_offset=n, attention_mask=None if mask is None else mask.cpu().numpy())
            spans = build_spans(batch, 1, CAPACITY, q.device, q_offset=n, attention_mask=mask)
            expected = oracle.attention(q, k, v, seen)
            tolerance.assert_attention((out, lse), expected, q, k, v, spans, seen, {}, f"replay {i}, length {n}")
    assert mismatches.none()


def test_two_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(2)]
    data = [inputs(batch=1, seed=i) for i in range(2)]
    expected = [call(lean, *x) for x in data]
    mismatches = [Mismatches() for _ in streams]
    torch.cuda.synchronize()
    for _ in range(300):
        for stream, x, e, m in zip(streams, data, expected, mismatches, strict=True):
            with torch.cuda.stream(stream):
                m.compare(call(lean, *x), e)
    assert all(m.none() for m in mismatches)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="the Hopper prefill kernel's counters")
def test_first_prefill_inside_a_capture_is_refused(monkeypatch):
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call(prefill_hopper.prefill, q, k, v)
    monkeypatch.setattr(counters, "_counters", {})
    monkeypatch.setattr(counters, "_slots", {})
    with pytest.raises(RuntimeError, match=r"must not be captured into a CUDA graph.*Run the model once"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(prefill_hopper.prefill, q, k, v)
    assert not counters._counters
    call(prefill_hopper.prefill, q, k, v)  # it works outside of a capture, also afterwards
    torch.cuda.synchronize()


@pytest.mark.parametrize("programs", [1, 50, None], ids=["one program", "50 programs", "all programs"])
def test_a_thousand_ragged_rows(programs, device, monkeypatch):
    if programs:
        force_programs(monkeypatch, programs)
    rows = ragged(1000, 300)
    case = Case(q_len=1, kv_len=300, batch=1000, num_heads=4, num_kv_heads=1, head_dim=64, dtype="fp16", rows=rows)
    check_case(LEAN, case, device)


@pytest.mark.parametrize("kernel", [test_kernels.PREFILL, test_kernels.SPLIT_KV, LEAN], ids=lambda k: k.name)
def test_large_offsets(kernel):
    """A K/V buffer of more than 2^31 elements: only 64-bit offsets reach its end."""
    kv_len, heads, head_dim = 200_000, 48, 128
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    # Token-major, so that the rows of a head are far apart. Heads differ, because a wrapped offset could read equal values.
    k = torch.randn(2, kv_len, heads, head_dim, device="cuda", dtype=torch.float16).transpose(1, 2)
    assert k.numel() > 1 << 31
    q = torch.randn(2, heads, 1, head_dim, device="cuda", dtype=torch.float16)
    out, _ = test_kernels.run(kernel, q, k, k, None, {"window": 1000})
    tail = k[:, :, -1000:].contiguous()
    assert_all_seen((out, None), q, tail, tail, kernel.name)


def test_large_offsets_of_heads():
    """Heads more than 2^31 elements apart."""
    tokens, heads, head_dim = 1 << 20, 34, 64
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB of free GPU memory")
    q = torch.randn(1, heads, tokens, head_dim, device="cuda", dtype=torch.float16)
    assert (heads - 1) * q.stride(1) > 1 << 31
    cos, sin = torch.randn(2, 1, 1, head_dim, device="cuda", dtype=torch.float16)
    last = q[:, :, -1:]
    got, _ = rope.rope(last, last[:, :2], cos, sin)
    expected, _ = rope.rope(last.contiguous(), last[:, :2].contiguous(), cos, sin)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kernel", [test_kernels.SPLIT_KV, LEAN], ids=lambda k: k.name)
def test_a_row_of_a_million_tokens(kernel):
    kv_len = 1 << 20
    q, k, v = inputs(batch=1, num_heads=8, num_kv_heads=2, head_dim=64, kv_len=kv_len)
    k[:, :, kv_len // 2] *= 8  # otherwise a softmax over so many keys is a mean, which hides errors
    assert_all_seen(test_kernels.run(kernel, q, k, v, None, {"return_lse": True}), q, k, v, kernel.name)


@pytest.mark.parametrize("kernel", [test_kernels.PREFILL, test_kernels.SPLIT_KV, LEAN], ids=lambda k: k.name)
def test_repeated_launches_follow_their_tensors(kernel):
    """The second call of a shape skips Triton's look-up, but not with other addresses, alignments, shapes or current devices."""
    launcher = partial(call, kernel.launcher())
    flat = torch.randn(3 * 8 * 700 * 64 + 8, device="cuda", dtype=torch.float16)
    q = torch.randn(1, 32, 1, 64, device="cuda", dtype=torch.float16)
    for offset in (0, 0, 8, 1, 0, 4, 0):  # elements; 1 and 4 are not multiples of 16 bytes
        for n in (700, 300, 700):
            k = flat[offset : offset + 8 * n * 64].view(1, 8, n, 64)
            v = flat[8 * 700 * 64 + offset :][: 8 * n * 64].view(1, 8, n, 64)
            assert_all_seen((launcher(q, k, v), None), q, k, v, f"{kernel.name} at {offset}")
    with pytest.raises(RuntimeError, match="no backward pass"):
        launcher(q.requires_grad_(), k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("q_len", [1, 4, 300])
def test_kernels_run_where_their_tensors_are(q_len):
    """On another GPU than the current one, alternating with it: the same bits."""
    _, k, v = inputs(batch=2, kv_len=1000)
    here = (torch.randn(2, 32, q_len, 128, device="cuda", dtype=torch.bfloat16), k, v)
    there = [x.to("cuda:1") for x in here]
    for kernel in test_kernels.RUNNABLE[1:]:
        if q_len < kernel.min_q_len or (kernel.max_rows and 4 * q_len > kernel.max_rows):
            continue
        launcher = partial(call, kernel.launcher())
        for _ in range(3):
            a, b = launcher(*here), launcher(*there)
            assert b.device.index == 1 and torch.equal(a.cpu(), b.cpu()), kernel.name
    assert torch.cuda.current_device() == 0


def test_a_profiler_sees_every_launch():
    heard, (q, k, v) = [], inputs(batch=1)
    hook = lambda metadata: heard.append(metadata.get()["name"])  # noqa: E731
    enter = triton.knobs.runtime.launch_enter_hook
    call(lean, q, k, v)
    enter.add(hook)
    try:
        for _ in range(3):
            call(lean, q, k, v)
    finally:
        enter.remove(hook)
    call(lean, q, k, v)
    assert len(heard) == 6 and len(set(heard)) == 2  # the attention kernel and the merge kernel, three times
