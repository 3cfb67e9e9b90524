"""generate() in several threads at once: on two patched models, on one, and with a thread that fails."""

from __future__ import annotations

import sys
import threading
import warnings

import fake_graph
import pytest
import torch
from models import prompts, tiny
from transformers import LogitsProcessor

import hf_fastattn

TURNS = 5
CALLS = [  # the calls: different batches and paddings, so that graphs and buffers differ
    (1, "no_padding", 24, {}),
    (3, "left_padding", 40, {}),
    (2, "no_padding", 40, {}),
    (1, "no_padding", 48, {"repetition_penalty": 1.7}),
]


@pytest.fixture
def model(monkeypatch):
    fake_graph.use(monkeypatch, prompts=False)
    return tiny("llama", "sdpa")


def ask(model, turn: int, **more):
    rows, padding, length, options = CALLS[turn % len(CALLS)]
    inputs = prompts(padding, "cpu", rows=rows, length=length)
    return model.generate(**inputs, max_new_tokens=5 + turn % 3, do_sample=False, **options, **more)


def at_once(*works) -> list[BaseException]:
    """Run each in a separate thread, all at the same time. Returns the exceptions."""
    raised, ready = [], threading.Barrier(len(works))

    def run(work):
        try:
            ready.wait(60)
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads switch some hundred times in each step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    return raised


def turns(model, expected: list, first: int):
    def work():
        for turn in range(first, first + TURNS):
            assert torch.equal(ask(model, turn), expected[turn % len(expected)]), f"turn {turn}"

    return work


def alone(model) -> list:
    return [ask(model, turn) for turn in range(len(CALLS) * 3)]  # lengths repeat after 12 calls


def raise_all(errors: list[BaseException]) -> None:
    for error in errors:
        raise error


@pytest.mark.parametrize("options", [{}, {"backend": "streaming", "window": 400}], ids=["static", "rolling"])
def test_one_patched_model_in_three_threads(model, options):
    expected = alone(model)
    with hf_fastattn.patch(model, **options) as patch:
        for _ in range(2):
            raise_all(at_once(*(turns(model, expected, first) for first in (0, 5, 1))))
        assert patch.captures and patch.replays and not patch.reasons


def test_two_patched_models_in_two_threads(model):
    other = tiny("llama", "sdpa")
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0).clone())
    expected, others = alone(model), alone(other)
    assert not torch.equal(expected[0], others[0])
    with hf_fastattn.patch(model) as patch, hf_fastattn.patch(other) as patch2:
        raise_all(at_once(turns(model, expected, 0), turns(other, others, 0), turns(model, expected, 3), turns(other, others, 6)))
        assert not patch.reasons and not patch2.reasons


def test_a_thread_that_fails_does_not_affect_the_others(model):
    class Fail(LogitsProcessor):
        def __init__(self, after: int):
            self.left = after

        def __call__(self, input_ids, scores):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return scores

    expected = alone(model)
    raised = []

    def failing():
        for turn in range(TURNS):
            try:
                ask(model, turn, logits_processor=[Fail(turn % 5)])
            except KeyboardInterrupt:
                raised.append(turn)

    with hf_fastattn.patch(model) as patch:
        raise_all(at_once(turns(model, expected, 0), failing, turns(model, expected, 7)))
        assert raised and not patch.reasons
        for turn in range(4):
            assert torch.equal(ask(model, turn), expected[turn])


def test_separate_conversations_in_threads(model):
    def converse(model, first: int) -> list:
        cache, said = None, []
        ids = prompts("no_padding", "cpu", rows=first % 3 + 1, length=24 + first)["input_ids"]
        for _ in range(4):
            out = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
            cache = out.past_key_values
            ids = torch.cat([out.sequences, out.sequences[:, :3]], 1)
            said.append(out.sequences)
        return said

    expected = {first: converse(model, first) for first in range(4)}
    got: dict = {}
    with hf_fastattn.patch(model) as patch:
        raise_all(at_once(*(lambda f=first: got.update({f: converse(model, f)}) for first in range(4))))
        assert not patch.reasons
    for first, said in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(said, got[first], strict=True)), first


class _Undo(LogitsProcessor):
    def __init__(self, patch):
        self.patch, self.calls = patch, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 4:
            self.patch.undo()
        return scores


def test_undo_in_the_middle_of_a_call(model):
    """The call continues without graphs, with a warning; the next one runs as before patch()."""
    ids = prompts("no_padding", "cpu")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    patch = hf_fastattn.patch(model)
    with pytest.warns(match="undone during a call"):
        found = model.generate(ids, max_new_tokens=8, do_sample=False, logits_processor=[_Undo(patch)])
    assert torch.equal(found, expected) and patch.captures == 1 and not patch._generation.calls
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected) and patch.captures == 1
