"""Memory of a real GPU is freed by reference counts alone: Python's cycle collection is off."""

import gc

import fake_graph
import pytest
import torch
from models import VOCAB, tiny

import hf_fastattn

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("without_collector"),
]

LONGEST = 420


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    fake_graph.only_steps(monkeypatch)


def patched(model, kind: str):
    if kind == "rolling":
        return hf_fastattn.patch(model, "streaming", window=64, sinks=4)
    return hf_fastattn.patch(model)


def allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream, with or without a model
    return torch.cuda.memory_allocated()


def converse(model, rows: int, length: int, padded: bool) -> None:
    """One call of generate(), whose output, with K, V and logits, is dropped."""
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : length // 4] = 0
    whole = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **whole)
    assert out.past_key_values.get_seq_length() == length + 11 and len(out.logits) == 12


@pytest.mark.parametrize("rows", [(1,), (1, 2, 3)])
@pytest.mark.parametrize("kind", ["preallocated", "rolling"])
def test_a_hundred_conversations_allocate_no_more_than_two_of_each_batch_size(kind, rows):
    for _ in range(2):  # one-time allocations of torch and Triton precede the measurement
        gc.collect()
        start, model = allocated(), tiny("llama", device="cuda")
        loaded = allocated()
        patch = patched(model, kind)
        for each in rows:
            for padded in (False, True):
                converse(model, each, LONGEST, padded)
        captures, early = patch.captures, allocated()
        for number in range(100):
            converse(model, rows[number % len(rows)], 20 + 37 * number % (LONGEST - 19), number % 4 == 1)
        converse(model, rows[-1], LONGEST, True)  # the last tensors of a step have the same sizes
        assert patch.captures == captures and patch.replays > 900
        late = allocated()
        patch.undo()
        undone = allocated()
        del patch, model
        gone = allocated()
    assert late == early, "conversations leave memory behind"
    assert undone == loaded, "undo() leaves memory behind"
    assert gone == start, "the model leaves memory behind"


@pytest.mark.parametrize("kind", ["preallocated", "rolling"])
def test_a_dropped_model_frees_its_graphs_and_buffers(kind):
    for _ in range(3):
        start, model = allocated(), tiny("llama", device="cuda")
        patched(model, kind)
        converse(model, 1, 100, False)
        converse(model, 2, 100, True)
        del model
    assert allocated() == start
