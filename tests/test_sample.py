"""The draw of a token in one launch: the same tokens as Transformers' processors and torch.multinomial under the same seed."""

from functools import partial

import pytest
import torch
from calls import DEVICE, runs_kernels
from cases import on_gpu, pairs
from models import tiny
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf.sampling import split
from hf_fastattn.kernels.decode import sample
from hf_fastattn.kernels.decode.sample import Sampler, Settings, _sample_torch

CLASSES = {
    "temperature": stock.TemperatureLogitsWarper,
    "top_k": stock.TopKLogitsWarper,
    "top_p": stock.TopPLogitsWarper,
    "min_p": stock.MinPLogitsWarper,
}


def processors(**settings):
    return LogitsProcessorList(CLASSES[name](value) for name, value in settings.items())


def drawn(function):
    """What it returns, and the next number of the generator."""
    torch.manual_seed(0)
    return function(), torch.rand(1, dtype=torch.float32, device=DEVICE)


def same(*functions):
    """That two of them return the same tokens, and draw as many numbers."""
    (a, after_a), (b, after_b) = map(drawn, functions)
    assert torch.equal(a, b) and torch.equal(after_a, after_b)


def by_stock(scores, settings):
    return torch.multinomial(processors(**settings)(None, scores).softmax(-1), 1)


def scores_of(rows, vocab, seed=0, scale=2.0, dtype=torch.float32):
    torch.manual_seed(seed)
    return (scale * torch.randn(rows, vocab, device=DEVICE)).to(dtype).float()


CHOICES = pairs((None, 0.5), (None, 1, 50), (None, 1.0, 0.9, 0.1), (None, 0.05, 1.0), (1000, 9001))


@runs_kernels
@pytest.mark.parametrize("values", CHOICES, ids=str)
def test_tokens_are_those_of_transformers(values):
    """Of one part and of three; 0.3 is flat: most tokens that are drawn first are removed by top-p."""
    settings = {name: value for name, value in zip(CLASSES, values[:4], strict=True) if value is not None}
    first, found = split(processors(**settings))
    assert first == 0
    scores = scores_of(2, values[4], scale=0.3 if values[4] == 1000 else 3.0)
    scores[1, ::3] = -torch.inf
    same(partial(Sampler(), scores, found), partial(by_stock, scores, settings))


TIES = [
    *((Settings(top_k=50), 1000), (Settings(top_k=3, top_p=0.5), 1000)),
    *((Settings(2.0, 64, 0.8, 0.1), 1000), (Settings(top_p=0.7), 1000)),
    *on_gpu((Settings(0.5, 64, 0.9), 152_064), (Settings(top_p=0.9), 152_064), (Settings(2.0), 262_400)),
]


@runs_kernels
@pytest.mark.parametrize("settings, vocab", TIES, ids=str)
def test_ties(settings, vocab):
    """Of few values, as bf16 has: all that equal the last of top-k are kept, and of those at the limit of top-p the last ones.

    The second row has more equal tokens than a part can store.
    """
    scores = scores_of(2, vocab, dtype=torch.bfloat16).mul(2).round().div(2)
    scores[1] = scores[1].clamp(max=0.5)
    same(partial(Sampler(), scores, settings), partial(_sample_torch, scores, settings))


@runs_kernels
@pytest.mark.parametrize("near", (30, 60))
def test_larger_tokens_behind_equal_ones(near):
    """A constraint that sets what it forbids to a finite number: a part has more equal tokens than it can store before those that
    are allowed, and the next part too few of these for top-k, or enough."""
    scores = torch.full((4, 8192), -1e4, device=DEVICE)
    scores[:, 4066 : 4096 + near] = scores_of(4, 30 + near, scale=0.1)
    settings = Settings(top_k=31)
    same(partial(Sampler(), scores, settings), partial(_sample_torch, scores, settings))


@runs_kernels
def test_few_tokens_are_possible():
    """k above the vocabulary and above the number of finite scores, which may be one; a vocabulary of many parts."""
    for vocab, live, k in ((40, slice(None), 50), (5000, slice(4990, None), 50), (5000, slice(7, 8), 5)):
        scores = torch.full((2, vocab), -torch.inf, device=DEVICE)
        scores[:, live] = scores_of(2, vocab)[:, live]
        settings = {"top_k": k, "top_p": 0.9}
        same(partial(Sampler(), scores, split(processors(**settings))[1]), partial(by_stock, scores, settings))


@runs_kernels
def test_a_sampler_takes_other_shapes():
    """Rows that come and go, as in a batch, and vocabularies of many parts; whatever torch's default dtype."""
    sampler, settings = Sampler(), {"top_k": 20, "top_p": 0.8}
    torch.set_default_dtype(torch.float16)
    try:
        for rows, vocab in ((2, 5000), (1, 5000), (3, 5000), (2, 100), *on_gpu((64, 128_256), (5, 152_064))):
            scores = scores_of(rows, vocab)
            same(partial(sampler, scores, split(processors(**settings))[1]), partial(by_stock, scores, settings))
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_processors_run_as_they_are():
    """Those before, in another order, of a subclass, or with other options than those of generate()."""

    class Own(stock.TopKLogitsWarper): ...

    t, k, p, m = (CLASSES[name](value) for name, value in (("temperature", 0.5), ("top_k", 9), ("top_p", 0.5), ("min_p", 0.1)))
    penalty = stock.RepetitionPenaltyLogitsProcessor(1.1)
    for given, first in (
        ([], 0),
        ([t, k, p, m], 0),
        ([penalty, k, m], 1),
        ([k, t], 1),
        ([p, p], 1),
        ([m, penalty], 2),
        ([t, Own(9), p], 2),
        ([t, stock.TopKLogitsWarper(sample.MOST_K + 1), p], 2),
        ([k, stock.TopPLogitsWarper(0.5, min_tokens_to_keep=2)], 2),
        ([k, stock.MinPLogitsWarper(0.5, filter_value=-100.0)], 2),
    ):
        assert split(given)[0] == first, given
    assert split([t, k, p, m])[1] == Settings(0.5, 9, 0.5, 0.1) and split([p])[1] == Settings(top_p=0.5)


@runs_kernels
def test_other_functions_get_the_scores():
    """Of a loop that is not Transformers' own."""
    given = processors(top_k=3)
    scores = scores_of(2, 50)
    want = given(None, scores)
    got = hf.Sampling(given)(None, scores)
    softmax = torch.nn.functional.softmax
    for function in (torch.argmax, torch.exp, partial(softmax, dim=0), partial(torch.topk, k=2)):
        torch.testing.assert_close(function(got), function(want), equal_nan=True)
    probabilities = softmax(got, dim=-1)
    torch.testing.assert_close(torch.sum(probabilities, -1), softmax(want, dim=-1).sum(-1))
    many = partial(torch.multinomial, num_samples=2)
    same(partial(many, probabilities), partial(many, softmax(want, dim=-1)))


def by_hand(model, input_ids, logits_processor, **_):
    return logits_processor(input_ids, model(input_ids).logits[:, -1]).argmax(-1)


CALLS = [  # options of generate(), and the launches
    ({}, 4),
    ({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2}, 4),
    *(
        ({"top_k": 0, **more}, 4)
        for more in ({"num_return_sequences": 3}, {"return_dict_in_generate": True, "output_logits": True})
    ),
    ({"return_dict_in_generate": True, "output_scores": True}, 0),
    *(({"do_sample": False}, 0), ({"num_beams": 2}, 0), ({"prompt_lookup_num_tokens": 2}, 0), ({"custom_generate": by_hand}, 0)),
]


@runs_kernels
@pytest.mark.parametrize("options, launches", CALLS, ids=lambda value: str([*value] if isinstance(value, dict) else value))
def test_generate_draws_as_before(options, launches, monkeypatch):
    count, run = [], sample.Sampler.__call__
    monkeypatch.setattr(sample.Sampler, "__call__", lambda self, x, s: count.append(s) or run(self, x, s))
    model = tiny("llama").to(DEVICE)
    ids = torch.arange(5, 15, device=DEVICE).view(2, 5)[: 1 if "prompt_lookup_num_tokens" in options else 2]
    options = {"do_sample": True, "max_new_tokens": 4, **options}
    call = lambda: model.generate(ids, **options)  # noqa: E731
    want, _ = drawn(call)
    assert not count
    with hf_fastattn.patch(model, "reference", compile="lazy"):  # whose attention is not interpreted
        got, _ = drawn(call)
    assert len(count) == launches
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    for name in ("logits", "scores"):
        for a, b in zip(getattr(got, name, None) or (), getattr(want, name, None) or (), strict=True):
            torch.testing.assert_close(a, b)


def test_a_processor_whose_code_someone_replaced_runs(monkeypatch):
    assert split(processors(temperature=0.5, top_k=9)) == (0, Settings(0.5, 9))
    monkeypatch.setattr(CLASSES["top_k"], "__call__", lambda self, ids, scores: scores)
    assert split(processors(temperature=0.5, top_k=9)) == (2, Settings())
