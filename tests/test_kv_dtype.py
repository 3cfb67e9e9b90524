"""K and V in 8 bits: kernels beside fp64 attention over the same numbers, what is stored, and generate() beside a simulation."""

from __future__ import annotations

import io
import itertools
from contextlib import nullcontext

import models
import oracle
import pytest
import test_forms
import test_kernels
import tolerance
import torch
import transformers
from cases import Case, make, slow_unless
from models import PADDINGS, generate, prompts, tiny
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.caches.eight_bits import ByteLayer
from hf_fastattn.kernels import TritonKernel, eight_bits, reference
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.spec import KV, Spec

both = pytest.mark.parametrize("kv_dtype", eight_bits.KV_DTYPES)
DECODE = [kernel for kernel in test_kernels.RUNNABLE if kernel.name in ("lean", "split_kv", "reference")]
kernels = pytest.mark.parametrize("kernel", DECODE, ids=lambda kernel: kernel.name)
FEW = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "dtype": "fp16", "kv_len": 50}
CASES = [
    Case(q_len=1, kv_len=50, dtype="fp16", head_dim=32, rows=((0, 50, 0.0), (7, 50, 0.3))),
    Case(**FEW, q_len=3, head_dim=24, value_dim=40, softcap=3.0, sinks=True),
    Case(**FEW, q_len=1, head_dim=32, window=9, first_tokens=4, turned=True),
    Case(**FEW, q_len=20, head_dim=16, window=30),
]


def stored(k, v, kv_dtype, centre=None, before=4, after=5) -> KV:
    """k and v in a slice of longer buffers, whose other slots hold any codes, and scales without values."""
    room = [x.new_zeros(*x.shape[:2], before + x.shape[2] + after, x.shape[3]) for x in (k, v)]
    keys, values, scales = eight_bits.empty(*room)
    keys.fill_(255), values.fill_(255), scales.fill_(-1)
    centre = k.nan_to_num().mean(2) if centre is None else centre
    kv = eight_bits.eight_bits(keys, values, scales, centre, kv_dtype)
    slots = torch.arange(k.shape[2], device=k.device).expand(len(k), -1)
    kv.form.pack(kv, k, v, slots + before)
    live = slice(before, before + k.shape[2])
    return kv._replace(k=keys[:, :, live], v=values[:, :, live], scales=scales[:, :, live])


def run(kernel, kv, x):
    return test_forms.run(TritonKernel(kernel.name) if kernel.launches else reference.attention, kv, x, x.spans)


@both
@kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention_over_what_is_stored(kernel, case, kv_dtype, device):
    """Tokens that no query sees have NaN as scales, and as a sum of centre and product."""
    x = make(case, device)
    shift = (0 if case.turned else 30) * torch.randn(1, x.k.shape[1], 1, x.k.shape[3], device=device).half()
    kv = stored(x.k + shift, x.v, kv_dtype)
    k, v = kv.plain()
    found = run(kernel, kv, x)
    of_sinks = {"q_sinks": x.q_sinks, "is_sink": x.is_sink}
    options = {name: value for name, value in x.options.items() if name in ("scale", "softcap", "sink_logits")}
    expected = oracle.attention(x.q, k, v, x.seen, **options, **of_sinks)
    # Scores without the centre differ by a constant, and the peer can round K.
    small = KV((k - kv.centre.float()[:, :, None]).half(), v.half())
    peer = expected[0] if case.softcap or case.turned else run(test_kernels.REFERENCE, small, x)[0]
    scale = tolerance.largest(oracle.attention(x.q, k, v.abs(), x.seen, **options, **of_sinks)[0])
    tolerance.assert_close(found[0], expected[0], peer, torch.finfo(torch.float16).eps, scale, "out")
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-3, atol=1e-3)


@both
@kernels
def test_all_codes_are_exact(kernel, kv_dtype, device):
    """Of one key: V is the result, and each of 256 queries has a number of K as its score."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = codes.float() - 128 if kv_dtype == "int8" else codes.view(torch.float8_e4m3fn).float()
    if kv_dtype == "fp8":  # its two codes without a value
        codes = codes.masked_fill(numbers.isnan(), 0)
        numbers = numbers.nan_to_num()
    one = torch.full((1, 4, 1), 0x3F803F80, dtype=torch.int32, device=device)
    centre = torch.zeros(1, 4, 256, dtype=torch.float16, device=device)
    kv = eight_bits.eight_bits(*[codes.expand(1, 4, 1, 256).contiguous()] * 2, one, centre, kv_dtype)
    q = torch.eye(256, device=device).view(1, 256, 1, 256).half()
    of_k = one.view(torch.float32)[0, 0].item()  # whose lower half is V's scale
    launch = TritonKernel(kernel.name) if kernel.launches else reference.attention
    out, lse = launch(q, kv, Spec(scale=1.0), return_lse=True)
    assert torch.equal(out[0, :, 0].float(), numbers.expand(256, -1))
    torch.testing.assert_close(lse[0, :, 0], numbers * of_k, rtol=1e-6, atol=1e-6)


@both
@kernels
def test_a_constant_in_each_channel_of_k_changes_nothing(kernel, kv_dtype, device):
    x = make(Case(**{**FEW, "dtype": "fp32", "kv_len": 64}, q_len=1, head_dim=32, lse=False), device)
    k = (x.k * 64).round() / 64  # sums of these are exact
    found = []
    for constant in (0.0, 50.0 * torch.arange(-16, 16, device=device)):
        kv = stored(k + constant, x.v, kv_dtype)
        found.append((kv.k, kv.scales, run(kernel, kv, x)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-3, atol=1e-3)


@both
@pytest.mark.parametrize("how", test_kernels.here("append", "rope"))
def test_launches_store_what_torch_stores(how, kv_dtype, device):
    """Bit for bit: zeros, tiny and large tokens, and those that are not finite; tokens past the end and others stay."""
    from hf_fastattn.kernels.decode import rope

    k, v = torch.randn(2, 2, 6, 24, device=device), torch.randn(2, 2, 6, 16, device=device)
    for x in (k, v):
        x[0, 0, 0], x[0, 1, 1, 3], x[1, 0, 2, 5] = 0.0, float("nan"), float("inf")
        x[1, 1, 3] *= 1e-30
        x[:, :, 4] *= 1e20
    slot, centre = torch.tensor([3, 14], device=device), torch.randn(2, 2, 24, device=device)
    rotation = None
    if how == "rope":
        cos, sin = torch.randn(2, 2, 6, 24, device=device)
        rotation = rope.rotation(k, k, cos, sin, (False,) * 5)
        assert rotation is not None
        rotated = rope.rope(k, k, cos, sin)[1]
    made = []
    for torch_alone in (False, True):
        room = [torch.zeros(2, 2, 18, x.shape[3], device=device) for x in (k, v)]
        kv = eight_bits.eight_bits(*eight_bits.empty(*room), centre, kv_dtype)
        if torch_alone:
            kv.form.pack(kv, k if rotation is None else rotated, v, slot[:, None] + torch.arange(6, device=device))
        elif rotation is None:
            append(kv, k, v, slot)
        else:
            rotation.launch(kv, v, slot)
        made.append(kv)
    scales = [kv.scales.view(torch.float32) for kv in made]
    bad = scales[0].isnan() | (made[0].scales << 16).view(torch.float32).isnan()
    assert torch.equal(made[0].scales, made[1].scales) and bad.sum() == (2 if how == "append" else bad.sum())
    for a, b in ((made[0].k, made[1].k), (made[0].v, made[1].v)):
        assert torch.equal(a.masked_fill(bad[..., None], 0), b.masked_fill(bad[..., None], 0))
    assert not made[0].scales[0, :, :3].any() and not made[0].scales[0, :, 9:].any() and made[0].scales[1, :, 14:].all()


@both
def test_a_code_is_the_nearest_number(kv_dtype):
    k = torch.randn(1, 1, 100, 64) * torch.logspace(-3, 3, 100)[:, None]
    kv = stored(k, k, kv_dtype, centre=torch.zeros(1, 1, 64))
    largest = k.abs().amax(-1, keepdim=True)
    # A scale is up to 1/128 larger than needed. e4m3 has 4 bits, and steps of 2^-9 for the smallest numbers.
    step = largest / 127 if kv_dtype == "int8" else torch.maximum(k.abs() / 8, largest / 448 / 2**9)
    for found in kv.plain():
        assert ((found - k).abs() <= 0.5 * (1 + 1 / 64) * step).all()


class Simulated(DynamicCache):
    """K and V of Transformers' cache, rounded as in 8 bits after the first tokens, by code of its own."""

    def __init__(self, kv_dtype, inputs):
        super().__init__()
        self.kv_dtype, self.centres = kv_dtype, {}
        self.live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[:, None, :, None]

    def scale(self, x):
        """That of 8 bits, rounded upwards to 8 bits of its own, in fp32."""
        scale = (x.abs().amax(-1, keepdim=True) / (127 if self.kv_dtype == "int8" else 448)).double()
        power = 2.0 ** (scale.log2().floor() - 7)
        return ((scale / power).ceil() * power).float()

    def rounded(self, x, scale):
        x = x / scale
        return (x.round() if self.kv_dtype == "int8" else x.to(torch.float8_e4m3fn).float()) * scale

    def update(self, keys, values, layer_idx, *args, **kwargs):
        first = layer_idx not in self.centres
        if first:
            live = self.live.repeat_interleave(len(keys) // len(self.live), 0)
            self.centres[layer_idx] = (keys * live).sum(2, keepdim=True) / live.sum(2, keepdim=True)
        centre, of_v = self.centres[layer_idx], self.scale(values)
        # The further bits of K's scale are those of V's.
        of_k = (self.scale(keys - centre).view(torch.int32) + (of_v.view(torch.int32) >> 16)).view(torch.float32)
        kept = self.rounded(keys - centre, of_k) + centre, self.rounded(values, of_v)
        found = super().update(*kept, layer_idx, *args, **kwargs)
        return (keys, values) if first else found

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.centres = {index: centre[beam_idx] for index, centre in self.centres.items()}


CALLS = {"greedy": {}, "beams": {"num_beams": 3}, "samples": {"num_return_sequences": 2, "do_sample": True}}
ALL = [*itertools.product(CALLS, PADDINGS)]


@pytest.fixture
def llama():
    return tiny("llama", head_dim=32)


@pytest.mark.parametrize("name, padding", slow_unless(ALL[::4].__contains__, ALL))
def test_generate_is_that_over_rounded_k_and_v(captured, llama, name, padding):
    inputs = prompts(padding, "cpu", length=60)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True, **CALLS[name]}
    plain = generate(llama, inputs, **options)
    expected = generate(llama, inputs, **options, past_key_values=Simulated("int8", inputs))
    with hf_fastattn.patch(llama, kv_dtype="int8") as patch:
        for _ in range(2):  # the second call has the storage of the first one
            found = generate(llama, inputs, **options)
            assert torch.equal(found.sequences, expected.sequences)
        assert patch.replays and not patch.reasons
        assert "K and V of 2 layers in 8 bits (int8), an approximation" in str(patch)
    if name == "greedy":  # a prompt is not rounded
        with hf_fastattn.patch(llama):
            assert torch.equal(generate(llama, inputs, **options).logits[0], found.logits[0])
    rounding = (expected.logits[1] - plain.logits[1]).abs().max()
    assert (found.logits[1] - expected.logits[1]).abs().max() < 0.1 * rounding


@both
@pytest.mark.parametrize("backend", ["lean", "split_kv", "batch_invariant"])
def test_backends_and_steps_without_a_graph(llama, backend, kv_dtype):
    inputs = prompts("left_padding", "cpu", length=40)
    expected = generate(llama, inputs, max_new_tokens=8, past_key_values=Simulated(kv_dtype, inputs))
    with hf_fastattn.patch(llama, backend, kv_dtype=kv_dtype, graph=False), hf_fastattn.count_calls() as calls:
        cache = PreallocatedCache(llama, kv_dtype=kv_dtype)
        assert torch.equal(generate(llama, inputs, max_new_tokens=8, past_key_values=cache), expected)
    assert calls[f"{backend}.decode"] == 14
    assert all(isinstance(layer, ByteLayer) and layer.buffers[0].dtype == torch.uint8 for layer in cache.layers)


def test_turns_messages_lookup_and_cropping(captured, llama):
    """A message of many tokens behind a past reads K and V that are written out; prompt lookup reads some queries at once."""
    ids = prompts("no_padding", "cpu", rows=1, length=90)["input_ids"]

    def chat(cache):
        first = generate(llama, {"input_ids": ids[:, :40]}, max_new_tokens=5, past_key_values=cache)
        return generate(llama, {"input_ids": torch.cat([first, ids[:, 40:]], 1)}, max_new_tokens=9, past_key_values=cache)

    expected = chat(Simulated("int8", {"input_ids": ids[:, :40]}))
    text = {"input_ids": prompts("no_padding", "cpu", rows=1)["input_ids"]}
    with hf_fastattn.patch(llama, kv_dtype="int8") as patch:
        cache = PreallocatedCache(llama, kv_dtype="int8")
        assert torch.equal(chat(cache), expected) and not patch.reasons
        cache.crop(-5)
        assert torch.equal(generate(llama, {"input_ids": expected[:, :-4]}, max_new_tokens=4, past_key_values=cache), expected)
        found = generate(llama, text, max_new_tokens=12, prompt_lookup_num_tokens=3)
        assert torch.equal(found, generate(llama, text, max_new_tokens=12))


@both
def test_what_is_stored(llama, kv_dtype):
    """Bytes; rows are selected with their centres; earlier tokens are never written again; K and V are shown as copies."""
    torch.manual_seed(0)
    cache = PreallocatedCache(llama, kv_dtype=kv_dtype)
    k, v = torch.randn(3, 2, 6, 32), torch.randn(3, 2, 6, 32)
    cache.update(k, v, 0)
    layer = cache.layers[0]
    sizes = {part.name: part.tensor.nbytes for part in cache.storage.memory()}
    capacity = layer.track.capacity
    assert sizes == {"keys": 6 * capacity * 32, "values": 6 * capacity * 32, "scales": 6 * capacity * 4, "centre": 6 * 32 * 4}
    cache.reserve(300)
    assert layer.buffers[0].shape[2] > capacity
    old = [x[:, :, :6].clone() for x in layer.buffers]
    hf.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"written out in torch.float32 in each step: .* Call hf_fastattn.patch"):
        keys, values = cache.update(100 * k[:, :, :1], 100 * v[:, :, :1], 0)
    assert all(torch.equal(x[:, :, :6], y) for x, y in zip(layer.buffers, old, strict=True))
    assert keys.shape == (3, 2, 7, 32) and torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    for change in (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), lambda: cache.batch_select_indices(torch.tensor([1]))):
        change()
    assert torch.equal(layer.keys, keys[:1]) and len(layer.centre) == 1
    torch.save(cache, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).layers[0].keys, layer.keys)
    cache.reset()
    first = cache.update(k[:1] + 7, v[:1], 0)
    assert torch.equal(first[0], k[:1] + 7) and torch.equal(layer.centre, (k[:1] + 7).mean(2, keepdim=True))


def test_beams_permute_scales_and_centres(llama, device):
    cache = PreallocatedCache(llama, kv_dtype="int8")
    for layer in range(2):
        cache.update(*torch.randn(2, 3, 2, 5, 32, device=device), layer)
    for index in ([2, 0, 0], [1, 1, 2]):
        before = [(layer.keys, layer.values) for layer in cache.layers]
        cache.reorder_cache(torch.tensor(index, device=device))
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys[index]) and torch.equal(layer.values, values[index])


def test_layers_with_a_window_keep_k_and_v(captured):
    model = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    inputs = prompts("no_padding", "cpu", length=40)
    with hf_fastattn.patch(model, kv_dtype="fp8") as patch:
        out = generate(model, inputs, max_new_tokens=4, return_dict_in_generate=True)
        layers = out.past_key_values.layers
        assert [layer.kv_dtype for layer in layers] == ["fp8", None] and layers[1].buffers[0].dtype == torch.float32
        assert "K and V of 1 layers in 8 bits (fp8), an approximation, 1 with a window" in str(patch) and patch.replays


def test_other_attention_gets_plain_k_and_v(llama):
    inputs = prompts("left_padding", "cpu", length=40)
    expected = generate(llama, inputs, max_new_tokens=6, past_key_values=Simulated("int8", inputs))
    hf.warn_once.cache_clear()
    with hf_fastattn.patch(llama, kv_dtype="int8", graph=False):
        for name in ("fa2", "reference", "sdpa"):
            llama.set_attn_implementation(name)
            cache = PreallocatedCache(llama, kv_dtype="int8")
            with pytest.warns(UserWarning, match="written out") if name == "sdpa" else nullcontext():
                assert torch.equal(generate(llama, inputs, max_new_tokens=6, past_key_values=cache), expected), name
    llama.set_attn_implementation("lean")
    hf.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="does not belong to a patched model") as said:
        cache = PreallocatedCache(llama, kv_dtype="int8")
        assert torch.equal(generate(llama, inputs, max_new_tokens=6, past_key_values=cache), expected)
    assert {warning.filename for warning in said if "in 8 bits" in str(warning.message)} == {models.__file__}  # has generate()


def test_autocast(captured, llama):
    """Queries and keys are rotated in float32, and values are in bfloat16."""
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    inputs, found = prompts("left_padding", "cpu", length=40), []
    for kv_dtype in (None, "int8"):
        with hf_fastattn.patch(llama, kv_dtype=kv_dtype), torch.autocast("cpu", torch.bfloat16):
            found.append(generate(llama, inputs, **options))
    (first, second, *_), logits = (each.logits for each in found)
    assert torch.equal(logits[0], first) and found[1].past_key_values.layers[0].centre.dtype == torch.bfloat16
    assert (logits[1] - second).abs().max() < 0.1 * second.abs().max()


def test_a_cache_of_the_caller_keeps_its_dtype(captured, llama):
    inputs = prompts("no_padding", "cpu", length=40)
    for kv_dtype, own in (("int8", None), (None, "int8"), ("int8", "fp8"), ("int8", "int8")):
        with hf_fastattn.patch(llama, kv_dtype=kv_dtype):
            generate(llama, inputs, max_new_tokens=4)
            cache = PreallocatedCache(llama, kv_dtype=own)
            generate(llama, inputs, max_new_tokens=4, past_key_values=cache)
            assert [layer.kv_dtype for layer in cache.layers] == [own] * 2


REFUSED = [
    ({"kv_dtype": "int4"}, r'kv_dtype must be "int8", "fp8" or None; got .int4.'),
    ({"kv_dtype": torch.int8}, r'kv_dtype must be "int8", "fp8" or None; got torch.int8'),
    ({"kv_dtype": True}, "kv_dtype must be"),
    ({"backend": "fa2", "kv_dtype": "int8"}, r"decode kernel reads 8 bits: batch_invariant, lean, split_kv; got 'fa2'"),
    ({"backend": "reference", "kv_dtype": "int8"}, "got 'reference'"),
    ({"backend": "streaming", "window": 8, "kv_dtype": "int8"}, "got 'streaming' with a cache of 'rolling'"),
    ({"cache": None, "graph": False, "kv_dtype": "int8"}, "got 'lean' with a cache of None"),
]


def test_what_is_refused(llama, monkeypatch):
    for options, sentence in REFUSED:
        with pytest.raises(ValueError, match=sentence):
            hf_fastattn.patch(llama, **options)
    assert not llama._forward_pre_hooks
    with pytest.raises(ValueError, match=r"kv_dtype must be .* got 8"):
        PreallocatedCache(llama, kv_dtype=8)
    windowed = tiny("mistral", sliding_window=16)
    with pytest.raises(ValueError, match="each layer of this model has a sliding window"):
        hf_fastattn.patch(windowed, kv_dtype="int8")
    with pytest.raises(ValueError, match=r"kv_dtype='int8' is for .* this model caches latents \(MLA\)"):
        PreallocatedCache(transformers.DeepseekV3Config(), kv_dtype="int8")
    with pytest.raises(ValueError, match="an even head_dim up to 256; got 320 and 320"):
        PreallocatedCache(tiny("llama", head_dim=320), kv_dtype="int8")
    repeats = tiny("jetmoe", kv_channels=16, num_local_experts=2, num_experts_per_tok=2)
    for model in (repeats, tiny("diffllama")):
        for refuse in (hf_fastattn.patch, hf_fastattn.explain):
            with pytest.raises(ValueError, match="attention reads as they are cached, and the code of this model changes them"):
                refuse(model, kv_dtype="int8")
    monkeypatch.setattr(hf, "changes_cached", lambda config: False)  # as of a model that is not known to do it
    changed = pytest.raises(ValueError, match="changes K and V after they are stored in 8 bits")
    with hf_fastattn.patch(repeats, kv_dtype="int8"), changed:
        repeats.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    cache = PreallocatedCache(llama, kv_dtype="int8")
    for index in range(2):
        cache.update(*torch.randn(2, 1, 2, 4, 32), index)
    with pytest.raises(ValueError, match="cannot be replaced: they would be rounded twice"):
        cache.layers[0].keys = cache.layers[0].keys
    with hf_fastattn.patch(llama, kv_dtype="int8"):
        with pytest.raises(ValueError, match="stores K and V in 8 bits, and pages hold them"):
            llama.generate_batch([[1, 2, 3]])
        with pytest.raises(ValueError, match="already patched: it has kv_dtype='int8', and this call asks for kv_dtype=None"):
            hf_fastattn.patch(llama)


BAD = [
    (TypeError, "Codes of K and V are uint8", {"k": lambda x: x.to(torch.int8)}),
    (ValueError, "need scales and a centre", {"scales": lambda x: None}),
    (ValueError, r"scales \(batch, num_kv_heads, kv_len\)", {"scales": lambda x: x[..., :3]}),
    (ValueError, "slices of the same slots", {"v": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}),
    (ValueError, "slices of the same slots", {"centre": lambda x: x.repeat(1, 1, 2)[..., :32]}),
]


@pytest.mark.parametrize("error, sentence, changes", BAD)
@kernels
def test_tensors_that_no_kernel_can_read(kernel, error, sentence, changes, device):
    k = torch.randn(2, 2, 5, 32, device=device)
    kv = stored(k, k, "int8")
    kv = kv._replace(**{name: change(getattr(kv, name)) for name, change in changes.items()})
    with pytest.raises(error, match=sentence):
        (TritonKernel(kernel.name) if kernel.launches else reference.attention)(k[:, :, :1].half(), kv, Spec())


@pytest.mark.skipif(test_kernels.INTERPRETED, reason="interpreted kernels are not compiled")
def test_few_more_kernels():
    pytest.importorskip("triton")
    from hf_fastattn.patches import warm

    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, intermediate_size=256, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    recipe = warm.Recipe.of(model, "lean", (90, 132))
    plain, found = (warm.listed(recipe._replace(kv_dtype=each), (1, 4), 4096) for each in (None, "int8"))
    forms = [kernel for kernel in found if "load_int8" in str(kernel.as_json())]
    assert "load_int8" not in str([kernel.as_json() for kernel in plain])
    assert {kernel.name for kernel in forms} >= {"lean_kernel", "split_kv_kernel"} and len(found) <= len(plain) + 4
    assert hf.layer_kinds(config)[0].window is None
