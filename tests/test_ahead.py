"""A graph is replayed before the model is compared if that does no harm: its memory exists, and its tables have not changed."""

from __future__ import annotations

import gc
import types

import fake_graph
import numpy as np
import pytest
import torch
from models import VOCAB, prompts, tiny
from torch import nn
from transformers.models.llama import modeling_llama

import hf_fastattn
from hf_fastattn.patches import survey
from hf_fastattn.patches.forwards import Forwards

NEW = 4


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    fake_graph.use(monkeypatch)


@pytest.fixture
def llama():
    return tiny("llama", "sdpa")


def generate(model, inputs, **options):
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})


def watched(model) -> survey.Surveyor:
    surveyor = survey.Surveyor()
    for _ in range(2):
        surveyor.current(model)
    assert surveyor.assumed(model)[1]
    return surveyor


def _embedding(model, rows):
    embedding = nn.Embedding(rows, 64)
    nn.init.normal_(embedding.weight)
    return embedding


def _freed(layer, tensor):
    layer.weight.data = tensor


# Each leaves memory that a graph reads without an owner, or at another place.
FREED = {
    "another weight": lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.randn(VOCAB, 64))),
    "a module removed": lambda m: m.model.layers.__delitem__(1),
    "another dtype": lambda m: m.half(),
    "a module on another device": lambda m: m.model.layers[0].to("meta"),
    "a buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq.clone()),
    "data": lambda m: _freed(m.model.layers[0].mlp.up_proj, torch.randn(96, 64)),
    "memory that was returned": lambda m: m.model.layers[0].mlp.up_proj.weight.untyped_storage().resize_(0),
    "a larger vocabulary": lambda m: m.resize_token_embeddings(VOCAB + 8, mean_resizing=False),
    "a smaller vocabulary": lambda m: m.resize_token_embeddings(VOCAB - 8, mean_resizing=False),
    "assigned weights": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("name", FREED)
def test_memory_that_was_freed_is_not_read(llama, name):
    surveyor = watched(llama)
    gc.disable()
    try:
        FREED[name](llama)
        assert surveyor.assumed(llama) == (None, [])
    finally:
        gc.enable()


def test_memory_that_was_freed_may_come_back_at_the_same_address(llama):
    weight, rows = llama.lm_head.weight, llama.lm_head.weight.detach().numpy().copy()
    weight.data = torch.from_numpy(rows)
    surveyor = watched(llama)
    last = surveyor.last
    weight.data = torch.from_numpy(rows)
    assert surveyor.assumed(llama) == (None, [])
    assert surveyor.current(llama) is last and surveyor.assumed(llama)[1]


# Each lets the model read a table by inputs that the graph's own cannot serve. All old memory stays alive.
TABLES = {
    "a larger vocabulary": lambda m: m.set_input_embeddings(_embedding(m, VOCAB + 8)),
    "a smaller vocabulary": lambda m: m.set_input_embeddings(_embedding(m, VOCAB - 8)),
    "a larger weight": lambda m: setattr(m.model.embed_tokens, "weight", nn.Parameter(torch.randn(VOCAB + 8, 64))),
    "a part of the table": lambda m: setattr(m.model.embed_tokens.weight, "data", m.model.embed_tokens.weight.data[:60]),
    "a hook before the embedding": lambda m: m.model.embed_tokens.register_forward_pre_hook(lambda module, args: args),
    "a hook before the layers": lambda m: m.model.register_forward_pre_hook(lambda module, args: args),
    "a forward of the embedding": lambda m: setattr(m.model.embed_tokens, "forward", lambda ids: torch.zeros(*ids.shape, 64)),
    "a class of the embedding": lambda m: setattr(m.model.embed_tokens, "__class__", type("Other", (nn.Embedding,), {})),
    "an attribute of the embedding": lambda m: setattr(m.model.embed_tokens, "padding_idx", 3),
    "a larger table of positions": lambda m: setattr(m.model.layers[1].mlp, "rows", torch.ones(1024, 64)),
    "another module around a table": lambda m: m.model.layers.__setitem__(1, m.model.layers[0]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_as_before(llama, name):
    llama.model.layers[1].mlp.register_buffer("rows", torch.ones(512, 64))  # as the attention of GPT-J has
    surveyor = watched(llama)
    kept = [*llama.modules(), *(tensor.untyped_storage() for tensor in (*llama.parameters(), *llama.buffers()))]
    assert surveyor.same_tables(surveyor.last)
    TABLES[name](llama)
    assert surveyor.assumed(llama) == (None, []) and not surveyor.same_tables(surveyor.last) and kept


class _Rows(torch.Tensor):
    """A tensor whose layout does not say what it reads."""


@pytest.mark.parametrize(
    "put",
    [
        lambda m: setattr(m.model.norm, "rows", torch.ones(512, 64)),
        lambda m: setattr(m.model.embed_tokens, "weight", nn.Parameter(m.model.embed_tokens.weight.detach().as_subclass(_Rows))),
    ],
    ids=["an attribute", "a subclass"],
)
def test_tables_that_need_a_walk_are_compared_first(llama, put):
    put(llama)
    surveyor = survey.Surveyor()
    for _ in range(2):
        surveyor.current(llama)
    assert surveyor.watch is not None and not surveyor.same_tables(surveyor.last)


def test_code_of_others_and_other_settings_are_compared_first(llama, monkeypatch):
    surveyor = watched(llama)
    with torch.inference_mode():
        assert surveyor.assumed(llama) == (None, [])
    assert surveyor.assumed(llama)[1]
    with monkeypatch.context() as patching:
        patching.setattr(modeling_llama.LlamaModel, "forward", lambda self, ids: ids)
        assert surveyor.assumed(llama) == (None, [])
    with monkeypatch.context() as patching:  # reads no table
        patching.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
        assert surveyor.assumed(llama)[1]
    for name, value in (("forward", lambda x: x), ("rows", torch.ones(512, 64))):
        setattr(llama.model.norm, name, value)
        for _ in range(2):
            surveyor.current(llama)
        assert surveyor.watch is not None and surveyor.assumed(llama) == (None, [])
        delattr(llama.model.norm, name)


def _of_library(own):
    """A function as one of Transformers."""
    function = types.FunctionType(own.__code__, vars(modeling_llama), own.__name__, own.__defaults__, own.__closure__)
    function.__kwdefaults__ = own.__kwdefaults__
    return function


HOLDERS = {
    "closure": lambda rows: _of_library(lambda self, x: x + rows),
    "default": lambda rows: _of_library(lambda self, x, rows=rows: x + rows),
    "keyword": lambda rows: _of_library(lambda self, x, *, rows=rows: x + rows),
    "class": lambda rows: rows,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_that_code_of_a_library_holds_are_compared_first(llama, name, monkeypatch):
    """No module holds them, so that a comparison of the modules does not tell whether they were freed."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", HOLDERS[name](torch.ones(64)))
    surveyor = survey.Surveyor()
    for _ in range(2):
        surveyor.current(llama)
    assert surveyor.watch is not None and not surveyor.watch.own_classes and surveyor.assumed(llama) == (None, [])


def test_tensors_of_a_function_that_an_attribute_refers_to_are_compared_first(llama):
    llama.model.norm.add = HOLDERS["closure"](torch.ones(64))
    surveyor = survey.Surveyor()
    for _ in range(2):
        surveyor.current(llama)
    assert surveyor.watch is not None and surveyor.assumed(llama) == (None, [])


def test_values_of_a_class_that_cannot_be_compared_are_compared_first(llama, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaModel, "rows", np.ones(3), raising=False)
    surveyor = watched(llama)
    monkeypatch.setattr(modeling_llama.LlamaModel, "rows", np.zeros(3))
    assert surveyor.assumed(llama) == (None, [])


def test_changes_that_do_no_harm_lose_a_replay(llama):
    surveyor = watched(llama)
    llama.model.layers[0].self_attn.scaling *= 0.5
    llama.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out)
    last, memory = surveyor.assumed(llama)
    assert last is surveyor.last
    assert {part.data_ptr() for part in memory} >= {t.data_ptr() for t in (*llama.parameters(), *llama.buffers())}


def test_the_first_step_is_compared_while_its_graph_runs(llama, monkeypatch):
    order, inputs = [], prompts("no_padding", "cpu", rows=1)
    surveyed, replay = survey.Surveyor.surveyed, fake_graph.RecordedGraph.replay
    with hf_fastattn.patch(llama) as patch:
        for _ in range(4):
            expected = generate(llama, inputs, max_new_tokens=2)
        monkeypatch.setattr(survey.Surveyor, "surveyed", lambda *args: order.append("compare") or surveyed(*args))
        monkeypatch.setattr(fake_graph.RecordedGraph, "replay", lambda graph: order.append("replay") or replay(graph))
        forwards = []
        prepared = Forwards._prepared
        monkeypatch.setattr(Forwards, "_prepared", lambda self, *args: forwards.append(self) or prepared(self, *args))
        assert torch.equal(generate(llama, inputs, max_new_tokens=2), expected)
        assert order == ["replay", "compare", "replay"] and not forwards[0].present.memory and patch.captures == 2


def test_a_hook_loses_one_replay(llama):
    inputs = prompts("no_padding", "cpu", rows=1)
    with hf_fastattn.patch(llama) as patch:
        for _ in range(4):
            generate(llama, inputs)
        replays = patch.replays
        _hook(llama)
        with pytest.warns(match="has the forward hook"):
            for _ in range(3):
                generate(llama, inputs)
        assert patch.replays == replays + 1


def _scale(model):
    model.model.layers[0].self_attn.scaling *= 0.5


def _hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 1.5 * out)


def _weight(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def _in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def _resize(model, rows):
    """New modules, as the graphs of these tests hold the tensors that `resize_token_embeddings` gives other memory."""
    draw = torch.Generator().manual_seed(1)
    ids, logits = (
        torch.cat([m.weight.detach(), torch.randn(8, 64, generator=draw)]) for m in (model.model.embed_tokens, model.lm_head)
    )
    model.set_input_embeddings(nn.Embedding.from_pretrained(ids[:rows].clone()))
    model.lm_head = nn.Linear(64, rows, bias=False)
    model.lm_head.weight = nn.Parameter(logits[:rows].clone())
    model.config.vocab_size = rows


def _larger(model):
    _resize(model, VOCAB + 8)


def _smaller(model):
    _resize(model, 100)


CHANGES = [_scale, _hook, _weight, _in_place, _larger, _smaller]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family, backend", [("llama", "lean"), ("mistral", "lean"), ("llama", "streaming")])
def test_a_change_between_two_calls_is_seen(change, family, backend, monkeypatch):
    """The graphs of these tests keep the memory that they read: only a change of a table is compared first."""
    options = {"window": 60} if backend == "streaming" else {}
    first = prompts("no_padding", "cpu", rows=1)
    found = []
    for graph in (False, True):
        model = tiny(family, "sdpa")
        kept = model.model.embed_tokens, model.model.embed_tokens.weight.untyped_storage()
        with hf_fastattn.patch(model, backend, graph=graph, **options), torch.no_grad():
            for _ in range(4):
                generate(model, first)
            change(model)
            ids = first["input_ids"] % model.config.vocab_size
            if change is _larger:
                ids[0, 5:13] = torch.arange(VOCAB, VOCAB + 8)
            found.append(torch.stack([generate(model, {"input_ids": ids}) for _ in range(3)]))
        assert kept
    assert torch.equal(*found)


def test_a_larger_vocabulary_between_two_steps(llama):
    """A replay before the comparison would read the old table by the new id."""
    inputs, found = prompts("no_padding", "cpu", rows=1), []

    def resize(ids, scores):
        if ids.shape[1] == inputs["input_ids"].shape[1] + 3:
            _larger(model)
        if scores.shape[1] < model.config.vocab_size:
            scores = nn.functional.pad(scores, (0, model.config.vocab_size - scores.shape[1]))
            scores[:, -1] = 1e4
        return scores

    for graph in (False, True):
        model = tiny("llama", "sdpa")
        with hf_fastattn.patch(model, graph=graph):
            for _ in range(2):
                generate(model, inputs)
            found.append(generate(model, inputs, logits_processor=[resize], max_new_tokens=8))
        assert VOCAB + 7 in found[-1]
    assert torch.equal(*found)
