"""The forwards of generate() with several tokens, or with direct calls of the model: captured, with the tokens of eager."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import warnings
from unittest.mock import Mock

import fake_graph
import models
import pytest
import torch
from calls import At, events_of
from cases import pairs, slow_unless
from models import FAMILIES, PADDINGS, VOCAB, chat, family, message, prompts, sizes, tiny
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_fastattn
from hf_fastattn import PreallocatedCache, RollingCache, hf
from hf_fastattn.caches.layers import SLACK
from hf_fastattn.caches.storage import PreallocatedStorage
from hf_fastattn.kernels import reference
from hf_fastattn.model_shapes import SHAPES
from hf_fastattn.patches.calls.forwards import Forwards
from hf_fastattn.patches.calls.methods import METHODS, Generation
from hf_fastattn.patches.graphs import policy
from hf_fastattn.patches.graphs.graphs import DecodeGraphs
from hf_fastattn.patches.graphs.present import Present
from hf_fastattn.patches.graphs.snapshot import Last

pytestmark = pytest.mark.usefixtures("captured")
NEW = 16
generate = functools.partial(models.generate, max_new_tokens=NEW)


@pytest.fixture
def llama():
    return tiny("llama")


@pytest.fixture
def inputs():
    return prompts("no_padding", "cpu", rows=1)


@pytest.fixture
def assistant():
    assistant = tiny("llama", num_hidden_layers=1)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def same_as_unpatched(model, inputs, calls=2, **options):
    """The patch, after calls of generate() whose results are those without it."""
    expected = generate(model, inputs, **options)
    with hf_fastattn.patch(model) as patch:
        for _ in range(calls):
            torch.testing.assert_close(generate(model, inputs, **options), expected, rtol=1e-4, atol=1e-4)
    return patch


def check_all(model, texts, expected, options) -> None:
    """The tokens and logits of each text."""
    for text, want in zip(texts, expected, strict=True):
        got = generate(model, text, **options)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
        del got  # its cache, whose buffers the next call reuses


def first_token(model, inputs):
    """The cache after the prompt."""
    return generate(model, inputs, max_new_tokens=1, return_dict_in_generate=True).past_key_values


MODES = {
    "beams": {"num_beams": 3},
    "beam_sampling": {"num_beams": 2, "do_sample": True},
    "several_beams": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True, "eos_token_id": 9},
    "long_lookup": {"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 1},
    "sampled_lookup": {"prompt_lookup_num_tokens": 3, "do_sample": True, "top_k": 5, "max_matching_ngram_size": 1},
}
CASES = [("llama", mode, "left_padding") for mode in MODES]
CASES += [("qwen2", mode, "left_padding") for mode in ("beams", "long_lookup")]
CASES += [("llama", "long_lookup", "holes"), ("llama", "long_lookup", "no_padding"), ("opt", "long_lookup", "left_padding")]
CASES += [("mistral_window_below_prompt", mode, "left_padding") for mode in ("beams", "long_lookup")]


@pytest.mark.parametrize("name, mode, padding", CASES)
def test_captured_tokens_equal_eager(name, mode, padding):
    model, options = family(name, "cpu"), MODES[mode]
    model.set_attn_implementation("eager")
    patch = same_as_unpatched(model, prompts(padding, "cpu", rows=1 if "lookup" in mode else 2), **options)
    assert patch.captures and patch.replays > patch.captures and (patch.uncaptured, patch.reasons) == (0, [])
    if "beam" in mode:
        assert patch.captures == 1 and (mode == "several_beams" or patch.replays == 2 * (NEW - 1) - 1)


@pytest.mark.parametrize("mode", ["greedy", "beams", "long_lookup"])
def test_scores_and_logits_of_every_token(llama, mode):
    inputs = prompts("left_padding", "cpu", rows=1)
    options = {**MODES.get(mode, {}), "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = generate(llama, inputs, **options)
    with hf_fastattn.patch(llama) as patch:
        for _ in range(2):
            got = generate(llama, inputs, **options)
            assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
            for name in ("scores", "logits"):
                torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4)
        assert patch.captures and not patch.uncaptured


def test_beams_are_reordered_in_place(llama, inputs):
    cache = PreallocatedCache(llama)
    with hf_fastattn.patch(llama) as patch:
        expected = generate(llama, inputs, num_beams=3)
        found = [generate(llama, inputs, num_beams=3, past_key_values=cache)]
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        cache.reset()
        found.append(generate(llama, inputs, num_beams=3, past_key_values=cache))
        assert all(torch.equal(each, expected) for each in found)
        assert addresses == [layer.keys.data_ptr() for layer in cache.layers] and patch.captures == 2


def test_an_assistant_and_its_target(llama, assistant):
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"  # another number of drafts in each step
    inputs = prompts("left_padding", "cpu", rows=1)
    expected = generate(llama, inputs)
    with hf_fastattn.patch(llama) as target, hf_fastattn.patch(assistant) as drafts:
        for _ in range(2):
            assert torch.equal(generate(llama, inputs, assistant_model=assistant), expected)
        for patch in (target, drafts):
            assert patch.captures and patch.replays and (patch.uncaptured, patch.reasons) == (0, [])
        captures = target.captures
        assert torch.equal(generate(llama, inputs), expected)  # a graph of one token, which greedy decoding shares with nothing
        assert target.captures <= captures + 1


def compared(monkeypatch, model, assistant, inputs, **options) -> list[int]:
    """How often a call of generate() of `model` compares its assistant, and in how many rounds."""
    current, begin = Last.current, Generation._begin
    found, rounds = [], []
    monkeypatch.setattr(Last, "current", lambda self, of: found.append(of) or current(self, of))
    monkeypatch.setattr(Generation, "_begin", lambda self, of, *args: rounds.append(of) or begin(self, of, *args))
    with hf_fastattn.patch(model), hf_fastattn.patch(assistant):
        for _ in range(3):
            found.clear()
            rounds.clear()
            generate(model, inputs, assistant_model=assistant, max_new_tokens=6, **options)
    return [found.count(assistant), rounds.count(assistant)]


def test_rounds_of_an_assistant_do_not_compare_it_again(llama, assistant, inputs, monkeypatch):
    times, rounds = compared(monkeypatch, llama, assistant, inputs)
    assert times == 1 < rounds


def _own_candidates(model):
    own = model._get_candidate_generator
    model._get_candidate_generator = lambda *args, **kwargs: own(*args, **kwargs)


def _hook(model):
    model.model.norm.register_forward_hook(lambda module, args, output: output)


BETWEEN_ROUNDS = {  # a function of the model and its assistant that prepares a call or returns its options
    "processor": lambda *_: {"logits_processor": [lambda ids, scores: scores]},
    "criterion": lambda *_: {"stopping_criteria": [lambda ids, scores, **kwargs: torch.zeros(len(ids), dtype=torch.bool)]},
    "candidates": lambda model, assistant: _own_candidates(model),
    "hook of the model": lambda model, assistant: _hook(model),
    "hook of the assistant": lambda model, assistant: _hook(assistant),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_unless(["processor", "hook of the assistant"].__contains__, BETWEEN_ROUNDS))
def test_code_between_the_rounds_of_an_assistant_may_change_it(llama, assistant, inputs, name, monkeypatch):
    times, rounds = compared(monkeypatch, llama, assistant, inputs, **BETWEEN_ROUNDS[name](llama, assistant) or {})
    assert times >= rounds > 1


def test_a_round_compares_an_assistant_whose_python_ran_or_whose_table_changed(llama, assistant):
    call, drafts = Present(DecodeGraphs(), llama, print, always=False), DecodeGraphs()
    round_ = lambda: Present(drafts, assistant, print, always=False, outer=call)  # noqa: E731
    for _ in range(2):
        first = round_()
        first.compare()
    assert not round_().due
    assistant.model.embed_tokens.map = True  # as Transformers' loop does for another vocabulary
    assert round_().due
    assistant.model.embed_tokens.map = False
    for _ in range(2):
        first.compare()
    assert not round_().due
    first.forget()
    assert round_().due


def test_an_assistant_with_another_tokenizer(llama, inputs):
    tokenizers = pytest.importorskip("tokenizers")

    def tokenizer(size):
        words = tokenizers.models.WordLevel({f"w{(i + size) % size}": i for i in range(size)}, unk_token="w0")
        split = tokenizers.Tokenizer(words)
        split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="w0", unk_token="w0")

    assistant = tiny("llama", num_hidden_layers=1, vocab_size=120)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    both = {"assistant_model": assistant, "tokenizer": tokenizer(VOCAB), "assistant_tokenizer": tokenizer(120)}
    expected = generate(llama, inputs, max_new_tokens=8)
    with hf_fastattn.patch(llama) as patch, hf_fastattn.patch(assistant) as drafts:
        assert torch.equal(generate(llama, inputs, max_new_tokens=8, **both), expected)
        assert patch.replays and drafts.replays and not patch.reasons and not drafts.reasons


ASSISTED = {"lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}, "early_exit": {"assistant_early_exit": 1}}


CONTINUED = [PADDINGS[:2], [*ASSISTED, "assistant"], ["whole text", "new ids"]]


@pytest.mark.parametrize("padding, mode, given", slow_unless(pairs(*CONTINUED).__contains__, itertools.product(*CONTINUED)))
def test_an_assisted_generation_continues_a_cache(llama, assistant, padding, mode, given):
    """Transformers alone reads the cached tokens again."""
    options = ASSISTED.get(mode) or {"assistant_model": assistant}
    inputs = prompts(padding, "cpu", rows=1)
    ids = torch.cat([inputs["input_ids"], torch.arange(3, 8)[None]], 1)
    mask = torch.nn.functional.pad(inputs.get("attention_mask", torch.ones_like(ids[:, :-5])), (0, 5), value=1)
    expected = generate(llama, {"input_ids": ids, "attention_mask": mask})[:, -NEW:]
    with hf_fastattn.patch(llama) as patch:
        for _ in range(2):
            cache = first_token(llama, inputs)
            more = {"input_ids": ids if given == "whole text" else ids[:, 96:], "attention_mask": mask}
            if given == "new ids" and (padding != "no_padding" or hf.VERSION.startswith("5.17.")):  # which keeps a mask of ones
                with pytest.raises(ValueError, match=r"holds 96 tokens before them\. Pass the ids of the whole text"):
                    generate(llama, more, past_key_values=cache, **options)
                return
            assert torch.equal(generate(llama, more, past_key_values=cache, **options)[:, -NEW:], expected)
            assert cache.get_seq_length() == 96 + 5 + NEW - 1
        assert patch.captures and not patch.uncaptured


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
def test_an_assisted_generation_continues_a_cache_without_position_ids(padding):
    model = tiny("bart", d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, is_decoder=True)
    model.generation_config.forced_eos_token_id = None
    inputs = prompts(padding, "cpu", rows=1)
    with hf_fastattn.patch(model, graph=False):
        out = generate(model, inputs, max_new_tokens=6, return_dict_in_generate=True)
        expected = generate(model, inputs, max_new_tokens=6 + NEW)
        inputs["input_ids"] = out.sequences
        if padding != "no_padding":
            inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
        found = generate(model, inputs, past_key_values=out.past_key_values, **ASSISTED["lookup"])
        assert torch.equal(found, expected)


def test_a_model_that_is_its_own_assistant_and_drafts_from_hidden_states(llama, inputs):
    """Which do not continue a cache."""
    expected = generate(llama, inputs)
    with hf_fastattn.patch(llama) as patch:
        out = generate(llama, inputs, return_dict_in_generate=True)
        with pytest.raises(ValueError, match=rf"holds 111 tokens without them\. Leave out {hf.CACHE}"):
            generate(llama, {"input_ids": out.sequences}, past_key_values=out.past_key_values, use_mtp=True)
        del out
        for _ in range(2):
            assert torch.equal(generate(llama, inputs, assistant_model=llama), expected)
        assert patch.captures >= 2 and not patch.uncaptured
        assert patch._generation._thread.calls == []


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
def test_short_messages_after_a_cached_text(name, padding):
    model = family(name, "cpu")
    model.set_attn_implementation("eager")
    text = prompts(padding, "cpu", rows=2)
    messages = [text["input_ids"], *(message(tokens, 2) for tokens in (5, 7, 1, 20, 6, 17, 24, 8))]
    expected = chat(model, messages, text.get("attention_mask"), max_new_tokens=3)
    with hf_fastattn.patch(model) as patch:
        assert all(map(torch.equal, chat(model, messages, text.get("attention_mask"), max_new_tokens=3), expected))
        # Without padding that of 16 tokens reads longer messages in two parts.
        assert sizes(patch) == ({1, 16} if padding == "no_padding" else {1, 16, 64})
        assert not patch.uncaptured and not patch.reasons


def test_more_tokens_than_a_graph_has_and_pictures_are_read_from_python(llama, monkeypatch, inputs):
    monkeypatch.setattr(policy, "NEAREST", (1, 64))
    with hf_fastattn.patch(llama) as patch:
        cache = first_token(llama, inputs)
        for more in (64, 65, 64, 64):
            ids = torch.cat([inputs["input_ids"], torch.full((1, more), 5)], 1)
            generate(llama, {"input_ids": ids}, past_key_values=cache, max_new_tokens=1)
            cache.crop(96 - cache.get_seq_length())
        assert [entry.tokens for entry in patch._graphs.entries[cache.storage]] == [64] and patch.captures == 1
        reads = Forwards(patch._graphs, llama, llama, print)
        given = {"input_ids": ids[:, :4], "past_key_values": cache, "position_ids": ids[:, :4]}
        assert reads._can_be_steps(cache, ids[:, :4], given)
        assert not reads._can_be_steps(cache, ids[:, :4], {**given, "pixel_values": torch.zeros(1, 3, 8, 8)})
        assert not reads._can_be_steps(cache, ids[:, :4], {**given, "attention_mask": torch.zeros(1, 1, 4, 100)})


def test_a_step_near_the_end_of_the_buffers(llama, inputs):
    """The padding of a step has no slots there: nothing is written past the end, and the last tokens do not change."""
    options = {"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 1}
    expected = generate(llama, inputs, **options)
    with hf_fastattn.patch(llama) as patch:
        for capacity in (96 + NEW + 8, 96 + NEW + 10):
            cache = PreallocatedCache(llama, capacity, grow=False)
            assert torch.equal(generate(llama, inputs, past_key_values=cache, **options), expected)
        assert patch.captures and not patch.uncaptured


def test_a_rolling_cache_captures_beams_and_says_why_not_more(llama):
    inputs = {"input_ids": torch.full((1, 8), 3)}
    with hf_fastattn.patch(llama, "streaming", window=64, sinks=2) as patch:
        expected = generate(llama, inputs, num_beams=3)
        assert torch.equal(generate(llama, inputs, num_beams=3), expected)
        assert patch.captures == 1 and not patch.reasons
        with pytest.warns(match="steps over a RollingCache are captured for one"):
            generate(llama, inputs, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
        cache = first_token(llama, inputs)
        assert isinstance(cache, RollingCache)
        uncaptured = patch.uncaptured
        for _ in range(2):  # a message is read like a prompt
            ids = torch.full((1, cache.get_seq_length() + 3), 3)
            generate(llama, {"input_ids": ids}, past_key_values=cache, max_new_tokens=2)
        assert patch.uncaptured == uncaptured and len(patch.reasons) == 1


def test_only_the_forwards_of_generate_are_captured(llama, inputs):
    found = []
    with hf_fastattn.patch(llama) as patch, torch.no_grad():
        cache = PreallocatedCache(llama)
        generate(llama, inputs, past_key_values=cache)
        counts = patch.captures, patch.replays
        ids = inputs["input_ids"][:, :1]
        one = llama(input_ids=ids, past_key_values=cache).logits
        assert (patch.captures, patch.replays) == counts and patch._generation._thread.calls == []

        def forward():
            with torch.no_grad():
                return llama(input_ids=ids, past_key_values=PreallocatedCache(llama)).logits

        def run(input_ids, scores):
            """Runs the model in another thread, and in this one with arguments by position, as guidance does."""
            thread = threading.Thread(target=lambda: found.append(forward()))
            thread.start()
            thread.join()
            found.append(llama(ids, use_cache=False).logits)
            return scores

        expected = forward()
        assert one.shape == expected.shape
        generate(llama, inputs, logits_processor=[run], max_new_tokens=4)
        assert len(found) == 8
        for logits in found:
            torch.testing.assert_close(logits, expected)
        assert patch.replays == counts[1] + 3 and not patch.reasons


def test_the_model_is_called_as_ever_outside_of_generate(llama):
    """A copy of the model's attributes, as DataParallel makes, must not run the model that it was copied from."""
    own = dict(vars(llama))
    with hf_fastattn.patch(llama) as patch:
        ours = [name for name, value in vars(llama).items() if getattr(value, "__self__", None) is patch._generation]
        assert set(ours) == set(METHODS)
        before = dict(vars(llama))
        during = []
        look = [lambda ids, scores: during.append(set(vars(llama))) or scores]
        generate(llama, {"input_ids": torch.full((1, 4), 3)}, logits_processor=look, max_new_tokens=3)
        assert vars(llama) == before and during == 3 * [set(before) | {hf.CALL}]
    assert vars(llama).keys() == own.keys()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_the_call(llama, error, inputs):
    fail = At(4, Mock(side_effect=error))
    with hf_fastattn.patch(llama) as patch, torch.no_grad():
        expected = generate(llama, inputs, **MODES["long_lookup"])
        with pytest.raises(error):
            generate(llama, inputs, **MODES["long_lookup"], logits_processor=[fail])
        assert patch._generation._thread.calls == []
        replays = patch.replays
        llama(input_ids=inputs["input_ids"][:, :1])
        assert patch.replays == replays
        assert torch.equal(generate(llama, inputs, **MODES["long_lookup"]), expected)


def all_logits(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, return_dict=None, **cache):
    """The forward of a model without logits_to_keep."""
    return LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, use_cache=use_cache, **cache)


def last_logits(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
    """Of one that returns the logits of the last token, whatever logits_to_keep is."""
    out = all_logits(self, input_ids, attention_mask, position_ids, use_cache, **{hf.CACHE: hf.cache_in(kwargs)})
    return CausalLMOutputWithPast(logits=out.logits[:, -1:], **{hf.CACHE: out[hf.CACHE]})


def remembering(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
    """Sets an attribute when it reads the end of a prompt, as vision models do, which its steps read."""
    if input_ids.shape[1] == 16:
        self.scale = float(input_ids[0, 0])
    out = LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **kwargs)
    out.logits = out.logits + self.scale * torch.linspace(-1, 1, VOCAB)
    return out


def reading(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
    """Reads a value on the host if there are many tokens, as the experts of a mixture do."""
    if input_ids.shape[1] > 64 and torch.is_tensor(hf.cache_in(kwargs).get_seq_length()):
        input_ids.sum().item()
    return LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **kwargs)


def typed_tokens(self, *args, **kwargs):
    inputs = LlamaForCausalLM.prepare_inputs_for_generation(self, *args, **kwargs)
    return {**inputs, "mm_token_type_ids": torch.zeros_like(inputs["input_ids"])}


def of_a_subclass(model, method, name="forward"):
    """The model as one of a class that has this method."""
    model.__class__ = type("Own", (LlamaForCausalLM,), {name: method})
    return model


@pytest.mark.parametrize("forward", [all_logits, last_logits])
def test_which_logits_a_model_returns(llama, inputs, forward):
    of_a_subclass(llama, forward)
    messages = [inputs["input_ids"], *[torch.arange(5, 18)[None]] * 4]
    expected = chat(llama, messages, max_new_tokens=3)
    with hf_fastattn.patch(llama, keep_graphs=True) as patch, warnings.catch_warnings(record=True, action="always") as said:
        assert all(map(torch.equal, chat(llama, messages, max_new_tokens=3), expected))
        if forward is last_logits:
            assert patch.captures == 1 and patch.reasons == ["it returns logits of 1 of 16 tokens"] and said
        else:
            assert patch.captures == 2 and not patch.reasons


def looped(steps, found, **options):
    """A custom loop: `steps` greedy forwards, and of each found(output)."""

    def loop(model, input_ids, **kwargs):
        cache, results = hf.cache_in(kwargs), []
        for _ in range(steps):
            positions = torch.arange(cache.get_seq_length() + input_ids.shape[1])[None, -input_ids.shape[1] :]
            out = model(input_ids=input_ids, position_ids=positions, past_key_values=cache, **options)
            results.append(found(out))
            input_ids = out[0][:, -1:].argmax(-1) if isinstance(out, tuple) else out.logits[:, -1:].argmax(-1)
        return torch.cat(results, 1)

    return loop


def test_outputs_that_are_tuples_and_other_tensors_of_the_output_of_a_step(llama, inputs):
    """The output of Moshi has its last hidden states, which its second decoder reads."""
    short = prompts("no_padding", "cpu", rows=1, length=24)
    with pytest.warns(match="its output is a tuple"):
        assert not same_as_unpatched(llama, short, 1, custom_generate=looped(4, lambda out: out[0], return_dict=False)).captures
    model = tiny("moshi", audio_vocab_size=64, ffn_dim=64, num_codebooks=2, depth_decoder_config=None, sliding_window=4096)
    patch = same_as_unpatched(model, inputs, 1, custom_generate=looped(6, lambda out: out.last_hidden_state[:, -1:]))
    assert (patch.captures, patch.replays, patch.reasons) == (1, 4, [])


def test_a_loop_may_drop_tokens_of_the_prompt(llama):
    """The cache then holds fewer tokens than the mask of the call has columns."""

    def loop(model, input_ids, **kwargs):
        past_key_values = hf.cache_in(kwargs)
        found, ids, attention_mask = [], input_ids, kwargs["attention_mask"]
        for step in range(6):
            if step == 1:
                past_key_values.crop(9 - past_key_values.get_seq_length())
            length = past_key_values.get_seq_length() + ids.shape[1]
            mask = torch.nn.functional.pad(attention_mask[:, :length], (0, max(0, length - attention_mask.shape[1])), value=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            logits = model(**given, past_key_values=past_key_values).logits[:, -1:]
            found.append(logits)
            ids = logits.argmax(-1)
        return torch.cat(found, 1)

    inputs = prompts("left", "cpu", rows=1, length=24)
    patch = same_as_unpatched(llama, inputs, 1, custom_generate=loop)
    assert patch.captures == 1 and not patch.reasons


def test_arguments_that_cannot_be_padded_are_said(llama):
    inputs = prompts("left_padding", "cpu", rows=1)
    expected = generate(llama, inputs, **MODES["long_lookup"])
    of_a_subclass(llama, typed_tokens, "prepare_inputs_for_generation")
    with hf_fastattn.patch(llama) as patch, pytest.warns(match="its argument mm_token_type_ids cannot be padded"):
        assert torch.equal(generate(llama, inputs, **MODES["long_lookup"]), expected)
        assert torch.equal(generate(llama, inputs), expected) and patch.captures == 1


def test_positions_of_another_number_of_tokens_are_not_padded(llama):
    ids = prompts("no_padding", "cpu", rows=1, length=24)["input_ids"]
    with hf_fastattn.patch(llama) as patch:
        for _ in range(3):
            generate(llama, {"input_ids": ids})
        assert patch.captures == 2  # also of the prompt
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must match the size of tensor"):
                generate(llama, {"input_ids": ids, "position_ids": torch.arange(20)[None]})


def test_what_the_end_of_a_prompt_changes_is_seen_by_the_steps_that_follow(llama):
    of_a_subclass(llama, remembering).scale = 2.0
    ids = prompts("no_padding", "cpu", rows=1)["input_ids"][:, :76]
    texts = [ids.clone() for _ in range(3)]
    for scale, text in enumerate(texts):
        text[0, 60] = 4 * scale
    calls = [texts[index] for index in (0, 1, 0, 2)]
    options = {"max_new_tokens": 5, "prefill_chunk_size": 20}
    expected = [generate(llama, {"input_ids": text}, **options) for text in calls]
    llama.scale = 2.0
    with hf_fastattn.patch(llama) as patch, warnings.catch_warnings(action="ignore"):
        for text, want in zip(calls, expected, strict=True):
            assert torch.equal(generate(llama, {"input_ids": text}, **options), want)
        assert patch.captures


def test_graphs_of_many_lengths_are_bounded(llama, inputs):
    with hf_fastattn.patch(llama) as patch:
        cache = first_token(llama, inputs)
        for more in range(1, 65, 3):
            ids = torch.cat([inputs["input_ids"], torch.full((1, more), 5)], 1)
            generate(llama, {"input_ids": ids}, past_key_values=cache, max_new_tokens=2)
            cache.crop(96 - cache.get_seq_length())
        assert {entry.tokens for entry in patch._graphs.entries[cache.storage]} <= set(policy.NEAREST)
        assert patch.captures <= 7


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("padding", PADDINGS)
def test_prompts_of_many_lengths_are_read_by_one_graph(name, padding):
    model, lengths = family(name, "cpu"), (128, 70, 90, 128, 101)
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    texts = [prompts(padding, "cpu", rows=2, length=length) for length in lengths]
    expected = [generate(model, text, **options) for text in texts]
    with hf_fastattn.patch(model) as patch:
        check_all(model, texts, expected, options)
        assert sizes(patch) == {1, 128} and patch.captures == 2 and not patch.reasons
        assert patch.replays == 3 + 4  # two prompts from Python, then three replayed; of the first step a rehearsal


@pytest.mark.parametrize("keep", [0, 5, 200, -5, -200])
def test_a_graph_returns_the_logits_that_a_call_keeps(llama, keep):
    """A custom loop may keep any number of them; after a negative number all but the first."""
    inputs = prompts("no_padding", "cpu", rows=2)
    patch = same_as_unpatched(llama, inputs, 3, custom_generate=looped(1, lambda out: out.logits, logits_to_keep=keep))
    assert patch.replays == 1 and not patch.reasons


def test_prompts_of_other_rows_and_dtypes_get_buffers_first(llama):
    with hf_fastattn.patch(llama) as patch:
        cache, replays = PreallocatedCache(llama), []
        for rows in (1, 2, 2, 2, 1, 1, 1):
            inputs = prompts("no_padding", "cpu", rows=rows)
            expected = llama(**inputs, use_cache=False).logits[:, -1:].argmax(-1)
            cache.reset()
            found = generate(llama, inputs, past_key_values=cache, max_new_tokens=1)
            assert torch.equal(found[:, -1:], expected)
            replays.append(patch.replays)
        assert replays == [0, 0, 0, 1, 1, 2, 3]
        llama.bfloat16()
        for _ in range(3):
            cache.reset()
            found = generate(llama, inputs, past_key_values=cache, max_new_tokens=1)
            assert torch.equal(found[:, -1:], llama(**inputs, use_cache=False).logits[:, -1:].argmax(-1))
            assert cache.layers[0].keys.dtype == torch.bfloat16 and not patch.reasons


def test_prompts_in_a_cache_that_another_model_has_used(llama, inputs):
    other = tiny("llama", num_key_value_heads=4)
    expected = [generate(model, inputs, max_new_tokens=1) for model in (llama, other)]
    with hf_fastattn.patch(llama) as patch, hf_fastattn.patch(other):
        cache = PreallocatedCache(llama)
        for index in (0, 0, 1, 0):
            cache.reset()
            assert torch.equal(generate((llama, other)[index], inputs, past_key_values=cache, max_new_tokens=1), expected[index])
        assert cache.layers[0].keys.shape[1] == 2 and not patch.reasons
        assert any("holds K and V of 4 KV heads" in (entry.refused or "") for entry in patch._graphs.entries[cache.storage])


def test_all_rows_of_a_graph_have_a_bounded_number_of_tokens():
    full, window = hf.Kind("full"), hf.Kind("window", 64)
    found = {rows: policy.most_tokens(PreallocatedStorage([full], 256), rows) for rows in (1, 2, 3, 8, 9, 200)}
    assert found == {1: 512, 2: 256, 3: 128, 8: 64, 9: 64, 200: 64}
    long = [policy.most_tokens(PreallocatedStorage(kinds, 256), 1, 2000) for kinds in ([full], [full, window])]
    assert long == [1920, SLACK]  # a sliding layer has room for no more


def test_prompts_whose_launches_take_longer_than_their_kernels_are_captured(monkeypatch):
    found = {}
    for name, ranks in (("1b", 1), ("8b", 1), ("8b", 2), ("8b", 4), ("70b", 1), ("70b", 4)):
        model_type, config = SHAPES[name]
        model = hf.model_on_meta(hf.make_config(model_type, **config), torch.bfloat16)
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        monkeypatch.setattr(type(model), "_tp_size", ranks, raising=False)
        for arch in (9, 8):
            monkeypatch.setattr(policy.gpu, "arch", lambda device, arch=arch: 10 * arch)
            found[name, ranks, arch] = policy.launch_bound(model)
    assert found["1b", 1, 9] == found["8b", 4, 9] == 2048 and found["8b", 4, 8] == found["8b", 4, 9]
    assert 800 < found["8b", 1, 9] < 1200 and found["8b", 1, 8] == found["70b", 1, 9] == 512 < found["70b", 4, 9]


@pytest.mark.parametrize("length", slow_unless((513).__eq__, [513, 700, 1000]))
def test_a_long_prompt_and_message_of_a_graph(length, monkeypatch):
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 1 << 30)  # in chunks it looks for the visible keys on the host
    llama = tiny("llama", max_position_embeddings=4096)
    ids = torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(1))
    cut = length // 3
    want = generate(llama, {"input_ids": ids}, max_new_tokens=4)
    with hf_fastattn.patch(llama) as patch:
        cost, _ = patch._graphs.estimate(llama)
        patch._graphs.costs = patch._graphs.costs[0], cost, 2048
        for _ in range(4):
            assert torch.equal(generate(llama, {"input_ids": ids}, max_new_tokens=4), want)
        assert sizes(patch) == {1, 768 if length < 768 else 1024}  # the largest that the buffers hold
        for _ in range(3):  # the rest of the text as a message
            cache = first_token(llama, {"input_ids": ids[:, :cut]})
            cache.crop(cut - cache.get_seq_length())
            assert torch.equal(generate(llama, {"input_ids": ids}, past_key_values=cache, max_new_tokens=4), want)
    assert not patch.reasons


def test_a_prompt_whose_positions_go_back_is_one_text_in_a_graph_too(llama):
    ids = prompts("no_padding", "cpu", rows=1)["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    texts = [{"input_ids": ids, "position_ids": at} for at in (positions, positions % 90, positions // 2)]
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    want = [generate(llama, text, **options).logits[0] for text in texts]
    assert not torch.allclose(want[0], want[1], atol=1e-2)
    with hf_fastattn.patch(llama) as patch:
        for text, logits in (*zip(texts, want, strict=True),) * 2:
            torch.testing.assert_close(generate(llama, text, **options).logits[0], logits, rtol=1e-4, atol=1e-4)
        assert (patch.captures, patch.replays) == (1, 4)


def test_a_prompt_that_cannot_be_captured_is_read_from_python_and_not_tried_again(llama, monkeypatch, inputs):
    of_a_subclass(llama, reading)
    rehearsals, surveys, rehearse, current = [], [], fake_graph.RecordedGraph.rehearse, Last.current
    monkeypatch.setattr(fake_graph.RecordedGraph, "rehearse", lambda *args: rehearsals.append(1) or rehearse(*args))
    monkeypatch.setattr(Last, "current", lambda *args: surveys.append(1) or current(*args))
    with hf_fastattn.patch(llama, keep_graphs=True) as patch, warnings.catch_warnings(action="error"):
        expected = generate(llama, inputs)
        for _ in range(4):
            surveys.clear()
            assert torch.equal(generate(llama, inputs), expected)
        assert len(rehearsals) == 2 and len(surveys) == 1 and patch.captures == 1 and (patch.uncaptured, patch.reasons) == (0, [])


def test_the_python_of_a_call_hardly_grows_with_the_number_of_layers(monkeypatch, inputs):
    found = []
    monkeypatch.setattr(fake_graph.RecordedGraph, "replay", lambda self: None)  # which runs each operation from Python
    for layers in (2, 6):
        model = tiny("llama", num_hidden_layers=layers)
        with hf_fastattn.patch(model) as patch, torch.no_grad():
            for _ in range(4):
                generate(model, inputs, max_new_tokens=2)
            events = events_of(lambda model=model: generate(model, inputs, max_new_tokens=2))
            found.append(sum(event == "call" for event, _ in events))
            assert patch.captures == 2 and patch.replays == 7
    assert found[1] - found[0] <= 4 * 20


def test_a_change_of_the_model_counts_once_however_many_graphs_it_ends(llama, inputs):
    with hf_fastattn.patch(llama) as patch:
        for _ in range(3):
            generate(llama, inputs, **MODES["long_lookup"])
            for layer in llama.model.layers:
                layer.self_attn.scaling *= 0.9
        assert patch.captures > 3 and not patch.reasons


BIDIRECTIONAL = [
    ("llama", {"is_causal": False}),
    ("mistral", {"is_causal": False, "sliding_window": 16}),
    ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 16, "sliding_window": 16}),
]


@pytest.mark.parametrize("kind, own", slow_unless(BIDIRECTIONAL[2].__eq__, BIDIRECTIONAL))
def test_prompts_whose_tokens_see_later_ones_are_not_read_by_a_graph(kind, own):
    model, options = tiny(kind, **own), {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    texts = [prompts("no_padding", "cpu", rows=2, length=length) for length in (90, 70, 70, 80)]
    expected = [generate(model, text, **options) for text in texts]
    with hf_fastattn.patch(model) as patch:
        check_all(model, texts, expected, options)
        assert patch.captures == 1 and not patch.reasons
        with pytest.warns(match="tokens may see later ones"):
            text, options = prompts("no_padding", "cpu", rows=1), MODES["long_lookup"]
            found = generate(model, text, **options)
    assert torch.equal(found, generate(model, text, **options))


def test_no_rows_end_with_the_error_of_the_model_and_generate_of_the_class_is_said(llama, inputs):
    ids = torch.zeros(0, 5, dtype=torch.long)
    with pytest.raises(RuntimeError) as expected:
        llama.generate(ids, max_new_tokens=3)
    with hf_fastattn.patch(llama, "lean") as patch:
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            llama.generate(ids, max_new_tokens=3)
        with pytest.warns(match="generate\\(\\) of the class was called"):
            LlamaForCausalLM.generate(llama, **inputs, max_new_tokens=3, do_sample=False)
        assert not patch.captures


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_patched_model_under_prompt_learning_runs_uncaptured(llama, kind, patched_first, inputs):
    peft = pytest.importorskip("peft")
    if patched_first:
        hf_fastattn.patch(llama, "lean")
    model = peft.get_peft_model(llama, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    if not patched_first:
        hf_fastattn.patch(llama, "lean")
    found = generate(model, inputs)
    hf_fastattn.unpatch(llama)
    assert torch.equal(found, generate(model, inputs))


# A graph is replayed before the model is compared if that does no harm: its memory exists, and its table has not changed.


# Each lets the model read its table by ids that the graph's own cannot serve. All old memory stays alive.
TABLES = {
    "a larger vocabulary": lambda m: m.set_input_embeddings(nn.Embedding(VOCAB + 8, 64)),
    "a larger weight": lambda m: setattr(m.model.embed_tokens, "weight", nn.Parameter(torch.randn(VOCAB + 8, 64))),
    "a part of the table": lambda m: setattr(m.model.embed_tokens.weight, "data", m.model.embed_tokens.weight.data[:60]),
    "a hook before the embedding": lambda m: m.model.embed_tokens.register_forward_pre_hook(lambda module, args: args),
    "a forward of the embedding": lambda m: setattr(m.model.embed_tokens, "forward", lambda ids: torch.zeros(*ids.shape, 64)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_change_of_the_table_is_compared_before_a_replay(llama, name):
    kept = llama.model.embed_tokens, llama.model.embed_tokens.weight.untyped_storage()
    present = Present(DecodeGraphs(), llama, print, always=True)
    assert not present.may_wait()
    present.compare()
    assert present.may_wait()
    assert {part.data_ptr() for part in present.memory} >= {t.data_ptr() for t in (*llama.parameters(), *llama.buffers())}
    TABLES[name](llama)
    assert not present.may_wait() and kept


def test_the_first_step_of_a_call_replays_before_it_compares_if_its_memory_is_there(llama):
    present = Present(DecodeGraphs(), llama, print, always=False)
    present.compare()
    assert not present.may_wait() and not present.due
    present.forget()
    assert present.may_wait()
    llama.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 64))  # the memory of the graph may be gone
    present.forget()
    assert not present.may_wait()


def _resize(model, rows):
    """New modules, as the graphs of these tests hold the tensors that `resize_token_embeddings` gives other memory."""
    draw = torch.Generator().manual_seed(1)
    weights = model.model.embed_tokens.weight, model.lm_head.weight
    ids, logits = (torch.cat([weight.detach(), torch.randn(8, 64, generator=draw)]) for weight in weights)
    model.set_input_embeddings(nn.Embedding.from_pretrained(ids[:rows].clone()))
    model.lm_head = nn.Linear(64, rows, bias=False)
    model.lm_head.weight = nn.Parameter(logits[:rows].clone())
    model.config.vocab_size = rows


@pytest.mark.parametrize("rows", [VOCAB + 8, 100], ids=["larger", "smaller"])
@pytest.mark.parametrize("family, backend", [("llama", "lean"), ("mistral", "lean"), ("llama", "streaming")])
def test_another_vocabulary_between_two_calls_is_seen(rows, family, backend):
    """The graphs of these tests keep the memory that they read: only a change of a table is compared first."""
    options = {"window": 60} if backend == "streaming" else {}
    first = prompts("no_padding", "cpu", rows=1)
    found = []
    for graph in (False, True):
        model = tiny(family, "sdpa")
        kept = model.model.embed_tokens, model.model.embed_tokens.weight.untyped_storage()
        with hf_fastattn.patch(model, backend, graph=graph, **options), torch.no_grad():
            for _ in range(4):
                generate(model, first, max_new_tokens=4)
            _resize(model, rows)
            ids = first["input_ids"] % model.config.vocab_size
            if rows > VOCAB:
                ids[0, 5:13] = torch.arange(VOCAB, VOCAB + 8)
            found.append(torch.stack([generate(model, {"input_ids": ids}, max_new_tokens=4) for _ in range(3)]))
        assert kept
    assert torch.equal(*found)


def test_a_larger_vocabulary_between_two_steps(llama):
    """A replay before the comparison would read the old table by the new id."""
    inputs, found = prompts("no_padding", "cpu", rows=1), []

    def resize(ids, scores):
        if ids.shape[1] == inputs["input_ids"].shape[1] + 3:
            _resize(model, VOCAB + 8)
        if scores.shape[1] < model.config.vocab_size:
            scores = nn.functional.pad(scores, (0, model.config.vocab_size - scores.shape[1]))
            scores[:, -1] = 1e4
        return scores

    for graph in (False, True):
        model = tiny("llama", "sdpa")
        with hf_fastattn.patch(model, graph=graph):
            for _ in range(2):
                generate(model, inputs, max_new_tokens=4)
            found.append(generate(model, inputs, logits_processor=[resize], max_new_tokens=8))
        assert VOCAB + 7 in found[-1]
    assert torch.equal(*found)
