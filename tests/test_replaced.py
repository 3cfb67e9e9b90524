"""K and V that other code reads, writes and replaces in a cache: as those of a DynamicCache, or refused with a message."""

import copy
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import models
import pytest
import torch
from models import family, prompts, tiny
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.caches import PreallocatedCache

generate = partial(models.generate, max_new_tokens=8)
WINDOWED = "mistral_window_below_prompt"
RESIZED = "other code has replaced K and V of its cache by those of fewer or more tokens"


def both(edit):
    """An edit of a layer that assigns edit(K) and edit(V)."""

    def replace(layer):
        layer.keys, layer.values = edit(layer.keys), edit(layer.values)

    return replace


def one_after_the_other(layer):
    layer.keys = layer.keys[:, :, -5:]
    assert layer.get_seq_length() == 5 and layer.keys.shape[2] == 5 and layer.values.shape[2] > 5
    layer.values = layer.values[:, :, -5:]
    assert layer.values.shape == layer.keys.shape


def values_first(layer):
    layer.values = layer.values[:, :, ::3]
    layer.keys = layer.keys[:, :, ::3]


def last_token_in_place(layer):
    layer.keys[:, :, -1] = layer.keys[:, :, 0]
    layer.values[:, :, -1:].mul_(3)
    layer.values *= 1.5


def twice_with_a_kept_view(layer):
    kept = layer.keys, layer.values
    both(lambda x: x[:, :, :4] * 0)(layer)
    layer.keys, layer.values = kept


EDITS = {
    "the last": both(lambda x: x[:, :, -3:]),
    "every second": both(lambda x: x[:, :, ::2].contiguous()),
    "no fewer": both(lambda x: x.flip(2)),
    "more": both(lambda x: x.repeat(1, 1, 9, 1)),
    "other rows": both(lambda x: x[[2, 0]]),
    "one after the other": one_after_the_other,
    "values first": values_first,
    "in place": last_token_in_place,
    "a kept view": twice_with_a_kept_view,
}


@pytest.mark.parametrize("attention", ["sdpa", "lean"])
@pytest.mark.parametrize("name", EDITS)
def test_logits_after_an_edit_are_those_over_a_dynamic_cache(name, attention):
    """With other lengths in the layers, too."""
    ids = prompts("no_padding", "cpu")["input_ids"]
    found = []
    for model, make in ((tiny("llama"), DynamicCache), (tiny("llama", attention), PreallocatedCache)):
        cache = DynamicCache() if make is DynamicCache else make(model)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            for layer in cache.layers:
                EDITS[name](layer)
            lengths = [layer.get_seq_length() for layer in cache.layers]
            copied, rows = copy.deepcopy(cache), len(cache.layers[0].keys)
            cache.crop(-2)
            cache.batch_select_indices(torch.tensor([1, 0, 1]))
            states = [torch.stack([layer.keys, layer.values]) for layer in cache.layers]
            logits = [
                model(ids[:rows, 40 + i : 41 + i], past_key_values=copied, position_ids=torch.tensor([[40 + i]])).logits
                for i in range(3)
            ]
        found.append((lengths, states, torch.cat(logits)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-4, atol=1e-4)


@contextmanager
def pressed(model, edit):
    """Hooks on the attention modules, as those of kvpress, that call edit(layer of the cache, number of new tokens)."""

    def hook(module, args, kwargs, output):
        edit(hf.cache_in(kwargs).layers[module.layer_idx], kwargs["hidden_states"].shape[1])
        return output

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.enter_context(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        yield


LAST = both(lambda x: x[:, :, -60:].contiguous())
PRESSES = {
    "the prompt": lambda layer, new: LAST(layer) if new > 1 else None,
    "each step": lambda layer, new: LAST(layer),
    "later steps": lambda layer, new: both(lambda x: x[:, :, 2:])(layer) if new == 1 else None,
}


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@pytest.mark.parametrize("press", PRESSES)
def test_hooks_that_prune_give_the_tokens_of_transformers(captured, press, padding):
    """Uncaptured, with a reason. The next call, which gets the same storage, is captured."""
    inputs, model = prompts(padding, "cpu"), tiny("llama")
    plain = generate(model, inputs)
    with pressed(model, PRESSES[press]):
        expected = generate(model, inputs)
        beams = generate(model, inputs, num_beams=2)
    assert not torch.equal(plain, expected)
    with hf_fastattn.patch(model, "lean") as patch:
        generate(model, inputs)
        with pressed(model, PRESSES[press]), pytest.warns(UserWarning, match="uncaptured"):
            for _ in range(2):
                assert torch.equal(generate(model, inputs), expected)
            assert torch.equal(generate(model, inputs, num_beams=2), beams)
        assert patch.reasons[0] == RESIZED or (press == "later steps" and "has the forward hook pressed" in patch.reasons[0])
        before = patch.replays
        for _ in range(2):
            assert torch.equal(generate(model, inputs), plain)
        assert patch.replays >= before + 2 * 6


def test_a_layer_that_was_left_half_replaced_does_not_reach_the_next_call():
    model, inputs = tiny("llama"), prompts("no_padding", "cpu")
    with hf_fastattn.patch(model, "lean", graph=False):
        made = lambda: hf.cache_in(generate(model, inputs, return_dict_in_generate=True))  # noqa: E731
        expected, cache = generate(model, inputs), made()
        cache.layers[0].keys = cache.layers[0].keys[:, :, :7]
        wrong = "Layer 0 holds keys of 7 tokens in 3 rows and values of 103 tokens in 3 rows: only one of both was replaced"
        for use in (lambda: cache.update(*torch.zeros(2, 3, 2, 1, 16), 0), lambda: cache.crop(-1)):
            with pytest.raises(ValueError, match=wrong):
                use()
        cache.layers[1].keys = cache.layers[1].keys[:, :, :7]
        with pytest.raises(ValueError, match=wrong):
            cache.save("nowhere", model)
        del cache
        assert torch.equal(generate(model, inputs), expected)
        cache = made()
        for layer in cache.layers:
            both(lambda x: x[:1])(layer)
        del cache, layer
        assert torch.equal(generate(model, inputs), expected)
        cache = made()
        cache.layers[0].values = cache.layers[0].values[:1]
        cache.reset()
        assert torch.equal(generate(model, inputs, past_key_values=cache), expected)


def test_an_edited_cache_is_continued_saved_and_copied(captured, tmp_path):
    """What a later call over it says, and its text, are those of a DynamicCache."""
    inputs, model, found = prompts("no_padding", "cpu"), tiny("llama"), []
    plain = generate(model, inputs)
    for patched in (False, True):
        patch = hf_fastattn.patch(model, "lean") if patched else None
        cache = hf.cache_in(generate(model, inputs, return_dict_in_generate=True))
        for layer in cache.layers:
            both(lambda x: x[:, :, :60])(layer)
        if patch is not None:
            cache.save(tmp_path / "edited", model)
            assert PreallocatedCache.load(tmp_path / "edited", model).get_seq_length() == 60
            assert patch.replays and not patch.reasons
        with pytest.warns(UserWarning, match=RESIZED) if patch else nullcontext():
            for _ in range(3):  # the first time a prompt of this size is read, it is read from Python
                found.append(generate(model, inputs, past_key_values=cache))
                cache.crop(60 - cache.get_seq_length())
    assert all(torch.equal(each, found[0]) for each in found) and patch.reasons == [RESIZED] and patch.captures == 1
    cache.reset()
    before = patch.replays
    assert torch.equal(generate(model, inputs, past_key_values=cache), plain) and patch.replays > before
    patch.undo()


@pytest.mark.parametrize("fewer", [False, True])
def test_k_and_v_are_replaced_between_two_captured_steps(captured, fewer):
    inputs, model, found = prompts("left_padding", "cpu"), tiny("llama"), []

    def replace(ids, scores):
        if ids.shape[1] == 96 + 4:
            for layer in cache.layers:
                both(lambda x: x[:, :, 2 * fewer :].flip(1))(layer)
        return scores

    for patched in (False, True):
        if patched:
            patch = hf_fastattn.patch(model, "lean")
        cache = PreallocatedCache(model) if patched else DynamicCache()
        found.append(generate(model, inputs, past_key_values=cache, logits_processor=[replace]))
    assert torch.equal(*found) and patch.replays == (3 if fewer else 6), patch.reasons
    assert patch.reasons == [RESIZED][: 1 * fewer] and patch.captures == (1 if fewer else 2)
    with cache.on_device(), pytest.raises(RuntimeError, match="K and V of a cache are read or replaced in the step"):
        cache.layers[0].values = torch.zeros(1)
    with cache.on_device():
        assert cache.layers[0].keys.numel() > 0  # as Mllama asks
    patch.undo()


REFUSED = {
    "heads": (lambda x: x[:, :1], r"are \(rows, 2, tokens, 16\) in torch.float32 on cpu; got \(3, 1, 40, 16\)"),
    "width": (lambda x: x[..., :8], r"got \(3, 2, 40, 8\)"),
    "three axes": (lambda x: x[0], r"got \(2, 40, 16\)"),
    "dtype": (lambda x: x.half(), "in torch.float16"),
    "device": (lambda x: x.to("meta"), "on meta"),
    "none": (lambda x: None, "are a tensor; got None. To discard tokens, call reset"),
    "a list": (lambda x: [1], "are a tensor; got "),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_other_k_and_v_are_refused_and_the_cache_stays_as_it_was(name, which):
    model, ids = tiny("llama", "lean"), prompts("no_padding", "cpu")["input_ids"]
    cache = PreallocatedCache(model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        edit, message = REFUSED[name]
        for each in (cache, copy.deepcopy(cache)):
            with pytest.raises(TypeError if "tensor;" in message else ValueError, match=message):
                setattr(each.layers[1], which, edit(getattr(each.layers[1], which)))
        got = model(ids[:, 40:50], past_key_values=cache).logits
        torch.testing.assert_close(got, model(ids[:, :50]).logits[:, 40:], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_replaced_is_refused():
    model, ids = family(WINDOWED, "cpu"), prompts("no_padding", "cpu")["input_ids"]
    model.set_attn_implementation("lean")
    cache = PreallocatedCache(model, 40, grow=False)
    with pytest.raises(ValueError, match=r"holds no tokens whose keys could be replaced. Give it tokens by update"):
        cache.layers[0].keys = torch.zeros(1, 2, 3, 16)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
    with pytest.raises(ValueError, match=r"sliding window of 16 tokens .* so 15 tokens can only be replaced by as many; got 8"):
        cache.layers[1].values = cache.layers[1].values[:, :, ::2]
    with pytest.raises(TypeError, match="layers of this cache cannot be replaced"):
        cache.layers[0] = DynamicCache().layer_class_to_replicate()
    cache.layers = [*cache.layers]
    cache.layers[0] = copy.deepcopy(cache.layers[0])
    with pytest.raises(ValueError, match="other code has changed its layers, which PreallocatedCache does not support"):
        cache.update(*torch.zeros(2, 3, 2, 1, 16), 0)
    llama = tiny("llama", "sdpa")
    fixed = PreallocatedCache(llama, 40, grow=False)
    states = torch.randn(2, 1, 2, 40, 16)
    fixed.update(*states, 0)
    with pytest.raises(RuntimeError, match="carries no gradient"):
        fixed.layers[0].keys = states[0].requires_grad_()
    states = states.detach().repeat(1, 1, 1, 2, 1)
    fixed.layers[0].keys = states[0]
    with pytest.raises(ValueError, match=r"holds 40 tokens and was made with grow=False.*capacity=80 or more"):
        fixed.layers[0].values = states[1]


@pytest.mark.parametrize("name", ["llama", WINDOWED, "qwen2", "gpt_oss"])
def test_what_a_cache_shows_is_what_a_dynamic_cache_shows(name):
    """Between calls over the same storage, whose earlier tokens are not shown, and in a DynamicCache that is made of it."""
    model, expected = family(name, "cpu"), []
    model.set_attn_implementation("eager")
    calls = [prompts("no_padding", "cpu", length=length) for length in (96, 40)]
    for inputs in calls:
        expected.append([*hf.cache_in(generate(model, inputs, return_dict_in_generate=True))])
    with hf_fastattn.patch(model, "lean", graph=False):
        for inputs, wanted in zip(calls, expected, strict=True):
            cache = hf.cache_in(generate(model, inputs, return_dict_in_generate=True))
            torch.testing.assert_close([*cache], wanted, rtol=1e-3, atol=1e-3)
            del cache


def test_k_and_v_are_converted_both_ways():
    model, ids = tiny("llama", "lean"), prompts("no_padding", "cpu")["input_ids"]
    mine = PreallocatedCache(model)
    assert [*mine] == [(None, None, None)] * 2
    with torch.no_grad():
        expected = model(ids).logits[:, 60:]
        model(ids[:, :60], past_key_values=mine)
        dynamic = DynamicCache([*mine])
        other = PreallocatedCache(model)
        for index, (keys, values, *_) in enumerate(dynamic):
            other.update(keys, values, index)
        for cache in (mine, dynamic, other):
            torch.testing.assert_close(model(ids[:, 60:], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)
    mine.reset()
    assert mine.layers[0].keys.shape[2] == mine.layers[0].values.shape[2] == 0


def test_a_rolling_cache_shows_its_slots_and_takes_as_many():
    model, inputs = tiny("llama", "sdpa"), prompts("left_padding", "cpu")
    with hf_fastattn.patch(model, "streaming", window=40, sinks=4, graph=False):
        cache = hf_fastattn.RollingCache(model)
        assert cache.layers[0].keys is None
        shown = []
        with torch.no_grad(), pressed(model, lambda layer, new: shown.append((layer.index, layer.keys.shape[2]))):
            model(inputs["input_ids"][:, :30], past_key_values=cache)
            model(inputs["input_ids"][:, 30:31], past_key_values=cache)
            model(inputs["input_ids"][:, 31:60], past_key_values=cache)
        assert shown == [(0, 30), (1, 30), (0, 31), (1, 31), (0, 44), (1, 44)]
        twin, layer = copy.deepcopy(cache), cache.layers[0]
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        with pytest.raises(ValueError, match=r"can only be replaced by as many: \(3, 2, 44, 16\); got \(3, 2, 3, 16\)"):
            layer.keys = layer.keys[:, :, -3:]
        with torch.no_grad():
            got, expected = (model(inputs["input_ids"][:, 60:70], past_key_values=each).logits for each in (cache, twin))
        assert torch.equal(got, expected)
        cache.reset()
        assert layer.keys.shape[2] == 0


@pytest.mark.parametrize("options", [{}, {"backend": "streaming", "window": 400}], ids=["preallocated", "rolling"])
def test_a_layer_that_is_kept_is_not_overwritten_after_its_k_and_v_were_replaced(captured, options):
    """The graph over its storage refers to the old ones."""
    model, inputs = tiny("llama", "sdpa"), prompts("no_padding", "cpu", rows=1)
    other = {"input_ids": inputs["input_ids"].flip(1)}
    with hf_fastattn.patch(model, **options) as patch:
        expected = generate(model, other)
        cache = hf.cache_in(generate(model, inputs, return_dict_in_generate=True))
        assert cache.storage.recorded
        for layer in cache.layers:
            both(torch.clone)(layer)
        before = layer.keys.clone()
        del cache
        assert torch.equal(generate(model, other), expected) and torch.equal(generate(model, other), expected)
        assert torch.equal(layer.keys, before) and not patch.reasons
