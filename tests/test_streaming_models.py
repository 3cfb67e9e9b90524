"""Streaming and model families: each is right, or refused in a sentence that names why."""

from __future__ import annotations

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
WIDE = {"head_dim": 16}  # where it is not hidden_size / num_attention_heads by itself
# One layer each, so that what a rolling cache keeps is all that its logits come of.
STREAM = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", WIDE),
    "phi3": ("phi3", {"sliding_window": 400}),
    "gemma2": ("gemma2", {**WIDE, **SLIDING, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 16}),
    "gemma3 sliding": ("gemma3_text", {**WIDE, **SLIDING}),  # the two have frequencies of their own
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
OF_ITS_OWN = "rotates queries and keys in a way of its own"
REFUSED = {
    "hunyuan": ("hunyuan_v1_dense", WIDE, r"layer 0 scales each dimension.* after it has rotated them \(a norm"),
    "deepseek_v3": ("deepseek_v3", LATENT, OF_ITS_OWN),
    "llama4": ("llama4_text", {**MOE, **WIDE, "intermediate_size_mlp": 96, "no_rope_layers": [0]}, "length depends on their pos"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "frequencies change"),
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
    """Of the last token of a patched model that reads most at once, then one by one; once more, all at once: (2, vocabulary)."""
    cache = RollingCache(model)
    parts = [ids[:, :-steps], *ids[:, -steps:].split(1, 1)]
    one_by_one = [model(part, past_key_values=cache).logits[0, -1] for part in parts][-1]
    return torch.stack([one_by_one, model(ids, past_key_values=RollingCache(model)).logits[0, -1]])


@torch.no_grad()
def in_sight(model, ids: torch.Tensor) -> torch.Tensor:
    """What a model of one layer makes of the tokens that streaming keeps, read alone."""
    return model(torch.cat([ids[:, :SINKS], ids[:, -WINDOW:]], 1), use_cache=False).logits[0, -1]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", STREAM)
def test_logits_are_those_of_what_is_in_sight(name):
    model, ids = one_layer(name), tokens()
    expected, everything = in_sight(model, ids), model(ids, use_cache=False).logits[0, -1].detach()
    assert (everything - expected).abs().max() > 1e-2 * expected.abs().max()  # else this would show nothing
    with stream(model), hf_fastattn.count_calls() as calls:
        assert_close(last_logits(model, ids), expected)
    assert calls["streaming.prefill"] and calls["streaming.decode"]
    with stream(model, window=300):
        assert_close(last_logits(model, ids), everything)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_turned_back_is_refused(name):
    model = one_layer(name, REFUSED)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match=REFUSED[name][2]):
        stream(model)
    after = {key: dict(vars(module)) for key, module in model.named_modules()}
    assert all(before[key].keys() == after[key].keys() for key in before)
    assert model.config._attn_implementation == "eager"
