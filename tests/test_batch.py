"""generate_batch() of a patched model: every text has the tokens that generate() of the unpatched model gives it alone."""

from __future__ import annotations

import copy
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import fake_graph
import pytest
import tokenizers
import torch
from calls import At, events_of
from cases import slow_unless
from models import FAMILIES, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.attention import ragged as ragged_rows
from hf_fastattn.batch import BatchError, groups, job
from hf_fastattn.batch.groups import groups_of
from hf_fastattn.batch.requests import Row
from hf_fastattn.caches import paged
from hf_fastattn.caches.pages import Pages
from hf_fastattn.hf.version import number_of

GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "num_key_value_heads": 4}
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
MORE = {
    "cohere": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE,
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "granite": {},
    "gptj": GPTJ,
    "gpt2": GPT2,
    "gpt_neox": {"num_key_value_heads": 4},
    "stablelm": {},
    "phi": {"num_key_value_heads": 4},
    "smollm3": {},
    "glm4": {"head_dim": 16},
    "nemotron": {},
    "biogpt": {"num_key_value_heads": 4},
    "starcoder2": {},
}
ALL = FAMILIES | {name: (name, own) for name, own in MORE.items()}
NEW = 8


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 120, (length,), generator=generator).tolist() for length in lengths]


def ragged() -> list[list[int]]:
    """Prompts that end in, at and behind the ends of pages, of which some begin alike, up to the last token of a page too."""
    found = prompts(3, 40, 17, 1, 16, 15, 33)
    start = found[1] + found[2]
    return [*found, [*start, 5], [*start, 9, 9], found[1], [*found[1][:31], 7]]


def options(**more) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more})


def sizes(**more) -> ContinuousBatchingConfig:
    """Small pages, chunks of prompts, and fewer rows than prompts."""
    page = more.pop("page", 16)
    name = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    return ContinuousBatchingConfig(**{name: page, "max_batch_tokens": 24, "max_requests_per_batch": 5, **more})


def alone(model, texts, config=None, **more) -> list[list[int]]:
    """The tokens of generate() for each text."""
    config = config or options()
    found = []
    for ids in texts:
        inputs = torch.tensor([ids])
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=copy.deepcopy(config), **more)
        found += out[:, len(ids) :].tolist()
    return found


@pytest.fixture
def seen(monkeypatch):
    """The loops of the calls of a test, whose pages are all free at the end."""
    made = []
    own = job.loop_of
    monkeypatch.setattr(job, "loop_of", lambda *given: made.append(own(*given)) or made[-1])
    yield made
    assert all(each.pages.in_use == 0 for each in made)


def tokens(results) -> list[list[int]]:
    return [result.generated_tokens for result in results.values()]


def eager(family, **more):
    model_type, own = ALL[family]
    if family == "gptj" and number_of(hf.VERSION) < (5, 24):
        pytest.skip("its code computes attention itself, and cannot be patched")
    return tiny(model_type, "eager", **own | more)


@pytest.mark.parametrize("family", slow_unless(["llama", "gemma2", "opt", "gptj"].__contains__, ALL))
def test_families(family, seen):
    model, texts = eager(family), ragged()
    expected = alone(model, texts)
    with hf_fastattn.patch(model):
        for config in (sizes(), sizes(page=64, max_batch_tokens=4096, max_requests_per_batch=64)):
            assert tokens(model.generate_batch(texts, options(), config)) == expected
    assert [each.shared > 0 for each in seen] == [True, False]


def test_steps_are_graphs(captured, seen):
    model, texts = eager("gemma2"), ragged()[:4]
    expected = alone(model, texts)
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            assert tokens(model.generate_batch(texts, options(), sizes())) == expected
        captures = patch.captures
        assert 0 < captures <= 3 and patch.uncaptured == 0 and patch.replays > seen[0].steps
        assert tokens(model.generate_batch(texts, options(), sizes())) == expected
        assert patch.captures == captures  # the pages and their graphs are kept


def test_prompts_are_read_before_rows_are_decoded(seen):
    model, texts = tiny("llama", "eager"), prompts(8, 9, 10, 11)
    with hf_fastattn.patch(model):
        found = model.generate_batch(texts, options(), sizes(max_batch_tokens=12))
        assert tokens(found) == alone(tiny("llama", "eager"), texts)
    assert seen[0].steps == NEW - 1  # each of all rows


def test_few_pages(seen):
    model, texts = tiny("llama", "eager"), prompts(15, 14, 13, 12)
    expected = alone(model, texts, options(max_new_tokens=30))
    with hf_fastattn.patch(model):
        config = sizes(num_blocks=5, max_batch_tokens=64)
        assert tokens(model.generate_batch(texts, options(max_new_tokens=30), config)) == expected
    assert seen[0].preempted > 0


@pytest.mark.parametrize("pages", [None, 7])
def test_samples(pages, seen):
    model, texts = tiny("llama", "eager"), prompts(20, 16)
    config = options(do_sample=True, top_k=1, num_return_sequences=3)
    expected = alone(model, texts, config)
    with hf_fastattn.patch(model):
        found = model.generate_batch(texts, config, sizes(num_blocks=pages, max_requests_per_batch=2 if pages else 8))
    assert tokens(found) == expected
    assert list(found) == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0", "req_1__child#1", "req_1"]


def test_samples_differ_and_no_prompts_and_one_token():
    model = tiny("llama", "eager")
    expected = alone(model, [[7]])
    with hf_fastattn.patch(model):
        assert model.generate_batch([], options()) == {}
        assert tokens(model.generate_batch([[7]], options())) == expected
        torch.manual_seed(0)
        config = options(do_sample=True, num_return_sequences=4, temperature=3.0)
        assert len({tuple(each) for each in tokens(model.generate_batch(prompts(20), config))}) == 4


class Banned(LogitsProcessor):
    """Bans every token that the text has had, and the number of them."""

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids, -torch.inf)
        scores[:, input_ids.shape[1] % scores.shape[1]] = -torch.inf
        return scores


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 2, "min_length": 100},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(5, 60)]},
    "suppress_tokens": {"suppress_tokens": [*range(5, 60)]},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
}


CASES = slow_unless(["repetition_penalty", "forced_eos_token_id", "of the caller"].__contains__, [*PROCESSED, "of the caller"])


@pytest.mark.parametrize("case", CASES)
def test_processors_read_the_ids_of_their_row(case, seen):
    model, texts = tiny("llama", "eager"), ragged()
    plain = alone(model, texts)
    config = options(eos_token_id=[plain[0][2], plain[1][4]], **PROCESSED.get(case, {}))
    more = {} if case in PROCESSED else {"logits_processor": [Banned()]}
    expected = alone(model, texts, config, **more)
    with hf_fastattn.patch(model):
        found = tokens(model.generate_batch(texts, config, sizes(), **more))
        assert tokens(model.generate_batch(texts, config, sizes(num_blocks=12), **more)) == found
    assert found == expected and found != plain


@pytest.mark.parametrize("length, pages", [(40, 3 + 3 * 2), (3, 4 * 1)])
def test_pages_of_samples_count_their_prompt_once(length, pages, seen):
    """The samples of a job have room at once, with the pages that they do not share, and without sharing with all."""
    model, config = tiny("llama"), options(do_sample=True, num_return_sequences=4, max_new_tokens=8)
    texts = job.texts_of([[5] * length], [8], 4)
    assert [text.tokens for text in texts] == [length + 8] * 4
    found = {}
    for share in (True, False):
        asked, kinds = job.asked_of(model, config, {}), hf.layer_kinds(model.config)
        found[share] = job.settings_of(model, asked, texts, sizes(allow_block_sharing=share), kinds).pages[0] - 1
    assert found == {True: pages, False: 4 * -(-(length + 8) // 16)}
    with hf_fastattn.patch(model):
        assert len(model.generate_batch([[5] * length], config, sizes())) == 4
    assert [loop.preempted for loop in seen] == [0]


def test_ends(seen):
    model, texts = tiny("llama", "eager"), ragged()
    plain = alone(model, texts)
    ends = [plain[0][0], plain[1][3]]  # the first token of a text ends it
    expected = alone(model, texts, options(eos_token_id=ends))
    of_tensor = options(eos_token_id=torch.tensor(ends))
    limits = [1, 2, 3, NEW] * 3
    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(eos_token_id=ends), sizes())) == expected
        assert tokens(model.generate_batch(texts, of_tensor, sizes())) == expected
        found = model.generate_batch(texts, options(), sizes(), max_new_tokens=limits[: len(texts)])
    assert tokens(found) == [each[:limit] for each, limit in zip(plain, limits, strict=False)]
    assert all(result.is_finished() and result.error is None for result in found.values())


def test_log_probabilities_and_times():
    model, texts = tiny("llama", "eager"), prompts(5, 20)
    with hf_fastattn.patch(model):
        found = model.generate_batch(texts, options(), sizes(return_logprobs=True), record_timestamps=True)
    for ids, result in zip(texts, found.values(), strict=True):
        logits = model(torch.tensor([ids + result.generated_tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=1e-4)
        assert len(result.timestamps) == NEW and result.prompt_ids == ids


def test_requests_that_fail(seen):
    """Two are cancelled, and one is longer than all pages: the others have their tokens."""
    model, texts = tiny("llama", "eager"), ragged()
    expected, long = alone(model, texts), prompts(5, 90, 20)
    cancel = At(3, lambda: [seen[-1].cancel(request) for request in ("req_0", "req_10")])
    says = "req_1: A text of 90 tokens needs 6 pages of 16 tokens, and the pool has 4"
    with hf_fastattn.patch(model):
        with pytest.raises(BatchError, match=r"2 of 11 requests have failed .*cancelled") as caught:
            model.generate_batch(texts, options(), sizes(), logits_processor=[cancel])
        results = caught.value.results
        assert [key for key, each in results.items() if each.error] == ["req_0", "req_10"]
        first, *others, _ = tokens(results)
        assert others == expected[1:-1] and first == expected[0][:3][: len(first)]
    with hf_fastattn.patch(model), pytest.raises(BatchError, match=says) as caught:
        model.generate_batch(long, options(), sizes(num_blocks=4))
    found = caught.value.results
    assert tokens(found)[::2] == alone(model, long)[::2] and found["req_1"].status == hf.RequestStatus.FAILED


def test_an_interrupted_call_and_an_undone_patch(seen):
    model, texts = tiny("llama", "eager"), ragged()
    expected = alone(model, texts)
    with hf_fastattn.patch(model) as patch:
        with pytest.raises(KeyboardInterrupt):
            model.generate_batch(texts, options(), sizes(), logits_processor=[At(4, Mock(side_effect=KeyboardInterrupt))])
        assert tokens(model.generate_batch(texts, options(), sizes())) == expected
        with pytest.raises(RuntimeError, match="undone during a generate_batch"):
            model.generate_batch(texts, options(), sizes(), logits_processor=[At(0, patch.undo)])
    patch = hf_fastattn.patch(model)
    model.model.layers[1].register_forward_pre_hook(lambda *_: patch.undo())
    with pytest.raises(RuntimeError, match="undone during a generate_batch"):
        model.generate_batch(texts, options(), sizes())
    assert "generate_batch" not in vars(model) and isinstance(model.generate_batch, types.MethodType)
    seen[:] = seen[1:2]


def test_other_weights_and_threads(seen):
    model, texts = tiny("llama", "eager"), ragged()
    first = alone(model, texts)
    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(), sizes())) == first
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)

        def call(_) -> list:
            with torch.inference_mode():
                return tokens(model.generate_batch(texts, options(), sizes()))

        with ThreadPoolExecutor() as pool:
            first_thread, second_thread = pool.map(call, range(2))
    assert first_thread == second_thread == alone(model, texts) != first


def scale(model):
    for parameter in model.parameters():
        parameter.mul_(1.3)


def replace(model):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach() * 1.3)


def switch(model):  # as an adapter is
    model.model.layers[0].self_attn.scaling *= 3


@pytest.mark.parametrize("change", [scale, replace, switch])
def test_a_model_that_changes_in_a_call(change, seen):
    """Pages that the old model has written are found by no text that is read later, also if their text is still being read."""
    (start,) = prompts(60)
    for rows, at, texts in ((1, 1, [[*start, 5], [*start, 6]]), (3, 2, [start[:3], [*start, 5], [7, 8], [*start, 9]])):
        model = tiny("llama", "eager")
        with hf_fastattn.patch(model):
            for _ in range(2):
                made = [At(at - 1, lambda model=model: torch.no_grad()(change)(model))]
                found = model.generate_batch(texts, options(), sizes(max_requests_per_batch=rows), logits_processor=made)
                assert tokens(found)[-1] == alone(model, texts[-1:])[0]


def test_stop_strings(seen, monkeypatch):
    vocabulary = {chr(200 + index): index for index in range(1, 128)} | {"abcdef": 0}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="abcdef"))
    words.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    model, texts = tiny("llama", "eager"), ragged()
    plain = alone(model, texts)
    config = options(stop_strings=["".join(chr(200 + token) for token in plain[0][2:4]), chr(200 + plain[1][5])])
    expected = alone(model, texts, config, tokenizer=tokenizer)
    with hf_fastattn.patch(model):
        calls, own = [], hf.StringEnds.__call__
        monkeypatch.setattr(hf.StringEnds, "__call__", lambda self, texts: calls.append(1) or own(self, texts))
        assert tokens(model.generate_batch(texts, config, sizes(), tokenizer=tokenizer)) == expected
    assert len(expected[0]) < NEW and expected != plain
    assert len(calls) <= seen[0].steps + len(texts) < sum(map(len, expected))  # once for all rows of a step


PROMPTS = {
    "takes a list of prompts, each a list of ids": "text",
    "prompt 1 is 'text'": [[1], "text"],
    "prompt 0 is b'text'": [b"text"],
    "prompt 0 is .True": [[True]],
    "Prompt 1 is empty": [[1], []],
    "ids from 1 to 500; the model has those from 0 to 127": [[1, 500]],
}
ARGUMENTS = [
    ({"max_new_tokens": 0}, "at least 1; got 0 for prompt 0"),
    ({"max_new_tokens": [1, 2]}, "has 2 numbers for 1 prompts"),
    ({"cache_implementation": "paged"}, "reads padding as text"),
    ({"assistant_model": object()}, "does not support 'assistant_model'"),
    ({"stopping_criteria": [object()]}, "does not support 'stopping_criteria'"),
    ({"stop_strings": ["a"]}, "pass tokenizer="),
    ({"prefill_chunk_size": -3}, "prefill_chunk_size must be an integer, at least 1; got -3"),
    ({"num_return_sequences": -1}, "num_return_sequences must be an integer, at least 1; got -1"),
    ({"prefill_chunk_size": 2.5}, "prefill_chunk_size must be an integer, at least 1; got 2.5"),
    ({"generation_config": {"top_k": 3}}, "generation_config is a GenerationConfig or None; got a dict"),
    ({"continuous_batching_config": {}}, "is a ContinuousBatchingConfig or None; got a dict"),
    ({"continuous_batching_config": sizes(page=48)}, "got page_size=48"),
    ({"continuous_batching_config": sizes(num_blocks=2.5)}, "must be an integer above 0; got 2.5"),
    ({"generation_config": options(continuous_batching_config=sizes(page=48))}, "got page_size=48"),
]
UNSUPPORTED = {"use_cache": False, "num_beams": 2, "cache_implementation": "static", "assistant_early_exit": 1}
ARGUMENTS += [({name: value}, f"does not support {name}={value!r}") for name, value in UNSUPPORTED.items()]


def test_refusals():
    model = tiny("llama", "eager")
    with hf_fastattn.patch(model):
        for texts, more, error in [(texts, {}, error) for error, texts in PROMPTS.items()] + [([[1]], *row) for row in ARGUMENTS]:
            with pytest.raises((ValueError, TypeError), match=error):
                model.generate_batch(texts, **({"generation_config": options()} | more))


@pytest.mark.parametrize("family", ["opt", "gptj"])
def test_texts_beyond_the_table_of_positions(family, seen):
    model = eager(family, max_position_embeddings=32)
    most = model.config.max_position_embeddings
    texts, config = prompts(most - NEW + 1), sizes(max_batch_tokens=most)
    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(), config)) == alone(model, texts)
        with pytest.raises(ValueError, match=rf"may have {most + 2} tokens, and this .* has a table of {most} positions"):
            model.generate_batch([[5, *texts[0]]], options(), config)


def test_autocast(seen):
    model, texts = tiny("llama", "eager"), prompts(20)
    with hf_fastattn.patch(model):
        with torch.autocast("cpu", torch.bfloat16):
            expected = alone(model, texts)
            for _ in range(2):
                assert tokens(model.generate_batch(texts, options(), sizes())) == expected
        model.generate_batch(texts, options(), sizes())
    first, second, last = (each.storage for each in seen)
    assert first is second is not last and first.layers[0].dtype == torch.bfloat16


def test_a_model_in_training_mode(seen):
    model, texts = tiny("llama", "eager", attention_dropout=0.9), ragged()
    expected = alone(model, texts)
    model.train()
    model.lm_head.eval()
    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(), sizes())) == expected
    assert [module for module in model.modules() if not module.training] == [model.lm_head]


def test_a_model_that_runs_only_its_first_layers(seen):
    model, texts = tiny("llama", "eager"), ragged()[:3]
    with hf_fastattn.patch(model):
        model.config.num_hidden_layers = 1
        assert tokens(model.generate_batch(texts, options(), sizes())) == alone(model, texts)


def test_refused_models():
    model = tiny("jetmoe", "eager", kv_channels=16, num_local_experts=2, num_experts_per_tok=2)
    with hf_fastattn.patch(model):
        with pytest.raises(ValueError, match="changes K and V after they are stored in pages"):
            model.generate_batch([[5, 6]], options(), sizes())
        model.config.cross_attention_layers = [1]  # as in Mllama
        with pytest.raises(ValueError, match="has layers that attend to an image"):
            model.generate_batch([[5, 6]], options(), sizes())


def test_a_processor_that_returns_another_dtype(seen):
    model, texts = tiny("llama", "eager"), ragged()[:2]
    expected = alone(model, texts)
    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(), logits_processor=[lambda _, scores: scores.double()])) == expected


def test_copies_and_a_call_in_a_call(seen):
    model, texts = tiny("llama", "eager"), ragged()
    expected = alone(model, texts)

    def call():
        with pytest.raises(RuntimeError, match="called by code that it runs"):
            model.generate_batch(texts, options())

    with hf_fastattn.patch(model):
        assert tokens(model.generate_batch(texts, options(), sizes(), logits_processor=[At(3, call)])) == expected
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert tokens(twin.generate_batch(texts, options(), sizes())) == expected
        with pytest.raises(ValueError, match="reads padding as text"):
            model.generate(torch.tensor([[0, 3]]), cache_implementation="paged")
    hf_fastattn.unpatch(twin)


class Counts(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += not function.is_view
        return function(*args, **(kwargs or {}))


def test_a_step_costs_the_host_the_same_for_any_number_of_rows():
    """Tables, lengths and ids are on the device: a step in which no row begins a page, ends or comes launches a handful, and
    calls a few functions for each row: at 256 rows 0.2 ms of a CPU, where 0.6 are the most."""
    model, found = tiny("llama", "eager"), []
    for rows in (4, 256):
        storage = paged.PagedStorage([None] * 2, [2 * rows + 1], 16, rows, 2, torch.device("cpu"))
        asked, settings = (
            job.asked_of(model, options(), {}),
            job.Settings(16, rows, [None] * 2, [2 * rows + 1], 2, 64, True, False),
        )

        def decode(storage=storage, rows=rows, **given):
            storage.step()
            return types.SimpleNamespace(logits=torch.zeros(rows, 1, 8))

        made = job.loop_of(model, storage, asked, settings, decode, decode, lambda: 0)
        texts = [Row(f"{index}", [5] * 17, NEW, pages=[made.pages.all.take(2)], done=17, launched=1) for index in range(rows)]
        made._place(texts, torch.ones(rows, dtype=torch.long))
        made.step()
        with Counts() as counts:
            made.step()
        found.append(counts.calls)
        assert sum(event.endswith("call") for event, _ in events_of(made.step)) <= 300 + 8 * rows
    assert found[0] == found[1] <= 10


def test_pages():
    pages, text = Pages(8, 4), [*range(20)]
    first = pages.take(5)
    pages.publish(text, first, 12)  # three of them are written
    found, keys = pages.match(text)
    assert found == first[:3] and keys[3] == (first[2], tuple(text[12:16]))
    assert pages.match(text[:12])[0] == first[:2]  # one token is left to read
    assert pages.match([99, *text[1:]])[0] == [] and pages.match([*text[:7], 99, *text[8:]])[0] == first[:1]
    pages.drop(first)
    assert pages.in_use == 0 and pages.available == 7
    pages.share(first[:1])
    assert len(pages.take(6)) == 6 and pages.take(1) is None  # the end of the text is forgotten, its beginning is in use
    assert pages.match(text)[0] == first[:1]
    pages = Pages(4, 2)  # a page is not found behind one that is forgotten
    old = pages.take(2)
    pages.publish([1, 2, 3, 4], old, 4)
    pages.drop(old[:1])
    assert len(pages.take(2)) == 2
    assert pages.match([1, 2, 3, 4, 5])[0] == [] and not pages.known and not pages.key_of


def test_pages_are_published_when_they_are_written(seen, monkeypatch):
    model, texts, written = tiny("llama", "eager"), ragged(), set()
    expected = alone(model, texts)
    write, publish, take = paged.PagedLayer.append, Pages.publish, Pages.take

    def writes(self, rows, *states):
        if rows.slots.dim() == 2:  # of prompts
            pages = rows.pages[0, 0].tolist()
            written.update((pages[slot // self.size], slot % self.size) for slot in rows.slots[0].tolist())
        return write(self, rows, *states)

    def takes(self, count):
        taken = take(self, count)
        written.difference_update((page, slot) for page in taken or () for slot in range(self.size))
        return taken

    def publishes(self, ids, pages, tokens):
        assert {(pages[place // self.size], place % self.size) for place in range(tokens)} <= written
        return publish(self, ids, pages, tokens)

    for cls, name, ours in ((paged.PagedLayer, "append", writes), (Pages, "publish", publishes), (Pages, "take", takes)):
        monkeypatch.setattr(cls, name, ours)
    with hf_fastattn.patch(model):
        for blocks in (None, 6):
            found = model.generate_batch(texts, options(), sizes(num_blocks=blocks, max_batch_tokens=20))
            assert tokens(found) == expected and seen[-1].shared > 0


WINDOWS = ("mistral_window_below_prompt", "qwen2", "gpt_oss")


@pytest.mark.parametrize("family", WINDOWS)
def test_pages_behind_a_window_return(family, seen, monkeypatch):
    """Prompts are read in parts of 24 tokens, and a query sees 16: pages of 16 tokens hold them in 2 pages, and new ones in 2."""
    model, (start,), most = eager(family), prompts(120), [0, 0]
    texts = [[*start, 5], [*start[:95], 7], start[:3], [*start, 6]]
    expected = alone(model, texts, options(max_new_tokens=20))
    read = job.Loop._read

    def reads(self, parts):
        most[:] = [max(pair) for pair in zip(most, (pool.in_use for pool in self.pages.each), strict=True)]
        return read(self, parts)

    monkeypatch.setattr(job.Loop, "_read", reads)
    with hf_fastattn.patch(model):
        for rows, blocks in ((1, 4 if family == WINDOWS[0] else None), (3, None)):
            config = sizes(num_blocks=blocks, max_requests_per_batch=rows)
            assert tokens(model.generate_batch(texts, options(max_new_tokens=20), config)) == expected
            assert most[1] <= 4 * rows and most[0] >= 8
            assert blocks or seen[-1].shared > 80  # also pages that had returned


def test_groups():
    a, b, c = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [9]
    assert groups_of([[*a, 10], [20, 21], [*a, 11], c, [*a, 12, 13]], 16) == [([0, 2, 4], 4)]
    assert groups_of([[*b, 30], [1, 40], [*b, 31], [1, 41]], 16) == [([0, 2], 8), ([1, 3], 1)]  # behind one system prompt
    assert groups_of([[*a, n] for n in range(10, 17)], 3) == [([0, 1, 2], 4), ([3, 4, 5], 4)]
    assert groups_of([], 3) == groups_of([c], 3) == groups_of([c, [8]], 3) == groups_of([a, a], 1) == []


SHARED = [(family, graph) for family in ("llama", "gemma2", "gpt_oss") for graph in (False, True)]


@pytest.mark.parametrize("family, graph", slow_unless([("llama", False), ("gemma2", True)].__contains__, SHARED))
def test_shared_pages_are_read_once(family, graph, monkeypatch, seen):
    """By the rows of a group in one block: samples, and texts behind one beginning."""
    if graph:
        fake_graph.use(monkeypatch)
    model, (start,) = eager(family), prompts(70)
    texts = [[*start, n] for n in range(5, 9)] + prompts(40, 3) + [[*start[:40], n] for n in (9, 10)]
    expected = alone(model, texts)
    calls, run = [], ragged_rows.Ragged.attend
    monkeypatch.setattr(ragged_rows.Ragged, "attend", lambda self, *given, **more: calls.append(0) or run(self, *given, **more))
    monkeypatch.setattr(groups, "SAVES", 0)
    with hf_fastattn.patch(model, keep_graphs=True) as patch:  # what a step calls is code of this test
        for _ in range(2):
            found = model.generate_batch(texts, options(), sizes(max_requests_per_batch=8, max_batch_tokens=200))
            assert tokens(found) == expected
        assert calls and (not graph or (patch.captures > 0 and patch.uncaptured == 0))
        monkeypatch.setattr(groups, "SAVES", 1 << 40)
        calls.clear()
        assert tokens(model.generate_batch(texts, options(), sizes(max_requests_per_batch=8, max_batch_tokens=200))) == expected
        assert not calls
