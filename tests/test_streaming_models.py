"""Streaming and model families: each is correct, or refused with a message that gives the reason."""

import copy

import every_model
import model_inputs
import models
import pytest
import torch
from conftest import INTERPRETED

import hf_fastattn
from hf_fastattn import RollingCache

pytestmark = pytest.mark.skipif(INTERPRETED, reason="what is looked at here happens before any kernel")

WINDOW, SINKS, LENGTH = 24, 4, 80
MOE = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **MOE,
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4},
}
FULL = {"layer_types": ["full_attention"], "sliding_window": 400}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 400}
WIDE = {"head_dim": 16}  # if the default is not hidden_size / num_attention_heads
# One layer each, so that logits depend only on the tokens in a rolling cache.
STREAM = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", WIDE),
    "phi3": ("phi3", {"sliding_window": 400}),
    "gemma2": ("gemma2", {**WIDE, **SLIDING, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 16}),
    "gemma3 sliding": ("gemma3_text", {**WIDE, **SLIDING}),  # the two have different frequencies
    "gemma3 full": ("gemma3_text", {**WIDE, **FULL}),
    "gpt_oss": ("gpt_oss", {**MOE, **WIDE, **FULL}),
    "cohere2 unrotated": ("cohere2", {**WIDE, **FULL, "logit_scale": 1.0}),
    "cohere2 interleaved": ("cohere2", {**WIDE, **SLIDING, "logit_scale": 1.0}),
    "exaone4 unrotated": ("exaone4", FULL),
    "exaone4 rotated": ("exaone4", SLIDING),
    "smollm3 unrotated": ("smollm3", {"no_rope_layers": [0]}),
    "afmoe unrotated": ("afmoe", {**MOE, **WIDE, **FULL}),
    "glm4 interleaved, partial": ("glm4", WIDE),
    "stablelm partial": ("stablelm", {}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "granite": ("granite", {}),
    "ernie4_5 interleaved": ("ernie4_5", WIDE),
    "helium": ("helium", WIDE),
    "deepseek_v2 interleaved, at the end": ("deepseek_v2", LATENT),
}
OF_ITS_OWN = "rotates queries and keys in a way that streaming does not support"
CHANGE = "rope_type '%s', whose frequencies change.*fixed frequencies"
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED = {
    "hunyuan": ("hunyuan_v1_dense", WIDE, f"layer 0 {OF_ITS_OWN}"),
    "deepseek_v3": ("deepseek_v3", LATENT, OF_ITS_OWN),
    "llama4": ("llama4_text", {**MOE, **WIDE, "intermediate_size_mlp": 96, "no_rope_layers": [0]}, OF_ITS_OWN),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, CHANGE % "dynamic"),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, CHANGE % "longrope"),
    "opt": ("opt", models.FAMILIES["opt"][1], "learned positions cannot move"),
}


def tokens(rows: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def one_layer(name: str, cases=STREAM, **own) -> torch.nn.Module:
    return models.tiny(cases[name][0], **{**cases[name][1], "num_hidden_layers": 1, **own})


def stream(model, **options):
    return hf_fastattn.patch(model, "streaming", **{"window": WINDOW, "sinks": SINKS, "graph": False, **options})


@torch.no_grad()
def last_logits(model, ids: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Logits of the last token, (2, vocabulary): after one chunk and `steps` single tokens, and after a single chunk."""
    cache = RollingCache(model)
    parts = [ids[:, :-steps], *ids[:, -steps:].split(1, 1)]
    one_by_one = [model(part, past_key_values=cache).logits[0, -1] for part in parts][-1]
    return torch.stack([one_by_one, model(ids, past_key_values=RollingCache(model)).logits[0, -1]])


@torch.no_grad()
def visible_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model of one layer for only the tokens that streaming keeps."""
    return model(torch.cat([ids[:, :SINKS], ids[:, -WINDOW:]], 1), use_cache=False).logits[0, -1]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", STREAM)
def test_logits_are_those_of_the_visible_tokens(name):
    model, ids = one_layer(name), tokens()
    expected, everything = visible_logits(model, ids), model(ids, use_cache=False).logits[0, -1].detach()
    assert (everything - expected).abs().max() > 1e-2 * expected.abs().max()  # otherwise this would prove nothing
    with stream(model), hf_fastattn.count_calls() as calls:
        assert_close(last_logits(model, ids), expected)
    assert calls["streaming.prefill"] and calls["streaming.decode"]
    with stream(model, window=300):
        assert_close(last_logits(model, ids), everything)


def test_hrm_asks_whether_its_cache_is_initialised_and_clamping_is_for_learned_positions():
    with pytest.raises(ValueError, match="clamp_positions=True is for models with learned positions, and Llama has none"):
        stream(one_layer("llama"), clamp_positions=True)
    model = models.tiny("hrm_text", num_hidden_layers=8, num_layers_per_stack=1, num_key_value_heads=4)
    ids = tokens()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with stream(model, window=300):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_rerotated_are_refused(name):
    model = one_layer(name, REFUSED)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match=REFUSED[name][2]):
        stream(model)
    after = {key: dict(vars(module)) for key, module in model.named_modules()}
    assert all(before[key].keys() == after[key].keys() for key in before)
    assert model.config._attn_implementation == "eager"
    for path, weight in model.named_parameters():  # with equal weights a norm commutes with any rotation, until others are loaded
        if "norm" in path:
            weight.data.fill_(1.0)
    with pytest.raises(ValueError, match=REFUSED[name][2]):
        stream(model)


def test_layers_of_several_kinds_stream_together():
    """With several layers, tokens outside of the window have an indirect effect, so the window must include all tokens."""
    model = models.tiny("cohere2", **WIDE, sliding_window=400, num_hidden_layers=4, logit_scale=1.0)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    ids = tokens()
    expected = model(ids, use_cache=False).logits[0, -1].detach()
    with stream(model, window=300):
        assert_close(last_logits(model, ids), expected)


# Frequencies that change.


def scale(model) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.25)


def replace(model) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(config).eval()


CHANGES = {
    "written to": scale,
    "written to behind autograd's back": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.25),
    "another tensor": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.25),
    "another module": replace,
    "the config alone": lambda model: model.config.rope_parameters.update(rope_theta=3.0),  # read when a model is created
}


@pytest.mark.parametrize("cache", ["auto", None])
@pytest.mark.parametrize("change", CHANGES)
def test_frequencies_changed_while_patched_are_used(change, cache):
    model, ids = one_layer("llama"), tokens()
    with stream(model, cache=cache), torch.no_grad():
        before = model(ids, past_key_values=RollingCache(model) if cache else None).logits[0, -1]
        CHANGES[change](model)
        after = model(ids, past_key_values=RollingCache(model) if cache else None).logits[0, -1]
    assert_close(after, visible_logits(model, ids))
    assert torch.equal(before, after) == (change == "the config alone")


@pytest.mark.parametrize("change", ["written to", "another module"])
def test_decode_graphs_follow_changed_frequencies(change, captured):
    model, ids = one_layer("llama"), tokens(2)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with stream(model, graph=True) as patch:
        model.generate(ids, **options)
        CHANGES[change](model)
        got = model.generate(ids, **options)
        assert patch.replays and not patch.uncaptured
    with stream(model):
        expected = model.generate(ids, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(got.logits), torch.stack(expected.logits))


def test_a_second_patch_and_a_copy_have_separate_frequencies():
    model, ids = one_layer("llama"), tokens()
    with stream(model):
        twin = copy.deepcopy(model)
        scale(twin)
        assert_close(last_logits(twin, ids), visible_logits(copy_without_patch(twin), ids))
        first = last_logits(model, ids)
    assert_close(first, visible_logits(model, ids))
    replace(model)
    with stream(model):
        assert_close(last_logits(model, ids), visible_logits(copy_without_patch(model), ids))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()
    expected = visible_logits(model, ids)
    model.train()
    with stream(model):
        assert model.training and model.model.layers[0].training
        assert_close(last_logits(model.eval(), ids), expected)


def copy_without_patch(model) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    hf_fastattn.unpatch(twin)
    return twin


# Models with other inputs than text.


def image_model(model_type: str, name: str):
    """A tiny vision-language model, and a prompt with a picture in each row."""
    model = every_model.named(name, model_type)
    models.draw_weights(model)
    return model, model_inputs.with_picture(model, "no_padding")


@torch.no_grad()
def generated(model, inputs: dict) -> torch.Tensor:
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    return torch.stack(model.generate(**inputs, **greedy, output_logits=True, return_dict_in_generate=True).logits)


def test_images_in_plainly_causal_text_stream_and_their_tower_keeps_its_attention():
    model, inputs = image_model("llava", "LlavaForConditionalGeneration")
    expected = generated(model, inputs)
    with stream(model, window=300):
        assert (model.config.vision_config._attn_implementation, model.config._attn_implementation) == ("eager", "streaming")
        assert_close(generated(model, inputs), expected)
    assert model.config.text_config._attn_implementation == "eager"


IMAGES = [
    ("paligemma", "PaliGemma", "mask that is not plainly causal.*prefix"),
    ("qwen2_5_vl", "Qwen2_5_VL", "positions of images and videos in three sections"),
]


@pytest.mark.parametrize("model_type, name, sentence", IMAGES)
def test_images_that_streaming_does_not_support_are_refused_and_text_is_not(model_type, name, sentence):
    model, inputs = image_model(model_type, f"{name}ForConditionalGeneration")
    text = {"input_ids": inputs["input_ids"].clamp(max=models.VOCAB - 1)}
    expected = generated(model, text) if model_type == "qwen2_5_vl" else None  # PaliGemma's text is bidirectional too
    with stream(model, window=300):
        for call in (generated, lambda model, inputs: model(**inputs, past_key_values=RollingCache(model))):
            with pytest.raises(ValueError, match=sentence):
                call(model, inputs)
        if expected is not None:
            assert_close(generated(model, text), expected)
