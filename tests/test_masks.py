"""The result of the mask function, and its use in models that process masks themselves."""

import dataclasses
from itertools import product

import models
import pytest
import torch
import transformers
from test_training import CHUNKED
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModel, DynamicCache, masking_utils

import hf_fastattn
from hf_fastattn import registry
from hf_fastattn.attention import function, mask_function, masks, packed, refuse
from hf_fastattn.kernels import reference, spans

MISTRAL = transformers.MistralConfig(sliding_window=4)
WINDOW = {"local_size": 4, "mask_function": masking_utils.sliding_window_causal_mask_function(4)}
PACKED = {"mask_function": lambda b, h, q, k: (k <= q) & (q // 4 == k // 4)}
KINDS = {"plain": {}, "padded": {"attention_mask": True}, "window": WINDOW, "longer": {"kv_length": 32}, "dense": PACKED}
KINDS["runs"] = {**WINDOW, "allow_is_causal_skip": False}
KINDS["both sides"] = {**WINDOW, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
KINDS["both sides"]["mask_function"] = masking_utils.sliding_window_bidirectional_mask_function(4)


def make(kind: str, device) -> masks.Mask:
    """A mask of two rows of 8 queries for a model with a window of 4."""
    options = {"batch_size": 2, "q_length": 8, "kv_length": 8, "device": device, "config": MISTRAL, **KINDS[kind]}
    if kind == "padded":
        options["attention_mask"] = (torch.arange(8, device=device) > torch.tensor([[2], [-1]], device=device)).contiguous()
    return mask_function.attention_mask("lean", **options)


def attend(q, k, mask) -> torch.Tensor:
    return function.attention_forward("lean", torch.nn.Module(), q, k, k, mask)[0]


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def without_gradients(request):
    with request.param():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_sliced_mask_is_that_of_the_slice(kind, device, without_gradients):
    mask = make(kind, device)
    moved = mask.to(device=device, dtype=torch.bool).to(device).to(mask)
    assert isinstance(moved, masks.Mask) and torch.equal(moved.dense(), mask.dense())
    q, k = torch.randn(2, 4, 8, 16, device=device), torch.randn(2, 2, mask.shape[3], 16, device=device)
    whole = attend(q, k, mask)
    full = slice(None)
    for rows, queries in [(full, slice(-1, None)), (full, slice(2, 5)), (slice(1, 2), full), (slice(0, 1), slice(3, None))]:
        part = mask[rows, :, queries, : mask.shape[3]].contiguous().to(device)
        assert isinstance(part, masks.Mask) and torch.equal(part.dense(), mask.dense()[rows, :, queries])
        out = attend(q[rows, :, queries], k[rows], part)
        torch.testing.assert_close(out, whole[rows, queries], atol=1e-5, rtol=1e-5)
    dense = reference.dense_attention(q, k, k, mask.dense()).transpose(1, 2)
    torch.testing.assert_close(whole, dense.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
    wider = torch.randn(2, 4, 7, 16, device=device)
    with pytest.raises(ValueError, match=r"made for 2 rows of 8 queries .* 2 rows of 7 queries"):
        attend(wider, k, mask)
    with pytest.raises(ValueError, match=r"rows of 8 queries and \d+ keys on .* and 5 keys"):
        attend(q, k[:, :, :5].contiguous(), mask)


READS = [
    *(lambda mask, scores: scores + mask, lambda mask, scores: mask * -1e9, lambda mask, scores: scores.masked_fill(mask, 0.0)),
    *(lambda mask, scores: torch.where(mask, scores, 0.0), lambda mask, scores: mask == 0, lambda mask, scores: ~mask),
    *(lambda mask, scores: mask.float(), lambda mask, scores: mask[:, 0], lambda mask, scores: mask[..., :5]),
    *(lambda mask, scores: mask[:, :, torch.tensor([1])], lambda mask, scores: mask.expand(-1, 4, -1, -1)),
    *(lambda mask, scores: torch.cat([mask, mask], -1), lambda mask, scores: mask.all()),
    lambda mask, scores: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
]


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_with_the_mask_is_refused(kind, device, without_gradients):
    mask = make(kind, device)
    for number, read in enumerate(READS):
        with pytest.raises(ValueError, match=r"'lean' cannot be used here: Mistral computes attention in its own code.*without"):
            read(mask, torch.randn(2, 1, 8, mask.shape[3], device=device))
            pytest.fail(f"{number} is not refused")


@pytest.mark.parametrize("rows, queries", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("live", [True, False])
@torch.no_grad()
def test_a_mask_is_broadcast_as_by_sdpa(rows, queries, live, device):
    seen = torch.full((rows, 1), live, device=device)
    mask = mask_function.attention_mask("lean", rows, 1, 1, 4, attention_mask=seen, device=device, config=MISTRAL)
    q, k = torch.randn(2, 4, queries, 16, device=device), torch.randn(2, 2, 5, 16, device=device)
    with pytest.warns(UserWarning, match="Mistral applies a mask of one key to more keys"):
        refuse.warn_once.cache_clear()
        out = attend(q, k, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask.dense().expand(2, -1, queries, 5), enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert live or not out.any()


@torch.no_grad()
def test_a_users_integer_mask_is_not_interpreted_as_spans(device):
    q, k = torch.randn(2, 4, 1, 16, device=device), torch.randn(2, 2, spans.WORDS, 16, device=device)
    for dtype in (torch.int32, torch.int64, torch.int8, torch.uint8):
        with pytest.raises(TypeError, match=rf"bool .* or float .* {dtype}"):
            attend(q, k, torch.ones(2, 1, 1, spans.WORDS, dtype=dtype, device=device))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_layers_compiled_one_by_one_take_it(kind, device):
    mask = make(kind, device)
    q, k = torch.randn(2, 4, 8, 16, device=device), torch.randn(2, 2, mask.shape[3], 16, device=device)
    torch._dynamo.reset()
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, mask)
    torch.testing.assert_close(out, attend(q, k, mask))
    torch._dynamo.reset()


# ---- models ----

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}


@pytest.mark.parametrize("padding", models.PADDINGS)
def test_minimax_makes_the_mask_of_a_step_for_one_key(padding, device):
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "head_dim": 16}
    model = models.tiny("minimax", device=device, **layers)
    inputs = models.prompts(padding, device)
    model.set_attn_implementation("sdpa")
    with sdpa_kernel(SDPBackend.MATH):  # the others refuse the strides of such a mask on CUDA
        expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    with hf_fastattn.patch(model, cache=None, graph=False), hf_fastattn.count_calls() as calls:
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    assert calls == {"lean.prefill": 1, "lean.decode": 3}


@torch.no_grad()
def test_siglip2_pools_with_a_mask_that_it_repeats(device):
    config = transformers.Siglip2VisionConfig(**VISION, patch_size=4, num_patches=16)
    model = transformers.Siglip2VisionModel._from_config(config).to(device).eval()
    live = torch.arange(16, device=device) < torch.tensor([[9], [16]], device=device)
    inputs = {"pixel_values": torch.randn(2, 16, 48, device=device), "pixel_attention_mask": live.long()}
    inputs["spatial_shapes"] = torch.tensor([[3, 3], [4, 4]], device=device)
    expected = model(**inputs)
    model.set_attn_implementation("lean")
    found = model(**inputs)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.last_hidden_state[live], expected.last_hidden_state[live], atol=1e-5, rtol=1e-5)


def test_other_uses_of_a_repeated_mask_are_refused(device):
    repeated = make("padded", device).repeat(1, 4, 1, 1)
    assert torch.equal(torch.where(repeated, 1, 0).bool(), make("padded", device).dense().expand(-1, 4, -1, -1))
    for read in (lambda mask: mask + 1.0, lambda mask: ~mask, lambda mask: mask.view(-1, 8) * 1.0):
        with pytest.raises(ValueError, match=r"'lean' cannot be used here: Mistral computes attention in its own code"):
            read(repeated)


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@torch.no_grad()
def test_a_decoder_whose_modules_have_no_is_causal(padding, device):
    own = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    own |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0, "num_experts": 4, "num_key_value_heads": 4}
    model = models.tiny("nllb-moe", device=device, auto=AutoModel, **own)
    inputs = {**models.prompts(padding, device), "decoder_input_ids": models.prompts("no_padding", device)["input_ids"][:, :20]}
    expected = model(**inputs).last_hidden_state
    model.set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=1e-3, rtol=1e-3)
    assert calls["lean.prefill"] + calls["lean.decode"] == 6


@pytest.mark.parametrize("padding", models.PADDINGS)
@pytest.mark.parametrize("keep", [1, 7, torch.tensor([3, 50])], ids=str)
@torch.no_grad()
def test_gemma4_slices_the_mask_for_layers_that_share_keys(keep, padding, device):
    own = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_kv_shared_layers": 2}
    own |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    own["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = models.tiny("gemma4_text", device=device, **own)
    inputs = models.prompts(padding, device)
    keep = keep.to(device) if isinstance(keep, torch.Tensor) else keep
    expected = model(**inputs, logits_to_keep=keep).logits
    model.set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        logits = model(**inputs, logits_to_keep=keep).logits
    live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    live = (live[:, -keep:] if isinstance(keep, int) else live[:, keep]).bool()
    torch.testing.assert_close(logits[live], expected[live], atol=1e-3, rtol=1e-3)
    assert sum(calls.values()) == 4 and not calls["lean.dense"]


# ---- packed sequences ----


PACKS = {  # how a model is told of them
    "position_ids": lambda positions, lengths: {"position_ids": positions},
    "lengths": lambda positions, lengths: {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths.clone()},
    "both": lambda positions, lengths: {"position_ids": positions, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths},
}


def two_sequences(device):
    """The ids of packed sequences of 8 and of 12 tokens, and their positions."""
    ids = models.prompts("no_padding", device, rows=1)["input_ids"][:, :20]
    return ids, torch.cat([torch.arange(8), torch.arange(12)])[None].to(device)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral_window_below_prompt", "qwen2"])  # the last one has both kinds of layers
@pytest.mark.parametrize("how, use_cache", [("position_ids", False), *product(("lengths", "both"), (False, True))])
def test_packed_sequences_do_not_see_one_another(how, use_cache, family, device):
    model = models.family(family, device)
    model.set_attn_implementation("lean")
    ids = models.prompts("no_padding", device, rows=1)["input_ids"]
    for parts in ((40, 56), (1, 94, 1)):
        positions = torch.cat([torch.arange(n) for n in parts])[None].to(device)
        lengths = torch.tensor([0, *parts], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        told = PACKS[how](positions, lengths)
        rotated = told if "position_ids" in told else {**told, "position_ids": torch.arange(96, device=device)[None]}
        with hf_fastattn.count_calls() as calls:
            packed = model(ids, **rotated, use_cache=use_cache).logits
        assert calls == {"lean.prefill": 2}
        alone = []
        for part, at in zip(ids.split(parts, 1), rotated["position_ids"].split(parts, 1), strict=True):
            alone.append(model(part, position_ids=at).logits)
        torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-3, rtol=1e-3)


POSITIONS = {  # of 20 tokens
    "twice 0": [0, *range(19)],
    "in groups": [i // 2 for i in range(20)],
    "back": [*range(12), *range(3, 11)],
    "with a gap": [*range(10), *range(30, 40)],
    "from below 0": [*range(-5, 15)],
    "of two sequences": [*range(8), *range(12)],
}
# Without a cache Transformers separates sequences where positions do not grow by 1; in GPT-OSS its masks do not read positions.
READERS = {
    "llama": ("llama", {}),
    "qwen2": models.FAMILIES["qwen2"],
    "gpt_oss": models.FAMILIES["gpt_oss"],
    "llama4": ("llama4_text", CHUNKED),
}


@torch.no_grad()
@pytest.mark.parametrize("family", READERS)
def test_positions_separate_what_they_separate_in_eager(family, device):
    model_type, config = READERS[family]
    model = models.tiny(model_type, device=device, **config)
    ids = models.prompts("no_padding", device, rows=2)["input_ids"][:, :20]

    def read(positions, name: str) -> list[torch.Tensor]:
        model.set_attn_implementation(name)
        cache, halves = DynamicCache(config=model.config), zip(ids.split([9, 11], 1), positions.split([9, 11], 1), strict=True)
        parts = [model(some, position_ids=at, past_key_values=cache).logits for some, at in halves]
        whole = [model(ids, position_ids=positions, use_cache=use_cache).logits for use_cache in (True, False)]
        return [*whole, torch.cat(parts, 1)]

    for places in POSITIONS.values():
        positions = torch.tensor([places, range(20)], device=device)
        with hf_fastattn.count_calls() as calls:
            found = read(positions, "lean")
        assert not calls["lean.dense"] or family == "llama4"  # chunks after a cache
        torch.testing.assert_close(found, read(positions, "eager"), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found[0], found[2], atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["reference", "fa2", "split_kv", "batch_invariant", "no_intervals", "streaming"])
def test_positions_in_a_cache_are_of_one_text_for_every_backend(name, device, registering):
    model = models.tiny("llama", device=device)
    ids, positions = two_sequences(device)
    expected = model(ids, position_ids=positions).logits
    if name == "no_intervals":
        registry.register(dataclasses.replace(registry.get("lean"), name=name, packed=False))
    if name == "streaming":
        hf_fastattn.patch(model, name, window=32)
        cache = hf_fastattn.RollingCache(model)
    else:
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with hf_fastattn.count_calls() as calls:
        found = model(ids, position_ids=positions, past_key_values=cache).logits
    assert sum(calls.values()) == 2 and not calls[f"{name}.dense"]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    if name == "no_intervals":
        with hf_fastattn.count_calls() as calls:
            model(ids, position_ids=positions, use_cache=False)
        assert calls == {"no_intervals.dense": 2}
    if name in ("no_intervals", "streaming"):
        lengths = torch.tensor([0, 8, 20], device=device)
        with pytest.raises(ValueError, match=r"does not separate packed sequences by cu_seq_lens\. Use another backend"):
            model(ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, use_cache=False)


@torch.no_grad()
def test_the_remedy_for_lengths_with_an_attention_mask(device):
    model = models.family("llama", device)
    model.set_attn_implementation("lean")
    ids, positions = two_sequences(device)
    lengths = torch.tensor([0, 8, 20], device=device, dtype=torch.int32)
    told = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "position_ids": positions}
    expected = torch.cat([model(part).logits for part in ids.split([8, 12], 1)], 1)
    rows = {"position_ids": positions.expand(2, -1), "use_cache": False}
    refused = [
        (ids, {"attention_mask": torch.ones_like(ids)}),
        (ids, {"attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool, device=device).tril()}),
        (ids, {"past_key_values": model(ids).past_key_values}),
        (ids, {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=64)}),
        (ids.expand(2, -1), rows),
    ]
    for text, given in refused:
        with pytest.raises(ValueError, match=r"Leave out attention_mask, and pass use_cache=False; .* instead of cu_seq_lens"):
            model(text, **{**told, **given})
    for found in (model(ids, **told).logits, model(ids.expand(2, -1), **rows).logits):
        torch.testing.assert_close(found, expected.expand_as(found), atol=1e-3, rtol=1e-3)
    lengths = torch.tensor([0, 5, 5, 20], device=device)  # both separate
    found = model(ids, position_ids=positions, cu_seq_lens_q=lengths, use_cache=False).logits
    parts = zip(ids.split([5, 3, 12], 1), positions.split([5, 3, 12], 1), strict=True)
    expected = torch.cat([model(part, position_ids=at).logits for part, at in parts], 1)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


_VALUES = r"must be equal, begin with 0, never decrease, and end with the 20 tokens; got \[.*\] and \[.*\]\. Pass torch\.tensor"
_SHAPE = r"must be of one shape, \(sequences \+ 1,\), and on .*; got cu_seq_lens_[qk] of \(.*\) on .*\. Pass torch\.tensor"
_TYPE = r"must be a tensor of int32 or int64; got .*\. Pass torch\.tensor"
MALFORMED = {  # cu_seq_lens_q and cu_seq_lens_k, and the error
    "decreasing": ([0, 9, 8, 20], [0, 9, 8, 20], ValueError, _VALUES),
    "short": ([0, 8, 19], [0, 8, 19], ValueError, _VALUES),
    "beyond": ([0, 8, 21], [0, 8, 21], ValueError, _VALUES),
    "from 1": ([1, 8, 20], [1, 8, 20], ValueError, _VALUES),
    "different": ([0, 8, 20], [0, 9, 20], ValueError, _VALUES),
    "another number": ([0, 8, 20], [0, 8, 9, 20], ValueError, _SHAPE),
    "in two dimensions": ([[0, 8, 20]], [[0, 8, 20]], ValueError, _SHAPE),
    "in no dimension": (20, 20, ValueError, _SHAPE),
    "empty": (torch.tensor([], dtype=torch.int32), torch.tensor([], dtype=torch.int32), ValueError, _SHAPE),
    "one entry": ([0], [0], ValueError, _SHAPE),
    "on another device": ([0, 8, 20], torch.empty(3, dtype=torch.int64, device="meta"), ValueError, _SHAPE),
    "no tensor beside two dimensions": ([[0, 8, 20]], (0, 8, 20), ValueError, _SHAPE),
    "of k alone": (None, [0, 8, 20], TypeError, _TYPE),
    "float": ([0.0, 8.0, 20.0], [0.0, 8.0, 20.0], TypeError, _TYPE),
    "bool": ([False, True], [False, True], TypeError, _TYPE),
    "no tensor": ((0, 8, 20), (0, 8, 20), TypeError, _TYPE),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_lengths_are_refused(kind, device):
    *given, error, message = MALFORMED[kind]
    if device.type == "cuda" and message == _VALUES:
        pytest.skip("the device checks values; an assertion on it ends the process")
    q, k = (torch.tensor(x, device=device) if isinstance(x, (list, int)) else x for x in given)
    model, (ids, positions) = models.tiny("llama", device=device, num_hidden_layers=1), two_sequences(device)
    for name in ("lean", "fa2", "split_kv", "batch_invariant", "reference"):
        model.set_attn_implementation(name)
        for training in (True, False):
            with torch.set_grad_enabled(training), pytest.raises(error, match=message):
                model.train(training)(ids, cu_seq_lens_q=q, cu_seq_lens_k=k, use_cache=False)
    for options in ({"position_ids": positions, "use_cache": False}, {"use_cache": True}):
        with torch.no_grad(), pytest.raises(error, match=message):
            model(ids, cu_seq_lens_q=q, cu_seq_lens_k=k, **options)
    with hf_fastattn.patch(model, "lean"), pytest.raises((ValueError, TypeError), match="cu_seq_lens"):
        model.generate(ids, cu_seq_lens_q=q, cu_seq_lens_k=k, max_new_tokens=2)


def test_lengths_on_a_device_are_checked_there(monkeypatch):
    """A tensor of the device `meta` cannot be read, as one on a GPU cannot be without synchronisation."""
    said: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, rule: said.append(rule))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    packed._segments_of_lengths(cu, cu, 20)
    (rule,) = said
    assert rule.endswith("end with the 20 tokens") and len(rule) < 256  # longer ones are errors on a GPU


# ---- autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@torch.no_grad()
def test_autocast_casts_as_it_does_for_sdpa(padding, dtype, device):
    model, inputs = models.tiny("llama", device=device), models.prompts(padding, device)
    past = {}

    def run(name: str, autocast: bool):
        model.set_attn_implementation(name)
        past[name] = DynamicCache(config=model.config)
        with torch.autocast(device.type, dtype, enabled=autocast):
            return model(**inputs, past_key_values=past[name]).logits

    exact, sdpa = run("sdpa", False), run("sdpa", True)
    with hf_fastattn.count_calls() as calls:
        lean = run("lean", True)
    assert calls == {"lean.prefill": 2} and lean.dtype == sdpa.dtype
    live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    error = (sdpa.float() - exact)[live].abs().mean()
    assert (lean.float() - exact)[live].abs().mean() < 2 * error + 1e-4


@torch.no_grad()
def test_autocast_changes_types_and_nothing_else(device):
    q, k = torch.randn(2, 4, 8, 16, device=device), torch.randn(2, 2, 8, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        mixed = attend(q, k.bfloat16(), make("padded", device))
        dense = attend(q, k.bfloat16(), make("dense", device))
    expected = attend(q.bfloat16(), k.bfloat16(), make("padded", device))
    assert mixed.dtype == dense.dtype == torch.bfloat16
    assert torch.equal(mixed, expected), "the kernel's own products are not autocast's"
    for kind in ("padded", "dense"):
        with pytest.raises(TypeError, match=r"q, k and v must share one dtype.*Cast them"):
            attend(q, k.bfloat16(), make(kind, device))
        with pytest.raises(TypeError, match="q, k and v must share one dtype"), torch.autocast(device.type, torch.bfloat16):
            attend(q.double(), k, make(kind, device))


# ---- unknown tensors ----


@pytest.mark.parametrize("value", [lambda: torch.ones(3), lambda: [torch.ones(3)], lambda: {"a": (torch.ones(3),)}])
@torch.no_grad()
def test_a_tensor_that_attention_may_depend_on_is_refused(value, device):
    model = models.family("llama", device)
    model.set_attn_implementation("lean")
    ids = models.prompts("no_padding", device)["input_ids"]
    with pytest.raises(ValueError, match=r"LlamaAttention hands sparse_indices= .* 'lean' does not support.*load .* without"):
        model(ids, sparse_indices=value())
    of_the_loss = {"shift_labels": ids, "num_items_in_batch": torch.tensor(3)}
    model(ids, sparse_indices=None, some_flag=3, token_type_ids=ids, **of_the_loss)


@torch.no_grad()
@pytest.mark.parametrize("softcap, sinks", [(5.0, False), (None, True), (None, False)])
def test_dense_attention_of_nan_is_nan_and_of_no_keys_is_0(softcap, sinks, device):
    q, k = torch.randn(1, 2, 3, 16, device=device), torch.randn(1, 1, 5, 16, device=device)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool, device=device)
    q[:, :, 0], mask[:, :, 1] = float("nan"), False
    sink_logits = torch.full((2,), float("-inf"), device=device) if sinks else None
    out = reference.dense_attention(q, k, k, mask, softcap=softcap, sink_logits=sink_logits)
    assert out[:, :, 0].isnan().all() and (out[:, :, 1] == 0).all() and out[:, :, 2].isfinite().all()
