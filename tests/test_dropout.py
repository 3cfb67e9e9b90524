"""Dropout in attention: drawn anew and recomputed where a backend has it, else the dense path."""

from __future__ import annotations

import dataclasses
from functools import partial
from unittest.mock import MagicMock

import models
import pytest
import torch
from conftest import INTERPRETED
from test_training import dense, gradients, trainable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForMaskedLM

import hf_fastattn
from hf_fastattn import registry
from hf_fastattn.attention import function, training
from hf_fastattn.context_parallel.shares import Share
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spec import KV, Spec

EXACT = [name for name in hf_fastattn.names() if registry.get(name).exact]
LONG = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels run with fewer and shorter inputs, in the other tests")


def test_a_backend_without_dropout_runs_the_dense_path(device, registering):
    registry.register(dataclasses.replace(registry.get("lean"), name="no_dropout", dropout=False))
    model = trainable("llama", device, attention_dropout=0.3)
    expected = gradients(model, "sdpa", "left_padding")
    dense(model, "no_dropout", expected, "'no_dropout' has no dropout: where it is needed")
    ids = models.prompts("no_padding", device)["input_ids"]
    with torch.no_grad(), hf_fastattn.count_calls() as calls:
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert calls == {"no_dropout.dense": 4}
    q = torch.randn(1, 4, 5, 16, device=device)
    with pytest.raises(ValueError, match=r"'no_dropout' has no dropout.*lean.*reference"):
        training.attention("no_dropout", q, q, q, dropout=0.1)


def step(model, ids, name: str = "lean", seed: int = 0, forward=None, **given) -> list[torch.Tensor]:
    """The gradients of a training step."""
    model.set_attn_implementation(name)
    torch.manual_seed(seed)
    model.zero_grad()
    (model if forward is None else forward)(ids, **given).logits.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@LONG
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bert"])
def test_dropout_is_drawn_anew_and_recomputed_identically(family, device):
    if family == "bert":
        own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.3}
        model = models.tiny("bert", device=device, auto=AutoModelForMaskedLM, **own)
    else:
        model = trainable(family, device, attention_dropout=0.3)
    ids = models.prompts("no_padding", device)["input_ids"]
    model.train()
    with hf_fastattn.count_calls() as calls:
        expected = step(model, ids)
    assert calls == {"lean.prefill": 2, "lean.backward": 2}
    assert all(map(torch.equal, step(model, ids), expected))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(step(model, ids), expected, strict=True))
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
        with hf_fastattn.count_calls() as calls:
            assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    assert calls == {"lean.prefill": 4}


def test_few_queries_run_the_kernel_that_drops_weights(device):
    q, seed = torch.randn(1, 2, 3, 16, device=device), torch.tensor([7], device=device)
    arguments = q, KV(q, q), Spec(dropout=0.5)
    with hf_fastattn.count_calls() as calls:
        found = registry.get("lean").attend(*arguments, seed=seed)
    assert calls == {"lean.prefill": 1}
    torch.testing.assert_close(found, reference.attention(*arguments, seed=seed))


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_backend_drops_the_same_weights(name, device):
    q, k = (torch.randn(1, heads, 9, 16, device=device, requires_grad=True) for heads in (4, 2))

    def train(name: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        out, lse = training.attention(name, q, k, k, dropout=0.4)
        return out, lse, *torch.autograd.grad(out.square().sum(), (q, k))

    torch.testing.assert_close(train(name), train("reference"), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(train(name, seed=1)[0], train("reference")[0], atol=1e-2, rtol=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_drop_weights_of_a_model_as_the_reference_does(packed, device):
    model = trainable("llama", device, attention_dropout=0.3, num_hidden_layers=1)
    ids = models.prompts("no_padding", device, rows=1, length=24)["input_ids"]
    given = {"position_ids": torch.cat([torch.arange(9), torch.arange(15)])[None].to(device)} if packed else {}
    train = partial(step, model, ids, use_cache=False, **given)
    expected = train("reference")
    with hf_fastattn.count_calls() as calls:
        torch.testing.assert_close(train("lean"), expected, atol=1e-4, rtol=1e-3)
    assert calls == {"lean.prefill": 1, "lean.backward": 1}
    assert not torch.allclose(train("lean", seed=1)[0], expected[0], atol=1e-2, rtol=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hf_fastattn.count_calls() as calls:
        torch.testing.assert_close(train("lean", forward=compiled), expected, atol=1e-4, rtol=1e-3)
    assert calls == {"lean.prefill": 1, "lean.backward": 1}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(train("lean"), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_drops_the_same_weights_and_selective_checkpointing_runs_the_forward_once(dropout, device):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def train(forward) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        loss = forward(q, k, v)
        return loss, *torch.autograd.grad(loss, (q, k, v))

    q, k, v = (torch.randn(1, heads, 9, 16, device=device, requires_grad=True) for heads in (4, 2, 2))
    run = lambda q, k, v: training.attention("lean", q * 2.0, k, v, dropout=dropout)[0].square().sum()  # noqa: E731
    again = partial(checkpoint, run, use_reentrant=False)
    saved = partial(again, context_fn=partial(create_selective_checkpoint_contexts, policy))
    torch._dynamo.reset()
    compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
    expected = train(run)
    for name, forward, forwards in (("recomputed", again, 2), ("saved", saved, 1), ("compiled", compiled, None)):
        with hf_fastattn.count_calls() as calls:
            found = train(forward)
        loss, *_, dv = found
        # The result is linear in v: this holds if the recomputation drops the weights that the loss was computed without.
        torch.testing.assert_close((v * dv).sum(), 2.0 * loss, rtol=1e-3, atol=0.0, msg=name)
        if name != "compiled" or device.type == "cpu":  # on a GPU compiled code has its own generator, which begins elsewhere
            assert all(map(torch.equal, found, expected)), name
        assert forwards is None or calls == {"lean.prefill": forwards, "lean.backward": 1}


def test_a_loaded_model_has_the_dropout_of_its_configuration(device, tmp_path):
    trainable("llama", device, attention_dropout=0.3).save_pretrained(tmp_path)
    ids = models.prompts("no_padding", device, rows=1, length=24)["input_ids"]
    for own, drops in (({}, True), ({"attention_dropout": 0.0}, False)):
        model = models.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="lean", **own).to(device)
        with hf_fastattn.count_calls() as calls:
            first, second = (model.train()(ids, use_cache=False).logits for _ in range(2))
        assert calls == {"lean.prefill": 4}
        assert torch.equal(first, second) != drops
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)


@LONG
@pytest.mark.parametrize("family", ["llama", "mistral_window_below_prompt"])
def test_a_patched_model_in_training_mode(family, device):
    """So little dropout that nothing is dropped: the tokens are those of evaluation, by the kernel that could drop weights."""
    model = trainable(family, device, attention_dropout=1e-6)
    inputs = models.prompts("left_padding", device, length=40)
    with hf_fastattn.patch(model, graph=False):
        tokens = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
        with hf_fastattn.count_calls() as calls:
            assert torch.equal(model.train().generate(**inputs, max_new_tokens=4, do_sample=False), tokens)
    assert calls == {"lean.prefill": 8}


@pytest.mark.parametrize("p", [1.0, 1.5, -0.1, float("nan")])
def test_an_impossible_probability_is_refused(p, device):
    q = torch.randn(1, 2, 3, 16, device=device)
    refused = partial(pytest.raises, ValueError, match=rf"dropout must be at least 0 and below 1; got {p}. .*eager")
    with refused():
        training.attention("lean", q, q, q, dropout=p)
    model = trainable("llama", device, attention_dropout=0.1, attn_implementation="lean")
    model.model.layers[1].self_attn.attention_dropout = p
    ids = models.prompts("no_padding", device, rows=1, length=24)["input_ids"]
    with refused():
        model(ids)
    model.eval()(ids)


def test_keys_and_values_of_several_ranks_are_refused(device):
    q, own = torch.randn(1, 4, 5, 16, device=device), torch.randn(1, 2, 32, 16, device=device)
    k, v = (Share(own, (1, 2, 64, 16), MagicMock(), 0, {}, MagicMock()) for _ in range(2))
    layer = torch.nn.Module()
    layer.is_causal = False
    with pytest.raises(ValueError, match=r"shared out over ranks .*without dropout"):
        function.attention_forward("lean", layer, q, k, v, None, dropout=0.1)


def test_dropout_changes_the_mean_little(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 12, 16, device=device) for _ in range(3))
    want, lse = training.attention("reference", q, k, v)
    found = [training.attention("reference", q, k, v, dropout=0.5) for _ in range(400)]
    assert all(torch.allclose(each, lse) for _, each in found)
    assert (torch.stack([out for out, _ in found]).mean(0) - want).abs().max() < 0.5 and not torch.equal(found[0][0], found[1][0])
