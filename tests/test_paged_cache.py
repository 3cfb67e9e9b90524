"""generate() over a PagedCache: the tokens are those of eager attention over Transformers' cache, and all pages return."""

from __future__ import annotations

import copy
import gc

import fake_graph
import pytest
import torch
from models import FAMILIES, PADDINGS, family, generate, prompts, tiny
from test_batch import ALL
from torch.utils._python_dispatch import TorchDispatchMode

import hf_fastattn
from hf_fastattn import PagedCache, PreallocatedCache, hf
from hf_fastattn.caches import paged_cache
from hf_fastattn.hf.version import number_of

WINDOWED = "gemma2"  # one layer of each kind
NEW = {"max_new_tokens": 20}
MODES = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 40},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def eager(name):
    model_type, own = ALL[name]
    if name == "gptj" and number_of(hf.VERSION) < (5, 24):
        pytest.skip("its code computes attention itself, and cannot be patched")
    return tiny(model_type, "eager", **own)


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


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [name if name in ("llama", "opt", WINDOWED) else pytest.param(name, marks=SLOW) for name in ALL])
def test_families(name):
    model = eager(name)
    cases = [(prompts("left_padding", "cpu"), {}), (prompts("no_padding", "cpu"), MODES["beams"])]
    for size in (16, 64):
        check(model, cases, size)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["llama", WINDOWED])
def test_modes(name, graph, monkeypatch):
    if graph:
        fake_graph.use(monkeypatch)
    model = eager(name)
    cases = [(prompts(padding, "cpu", rows=1 if mode == "lookup" else 3), MODES[mode]) for padding in PADDINGS for mode in MODES]
    _, patch = check(model, cases, 16)
    assert not graph or (patch.replays and not patch.reasons)
