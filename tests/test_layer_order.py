"""Layers in any order, a subset of them, one of them twice: every layer counts its own tokens, as in a DynamicCache."""

import copy
from functools import partial

import models
import pytest
import torch
from models import FAMILIES, prompts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import PreallocatedCache, RollingCache
from hf_fastattn.caches import layers
from hf_fastattn.caches.storage import PreallocatedStorage
from hf_fastattn.hf import Kind

generate = partial(models.generate, max_new_tokens=12)
ORDERS = {"swapped": (0, 2, 1, 3), "reversed": (3, 2, 1, 0), "the last first": (3, 0, 1, 2)}
MODELS = {
    "llama": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 16}),
    "both kinds": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
}


def ordered(name: str, order: tuple[int, ...], attention: str = "sdpa"):
    model_type, own = MODELS[name]
    model = tiny(model_type, attention, num_hidden_layers=4, **own)
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in order]).eval()
    return model


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_run_in_any_order(captured_steps, monkeypatch, name, order, padding):
    indices = ORDERS[order]
    if name == "both kinds":  # each stays among layers of its kind, because masks belong to positions in a model
        indices = {"swapped": (1, 0, 2, 3), "reversed": (1, 0, 3, 2)}.get(order) or pytest.skip("no other order keeps the kinds")
    model = ordered(name, indices)
    inputs = prompts(padding, "cpu", rows=2)
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, past_key_values=PreallocatedCache(model)), expected)
    monkeypatch.setattr(layers, "KEEP", 4)
    monkeypatch.setattr(layers, "SLACK", 8)
    for graph in (False, True):
        with hf_fastattn.patch(model, graph=graph) as patch:
            for _ in range(2):
                assert torch.equal(generate(model, inputs), expected)
            if graph:
                assert patch.captures == 1 and not patch.reasons


@pytest.mark.parametrize("chunks", [(96, 1, 1), (40, 30, 26, 1), (1,) * 40])
def test_chunks_reach_layers_out_of_order(monkeypatch, chunks):
    monkeypatch.setattr(layers, "KEEP", 4)
    monkeypatch.setattr(layers, "SLACK", 8)
    model = ordered("both kinds", (1, 0, 3, 2))
    ids = prompts("no_padding", "cpu", rows=2, length=sum(chunks))["input_ids"]
    cache = PreallocatedCache(model, 4)
    with torch.no_grad():
        whole = model(ids).logits
        parts = [model(chunk, past_key_values=cache).logits for chunk in ids.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_layer_that_runs_twice_behaves_as_with_a_dynamic_cache():
    model = ordered("llama", (0, 1, 1, 2, 3))
    inputs = prompts("no_padding", "cpu", rows=2)
    expected = generate(model, inputs)
    assert torch.equal(generate(model, inputs, past_key_values=PreallocatedCache(model)), expected)
    # Its second run has more keys than the mask, so the visible keys are undefined.
    with hf_fastattn.patch(model), pytest.raises(ValueError, match="a mask made for 2 rows of 96 queries"):
        generate(model, inputs)


def test_a_graph_writes_each_layer_that_has_all_tokens_once():
    model = tiny("llama", num_hidden_layers=3)
    cache, states = PreallocatedCache(model), torch.ones(1, 2, 3, 16)
    token = states[:, :, :1]
    for index in (2, 0, 1):
        cache.update(states, states, index)
    storage = cache.storage
    storage.sync(torch.device("cpu"))
    everyone = storage.variant
    with pytest.raises(RuntimeError, match="layer 1 runs twice"), cache.on_device():
        cache.update(token, token, 1)
        cache.update(token, token, 1)
    with pytest.raises(RuntimeError, match=r"layers \[0, 2\] did not run"), cache.on_device():
        cache.update(token, token, 1)
        storage.step()
    storage.rewind(None)
    for index in (2, 0):
        cache.update(token, token, index)
    storage.sync(torch.device("cpu"))
    assert storage.variant != everyone  # so that a graph of all layers is not replayed for these
    with cache.on_device():
        for index in (0, 2):
            cache.update(token, token, index)
        with pytest.raises(RuntimeError, match="layer 1 does not hold all tokens yet"):
            cache.update(token, token, 1)
        storage.step()
    storage.advance()
    assert [cache.get_seq_length(index) for index in range(3)] == [5, 3, 5]
    assert storage.tracks[0].counts.tolist() == [5, 5]


class Operations(TorchDispatchMode):
    def __enter__(self):
        self.names: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window, tokens, counts, number", [(None, 50, [50, 50], 1), (8, 5, [5, 5], 1), (8, 700, [135, 700], 4)])
def test_counts_are_written_by_as_few_operations_as_they_need(window, tokens, counts, number):
    kind = Kind("full") if window is None else Kind("window", window)
    storage, states = PreallocatedStorage([kind] * 2, 1024), torch.ones(1, 2, tokens, 16)
    storage.sync(torch.device("cpu"))  # allocates the counts
    for layer in storage.layers:
        layer.update(states, states)
    with Operations() as found:
        storage.sync(torch.device("cpu"))
    assert storage.tracks[0].counts.tolist() == counts and len(found.names) == number


def test_layers_that_did_not_run_continue_at_their_length():
    model = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    cache, states = PreallocatedCache(model), torch.arange(60.0).view(1, 1, 60, 1).expand(1, 2, 60, 16)
    stock = DynamicCache(config=model.config)
    for index, start, stop in ((0, 0, 20), (1, 0, 20), (0, 20, 40), (0, 40, 41), (1, 20, 35), (1, 35, 60), (0, 41, 42)):
        new = states[:, :, start:stop]
        for ours, theirs in zip(cache.update(new, -new, index), stock.update(new, -new, index), strict=True):
            assert torch.equal(ours, theirs)
    assert [cache.get_seq_length(index) for index in (0, 1)] == [42, 60]
    assert [cache.get_mask_sizes(1, index) for index in (0, 1)] == [stock.get_mask_sizes(1, index) for index in (0, 1)]
    cache.crop(-50)
    assert [cache.get_seq_length(index) for index in (0, 1)] == [0, 10]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "mistral_window_below_prompt"])
def test_an_early_exit_drafts_with_some_of_the_layers(captured_steps, name):
    model_type, own = FAMILIES[name]
    model = tiny(model_type, **own)
    model.generation_config.assistant_confidence_threshold, model.generation_config.num_assistant_tokens = 0.0, 5
    inputs = prompts("no_padding", "cpu", rows=1)
    expected = generate(model, inputs)
    with hf_fastattn.patch(model) as patch:
        captures = []
        for _ in range(5):
            assert torch.equal(generate(model, inputs, assistant_early_exit=1), expected)
            captures.append(patch.captures)
        assert captures[0] >= 1 and captures[3] == captures[4]  # each of two storages drafts in one of the calls
        assert torch.equal(generate(model, inputs), expected)
        assert not [reason for reason in patch.reasons if "assisted" not in reason], patch.reasons
    assert model.config.num_hidden_layers == 2


# RollingCache counts once for all layers.


def streams(model, **options):
    return hf_fastattn.patch(model, "streaming", window=24, sinks=2, **options)


@pytest.mark.parametrize("order", ["swapped", "reversed"])
def test_a_rolling_cache_takes_layers_in_any_order(captured_steps, order):
    model = ordered("llama", ORDERS[order])
    inputs = prompts("left_padding", "cpu", rows=2)
    with streams(model, cache=None, graph=False):
        expected = generate(model, inputs)
    for graph in (False, True):
        with streams(model, graph=graph) as patch:
            for _ in range(2):
                assert torch.equal(generate(model, inputs), expected)
            assert patch.captures == graph


@pytest.mark.parametrize("graph", [False, True])
def test_a_rolling_cache_refuses_layers_that_lack_tokens(captured_steps, graph):
    model = tiny("llama")
    inputs = prompts("no_padding", "cpu", rows=1)

    def fail_then_refuse(given, cache):
        with model.model.layers[0].register_forward_hook(lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
            model(**given, past_key_values=cache)
        with pytest.raises(ValueError, match="was interrupted"):
            model(**given, past_key_values=cache)

    with streams(model, graph=graph), torch.no_grad():
        cache = RollingCache(model)
        model(**inputs, past_key_values=cache)
        fail_then_refuse({"input_ids": inputs["input_ids"][:, :1]}, cache)
        longer = {"input_ids": inputs["input_ids"][:, [0] * (cache.get_seq_length() + 1)]}
        with pytest.raises(ValueError, match="was interrupted"):
            generate(model, longer, past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(model, inputs, past_key_values=cache), generate(model, inputs))
        fail_then_refuse(inputs, RollingCache(model))
        twice = copy.deepcopy(model)
        twice.model.layers[1].self_attn.layer_idx = 0
        with pytest.raises(RuntimeError, match="one update by each layer"):
            twice(**inputs, past_key_values=RollingCache(twice))
