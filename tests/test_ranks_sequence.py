"""patch(kv_sharding="sequence"): K and V shared out by sequence. Processes on the CPU, with a substitute for CUDA graphs."""

import copy
import functools
import warnings

import processes
import pytest
import torch
from models import prompts, tiny
from test_ranks import NEW, Scene, generate, graphs_of, is_like, of_family, other_modes, outcome, results, shared
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.caches import shared as shared_cache
from hf_fastattn.patches.calls import unpadded
from hf_fastattn.patches.ranks import ranks

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
    run = lambda count: processes.run(tmp_path_factory.mktemp("sequence"), count, decode_all, count, limit=240)  # noqa: E731
    return {count: results(run(count)) for count in NAMES}


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


def a_copied_cache(scene: Scene) -> list[bool]:
    """The text of a cache continued twice, once under inference_mode."""
    cache = scene.cache()
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
    messages = [torch.arange(tokens)[None] % 90 + 7 for tokens in MESSAGES]
    ids, cache = scene.talk(scene.model, messages)
    slots = sum(layer.slots for layer in cache.layers) // 2
    return [torch.equal(ids, scene.talk(scene.one, messages)[0]), type(cache).__name__, slots, cache.storage.capacity]


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


def gradients(scene: Scene) -> bool:
    """Whether the gradient of each projection is that on one process."""
    ids, parameters = scene.inputs["input_ids"], dict(scene.one.named_parameters())
    for model in (scene.model, scene.one):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
    mine = {name: p for name, p in scene.model.named_parameters() if "self_attn" in name}
    found = all((p.grad.full_tensor() - parameters[name].grad).abs().max() < 1e-5 for name, p in mine.items())
    for model in (scene.model, scene.one):
        model.zero_grad()
    return found and len(mine) == 8


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
        cache = scene.cache()
        mask = torch.ones(3, 1, 1, cache.get_seq_length() + 1, dtype=torch.bool)
        return outcome(lambda: scene.model(torch.full((3, 1), 5), attention_mask=mask, past_key_values=cache))


def an_unpatched_model(scene: Scene) -> str:
    cache = scene.cache()
    scene.patch.undo()
    ids = torch.cat([scene.inputs["input_ids"], torch.full((3, 9), 5)], 1)
    return outcome(lambda: generate(scene.model, {"input_ids": ids}, past_key_values=cache))


def other_heads(scene: Scene) -> list[str]:
    """Layers whose heads are not those of the plan, as if the plan named the projections otherwise."""
    shares = scene.patch._generation.caches.shares
    return [scene.replacing(shares, "heads", heads) for heads in ([(4, 1)] * 2, [(8, 2)] * 2)]


def too_little_memory(scene: Scene) -> str:
    return scene.replacing(ranks, "free_bytes", lambda device: 1000 if scene.rank else 1 << 40)


def other_settings(scene: Scene) -> list[str]:
    scene.patch.undo()
    patch = lambda model, *args, **options: outcome(lambda: hf_fastattn.patch(model, *args, **options))  # noqa: E731
    return [
        patch(scene.model, "lean", kv_sharding="heads" if scene.rank else "sequence"),
        patch(scene.model, "streaming", window=8, kv_sharding="sequence"),
        patch(scene.model, "lean", cache=None, graph=False, kv_sharding="sequence"),
        patch(shared(of_family("mistral_window_below_prompt")), kv_sharding="sequence"),
    ]


SCENES = {
    2: [other_modes, a_dense_mask, an_unpatched_model, other_heads, too_little_memory, other_settings],
    4: [a_chat, a_copied_cache, other_caches, gradients, a_wrapped_forward],
}


def play(rank: int, count: int) -> dict:
    scene, found = Scene(rank, count), {}
    for each in SCENES[count]:
        with warnings.catch_warnings(action="ignore"):
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


NO_SHARES = 'ValueError: K and V are shared out over ranks .kv_sharding="sequence"., and .* would need all of them'
NEEDS = "ValueError: kv_sharding=.sequence. needs cache=.preallocated.; got a cache of "
EXPECTED = {  # by name of the scene: its result on every rank
    "other_modes": [True, True, True, True, 0],
    "a_copied_cache": [True, True],
    "other_caches": [
        True,
        True,
        True,
        [f"{hf.CACHE} is a {name}, not a SharedCache" for name in ("DynamicCache", "PreallocatedCache")],
    ],
    "gradients": True,  # with fewer KV heads than ranks
    "a_wrapped_forward": [True] * 3,
    "a_dense_mask": NO_SHARES,
    "an_unpatched_model": NO_SHARES,
    "other_heads": [
        "ValueError: Layer 0 has 1 of 1 KV heads on each rank, which its plan does not say",
        "ValueError: Layer 0 has 2 of 8 query heads on each rank, which its plan does not say",
    ],
    "too_little_memory": "MemoryError: .*on rank 1",
    "other_settings": [
        "ValueError: The ranks .*kv_sharding is 'sequence' on rank 0 and 'heads' on rank 1",
        NEEDS + "'rolling'",
        NEEDS + "None",
        "ValueError: Every layer of MistralForCausalLM has a sliding window",
    ],
    "left": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_results_of_all_ranks(played, name):
    for found in (each for ended in played.values() for each in ended if name in each):
        assert is_like(found[name], EXPECTED[name]), found[name]


@pytest.mark.slow
def test_a_chat_grows_the_shares(played):
    assert all(found["a_chat"][:2] == [True, "SharedCache"] for found in played[4])
    text = 48 + sum(MESSAGES) + len(MESSAGES) * NEW
    assert sum(found["a_chat"][2] for found in played[4]) == text - 1
    assert text - MESSAGES[-1] - NEW < 256 < text and played[4][0]["a_chat"][3] == 512  # it grows before the last message


def with_ranks(count: int, change=lambda model: None, **own):
    """A model that is divided among ranks, or would be."""
    model = tiny("llama", **own)
    model._tp_size = count
    change(model)
    return model


def uneven(model):
    """A layer with more KV heads than its configuration says, as of MiMo-V2."""
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(64, 64)


REFUSED = {
    "are computed together with its queries, and 4 ranks are more than KV heads": lambda: with_ranks(
        4, lambda model: setattr(model, "_tp_plan", {"layers.*.self_attn.query_key_value": "colwise"})
    ),
    "differ from layer to layer, and 4 ranks are more than KV heads": lambda: with_ranks(4, uneven),
    "are computed with adapters": lambda: with_ranks(
        4, lambda model: setattr(model.model.layers[1].self_attn.v_proj, "base_layer", torch.nn.Linear(64, 32))
    ),
    "6 query heads and 3 KV heads, which cannot be divided among 2 ranks": lambda: with_ranks(
        2, hidden_size=96, num_attention_heads=6, num_key_value_heads=3
    ),
    "latent attention": lambda: tiny("deepseek_v3", **LATENT),
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("said", REFUSED)
def test_models_that_cannot_be_shared_out_are_refused(said, monkeypatch):
    if said.startswith(("differ", "are computed with adapters")):
        monkeypatch.setattr(hf_fastattn.hf.parallel, "computes_part", lambda module: True)
    with pytest.raises(ValueError, match=said):
        hf_fastattn.hf.heads_of_ranks(REFUSED[said]())


def test_what_is_no_shared_model_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match="over the ranks of tensor parallelism, and this LlamaForCausalLM is on one"):
        hf_fastattn.patch(model, kv_sharding="sequence")
    with pytest.raises(ValueError, match='kv_sharding must be "heads" or "sequence"; got \'tokens\''):
        hf_fastattn.patch(model, kv_sharding="tokens")
    with pytest.raises(TypeError, match="belongs to a process group"):
        shared_cache.SharedCache(model)


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
