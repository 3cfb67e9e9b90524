"""Memory of K and V is freed with the last reference, by reference counts alone: Python's cycle collection is off."""

import copy
from functools import partial

import fake_graph
import models
import pytest
import torch
from cases import pairs, slow_unless
from models import family, prompts, tiny
from torch.multiprocessing.reductions import StorageWeakRef

import hf_fastattn
from hf_fastattn import PreallocatedCache, RollingCache
from hf_fastattn.caches import buffers as buffers_of_layers
from hf_fastattn.caches import layers, memory, pool, ring

pytestmark = pytest.mark.usefixtures("without_collector")
generate = partial(models.generate, max_new_tokens=6)
WINDOWED = "mistral_window_below_prompt"


class Buffers:
    """Weak references to all allocations of layers."""

    def __init__(self, monkeypatch):
        self.made = []
        own = buffers_of_layers.reallocated

        def reallocated(*args):
            new = own(*args)
            self.made.append((StorageWeakRef(new.untyped_storage()), new.nbytes))
            return new

        for module in (buffers_of_layers, layers, ring):
            monkeypatch.setattr(module, "reallocated", reallocated)

    def bytes(self) -> int:
        return sum(size for memory, size in self.made if not memory.expired())

    def count(self) -> int:
        return sum(not memory.expired() for memory, _ in self.made)


@pytest.fixture
def buffers(monkeypatch):
    return Buffers(monkeypatch)


def patched(model, kind: str, graph: bool = True):
    if kind == "rolling":
        return hf_fastattn.patch(model, "streaming", window=24, sinks=2, graph=graph)
    return hf_fastattn.patch(model, graph=graph)


def drop(cache, model, tmp_path):
    del cache


def grow(cache, model, tmp_path):
    cache.reserve(2000)


def change_rows(cache, model, tmp_path):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))


def start_again(cache, model, tmp_path):
    cache.reset()
    generate(model, prompts("left_padding", "cpu", rows=2), past_key_values=cache)


def copies(cache, model, tmp_path):
    twins = copy.deepcopy(cache), copy.copy(cache), copy.deepcopy(cache.layers), copy.deepcopy(copy.copy(cache))
    assert twins[0].layers[0] is not cache.layers[0] and twins[0].layers[0] is twins[0].storage.layers[0]
    generate(model, prompts("left_padding", "cpu", length=110), past_key_values=twins[0])


def save_and_load(cache, model, tmp_path):
    cache.save(tmp_path / "tokens", model)
    loaded = PreallocatedCache.load(tmp_path / "tokens", model)
    copy.deepcopy(loaded)
    ids = torch.cat([prompts("no_padding", "cpu")["input_ids"]] * 2, 1)
    generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, past_key_values=loaded)


def fail(cache, model, tmp_path, error=RuntimeError):
    layer, calls = model.model.layers[-1], []

    def raises(module, *args):
        calls.append(1)
        if len(calls) == 3:
            raise error("in the middle")

    inputs = prompts("no_padding", "cpu")
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 2)
    with layer.register_forward_hook(raises), pytest.raises(error):
        generate(model, inputs, past_key_values=cache)
    assert len(calls) == 3


def misuse(cache, model, tmp_path):
    with pytest.raises(ValueError, match="rows"):
        model(prompts("no_padding", "cpu", rows=2)["input_ids"], past_key_values=cache)
    with pytest.raises(RuntimeError, match="gradient"), torch.enable_grad():
        model(prompts("no_padding", "cpu")["input_ids"], past_key_values=cache)


USES = {each.__name__: each for each in (drop, grow, change_rows, start_again, copies, save_and_load, fail, misuse)}
USES["interrupt"] = lambda *args: fail(*args, KeyboardInterrupt)
ROLLING = ("drop", "copies", "start_again", "fail", "interrupt")
DROPPED = [(name, use) for name in ("llama", WINDOWED) for use in USES] + [("rolling", use) for use in ROLLING]


@pytest.mark.parametrize("name, use", slow_unless(lambda case: case[0] != WINDOWED, DROPPED))
def test_a_dropped_cache_frees_its_memory(buffers, name, use, tmp_path):
    model = tiny("llama") if name == "rolling" else family(name, "cpu")
    if name == "rolling":
        patched(model, "rolling", graph=False)
    else:
        model.set_attn_implementation("sdpa")
    cache = RollingCache(model) if name == "rolling" else PreallocatedCache(model)
    generate(model, prompts("left_padding", "cpu"), past_key_values=cache)
    with torch.no_grad():
        USES[use](cache, model, tmp_path)
    assert buffers.count() >= 4
    del cache
    assert buffers.count() == 0


@pytest.mark.parametrize("end", ["undo", "del", "del the model first", "deepcopy", "exception"])
@pytest.mark.parametrize("kind", ["preallocated", "rolling"])
def test_a_patched_model_frees_its_memory(buffers, captured_steps, kind, end):
    model = tiny("llama")
    patch = patched(model, kind)
    for rows in (1, 2, 3, 2):
        generate(model, prompts("left_padding", "cpu", rows=rows))
    assert patch.captures >= 3 and buffers.count() == 3 * 4
    where = StorageWeakRef(model.lm_head.weight.untyped_storage())
    if end == "undo":
        patch.undo()
        assert buffers.count() == 0
        return
    if end == "deepcopy":
        twin = copy.deepcopy(model)
        generate(twin, prompts("left_padding", "cpu"))
        assert buffers.count() == 4 * 4
        del twin
        assert buffers.count() == 3 * 4
    if end == "exception":
        fail(None, model, None)
        fail(None, model, None, KeyboardInterrupt)
        assert buffers.count() <= 3 * 4
    if end == "del the model first":
        del model
        assert buffers.count() == 0 and where.expired()
        return
    del patch
    assert buffers.count() == 3 * 4
    del model
    assert buffers.count() == 0 and where.expired()


@pytest.mark.parametrize("kind", ["preallocated", "rolling"])
def test_a_cache_that_outlives_its_model_keeps_only_its_own_memory(buffers, captured_steps, kind):
    model = tiny("llama")
    patch = patched(model, kind)
    generate(model, prompts("no_padding", "cpu", rows=1))
    cache = generate(model, prompts("no_padding", "cpu", rows=2), return_dict_in_generate=True).past_key_values
    assert buffers.count() == 2 * 4
    del model, patch
    assert buffers.count() == 4
    del cache
    assert buffers.count() == 0


def _lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


TRAINED = {  # what a training step calls
    "model": lambda model: model,
    "part without the head": lambda model: model.base_model,
    "with checkpoints": lambda model: model.gradient_checkpointing_enable() or model,
    "LoRA on top": _lora,
    "replica": lambda model: torch.nn.Module._replicate_for_data_parallel(model),
}


@pytest.mark.parametrize("what", TRAINED)
def test_a_training_step_frees_large_idle_buffers_and_their_graphs(buffers, captured_steps, monkeypatch, what):
    model, inputs = tiny("llama").train(), prompts("left_padding", "cpu")
    with patched(model, "preallocated") as patch:
        cache = generate(model, prompts("left_padding", "cpu", rows=2), return_dict_in_generate=True).past_key_values
        generate(model, inputs)
        whole, idle = TRAINED[what](model), patch._generation.caches.pool
        whole(**inputs)  # the buffers are below the limit
        monkeypatch.setattr(pool, "KEPT", idle.idle_bytes - 1)
        with torch.no_grad():
            whole(**inputs)
        whole.eval()(**inputs)
        assert buffers.count() == 2 * 4 and len(patch._graphs.entries) == 2 and "training" not in str(patch)
        out = whole.train()(**inputs)[0]
        assert buffers.count() == 4 and [*patch._graphs.entries] == [cache.storage]
        out.sum().backward()
        model.gradient_checkpointing_disable()
        generate(model, inputs)
        assert buffers.count() == 2 * 4 and "captured again, as 1 training steps have freed K and V" in str(patch)
        del cache


def test_a_training_step_of_a_copy_frees_the_buffers_of_the_copy(buffers, monkeypatch):
    monkeypatch.setattr(pool, "KEPT", 0)
    model, inputs = tiny("llama").train(), prompts("left_padding", "cpu")
    with patched(model, "preallocated", graph=False):
        generate(model, inputs)
        twin = copy.deepcopy(model)
        twin(**inputs)
        generate(twin, inputs)
        assert buffers.count() == 2 * 4
        twin.model(**inputs)
        assert buffers.count() == 4
        model(**inputs)
        assert buffers.count() == 0


def test_storages_beyond_the_pools_limit_are_freed(buffers):
    model = tiny("llama")
    with patched(model, "preallocated", graph=False):
        for rows in range(1, pool.MAX_IDLE + 4):
            generate(model, {"input_ids": prompts("no_padding", "cpu", rows=1)["input_ids"].repeat(rows, 1)})
            assert buffers.count() == 4 * min(rows, pool.MAX_IDLE)
        long = {"input_ids": prompts("no_padding", "cpu", rows=1)["input_ids"].repeat(rows, 4)}
        generate(model, long)  # a larger storage replaces one for the same batch size
        assert buffers.count() == 4 * pool.MAX_IDLE


def test_idle_storages_of_a_pool_never_make_a_cache_refuse(buffers, monkeypatch):
    """A device with limited memory: idle storages are freed, and then the cache fits."""
    model = tiny("llama")
    row = 2 * 2 * 2 * 256 * 16 * 4  # 2 layers, K and V, 2 heads
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * row - buffers.bytes())
    with patched(model, "preallocated", graph=False):
        for rows in (1, 2, 3, 2, 3, 1, 3):
            generate(model, prompts("no_padding", "cpu", rows=rows))
        assert buffers.bytes() <= 3 * row
        with pytest.raises(MemoryError, match=f"needs {4 * row} bytes"):
            generate(model, {"input_ids": prompts("no_padding", "cpu", rows=1)["input_ids"].repeat(4, 1)})
        assert buffers.bytes() == 0
        cache = PreallocatedCache(model)
        generate(model, prompts("no_padding", "cpu", rows=3), past_key_values=cache)
        cache.reset()  # without tokens, buffers for another batch size replace the old ones
        generate(model, prompts("no_padding", "cpu", rows=2), past_key_values=cache)
        assert buffers.bytes() == 2 * row


def test_a_loaded_cache_that_does_not_fit_keeps_its_tokens(monkeypatch, tmp_path):
    model = tiny("llama")
    inputs = prompts("no_padding", "cpu")
    cache = PreallocatedCache(model)
    generate(model, inputs, past_key_values=cache)
    cache.save(tmp_path / "tokens", model)
    loaded = PreallocatedCache.load(tmp_path / "tokens", model)
    ids = {"input_ids": inputs["input_ids"].repeat(1, 2)}
    expected = generate(model, ids, past_key_values=cache)
    with monkeypatch.context() as inner:
        inner.setattr(memory, "free_bytes", lambda device: 1000)
        with pytest.raises(MemoryError, match="are free"):
            generate(model, ids, past_key_values=loaded)
    assert torch.equal(generate(model, ids, past_key_values=loaded), expected)


# K and V that are still referenced are not reused.

KEPT = {
    "keys": lambda cache: cache.layers[0].keys,
    "values": lambda cache: cache.layers[-1].values,
    "a slice": lambda cache: cache.layers[1].keys[:, :, :5],
    "detached": lambda cache: cache.layers[1].values.detach(),
    "an array": lambda cache: cache.layers[0].keys.numpy(),
    "the memory": lambda cache: cache.layers[0].keys.untyped_storage(),
    "a layer": lambda cache: cache.layers[1],
    "the list of layers": lambda cache: cache.layers,
    "the storage": lambda cache: cache.storage,
    "all pairs": lambda cache: [(layer.keys, layer.values) for layer in cache.layers],
    "a shallow copy": copy.copy,
}


def _contents(kept) -> list:
    if isinstance(kept, torch.Tensor):
        return kept.tolist()
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept)
    if hasattr(kept, "layers"):
        kept = kept.layers
    if isinstance(kept, (list, tuple)):
        return [_contents(each) for each in kept]
    return [_contents(kept.keys), _contents(kept.values)] if hasattr(kept, "keys") else kept.tolist()


HELD = pairs(KEPT, ["preallocated", "rolling"], [False, True])


@pytest.mark.parametrize("what, kind, graph", slow_unless(HELD[::3].__contains__, HELD))
def test_k_and_v_that_are_referenced_are_not_overwritten(buffers, monkeypatch, kind, what, graph):
    if graph:
        fake_graph.use(monkeypatch, prompts=False)
    model = tiny("llama")
    inputs = prompts("no_padding", "cpu", rows=1)
    other = {"input_ids": inputs["input_ids"].flip(1)}
    with patched(model, kind, graph) as patch:
        expected = generate(model, other)
        generate(model, inputs)
        assert buffers.count() == 4 and patch.captures == graph
        kept = KEPT[what](generate(model, inputs, return_dict_in_generate=True).past_key_values)
        before = _contents(kept)
        assert torch.equal(generate(model, other), expected)
        assert torch.equal(generate(model, other), expected)
        assert _contents(kept) == before and buffers.count() == 2 * 4
        assert patch.captures == 2 * graph
        del kept, before
        generate(model, inputs)
        assert buffers.count() == 2 * 4 and patch.captures == 2 * graph  # both are free again


def test_results_of_update_are_not_overwritten(buffers):
    model = tiny("llama", "sdpa")
    inputs = prompts("no_padding", "cpu", rows=1)
    kept = []
    with patched(model, "preallocated", graph=False):
        update = PreallocatedCache.update

        def watched(self, keys, values, *args, **kwargs):
            out = update(self, keys, values, *args, **kwargs)
            kept.append(out[1])
            return out

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PreallocatedCache, "update", watched)
            generate(model, inputs)
        before = [tensor.clone() for tensor in kept]
        generate(model, {"input_ids": inputs["input_ids"].flip(1)})
    assert len(kept) == 12 and all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_keeping_k_and_v_of_every_call_costs_no_more_than_that(buffers):
    model = tiny("llama")
    with patched(model, "preallocated", graph=False):
        kept = [
            generate(model, prompts("no_padding", "cpu", rows=1), return_dict_in_generate=True).past_key_values.layers[0].keys
            for _ in range(6)
        ]
        assert len({tensor.data_ptr() for tensor in kept}) == 6
        assert buffers.count() == 6 + 2 * 3  # those, and the rest of the last two storages
