"""Training on two processes, as DistributedDataParallel and fully_shard run it: gradients are those of one process."""

from __future__ import annotations

import copy
import os
import socket

import models
import pytest
import torch
import torch.distributed as dist
from conftest import INTERPRETED

LENGTH = 24


def loss_of(model, rows: slice) -> torch.Tensor:
    ids = models.prompts("no_padding", "cpu", length=LENGTH)["input_ids"][rows]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def worker(rank: int, port: int) -> None:
    from torch.distributed.fsdp import fully_shard

    import hf_fastattn

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        alone = models.tiny("llama").train()
        replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
        sharded = copy.deepcopy(alone)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        (sum(loss_of(alone, slice(r, r + 1)) for r in (0, 1)) / 2).backward()
        expected = {name: p.grad for name, p in alone.named_parameters()}
        for model, of in ((replicated, replicated.module), (sharded, sharded)):
            of.set_attn_implementation("lean")
            with hf_fastattn.count_calls() as calls:
                loss_of(model, slice(rank, rank + 1)).backward()
            assert calls == {"lean.prefill": 2, "lean.backward": 2}
            for name, p in of.named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(grad, expected[name], atol=1e-4, rtol=1e-3)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(INTERPRETED or not dist.is_available(), reason="needs torch.distributed, and the reference")
def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port,), nprocs=2)
