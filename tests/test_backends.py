"""The registry and the interface: names, masks, compiled graphs, encoders, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import subprocess
import sys
import textwrap
import warnings

import models
import pytest
import torch
import transformers
from calls import as_kernel, attention
from cases import slow_unless
from transformers import AutoModel, AutoModelForSeq2SeqLM, CompileConfig, DynamicCache, StaticCache, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_fastattn
from hf_fastattn import hf, kernels, registry
from hf_fastattn.attention import function, mask_function, masks, refuse
from hf_fastattn.kernels import reference, spans

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
STATIC = {"cache_implementation": "static", "disable_compile": True}
generate = functools.partial(models.generate, max_new_tokens=6)


@pytest.fixture
def lean(device):
    """The tiny Llama, running lean."""
    model = models.family("llama", device)
    model.set_attn_implementation("lean")
    return model


def calls_of_lean(model, inputs, **options):
    """The calls of a generate() with lean, which gives the tokens of the attention that the model has."""
    expected = generate(model, inputs, **options)
    model.set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        assert torch.equal(generate(model, inputs, **options), expected)
    return calls


# ---- the registry ----
@pytest.mark.parametrize("softcap", [float("inf"), 0.0])
def test_a_softcap_of_a_configuration_that_is_none(softcap):
    """Also with a mask that only the dense path supports."""
    model = models.tiny("gemma2", "lean", head_dim=16, attn_logit_softcapping=softcap)
    ids = torch.ones(1, 6, dtype=torch.int64)
    for mask in (None, torch.ones(1, 1, 6, 6, dtype=torch.bool)):
        with pytest.raises(ValueError, match=rf"softcap must be above 0; got {softcap}.*None"), torch.no_grad():
            model(ids, attention_mask=None if mask is None else dict.fromkeys(("full_attention", "sliding_attention"), mask))


def test_names_and_kernels_of_backends():
    assert set(hf_fastattn.names()) >= {"reference", "fa2", "split_kv", "lean"}
    assert hf_fastattn.get("lean").name == "lean"
    with pytest.raises(ValueError, match=r"'leen'.*known backends: .*lean"):
        hf_fastattn.get("leen")
    q = torch.zeros(1, 2, 1, 16)
    with pytest.raises(TypeError, match=r"called with the tensors q, k and v; its attend\(\) takes q, a KV and a Spec"):
        hf_fastattn.get("lean")(q, kernels.KV(q, q), kernels.Spec())
    with pytest.raises(TypeError, match=r"the tensors q, k and v; got ndarray. Pass torch.as_tensor"):
        hf_fastattn.get("lean")(q.numpy(), q, q)
    with pytest.raises(TypeError, match="has no option attn_mask; it has spans, scale, causal, window"):
        hf_fastattn.get("lean")(q, q, q, attn_mask=None)
    with pytest.raises(TypeError, match="prefill must be callable"):
        hf_fastattn.Backend(name="mine", summary="", prefill=None)
    with pytest.raises(TypeError, match="decode callable or None"):
        hf_fastattn.Backend(name="mine", summary="", prefill=reference.attention, decode="lean")
    for name in ("lean_flash", "my_sdpa", "flex_attention_2", "org/lean", "paged|lean", "Lean", "", "eager"):
        with pytest.raises(ValueError, match="name"):  # which Transformers would parse
            hf_fastattn.Backend(name=name, summary="", prefill=reference.attention)
    why_not = hf_fastattn.get("lean").why_not
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
    assert why_not(**shape) is None
    assert "not a multiple of 3" in why_not(**{**shape, "num_kv_heads": 3})
    assert "head_dim 600" in why_not(**{**shape, "head_dim": 600}) and "head_dim 600" in why_not(**shape, value_dim=600)
    assert "float64" in why_not(**{**shape, "dtype": torch.float64})
    assert "'mps'" in why_not(**{**shape, "device": "mps"})


@pytest.mark.parametrize("name", sorted({*hf_fastattn.names()} - {"linear"}))
def test_a_backend_is_called_with_plain_tensors(name, device):
    q, k, v = (torch.randn(2, heads, length, 16, device=device) for heads, length in ((4, 3), (2, 40), (2, 40)))
    keep = torch.arange(40, device=device) >= torch.tensor([[0], [17]], device=device)
    spans_ = spans.build_spans(2, 3, 40, q.device, q_offset=37, attention_mask=keep)
    options = {"scale": 0.3, "softcap": 2.0, "sink_logits": torch.randn(4, device=device), "return_lse": True}
    found, expected = hf_fastattn.get(name)(q, k, v, spans_, **options), attention(q, k, v, spans_, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0], hf_fastattn.get(name)(q, k, v, **options)[0], atol=1e-3)  # spans count
    with pytest.raises(TypeError, match="unknown"):
        hf_fastattn.get(name)(q, k, v, unknown=1)
    with pytest.raises(ValueError, match=r"must be 4-D.*got 3-D, 3-D and 3-D"):
        hf_fastattn.get(name)(q[0], k[0], v[0])


def test_a_third_party_backend_reaches_generate(lean, device, registering):
    seen = []

    @as_kernel
    def mine(q, k, v, spans=None, **options):
        seen.append(q.shape[2])
        return attention(q, k, v, spans, **options)

    inputs = models.prompts("left_padding", device)
    expected = generate(lean, inputs)
    hf_fastattn.register(hf_fastattn.Backend(name="mine", summary="a test's own", prefill=mine))
    lean.set_attn_implementation("mine")
    with hf_fastattn.count_calls() as calls:
        assert torch.equal(generate(lean, inputs), expected)
    assert seen[0] == models.PROMPT and seen[-1] == 1 and dict(calls) == {"mine.prefill": len(seen)}


@pytest.mark.slow
def test_importing_changes_nothing():
    """A new process compares Transformers and torch before and after the import."""
    code = """
    import sys, torch, transformers, warnings
    sys.path.insert(0, {tests!r})
    import models
    from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache, StaticCache

    model = models.tiny("llama", "sdpa")
    inputs = models.prompts("left_padding", "cpu")

    def look():
        tables = [AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping]
        tf32 = torch.backends.cuda.matmul.allow_tf32
        classes = [GenerationMixin, PreTrainedModel, Cache, DynamicCache, StaticCache, type(model), torch.nn.Module, torch.Tensor]
        state = [torch.get_default_dtype(), torch.is_grad_enabled(), tf32, list(warnings.filters)]
        modules = [transformers.masking_utils, transformers.modeling_utils, transformers.generation.utils, torch.nn.functional]
        return [dict(x) for x in tables], [dict(vars(x)) for x in classes + modules], state, model(**inputs).logits

    tables, namespaces, state, logits = look()
    import hf_fastattn
    new_tables, new_namespaces, new_state, new_logits = look()
    for old, new in zip(tables, new_tables):
        assert set(new) - set(old) == set(hf_fastattn.names()), set(new) - set(old)
        assert all(new[name] is old[name] for name in old)
    assert namespaces == new_namespaces and state == new_state and torch.equal(logits, new_logits)
    print("unchanged")
    """
    code = textwrap.dedent(code).format(tests=str(models.__file__.rsplit("/", 1)[0]))
    env = {**os.environ, "HF_FASTATTN_AUTOLOAD": "0"}  # which would have registered the names earlier; see test_autoload.py
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "unchanged", done.stderr[-3000:]


# ---- masks ----
WINDOW = {"local_size": 4, "mask_function": masking_utils.sliding_window_causal_mask_function(4)}
CHUNK = {"local_size": 3, "mask_function": lambda b, h, q, k: (k <= q) & (q // 3 == k // 3)}
CPU = {"device": "cpu", "allow_is_causal_skip": False}
CHUNKED = {"mask_function": masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=int)), "device": "cpu"}
PACKED = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]] * 2))
UNKNOWN = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: q != 4)
BOTH_WAYS = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}
MASKS = {  # the request of Transformers: the result
    "causal": ({}, masks.PlainMask),
    "causal, padded": ({"attention_mask": True}, masks.SpansMask),
    "decode": ({"q_length": 1, "q_offset": 7}, masks.PlainMask),
    "decode that will be compiled": ({"q_length": 1, "q_offset": 7, "allow_is_causal_skip": False}, masks.SpansMask),
    "buffer longer than its tokens": ({"kv_length": 32}, masks.SpansMask),
    "length on the device": ({"q_length": 1, "q_offset": torch.tensor(7), "kv_length": 32}, masks.SpansMask),
    "window below the length": (WINDOW, masks.SpansMask),
    "window not below the length": ({**WINDOW, "q_length": 4, "kv_length": 4}, masks.PlainMask),
    "bidirectional": (BOTH_WAYS, masks.SpansMask),
    "an overlay": ({"use_vmap": True, "allow_is_causal_skip": False}, masks.DenseMask),
    "packed sequences": ({"mask_function": lambda b, h, q, k: (k <= q) & (q // 4 == k // 4)}, masks.DenseMask),
    "runs: window": ({**WINDOW, "allow_is_causal_skip": False}, masks.RunsMask),
    "runs: packed": ({"mask_function": masking_utils.and_masks(WINDOW["mask_function"], PACKED), **CPU}, masks.RunsMask),
    "runs: chunks": (CHUNKED, masks.RunsMask),
    "chunks of a buffer": ({**CHUNKED, **CPU, "kv_length": 9}, masks.DenseMask),
    "an unknown part": ({"mask_function": UNKNOWN, **CPU}, masks.DenseMask),
    "chunks": (CHUNK, masks.DenseMask),
    "chunks as long as the window": ({**CHUNK, "local_size": 4, "chunk": 4}, masks.DenseMask),
    "bidirectional, window": ({**WINDOW, "allow_is_causal_skip": False, "q_length": 1, "kv_length": 1}, masks.DenseMask),
}


@pytest.mark.parametrize("asked", MASKS)
def test_mask_function(asked, device):
    arguments, expected = MASKS[asked]
    config = transformers.MistralConfig(sliding_window=4)
    config.attention_chunk_size = arguments.get("chunk", 3)
    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8, **arguments}
    arguments.pop("chunk", None)
    if arguments.pop("attention_mask", None):
        arguments["attention_mask"] = torch.ones(2, 8, dtype=torch.bool, device=device)
    if isinstance(arguments.get("q_offset"), torch.Tensor):
        arguments["q_offset"] = arguments["q_offset"].to(device)
    if asked.startswith("bidirectional"):
        arguments["allow_is_bidirectional_skip"] = True
    arguments = {"device": device, **arguments}
    mask = mask_function.attention_mask("lean", config=config, dtype=torch.float32, **arguments)
    assert type(mask) is expected
    assert tuple(mask.shape) == (2, 1, arguments["q_length"], arguments["kv_length"]) and mask.dtype == torch.bool
    if expected is masks.PlainMask:
        assert mask.given is None
    elif expected is not masks.DenseMask:
        assert mask.given.dtype == torch.int32
        runs = expected is masks.RunsMask
        shape = (2, spans.WORDS + 8) if runs else (1, spans.WORDS + ("attention_mask" in arguments))
        assert tuple(mask.given.shape) == (2, 1, *shape)
        if runs:
            function, every = arguments["mask_function"], torch.arange(8)
            rows, queries, keys = torch.arange(2)[:, None, None], every[None, :, None], every[None, None, :]
            said = function(rows, torch.zeros(1), queries, keys)
            assert torch.equal(mask.dense()[:, 0].cpu(), said.expand(2, 8, 8))
    else:
        assert mask.given.dtype == torch.bool and mask.given.shape == mask.shape
    if asked == "length on the device":
        assert mask.given.data_ptr() != arguments["q_offset"].data_ptr(), "the cache adds to its length in place"


@torch.no_grad()
def test_without_a_mask_the_layers_own_arguments_count(device):
    q, k = torch.randn(1, 4, 8, 16, device=device), torch.randn(1, 2, 8, 16, device=device)
    layer = torch.nn.Module()

    def agrees(expected, **arguments):
        out, weights = function.attention_forward("lean", layer, q, k, k, None, **arguments)
        torch.testing.assert_close(out.transpose(1, 2), attention(q, k, k, **expected), atol=1e-5, rtol=1e-5)
        assert weights is None

    agrees({"causal": True})
    agrees({"causal": True, "scale": 1.0}, sliding_window=3, scaling=1.0)  # the mask defines the window, as in eager
    agrees({"causal": False}, is_causal=False)
    layer.is_causal = False
    agrees({"causal": False})
    agrees({"causal": True}, is_causal=True)
    q, more = q[:, :, :2], torch.randn(1, 2, 3, 16, device=device)  # eager, sdpa and a cache each treat these differently
    with pytest.raises(ValueError, match=r"Module is causal and gives .*'lean' no mask for 2 queries and 3 keys"):
        function.attention_forward("lean", layer, q, more, more, None, is_causal=True)
    q, k = q[:, :, :1], more
    agrees({"causal": False}, is_causal=True)  # one query sees all keys


def test_the_order_of_arguments_is_that_of_transformers(device):
    """A package that wraps the registered functions may pass dropout by its place, as kvpress does."""
    names = [*inspect.signature(function.attention_forward).parameters][1:8]
    assert names == [*inspect.signature(sdpa_attention_forward).parameters][:7]


@pytest.mark.parametrize("transposed", ["q", "k", "v", "qkv"])
def test_models_may_transpose_the_channels(transposed, device):
    heads = {"q": 4, "k": 2, "v": 2}
    whole = {name: torch.randn(1, many, 8, 16, device=device) for name, many in heads.items()}
    given = {name: x.transpose(2, 3).contiguous().transpose(2, 3) if name in transposed else x for name, x in whole.items()}
    for trains in (False, True):
        tensors = [x.detach().requires_grad_(trains) for x in given.values()]
        out, _ = function.attention_forward("lean", torch.nn.Module(), *tensors, None)
        torch.testing.assert_close(out.transpose(1, 2), attention(*whole.values(), causal=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", models.PADDINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_no_mask_of_queries_times_keys(options, family, padding, device, registering):
    model = models.family(family, device)
    model.set_attn_implementation("lean")
    own, shapes = registry.get("lean"), []

    def spy(q, kv, spec, mask=None, **arguments):
        shapes.append(None if mask is None else (tuple(mask.shape), mask.dtype, kv.k.shape[2]))
        return own.attend(q, kv, spec, mask, **arguments)

    registry.register(dataclasses.replace(own, prefill=spy, decode=None))
    generate(model, models.prompts(padding, device), **options)
    for shape, dtype, kv_len in filter(None, shapes):
        assert shape[:3] == (3, 1, 1) and shape[3] <= spans.WORDS + spans.num_words(kv_len) and dtype == torch.int32
    if padding == "no_padding" and not options and family == "llama" and VERSION >= (5, 18):  # 5.17 hands over all-ones masks
        assert set(shapes) == {None}


def test_no_host_sync(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no host to sync with; runs on a GPU")
    keep = torch.ones(2, 64, dtype=torch.bool, device=device)
    keep[0, :5] = False
    length = torch.tensor(63, device=device)
    q, k = torch.randn(2, 4, 64, 16, device=device), torch.randn(2, 2, 64, 16, device=device)

    def two_steps():
        for name in ("fa2", "split_kv", "lean"):
            for q_len, offset in ((64, 0), (1, length)):
                mask = mask_function.attention_mask(name, 2, q_len, 64, offset, attention_mask=keep, device=device)
                function.attention_forward(name, torch.nn.Module(), q[:, :, :q_len], k, k, mask, scaling=0.25)

    with torch.no_grad():
        two_steps()  # compiles the kernels and allocates their workspaces
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            two_steps()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def prefix_mask(device, length=models.PROMPT) -> torch.Tensor:
    """Causal, but the first 20 tokens see each other: bool (1, 1, length, length)."""
    slots = torch.arange(length, device=device)
    return ((slots[:, None] >= slots) | (slots < 20))[None, None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_a_users_mask_takes_the_dense_path_with_one_warning(dtype, lean, device):
    ids = models.prompts("no_padding", device)["input_ids"]
    mask = prefix_mask(device).expand(len(ids), -1, -1, -1)
    added = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    lean.set_attn_implementation("eager")
    expected = lean(ids, attention_mask=added).logits
    lean.set_attn_implementation("lean")
    refuse.warn_once.cache_clear()
    with hf_fastattn.count_calls() as calls, pytest.warns(UserWarning, match="dense path") as said:
        for _ in range(2):
            logits = lean(ids, attention_mask=mask if dtype == torch.bool else added).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert (logits - lean(ids).logits).abs().max() > 0.1, "the mask makes no difference: this test shows nothing"
    assert calls == {"lean.dense": 2 * lean.config.num_hidden_layers}
    assert len([w for w in said if "dense path" in str(w.message)]) == 1


@torch.no_grad()
def test_integer_masks_packed_lengths_continuous_batching_and_traces_are_refused(lean, device):
    ids = models.prompts("no_padding", device)["input_ids"]
    with pytest.raises(TypeError, match=r"bool .* or float .* torch.int64"):
        lean(ids, attention_mask=prefix_mask(device).expand(len(ids), -1, -1, -1).long())
    ids = models.prompts("no_padding", device, rows=2)["input_ids"]
    lengths = torch.tensor([0, 40, ids.shape[1]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"cu_seq_lens.*position_ids"):
        lean(ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    q = torch.randn(1, 4, 3, 16, device=device)
    with pytest.raises(ValueError, match="continuous batching"):
        function.attention_forward("lean", lean, q, q, q, None, cache=object())
    with pytest.raises(RuntimeError, match=r'cannot be recorded by .*"sdpa"'):
        torch.jit.trace(lambda q: function.attention_forward("lean", lean, q, q, q, None), q)


LLAMA4 = {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96}
LLAMA4 |= {"num_hidden_layers": 4}  # three with chunked attention, one with full


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_chunked_attention_takes_the_dense_path(static, device):
    model = models.tiny("llama4_text", device=device, **LLAMA4)
    inputs = models.prompts("holes", device)
    options = STATIC if static else {}
    if static and VERSION == (5, 17):
        with pytest.raises(TypeError, match="block_sequence_ids"):  # Transformers 5.17 cannot, with any attention
            generate(model, inputs, **options)
        return
    calls = calls_of_lean(model, inputs, **options)
    assert calls["lean.dense"] == 3 * 6 and calls["lean.prefill"] == 1 and calls["lean.decode"] == 5


# ---- torch.compile ----
def decode(model, forward, inputs, static: bool, steps: int = 11) -> torch.Tensor:
    """Logits (batch, steps, vocab) of a greedy loop over one cache: prefill, then steps - 1 decoded tokens."""
    config = model.config
    past = StaticCache(config=config, max_cache_len=models.PROMPT + 32) if static else DynamicCache(config=config)
    ids, mask, logits = inputs["input_ids"], inputs.get("attention_mask"), []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(forward(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True).logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(logits, 1)


COMPILED = [
    ("llama", "eager", "dynamic", "no_padding"),
    ("llama", "aot_eager", "dynamic", "left_padding"),
    ("llama", "aot_eager", "static", "no_padding"),
    ("llama", "aot_eager", "static", "left_padding"),
    ("qwen2", "aot_eager", "dynamic", "holes"),  # two kinds of layers, so two masks
    ("qwen2", "aot_eager", "static", "holes"),
]


@pytest.mark.parametrize("family, backend, kind, padding", slow_unless(COMPILED[3].__eq__, COMPILED))
def test_compiled_forward_is_one_graph(family, backend, kind, padding, device):
    model = models.family(family, device)
    model.set_attn_implementation("lean")
    inputs, static = models.prompts(padding, device), kind == "static"
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with hf_fastattn.count_calls() as calls:
        logits = decode(model, torch.compile(model.forward, fullgraph=True, backend=backend), inputs, static)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3  # prefill, decode, and decode again with its lengths dynamic
    layers = model.config.num_hidden_layers
    assert calls == {"lean.prefill": layers, "lean.decode": 10 * layers}
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, decode(model, model.forward, inputs, static), atol=1e-3, rtol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
def test_generate_compiles_its_static_decode(padding, device):
    model = models.tiny("llama", "lean", device)
    inputs = models.prompts(padding, device)
    expected = generate(model, inputs)
    compiling = CompileConfig(backend="inductor" if device.type == "cuda" else "aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True  # on a CPU, generate() does not compile by default
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with hf_fastattn.count_calls() as calls:
        tokens = generate(model, inputs, cache_implementation="static", compile_config=compiling)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert torch.equal(tokens, expected)
    assert set(calls) == {"lean.prefill", "lean.decode"}
    torch._dynamo.reset()


@torch.no_grad()
def test_dense_calls_are_counted_in_compiled_graphs(lean, device):
    ids = models.prompts("no_padding", device)["input_ids"]
    mask = prefix_mask(device).expand(len(ids), -1, -1, -1)
    expected = lean(ids, attention_mask=mask).logits
    torch._dynamo.reset()
    with hf_fastattn.count_calls() as calls:
        logits = torch.compile(lean.forward, fullgraph=True, backend="aot_eager")(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert calls == {"lean.dense": lean.config.num_hidden_layers}
    torch._dynamo.reset()


# ---- encoders, encoder-decoders, and models with their own attention ----
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_bert(padded, device):
    model = models.tiny("bert", device=device, auto=AutoModel)
    inputs = models.prompts("left_padding" if padded else "no_padding", device)
    inputs = {name: tensor.flip(-1) for name, tensor in inputs.items()}  # padded on the right
    live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    expected = model(**inputs).last_hidden_state[live]
    model.set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        out = model(**inputs).last_hidden_state[live]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert calls == {"lean.prefill": 2}
    causal = model(inputs["input_ids"][:, :50]).last_hidden_state
    assert (causal[0] - model(inputs["input_ids"]).last_hidden_state[0, :50]).abs().max() > 0.01, "BERT must see to its right"


DEEPSEEK = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
DEEPSEEK |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 32, "first_k_dense_replace": 9}


@torch.no_grad()
@pytest.mark.parametrize("padding", models.PADDINGS)
def test_values_narrower_than_keys(padding, device):
    model, inputs = models.tiny("deepseek_v3", device=device, **DEEPSEEK), models.prompts(padding, device)
    logits, calls = model(**inputs).logits, calls_of_lean(model, inputs)
    assert calls["lean.prefill"] == 2 and calls["lean.decode"] and not calls["lean.dense"]
    live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(compiled[live], logits[live], atol=1e-4, rtol=1e-4)


BART = {"d_model": 64, "decoder_start_token_id": 1, "dropout": 0.0}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
BART |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDES.items()}


@pytest.mark.parametrize("padding", models.PADDINGS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, STATIC], ids=str)
def test_bart(options, padding, device):
    model = models.tiny("bart", device=device, auto=AutoModelForSeq2SeqLM, **BART)
    inputs = models.prompts(padding, device)
    expected, calls = generate(model, inputs, **options), calls_of_lean(model, inputs, **options)
    assert calls["lean.prefill"] == 2 and calls["lean.decode"] == 6 * 4 and not calls["lean.dense"]  # 4: self and cross
    assert len(set(expected.flatten().tolist())) > 4


@pytest.mark.parametrize("patched", [False, True])  # 5.17 does not set the attention of a loaded T5's encoder and decoder
def test_t5_is_refused(patched, device):
    own = {"d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 96, "decoder_start_token_id": 1}
    model = models.tiny("t5", "sdpa" if patched else "lean", device, AutoModelForSeq2SeqLM, **own)
    if patched:
        hf_fastattn.patch(model, cache=None, graph=False)
    with pytest.raises(ValueError, match=r"T5Attention hands position_bias= .* 'lean' does not support.*without attn_"):
        generate(model, models.prompts("no_padding", device))


OWN_CODE = "computes attention in its own code.*without attn_implementation"


@pytest.mark.parametrize("model_type,own", [("bloom", {}), ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2})])
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_models_that_bypass_the_interface_are_refused(compiled, model_type, own, device):
    """Spans added to scores as if they were a mask would be silently wrong."""
    model = models.tiny(model_type, "lean", device, **own)
    forward = torch.compile(model.forward, backend="eager") if compiled else model.forward
    error = RuntimeError if compiled else ValueError  # torch wraps what is raised while it compiles
    with pytest.raises(error, match=rf"lean.* cannot be used here: \w+ {OWN_CODE}"):
        forward(**models.prompts("left_padding", device))


REFUSED = [
    ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    ("falcon", {}),
    ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
]


@pytest.mark.parametrize("name", ["lean", "streaming"])
@pytest.mark.parametrize("model_type,own", REFUSED[hf.CACHE == "cache" :])  # from 5.24 on GPT-J runs
def test_models_with_a_dict_of_attention_classes_refuse_a_backend(model_type, own, name, device):
    with pytest.raises(ValueError, match=f"{name}.*{model_type} {OWN_CODE}"):
        models.tiny(model_type, name, device, **own)
    assert models.tiny(model_type, "eager", device, **own)


# ---- refusals ----
@pytest.mark.parametrize("family", models.FAMILIES)
def test_output_attentions_is_refused(family, device):
    """Most models do not pass it on: without a check of what Transformers collects, they would return attentions=()."""
    model = models.family(family, device)
    model.set_attn_implementation("lean")
    inputs = models.prompts("left_padding", device)
    with pytest.raises(ValueError, match=r'never forms the attention weights .* attn_implementation="eager"'), torch.no_grad():
        model(**inputs, output_attentions=True)
    with pytest.raises(ValueError, match=r'never forms the attention weights .* attn_implementation="eager"'):
        generate(model, inputs, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="'eager'"):  # the error of Transformers
        model.config.output_attentions = True
    with torch.no_grad():
        assert len(model(**inputs, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1


@torch.no_grad()
def test_blocks_under_torch_compile():
    """Tokens of a block (an image, a prefix) see later ones, which the functions of a mask do not say in a compiled graph."""
    options = {"num_layers_per_stack": 1, "num_hidden_layers": 8}
    stock, lean = (models.tiny("hrm_text", name, **options) for name in ("sdpa", "lean"))
    ids = models.prompts("no_padding", "cpu", rows=1)["input_ids"]
    kinds = torch.zeros_like(ids)
    kinds[:, 3:20] = 1
    expected = stock(ids, token_type_ids=kinds, use_cache=False).logits
    assert not torch.allclose(stock(ids, token_type_ids=0 * kinds, use_cache=False).logits, expected, atol=1e-2)
    for forward in (lean, torch.compile(lean, backend="eager")):
        torch.testing.assert_close(forward(ids, token_type_ids=kinds, use_cache=False).logits, expected, atol=1e-3, rtol=1e-3)


def test_transformers_versions():
    for version in ("4.57.1", "5.16.9"):
        with pytest.raises(ImportError, match=rf"transformers >= 5.17; found {version}.*pip install"):
            hf.check_version(version)
    with warnings.catch_warnings(action="error"):
        for version in ("5.17.0", "5.18.0.dev0", "5.24.9"):
            hf.check_version(version)
    for version in ("5.25.0.dev0", "6.0.0"):
        with pytest.warns(UserWarning, match=f"up to 5.24; found {version}"):
            hf.check_version(version)
