"""A recurrent layer in one file: its cache keeps a state, which a step replaces, beside the K and V of the other layers."""

import fake_graph
import pytest
import torch
from models import prompts, tiny

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.attention.step import EAGER
from hf_fastattn.caches.layers import Layer
from hf_fastattn.caches.storage import PreallocatedStorage

KINDS = hf.Kind("full"), hf.Kind("state")
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


class Recurrent(torch.nn.Module):
    """In place of attention: the sum of all tokens so far, earlier ones with smaller weights."""

    def __init__(self, attention):
        super().__init__()
        self.layer_idx, self.proj = attention.layer_idx, attention.o_proj

    def forward(self, hidden_states, **kwargs):
        new, cache = self.proj(hidden_states)[:, None], hf.cache_in(kwargs)
        if cache is None:
            return scan(torch.zeros_like(new[:, :, :1]), new)[:, 0], None
        return cache.layers[self.layer_idx].extend(new)[:, 0], None


def scan(state, new):
    found = [state.mul_(0.9).add_(token).clone() for token in new.split(1, 2)]
    return torch.cat(found, 2)


class StateLayer(Layer):
    """A state (rows, 1, 1, width), and the number of its tokens."""

    names = ("state",)
    keys = values = slots = None
    is_croppable = False

    def extend(self, new):
        step = self.track.step
        if step is not None and step.mode != EAGER:
            self.mark_written(step)
        else:
            if not self.is_initialized:
                self.buffers, self.is_initialized = [torch.zeros_like(new[:, :, :1])], True
            self.seen, self.track.stale = self.seen + new.shape[2], True
        return scan(self.buffers[0], new)

    def reallocate(self, capacity): ...

    def reset(self):
        super().reset()
        for state in self.buffers:
            state.zero_()


class HybridStorage(PreallocatedStorage):
    takes_many = takes_prompts = can_undo = False

    def make_layer(self, index, track):
        return (StateLayer if track.kind.name == "state" else Layer)(index, track)

    def states(self):
        return [part.tensor for part in self.memory() if part.slots is None]


class HybridCache(PreallocatedCache):
    def __init__(self):
        self._adopt(HybridStorage(KINDS, 256))


@pytest.fixture
def model(monkeypatch):
    fake_graph.use(monkeypatch, prompts=False)
    model = tiny("llama")
    model.model.layers[1].self_attn = Recurrent(model.model.layers[1].self_attn)
    return model


@pytest.mark.parametrize("beams", [1, 3])
def test_a_state_layer_runs_under_patch_with_a_graph(model, beams):
    inputs = prompts("no_padding", "cpu", length=24)
    expected = model.generate(**inputs, **OPTIONS, num_beams=beams, use_cache=False)
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            found = model.generate(**inputs, **OPTIONS, num_beams=beams, past_key_values=HybridCache())
            assert torch.equal(found, expected)
        assert patch.captures == 2 and patch.replays == 2 * 6 and not patch.reasons


def test_its_storage_lists_marks_and_restores_the_state(model):
    ids, cache = prompts("no_padding", "cpu", rows=2, length=24)["input_ids"], HybridCache()
    with hf_fastattn.patch(model), torch.no_grad():
        model(ids, past_key_values=cache)
        parts = [(part.layer, part.name, part.slots) for part in cache.storage.memory()]
        assert parts == [(0, "keys", 24), (0, "values", 24), (1, "state", None)]
        mark = cache.storage.mark()
        state = cache.storage.states()[0].clone()
        model(ids[:, :1], past_key_values=cache)
        assert len(mark) == 1 and not torch.equal(cache.storage.states()[0], state)
        cache.storage.rewind(mark)
        assert torch.equal(cache.storage.states()[0], state)


@pytest.mark.parametrize("error, replays", [(KeyboardInterrupt, True), (KeyboardInterrupt, False), (ZeroDivisionError, False)])
def test_it_is_refused_after_an_interrupted_step(model, monkeypatch, error, replays):
    inputs, cache = prompts("no_padding", "cpu", length=24), HybridCache()
    expected = model.generate(**inputs, **OPTIONS, use_cache=False)
    replay = fake_graph.RecordedGraph.replay

    def interrupted(part, *args):
        if not replays or not part.recorded_just_now:
            raise error
        replay(part)

    with hf_fastattn.patch(model), torch.no_grad():
        with monkeypatch.context() as patched, pytest.raises(error):
            if replays:
                patched.setattr(fake_graph.RecordedGraph, "replay", interrupted)
            else:
                patched.setattr(model.lm_head, "forward", interrupted)
            model.generate(**inputs, **OPTIONS, past_key_values=cache)
        with pytest.raises(ValueError, match="was interrupted"):
            model(inputs["input_ids"][:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(model.generate(**inputs, **OPTIONS, past_key_values=cache), expected)
