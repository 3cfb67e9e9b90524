"""Prompts that are read without their padding, and equal rows once: the tokens are those of the unpatched model."""

from __future__ import annotations

import functools
import re

import models
import pytest
import torch
from models import FAMILIES, tiny
from transformers import LogitsProcessorList

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.hf.version import number_of
from hf_fastattn.patches.calls import unpadded

WIDTH = 48
generate = functools.partial(models.generate, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(unpadded, "TILE", 1)


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (len(lengths), WIDTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(WIDTH) >= WIDTH - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def compare(model, inputs, backend: str = "lean", **options) -> hf_fastattn.Patch:
    """Compare generate() with and without patch(), twice, and return the Patch."""
    expected = generate(model, inputs, **options)
    with hf_fastattn.patch(model, backend) as patch:
        for _ in range(2):
            found = generate(model, inputs, **options)
            assert torch.equal(found.sequences, expected.sequences)
            for mine, theirs in zip(found.logits, expected.logits, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    return patch


RAGGED = prompts(3, WIDTH, 17, 1)
SKIPPED = 2 * int((RAGGED["attention_mask"] == 0).sum())  # in two calls


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_not_read(family):
    model_type, own = FAMILIES[family]
    patch = compare(tiny(model_type, "eager", **own), RAGGED)
    if family == "opt" and number_of(hf.VERSION) < (5, 20):  # its code builds a mask of its own from None
        assert "padding of prompts is read: its layers have other masks" in str(patch)
    else:
        assert patch.skipped_tokens == SKIPPED and "not read" in str(patch)


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 3}])
def test_ways_to_choose_tokens(options):
    patch = compare(tiny("llama", "eager"), RAGGED, **options)
    copies = options.get("num_beams") or options.get("num_return_sequences") or 1
    tokens = int(RAGGED["attention_mask"].sum())
    assert patch.skipped_tokens == 2 * (4 * WIDTH * copies - tokens)


@pytest.mark.parametrize("rows", [2, 5])
def test_equal_rows_are_read_once(rows):
    ids = prompts(WIDTH)["input_ids"].repeat(rows, 1)
    for mask in (torch.ones_like(ids), torch.ones_like(ids).index_fill(1, torch.arange(9), 0)):
        patch = compare(tiny("mistral", "eager", sliding_window=16), {"input_ids": ids, "attention_mask": mask})
        assert patch.skipped_tokens == 2 * (rows * WIDTH - int(mask[0].sum()))


def test_rows_that_differ_in_padding_or_positions_are_read_and_positions_of_padding():
    inputs = dict(RAGGED, position_ids=(RAGGED["attention_mask"].cumsum(1) - 1).clamp(min=0))
    inputs["position_ids"][RAGGED["attention_mask"] == 0] = 100  # which a model may read
    assert compare(tiny("llama", "eager"), inputs).skipped_tokens == 0
    inputs = prompts(20, 20, 30)
    inputs["input_ids"][1:] = inputs["input_ids"][0]
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs["position_ids"][1] += 2
    assert compare(tiny("llama", "eager"), inputs).skipped_tokens == 2 * (3 * WIDTH - 70)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32])
@pytest.mark.parametrize("holes", [False, True])
def test_masks(kind, holes):
    inputs = prompts(8, WIDTH, 17)
    if holes:
        inputs["attention_mask"][:, 30:34] = 0
    unread = 2 * int((inputs["attention_mask"] == 0).sum())
    inputs["attention_mask"] = inputs["attention_mask"].to(kind)
    assert compare(tiny("qwen2", "eager"), inputs).skipped_tokens == unread


def test_a_window_drops_tokens_of_a_prompt(monkeypatch):
    from hf_fastattn.caches import layers

    monkeypatch.setattr(layers, "KEEP", 4)
    monkeypatch.setattr(layers, "SLACK", 8)
    assert compare(tiny("mistral", "eager", sliding_window=12), RAGGED).skipped_tokens == SKIPPED


@pytest.mark.parametrize("kind", ["right", "a row of padding"])
def test_a_last_token_that_is_padding(kind):
    model, inputs = tiny("llama", "eager"), {name: x.flip(1) for name, x in RAGGED.items()}
    if kind != "right":
        inputs = {**RAGGED, "attention_mask": RAGGED["attention_mask"].index_fill(0, torch.tensor([0]), 0)}
    expected = generate(model.set_attn_implementation("lean") or model, inputs, use_cache=True)
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(generate(model, inputs).sequences, expected.sequences)
    assert patch.skipped_tokens == 0


@pytest.mark.parametrize("window", [16, 36, 40, 47])
def test_windows_count_the_padding_between_tokens(window):
    inputs = prompts(WIDTH, 20)
    inputs["attention_mask"][:, 30:43] = 0
    model = tiny("mistral", "eager", sliding_window=window)
    with pytest.warns(UserWarning, match="padding between tokens, which windows count"):
        assert compare(model, inputs).skipped_tokens == 0
    with hf_fastattn.patch(model) as patch:
        generate(model, inputs)
        generate(model, RAGGED)
        assert patch.skipped_tokens == SKIPPED // 2


def test_a_processor_that_runs_the_model(monkeypatch):
    model, shapes, mask = tiny("llama", "eager"), [], RAGGED["attention_mask"]
    given = {**RAGGED, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": True}
    process = lambda ids, scores: (  # noqa: E731
        shapes.append(model(**given, past_key_values=PreallocatedCache(model)).logits.shape) or scores
    )
    with hf_fastattn.patch(model):
        generate(model, RAGGED, logits_processor=LogitsProcessorList([process]))
    assert set(shapes) == {(4, WIDTH, 128)}


def own_code(model):
    cls = type(model.model.norm)
    model.model.norm.__class__ = type("Own", (cls,), {"forward": lambda self, x: cls.forward(self, x)})


def bound(model, wraps=lambda own: lambda function: function):
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = wraps(own)(functools.partial(lambda own, *args, **kwargs: own(*args, **kwargs), own))


def dropping_in_a_module(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.5).train())


HIDDEN, OWN = "output_hidden_states is requested", r".forward\(\) is of no installed package"
READS = {  # what changes the model, options of the call, and the reason
    "hidden states": (None, {"output_hidden_states": True}, HIDDEN),
    "logits": (None, {"logits_to_keep": 3}, "logits_to_keep is 3"),
    "a hook": (lambda m: m.model.layers[0].register_forward_hook(lambda *_: None), {}, "LlamaDecoderLayer has the forward hook"),
    "own code": (own_code, {}, "Own" + OWN),
    "wrapped": (lambda m: bound(m, functools.wraps), {}, "LlamaDecoderLayer" + OWN),
    "bound": (bound, {}, "LlamaDecoderLayer" + OWN),
    "dropout": (lambda m: setattr(m.train().config, "attention_dropout", 0.5), {}, "attention_dropout draws random numbers"),
    "dropout in a module": (dropping_in_a_module, {}, "Dropout draws random numbers"),
    "configured": (lambda m: setattr(m.config, "output_hidden_states", True), {}, HIDDEN),
}


@pytest.mark.parametrize("name", READS)
def test_what_keeps_the_padding(name):
    model, (change, options, reason) = tiny("llama", "eager"), READS[name]
    if change is not None:
        change(model)
    expected = generate(model, RAGGED, **options)
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match=f"reads the padding of prompts: .*{reason}"):
        found = generate(model, RAGGED, **options)
    assert patch.skipped_tokens == 0 and re.search(reason, str(patch))
    assert "dropout" in name or torch.equal(found.sequences, expected.sequences)


def test_calls_that_read_the_padding_and_training_mode_without_dropout():
    for options in ({"prefill_chunk_size": 16}, {"backend": "batch_invariant"}, {"prompt_lookup_num_tokens": 3}):
        one = {name: x[:1] for name, x in RAGGED.items()} if "prompt_lookup_num_tokens" in options else RAGGED
        assert compare(tiny("llama", "eager"), one, **options).skipped_tokens == 0, options
    assert compare(tiny("llama", "eager").train(), RAGGED).skipped_tokens == SKIPPED


def test_a_cache_of_the_caller_and_a_second_turn():
    model = tiny("llama", "eager")
    expected = generate(model, RAGGED).sequences
    more = {"input_ids": torch.cat([expected, expected[:, :5]], 1)}
    more["attention_mask"] = torch.cat([RAGGED["attention_mask"], torch.ones(4, more["input_ids"].shape[1] - WIDTH).long()], 1)
    second = generate(model, more).sequences
    with hf_fastattn.patch(model) as patch:
        cache = PreallocatedCache(model)
        assert torch.equal(generate(model, RAGGED, past_key_values=cache).sequences, expected)
        assert torch.equal(generate(model, more, past_key_values=cache).sequences, second)
        assert patch.skipped_tokens == SKIPPED // 2


def test_slots_of_padding_are_zero():
    """Attention multiplies them by zero, and an earlier call over the same buffers may have left NaN there."""
    model = tiny("mistral", "eager", sliding_window=16)
    with hf_fastattn.patch(model) as patch:
        cache = PreallocatedCache(model)
        for _ in range(2):
            cache.reset()
            for layer in cache.layers:
                for buffer in layer.buffers:
                    buffer.fill_(torch.nan)
            generate(model, RAGGED, past_key_values=cache, max_new_tokens=1)
        assert patch.skipped_tokens
    dead = RAGGED["attention_mask"] == 0
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            kept = dead[:, WIDTH - x.shape[2] :]
            assert not x.transpose(1, 2)[kept].any() and x.transpose(1, 2)[~kept].any()


def test_an_exception_leaves_the_cache_empty(monkeypatch):
    model = tiny("llama", "eager")
    expected = generate(model, RAGGED).sequences
    with hf_fastattn.patch(model):
        cache = PreallocatedCache(model)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(model.model.layers[1].mlp.act_fn, "forward", lambda x: 1 / 0)
            patch.setattr(unpadded, "code_of_user", lambda *_: None)
            generate(model, RAGGED, past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(model, RAGGED, past_key_values=cache).sequences, expected)


def test_steps_after_it_are_captured(captured):
    patch = compare(tiny("llama", "eager"), RAGGED)
    assert patch.captures and not patch.reasons and patch.skipped_tokens
