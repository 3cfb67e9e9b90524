"""A custom form of K and V: two device functions and their equivalent in torch."""

from __future__ import annotations

import pytest
import test_kernels
import torch
from cases import Case, make

from hf_fastattn.kernels import HAS_TRITON
from hf_fastattn.kernels.spec import KV, Form, Spec

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def load_negated(base, stride, first, offs_n, offs_d, mask, indices, extra):
        ptrs = base + first.to(tl.int64) * stride + (offs_n[:, None] * stride + offs_d[None, :])
        if mask is None:
            return -tl.load(ptrs)
        else:
            return -tl.load(ptrs, mask=mask, other=0.0)

    @triton.jit
    def load_scaled(base, stride, first, offs_n, offs_d, mask, indices, extra):
        """int8 times a scale for each slot, fp32 (batch, num_kv_heads, kv_len)."""
        row, kv_head, num_kv_heads, kv_len = indices
        scales, _, _ = extra
        slots = first + offs_n
        ptrs = base + first.to(tl.int64) * stride + (offs_n[:, None] * stride + offs_d[None, :])
        in_head = (row * num_kv_heads + kv_head) * kv_len
        scale = tl.load(scales + in_head + slots, mask=slots < kv_len, other=0.0)
        if mask is None:
            return tl.load(ptrs).to(tl.float32) * scale[:, None]
        else:
            return tl.load(ptrs, mask=mask, other=0).to(tl.float32) * scale[:, None]
else:
    load_negated = load_scaled = object()


def refuse_others(q, kv):
    if kv.k.dtype != torch.int8 or q.dtype != torch.float32:
        raise TypeError(f"K of int8 and queries of float32 are read; got {kv.k.dtype} and {q.dtype}.")


NEGATED = Form("negated V", load_v=load_negated, unpack=lambda kv: (kv.k, -kv.v))
SCALED = Form(
    "int8",
    load_scaled,
    load_scaled,
    unpack=lambda kv: (kv.k * kv.scales[..., None], kv.v * kv.scales[..., None]),
    check=refuse_others,
)
CASES = [
    Case(q_len=1, kv_len=50, head_dim=32),
    Case(q_len=3, kv_len=50, head_dim=24, rows=((0, 50, 0.0), (7, 50, 0.3))),
    Case(q_len=33, kv_len=50, head_dim=32, window=9),
    Case(q_len=3, kv_len=50, head_dim=24, value_dim=40),
    Case(q_len=2, kv_len=50, head_dim=320, value_dim=24),
    Case(q_len=1, kv_len=50, head_dim=32, window=9, first_tokens=4),
]


def shown(form: Form, x) -> tuple[KV, KV]:
    """(K and V of that form, the same as plain tensors)."""
    if form is NEGATED:
        return KV(x.k, -x.v, form), KV(x.k, x.v)
    k, v = ((8 * t.nan_to_num()).round().clamp(-127, 127).to(torch.int8) for t in (x.k, x.v))
    scales = torch.rand(k.shape[:3], device=k.device) + 0.1
    return (kv := KV(k, v, form, scales=scales)), KV(*kv.plain())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("form", [NEGATED, SCALED], ids=lambda form: form.name)
@pytest.mark.parametrize("kernel", test_kernels.RUNNABLE, ids=lambda kernel: kernel.name)
def test_a_custom_form(kernel, form, case, device):
    if kernel.aligned_only:
        pytest.skip("reads by TMA, and refuses forms")
    x = make(kernel.fit(case), device)
    kv, plain = shown(form, x)
    tensors = {name: x.options[name] for name in ("sink_logits", "inv_freq") if name in x.options}
    spec = Spec(**{name: value for name, value in x.options.items() if name in Spec._fields})
    with test_kernels.counted_launches(kernel) as launched:
        found = kernel.launcher()(x.q, kv, spec, x.spans, **tensors)
    assert bool(launched) == bool(kernel.launches)
    expected = kernel.launcher()(x.q, plain, spec, x.spans, **tensors)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, kernel.launcher()(x.q, KV(plain.k, -plain.v), spec, x.spans, **tensors))


def test_tensors_that_do_not_match_the_form_are_refused(device):
    x = make(CASES[0], device)
    for kernel in test_kernels.RUNNABLE:
        with pytest.raises(TypeError, match="K of int8"):
            kernel.launcher()(x.q, KV(x.k, x.v, SCALED))


def test_half_a_form_and_tensors_that_no_kernel_can_read_are_refused(device):
    x = make(CASES[0], device)
    for kernel in test_kernels.RUNNABLE:
        with pytest.raises(ValueError, match=r"'half' .* has device functions but no unpack"):
            kernel.launcher()(x.q, KV(x.k, x.v, Form("half", load_v=load_negated)))
        k, scales = torch.zeros(x.k.shape, dtype=torch.int8, device=device), torch.ones(*x.k.shape[:3], 2, device=device)[..., 0]
        with pytest.raises(ValueError, match="scales of K and V must be contiguous"):
            kernel.launcher()(x.q, KV(k, k, SCALED, scales=scales))
        with pytest.raises(TypeError, match="float64"):
            kernel.launcher()(x.q.double(), KV(x.k, x.v, NEGATED))


def test_the_hopper_kernel_refuses_forms_and_odd_widths(monkeypatch):
    pytest.importorskip("triton")
    from hf_fastattn.kernels.attention import prefill_hopper
    from hf_fastattn.kernels.host import gpu

    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    q = torch.zeros(1, 2, 128, 64, dtype=torch.float16)
    assert prefill_hopper.why_not(q, KV(q, q)) is None
    assert prefill_hopper.why_not(q, KV(q, q[..., :32])) is None
    assert "values with a head_dim in multiples of 8 up to 256, not 36" in prefill_hopper.why_not(q, KV(q, q[..., :36]))
    assert "of the form 'negated V'" in prefill_hopper.why_not(q, KV(q, q, NEGATED))
