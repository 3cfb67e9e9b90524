"""Sums over ranks and their columns by kernels: interpreted, in processes that share memory as GPUs do."""

from __future__ import annotations

import random
import threading
import time

import processes
import pytest
import torch
from cases import slow_unless
from conftest import INTERPRETED

pytest.importorskip("triton")

from hf_fastattn.context_parallel import New, Share, Shares, over_shares
from hf_fastattn.kernels.attention import lean
from hf_fastattn.kernels.decode import all_gather, all_reduce, gather_heads, merge_ranks, residual
from hf_fastattn.kernels.merge import merge
from hf_fastattn.kernels.parts import PART
from hf_fastattn.kernels.spans import build_spans
from hf_fastattn.kernels.spec import KV, Spec
from hf_fastattn.patches.ranks import exchange

pytestmark = [
    processes.HIDDEN,
    pytest.mark.skipif(not INTERPRETED, reason="kernels run on the CPU when interpreted"),
    pytest.mark.xdist_group("ranks"),
]
SIZE = 48


def shared_memory(folder, rank: int, world: int, size: int = SIZE, dtype=torch.float32) -> all_reduce.Peers:
    """Peers whose memory is a file for each rank."""
    block = all_reduce.block_bytes(size, dtype)
    count = all_reduce.memory_bytes(world, block)
    files = [torch.from_file(str(folder / f"memory{i}"), shared=True, size=count, dtype=torch.uint8) for i in range(world)]
    torch.distributed.barrier()
    return all_reduce.Peers(
        memory=files[rank],
        addresses=torch.tensor([file.data_ptr() for file in files]),
        counts=torch.zeros(all_reduce.PROGRAMS, dtype=torch.int32),
        rank=rank,
        world=world,
        block=block,
        owner=files,
    )


def check(tmp_path, world, run, *arguments, **options):
    """Every rank says that nothing is wrong."""
    for ended in processes.run(tmp_path, world, run, tmp_path, *arguments, **options):
        assert ended.result == [], ended.output


def parts(world: int, rows: int, size: int, dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, size, generator=generator).to(dtype) for _ in range(world)]


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    return sum(tensor.float() for tensor in tensors).to(tensors[0].dtype)


def peers_of(size: int, dtype) -> all_reduce.Peers:
    """Rank 0 of two, without the memory of the other."""
    block = all_reduce.block_bytes(size, dtype)
    memory = torch.zeros(all_reduce.memory_bytes(2, block), dtype=torch.uint8)
    return all_reduce.Peers(memory, torch.zeros(2).long(), torch.zeros(all_reduce.PROGRAMS).int(), 0, 2, block)


def many_exchanges(rank: int, folder, world: int, dtype) -> list[str]:
    peers, wrong, delays = shared_memory(folder, rank, world, dtype=dtype), [], random.Random(rank)
    sequence = random.Random(0)
    for seed in range(8):
        time.sleep(delays.choice([0, 0, 0.01]))
        many = world > 2 and seed % 2  # with one rank that adds each block
        residual.MANY_BYTES = 0 if many else 1 << 30  # in this process
        tensors = parts(world, 7 if many else sequence.choice([1, 3]), sequence.choice([16, SIZE]), dtype, seed)
        x = tensors[rank].clone()
        for again in range(sequence.choice([0, 1, 2])):
            x = tensors[rank].clone()
            residual.run(residual.Chain(x, peers=peers))
            wrong += [] if torch.equal(x, added(tensors)) else [f"sum {seed}, {again}"]
        x = tensors[rank].clone()
        out = all_gather.all_gather(x, peers)
        wrong += [] if out is not None and torch.equal(out, torch.cat(tensors, 1)) else [f"columns {seed}"]
    return wrong


WORLDS = [(2, torch.float16), (3, torch.float32), (4, torch.float16)]


@pytest.mark.parametrize("world, dtype", slow_unless(WORLDS[0].__eq__, WORLDS), ids=str)
def test_sums_and_columns_of_any_sequence_are_right_on_all_ranks(tmp_path, world, dtype):
    check(tmp_path, world, many_exchanges, world, dtype)


def columns_of_many_blocks(rank: int, folder) -> bool:
    peers = shared_memory(folder, rank, 2)
    assert "has room for 64 rows" in str(peers.why_not(torch.ones(65, SIZE)))
    tensors = parts(2, 3, 22 * peers.block // 4 + 4, torch.float32, 1)
    return torch.equal(all_gather.all_gather(tensors[rank], peers), torch.cat(tensors, 1))


def test_a_program_exchanges_block_after_block(tmp_path):
    assert [ended.result for ended in processes.run(tmp_path, 2, columns_of_many_blocks, tmp_path)] == [True, True]


def test_tensors_that_the_kernels_do_not_support_take_another_path():
    peers = peers_of(SIZE, torch.float32)
    good = torch.ones(2, SIZE)
    assert peers.why_not(good) is None and all_gather.why_not(good, peers) is None
    for bad, reason in (
        (torch.ones(2, 2 * SIZE)[:, ::2], "must be contiguous"),
        (torch.ones(2, SIZE, device="meta"), "on one device"),
        (torch.ones(2, SIZE, dtype=torch.int32), "torch.int32"),
        (torch.ones(2, SIZE, requires_grad=True), "requires grad"),
        (torch.ones(2, 0), r"(2, 0)"),
    ):
        assert reason in str(peers.why_not(bad)) and reason in str(all_gather.why_not(bad, peers))
    # A program has as many short rows as fill a block of MIN_BLOCK elements, fewer of a wider dtype.
    peers = peers_of(all_reduce.MIN_BLOCK, torch.float16)
    assert peers.why_not(torch.ones(64, SIZE, dtype=torch.float16)) is None
    assert "has room for 64 rows" in str(peers.why_not(torch.ones(64, SIZE)))
    # The kernels wait longer than the host: a check takes 0.3 us at least.
    assert 0.3e-6 * all_reduce.LIMIT > exchange.WAIT + 3 * exchange.GRACE


# batch, query heads and KV heads of a rank, ranks with the same KV heads, dimensions of keys and of values, slots of the tokens
HEADS = {
    "one token": (1, 4, 2, 1, 16, 16, [5]),
    "several tokens, other values": (2, 2, 1, 1, 20, 12, [4, -1, 7]),
    "the same KV heads": (3, 2, 1, 2, 16, 16, [8, 9]),
    "many blocks": (5, 8, 1, 1, 16, 16, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
}


def new_heads(rank: int, folder, case: str, dtype) -> list[str]:
    """Twice, since slots of the memory alternate."""
    batch, q_heads, kv_heads, copies, k_dim, v_dim, slots = HEADS[case]
    world, wrong, tokens, peers = 2, [], len(slots), shared_memory(folder, rank, 2, dtype=dtype)
    for seed in range(3):
        torch.manual_seed(seed)
        every_q = torch.randn(batch, world * q_heads, tokens, k_dim).to(dtype)
        k, v = (torch.randn(batch, world // copies * kv_heads, tokens, dim).to(dtype) for dim in (k_dim, v_dim))
        keys, values = (torch.zeros(batch, x.shape[1], 9, x.shape[3], dtype=dtype) for x in (k, v))
        expected = keys.clone(), values.clone()
        for token, at in enumerate(slots):
            if 0 <= at < 9:
                expected[0][:, :, at], expected[1][:, :, at] = k[:, :, token], v[:, :, token]
        mine, first = slice(rank * q_heads, (rank + 1) * q_heads), rank // copies * kv_heads
        q = every_q[:, mine].transpose(1, 2).contiguous().transpose(1, 2)  # as of a model
        own = [x[:, first : first + kv_heads] for x in (k, v)]
        found = gather_heads.gather_heads(q, *own, keys, values, torch.tensor([slots]), peers, copies)
        wrong += [] if found is not None and torch.equal(found, every_q) else [f"queries {seed}"]
        wrong += [] if torch.equal(keys, expected[0]) and torch.equal(values, expected[1]) else [f"keys {seed}"]
    return wrong


@pytest.mark.parametrize("case", slow_unless(["the same KV heads"].__contains__, HEADS))
def test_new_heads_are_those_of_all_ranks(tmp_path, case):
    check(tmp_path, 2, new_heads, case, torch.float32 if "values" in case else torch.float16)


def merged_heads(rank: int, folder, world: int, same: bool, sinks: bool, shape: tuple[int, ...], dtype) -> list[str]:
    batch, heads, tokens, dim = shape
    every, wrong, peers = heads if same else world * heads, [], shared_memory(folder, rank, world, dtype=dtype)
    first = 0 if same else rank * heads
    for seed in range(3):
        torch.manual_seed(seed)
        outs = torch.randn(world, batch, tokens, every, dim).to(dtype).transpose(2, 3)
        lses = 3 * torch.randn(world, batch, every, tokens)
        lses[0, 0, 0] = lses[:, 0, -1, 0] = float("-inf")  # a rank, and all, without keys
        outs[lses == float("-inf")] = 0
        logits = torch.randn(every)[first : first + heads] if sinks else None
        found = merge_ranks.merge_ranks(outs[rank], lses[rank], heads, logits, peers)
        parts = outs[:, :, first : first + heads].float(), lses[:, :, first : first + heads]
        if sinks:
            more = torch.zeros_like(parts[0][:1]), logits[:, None].expand_as(parts[1][:1])
            parts = [torch.cat(pair) for pair in zip(parts, more, strict=True)]
        expected = merge(*parts)[0].to(dtype)
        wrong += [] if found is not None and torch.allclose(found, expected, atol=1e-3, rtol=1e-3) else [f"{seed}"]
        wrong += [] if found is not None and found.transpose(1, 2).is_contiguous() else ["strides"]
    return wrong


PARTS = [  # ranks, whether all have the same heads, sinks, shape, dtype
    (2, False, False, (1, 4, 1, 16), torch.float16),
    (3, False, True, (2, 2, 3, 20), torch.float32),
    (2, True, True, (1, 4, 2, 16), torch.float16),
    (2, False, False, (5, 8, 9, 16), torch.float16),
]


@pytest.mark.parametrize("world, same, sinks, shape, dtype", slow_unless(PARTS[2].__eq__, PARTS), ids=str)
def test_parts_of_all_ranks_are_merged(tmp_path, world, same, sinks, shape, dtype):
    check(tmp_path, world, merged_heads, world, same, sinks, shape, dtype)


def attention_over_shares(rank: int, folder, copies: int, whole: bool) -> list[str]:
    """A step of two rows with kernels that exchange, and with collectives; the first token ends a block of rank 0."""
    wrong, peers = [], shared_memory(folder, rank, 2, dtype=torch.float16)
    for seed in range(2):
        torch.manual_seed(seed)
        heads, kv_heads = 4, 2 // copies
        of_rank = 1 if whole else 2
        q, k, v = (torch.randn(2, n, 2, 16).half() for n in (heads, kv_heads, kv_heads))
        if copies == 2 or whole:
            torch.manual_seed(seed)
            k, v = torch.randn(2, 2, kv_heads, 2, 16).half()  # the same on both ranks
        found = []
        for memory in (lambda x: None, lambda x: peers):
            torch.manual_seed(seed + 10 * rank)
            buffers = [torch.randn(2, of_rank * kv_heads // copies, 2 * PART, 16).half() for _ in "kv"]
            shares = Shares(None, [(of_rank * heads, of_rank * kv_heads // copies)], copies, whole)
            shares.peers = memory
            new = New(k, v, *buffers)
            keys, values = (Share(x, (2, kv_heads, 2 * PART, 16), shares, 0, {}, new) for x in buffers)
            spans = build_spans(2, 2, 2 * PART, q.device, q_offset=PART - 1)
            found.append((over_shares(lean.lean)(q, KV(keys, values), Spec(), spans), *buffers))
        wrong += [f"{seed}, {i}" for i, pair in enumerate(zip(*found, strict=True)) if not torch.allclose(*pair, atol=2e-3)]
    return wrong


@pytest.mark.parametrize("copies, whole", slow_unless((2, False).__eq__, [(1, False), (2, False), (1, True)]))
def test_attention_over_shares_is_that_with_collectives(tmp_path, copies, whole):
    check(tmp_path, 2, attention_over_shares, copies, whole, limit=180)


def sum_then_norm(rank: int, folder) -> list[torch.Tensor]:
    peers, weight = shared_memory(folder, rank, 2, dtype=torch.float16), torch.ones(SIZE).half()
    tensors, first = parts(2, 3, SIZE, torch.float16, 0), torch.full((3, SIZE), 0.3).half()
    out = [tensors[rank].clone(), *(torch.empty(3, SIZE).half() for _ in range(3))]
    norms = [residual.Normed(weight, None, 1e-6, (False, False, ""), out[i]) for i in (1, 3)]
    residual.run(residual.Chain(out[0], norms[0], sums=((first, out[2]),), peers=peers), norms[1])
    return out


def test_a_sum_is_one_launch_with_the_norms_and_the_addition_that_follow(tmp_path):
    first, second = (ended.result for ended in processes.run(tmp_path, 2, sum_then_norm, tmp_path))
    summed, normed, total, last = first
    assert all(map(torch.equal, first, second))
    assert torch.equal(summed, added(parts(2, 3, SIZE, torch.float16, 0)))
    norm = lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).half()  # noqa: E731
    torch.testing.assert_close(normed, norm(summed))
    assert torch.equal(total, normed + 0.3 * torch.ones_like(total))
    torch.testing.assert_close(last, norm(total))


def a_rank_that_does_not_come(rank: int, folder) -> float:
    peers = shared_memory(folder, rank, 2)
    if rank:
        return 0.0
    begin = time.monotonic()
    threading.Timer(0.3, peers.release).start()
    for _ in range(3):  # later sums do not wait
        residual.run(residual.Chain(torch.ones(2, SIZE), peers=peers))
    return time.monotonic() - begin


def test_the_wait_for_a_rank_that_has_failed_can_be_ended(tmp_path):
    first, _ = processes.run(tmp_path, 2, a_rank_that_does_not_come, tmp_path)
    assert first.result is not None and first.result > 0.2, first.output
