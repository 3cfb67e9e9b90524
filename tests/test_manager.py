"""The manager of a patched model's init_continuous_batching(): the names of Transformers, the tokens of generate()."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from calls import At
from models import tiny
from test_batch import alone, options, prompts, ragged, sizes
from transformers import LogitsProcessor

import hf_fastattn
from hf_fastattn import hf


class Slow(LogitsProcessor):
    """Makes steps wait for `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.reached = threading.Event()

    def __call__(self, input_ids, scores):
        self.reached.set()
        assert self.go.wait(60)
        return scores


@pytest.fixture
def model():
    model = tiny("llama", "eager")
    with hf_fastattn.patch(model):
        yield model
    assert not [thread for thread in threading.enumerate() if "hf_fastattn" in thread.name]


def test_requests_that_come_while_it_runs(model):
    texts = ragged()
    expected = alone(model, texts)
    manager = model.init_continuous_batching(options(), sizes())
    assert not manager.is_running() and manager.get_result(timeout=0) is None
    with manager:
        assert manager.is_running()
        names = manager.add_requests(texts[:4])
        first = [manager.get_result(name) for name in names]
        names = [manager.add_request(ids, request_id=f"text {index}") for index, ids in enumerate(texts[4:])]
        found = {result.request_id: result for _, result in zip(names, manager, strict=False)}
    assert [each.generated_tokens for each in (*first, *map(found.get, names))] == expected
    assert not manager.is_running() and all(each.is_finished() and each.error is None for each in first)
    with pytest.raises(RuntimeError, match="was stopped and takes no request"):
        manager.add_request([5])
    manager.start()
    assert manager.get_result(manager.add_request(texts[0])).generated_tokens == expected[0]
    manager.stop()


def test_longer_texts_samples_and_ends(model):
    """A text for which the tables have no room waits for the others."""
    short, long = prompts(5), prompts(100)
    plain, expected = alone(model, short), alone(model, long)[0]
    config = options(num_return_sequences=2, do_sample=True, top_k=1)
    with model.continuous_batching_context_manager(config, continuous_batching_config=sizes()) as manager:
        manager.add_request(short[0], "short")
        manager.add_request(long[0], "long")
        manager.add_request(short[0], "ended", eos_token_id=plain[0][2])
        manager.add_request(short[0], "fewer", max_new_tokens=3)
        found = {result.request_id: result.generated_tokens for _, result in zip(range(8), manager, strict=False)}
    assert found["short"] == found["short__child#0"] == plain[0] and found["long"] == found["long__child#0"] == expected
    assert found["ended"] == found["ended__child#0"] == plain[0][:3] == found["fewer"]


def test_streams_and_handlers(model):
    text = prompts(20)[0]
    expected = alone(model, [text])[0]
    with model.init_continuous_batching(options(), sizes()) as manager:
        parts = [*manager.request_id_iter(manager.add_request(text, streaming=True, record_timestamps=True))]
        assert [each.generated_tokens for each in parts] == [expected[: count + 1] for count in range(len(expected))]
        assert [each.is_finished() for each in parts] == [False] * (len(expected) - 1) + [True]
        assert len(parts[-1].timestamps) == len(expected)

        async def handled():
            found, ended = [], asyncio.Event()

            def take(result):
                found.append(result.generated_tokens)
                if result.is_finished():
                    ended.set()

            manager.register_result_handler(manager.add_request(text, streaming=True), take)  # after its first tokens
            await asyncio.wait_for(ended.wait(), 60)
            return found

        assert asyncio.run(handled()) == [expected[: count + 1] for count in range(len(expected))]
        name = manager.add_request(text)
        with pytest.raises(RuntimeError, match="no running event loop"):  # the result stays, if it is there
            manager.register_result_handler(name, print)
        manager.stop()
        with pytest.raises(RuntimeError, match="no running event loop"):
            manager.register_result_handler(name, print)
    assert manager.get_result(name).generated_tokens == expected and manager.get_result() is None


def test_stops_cancels_and_pauses(model):
    texts, slow = prompts(5, 20, 7), Slow()
    manager = model.init_continuous_batching(options(), sizes(max_requests_per_batch=1), logits_processor=[slow])
    names = manager.add_requests(texts)
    manager.start()
    slow.reached.wait(60)
    manager.cancel_request(names[1])
    slow.go.set()
    assert manager.get_result(names[1]).error == "The request was cancelled."
    assert manager.get_result(names[2]).generated_tokens == alone(model, texts[2:])[0]
    with manager.pause():
        name = manager.add_request(texts[0])
        time.sleep(0.05)
        assert manager.get_result(name, timeout=0.01) is None
        with pytest.raises(RuntimeError, match="paused and cannot end"):
            manager.stop()
    assert manager.get_result(name).error is None
    slow.go.clear()
    slow.reached.clear()
    name = manager.add_request(texts[0])
    slow.reached.wait(60)
    manager.stop(block=False, hard_stop=True)
    slow.go.set()
    manager.join()
    assert "was stopped before the end" in manager.get_result(name).error
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass


def test_ids_of_requests(model):
    """A cancellation that comes too late is not that of a later request; names are given once, also those of samples."""
    config, (text,) = options(max_new_tokens=2, do_sample=True, num_return_sequences=2), prompts(5)
    with model.init_continuous_batching(config, sizes()) as manager:
        for request in ("text", "req_0"):
            manager.cancel_request(request)
            assert manager.get_result(manager.add_request(text, request)).error is None
            assert manager.get_result(f"{request}__child#0").error is None
            manager.cancel_request(request)
        with manager.pause():
            manager.add_request(text, "req_0")
            assert manager.add_requests([text, text]) == ["req_1", "req_2"]
            with pytest.raises(ValueError, match="There is a request 'req_0__child#0' already"):
                manager.add_request(text, "req_0__child#0")
            manager.add_request(text, "of the caller__child#0")
            with pytest.raises(ValueError, match="There is a request 'of the caller__child#0' already"):
                manager.add_request(text, "of the caller")


def test_pauses_that_would_wait_for_themselves(model):
    text, errors = prompts(5)[0], []

    def pause():
        with pytest.raises(RuntimeError, match="would wait for it"), manager.pause():
            pass
        errors.append("a pause in a step")

    made = [At(0, pause)]
    with model.init_continuous_batching(options(max_new_tokens=4000), sizes(), logits_processor=made) as manager:
        next(manager.request_id_iter(manager.add_request(text, streaming=True)))
        assert errors
        with manager.pause(), pytest.raises(RuntimeError, match="would wait for the manager"):
            model.generate_batch([text], options())
        manager.stop(hard_stop=True)
    assert model.generate_batch([text], options())["req_0"].error is None


def test_another_dtype_between_requests(model):
    text = prompts(5)[0]
    with model.init_continuous_batching(options(), sizes()) as manager:
        for dtype in (torch.bfloat16, torch.float32):
            assert manager.get_result(manager.add_request(text)).error is None
            with manager.pause():
                model.to(dtype)
                manager.add_request(text)
            assert manager.get_result().error is None


def test_a_model_that_changes_in_a_pause(model):
    start = prompts(60)[0]
    with model.init_continuous_batching(options(max_new_tokens=200), sizes()) as manager:
        streams = manager.request_id_iter(manager.add_request([*start, 5], streaming=True))
        next(streams)
        with manager.pause():
            for parameter in model.parameters():
                parameter.data.mul_(1.3)  # which torch does not count
        name = manager.add_request([*start, 6], max_new_tokens=8)
        assert manager.get_result(name).generated_tokens == alone(model, [[*start, 6]])[0]
        manager.stop(block=False, hard_stop=True)
        manager.start()
        assert manager.get_result(manager.add_request(start, max_new_tokens=1)).error is None


def test_errors_and_other_calls(model):
    text = prompts(20)[0]
    expected = alone(model, [text])[0]
    fails = At(4, Mock(side_effect=ZeroDivisionError("of the user")))
    with model.init_continuous_batching(options(), sizes(), logits_processor=[fails]) as manager:
        assert manager.get_result(manager.add_request(text)).error == "ZeroDivisionError: of the user"
        manager.join()
        with pytest.raises(RuntimeError, match="has ended"):
            manager.add_request(text)
    manager = model.init_continuous_batching(options(), sizes())
    manager.start()
    assert model.generate_batch([text], options(), sizes())["req_0"].generated_tokens == expected  # between requests
    with torch.inference_mode():
        assert alone(model, [text])[0] == expected
    assert manager.get_result(manager.add_request(text)).generated_tokens == expected
    del manager  # without stop()
    gc.collect()
    for thread in threading.enumerate():
        if "hf_fastattn" in thread.name:
            thread.join(60)


def test_an_undone_patch():
    model, text, slow = tiny("llama", "eager"), prompts(20)[0], Slow()
    patch = hf_fastattn.patch(model)
    manager = model.init_continuous_batching(options(), sizes(), logits_processor=[slow])
    manager.start()
    name = manager.add_request(text)
    slow.reached.wait(60)
    patch.undo()
    slow.go.set()
    assert "The patch was undone" in manager.get_result(name).error
    manager.join()
    with pytest.raises(RuntimeError, match="The patch was undone"):
        manager.add_request(text)
    assert "init_continuous_batching" not in vars(model)


REFUSED = [
    *(({"input_ids": []}, "Prompt 0 is empty"), ({"input_ids": [500]}, "ids from 500 to 500")),
    ({"input_ids": [5], "max_new_tokens": 0}, "at least 1; got 0"),
    ({"input_ids": [5], "temperature": 0.5}, "does not support 'temperature'"),
    ({"input_ids": [5], "request_id": "taken"}, "There is a request 'taken' already"),
    ({"input_ids": [5], "request_id": 7}, "request_id is a string, .*got 7 and None"),
    ({"input_ids": [5], "eos_token_id": ["a"]}, r"or a list of them; got None and \['a'\]"),
    ({"input_ids": [5], "eos_token_id": 3}, "does not go with min_new_tokens"),
]


def test_refused_requests_and_managers(model):
    manager = model.init_continuous_batching(options(min_new_tokens=1), sizes())
    manager.add_request([5], "taken")
    for given, error in REFUSED:
        with pytest.raises((ValueError, TypeError), match=error):
            manager.add_request(**given)
    with pytest.raises(ValueError, match="does not support num_beams=2"):
        model.init_continuous_batching(options(num_beams=2))
    with pytest.raises(ValueError, match="got page_size=48"):
        model.init_continuous_batching(options(), sizes(page=48))
    assert hf.GENERATE in vars(model)
