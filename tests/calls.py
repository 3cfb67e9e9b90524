"""Helpers: plain tensors for kernels, functions as kernels, code of a user in a call, pretending to capture a graph."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps

import pytest
import torch
from transformers import LogitsProcessor

from hf_fastattn.attention import step as steps
from hf_fastattn.kernels import HAS_TRITON, INTERPRETED, reference
from hf_fastattn.kernels.spec import Spec, call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
_RUN = HAS_TRITON and (INTERPRETED or DEVICE == "cuda")
runs_kernels = pytest.mark.skipif(not _RUN, reason="needs a GPU or TRITON_INTERPRET=1")
attention = partial(call, reference.attention)


def as_kernel(function):
    """A kernel for a backend, from function(q, k, v, spans, **options)."""

    @wraps(function)
    def kernel(q, kv, spec=Spec(), spans=None, **tensors):  # noqa: B008
        return function(q, *kv.plain(), spans, **spec._asdict(), **tensors)

    return kernel


class Launched:
    """A Triton kernel of which launch(kernel, grid, *args, **kwargs) is called in place of a launch."""

    def __init__(self, kernel, launch):
        self.kernel, self.launch = kernel, launch

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def __getitem__(self, grid):
        return partial(self.launch, self.kernel, grid)


def events_of(function) -> list[tuple[str, str]]:
    """What a profiler of this thread is told while function() runs: the kind of each event, and the name of the code."""
    found: list[tuple[str, str]] = []
    sys.setprofile(lambda frame, event, _: found.append((event, frame.f_code.co_name)))
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


class At(LogitsProcessor):
    """Calls act() at the n-th token, counted from 0. calls: how many tokens there were."""

    def __init__(self, n: int, act):
        self.n, self.act, self.calls = n, act, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.n + 1:
            self.act()
        return scores


class Puts:
    """A streamer that calls act() with the token number `at`; number 0 is the prompt."""

    def __init__(self, act, at: int = 3):
        self.act, self.left = act, at

    def put(self, value):
        if self.left == 0:
            self.act()
        self.left -= 1

    def end(self): ...


class Averaged(torch.nn.Module):
    """Adds an average over all tokens so far, which it changes in place. As a buffer, or as an attribute."""

    def __init__(self, inner, width, registered=True):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(width)) if registered else setattr(self, "mean", torch.zeros(width))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean((0, 1)))
        return self.inner(x + 2 * self.mean)


@contextmanager
def captured(tokens: int = 1, **of_storage: object) -> Iterator[None]:
    """A context in which the code runs as if a decode graph of so many tokens of each row captured it."""
    storage = type("Storage", (), {"real_tokens": None, **of_storage})()
    step = steps.begin(storage, steps.CAPTURED)
    step.tokens = tokens
    try:
        yield
    finally:
        steps.end(step)
