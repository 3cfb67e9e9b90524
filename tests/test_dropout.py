"""Dropout in attention: drawn anew and recomputed where a backend has it, else the model's own attention."""

from __future__ import annotations

import dataclasses

import models
import pytest
import torch
from test_training import gradients, stock, trainable
from transformers import AutoModelForMaskedLM

import hf_fastattn
from hf_fastattn import registry, training
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spec import KV, Spec


def test_a_backend_without_dropout_runs_the_models_own_attention(device):
    model = trainable("llama", device, attention_dropout=0.3)
    expected = gradients(model, "sdpa", "left_padding")
    stock(model, "lean", expected, "'lean' has no dropout: where it is needed")
    ids = models.prompts("no_padding", device)["input_ids"]
    with torch.no_grad(), hf_fastattn.count_calls() as calls:
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert calls == {"lean.stock": 4}
    q = torch.randn(1, 4, 5, 16, device=device)
    with pytest.raises(ValueError, match=r"'lean' has no dropout.*reference"):
        training.attention("lean", q, q, q, dropout=0.1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bert"])
def test_dropout_is_drawn_anew_and_recomputed_identically(family, device):
    if family == "bert":
        own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.3}
        model = models.tiny("bert", device=device, auto=AutoModelForMaskedLM, **own)
    else:
        model = trainable(family, device, attention_dropout=0.3)
    ids = models.prompts("no_padding", device)["input_ids"]

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(ids).logits.float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.set_attn_implementation("reference")
    model.train()
    with hf_fastattn.count_calls() as calls:
        expected = train()
    assert calls == {"reference.prefill": 2, "reference.backward": 2}
    assert all(map(torch.equal, train(), expected))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(train(), expected, strict=True))
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
        with hf_fastattn.count_calls() as calls:
            assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    assert calls == {"reference.prefill": 4}


def dropping() -> registry.Backend:
    """`lean` with the flag that the Triton backends do not set yet."""
    backend = registry.register(dataclasses.replace(registry.get("lean"), name="dropping", dropout=True))
    del registry._backends["dropping"]  # so that names() does not contain it in other tests
    return backend


def test_few_queries_run_the_kernel_that_drops_weights(device):
    q, seed = torch.randn(1, 2, 3, 16, device=device), torch.tensor([7], device=device)
    arguments = q, KV(q, q), Spec(dropout=0.5)
    with hf_fastattn.count_calls() as calls:
        found = dropping().attend(*arguments, seed=seed)
    assert calls == {"dropping.prefill": 1}
    torch.testing.assert_close(found, reference.attention(*arguments, seed=seed))


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_drop_weights_of_a_model_as_the_reference_does(packed, device):
    dropping()
    model = trainable("llama", device, attention_dropout=0.3, num_hidden_layers=1)
    ids = models.prompts("no_padding", device, rows=1, length=24)["input_ids"]
    given = {"position_ids": torch.cat([torch.arange(9), torch.arange(15)])[None].to(device)} if packed else {}

    def train(name: str, seed: int = 0) -> list[torch.Tensor]:
        model.set_attn_implementation(name)
        torch.manual_seed(seed)
        model.zero_grad()
        model(ids, use_cache=False, **given).logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = train("reference")
    with hf_fastattn.count_calls() as calls:
        torch.testing.assert_close(train("dropping"), expected, atol=1e-4, rtol=1e-3)
    assert calls == {"dropping.prefill": 1, "dropping.backward": 1}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(train("dropping"), expected, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(train("dropping", seed=1)[0], expected[0], atol=1e-2, rtol=0.1)


def test_dropout_changes_the_mean_little(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 12, 16, device=device) for _ in range(3))
    want, lse = training.attention("reference", q, k, v)
    found = [training.attention("reference", q, k, v, dropout=0.5) for _ in range(400)]
    assert all(torch.allclose(each, lse) for _, each in found)
    assert (torch.stack([out for out, _ in found]).mean(0) - want).abs().max() < 0.5 and not torch.equal(found[0][0], found[1][0])
