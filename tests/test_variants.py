"""The number of kernel variants that Triton compiles for one model: few, and none for another length."""

from collections import Counter

import pytest
import torch
from calls import captured
from models import prompts, tiny

import hf_fastattn
from hf_fastattn.kernels import INTERPRETED
from hf_fastattn.kernels.host import launch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: launches are recorded and not compiled")


def _variant(start: launch.Launch) -> tuple:
    """The key of a compiled variant: kernel, constants, and whether each stride is 1 or a multiple of 16."""
    names = start.kernel.arg_names[-len(start.rest) :]
    constants = tuple((name, value) for name, value in zip(names, start.rest, strict=True) if name.isupper())
    strides = tuple(
        (value == 1, value % 16 == 0)
        for name, value in zip(names, start.rest, strict=True)
        if name.startswith("stride_") and name != "stride_sb"
    )
    return start.kernel.fn.__name__, constants, strides, tuple(start.meta.items())


@pytest.fixture
def variants(monkeypatch):
    found = set()
    call = launch.Launch.__call__

    def recording(self, *tensors):
        found.add(_variant(self))
        call(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", recording)
    return found


@pytest.mark.parametrize("backend, cache", [("fa2", "auto"), ("split_kv", None), ("lean", None), ("lean", "auto")])
def test_other_lengths_compile_nothing(backend, cache, variants):
    model = tiny("llama", num_hidden_layers=1)
    counts = []
    with hf_fastattn.patch(model, backend, cache=cache, graph=False):
        for length in (41, 48):  # more rows of queries than a decode kernel takes; odd, and a multiple of 16
            ids = prompts("no_padding", "cpu", rows=1, length=length)["input_ids"]
            model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
            counts.append(len(variants))
    assert counts[0] == counts[1], sorted(name for name, *_ in variants)
    assert counts[0] <= {"fa2": 4, "lean": 5, "split_kv": 5}[backend]  # norm, rotation, prefill, and one decode kernel or two


def test_padding_adds_one_variant_of_each_kernel(variants):
    model = tiny("llama", num_hidden_layers=1)
    with hf_fastattn.patch(model, "lean", graph=False), torch.no_grad():
        for padding in ("no_padding", "left_padding", "holes", "left_padding"):
            model.generate(**prompts(padding, "cpu", rows=2, length=40), max_new_tokens=2, do_sample=False)
    kinds = Counter(name for name, *_ in variants)
    attention = dict.fromkeys(("lean_kernel", "lean_merge_kernel", "prefill_kernel"), 2)
    assert kinds == attention | {"rms_norm_kernel": 1, "rope_kernel": 1}


def test_linear_layers_compile_once_for_each_length_and_number_of_weights_and_with_a_sum(variants):
    # Rows of 64, alone (the head) and of three weights; the output projection also adds, and the down projection (rows of 96).
    model = tiny("llama").half()
    with hf_fastattn.patch(model, "lean"), torch.no_grad(), captured():
        for token in (3, 4):
            model(torch.tensor([[token]]))
    kinds = Counter(name for name, *_ in variants)
    assert (kinds["linear_kernel"], kinds["gated_linear_kernel"]) == (4, 1)
