"""LeanAttention's fix-ups in one launch (benchmarks/fixup.py) are correct and repeatable, also after thousands of replays.

The interpreter runs programs one after another. Programs that wait for others would never end in it, so that variant runs only on
GPUs.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import DEVICE, INTERPRETED

pytest.importorskip("triton")

from benchmarks import fixup
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.host import tables
from hf_fastattn.kernels.spans import KV_START, build_spans
from hf_fastattn.kernels.spec import call

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
needs_kernels = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU or the interpreter")
# In the interpreter, test_kernels.py tests the launches of the package.
NAMES = [pytest.param(name, marks=() if name == fixup.LAST_ARRIVER else needs_gpu) for name in fixup.VARIANTS]
LONG, REPEATS = (5000, 3) if ON_GPU else (130, 1)
REPLAYS = 10_000


def operands(batch, heads, kv_heads, head_dim, q_len, kv_len):
    torch.manual_seed(0)
    dtype = torch.float16 if ON_GPU else torch.float32
    new = lambda *shape: torch.randn(*shape, head_dim, device=DEVICE, dtype=dtype)  # noqa: E731
    return new(batch, heads, q_len), new(batch, kv_heads, kv_len), new(batch, kv_heads, kv_len)


def allowed(v: torch.Tensor) -> float:
    """Four units of rounding at the scale of the values, the tolerance of the benchmarks."""
    return 4 * torch.finfo(v.dtype).eps * v.abs().max().item()


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "batch, heads, kv_heads, head_dim, q_len, lengths",
    [
        (1, 1, 1, 64, 1, None),  # one head for all programs
        (1, 5, 5, 64, 1, None),
        (2, 8, 2, 128, 3, None),
        (5, 4, 2, 64, 1, [LONG, 1, 33, 100, 9]),
        (3, 16, 1, 32, 4, [7, LONG, 64]),  # 64 packed rows
    ],
)
def test_every_fixup_is_attention_and_repeatable(name, batch, heads, kv_heads, head_dim, q_len, lengths):
    q, k, v = operands(batch, heads, kv_heads, head_dim, q_len, LONG)
    spans = None
    if lengths:
        mask = torch.arange(LONG, device=DEVICE)[None] >= LONG - torch.tensor(lengths, device=DEVICE)[:, None]
        spans = build_spans(batch, q_len, LONG, q.device, q_offset=LONG - q_len, attention_mask=mask)
    expected, expected_lse = call(reference.attention, q, k, v, spans, return_lse=True)
    first, lse = fixup.VARIANTS[name](q, k, v, spans, return_lse=True)
    torch.testing.assert_close(first, expected, rtol=0, atol=allowed(v))
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
    for _ in range(REPEATS):
        assert torch.equal(fixup.VARIANTS[name](q, k, v, spans), first)
    assert not fixup.flags_of(q.device).any(), "flags were not reset"


@needs_gpu
def test_replays_are_correct_while_lengths_change_on_the_device():
    """Each replay changes the starts of the rows, runs every fix-up, and compares; the two runs of a fix-up bitwise."""
    capacity, batch = 16 << 10, 3
    q, k, v = operands(batch, 8, 4, 64, 1, capacity)
    spans = build_spans(batch, 1, capacity, q.device, q_offset=capacity - 1).expand(batch, -1, -1, -1).contiguous()
    clock = torch.zeros((), dtype=torch.int64, device=DEVICE)
    steps = torch.tensor([104729, 7919, 31], device=DEVICE)
    unequal = {name: torch.zeros((), dtype=torch.int64, device=DEVICE) for name in fixup.VARIANTS}
    error = torch.zeros((), device=DEVICE)
    starts = spans[:, 0, 0, KV_START]

    def step():
        clock.add_(1)
        starts.copy_((clock * steps) % capacity)
        expected = fixup.VARIANTS[fixup.STREAM_K](q, k, v, spans).float()
        for name, variant in fixup.VARIANTS.items():
            one, two = variant(q, k, v, spans), variant(q, k, v, spans)
            unequal[name].add_((one != two).any())
            error.copy_(torch.maximum(error, (one.float() - expected).abs().max()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert clock.item() == REPLAYS + 1 and len(set(starts.tolist())) == batch
    assert {name: count.item() for name, count in unequal.items()} == dict.fromkeys(fixup.VARIANTS, 0)
    assert error.item() <= allowed(v) and not fixup.flags_of(q.device).any()
    mask = torch.arange(capacity, device=DEVICE)[None] >= starts[:, None]
    exact = call(
        reference.attention, q, k, v, build_spans(batch, 1, capacity, q.device, q_offset=capacity - 1, attention_mask=mask)
    )
    torch.testing.assert_close(fixup.VARIANTS[fixup.HOST_WAITS](q, k, v, spans), exact, rtol=0, atol=allowed(v))


@needs_gpu
def test_a_grid_that_does_not_fit_is_refused_and_does_not_hang():
    q, k, v = operands(1, 1, 1, 64, 1, 1 << 18)
    config = tables.Config(16, 64, 4, 3, programs_per_sm=30)
    host_waits = partial(fixup.attention, fixup=fixup.HOST_WAITS, config=config)
    with pytest.raises(RuntimeError):
        call(host_waits, q, k, v)
    assert fixup.VARIANTS[fixup.HOST_WAITS](q, k, v).isfinite().all()


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("name", [fixup.HOST_WAITS, fixup.LAST_ARRIVER])
@pytest.mark.parametrize("arch", [80, 90])
def test_partials_are_published_after_a_barrier(name, arch, monkeypatch, tmp_path):
    from test_compile_offline import SHARED_LIMIT, compiling, read

    monkeypatch.setattr(fixup, "INTERPRETED", True)  # otherwise CPU tensors run the reference
    monkeypatch.setattr(fixup, "prepare", fixup.prepare.__wrapped__)
    q, k = torch.zeros(4, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(4, 8, 2048, 128, dtype=torch.bfloat16)
    with compiling(fixup, ("fixup_kernel",), arch) as compiled:
        fixup.VARIANTS[name](q, k, k)
    kernel = compiled["fixup_kernel"]
    assert kernel.metadata.launch_cooperative_grid == (name == fixup.HOST_WAITS)
    binary = read(kernel, tmp_path)
    assert 2 * binary.shared <= SHARED_LIMIT[arch] and binary.stack <= 64
    lines = [line.strip() for line in binary.ptx.splitlines()]
    released = next(i for i, line in enumerate(lines) if "atom.global" in line and "rel" in line)
    since = lines[:released][::-1]
    barrier = next(i for i, line in enumerate(since) if line.startswith("bar.sync"))
    assert not any("st.global" in line for line in since[:barrier])
    assert ("ld.global.gpu.acquire" in binary.ptx) == (name == fixup.HOST_WAITS)
