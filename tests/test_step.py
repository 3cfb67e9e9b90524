"""The current step: one for each forward over a cache of the package, per thread, also after errors."""

import copy
import threading
from unittest.mock import Mock

import pytest
import torch
from models import tiny
from test_forms import NEGATED

import hf_fastattn
from hf_fastattn import PreallocatedCache, RollingCache
from hf_fastattn.attention import step as steps
from hf_fastattn.caches.layers import Layer
from hf_fastattn.caches.storage import PreallocatedStorage
from hf_fastattn.caches.stored import StoredCache
from hf_fastattn.hf import layer_kinds
from hf_fastattn.kernels.spec import KV

IDS = torch.arange(1, 25)[None]
STREAMING = {"backend": "streaming", "window": 8, "sinks": 2}
PATCHES = [({}, PreallocatedCache), (STREAMING, RollingCache)]
both_caches = pytest.mark.parametrize("options, cache_type", PATCHES, ids=["preallocated", "rolling"])


def inside(model, then, layer=1):
    """A context in which a layer of the model calls `then` before it runs."""
    return model.model.layers[layer].register_forward_pre_hook(lambda *_: then())


@both_caches
def test_a_step_lasts_as_long_as_a_forward(options, cache_type):
    model, seen = tiny("llama"), []
    with hf_fastattn.patch(model, **options), torch.no_grad():
        cache = cache_type(model)
        with inside(model, lambda: seen.append(steps.innermost())):
            model(IDS, past_key_values=cache)
            model(IDS[:, :1], past_key_values=cache)
            model(IDS)  # with a cache of Transformers
        assert [step and step.storage for step in seen] == [cache.storage, cache.storage, None]
        assert seen[0] is not seen[1] and steps.innermost() is None
    assert not model._forward_pre_hooks and not model._forward_hooks and not model._forward_hooks_always_called


@both_caches
def test_each_thread_has_its_own_step(options, cache_type):
    model = tiny("llama")
    found, waiting = {}, threading.Barrier(2, timeout=60)

    def run(name, cache):
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        found[name] = steps.innermost()

    def look():
        waiting.wait()  # both are inside a forward
        found[threading.get_ident()] = steps.innermost().storage
        waiting.wait()

    with hf_fastattn.patch(model, **options):
        caches = [cache_type(model) for _ in range(2)]
        with inside(model, look):
            threads = [threading.Thread(target=run, args=pair) for pair in zip("ab", caches, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [found[thread.ident] for thread in threads] == [cache.storage for cache in caches]
        assert found["a"] is found["b"] is None
        assert [cache.get_seq_length() for cache in caches] == [IDS.shape[1]] * 2


def test_the_mode_of_a_graph_is_that_of_its_thread():
    model, found = tiny("llama"), []
    with hf_fastattn.patch(model), torch.no_grad():
        cache = PreallocatedCache(model)
        model(IDS, past_key_values=cache)
        cache.storage.sync(torch.device("cpu"))
        with cache.on_device():
            thread = threading.Thread(target=lambda: found.append((steps.mode(cache.storage), cache.get_seq_length())))
            thread.start()
            thread.join()
            assert steps.mode(cache.storage) == steps.CAPTURED and isinstance(cache.get_seq_length(), torch.Tensor)
        assert found == [(steps.EAGER, IDS.shape[1])] and steps.mode(cache.storage) == steps.EAGER


@both_caches
def test_steps_nest(options, cache_type):
    """A model that runs inside the forward of another one, like an assistant model or a vision tower."""
    outer, inner = tiny("llama"), tiny("llama", num_hidden_layers=3)
    with hf_fastattn.patch(outer, **options), hf_fastattn.patch(inner, **options), torch.no_grad():
        expected = [model(ids, past_key_values=cache_type(model)).logits for model, ids in ((outer, IDS), (inner, IDS[:, :9]))]
        got, cache = [], cache_type(inner)
        with inside(outer, lambda: got.append(inner(IDS[:, :9], past_key_values=cache).logits)):
            found = outer(IDS, past_key_values=cache_type(outer)).logits
        assert torch.equal(found, expected[0]) and torch.equal(got[0], expected[1]) and cache.get_seq_length() == 9
        assert steps.innermost() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@both_caches
def test_a_forward_that_raises_leaves_no_step(options, cache_type, error):
    """Also for an error after which torch calls no hooks; then the next forward removes the step."""
    model = tiny("llama")
    with hf_fastattn.patch(model, **options), torch.no_grad():
        expected = model(IDS, past_key_values=cache_type(model)).logits
        cut, again = cache_type(model), cache_type(model)
        with inside(model, Mock(side_effect=error)), pytest.raises(error):
            model(IDS, past_key_values=cut)
        assert error is not ValueError or steps.of_model(model) is None
        assert torch.equal(model(IDS, past_key_values=again).logits, expected) and steps.of_model(model) is None
        if cache_type is RollingCache:
            with pytest.raises(ValueError, match="was interrupted"):
                model(IDS[:, :1], past_key_values=cut)
            assert steps.of_model(model) is None
            cut.reset()
            assert torch.equal(model(IDS, past_key_values=cut).logits, expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@both_caches
def test_a_cache_after_a_forward_that_was_interrupted(options, cache_type, error, tmp_path):
    """The first layer has stored a token that the second lacks. Where tokens can be removed, the cache is as before."""
    model = tiny("llama")
    with hf_fastattn.patch(model, **options), torch.no_grad():
        cache, more = cache_type(model), IDS[:, :1]
        prompt = model(IDS, past_key_values=cache).logits
        expected = model(more, past_key_values=cache).logits

        def cut(tokens=IDS):
            cache = cache_type(model)
            model(tokens, past_key_values=cache)
            with inside(model, Mock(side_effect=error)), pytest.raises(error):
                model(more, None, None, cache)
            return cache

        (cache := cut()).reset()
        assert torch.equal(model(IDS, past_key_values=cache).logits, prompt)
        if cache_type is PreallocatedCache:
            assert torch.equal(model(more, past_key_values=cut()).logits, expected)
            cut().save(tmp_path / "cache", model)
            (cropped := cut(torch.cat([IDS, more, more], 1))).crop(-2)
            for cache in (cropped, PreallocatedCache.load(tmp_path / "cache", model)):
                torch.testing.assert_close(model(more, past_key_values=cache).logits, expected)


def test_a_window_after_a_forward_that_was_interrupted():
    """What it has dropped is gone, unless there was nothing before."""
    model, prompt = tiny("mistral", sliding_window=16), IDS.repeat(1, 30)
    with hf_fastattn.patch(model), torch.no_grad():
        expected = model(prompt, past_key_values=PreallocatedCache(model), logits_to_keep=1).logits
        for before in (0, 24):
            cache = PreallocatedCache(model)
            if before:
                model(IDS, past_key_values=cache)
            with inside(model, Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
                model(prompt, past_key_values=cache)
            if before:
                with pytest.raises(ValueError, match="was interrupted"):
                    model(prompt, past_key_values=cache)
                cache.reset()
            assert torch.equal(model(prompt, past_key_values=cache, logits_to_keep=1).logits, expected)


@both_caches
def test_arguments_without_names(options, cache_type):
    """A cache counts the tokens and finds the padding in them, too."""
    model, mask = tiny("llama"), torch.ones_like(IDS)
    mask[:, :5] = 0
    with hf_fastattn.patch(model, **options), torch.no_grad():
        named = model(IDS, attention_mask=mask, past_key_values=cache_type(model)).logits
        assert torch.equal(model(IDS, mask, None, cache_type(model)).logits[:, 5:], named[:, 5:])
        with pytest.raises(TypeError, match=r"multiple values|by keyword"):
            model(IDS, mask, None, cache_type(model), attention_mask=mask)


def test_generate_after_an_interrupt(captured):
    model = tiny("llama")
    with hf_fastattn.patch(model, **STREAMING) as patch:
        options = {"max_new_tokens": 6, "do_sample": False}
        expected = model.generate(IDS, **options)
        with inside(model, Mock(side_effect=[None, KeyboardInterrupt])), pytest.raises(KeyboardInterrupt):
            model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, **options), expected) and steps.of_model(model) is None
        assert patch.captures


def test_layers_recomputed_by_checkpointing_find_no_step():
    model, seen = tiny("llama", use_cache=False), []
    with hf_fastattn.patch(model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: seen.append(steps.innermost()))
        loss = model(IDS, labels=IDS, past_key_values=PreallocatedCache(model)).loss
        forward = len(seen)
        loss.backward()
        assert len(seen) > forward and seen[forward:] == [None] * (len(seen) - forward)
        assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


class NegatedLayer(Layer):
    """Stores -V, and tells the kernels by its form."""

    def update(self, key_states, value_states, *args, **kwargs):
        both = super().update(key_states, -value_states)
        step = self.track.step
        assert step is not None
        step.kv = KV(*both, NEGATED)
        return both


class NegatedCache(StoredCache):
    def __init__(self, model):
        storage = PreallocatedStorage(layer_kinds(model.config), 64)
        for layer in storage.layers:
            layer.__class__ = NegatedLayer
        self._adopt(storage)

    def get_query_offset(self, layer_idx=0):
        return self.layers[layer_idx].query_offset()


@pytest.mark.parametrize("backend", ["lean", "split_kv", "fa2"])
@pytest.mark.parametrize("with_padding", [False, True])
def test_a_custom_form_under_patch_with_a_graph(backend, with_padding, captured):
    model, mask = tiny("llama"), torch.ones_like(IDS)
    mask[:, : 5 * with_padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    model.set_attn_implementation("eager")
    expected = model.generate(IDS, **options)
    with hf_fastattn.patch(model, backend) as patch:
        for _ in range(2):
            cache = NegatedCache(model)
            assert torch.equal(model.generate(IDS, past_key_values=cache, **options), expected)
        assert patch.replays == 12 and not patch.reasons
        # A mask that falls back to the dense path.
        dense = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
        with torch.no_grad():
            caches = (NegatedCache(model), PreallocatedCache(model))
            assert torch.equal(*(model(IDS, attention_mask=dense, past_key_values=each).logits for each in caches))


def test_a_mask_left_by_an_interrupt_is_not_used_by_another_model():
    one, other = tiny("llama"), tiny("llama")
    with hf_fastattn.patch(one, **STREAMING), hf_fastattn.patch(other, cache=None, graph=False, **STREAMING), torch.no_grad():
        mask = torch.ones_like(IDS)
        mask[:, :6] = 0
        expected = other(IDS).logits
        with inside(one, Mock(side_effect=KeyboardInterrupt), 0), pytest.raises(KeyboardInterrupt):
            one(IDS, attention_mask=mask, past_key_values=RollingCache(one))
        assert torch.equal(other(IDS).logits, expected)


@pytest.mark.parametrize("which", ["the same model", "another model"])
def test_a_mask_requested_without_the_cache_is_not_that_of_the_step(which):
    model = tiny("llama")
    padded = torch.ones_like(IDS)
    padded[:, :5] = 0
    with hf_fastattn.patch(model, **STREAMING), torch.no_grad():
        other = model if which == "the same model" else copy.deepcopy(model)
        found = []

        def look(*_):
            if not found:
                found.append(None)  # the same model comes here again
                found[0] = other.model(IDS, attention_mask=padded, use_cache=False).last_hidden_state

        expected = other.model(IDS, attention_mask=padded, use_cache=False).last_hidden_state
        logits = model(IDS, past_key_values=RollingCache(model)).logits
        with model.model.register_forward_pre_hook(look):
            inside_a_step = model(IDS, past_key_values=RollingCache(model)).logits
        assert torch.equal(inside_a_step, logits)
        assert torch.equal(found[0][:, 5:], expected[:, 5:])
