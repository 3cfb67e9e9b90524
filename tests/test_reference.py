"""The reference in parts: the memory for long inputs is bounded, and the result is the same."""

import weakref

import pytest
import torch
from calls import attention
from cases import CASES, make
from hypothesis import given
from test_kernels import REFERENCE, any_case, check_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spans import build_spans


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of the tensors that operations inside have created, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.note(x.untyped_storage())
        return result

    def note(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size) -> None:
        self.known.discard(key)
        self.live -= size


def test_32k_queries_and_keys_take_little_memory():
    n = 1 << 15
    q, k, v = (torch.randn(1, heads, n, 8) for heads in (2, 1, 1))
    span = build_spans(1, n, n, q.device, attention_mask=torch.ones(1, n, dtype=torch.bool))
    with LiveBytes() as memory:
        out = attention(q, k, v, span, window=2000)
    assert out.nbytes < memory.peak < 64 << 20  # the scores of one query head would be 4 GiB
    for i in (0, 1999, 2000, 20_000, n - 1):
        first = max(0, i - 1999)
        scores = q[0, :, i] @ k[0, 0, first : i + 1].T * 8**-0.5
        torch.testing.assert_close(out[0, :, i], scores.softmax(-1) @ v[0, 0, first : i + 1])


SELECTED = [case for case in CASES if case.q_len > 1 and case.head_dim <= 80]


@pytest.mark.skipif(not REFERENCE.runs_here(), reason="needs a process that does not interpret")
@pytest.mark.parametrize("scores", [1, 700])
@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.id)
def test_in_parts(case, scores, device, monkeypatch):
    whole = attention(*inputs_of(x := make(case, device)), **x.options)
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", scores)
    check_case(REFERENCE, case, device)
    parts = attention(*inputs_of(x), **x.options)
    # The rounding of products depends on shapes.
    torch.testing.assert_close(parts, whole, **{"rtol": 0, "atol": 2e-5} if case.dtype == "fp32" else {})


def inputs_of(x):
    return x.q, x.k, x.v, x.spans


@pytest.mark.skipif(not REFERENCE.runs_here(), reason="needs a process that does not interpret")
def test_any_case_in_parts(device, monkeypatch):
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 90)

    @given(any_case())
    def check(case):
        check_case(REFERENCE, case, device)

    check()
