"""generate() over a PagedCache: the tokens are those of eager attention over Transformers' cache, and all pages return."""

from __future__ import annotations

import contextlib
import copy
from unittest.mock import Mock

import fake_graph
import pytest
import torch
from cases import slow_unless
from models import PADDINGS, generate, prompts, tiny
from test_batch import ALL, eager
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import hf_fastattn
from hf_fastattn import PagedCache, hf
from hf_fastattn.caches import table_storage
from hf_fastattn.caches.paged import counted
from hf_fastattn.caches.table_layers import TableLayer

WINDOWED = "gemma2"  # one layer of each kind
NEW = {"max_new_tokens": 20}
MODES = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 40},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def check(model, cases, size, **more):
    """Each case has the tokens of eager attention. Returns the cache, which is empty then."""
    expected = [generate(model, inputs, **NEW, **options) for inputs, options in cases]
    with hf_fastattn.patch(model) as patch:
        cache = PagedCache(model, page_size=size, **more)
        for (inputs, options), tokens in zip(cases, expected, strict=True):
            assert torch.equal(generate(model, inputs, past_key_values=cache, **NEW, **options), tokens), options
            used = pages_of_tables(cache)
            assert cache.pages_in_use == used > 0
            cache.reset()
            assert not cache.pages_in_use
    return cache, patch


def pages_of_tables(cache) -> int:
    """Number of pages that the tables of rows name, and of those behind windows none."""
    storage = cache.storage
    storage.read_back()
    return sum(len({page for row in storage.held for page in row[table]} - {0}) for table in range(len(storage.windows)))


@pytest.mark.parametrize("name", slow_unless(["llama", "opt", WINDOWED].__contains__, ALL))
def test_families(name):
    model = eager(name)
    cases = [(prompts("left_padding", "cpu"), {}), (prompts("no_padding", "cpu"), MODES["beams"])]
    for size in (16, 64):
        check(model, cases, size)


CASES = [(WINDOWED, True), (WINDOWED, False), ("llama", True), ("llama", False)]


@pytest.mark.parametrize("name, graph", slow_unless(CASES[0].__eq__, CASES))
def test_modes(name, graph, monkeypatch):
    if graph:
        fake_graph.use(monkeypatch)
    model = eager(name)
    pairs = [*((padding, "greedy") for padding in PADDINGS), *(("left_padding", mode) for mode in MODES if mode != "greedy")]
    cases = [(prompts(padding, "cpu", rows=1 if mode == "lookup" else 3), MODES[mode]) for padding, mode in pairs]
    _, patch = check(model, cases, 16)
    assert not graph or (patch.replays and not patch.reasons)


def test_a_prompt_of_several_rows_is_stored_once(monkeypatch):
    """Eight rows of one prompt: its whole pages once, and in each row the last page of the prompt and those of its own."""
    model, size = eager("llama"), 16
    inputs = {name: x[:1, :88] for name, x in prompts("no_padding", "cpu").items()}
    read = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: read.append(given[2].shape[:2].numel()))
    monkeypatch.setattr(hf, "is_inert_hook", lambda hook: True)
    for options, most in (({"do_sample": True, "num_return_sequences": 8}, 8), ({"num_beams": 8}, 8)):
        expected = generate(model, inputs, max_new_tokens=12, **options)
        read.clear()
        with hf_fastattn.patch(model):
            cache = PagedCache(model, page_size=size)
            assert torch.equal(generate(model, inputs, max_new_tokens=12, past_key_values=cache, **options), expected)
        assert read[0] == 88
        assert cache.pages_in_use <= 88 // size + most * 2
        pool = cache.storage.pages.all
        assert pool.count - 1 <= 88 // size + most * 3  # nor is there room for more


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", ["llama", WINDOWED])
def test_turns_rows_and_crop(name, patched):
    """The same changes of a cache as of a DynamicCache, one after the other, with the logits of eager attention."""
    model = eager(name)
    ids = prompts("no_padding", "cpu")["input_ids"]
    steps = [
        lambda cache: model(ids[:, :37], past_key_values=cache),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: model(ids[:, 37:39].repeat_interleave(2, 0), past_key_values=cache),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0, 5, 3, 2, 2])),
        lambda cache: model(ids[:, 39:40].repeat(2, 1), past_key_values=cache),
        lambda cache: cache.crop(-6),  # into the page that rows share
        lambda cache: model(ids[:, 50:71].repeat(2, 1), past_key_values=cache),
        lambda cache: cache.batch_select_indices(torch.tensor([4, 1])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.crop(-10),
        lambda cache: model(ids[:2, 70:96], past_key_values=cache),
        lambda cache: model(ids[1:, :1], past_key_values=cache),
    ]
    with torch.no_grad():
        stock = DynamicCache()  # of which all layers keep all tokens
        expected = [step(stock) for step in steps]
        model.set_attn_implementation("lean")
        patch = hf_fastattn.patch(model) if patched else contextlib.nullcontext()
        with patch:
            cache = PagedCache(model, page_size=16)
            for step, wanted in zip(steps, expected, strict=True):
                found = step(cache)
                if wanted is not None:
                    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-3, atol=1e-3)
            twin = copy.deepcopy(cache)
            cache.reset()
            assert not cache.pages_in_use and twin.pages_in_use == pages_of_tables(twin) > 0
            assert twin.layers[0].keys.shape[2] == twin.get_seq_length() == stock.get_seq_length()


@pytest.mark.parametrize("graph", [False, True])
def test_pages_behind_a_window_return(graph, monkeypatch):
    """A row has the pages of its window and of the tokens that may be removed, also of a prompt that is read at once."""
    if graph:
        fake_graph.use(monkeypatch)
    monkeypatch.setattr(table_storage, "KEEP", 16)
    model = tiny("mistral", sliding_window=16)
    inputs = {name: x.repeat(1, 2) for name, x in prompts("left_padding", "cpu").items()}
    expected = generate(model, inputs, max_new_tokens=50)
    with hf_fastattn.patch(model):
        cache = PagedCache(model, page_size=16)
        assert torch.equal(generate(model, inputs, max_new_tokens=50, past_key_values=cache), expected)
        all_tokens, window = cache.storage.pages.each
        assert window.in_use <= 3 * 4 < all_tokens.in_use and window.count <= 3 * 5 + 2
        assert not all_tokens.window and all_tokens.in_use == 3 * 16  # numbers without memory: each layer has the window
        with pytest.raises(ValueError, match="Remove at most"):
            cache.crop(-40)
        cache.crop(-3)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 47), value=1)
        turn = {"input_ids": expected[:, :-3], "attention_mask": mask}
        wanted = generate(model, turn, max_new_tokens=5)
        assert torch.equal(generate(model, turn, max_new_tokens=5, past_key_values=cache), wanted)


def test_a_pool_that_may_not_grow():
    model, inputs = tiny("llama", "eager"), prompts("no_padding", "cpu")
    logits = model(inputs["input_ids"][2:, :31]).logits[:, -1:]
    with hf_fastattn.patch(model):
        cache = PagedCache(model, 96, page_size=16, grow=False)
        with torch.no_grad():
            model(inputs["input_ids"][:, :30], past_key_values=cache)
            cache.batch_select_indices(torch.tensor([2]))  # the pool was full
            assert cache.pages_in_use == 2
            found = model(inputs["input_ids"][2:, 30:31], past_key_values=cache).logits
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        cache = PagedCache(model, 3 * 112, page_size=16, grow=False)
        generate(model, inputs, max_new_tokens=16, past_key_values=cache)
        assert cache.pages_in_use == 3 * 7
        with torch.no_grad(), pytest.raises(ValueError, match=r"21 pages of 16 tokens.* grow=False; 21 are in use, and 3 more"):
            model(inputs["input_ids"][:, :3], past_key_values=cache)
        cache.crop(-15)
        assert cache.pages_in_use == 3 * 6
        cache.reset()
        wanted = generate(model, inputs, max_new_tokens=16)
        assert torch.equal(generate(model, inputs, max_new_tokens=16, past_key_values=cache), wanted)


BAD = [
    ({"page_size": 24}, "A page has 16, 32, 64, 128 or 256 tokens; got page_size=24"),
    *(({"page_size": "16"}, "got page_size='16'"), ({"capacity": 0}, "capacity counts tokens")),
    *(({"capacity": 1.5}, "capacity counts tokens"), ({"capacity": 1 << 50}, "A cache of .* tokens needs")),
]
MODELS = {"qwen3_next": "recurrent states", "deepseek_v3": "latents", "mllama_text_model": "an image", "t5": "encoder-decoder"}
MODELS |= {"bloom": "bias of keys", "mpt": "bias of keys"}


def test_bad_arguments_and_models_that_are_refused():
    model = tiny("llama", "lean")
    for more, error in BAD:
        with pytest.raises((ValueError, MemoryError), match=error):
            generate(model, prompts("no_padding", "cpu"), past_key_values=PagedCache(model, **more), max_new_tokens=2)
    for name, why in MODELS.items():
        with pytest.raises(ValueError, match=why):
            PagedCache(CONFIG_MAPPING[name]())


def test_calls_that_are_refused():
    model = tiny("llama", "eager")
    inputs = prompts("no_padding", "cpu")
    ids = inputs["input_ids"]
    for name, more in (("streaming", {"window": 16}), ("batch_invariant", {})):
        with hf_fastattn.patch(model, name, **more), pytest.raises(ValueError, match=rf"does not support .*'{name}'"):
            generate(model, inputs, past_key_values=PagedCache(model), max_new_tokens=3)
    with hf_fastattn.patch(model):
        cache = PagedCache(model)
        with pytest.raises(RuntimeError, match="carries no gradient"):
            model(ids, past_key_values=cache)
        generate(model, inputs, past_key_values=cache, max_new_tokens=3)
        with torch.no_grad(), pytest.raises(ValueError, match="holds 3 rows"):
            model(ids[:2], past_key_values=cache)
        with pytest.raises(ValueError, match="cannot be replaced"):
            cache.layers[0].keys = cache.layers[0].keys
        other = tiny("llama", "lean", num_key_value_heads=4)
        with torch.no_grad(), pytest.raises(ValueError, match="it belongs to another model"):
            other(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="reads padding as text"):
            generate(model, prompts("left_padding", "cpu"), cache_implementation="paged", max_new_tokens=3)


def test_an_interrupted_forward_and_an_undone_patch():
    model = tiny("llama", "eager")
    inputs = prompts("left_padding", "cpu")
    wanted = generate(model, inputs, max_new_tokens=8)
    turn = {"input_ids": wanted, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 8), value=1)}
    later = generate(model, turn, max_new_tokens=8)
    with hf_fastattn.patch(model):
        cache = PagedCache(model, page_size=16)
        with torch.inference_mode():
            generate(model, inputs, max_new_tokens=2, past_key_values=cache)
        interrupted = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
        with interrupted, pytest.raises(KeyboardInterrupt):
            generate(model, turn, max_new_tokens=2, past_key_values=cache)
        longer = {"input_ids": later, "attention_mask": torch.nn.functional.pad(turn["attention_mask"], (0, 8), value=1)}
        with pytest.raises(ValueError, match="now lack tokens"):
            generate(model, longer, max_new_tokens=2, past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(model, inputs, max_new_tokens=8, past_key_values=cache), wanted)
    for attention in ("sdpa", "lean"):  # which read copies
        model.set_attn_implementation(attention)
        assert torch.equal(generate(model, turn, max_new_tokens=8, past_key_values=copy.deepcopy(cache)), later)


@torch.no_grad()
def test_a_mask_of_the_caller():
    """A 4-D mask has as many columns as there are tokens, and the last page may have more slots."""
    model = tiny("llama", "eager")
    ids, mask = prompts("no_padding", "cpu")["input_ids"], torch.full((3, 1, 4, 54), torch.finfo(torch.float32).min).triu(51)
    mask[:, :, :, 7] = mask[0, 0, 0, -1]
    expected = model(ids[:, 50:54], attention_mask=mask.clone(), past_key_values=model(ids[:, :50]).past_key_values).logits
    with hf_fastattn.patch(model):
        cache = PagedCache(model, page_size=16)
        model(ids[:, :50], past_key_values=cache)
        found = model(ids[:, 50:54], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def after(model, ids, cache, more=1):
    """The logits of the last tokens, given behind the others."""
    model(ids[:, :-more], past_key_values=cache)
    return model(ids[:, -more:], past_key_values=cache).logits


@torch.no_grad()
def test_a_first_forward_that_failed_leaves_nothing(monkeypatch):
    """Of its pages, of those that had returned, and of the pool of layers that could not grow."""
    model, ids = tiny("mistral", "eager", sliding_window=16), torch.arange(700)[None] * 37 % 100 + 5
    expected = [model(ids[:, :length]).logits[:, -1:] for length in (561, 40)]
    with hf_fastattn.patch(model):
        cache = PagedCache(model, 576, page_size=16, grow=False)
        for length, wanted in zip((561, 40), expected, strict=True):
            with pytest.raises(ValueError, match="grow=False"):
                model(ids[:, :680], past_key_values=cache)
            torch.testing.assert_close(after(model, ids[:, :length], cache), wanted, rtol=1e-3, atol=1e-3)
            cache.reset()
        cache, resize = PagedCache(model, page_size=16), TableLayer.resize
        after(model, ids[:, :20], cache)
        cache.reset()
        failing = lambda layer, *given: resize(layer, *given) if layer.index == 0 else 1 // 0  # noqa: E731
        monkeypatch.setattr(TableLayer, "resize", failing)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :561], past_key_values=cache)
        monkeypatch.setattr(TableLayer, "resize", resize)
        cache.reset()
        torch.testing.assert_close(after(model, ids[:, :561], cache), expected[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_single_query_does_not_see_the_rest_of_the_last_page(monkeypatch):
    model, ids = tiny("llama", "eager"), prompts("no_padding", "cpu")["input_ids"][:, :21]
    expected = model(ids).logits[:, -1:]
    with hf_fastattn.patch(model):
        cache = PagedCache(model, page_size=16)
        for text in (ids[:, :20] * 0 + 7, ids[:, :20]):  # the first leaves other tokens in the pages
            cache.reset()
            model(text, past_key_values=cache)
        mask = torch.zeros(3, 1, 1, 1)
        torch.testing.assert_close(
            model(ids[:, 20:], attention_mask=mask, past_key_values=cache).logits, expected, rtol=1e-3, atol=1e-3
        )
        monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
        with pytest.raises(ValueError, match="in pages without a mask"):
            model(ids[:, 20:], past_key_values=cache)


def test_any_number_of_groups_has_a_number_in_a_graph():
    for rows in (4, 256, 1024):
        assert all(groups < counted(groups, rows) <= rows // 4 + 1 for groups in range(1, rows // 4 + 1))
