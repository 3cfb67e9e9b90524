"""Linear attention: its maps, chunks and steps against their definitions, its cache, patched models, and distillation."""

import copy
import itertools
import math

import pytest
import torch
from cases import slow_unless
from models import prompts, tiny
from transformers import CONFIG_MAPPING

import hf_fastattn
from hf_fastattn import LinearCache, PreallocatedCache, distillation, kernels
from hf_fastattn.attention.linear import LinearMap
from hf_fastattn.distillation import cross_entropy
from hf_fastattn.kernels import linear_attention
from hf_fastattn.kernels.linear_attention import MAPS, attend, features, num_features, step, weights
from hf_fastattn.patches.fused import delayed

OPTIONS = {"max_new_tokens": 8, "do_sample": False}
SCALE = 0.3


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weight_of(heads, width, seed=7):
    return drawn(heads, width, width, seed=seed) / 2


def by_hand(name, x, scale, weight, of_queries):
    """phi(x) of one vector, a number at a time."""
    x, found = x.tolist(), []
    if name == "elu":
        return [y + 1 if y > 0 else math.exp(y) for y in x]
    if name == "relu":
        return [max(y, 0.0) for y in x]
    if name == "hedgehog":
        y = [sum(x[i] * weight[i][j] for i in range(len(x))) for j in range(len(x))]
        for sign in (1, -1):
            total = sum(math.exp(sign * each) for each in y)
            found += [math.exp(sign * each) / total for each in y]
        return found
    x = [y * math.sqrt(scale) for y in x]
    if name == "taylor":
        pairs = itertools.combinations_with_replacement(range(len(x)), 2)
        return [1.0, *x, *(x[i] * x[j] * (math.sqrt(0.5) if i == j else 1.0) for i, j in pairs)]
    random = linear_attention._directions(len(x), torch.float64, torch.device("cpu")).T.tolist()
    exponents = [sum(a * b for a, b in zip(x, w, strict=True)) - sum(a * a for a in x) / 2 for w in random]
    largest = max(exponents) if of_queries else 0.0
    return [math.exp(e - largest) / 16 for e in exponents]


@pytest.mark.parametrize("of_queries", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_a_map_and_its_gradients_are_those_of_its_formula(name, of_queries):
    x, weight = drawn(2, 3, 5).requires_grad_(), weight_of(2, 5).requires_grad_()
    found = features(name, x, SCALE, weight, of_queries)
    expected = [[by_hand(name, each, SCALE, w, of_queries) for each in row] for row, w in zip(x, weight.tolist(), strict=True)]
    assert found.shape[-1] == num_features(name, 5)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    inputs = (x, weight) if name == "hedgehog" else (x,)
    if name != "performer" or not of_queries:  # the largest is a constant, which cancels
        assert torch.autograd.gradcheck(lambda x, *w: features(name, x, SCALE, *w, of_queries=of_queries), inputs)
    narrow = features(name, x.float(), SCALE, weight.float(), of_queries)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), found, rtol=1e-4, atol=1e-5)


def test_taylor_is_the_series_and_performer_estimates_the_exponential():
    q, k = drawn(1, 8, 6), drawn(1, 8, 6, seed=1)
    score = SCALE * q @ k.mT
    found = features("taylor", q, SCALE) @ features("taylor", k, SCALE).mT
    torch.testing.assert_close(found, 1 + score + score**2 / 2)
    q, k = q / 4, k / 4
    ratio = weights(features("performer", q[None], SCALE, of_queries=True), features("performer", k[None], SCALE))
    softmax = (SCALE * q @ k.mT).masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(ratio[0], softmax, atol=0.02, rtol=0)  # 256 features of short vectors


def inputs(kind="plain", tokens=23):
    q, k, v = drawn(2, 4, tokens, 6), drawn(2, 2, tokens, 6, seed=1), drawn(2, 2, tokens, 3, seed=2)
    live = torch.ones(2, tokens, dtype=torch.bool)
    if kind == "padded":
        live[0, :9] = False
        live[1, 4:6] = False
    return q, k, v, None if kind == "plain" else live


def phi_of(name, heads=4, kv_heads=2):
    weights = weight_of(kv_heads, 6), weight_of(heads, 6, seed=8)
    return lambda x, of_queries: features(name, x, SCALE, weights[of_queries].to(x.dtype), of_queries)


@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("name", MAPS)
def test_chunks_and_steps_are_the_definition(name, kind):
    q, k, v, live = inputs(kind)
    phi = phi_of(name)
    fk = phi(k, False) if live is None else phi(k, False) * live[:, None, :, None]
    expected = weights(phi(q, True), fk) @ v.repeat_interleave(2, 1)
    for chunk in (1, 5, 64):
        torch.testing.assert_close(attend(q, k, v, phi, None, live, chunk), expected)
    if live is not None:
        nan = v.masked_fill(~live[:, None, :, None], torch.nan)
        torch.testing.assert_close(attend(q, k, nan, phi, None, live, 5), expected)
    u, z = (torch.zeros(2, 2, *size, dtype=torch.float64) for size in ((fk.shape[-1], 3), (fk.shape[-1],)))
    first = attend(q[:, :, :10], k[:, :, :10], v[:, :, :10], phi, (u, z), None if live is None else live[:, :10], 4)
    sizes = u.shape, z.shape
    steps = [step(phi(q[:, :, t : t + 1], True)[:, :, 0], fk[:, :, t].clone(), v[:, :, t], u, z) for t in range(10, 23)]
    torch.testing.assert_close(torch.cat([first, torch.stack(steps, 2)], 2), expected)
    torch.testing.assert_close(u, fk.mT @ v)
    assert (u.shape, z.shape) == sizes and not expected.isnan().any()


@pytest.mark.parametrize("name", MAPS)
def test_gradients_of_chunks_are_those_of_the_definition(name):
    q, k, v, _ = inputs(tokens=9)
    phi, given = phi_of(name), [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad((weights(phi(q, True), phi(k, False)) @ v.repeat_interleave(2, 1)).square().sum(), given)
    found = torch.autograd.grad(attend(q, k, v, phi, chunk=4).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not (kernels.INTERPRETED or torch.cuda.is_available()), reason="a kernel needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 6, 3), (1, 3, 1, 70, 64), (1, 2, 2, 300, 80)])
def test_the_kernel_of_a_step_is_its_specification(sizes, dtype, device):
    from hf_fastattn.kernels.decode.linear_state import linear_state

    rows, heads, kv_heads, width, value_dim = sizes
    fq, fk, z = (drawn(rows, n, width, seed=n, dtype=torch.float32).abs().to(device) for n in (heads, kv_heads, kv_heads))
    u = drawn(rows, kv_heads, width, value_dim, dtype=torch.float32).to(device)
    v = drawn(rows, kv_heads, 2, value_dim, seed=5, dtype=dtype).to(device)[:, :, 1]
    exact_u, exact_z = u.double(), z.double()
    expected = step(fq.double(), fk.double(), v.double(), exact_u, exact_z)
    found, one_rounding = linear_state(fq, fk, v, u, z), 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), expected, rtol=one_rounding, atol=1e-6)
    torch.testing.assert_close(u.double(), exact_u, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z.double(), exact_z, rtol=1e-6, atol=1e-6)
    fq.zero_()
    assert not linear_state(fq, fk, v, u, z).any()  # 0 / 0
    with pytest.raises(ValueError, match="all of which must be float32"):
        linear_state(fq.double(), fk, v, u, z)


def model_of(family="llama", linear_map="elu", **own):
    model = tiny(family, "linear", **own)
    if linear_map == "hedgehog":
        for layer in model.model.layers:
            layer.self_attn.linear_map = LinearMap(4, 2, 16)
            for number, each in enumerate(layer.self_attn.linear_map.parameters()):
                each.data.add_(drawn(*each.shape, seed=number, dtype=torch.float32) / 4)
    model.config.linear_map = linear_map
    return model


WAYS = {"no_padding": {}, "left_padding": {}, "holes": {}, "beams": {"num_beams": 3}, "chunks": {"prefill_chunk_size": 8}}


GENERATED = [*itertools.product(("llama", "mistral"), MAPS)]


@pytest.mark.parametrize("family, name", slow_unless(GENERATED[::3].__contains__, GENERATED))
def test_generate_is_captured_and_has_the_tokens_without_a_cache(family, name, captured_steps):
    model = model_of(family, name, **{"sliding_window": None} if family == "mistral" else {})
    with hf_fastattn.patch(model, "linear") as patch:
        assert "an approximation" in str(patch)
        for way, options in WAYS.items():
            given = prompts(way if "padding" in way or way == "holes" else "left_padding", "cpu", length=24)
            before = patch.replays
            expected = model.generate(**given, **OPTIONS, **options | {"use_cache": False, "prefill_chunk_size": None})
            patch.reasons.clear()
            for _ in range(2):
                assert torch.equal(model.generate(**given, **OPTIONS, **options), expected), way
            assert not patch.reasons and patch.replays > before + 8, way


@pytest.mark.parametrize("graph", [True, False])
def test_another_map_is_noticed_by_graphs_and_caches(graph, captured_steps):
    model, given = model_of(), prompts("left_padding", "cpu", length=24)
    with hf_fastattn.patch(model, "linear", graph=graph), torch.no_grad():
        cache, found = LinearCache(model), set()
        model(given["input_ids"], past_key_values=cache)
        for name in ("elu", "relu", "taylor", "elu", "relu"):
            model.config.linear_map = name
            expected = model.generate(**given, **OPTIONS, use_cache=False)
            found.add(str(expected))
            for _ in range(2):
                assert torch.equal(model.generate(**given, **OPTIONS), expected)
        assert len(found) == 3
        with pytest.raises(ValueError, match="has sums of the map 'elu', and the model has now 'relu'"):
            model(given["input_ids"][:, :1], past_key_values=cache)


def test_the_state_is_as_large_after_a_long_text_and_counts_no_padding():
    model, ids = model_of(), torch.randint(3, 100, (2, 400), generator=torch.Generator().manual_seed(0))
    with hf_fastattn.patch(model, "linear", graph=False), torch.no_grad():
        cache, sizes = LinearCache(model), []
        for end in (10, 400):
            model(ids[:, cache.get_seq_length() : end], past_key_values=cache)
            sizes.append([tuple(part.tensor.shape) for part in cache.storage.memory()])
            assert cache.get_seq_length() == end
        assert sizes[0] == sizes[1] == [(2, 2, 16, 16), (2, 2, 16)] * 2
        padded, mask = LinearCache(model), torch.ones(2, 410, dtype=torch.int64)
        mask[:, :10] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(torch.cat([ids[:, :10], ids], 1), attention_mask=mask, position_ids=positions, past_key_values=padded)
        for one, other in zip(cache.storage.states(), padded.storage.states(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_its_cache_is_copied_saved_restored_and_emptied(tmp_path):
    model, ids = model_of(), prompts("no_padding", "cpu", rows=2, length=24)["input_ids"]
    with hf_fastattn.patch(model, "linear", graph=False), torch.no_grad():
        cache = LinearCache(model)
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        cache.save(tmp_path / "cache", model)
        loaded = LinearCache.load(tmp_path / "cache", model)
        mark = cache.storage.mark()
        expected = model(ids[:, :1], past_key_values=cache).logits
        for other in (twin, loaded):
            assert torch.equal(model(ids[:, :1], past_key_values=other).logits, expected)
        cache.storage.rewind(mark)
        assert torch.equal(cache.storage.states()[0], mark[0])
        cache.reset()
        assert cache.get_seq_length() == 0 and not any(state.any() for state in cache.storage.states())
        with pytest.raises(ValueError, match="needs the recurrent states"):
            PreallocatedCache.load(tmp_path / "cache", model)
        with pytest.raises(ValueError, match="holds 2 rows"):
            twin.check_rows(3)
        with pytest.raises(ValueError, match="This cache holds 2 rows, and the call has 1"):
            model(ids[:1, :1], past_key_values=twin)
        with pytest.raises(ValueError, match="recurrent states, from which no token can be removed"):
            twin.crop(-1)
        with pytest.raises(ValueError, match="recurrent states, from which no token can be removed"):
            model.generate(ids[:1], **OPTIONS, prompt_lookup_num_tokens=3)


REFUSED = {
    "a window": (lambda: model_of("mistral", sliding_window=16), {}, "layers of the kind window"),
    "another cache": (model_of, {"cache": "preallocated"}, "linear attention keeps sums"),
    "8 bits": (model_of, {"kv_dtype": "int8"}, "a preallocated cache and a backend whose decode kernel reads 8 bits"),
    "ALiBi": (lambda: tiny("bloom", num_key_value_heads=4), {}, "ALiBi"),
    "an unknown map": (lambda: model_of(linear_map="cos"), {}, "one of elu, relu, taylor, hedgehog, performer; got 'cos'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patch_refuses(name):
    make, options, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        hf_fastattn.patch(make(), "linear", **options)


@pytest.mark.parametrize("model_type, kind", [("deepseek_v3", "latent"), ("mllama_text_model", "cross")])
def test_a_cache_refuses_other_layers(model_type, kind):
    with pytest.raises(ValueError, match=f"layers of the kind {kind}"):
        LinearCache(CONFIG_MAPPING[model_type]())


def test_attention_refuses_what_the_sums_cannot_have():
    model, ids = model_of(), prompts("no_padding", "cpu", rows=2, length=24)["input_ids"]
    attention = model.model.layers[0].self_attn
    q = torch.zeros(1, 4, 3, 16)

    def run(k=q, mask=None, **options):
        return hf_fastattn.attention.function.attention_forward("linear", attention, q, k, k, mask, **options)

    for options, says in (
        ({"softcap": 3.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sink logits"),
        ({"sliding_window": 2}, "sliding_window"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "takes a 2-D attention_mask"),
        ({"is_causal": False}, "not plainly causal"),
        ({"k": torch.zeros(1, 4, 9, 16)}, "3 queries and 9 keys: a cache that keeps tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            run(**options)
    with torch.no_grad(), pytest.raises(RuntimeError, match="LinearCache needs a model that runs 'linear'"):
        model(ids, past_key_values=LinearCache(model))  # without the hook
    with pytest.raises(ValueError, match="Llama requests a mask that is not plainly causal"):
        model(ids, position_ids=torch.arange(12).repeat(2, 2), use_cache=False)  # packed sequences
    with pytest.raises(ValueError, match="it runs as attn_implementation"):
        hf_fastattn.get("linear")(q, q, q)
    with pytest.raises(ValueError, match="no weights of the map 'hedgehog'"):
        model.config.linear_map = "hedgehog"
        model(ids, use_cache=False)
    with pytest.raises(ValueError, match="keeps sums in their place"):
        hf_fastattn.explain(model, backend="linear")
    assert not hf_fastattn.get("linear").exact and hf_fastattn.get("lean").exact
    other = tiny("llama")
    says = "LinearCache needs a model that runs .linear."
    with hf_fastattn.patch(other, "lean", graph=False), torch.no_grad(), pytest.raises(RuntimeError, match=says):
        other(ids, past_key_values=LinearCache(other))


def test_a_distilled_model_is_saved_loaded_and_generated_from(tmp_path, captured_steps, monkeypatch):
    model, given = tiny("llama", "sdpa"), prompts("left_padding", "cpu", length=24)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    texts = [torch.randint(3, 100, (4, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    losses = hf_fastattn.distill(model, texts, epochs=4)
    assert sum(losses[-6:]) < sum(losses[:6]) and len(losses) == 24 and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    assert delayed._is_seen(model.model.layers[0].self_attn.linear_map, shared=False)  # else a graph merges no launches
    model.save_pretrained(tmp_path)
    loaded = hf_fastattn.load_distilled(tmp_path)
    with hf_fastattn.patch(model, "linear"), hf_fastattn.patch(loaded, "linear") as patch:
        expected = model.generate(**given, **OPTIONS)
        for _ in range(2):
            assert torch.equal(loaded.generate(**given, **OPTIONS), expected)
        assert patch.replays and not patch.reasons
        with pytest.raises(ValueError, match="This model is patched"):
            hf_fastattn.distill(model, texts)
    fresh, calls, loss = tiny("llama", "sdpa"), [], distillation.cross_entropy
    fresh.model.layers[1].train()
    monkeypatch.setattr(distillation, "cross_entropy", lambda *given: calls.append(0) or (1 // (len(calls) < 4), loss(*given))[1])
    with pytest.raises(ZeroDivisionError):
        hf_fastattn.distill(fresh, texts)
    assert not any("linear_map" in name for name, _ in fresh.named_modules()) and not hasattr(fresh.config, "linear_map")
    assert fresh.model.layers[1].training and not fresh.model.layers[0].training
    for options, says in (({"map": "elu"}, "elu, relu, taylor, performer have no weights"), ({"tokens": 0}, "at least 1; got 0")):
        with pytest.raises(ValueError, match=says):
            hf_fastattn.distill(model, texts, **options)
    with pytest.raises(ValueError, match="got no texts"):
        hf_fastattn.distill(model, [])
    with pytest.raises(TypeError, match="no tokenizer"):
        hf_fastattn.distill(model, ["a text"])
    with pytest.raises(TypeError, match="a list of texts; got a str"):  # whose letters are texts, too
        hf_fastattn.distill(model, "a text", tokenizer=lambda *_, **__: {"input_ids": texts[0]})
    monkeypatch.setattr(distillation, "cross_entropy", loss)
    with torch.inference_mode():
        assert hf_fastattn.distill(fresh, [text + 0 for text in texts], epochs=4) == losses
    tiny("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="no weights of linear maps"):
        hf_fastattn.load_distilled(tmp_path / "other")


def test_the_loss_is_the_cross_entropy_of_the_weights():
    q, k, learned = drawn(1, 4, 7, 6), drawn(1, 2, 7, 6, seed=1), LinearMap(4, 2, 6)
    found, expected = cross_entropy(q, k, SCALE, learned), []
    one = torch.eye(6, dtype=torch.float64)[None]
    for head, i in itertools.product(range(4), range(7)):
        keys = k[0, head // 2, : i + 1]
        softmax = (SCALE * keys @ q[0, head, i]).softmax(0)
        phi = [features("hedgehog", x[None], SCALE, one)[0] for x in (q[0, head, i][None], keys)]
        products = phi[1] @ phi[0][0]
        expected.append(-(softmax * (products / products.sum()).log()).sum())
    torch.testing.assert_close(found.double(), torch.stack(expected).mean(), rtol=1e-5, atol=1e-6)
