"""Small models that are trained with `lean` and with eager attention stay the same: losses, weights and logits, in float32."""

from __future__ import annotations

import models
import pytest
import torch
from test_training import LENGTH, trainable
from transformers import AutoModelForMaskedLM

import hf_fastattn

STEPS = 32


def trained(family: str, name: str, device) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss before each step, logits of live tokens after the last, weights after the last)."""
    if family == "bert":
        own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = models.tiny("bert", device=device, auto=AutoModelForMaskedLM, **own).train()
    else:
        # With all experts chosen: a choice by a router would turn a difference in rounding into one of whole experts.
        own = {"num_experts_per_tok": 4} if family == "gpt_oss" else {}
        model = trainable(family, device, **own)
    model.set_attn_implementation(name)
    # With the usual eps, AdamW moves a weight whose gradient is only rounding as far as any other.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
    inputs = models.prompts("left_padding", device, length=LENGTH)
    live = inputs["attention_mask"] & torch.nn.functional.pad(inputs["attention_mask"], (1, 0))[:, :-1]
    labels, losses = inputs["input_ids"].masked_fill(live == 0, -100), []
    for _ in range(STEPS):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = model(**inputs).logits[live.bool()]
    return torch.stack(losses), logits, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "mistral_window_below_prompt", "gemma2", "gpt_oss", "bert"])
def test_training_converges_as_with_eager(family, device):
    losses, logits, weights = trained(family, "eager", device)
    assert losses[-1] < 0.05 * losses[0]
    with hf_fastattn.count_calls() as calls:
        found = trained(family, "lean", device)
    assert calls["lean.prefill"] >= 2 * STEPS and calls["lean.backward"] == 2 * STEPS and "lean.stock" not in calls
    # Gradients of q, k or v that are wrong by 2 % give differences of at least 1.5e-3, 0.1 and 2.5e-3.
    torch.testing.assert_close(found[0], losses, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(found[1], logits, atol=5e-2, rtol=0.0)
    for name, weight in weights.items():
        torch.testing.assert_close(found[2][name], weight, atol=1e-3, rtol=0.0, msg=lambda text, name=name: f"{name}: {text}")
