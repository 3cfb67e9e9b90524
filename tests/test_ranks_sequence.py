"""patch(kv_sharding="sequence"): K and V shared out by sequence. Processes on the CPU, with a substitute for CUDA graphs."""

from __future__ import annotations

import copy
import functools
import re
import warnings

import processes
import pytest
import torch
from models import prompts, tiny
from test_ranks import NEW, generate, graphs_of, of_family, outcome, results, shared
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.caches import shared as shared_cache
from hf_fastattn.patches.calls import unpadded

pytestmark = [processes.HIDDEN, pytest.mark.xdist_group("ranks")]
# llama has 2 KV heads, fewer than 4 ranks; the plan of gpt_oss divides no heads; one layer of qwen2 and gpt_oss has a window.
NAMES = {2: ("llama", "qwen2", "gpt_oss"), 4: ("llama",)}
PADDINGS = ("no_padding", "holes")


def decode(one, model, padding: str) -> dict:
    inputs = prompts(padding, "cpu")
    forwards = {path: vars(module).get("forward") for path, module in model.named_modules()}
    want = generate(one, inputs)
    with hf_fastattn.patch(model, "lean", kv_sharding="sequence") as patch:
        first = generate(model, inputs, return_dict_in_generate=True, output_logits=True)
        again = generate(model, inputs)
        slots = [layer.slots for layer in first.past_key_values.layers]
        heads = {layer.keys.shape[1] for layer in first.past_key_values.layers if layer.track.kind.window is None}
        collectives = graphs_of(patch)[0].collectives
        for layer in first.past_key_values.layers:
            if layer.track.kind.window is None:
                assert layer.keys.shape[2] == layer.slots < layer.get_seq_length()
                with pytest.raises(ValueError, match="share by sequence cannot be replaced"):
                    layer.keys = layer.keys[:, :, :0]
    return {
        "tokens": torch.equal(first.sequences, want) and torch.equal(again, want),
        "logits": [bytes(x.numpy().tobytes()) for x in first.logits],
        "steps": (patch.captures, patch.uncaptured, patch.reasons),
        "slots": slots,
        "heads": heads,
        "gathers": sum("allgather" in each or "all_gather" in each for each in collectives),
        "undone": forwards == {path: vars(module).get("forward") for path, module in model.named_modules()},
    }


def decode_all(rank: int, count: int) -> dict:
    unpadded.TILE = 1  # ranks that share K and V by sequence read the padding of prompts
    models = {name: (of_family(name), shared(of_family(name), count)) for name in NAMES[count]}
    return {(name, padding): decode(*both, padding) for name, both in models.items() for padding in PADDINGS}


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    for name in NAMES[2]:
        of_family(name)  # before the fork
    return {
        count: results(processes.run(tmp_path_factory.mktemp("sequence"), count, decode_all, count, limit=240)) for count in NAMES
    }


@pytest.mark.slow
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("count", "name"), [(count, name) for count, names in NAMES.items() for name in names])
def test_tokens_are_those_of_one_process_and_logits_the_same_bits_on_all_ranks(decoded, count, name, padding):
    found = [each[name, padding] for each in decoded[count]]
    for each in found:
        assert each["tokens"] and each["undone"]
        assert each["steps"] == (2, 0, [])
        assert each["logits"] == found[0]["logits"]


@pytest.mark.slow
def test_each_rank_has_a_share_of_the_tokens_with_all_kv_heads(decoded):
    for count, slots in ((2, [64, 39]), (4, [64, 39, 0, 0])):  # 96 of the prompt and 7 new ones, in blocks of 64
        found = [each["llama", "no_padding"] for each in decoded[count]]
        assert [each["slots"] for each in found] == [2 * [mine] for mine in slots]
        assert all(each["heads"] == {2} for each in found)
    both = decoded[2][0]["qwen2", "no_padding"]["slots"]
    assert both[0] == 64 and both[1] != 64  # the layer with a window is not shared out


@pytest.mark.slow
def test_collectives_of_a_step(decoded):
    """For each layer: K and V of the new token, queries, results; with half a head on each rank K and V twice more."""
    assert decoded[2][0]["llama", "no_padding"]["gathers"] == 2 * 3 + 1
    assert decoded[4][0]["llama", "no_padding"]["gathers"] == 2 * 5 + 1
    assert decoded[2][0]["gpt_oss", "no_padding"]["gathers"] == 1 + 1  # its plan divides no heads, and one layer has a window


# ---- calls of other kinds ----


class Scene:
    """One model on several ranks, patched again for each scene."""

    def __init__(self, rank: int, count: int):
        self.rank = rank
        self.one, self.inputs = of_family("llama"), prompts("left_padding", "cpu")
        self.model = shared(self.one, count)

    def same(self, **options) -> bool:
        inputs = {name: value[1:2] for name, value in self.inputs.items()}
        want = generate(self.one, inputs, **{**options, "prefill_chunk_size": None})
        return torch.equal(generate(self.model, inputs, **options), want)


def other_modes(scene: Scene) -> list:
    found = [scene.same(**o) for o in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 40})]
    return [*found, scene.patch.captures > 0, scene.patch.uncaptured]


def a_copied_cache(scene: Scene) -> list[bool]:
    """The text of a cache continued twice, once under inference_mode."""
    cache = generate(scene.model, scene.inputs, return_dict_in_generate=True).past_key_values
    copied = copy.deepcopy(cache)
    inputs = {
        "input_ids": torch.cat([generate(scene.one, scene.inputs), torch.full((3, 5), 9)], 1),
        "attention_mask": torch.nn.functional.pad(scene.inputs["attention_mask"], (0, NEW + 5), value=1),
    }
    want = generate(scene.one, inputs)
    with torch.inference_mode():
        found = [torch.equal(generate(scene.model, inputs, past_key_values=copied), want)]
    return [*found, torch.equal(generate(scene.model, inputs, past_key_values=cache), want)]


MESSAGES = (3, 60, 70, 20, 20)


def a_chat(scene: Scene) -> list:
    """Messages of a few and of many tokens after a cached text, which grows beyond the shares. The last runs as a graph."""

    def talk(model) -> tuple:
        ids, cache = scene.inputs["input_ids"][2:, 48:], None
        for message in MESSAGES:
            ids = torch.cat([ids, torch.arange(message)[None] % 90 + 7], 1)
            out = generate(model, {"input_ids": ids}, past_key_values=cache, return_dict_in_generate=True)
            ids, cache = out.sequences, out.past_key_values
        return ids, cache

    ids, cache = talk(scene.model)
    slots = sum(layer.slots for layer in cache.layers) // 2
    return [torch.equal(ids, talk(scene.one)[0]), type(cache).__name__, slots, cache.storage.capacity]


def other_caches(scene: Scene) -> list:
    """Caches with the heads of the rank, and no cache."""
    found = []
    for make in (DynamicCache, lambda: PreallocatedCache(scene.one)):
        outputs = [generate(model, scene.inputs, past_key_values=make()) for model in (scene.model, scene.one)]
        found.append(torch.equal(*outputs))
    with torch.no_grad():
        ids = scene.inputs["input_ids"]
        found.append(torch.allclose(scene.model(ids).logits, scene.one(ids).logits, atol=1e-4))
    return [*found, scene.patch.reasons]


def gradients(scene: Scene) -> list[float]:
    """The largest difference of the gradient of each projection from that on one process."""
    ids = scene.inputs["input_ids"]
    for model in (scene.model, scene.one):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
    pairs = zip(scene.model.model.layers, scene.one.model.layers, strict=True)
    pairs = [(mine.self_attn, other.self_attn) for mine, other in pairs]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    grads = [[getattr(each, name).weight.grad for each in pair] for pair in pairs for name in names]
    found = [(mine.full_tensor() - other).abs().max().item() for mine, other in grads]
    for model in (scene.model, scene.one):
        model.zero_grad()
    return found


def a_wrapped_forward(scene: Scene) -> list[bool]:
    """The user's own forward() of a projection, with the attributes of ours, stays and does not stop another patch()."""
    layer = scene.model.model.layers[0].self_attn.k_proj
    inner = layer.forward
    layer.forward = wrapped = functools.wraps(inner)(lambda x: inner(x))
    scene.patch.undo()
    found = [layer.forward is wrapped]
    scene.patch = hf_fastattn.patch(scene.model, "lean", kv_sharding="sequence")
    assert hf_fastattn.patch(scene.model, "lean", kv_sharding="sequence") is scene.patch  # without an exchange of the ranks
    found.append(scene.same())
    scene.patch.undo()
    found.append(layer.forward is wrapped)
    layer.forward = inner
    return found


def a_dense_mask(scene: Scene) -> str:
    with torch.no_grad():
        cache = generate(scene.model, scene.inputs, return_dict_in_generate=True).past_key_values
        mask = torch.ones(3, 1, 1, cache.get_seq_length() + 1, dtype=torch.bool)
        return outcome(lambda: scene.model(torch.full((3, 1), 5), attention_mask=mask, past_key_values=cache))


def an_unpatched_model(scene: Scene) -> str:
    cache = generate(scene.model, scene.inputs, return_dict_in_generate=True).past_key_values
    scene.patch.undo()
    ids = torch.cat([scene.inputs["input_ids"], torch.full((3, 9), 5)], 1)
    return outcome(lambda: generate(scene.model, {"input_ids": ids}, past_key_values=cache))


def other_heads(scene: Scene) -> list[str]:
    """Layers whose heads are not those of the plan, as if the plan named the projections otherwise."""
    shares, found = scene.patch._generation.caches.shares, []
    for heads in ([(4, 1)] * 2, [(8, 2)] * 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shares, "heads", heads)
            found.append(outcome(lambda: generate(scene.model, scene.inputs)))
    return found


def too_little_memory(scene: Scene) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_fastattn.patches.ranks.ranks.free_bytes", lambda device: 1000 if scene.rank else 1 << 40)
        return outcome(lambda: generate(scene.model, scene.inputs))


def other_settings(scene: Scene) -> list[str]:
    scene.patch.undo()
    model = scene.model
    windows = shared(of_family("mistral_window_below_prompt"))
    return [
        outcome(lambda: hf_fastattn.patch(model, "lean", kv_sharding="heads" if scene.rank else "sequence")),
        outcome(lambda: hf_fastattn.patch(model, "streaming", window=8, kv_sharding="sequence")),
        outcome(lambda: hf_fastattn.patch(model, "lean", cache=None, graph=False, kv_sharding="sequence")),
        outcome(lambda: hf_fastattn.patch(windows, kv_sharding="sequence")),
    ]


SCENES = {
    2: [other_modes, a_dense_mask, an_unpatched_model, other_heads, too_little_memory, other_settings],
    4: [a_chat, a_copied_cache, other_caches, gradients, a_wrapped_forward],
}


def play(rank: int, count: int) -> dict:
    scene, found = Scene(rank, count), {}
    for each in SCENES[count]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scene.patch = hf_fastattn.patch(scene.model, "lean", kv_sharding="sequence")
            found[each.__name__] = each(scene)
            if not scene.patch.undone:
                scene.patch.undo()
    found["left"] = sorted(name for name in vars(scene.model) if "patch" in name or name == "generate")
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    of_family("llama")
    return {count: results(processes.run(tmp_path_factory.mktemp("scenes"), count, play, count, limit=240)) for count in SCENES}


@pytest.mark.slow
def test_beams_speculation_and_chunks_of_a_prompt(played):
    assert [found["other_modes"] for found in played[2]] == 2 * [[True, True, True, True, 0]]


@pytest.mark.slow
def test_a_chat_grows_the_shares(played):
    assert all(found["a_chat"][:2] == [True, "SharedCache"] for found in played[4])
    text = 48 + sum(MESSAGES) + len(MESSAGES) * NEW
    assert sum(found["a_chat"][2] for found in played[4]) == text - 1
    assert text - MESSAGES[-1] - NEW < 256 < text and played[4][0]["a_chat"][3] == 512  # it grows before the last message


@pytest.mark.slow
def test_a_copied_cache_has_shares_of_its_own(played):
    assert [found["a_copied_cache"] for found in played[4]] == 4 * [[True, True]]


@pytest.mark.slow
def test_other_caches_have_the_heads_of_the_rank(played):
    for found in played[4]:
        *same, reasons = found["other_caches"]
        assert same == [True, True, True]
        for name, reason in zip(("DynamicCache", "PreallocatedCache"), reasons, strict=True):
            assert reason == f"{hf.CACHE} is a {name}, not a SharedCache"


@pytest.mark.slow
def test_gradients_with_fewer_kv_heads_than_ranks(played):
    for found in played[4]:
        assert max(found["gradients"]) < 1e-5, found["gradients"]


@pytest.mark.slow
def test_a_forward_of_the_user_stays(played):
    assert [found["a_wrapped_forward"] for found in played[4]] == 4 * [[True] * 3]


@pytest.mark.slow
def test_refusals(played):
    shares = 'ValueError: K and V are shared out over ranks .kv_sharding="sequence"., and .* would need all of them'
    for found in played[2]:
        assert re.match(shares, found["a_dense_mask"]) and re.match(shares, found["an_unpatched_model"])
        kv_heads, heads = found["other_heads"]
        assert re.match("ValueError: Layer 0 has 1 of 1 KV heads on each rank, which its plan does not say", kv_heads)
        assert re.match("ValueError: Layer 0 has 2 of 8 query heads on each rank, which its plan does not say", heads)
        assert re.match("MemoryError: .*on rank 1", found["too_little_memory"])
        ranks, streaming, without, windows = found["other_settings"]
        assert re.match("ValueError: The ranks .*kv_sharding is 'sequence' on rank 0 and 'heads' on rank 1", ranks)
        assert re.match("ValueError: kv_sharding=.sequence. needs cache=.preallocated.; got a cache of 'rolling'", streaming)
        assert re.match("ValueError: kv_sharding=.sequence. needs cache=.preallocated.; got a cache of None", without)
        assert re.match("ValueError: Every layer of MistralForCausalLM has a sliding window", windows)
        assert found["left"] == []


def test_models_that_cannot_be_shared_out_are_refused(monkeypatch):
    model = tiny("llama")
    with pytest.raises(ValueError, match="over the ranks of tensor parallelism, and this LlamaForCausalLM is on one"):
        hf_fastattn.patch(model, kv_sharding="sequence")
    with pytest.raises(ValueError, match='kv_sharding must be "heads" or "sequence"; got \'tokens\''):
        hf_fastattn.patch(model, kv_sharding="tokens")
    with pytest.raises(TypeError, match="belongs to a process group"):
        shared_cache.SharedCache(model)
    latent = tiny(
        "deepseek_v3", kv_lora_rank=16, q_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1
    )
    with pytest.raises(ValueError, match="latent attention"):
        hf_fastattn.hf.heads_of_ranks(latent)
    fused = tiny("llama")
    fused._tp_size, fused._tp_plan = 4, {"layers.*.self_attn.query_key_value": "colwise"}
    with pytest.raises(ValueError, match="are computed together with its queries, and 4 ranks are more than KV heads"):
        hf_fastattn.hf.heads_of_ranks(fused)
    uneven = tiny("llama")  # a layer with more KV heads than its configuration says, as of MiMo-V2
    uneven._tp_size, uneven.model.layers[1].self_attn.k_proj = 4, torch.nn.Linear(64, 64)
    monkeypatch.setattr(hf_fastattn.hf.parallel, "computes_part", lambda module: True)
    with pytest.raises(ValueError, match="differ from layer to layer, and 4 ranks are more than KV heads"):
        hf_fastattn.hf.heads_of_ranks(uneven)
    adapted = tiny("llama")
    adapted._tp_size, adapted.model.layers[1].self_attn.v_proj.base_layer = 4, torch.nn.Linear(64, 32)
    with pytest.raises(ValueError, match="are computed with adapters"):
        hf_fastattn.hf.heads_of_ranks(adapted)
    odd = tiny("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    odd._tp_size = 2
    with pytest.raises(ValueError, match="6 query heads and 3 KV heads, which cannot be divided among 2 ranks"):
        hf_fastattn.hf.heads_of_ranks(odd)


# ---- eight ranks ----


def of_eight(rank: int) -> list:
    """A model with a KV head for each of eight ranks, by heads, and one with two KV heads, by sequence."""
    found = []
    for kv_heads, options in ((8, {}), (2, {"kv_sharding": "sequence"})):
        one = tiny("llama", num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=16)
        model, inputs = shared(one, 8), prompts("left_padding", "cpu")
        want = generate(one, inputs)
        with hf_fastattn.patch(model, "lean", **options) as patch:
            first = generate(model, inputs, return_dict_in_generate=True, output_logits=True)
            same = torch.equal(first.sequences, want) and torch.equal(generate(model, inputs), want)
        logits = [bytes(x.numpy().tobytes()) for x in first.logits]
        found.append((logits, same, patch.captures > 0, patch.uncaptured, patch.reasons))
    return found


@pytest.mark.slow
def test_eight_ranks_have_the_tokens_of_one_process_and_the_same_bits(tmp_path):
    for found in zip(*results(processes.run(tmp_path, 8, of_eight, limit=240)), strict=True):
        assert all(each == found[0] for each in found)
        assert found[0][1:] == (True, True, 0, [])
