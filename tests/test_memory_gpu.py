"""Memory of a real GPU is given back by counting references alone: Python's search for cycles is off."""

from __future__ import annotations

import gc

import pytest
import torch
from models import VOCAB, tiny

import hf_fastattn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream, with or without a model
    return torch.cuda.memory_allocated()


def converse(model, number: int):
    """Conversation `number`: of one to three rows, and of some length."""
    generator = torch.Generator().manual_seed(number)
    rows, length = 1 + number % 3, 20 + 37 * number % 400
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator).cuda()
    mask = torch.ones_like(ids)
    if number % 2:
        mask[0, : length // 4] = 0
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


@pytest.mark.parametrize("kind", ["static", "rolling"])
def test_a_hundred_conversations_allocate_no_more_than_two_of_a_kind(kind):
    start = model = None
    for _ in range(2):  # what torch and Triton allocate once is there when it is measured
        gc.collect()
        gc.disable()
        try:
            start, model = allocated(), tiny("llama", device="cuda")
            loaded = allocated()
            patch = hf_fastattn.patch(model, *(["streaming"] if kind == "rolling" else []), **_options(kind))
            for number in (5, 4, 3, 11, 10, 9):  # two of each number of rows, the longest first, with and without padding
                out = converse(model, number + 6 * 10)
            del out
            early = allocated()
            for number in range(100):
                kept = converse(model, number)
            del kept
            late = allocated()
            patch.undo()
            undone = allocated()
            del patch, model
            gone = allocated()
        finally:
            gc.enable()
    assert late <= early, "conversations leave memory behind"
    assert undone == loaded, "undo() leaves memory behind"
    assert gone == start, "the model leaves memory behind"


@pytest.mark.parametrize("kind", ["static", "rolling"])
def test_a_model_that_is_dropped_takes_its_graphs_and_buffers_along(kind):
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            start, model = allocated(), tiny("llama", device="cuda")
            hf_fastattn.patch(model, *(["streaming"] if kind == "rolling" else []), **_options(kind))
            converse(model, 3)
            converse(model, 4)
            del model
        assert allocated() == start
    finally:
        gc.enable()


def _options(kind: str) -> dict:
    return {"window": 64, "sinks": 4} if kind == "rolling" else {}
