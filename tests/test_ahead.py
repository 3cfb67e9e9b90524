"""A graph is replayed before the model is compared if that does no harm: its memory exists, and its table has not changed."""

from __future__ import annotations

from functools import partial

import models
import pytest
import torch
from models import VOCAB, prompts, tiny
from torch import nn

import hf_fastattn
from hf_fastattn.patches.graphs.graphs import DecodeGraphs
from hf_fastattn.patches.graphs.present import Present

pytestmark = pytest.mark.usefixtures("captured")
generate = partial(models.generate, max_new_tokens=4)


@pytest.fixture
def llama():
    return tiny("llama", "sdpa")


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
                generate(model, first)
            _resize(model, rows)
            ids = first["input_ids"] % model.config.vocab_size
            if rows > VOCAB:
                ids[0, 5:13] = torch.arange(VOCAB, VOCAB + 8)
            found.append(torch.stack([generate(model, {"input_ids": ids}) for _ in range(3)]))
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
                generate(model, inputs)
            found.append(generate(model, inputs, logits_processor=[resize], max_new_tokens=8))
        assert VOCAB + 7 in found[-1]
    assert torch.equal(*found)
