"""Sums over ranks and their columns by kernels: interpreted, in processes that share memory as GPUs do."""

from __future__ import annotations

import random
import threading
import time

import processes
import pytest
import torch
from conftest import INTERPRETED

pytest.importorskip("triton")

from hf_fastattn.kernels.decode import all_gather, all_reduce, residual
from hf_fastattn.patches import exchange

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


def parts(world: int, rows: int, size: int, dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, size, generator=generator).to(dtype) for _ in range(world)]


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor in tensors:
        total += tensor.float()
    return total.to(tensors[0].dtype)


def many_exchanges(rank: int, folder, world: int, dtype) -> list[str]:
    peers, wrong, delays = shared_memory(folder, rank, world, dtype=dtype), [], random.Random(rank)
    sequence = random.Random(0)
    for seed in range(6):
        time.sleep(delays.choice([0, 0, 0.01]))
        tensors = parts(world, sequence.choice([1, 3]), sequence.choice([16, SIZE]), dtype, seed)
        x = tensors[rank].clone()
        if sequence.random() < 0.7:
            residual.run(residual.Chain(x, peers=peers))
            wrong += [] if torch.equal(x, added(tensors)) else [f"sum {seed}"]
        x = tensors[rank].clone()
        out = all_gather.all_gather(x, peers)
        wrong += [] if out is not None and torch.equal(out, torch.cat(tensors, 1)) else [f"columns {seed}"]
    return wrong


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float16), (3, torch.float32)], ids=str)
def test_sums_and_columns_of_any_sequence_are_right_on_all_ranks(tmp_path, world, dtype):
    for ended in processes.run(tmp_path, world, many_exchanges, tmp_path, world, dtype):
        assert ended.result == [], ended.output


def columns_of_many_blocks(rank: int, folder) -> bool:
    peers = shared_memory(folder, rank, 2)
    assert "has room for 64 rows" in str(peers.why_not(torch.ones(65, SIZE)))
    tensors = parts(2, 3, 22 * peers.block // 4 + 4, torch.float32, 1)
    return torch.equal(all_gather.all_gather(tensors[rank], peers), torch.cat(tensors, 1))


def test_a_program_exchanges_block_after_block(tmp_path):
    assert [ended.result for ended in processes.run(tmp_path, 2, columns_of_many_blocks, tmp_path)] == [True, True]


def test_tensors_that_the_kernels_do_not_support_take_another_path():
    block = all_reduce.block_bytes(SIZE, torch.float32)
    memory = torch.zeros(all_reduce.memory_bytes(2, block), dtype=torch.uint8)
    peers = all_reduce.Peers(memory, torch.zeros(2).long(), torch.zeros(all_reduce.PROGRAMS).int(), 0, 2, block)
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


def test_short_rows_of_a_wider_dtype_do_not_fit():
    """A program has as many short rows as fill a block of MIN_BLOCK elements."""
    block = all_reduce.block_bytes(all_reduce.MIN_BLOCK, torch.float16)
    memory = torch.zeros(all_reduce.memory_bytes(2, block), dtype=torch.uint8)
    peers = all_reduce.Peers(memory, torch.zeros(2).long(), torch.zeros(all_reduce.PROGRAMS).int(), 0, 2, block)
    assert peers.why_not(torch.ones(64, SIZE, dtype=torch.float16)) is None
    assert "has room for 64 rows" in str(peers.why_not(torch.ones(64, SIZE)))


def test_kernels_wait_longer_than_the_host():
    """A check takes 0.3 us at least."""
    assert 0.3e-6 * all_reduce.LIMIT > exchange.WAIT + 3 * exchange.GRACE


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
    found = time.monotonic() - begin
    return found


def test_the_wait_for_a_rank_that_has_failed_can_be_ended(tmp_path):
    first, _ = processes.run(tmp_path, 2, a_rank_that_does_not_come, tmp_path)
    assert first.result is not None and first.result > 0.2, first.output
