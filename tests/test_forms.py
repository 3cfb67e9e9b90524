"""Forms of K and V: pages and 8 bits of the package, and latents and -V, each device functions and their equivalents in torch."""

from __future__ import annotations

import pytest
import test_kernels
import torch
from cases import Case, make

from hf_fastattn import context_parallel, registry
from hf_fastattn.kernels import HAS_TRITON, INTERPRETED, TritonKernel, eight_bits, paged, reference
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.spec import KV, PLAIN, Form, Sizes, Spec, bytes_per_token

PAGE = 16

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def load_negated(base, strides, first, offs_n, offs_d, mask, indices, extra):
        ptrs = base + (first + offs_n)[:, None] * strides[2] + offs_d[None, :]
        if mask is None:
            return -tl.load(ptrs)
        else:
            return -tl.load(ptrs, mask=mask, other=0.0)
else:
    load_negated = object()


NEGATED = Form("negated V", load_v=load_negated, unpack=lambda kv: (kv.k, -kv.v))
PAGED = paged.FORMS[PAGE]
BYTES = eight_bits.forms()["int8"]  # tests/test_kv_dtype.py has what it computes
# V is the first half of K.
HALF = {"sizes": lambda kv: Sizes(*kv.k.shape, kv.k.shape[3] // 2)}
LATENT = Form("latent", unpack=lambda kv: (kv.k, kv.v[..., : kv.sizes.value_dim]), **HALF)
FORMS = (NEGATED, PAGED, BYTES, LATENT)

RAGGED = Case(q_len=1, kv_len=50, head_dim=32, rows=((0, 50, 0.0), (7, 50, 0.3)))
FEW = {"batch": 1, "num_heads": 2, "num_kv_heads": 1}
SOME = Case(**FEW, q_len=3, kv_len=50, head_dim=24, value_dim=40, softcap=3.0, sinks=True)
MANY = Case(**FEW, q_len=33, kv_len=50, head_dim=32, window=9)
FIRST = Case(**FEW, q_len=1, kv_len=50, head_dim=32, window=9, first_tokens=4, turned=True)
WIDE = Case(**FEW, q_len=2, kv_len=50, head_dim=320, value_dim=24)
CASES = [
    *((NEGATED, case) for case in (SOME, WIDE)),
    *((PAGED, case) for case in (RAGGED, MANY, FIRST, WIDE)),
    *((LATENT, case) for case in (SOME, WIDE)),
]


def shown(form: Form, x) -> tuple[KV, KV]:
    """(K and V of that form, the same as plain tensors)."""
    if form is NEGATED:
        return KV(x.k, -x.v, form), KV(x.k, x.v)
    if form is LATENT:
        return KV(x.k, x.k, form), KV(x.k, x.k[..., : x.k.shape[3] // 2].contiguous())
    batch, heads, kv_len, _ = x.k.shape
    pages = -(-kv_len // PAGE) + 1  # the last is missing
    table = torch.randperm(batch * pages + 3, device=x.k.device)[: batch * pages].view(batch, pages).int()
    pool = [x.k.new_full((batch * pages + 3, PAGE, heads, t.shape[3]), float("nan")).transpose(1, 2) for t in (x.k, x.v)]
    kv = KV(*pool, form, pages=table)
    PAGED.pack(kv, x.k, x.v, torch.arange(kv_len, device=x.k.device).expand(batch, -1))
    plain = KV(*(t.contiguous() for t in kv.plain()))
    table[:, -1] = -1
    return kv, plain


def run(kernel, kv, x, spans):
    tensors = {name: x.options[name] for name in ("sink_logits", "inv_freq") if name in x.options}
    spec = Spec(**{name: value for name, value in x.options.items() if name in Spec._fields})
    return kernel(x.q, kv, spec, spans, return_lse=True, **tensors)


@pytest.mark.parametrize("form, case", CASES, ids=lambda x: getattr(x, "name", None) or x.id)
@pytest.mark.parametrize("kernel", test_kernels.RUNNABLE, ids=lambda kernel: kernel.name)
def test_a_form(kernel, form, case, device):
    if kernel.aligned_only:
        pytest.skip("reads by TMA, and refuses forms")
    x = make(kernel.fit(case), device)
    kv, plain = shown(form, x)
    spans = x.spans
    if form is PAGED:  # its block table has more slots than there are tokens; the mask of RAGGED is what its one query sees
        spans = test_kernels.spans.build_spans(
            len(x.q), x.q.shape[2], plain.k.shape[2], device, q_offset=case.kv_len - x.q.shape[2], window=case.window,
            attention_mask=None if case.rows is None else torch.as_tensor(x.seen[:, 0], device=device),
        )  # fmt: skip
    with test_kernels.counted_launches(kernel) as launched:
        found = run(TritonKernel(kernel.name, stream_k="lean") if kernel.launches else reference.attention, kv, x, spans)
    assert bool(launched) == bool(kernel.launches)
    torch.testing.assert_close(found, run(reference.attention, plain, x, spans), rtol=1e-4, atol=1e-4)


def new_tokens(tokens, device):
    """K and V of new tokens of two rows, and the slots where they begin."""
    k, v = (torch.randn(2, tokens, 2, dim, device=device).transpose(1, 2) for dim in (24, 16))
    return k, v, torch.tensor([30, 46], device=device)


def stored(device) -> KV:
    """Empty pages of two rows of 48 slots, with a head_dim of 24 and 16."""
    k, v = (torch.zeros(7, 2, PAGE, dim, device=device) for dim in (24, 16))
    return KV(k, v, PAGED, pages=torch.tensor([[6, 2, -1], [0, 5, 1]], dtype=torch.int32, device=device))


def check_stored(kv, k, v, first):
    """Tokens past the end and in missing pages are not written."""
    expected = [torch.zeros(2, 2, 48, dim, device=k.device) for dim in (24, 16)]
    for row, slot in enumerate(first.tolist()):
        for token in range(k.shape[2]):
            if slot + token < (32 if row == 0 else 48):
                expected[0][row, :, slot + token], expected[1][row, :, slot + token] = k[row, :, token], v[row, :, token]
    kv = kv._replace(pages=kv.pages.where(kv.pages >= 0, 3))  # an empty page
    assert all(map(torch.equal, kv.plain(), expected))


@pytest.mark.parametrize("each", [False, True])
def test_tokens_are_appended_in_a_form(each, device):
    kv, (k, v, first) = stored(device), new_tokens(4, device)
    append(kv, k, v, torch.arange(30, 34, device=device)[None] if each else first)
    check_stored(kv, k, v, first[:1].expand(2) if each else first)


@pytest.mark.parametrize("form", test_kernels.here(PAGED), ids=lambda form: form.name)
def test_a_rotation_appends_in_a_form(form, device):
    from hf_fastattn.kernels.decode import rope

    kv, (k, v, first) = stored(device), new_tokens(3, device)
    cos, sin = torch.randn(2, 2, 3, 24, device=device)
    rotation = rope.rotation(k, k, cos, sin, (False,) * 5)
    rotation.launch(kv, v, first)
    check_stored(kv, rope.rope(k, k, cos, sin)[1], v, first)


def test_sizes_and_bytes_of_a_token():
    k, v = torch.zeros(2, 3, 5, 24, dtype=torch.float16), torch.zeros(2, 3, 5, 16, dtype=torch.float32)
    assert KV(k, v).sizes == (2, 3, 5, 24, 16) and PLAIN.bytes_per_token(k, v) == bytes_per_token(k, v) == 2 * 3 * (48 + 64)
    assert BYTES.bytes_per_token(k, v) == 2 * 3 * (24 + 16 + 4)
    assert stored("cpu").sizes == (2, 2, 48, 24, 16) and KV(k, k, LATENT).sizes == (2, 3, 5, 24, 12)


def test_what_no_kernel_can_read_or_append_is_refused(device):
    """Tensors that do not match the form, half a form, and wide heads whose scores it changes."""
    x, wide = make(RAGGED, device), make(WIDE, device)
    k, scales = torch.zeros(x.k.shape, dtype=torch.int8, device=device), torch.ones(2, device=device).expand(2, 2)[:, :1]
    odd = x.q[..., :31].contiguous()
    cases = [
        (x.q, KV(x.k, x.v, Form("half", load_v=load_negated)), ValueError, "'half' of K and V has no unpack"),
        (x.q, KV(x.k, x.v, NEGATED, scales.T), ValueError, r"scales of K and V must have stride\(-1\) == 1 and be on"),
        (x.q.double(), KV(x.k, x.v, NEGATED), TypeError, "float64"),
        (odd, KV(*(t[..., :31] for t in (x.k, x.v)), BYTES._replace(check=None)), ValueError, "31 and 31 dimensions .* 2 parts"),
        (x.q[:1], KV(k, k, BYTES._replace(check=lambda q, kv: None)), ValueError, "agree in batch and head_dim"),
    ]
    for kernel in test_kernels.RUNNABLE:
        for q, kv, error, sentence in cases:
            with pytest.raises(error, match=sentence):
                kernel.launcher()(q, kv)
    for backend in map(registry.get, ("lean", "fa2")):
        with pytest.raises(ValueError, match=r"a head_dim of 320 in pieces, and the form 'int8' .* at most 256"):
            backend.attend(wide.q, KV(wide.k, wide.v, BYTES._replace(check=lambda q, kv: None)))
    with pytest.raises(ValueError, match=r"appended to K and V of the form 'negated V': it has no store\(\) and pack"):
        append(KV(x.k, x.v, NEGATED), x.k, x.v, torch.tensor([0], device=device))
    share = torch.Tensor._make_wrapper_subclass(context_parallel.Share, (1, 1, 1, 1))
    with pytest.raises(ValueError, match="Shares of K and V are plain tensors, and these have the form 'negated V'"):
        context_parallel.over_shares(reference.attention)(torch.zeros(1, 1, 1, 1), KV(share, share, NEGATED), Spec())


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="interpreted functions are not compiled")
def test_compiled_kernels_depend_on_the_code_of_a_form():
    others = PLAIN, PAGED._replace(paged=False), BYTES._replace(parts=1)
    assert len({form.cache_key for form in (*FORMS, *others)}) == len(FORMS) + 2
    assert NEGATED.cache_key == NEGATED._replace(name="other", unpack=None).cache_key


def test_the_hopper_kernel_refuses_forms_and_odd_widths(monkeypatch):
    pytest.importorskip("triton")
    from hf_fastattn.kernels.attention import prefill_hopper
    from hf_fastattn.kernels.host import gpu

    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    q = torch.zeros(1, 2, 128, 64, dtype=torch.float16)
    assert prefill_hopper.why_not(q, KV(q, q)) is None
    assert prefill_hopper.why_not(q, KV(q, q[..., :32])) is None
    assert "values with a head_dim in multiples of 8 up to 256, not 36" in prefill_hopper.why_not(q, KV(q, q[..., :36]))
    for form in (NEGATED, LATENT):  # also if a form has no loads of its own
        assert f"of the form {form.name!r}" in prefill_hopper.why_not(q, KV(q, q, form))
