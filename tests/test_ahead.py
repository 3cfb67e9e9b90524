"""Between two steps, a graph is replayed before the model is compared if no table has changed that inputs of the step index."""

from __future__ import annotations

import fake_graph
import pytest
import torch
from models import VOCAB, prompts, tiny
from torch import nn

import hf_fastattn
from hf_fastattn.patches import survey


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    fake_graph.use(monkeypatch)


@pytest.fixture
def llama():
    model = tiny("llama", "sdpa")
    model.model.layers[1].mlp.register_buffer("rows", torch.ones(512, 64))  # as the attention of GPT-J has
    return model


def watched(model) -> survey.Surveyor:
    surveyor = survey.Surveyor()
    for _ in range(2):
        surveyor.current(model)
    assert surveyor.watch is not None
    return surveyor


def _embedding(model, rows):
    embedding = nn.Embedding(rows, 64)
    nn.init.normal_(embedding.weight)
    return embedding


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
    surveyor = watched(llama)
    kept = [*llama.modules(), *(tensor.untyped_storage() for tensor in (*llama.parameters(), *llama.buffers()))]
    assert surveyor.same_tables(surveyor.last)
    TABLES[name](llama)
    assert not surveyor.same_tables(surveyor.last) and kept


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
    surveyor = watched(llama)
    assert not surveyor.same_tables(surveyor.last)


def test_other_changes_lose_a_replay(llama):
    surveyor = watched(llama)
    llama.model.layers[0].self_attn.scaling *= 0.5
    llama.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out)
    llama.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 64))
    assert surveyor.same_tables(surveyor.last)


def _larger(model):
    """New modules, as the graphs of these tests hold the tensors that `resize_token_embeddings` gives other memory."""
    draw = torch.Generator().manual_seed(1)
    ids, logits = (
        torch.cat([m.weight.detach(), torch.randn(8, 64, generator=draw)]) for m in (model.model.embed_tokens, model.lm_head)
    )
    model.set_input_embeddings(nn.Embedding.from_pretrained(ids))
    model.lm_head = nn.Linear(64, VOCAB + 8, bias=False)
    model.lm_head.weight = nn.Parameter(logits)
    model.config.vocab_size = VOCAB + 8


def test_a_larger_vocabulary_between_two_steps():
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
                model.generate(**inputs, max_new_tokens=4, do_sample=False)
            found.append(model.generate(**inputs, logits_processor=[resize], max_new_tokens=8, do_sample=False))
        assert VOCAB + 7 in found[-1]
    assert torch.equal(*found)
