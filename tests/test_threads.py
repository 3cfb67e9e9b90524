"""generate() in several threads at once: on two patched models, on one, and with a thread that fails."""

import sys
import threading
import warnings

import pytest
import torch
from calls import At
from models import prompts, tiny

import hf_fastattn
from hf_fastattn import patches

TURNS = 5
CALLS = [  # the calls: different batches and paddings, so that graphs and buffers differ
    (1, "no_padding", 24, {}),
    (3, "left_padding", 40, {}),
    (2, "no_padding", 40, {}),
    (1, "no_padding", 48, {"repetition_penalty": 1.7}),
]


@pytest.fixture
def model(captured_steps):
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
    with warnings.catch_warnings(action="ignore"):
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


@pytest.mark.parametrize("options", [{}, {"backend": "streaming", "window": 400}], ids=["preallocated", "rolling"])
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
    expected, raised = alone(model), []

    def interrupt():
        raise KeyboardInterrupt

    def failing():
        for turn in range(TURNS):
            try:
                ask(model, turn, logits_processor=[At(turn % 5, interrupt)])
            except KeyboardInterrupt:
                raised.append(turn)

    with hf_fastattn.patch(model) as patch:
        raise_all(at_once(turns(model, expected, 0), failing, turns(model, expected, 7)))
        assert raised and not patch.reasons
        for turn in range(4):
            assert torch.equal(ask(model, turn), expected[turn])


@pytest.mark.parametrize("where", ["check_model", "set_attention"])
def test_one_thread_at_a_time_patches_a_model(model, monkeypatch, where):
    """Others come while the first checks the model, and while it changes it."""
    module, others, expected = (hf_fastattn.hf if where == "set_attention" else patches), [], alone(model)
    before, stock = {name: set(vars(part)) for name, part in model.named_modules()}, getattr(module, where)

    def meanwhile(*args):
        monkeypatch.setattr(module, where, stock)
        others.extend(at_once(lambda: hf_fastattn.patch(model)))
        others.extend(at_once(lambda: hf_fastattn.unpatch(model)))
        return stock(*args)

    monkeypatch.setattr(module, where, meanwhile)
    patch = hf_fastattn.patch(model)
    assert len(others) == 2 and all("Another thread is in patch() or unpatch()" in str(each) for each in others)
    assert torch.equal(ask(model, 0), expected[0]) and patch.captures
    hf_fastattn.unpatch(model)
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before and len(model._forward_hooks) == 0
    assert model.config._attn_implementation == "sdpa" and torch.equal(ask(model, 0), expected[0])


def test_one_thread_undoes_a_patch(model, monkeypatch):
    """The other comes after the first has seen that the patch is not undone, and waits for it."""
    patch, threads, errors = hf_fastattn.patch(model), [], []

    def undo():
        try:
            patch.undo()
        except ValueError as error:
            errors.append(str(error))

    class Slow(type(patch)):
        @property
        def undone(self):
            seen = self.done
            if not threads:
                threads.append(threading.Thread(target=undo))
                threads[0].start()
                threads[0].join(0.5)
            return seen

        @undone.setter
        def undone(self, value):
            self.done = value

    patch.done = vars(patch).pop("undone")
    monkeypatch.setattr(patch, "__class__", Slow)
    undo()
    threads[0].join()
    assert len(errors) == 1 and "already undone" in errors[0]


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


def test_undo_in_the_middle_of_a_call(model):
    """The call continues without graphs, with a warning; the next one runs as before patch()."""
    ids = prompts("no_padding", "cpu")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    patch = hf_fastattn.patch(model)
    with pytest.warns(match="undone during a call"):
        found = model.generate(ids, max_new_tokens=8, do_sample=False, logits_processor=[At(3, patch.undo)])
    assert torch.equal(found, expected) and patch.captures == 1 and not patch._generation.calls
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected) and patch.captures == 1
