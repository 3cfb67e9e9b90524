"""generate() gives the tokens of eager, in fp32, for models x caches and searches x paddings; on a GPU with the real kernels."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import cache, partial, wraps
from pathlib import Path

import fake_graph
import models
import pytest
import torch
import transformers
from calls import as_kernel, attention
from cases import pairs, slow_unless
from models import FAMILIES, PADDINGS
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import hf_fastattn
from hf_fastattn import hf, registry
from hf_fastattn.kernels import INTERPRETED, spans

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.usefixtures("one_thread")
NEW_TOKENS = 8
CHUNK = 40
# On a GPU, generate() would compile every static combination with Inductor; test_backends tests that.
STATIC = {"cache_implementation": "static", "disable_compile": True}
MODES = {
    "dynamic_cache": {},
    "static_cache": STATIC,
    "chunked_prefill": {"prefill_chunk_size": CHUNK},
    "static_cache_chunked_prefill": {**STATIC, "prefill_chunk_size": CHUNK},
    "beam": {"num_beams": 3},
    "beam_static_cache": {"num_beams": 3, **STATIC},
    "num_return_sequences": {"num_beams": 4, "num_return_sequences": 2},
    "seeded_sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},  # Transformers supports one row only
}
SOME_FAMILIES = ("llama", "mistral_window_below_prompt", "gpt_oss")


def generate(model, inputs: dict, **options) -> torch.Tensor:
    """The new tokens."""
    torch.manual_seed(0)
    sequences = model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **options})
    return sequences[:, inputs["input_ids"].shape[1] :]


def run(family: str, mode: str, padding: str, device: torch.device, attn_implementation: str, **prompt) -> torch.Tensor:
    model = models.family(family, device)
    model.set_attn_implementation(attn_implementation)
    if mode == "prompt_lookup":
        prompt["rows"] = 1
    return generate(model, models.prompts(padding, device, **prompt), **MODES[mode])


@cache
def eager(family: str, mode: str, padding: str, device: torch.device) -> torch.Tensor:
    with hf_fastattn.count_calls() as calls:
        tokens = run(family, mode, padding, device, "eager")
    assert not calls, "eager must not run kernels of the package"
    return tokens


def check(family: str, mode: str, padding: str, device: torch.device, backend: str) -> None:
    with hf_fastattn.count_calls() as calls:
        tokens = run(family, mode, padding, device, backend)
    expected = eager(family, mode, padding, device)
    assert torch.equal(tokens, expected), f"tokens differ from eager's:\n{tokens}\n{expected}"

    config = models.family(family, device).config
    group = config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads)
    first = CHUNK if "chunked" in mode else models.PROMPT
    phases = set()
    if hf_fastattn.get(backend).decode is not None:
        phases.add(f"{backend}.decode")
    if f"{backend}.decode" not in phases or first * group > hf_fastattn.get(backend).max_decode_rows:
        phases.add(f"{backend}.prefill")
    assert set(calls) == phases  # so never "<backend>.dense"
    assert sum(calls.values()) % config.num_hidden_layers == 0, "a layer was left out"


@pytest.mark.parametrize("family, mode, padding", pairs(FAMILIES, MODES, PADDINGS))
def test_lean_generates_the_tokens_of_eager(family, mode, padding, device):
    check(family, mode, padding, device, "lean")


OTHERS = pairs(["reference", "fa2", "split_kv"], SOME_FAMILIES, MODES, PADDINGS)


@pytest.mark.parametrize("backend, family, mode, padding", OTHERS)
def test_other_backends_generate_the_tokens_of_eager(backend, family, mode, padding, device):
    check(family, mode, padding, device, backend)


# The tests above detect a broken mask or a dropped argument: these change the tokens.
def _wrong(change=lambda spans, kv_len: None, **instead):
    """Attention by changed spans and with other options."""

    @as_kernel
    def run(q, k, v, s=None, **options):
        if s is None:
            window, offset = options.pop("window", None), k.shape[2] - q.shape[2]
            s = spans.build_spans(q.shape[0], q.shape[2], k.shape[2], q.device, q_offset=offset, window=window)
        s = s.clone()
        change(s, k.shape[2])
        return attention(q, k, v, s, **{**options, **instead})

    return run


def _of(s, name: str):
    return s[..., getattr(spans, name)]


WRONG_KERNELS = {
    "sees_the_next_token": _wrong(lambda s, n: (_of(s, "Q_START").add_(1), _of(s, "KV_STOP").add_(1).clamp_(max=n))),
    "sees_padding": _wrong(lambda s, n: (_of(s, "KV_START").zero_(), _of(s, "FLAGS").bitwise_and_(~spans.HOLES))),
    "sees_holes": _wrong(lambda s, n: _of(s, "FLAGS").bitwise_and_(~spans.HOLES)),
    "has_no_window": _wrong(lambda s, n: _of(s, "WINDOW").fill_(spans.NO_WINDOW), window=None),
    "drops_scale": _wrong(scale=None),
    "drops_softcap": _wrong(softcap=None),
    "drops_sink_logits": _wrong(sink_logits=None),
}


WRONG = [(family, padding, "sees_the_next_token") for family in FAMILIES for padding in PADDINGS]
WRONG += [(family, padding, "sees_padding") for family in FAMILIES for padding in PADDINGS[1:]]
WRONG.remove(("mistral_window_below_prompt", "left_padding", "sees_padding"))  # its window never reaches the padding
WRONG += [(family, "holes", "sees_holes") for family in FAMILIES]
WRONG += [(f, "no_padding", "has_no_window") for f in FAMILIES if FAMILIES[f][1].get("sliding_window", 999) < models.PROMPT]
DROPS = {"opt": "drops_scale", "gemma2": "drops_softcap", "gpt_oss": "drops_sink_logits"}
WRONG += [(family, "no_padding", wrong) for family, wrong in DROPS.items()]


@pytest.mark.parametrize("family,padding,wrong", slow_unless([*WRONG[::3], *WRONG[-3:]].__contains__, WRONG))
def test_wrong_attention_changes_the_tokens(family, padding, wrong, device, registering):
    registry.register(dataclasses.replace(registry.get("lean"), prefill=WRONG_KERNELS[wrong], decode=None))
    assert not torch.equal(run(family, "dynamic_cache", padding, device, "lean"), eager(family, "dynamic_cache", padding, device))


def converse(family: str, device: torch.device, attn_implementation: str, padding: str, static: bool, **second) -> torch.Tensor:
    """Two turns over one cache; the mask of the second has the zeros of the first and, for holes, further zeros."""
    model = models.family(family, device)
    model.set_attn_implementation(attn_implementation)
    inputs = models.prompts(padding, device)
    length = models.PROMPT + 2 * NEW_TOKENS + 48
    past = StaticCache(config=model.config, max_cache_len=length) if static else DynamicCache(config=model.config)
    options = {"past_key_values": past, "disable_compile": True}
    reply = generate(model, inputs, **options)
    question = models.prompts("no_padding", device, length=48)["input_ids"]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], reply, question], -1)
    if "attention_mask" in inputs:
        mask = torch.ones_like(torch.cat([reply, question], -1))
        if padding == "holes":
            mask[1, 5:9] = 0
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], mask], -1)
    return generate(model, inputs, **options, **second)


TURNS = pairs(FAMILIES, [False, True], PADDINGS)


@pytest.mark.parametrize("family, static, padding", slow_unless(TURNS[::2].__contains__, TURNS))
def test_second_turn_over_the_same_cache(family, static, padding, device):
    expected = converse(family, device, "eager", padding, static)
    with hf_fastattn.count_calls() as calls:
        assert torch.equal(converse(family, device, "lean", padding, static), expected)
    assert calls["lean.decode"] and not calls["lean.dense"]


def test_a_patched_model_reads_only_the_new_tokens_in_chunks(device):
    """Or it refuses: versions before 5.21 read all of them again."""
    model = models.family("llama", device)
    model.set_attn_implementation("eager")
    inputs = models.prompts("left_padding", device)
    expected = generate(model, inputs, max_new_tokens=12)
    with hf_fastattn.patch(model, graph=False):
        first = model.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        inputs["input_ids"] = first.sequences
        inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
        options = {"past_key_values": first.past_key_values, "prefill_chunk_size": 1, "max_new_tokens": 7}
        if VERSION < (5, 21):
            with pytest.raises(ValueError, match=r"past_key_values holds 100 of them\. Leave out prefill_chunk_size"):
                generate(model, inputs, **options)
        else:
            assert torch.equal(torch.cat([first.sequences[:, -5:], generate(model, inputs, **options)], 1), expected)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic_cache", "static_cache"])
def test_chunked_prefill_of_a_second_turn(static, device):
    if VERSION == (5, 17):
        device = torch.device("cpu")  # it may write past the end of its cache, which ends the context of a GPU
    whole = converse("llama", device, "eager", "left_padding", static)
    try:
        expected = converse("llama", device, "eager", "left_padding", static, prefill_chunk_size=CHUNK)
    except (RuntimeError, IndexError):
        expected = None
    if VERSION == (5, 17):
        # Transformers 5.17 passes all ids again with a past length of 0; 5.23 is correct.
        assert expected is None or not torch.equal(expected, whole), "Transformers 5.17 got this right after all: test it"
        return
    assert torch.equal(expected, whole)
    assert torch.equal(converse("llama", device, "lean", "left_padding", static, prefill_chunk_size=CHUNK), expected)


def masked(tokens: int, device) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long, device=device)
    mask[:, 10:30] = 0
    return mask


class Masking(LlamaForCausalLM):
    """Hides tokens after it has read the prompt."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **options):
        return self.updated(super()._update_model_kwargs_for_generation, outputs, model_kwargs, **options)

    def updated(self, own, outputs, model_kwargs, **options):
        tokens = outputs.past_key_values.get_seq_length() + 1
        return {**own(outputs, model_kwargs, **options), "attention_mask": masked(tokens, self.device)}


def wrapped_forward(model):
    """Hides tokens from each step."""
    own = model.forward

    @wraps(own)
    def forward(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 2 and kwargs["input_ids"].shape[1] == 1:
            attention_mask = attention_mask.clone()
            attention_mask[:, 10:30] = 0
        return own(*args, attention_mask=attention_mask, **kwargs)

    return forward


def wrapped_method(model):
    own = model._update_model_kwargs_for_generation
    return wraps(own)(lambda *args, **kwargs: Masking.updated(model, own, *args, **kwargs))


WRAPPED = {"forward": wrapped_forward, "_update_model_kwargs_for_generation": wrapped_method}


def loop(model, input_ids, **kwargs):
    """A user's: the same, by greedy decoding."""
    mask, new, cache = None, input_ids, hf.cache_in(kwargs)
    for _ in range(NEW_TOKENS):
        positions = torch.arange(input_ids.shape[1], device=new.device)[None, -new.shape[1] :]
        out = model(input_ids=new, attention_mask=mask, position_ids=positions, past_key_values=cache)
        new = out.logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, new], 1)
        mask = masked(input_ids.shape[1], new.device)
    return input_ids


def guide(model, cache, device):
    """A logits processor: the model's logits after another text, with holes, in a cache of its own."""
    inputs = models.prompts("holes", device, rows=2, length=130)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def process(input_ids, scores):
        nonlocal ids, mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        ids, mask = input_ids[:, -1:], torch.nn.functional.pad(mask, (0, 1), value=1)
        return scores + out.logits[:, -1]

    return [process]


@pytest.mark.parametrize("how", ["method", *WRAPPED, "loop", "processor"])
def test_masks_of_other_code_are_not_taken_for_those_of_generate(how, device, monkeypatch):
    """Transformers 5.17 gives each step a mask of ones, which a graph does not read."""
    if device.type == "cpu":
        fake_graph.use(monkeypatch)
    model = models.tiny("llama", "eager", device)
    model.__class__ = Masking if how == "method" else LlamaForCausalLM
    if how in WRAPPED:
        monkeypatch.setattr(model, how, WRAPPED[how](model))
    inputs = models.prompts("no_padding", device, rows=2)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def tokens(cache):
        own = {"loop": {"custom_generate": loop}, "processor": {"logits_processor": guide(model, cache, device)}}
        return generate(model, inputs, **own.get(how, {}))

    expected = tokens(DynamicCache(config=model.config))
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            assert torch.equal(tokens(hf_fastattn.PreallocatedCache(model)), expected)
        assert patch.replays and not patch.reasons


@pytest.mark.parametrize("name", [*hf.LOOP, hf.FORWARD])
def test_methods_of_transformers_are_told_from_wrappers_of_them(name, device):
    method = getattr(models.tiny("llama", "eager", device), name)
    assert hf.is_stock(method)
    assert not hf.is_stock(wraps(method)(lambda *args, **kwargs: method(*args, **kwargs)))
    assert not hf.is_stock(partial(method))


SHORT = {"rows": 2, "length": 34}  # one query more than the decode kernels support
INTERPRETER = [
    ("llama", "lean", "dynamic_cache", "no_padding"),
    ("llama", "lean", "prompt_lookup", "holes"),
    ("mistral_window_below_prompt", "lean", "static_cache", "holes"),
    ("gpt_oss", "lean", "dynamic_cache", "no_padding"),
    ("llama", "split_kv", "static_cache", "holes"),
    ("llama", "fa2", "static_cache", "holes"),
]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_interpreted_kernels starts")
@pytest.mark.parametrize("family,backend,mode,padding", INTERPRETER)
def test_interpreted(family, backend, mode, padding, monkeypatch):
    monkeypatch.setitem(globals(), "NEW_TOKENS", 3)
    expected = run(family, mode, padding, "cpu", "eager", **SHORT)
    with hf_fastattn.count_calls() as calls:
        tokens = run(family, mode, padding, "cpu", backend, **SHORT)
    assert torch.equal(tokens, expected)
    assert calls and not calls[f"{backend}.dense"]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_interpreted_kernels(device):
    """The Triton kernels, interpreted, in another process, because the variable is read when Triton is imported."""
    if device.type != "cpu":
        pytest.skip("the real kernels have run all of the matrix here")
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"{Path(__file__)}::test_interpreted"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900)
    expected = f"{len(INTERPRETER)} passed"
    assert done.returncode == 0 and expected in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
