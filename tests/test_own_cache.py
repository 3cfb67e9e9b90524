"""A custom cache in one file, with K and V in reverse order. patch() captures its steps."""

import fake_graph
import pytest
import torch
from models import PADDINGS, PROMPT, prompts, tiny

import hf_fastattn
from hf_fastattn.attention.step import EAGER, mode
from hf_fastattn.caches.contract import Storage
from hf_fastattn.caches.stored import StoredCache
from hf_fastattn.hf import CacheLayerMixin
from hf_fastattn.patches.calls import calls


class Reversed(CacheLayerMixin):
    """Token n in slot capacity - 1 - n."""

    is_sliding = is_compileable = False

    def __init__(self, storage):
        super().__init__()
        self.all = storage

    def lazy_initialization(self, keys, values):
        shape = (*keys.shape[:2], self.all.capacity, keys.shape[3])
        self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        self.is_initialized = True

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.all.rows = len(keys)
        slots = self.all.capacity - 1 - self.all.count(keys.device) - torch.arange(keys.shape[2], device=keys.device)
        self.keys.index_copy_(2, slots, keys)
        self.values.index_copy_(2, slots, values)
        self.all.written(self, keys.shape[2])
        return self.keys.flip(2), self.values.flip(2)

    def get_mask_sizes(self, query_length):
        return self.all.capacity, 0

    def get_seq_length(self):
        return self.all.seen

    def get_max_length(self):
        return self.all.capacity


class ReversedStorage(Storage):
    def __init__(self, num_layers, capacity):
        self.capacity, self.rows, self.seen, self.device_seen = capacity, None, 0, None
        self.layers = [Reversed(self) for _ in range(num_layers)]

    def count(self, device):
        return self.seen if mode(self) == EAGER else self.device_seen

    def written(self, layer, tokens):
        if mode(self) == EAGER and layer is self.layers[-1]:
            self.seen += tokens

    def sync(self, device):
        if self.device_seen is None:
            self.device_seen = torch.zeros(1, dtype=torch.int64, device=device)
        self.device_seen.fill_(self.seen)

    def advance(self):
        self.seen += 1


class ReversedCache(StoredCache):
    def __init__(self, model, capacity):
        self._adopt(ReversedStorage(model.config.num_hidden_layers, capacity))

    def get_query_offset(self, layer_idx=0):
        return self.storage.count(None)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("model_type", ["llama", "opt", "qwen2"])
def test_a_custom_cache_runs_under_patch_with_a_graph(model_type, padding, captured_steps):
    model, inputs = tiny(model_type), prompts(padding, "cpu")
    options = {"max_new_tokens": 8, "do_sample": False}
    model.set_attn_implementation("eager")
    expected = model.generate(**inputs, **options)
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            cache = ReversedCache(model, PROMPT + 20)
            found = model.generate(**inputs, past_key_values=cache, **options)
            assert torch.equal(found, expected) and cache.get_seq_length() == PROMPT + 7
        assert patch.captures == 2 and patch.replays == 2 * 6 and not patch.reasons


def test_the_loop_waits_for_a_cache_that_cannot_be_cropped(captured_steps, monkeypatch):
    """The caller would find a token too many in it."""
    monkeypatch.setattr(calls, "records_events", lambda device: True)
    monkeypatch.setattr(torch, "Event", fake_graph.Event)
    model, inputs = tiny("llama"), prompts("no_padding", "cpu", rows=1)
    new = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, PROMPT:].tolist()
    eos = new[5]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": eos}
    with hf_fastattn.patch(model):
        cache = ReversedCache(model, PROMPT + 20)
        found = model.generate(**inputs, past_key_values=cache, **options)
        assert found[0, PROMPT:].tolist() == new[: new.index(eos) + 1] and cache.get_seq_length() == found.shape[1] - 1


def test_a_cache_learns_of_the_end_of_a_forward_may_replace_the_output_and_is_refused_for_other_rows(captured_steps):
    failed = []

    class NegatedCache(ReversedCache):
        def end(self, step, output):
            failed.append(output is None)
            return None if output is None else type(output)(**{**output, "logits": -output.logits})

    model, inputs = tiny("llama"), prompts("no_padding", "cpu")
    options = {"max_new_tokens": 8, "do_sample": False}
    model.lm_head.weight.data.neg_()
    expected = model.generate(**inputs, **options)
    model.lm_head.weight.data.neg_()
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(model.generate(**inputs, past_key_values=NegatedCache(model, PROMPT + 20), **options), expected)
        assert patch.replays == 6 and not any(failed)
        fails = model.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
        with fails, pytest.raises(ZeroDivisionError), torch.no_grad():
            model(**inputs, past_key_values=NegatedCache(model, PROMPT))
        assert failed[-1]
        cache = ReversedCache(model, PROMPT + 20)
        model.generate(**prompts("no_padding", "cpu", rows=2), past_key_values=cache, max_new_tokens=2, do_sample=False)
        with pytest.raises(ValueError, match="holds 2 rows, and the call has 3"):
            model.generate(**prompts("no_padding", "cpu", length=PROMPT + 4), past_key_values=cache, max_new_tokens=2)
