"""Stream-K over many queries: when `lean` is chosen for prefill, and that its results are correct."""

from __future__ import annotations

import pytest
import torch

from hf_fastattn.kernels import HAS_TRITON, TritonKernel
from hf_fastattn.kernels.host import gpu, tables
from hf_fastattn.kernels.spec import KV, Spec

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from hf_fastattn.kernels.attention import lean, schedule
from hf_fastattn.kernels.attention.schedule import brief, choose, is_brief, pack_of, pays, splits_of

PREFILL = TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")


def operands(q_len, kv_len, heads=32, kv_heads=8, head_dim=128, batch=1, dtype=torch.bfloat16):
    q = torch.empty(batch, heads, q_len, head_dim, dtype=dtype, device="meta")
    k = torch.empty(batch, kv_heads, kv_len, head_dim, dtype=dtype, device="meta")
    return q, KV(k, k)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)


@pytest.mark.parametrize(
    "shape, chosen",
    [
        ({"q_len": 17, "kv_len": 65536}, "prefill_hopper"),  # the heads of a group share blocks
        ({"q_len": 64, "kv_len": 65536, "heads": 8}, "lean"),  # half of a block would be empty
        ({"q_len": 300, "kv_len": 300, "batch": 16}, "prefill_hopper"),
        ({"q_len": 17, "kv_len": 65536, "head_dim": 84}, "lean"),
        ({"q_len": 17, "kv_len": 512, "head_dim": 84, "batch": 4}, "prefill"),  # too short for a merge
        ({"q_len": 1, "kv_len": 8192, "heads": 71, "kv_heads": 1}, "lean"),  # few keys, in blocks of few rows
        ({"q_len": 1, "kv_len": 8192, "heads": 71, "kv_heads": 1, "batch": 9}, "prefill_hopper"),  # in all too many bytes
        ({"q_len": 1, "kv_len": 512, "heads": 71, "kv_heads": 1}, "prefill_hopper"),  # too short for a merge
        ({"q_len": 1, "kv_len": 65536, "heads": 71, "kv_heads": 1}, "prefill_hopper"),
        ({"q_len": 1, "kv_len": 1024, "heads": 71, "kv_heads": 1, "head_dim": 256}, "prefill_hopper"),
        ({"q_len": 1, "kv_len": 1024, "heads": 71, "kv_heads": 1, "dtype": torch.float32}, "prefill"),
        ({"q_len": 128, "kv_len": 128}, "prefill_hopper"),
        ({"q_len": 128, "kv_len": 8192, "batch": 0}, "prefill_hopper"),  # which refuses it
        ({"q_len": 17, "kv_len": 65536, "head_dim": 512}, "prefill"),
        ({"q_len": 17, "kv_len": 65536, "dtype": torch.float32}, "prefill"),
    ],
    ids=str,
)
def test_the_kernel_that_is_estimated_fastest_runs(shape, chosen, hopper):
    assert PREFILL.choice(*operands(**shape), Spec())[0] == chosen


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [17, 32, 64, 71, 128, 284])
def test_few_keys_are_read_by_several_blocks_of_rows(rows, head_dim, hopper):
    """Up to a number of bytes in all; then larger blocks, and at last one block of all rows, or the kernels for more than 64."""
    device = torch.device("cuda", 0)
    for block, most_bytes, most_keys in schedule.BRIEF[head_dim]:
        blocks = -(-rows // block)
        most = min(most_bytes // (blocks * 2 * head_dim * 2), most_keys)
        found = tables.decode(device, torch.bfloat16, head_dim, block, blocks)
        if rows > block:
            assert brief(device, torch.bfloat16, head_dim, rows, 1, most) == found
            assert choose(device, torch.bfloat16, head_dim, rows, 1, most, True) == (found, True)
            assert brief(device, torch.bfloat16, head_dim, rows, 1, most + 1) != found
        assert brief(device, torch.bfloat16, head_dim, block, 1, 64) is None or block > schedule.BRIEF[head_dim][0][0]
        assert brief(device, torch.bfloat16, head_dim, rows, 67, 64) is None  # no room for two splits
    config, fixed = choose(device, torch.bfloat16, head_dim, rows, 1, 1 << 20, True)
    assert min(rows, 64) <= config.BLOCK_M and fixed == (rows <= 64)


def test_a_window_limits_the_keys_that_blocks_read(hopper):
    q, kv = operands(1, 65536, heads=71, kv_heads=1)
    assert is_brief(q, kv, Spec(window=4096, sinks=4)) and not is_brief(q, kv, Spec(window=8192, sinks=4))


@pytest.mark.parametrize("head_dim, chosen", [(128, "prefill_hopper"), (84, "prefill")])
def test_intervals_are_for_the_prefill_kernels(head_dim, chosen, hopper):
    """Not for stream-K, which does not read them."""
    for kv_len in (65536, 512):
        q, kv = operands(17, kv_len, head_dim=head_dim)
        assert PREFILL.choice(q, kv, Spec(), rows=True)[0] == chosen


def splits(q_len, kv_len, spec=Spec(causal=False), heads=32, kv_heads=8, head_dim=128, batch=1):  # noqa: B008 (a tuple)
    inputs = operands(q_len, kv_len, heads, kv_heads, head_dim, batch)
    return splits_of(*inputs, spec, pack_of(q_len, heads // kv_heads), head_dim)


def test_the_hopper_kernel_splits_blocks_that_leave_much_of_the_gpu_idle(hopper):
    found = {q_len: splits(q_len, 65536) for q_len in (17, 33, 64, 65, 128, 256, 384, 512)}
    assert found == {17: (0, 16), 33: (0, 8), 64: (0, 8), 65: (0, 5), 128: (0, 4), 256: (0, 2), 384: (0, 4), 512: (128, 1)}
    assert splits(128, 2048) == (0, 4) and splits(300, 2048) == (80, 1) and splits(512, 512) == (128, 1)
    assert splits(17, 65536, heads=16, kv_heads=2)[1] > 16  # two heads alone fill the GPU as well
    assert splits(256, 65536, Spec(window=256)) == (64, 1)


def test_blocks_that_fill_the_gpu_are_not_split(hopper):
    assert splits(640, 65536) == (132, 4) and splits(1024, 65536) == (256, 1) and splits(4096, 65536) == (1024, 1)
    assert splits(128, 32768, heads=71, kv_heads=1, head_dim=64, batch=4) == (264, 6)  # 20 blocks are left
    assert splits(1024, 65536, heads=28, kv_heads=4, head_dim=64)[0] == 132


def test_causal_blocks_of_a_prompt_are_balanced_by_their_order(hopper):
    causal = Spec()
    assert all(splits(n, n, causal)[1] == 1 for n in (640, 1024, 1200, 2048, 4096, 5000))
    assert splits(640, 65536, causal) == (132, 4)  # a chunk behind a long past


def test_a_window_counts_as_its_visible_keys(hopper):
    q, kv = operands(64, 65536)
    assert pays(q, kv, Spec()) and not pays(q, kv, Spec(window=64))
    assert pays(q, kv, Spec(window=4096, sinks=4)) and not pays(q, kv, Spec(window=64, sinks=4))


def test_sinks_of_wide_heads_spill_except_on_hopper(hopper, monkeypatch):
    q, kv = operands(64, 65536, head_dim=256)
    assert pays(q, kv, Spec(window=4096, sinks=4))
    monkeypatch.setattr(gpu, "arch", lambda device: 80)
    assert pays(q, kv, Spec()) and not pays(q, kv, Spec(window=4096, sinks=4))


def test_the_chosen_kernel_runs(monkeypatch):
    """The kernel that `choice` returns is called, with the arguments of the call."""
    monkeypatch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")
    called = []
    monkeypatch.setattr(TritonKernel, "choice", lambda *args: ("lean", None))
    monkeypatch.setattr(lean, "lean", lambda q, kv, spec, spans, **options: called.append((q, kv, spec, spans, options)))
    q, kv = operands(17, 100, dtype=torch.float16)
    TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")(q, kv, Spec(window=5), return_lse=True)
    assert called == [(q, kv, Spec(window=5), None, {"return_lse": True})]
