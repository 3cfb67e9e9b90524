"""Training through a backend that has no backward pass: the model's own attention runs, with its gradients, and says so."""

from __future__ import annotations

import models
import pytest
import torch
from calls import attention

import hf_fastattn
from hf_fastattn import interface

STOCK = {"llama": "sdpa", "gpt_oss": "eager", "gemma2": "eager", "mistral_window_below_prompt": "sdpa"}
LENGTH = 40


def gradients(model, name: str, padding: str, use_cache: bool = False, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of the loss over what live tokens predict, by parameter."""
    model.set_attn_implementation(name)
    model.zero_grad()
    inputs = models.prompts(padding, model.device, length=LENGTH)
    live = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    live = live & torch.nn.functional.pad(live, (1, 0))[:, :-1]  # what padding itself predicts is nobody's business
    labels = inputs["input_ids"].masked_fill(live == 0, -100)
    torch.manual_seed(0)
    forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compiled else model.forward
    forward(**inputs, labels=labels, use_cache=use_cache).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def agree(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def trainable(family: str, device, **own):
    model_type, config = models.FAMILIES[family]
    return models.tiny(model_type, device=device, **{**config, **own}).train()


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_gradients_are_those_of_the_models_own_attention(use_cache, padding, family, device):
    model = trainable(family, device)
    expected = gradients(model, STOCK[family], padding, use_cache)
    interface._say_once.cache_clear()
    with hf_fastattn.count_calls() as calls, pytest.warns(UserWarning, match=f"own {STOCK[family]} attention runs") as said:
        agree(gradients(model, "lean", padding, use_cache), expected)
    assert calls == {"lean.stock": 2}
    assert len([w for w in said if "no backward pass" in str(w.message)]) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing(family, reentrant, device):
    model = trainable(family, device)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    agree(gradients(model, "lean", "left_padding"), gradients(model, STOCK[family], "left_padding"))


def test_dropout_is_honoured(device):
    model = trainable("llama", device, attention_dropout=0.3)
    expected = gradients(model, "sdpa", "left_padding")
    agree(gradients(model, "lean", "left_padding"), expected)
    ids = models.prompts("no_padding", device)["input_ids"]
    with torch.no_grad(), hf_fastattn.count_calls() as calls:
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert calls == {"lean.stock": 4}
    with torch.no_grad(), hf_fastattn.count_calls() as calls:
        model.eval()(ids)
    assert calls == {"lean.prefill": 2}


def test_compiled(device):
    model = trainable("llama", device)
    torch._dynamo.reset()
    found = gradients(model, "lean", "left_padding", compiled=True)
    torch._dynamo.reset()
    agree(found, gradients(model, "sdpa", "left_padding"))


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_patched_model_trains_between_generations(use_cache, device):
    model = trainable("gpt_oss", device)
    expected = gradients(model, "eager", "left_padding", use_cache)
    inputs = models.prompts("left_padding", device, length=LENGTH)
    tokens = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    with hf_fastattn.patch(model, graph=False):
        for _ in range(2):
            with hf_fastattn.count_calls() as calls:
                assert torch.equal(model.eval().generate(**inputs, max_new_tokens=4, do_sample=False), tokens)
            assert calls["lean.stock"] == 0 and calls["lean.prefill"] == 2
            agree(gradients(model.train(), "lean", "left_padding", use_cache), expected)


def test_a_frozen_model_with_trained_sinks(device):
    model = trainable("gpt_oss", device).requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("sinks"))
    found = gradients(model, "lean", "no_padding")
    assert len(found) == 2
    agree(found, gradients(model, "eager", "no_padding"))
    q, k = torch.randn(1, 4, 3, 16, device=device), torch.randn(1, 2, 3, 16, device=device)
    with pytest.raises(RuntimeError, match="no backward pass, and q, k, v or sink_logits requires grad"):
        attention(q, k, k, sink_logits=torch.zeros(4, device=device, requires_grad=True))


def test_a_streaming_backend_refuses(device):
    model = trainable("llama", device)
    with hf_fastattn.patch(model, "streaming", window=16), pytest.raises(RuntimeError, match=r"'streaming' has no backward pass"):
        model(models.prompts("no_padding", device)["input_ids"], use_cache=False)
