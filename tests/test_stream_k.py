"""Stream-K over many queries: when `lean` is chosen for prefill, and that its results are correct."""

from __future__ import annotations

import pytest
import torch

from hf_fastattn.kernels import HAS_TRITON, TritonKernel
from hf_fastattn.kernels.host import gpu
from hf_fastattn.kernels.spec import KV, Spec

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from hf_fastattn.kernels.attention import lean, prefill_hopper
from hf_fastattn.kernels.attention.schedule import pays, splits_of

PREFILL = TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")


def operands(q_len, kv_len, heads=32, kv_heads=8, head_dim=128, batch=1, dtype=torch.bfloat16):
    q = torch.empty(1, dtype=dtype).expand(batch, heads, q_len, head_dim)
    k = torch.empty(1, dtype=dtype).expand(batch, kv_heads, kv_len, head_dim)
    return q, KV(k, k)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(prefill_hopper, "why_not", lambda q, kv, sinks=0, shares=False: None if q.shape[2] >= 65 else "few")


@pytest.mark.parametrize(
    "shape, chosen",
    [
        ({"q_len": 17, "kv_len": 65536}, "lean"),
        ({"q_len": 64, "kv_len": 65536}, "lean"),
        ({"q_len": 128, "kv_len": 65536}, "prefill_hopper"),  # which also splits K and V
        ({"q_len": 256, "kv_len": 65536, "kv_heads": 32}, "prefill_hopper"),
        ({"q_len": 1, "kv_len": 8192, "heads": 71, "kv_heads": 1, "head_dim": 64}, "lean"),
        ({"q_len": 512, "kv_len": 65536}, "prefill_hopper"),  # almost one block per SM
        ({"q_len": 1024, "kv_len": 8192}, "prefill_hopper"),
        ({"q_len": 512, "kv_len": 512}, "prefill_hopper"),  # too short for a merge
        ({"q_len": 300, "kv_len": 300, "batch": 16}, "prefill_hopper"),
        ({"q_len": 17, "kv_len": 65536, "batch": 64}, "lean"),  # lean packs the heads of a group
        ({"q_len": 300, "kv_len": 2048, "batch": 16}, "prefill_hopper"),
        ({"q_len": 17, "kv_len": 65536, "head_dim": 256}, "lean"),
        ({"q_len": 17, "kv_len": 65536, "head_dim": 512}, "prefill"),
        ({"q_len": 17, "kv_len": 65536, "dtype": torch.float32}, "prefill"),
    ],
    ids=str,
)
def test_the_kernel_that_is_estimated_fastest_runs(shape, chosen, hopper):
    assert PREFILL.choice(*operands(**shape), Spec())[0] == chosen


def test_the_hopper_kernel_cuts_blocks_that_leave_much_of_the_gpu_idle(hopper):
    splits = {q_len: splits_of(*operands(q_len, 65536), Spec())[0] for q_len in (128, 256, 384, 512, 640, 1024, 4096)}
    assert splits[128] == 4 and splits[256] == 2 and splits[384] == splits[640] == 4
    assert splits[512] == splits[1024] == splits[4096] == 1  # full waves
    costs = [splits_of(*operands(q_len, 65536), Spec())[1] for q_len in range(65, 2048)]
    assert all(b <= 1.6 * a for a, b in zip(costs, costs[128:], strict=False) if a > 2 * costs[0])  # the cost has no large step
    assert splits_of(*operands(256, 65536), Spec(window=256))[0] == 1
    assert splits_of(*operands(512, 512), Spec())[0] == 1


def test_a_window_counts_as_what_it_shows(hopper):
    q, kv = operands(64, 65536)
    assert pays(q, kv, Spec(), 1.0) and not pays(q, kv, Spec(window=64), 1.0)
    assert pays(q, kv, Spec(window=4096, sinks=4), 1.0) and not pays(q, kv, Spec(window=64, sinks=4), 1.0)


def test_sinks_of_wide_heads_spill_but_on_hopper(hopper, monkeypatch):
    q, kv = operands(64, 65536, head_dim=256)
    assert pays(q, kv, Spec(window=4096, sinks=4), 1.0)
    monkeypatch.setattr(gpu, "arch", lambda device: 80)
    assert pays(q, kv, Spec(), 1.0) and not pays(q, kv, Spec(window=4096, sinks=4), 1.0)


def test_what_is_chosen_runs(monkeypatch):
    """The kernel that `choice` returns is called, with the arguments of the call."""
    monkeypatch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")
    called = []
    monkeypatch.setattr(TritonKernel, "choice", lambda self, q, kv, spec: ("lean", None))
    monkeypatch.setattr(lean, "lean", lambda q, kv, spec, spans, **options: called.append((q, kv, spec, spans, options)))
    q, kv = operands(17, 100, dtype=torch.float16)
    TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")(q, kv, Spec(window=5), return_lse=True)
    assert called == [(q, kv, Spec(window=5), None, {"return_lse": True})]
