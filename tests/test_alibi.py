"""The bias of keys (ALiBi) in the kernels; Bloom, MPT and Falcon under patch() compared with their own code."""

import copy
import functools

import pytest
import test_kernels
import torch
from cases import Case, make
from models import tiny
from test_training import agree
from transformers.models.falcon.modeling_falcon import FalconFlashAttention2

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.attention.backend import count_calls
from hf_fastattn.attention.function import attention_forward
from hf_fastattn.kernels import TritonKernel, reference
from hf_fastattn.kernels.biased import biased
from hf_fastattn.kernels.spec import KV, Spec
from hf_fastattn.patches.fused import subclass

CASES = [
    Case(q_len=1, kv_len=75, head_dim=32, num_kv_heads=4, rows=((0, 75, 0.0), (7, 60, 0.3))),
    Case(q_len=5, kv_len=50, head_dim=24, value_dim=40, num_kv_heads=4, window=20),
    Case(q_len=70, kv_len=75, batch=1, head_dim=32, num_kv_heads=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", test_kernels.RUNNABLE, ids=lambda kernel: kernel.name)
def test_a_bias_of_keys_is_one_more_dimension(kernel, case, device):
    """A query of 1 in that dimension, and a key with the bias. Slots past the keys of a row have any bias."""
    if kernel.aligned_only:
        pytest.skip("reads by TMA, and refuses forms")
    x = make(kernel.fit(case), device)
    batch, heads, kv_len, dim = x.k.shape
    bias = torch.tensor([0.5, 0.1, -0.2, 0.01], device=device)[:, None] * torch.arange(kv_len, device=device)
    rows = 1 if case.q_len == 5 else batch
    bias = bias.expand(rows, heads, kv_len).contiguous()
    bias[~x.k.isfinite().all(-1)[:rows]] = torch.nan
    spec = Spec(**{name: value for name, value in x.options.items() if name in Spec._fields})._replace(scale=dim**-0.5)
    q, k = (
        torch.nn.functional.pad(x.q, (0, 1), value=1.0),
        torch.cat([x.k, bias.expand(batch, -1, -1)[..., None] / spec.scale], -1),
    )
    want = reference.attention(q, KV(k, x.v), spec, x.spans, return_lse=True)
    attention = TritonKernel(kernel.name, stream_k="lean") if kernel.launches else reference.attention
    with test_kernels.counted_launches(kernel) as launched:
        got = attention(x.q, biased(KV(x.k, x.v), bias), spec, x.spans, return_lse=True)
    assert bool(launched) == bool(kernel.launches)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_would_be_ignored_is_refused(device):
    q, k = torch.randn(1, 4, 1, 16, device=device), torch.randn(1, 4, 9, 16, device=device)
    bias = torch.zeros(1, 4, 9, device=device)
    with pytest.raises(ValueError, match="would ignore the bias"):
        biased(KV(k, k), bias).plain()
    with pytest.raises(ValueError, match="needs plain K and V"):
        biased(biased(KV(k, k), bias), bias)
    for given, error, says in (
        (bias[:, :, 1:], ValueError, r"\(batch, num_heads, kv_len\), here \(1, 4, 9\)"),
        (torch.zeros(4, 9, device=device).expand(1, -1, -1)[:, :1].expand(-1, 4, -1), ValueError, "contiguous"),
        (bias.int(), TypeError, "floating point"),
    ):
        with pytest.raises(error, match=says):
            reference.attention(q, biased(KV(k, k), given))
    with pytest.raises(ValueError, match="one KV head for each query head"):
        reference.attention(torch.randn(1, 8, 1, 16, device=device), biased(KV(k, k), bias))


MODELS = {
    "bloom": {"n_head": 4, "n_layer": 2, "use_cache": True},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 60, "use_cache": True},
    # Its bias is added twice with "eager".
    "falcon with ALiBi": {"attn_implementation": "sdpa", "alibi": True, "multi_query": False, "parallel_attn": False},
    "falcon": {"attn_implementation": "sdpa"},  # one KV head
    "falcon with groups": {"attn_implementation": "sdpa", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon with one biased KV head": {"attn_implementation": "sdpa", "alibi": True},
}


def make_model(name):
    return tiny(name.partition(" ")[0], **MODELS[name])


IDS = torch.arange(60).view(2, 30) % 97 + 5
PADDED = torch.ones_like(IDS)
PADDED[0, :7] = 0
HOLES = PADDED.clone()
HOLES[1, 10:13] = 0  # Bloom counts the tokens that the mask keeps


@pytest.mark.parametrize("mask", [None, PADDED, HOLES], ids=["whole", "padded", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_gradients_are_those_of_the_model(name, mask, captured_steps):
    model = make_model(name)
    generate = lambda: model.generate(IDS, attention_mask=mask, max_new_tokens=9, do_sample=False)  # noqa: E731

    live = torch.ones_like(IDS) if mask is None else mask  # the rows of padding, which sees nothing, are another uniform mean

    def gradients():
        model.zero_grad()
        (model(IDS, attention_mask=mask).logits.square().mean(-1) * live).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    tokens, expected = generate(), gradients()
    with hf_fastattn.patch(model) as patch:
        with count_calls() as calls:
            assert torch.equal(generate(), tokens) and torch.equal(generate(), tokens)
        assert sum(calls.values()) and not calls["lean.dense"] and patch.captures > 0
        with count_calls() as calls:
            agree(gradients(), expected)
        assert calls == {"lean.prefill": 2, "lean.backward": 2}
    assert torch.equal(generate(), tokens) and not any(map(subclass.is_fused, model.modules()))


@torch.no_grad()
def test_texts_beyond_the_longest_of_mpt_continue_its_bias(captured_steps):
    """As in a model whose max_seq_len is longer; its own code raises an error."""
    model, longer = (tiny("mpt", **MODELS["mpt"] | {"max_seq_len": limit}) for limit in (24, 80))
    tokens = longer.generate(IDS, attention_mask=PADDED, max_new_tokens=20, do_sample=False)
    with hf_fastattn.patch(model):
        assert torch.equal(model.generate(IDS, attention_mask=PADDED, max_new_tokens=20, do_sample=False), tokens)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_turns_with_padding(name, beams, captured_steps):
    model = make_model(name)

    def turns():
        ids, mask, cache = IDS[:, :12], PADDED[:, :12], None
        for more in (IDS[:, 12:20], IDS[:, 20:25]):
            given = {"attention_mask": mask, "max_new_tokens": 4, "num_beams": beams, "do_sample": False, hf.CACHE: cache}
            found = model.generate(ids, return_dict_in_generate=True, **given)
            cache = found[hf.CACHE] if beams == 1 else None
            ids = torch.cat([found.sequences, more], 1)
            mask = torch.cat([mask, torch.ones_like(ids)[:, mask.shape[1] :]], 1)
        return ids

    want = turns()
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(turns(), want) and patch.captures > 0


@pytest.mark.parametrize("name", MODELS)
def test_modes_of_generate(name, captured_steps):
    model = make_model(name)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}, {"num_return_sequences": 2}):
        ids = IDS[: 1 if "prompt_lookup_num_tokens" in options else 2]
        if "num_return_sequences" in options:
            options = {**options, "do_sample": True}

        def generate(ids=ids, options=options):
            torch.manual_seed(0)
            return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options)

        want = generate()
        with hf_fastattn.patch(model):
            assert torch.equal(generate(), want), options


@torch.no_grad()
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon with ALiBi", "falcon"])
def test_refusals(name):
    model = make_model(name)
    has = "attention code of its own" if name == "falcon" else "ALiBi"
    for backend in ("streaming", "linear"):
        with pytest.raises(ValueError, match=f"has {has}, which '{backend}' does not support"):
            hf_fastattn.patch(model, backend)
    with hf_fastattn.patch(model), pytest.raises(ValueError, match=r"never forms the attention weights .*unpatch\(\)"):
        model(IDS, output_attentions=True)
    assert model(IDS, output_attentions=True).attentions[0].shape == (2, 4, 30, 30)
    if name == "falcon":
        return
    with pytest.raises(ValueError, match="kv_dtype='int8' is for models without ALiBi"):
        hf_fastattn.patch(model, kv_dtype="int8")
    with (
        hf_fastattn.patch(model),
        pytest.raises(ValueError, match=r"bias of keys \(ALiBi\), which .* beside pages"),
    ):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    if name == "falcon with ALiBi":
        with pytest.raises(ValueError, match=r'added twice by the code of "eager"\. Load it with .*"sdpa"'):
            hf_fastattn.patch(tiny("falcon", **MODELS[name] | {"attn_implementation": "eager"}))


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon", "falcon with groups"])
def test_falcon_with_rotations_has_what_other_models_have(name):
    model, ids = make_model(name), torch.arange(4 * 90).view(4, 90) % 97 + 5
    mask = torch.ones_like(ids)
    mask[:3, :80] = 0
    want = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for layer in model.transformer.h:
        if name == "falcon":  # as loaded with flash_attention_2
            layer.self_attention.__class__ = FalconFlashAttention2
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), want)
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
        assert "240 tokens of padding" in str(patch)
        texts = [row[live.bool()].tolist() for row, live in zip(ids, mask, strict=True)]
        found = model.generate_batch(texts, max_new_tokens=5)
        assert [each.generated_tokens for each in found.values()] == want[:, 90:].tolist()
    with hf_fastattn.patch(model, kv_dtype="int8"):
        assert model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False).shape == want.shape
    assert hf_fastattn.explain(model, length=64).facts.num_kv_heads == (1 if name == "falcon" else 2)


@torch.no_grad()
def test_dropout_of_weights():
    model = tiny("bloom", **MODELS["bloom"] | {"attention_dropout": 0.3})
    with hf_fastattn.patch(model), count_calls() as calls:
        first, second = (model.train()(IDS, use_cache=False).logits for _ in range(2))
        assert not torch.allclose(first, second) and torch.equal(model.eval()(IDS).logits, model(IDS).logits)
    assert calls == {"lean.prefill": 4, "lean.decode": 4}


@pytest.mark.parametrize("dense", [False, True])
def test_the_dense_path_adds_the_bias(dense, device):
    """With gradients: for any mask, and for a bias that has one itself."""
    q, k, v = (torch.randn(2, 4, 9, 16, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 4, 9, device=device, requires_grad=not dense)
    seen = torch.ones(9, 9, dtype=torch.bool, device=device).tril()[None, None].repeat(2, 1, 1, 1)
    seen[:, :, 5, 2] = not dense
    scores = (q @ k.transpose(2, 3) / 4 + bias[:, :, None]).masked_fill(~seen, -torch.inf)
    want = (torch.softmax(scores, -1) @ v).transpose(1, 2)
    with count_calls() as calls:
        out, _ = attention_forward("lean", torch.nn.Module(), q, k, v, seen if dense else None, key_bias=bias)
    assert calls == {"lean.dense": 1}
    given, dout = [q, k, v, *([] if dense else [bias])], torch.randn_like(out)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    found, expected = (torch.autograd.grad(x, given, dout) for x in (out, want))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 256])  # on Hopper dK and dV of the latter have programs of their own
def test_gradients_with_a_bias_of_keys(head_dim, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(2, 4, 70, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    bias, hidden = torch.randn(2, 4, 70, device=device), torch.ones(70, 70, dtype=torch.bool, device=device).triu(1)
    dout = torch.randn(2, 70, 4, head_dim, device=device, dtype=dtype)

    def gradients(given, dtype):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in given)
        scores = (q @ k.transpose(2, 3) * head_dim**-0.5 + bias[:, :, None].to(dtype)).masked_fill(hidden, -torch.inf)
        return torch.autograd.grad((torch.softmax(scores, -1) @ v).transpose(1, 2), (q, k, v), dout.to(dtype))

    with count_calls() as calls:
        out, _ = attention_forward("lean", torch.nn.Module(), q, k, v, None, key_bias=bias)
        found = torch.autograd.grad(out, (q, k, v), dout)
    assert calls == {"lean.prefill": 1, "lean.backward": 1}
    for mine, theirs, exact in zip(found, gradients((q, k, v), dtype), gradients((q, k, v), torch.float64), strict=True):
        error, allowed = ((x.double() - exact).abs().max() for x in (mine, theirs))
        assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name):
    model = make_model(name)
    torch._dynamo.reset()

    def gradients(forward):
        model.zero_grad()
        forward(IDS, attention_mask=PADDED, use_cache=False).logits[:, 7:].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with torch.no_grad():
        want = model(IDS, attention_mask=PADDED).logits
    expected = gradients(model)
    with hf_fastattn.patch(model):
        forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        with count_calls() as calls:
            agree(gradients(forward), expected, atol=1e-3 * max(x.abs().max().item() for x in expected.values()))
            with torch.no_grad():
                got = forward(IDS, attention_mask=PADDED, use_cache=False).logits
        torch.testing.assert_close(got[:, 7:], want[:, 7:], rtol=1e-3, atol=1e-3)
        assert calls["lean.prefill"] + calls["lean.decode"] == 4 and calls["lean.backward"] == 2 and not calls["lean.dense"]


@torch.no_grad()
def test_a_product_of_bloom_in_parts():
    model = tiny("bloom", **MODELS["bloom"], pretraining_tp=2, slow_but_exact=True)
    want = model(IDS).logits
    assert not torch.allclose(tiny("bloom", **MODELS["bloom"])(IDS).logits, want, atol=1e-2)
    with hf_fastattn.patch(model):
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_the_user_and_one_without_a_cache(name):
    """4-D, added to the scores: each token sees all but the second one."""
    model, mask = make_model(name), torch.zeros(2, 1, 30, 30)
    mask[..., 1] = torch.finfo(torch.float32).min
    calls = [
        {"attention_mask": PADDED if hf.counts_without_mask(model.config) or name == "bloom" else mask},  # they take none of 4-D
        {"use_cache": False},
    ]
    want = [model(IDS, **each).logits for each in calls]
    with hf_fastattn.patch(model):
        for each, expected in zip(calls, want, strict=True):
            torch.testing.assert_close(model(IDS, **each).logits[:, 7:], expected[:, 7:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, place",
    [("forward", "class"), ("forward", "subclass"), *(("_merge_heads", each) for each in ("instance", "class", "subclass"))],
)
def test_attention_code_of_the_user_is_refused_by_name(name, place, monkeypatch):
    model = make_model("bloom")
    module = model.transformer.h[0].self_attention
    own, cls = getattr(type(module), name), type(module)
    mine = lambda self, *args, **options: own(self, *args, **options)  # noqa: E731
    if place == "instance":
        setattr(module, name, functools.partial(mine, module))
    elif place == "class":
        monkeypatch.setattr(cls, name, mine)
    else:
        module.__class__ = type("Mine", (cls,), {name: mine})
    with pytest.raises(ValueError, match=rf"the {name}\(\) of its (Mine|BloomAttention) is not that of Transformers"):
        hf_fastattn.patch(model, "lean")


def test_the_factor_of_blooms_bias(captured_steps):
    model = make_model("bloom")
    for layer in model.transformer.h:
        layer.self_attention.beta = 0.5
    ids = torch.randint(3, 90, (1, 9))
    right = model(ids).logits
    with hf_fastattn.patch(model, "lean"):
        torch.testing.assert_close(model(ids).logits, right, atol=1e-4, rtol=1e-4)
