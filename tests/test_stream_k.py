"""The launches of `lean`: when it is chosen for prefill, its splits and merges, and that its results are correct."""

import pytest
import torch

from hf_fastattn.kernels import HAS_TRITON, TritonKernel, reference
from hf_fastattn.kernels.host import gpu, tables
from hf_fastattn.kernels.spec import KV, PLAIN, Spec
from hf_fastattn.registry import Backend

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from hf_fastattn.kernels.attention import lean, schedule, split_kv
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


ONE = {"heads": 71, "kv_heads": 1}
CHOSEN = [
    (17, 65536, {}, "prefill_hopper"),  # the heads of a group share blocks
    (64, 65536, {"heads": 8}, "lean"),  # half of a block would be empty
    *((300, 300, {"batch": 16}, "prefill_hopper"), (17, 65536, {"head_dim": 84}, "lean")),
    (17, 512, {"head_dim": 84, "batch": 5}, "prefill"),  # no room for two splits of each block
    (1, 8192, ONE, "lean"),  # few keys, in blocks of few rows
    (1, 8192, ONE | {"batch": 9}, "prefill_hopper"),  # in all too many bytes
    *((1, 100, ONE, "lean"), (1, 65536, ONE, "prefill_hopper"), (1, 1024, ONE | {"head_dim": 256}, "prefill_hopper")),
    *((1, 1024, ONE | {"dtype": torch.float32}, "prefill"), (128, 128, {}, "lean")),
    (300, 300, {}, "prefill_hopper"),  # no room for two splits of each block
    (128, 8192, {"batch": 0}, "prefill_hopper"),  # which refuses it
    *((17, 65536, {"head_dim": 512}, "prefill"), (17, 65536, {"dtype": torch.float32}, "prefill")),
]


def test_the_kernel_that_is_estimated_fastest_runs(hopper):
    for q_len, kv_len, shape, chosen in CHOSEN:
        assert PREFILL.choice(*operands(q_len, kv_len, **shape), Spec())[0] == chosen, (q_len, kv_len, shape)


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


def test_the_keys_and_bytes_that_blocks_read_are_limited_by_a_window_and_for_each_sm(hopper, monkeypatch):
    q, kv = operands(1, 65536, **ONE)
    assert is_brief(q, kv, Spec(window=4096, sinks=4)) and not is_brief(q, kv, Spec(window=8192, sinks=4))
    for sms in (132, 66):
        monkeypatch.setattr(gpu, "num_sms", lambda device, sms=sms: sms)
        most = schedule.BRIEF[64][0][1] * sms // 132 // (2 * 2 * 64 * 2)  # keys of two blocks
        found = [brief(torch.device("cuda", 0), torch.bfloat16, 64, 128, 1, kv_len) for kv_len in (most, most + 1)]
        assert found[0] is not None and found[1] is None


def plan(q_len, kv_len, heads=16, kv_heads=2, head_dim=128, batch=1, spec=Spec(), module=lean, padded=False):  # noqa: B008 (a tuple)
    """The launches for these shapes. padded: whether the rows of the batch may differ."""
    q, kv = operands(q_len, kv_len, heads, kv_heads, head_dim, batch)
    spans = torch.empty(batch, 1, 1, 6, dtype=torch.int32, device="meta") if padded else None
    splits = () if module is lean else (None,)
    return module._prepare.__wrapped__((q, *kv.tensors, spans, None, None), PLAIN, spec, False, *splits).launches


def merge_of(launches):
    """(partial results of one load, warps, rows of a program)."""
    merge = launches.then
    named = dict(zip(merge.kernel.arg_names[-len(merge.rest) :], merge.rest, strict=True))
    return named["CHUNK"], merge.meta["num_warps"], named["ROWS"]


MERGES = [
    (16, 2048, {}, 16, (32, 1, 1)),  # of 66 in a long buffer
    (17, 2048, {}, 16, (32, 1, 1)),  # of 44
    *((16, 8192, {}, 32, (32, 1, 1)), (8, 65536, {"heads": 28, "kv_heads": 4}, 64, (64, 2, 1))),
    *((1, 8192, ONE, 32, (32, 1, 1)), (1, 8192, {}, 64, (64, 2, 1)), (1, 65536, ONE | {"head_dim": 64}, 128, (128, 4, 1))),
    *((8, 8192, {"heads": 32, "kv_heads": 8, "head_dim": 64}, 32, (32, 1, 1)), (1, 100, {}, 1, None)),
]


def test_the_merge_of_fixed_splits_is_that_of_their_number(hopper):
    for q_len, kv_len, shape, splits, merge in MERGES:
        launches = plan(q_len, kv_len, **shape)
        given = dict(zip(launches.kernel.arg_names[launches.takes :], launches.rest, strict=True))
        assert given["splits"] == splits and (launches.then and merge_of(launches)) == merge, (q_len, kv_len, shape)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_merges_are_compiled_for_all_lengths(head_dim, padded, hopper):
    """Of short heads one has at most a partial result for each tile."""
    kinds, merges = set(), set()
    for kv_len in [1, *range(63, 40_000, 321), 1 << 20]:
        launches = plan(1, kv_len, head_dim=head_dim, batch=2 if padded else 1, padded=padded)
        kinds.add((launches.kernel, tuple(value for value in launches.rest if isinstance(value, bool)), *launches.meta.items()))
        merges.add(launches.then and merge_of(launches))
    assert len(kinds) <= 2 and 2 <= len(merges) <= 4  # few keys at head_dim 64 have fewer programs
    if padded and head_dim == 128:
        assert merge_of(plan(1, 2048, batch=2, padded=True))[:2] == (32, 1)  # of 68 in a long buffer
        assert merge_of(plan(1, 8192, batch=2, padded=True))[:2] == (128, 4)


TEAMS = [
    (300, 32768, {"heads": 32, "kv_heads": 32}, 5, 52, 1),  # all blocks of 64 rows, two programs on each SM
    (24, 65536, {"heads": 28, "kv_heads": 4, "batch": 4, "padded": True}, 3, 88, 1),
    (128, 65536, ONE, 12, 11, 6),  # 71 blocks of 128 rows fill six teams
    (4096, 65536, {}, 16, 8, 16),  # of 256 blocks
]


def test_one_program_for_each_block_of_queries_has_the_tiles_of_a_team(hopper):
    for q_len, kv_len, shape, team, teams, groups in TEAMS:
        launches = plan(q_len, kv_len, **shape)
        named = dict(zip(launches.kernel.arg_names[-len(launches.rest) :], launches.rest, strict=True))
        assert launches.grid == (team * teams, 1, 1) and named["team"] == team and named["num_sms"] == 132 // team
        assert named["heads"] == named["kv_heads"] * groups and named["BLOCK_B"] == (8 if shape.get("padded") else 1)


@pytest.mark.parametrize("module", [lean, split_kv])
def test_a_window_is_split_and_not_its_buffer(module, hopper):
    """So is the configuration, which depends on the number of keys at head_dim 64."""
    for head_dim in (64, 128):
        whole, window, sinks = (
            plan(1, kv_len, head_dim=head_dim, heads=64, kv_heads=8, spec=spec, module=module)
            for kv_len, spec in ((1024, Spec()), (65536, Spec(window=1024)), (65536, Spec(window=1020, sinks=4)))
        )
        assert whole.grid == window.grid == sinks.grid and whole.meta == window.meta
        assert merge_of(whole) == merge_of(window)


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
    """Others it does not split."""
    found = {q_len: splits(q_len, 65536) for q_len in (17, 33, 64, 65, 128, 256, 384, 512)}
    assert found == {17: (0, 16), 33: (0, 8), 64: (0, 8), 65: (0, 5), 128: (0, 4), 256: (0, 2), 384: (0, 4), 512: (128, 1)}
    assert splits(128, 2048) == (0, 4) and splits(300, 2048) == (80, 1) and splits(512, 512) == (128, 1)
    assert splits(17, 65536, heads=16, kv_heads=2)[1] > 16  # two heads alone fill the GPU as well
    assert splits(256, 65536, Spec(window=256)) == (64, 1)
    assert splits(640, 65536) == (132, 4) and splits(1024, 65536) == (256, 1) and splits(4096, 65536) == (1024, 1)
    assert splits(128, 32768, heads=71, kv_heads=1, head_dim=64, batch=4) == (264, 6)  # 20 blocks are left
    assert splits(1024, 65536, heads=28, kv_heads=4, head_dim=64)[0] == 132
    causal = Spec()  # blocks of a prompt are balanced by their order
    assert all(splits(n, n, causal)[1] == 1 for n in (640, 1024, 1200, 2048, 4096, 5000))
    assert splits(640, 65536, causal) == (132, 4)  # a chunk behind a long past


def test_a_window_counts_as_its_visible_keys(hopper, monkeypatch):
    """Sinks of wide heads spill except on Hopper."""
    q, kv = operands(64, 65536)
    assert pays(q, kv, Spec()) and not pays(q, kv, Spec(window=64))
    assert pays(q, kv, Spec(window=4096, sinks=4)) and not pays(q, kv, Spec(window=64, sinks=4))
    wide = operands(64, 65536, head_dim=256)
    assert pays(*wide, Spec(window=4096, sinks=4))
    monkeypatch.setattr(gpu, "arch", lambda device: 80)
    assert pays(*wide, Spec()) and not pays(*wide, Spec(window=4096, sinks=4))


def test_the_chosen_kernel_runs(monkeypatch):
    """The kernel that `choice` returns is called, with the arguments of the call."""
    called = []
    monkeypatch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")
    monkeypatch.setattr(TritonKernel, "choice", lambda *args: ("lean", None))
    monkeypatch.setattr(lean, "lean", lambda q, kv, spec, spans, **options: called.append((q, kv, spec, spans, options)))
    q, kv = operands(17, 100, dtype=torch.float16)
    PREFILL(q, kv, Spec(window=5), return_lse=True)
    assert called == [(q, kv, Spec(window=5), None, {"return_lse": True})]


def test_training_runs_the_class_of_the_kernel_without_stream_k():
    """A subclass may compute something else."""
    called = []

    class Own(TritonKernel):
        def __call__(self, *args, **options):
            called.append(self.stream_k)
            return super().__call__(*args, **options)

    kernel = Own("prefill", stream_k="lean")
    backend = Backend("own", "", prefill=kernel, backward=reference.backward)
    q = torch.randn(1, 2, 3, 16)
    backend.forward(q, KV(q, q), Spec(), None)
    assert called == [None] and kernel.stream_k == "lean"
