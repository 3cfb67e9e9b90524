"""Training on two processes, as DistributedDataParallel and fully_shard run it: gradients are those of one process."""

import copy

import models
import processes
import pytest
import torch
from conftest import INTERPRETED
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_fastattn

pytestmark = [
    processes.HIDDEN,
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="interpreted backward kernels are tested with fewer and shorter inputs"),
    pytest.mark.xdist_group("ranks"),
]

LENGTH = 24


def loss_of(model, rows: slice) -> torch.Tensor:
    ids = models.prompts("no_padding", "cpu", length=LENGTH)["input_ids"][rows]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(rank: int) -> tuple[list[tuple[dict, dict]], dict]:
    """(calls, gradients) of replicas and of a sharded model, and the gradients of one process for the rows of both."""
    alone = models.tiny("llama").train()
    replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    sharded, mesh = copy.deepcopy(alone), init_device_mesh("cpu", (2,))
    for part in (*sharded.model.layers, sharded):
        fully_shard(part, mesh=mesh)
    found = []
    for model, of in ((replicated, replicated.module), (sharded, sharded)):
        of.set_attn_implementation("lean")
        with hf_fastattn.count_calls() as calls:
            loss_of(model, slice(rank, rank + 1)).backward()
        grads = {name: p.grad for name, p in of.named_parameters()}
        whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}
        found.append((dict(calls), whole))
    (sum(loss_of(alone, slice(r, r + 1)) for r in (0, 1)) / 2).backward()
    return found, {name: p.grad for name, p in alone.named_parameters()}


def test_two_processes(tmp_path):
    for ended in processes.run(tmp_path, 2, gradients, limit=200):
        assert ended.result is not None, ended.output
        found, expected = ended.result
        for calls, grads in found:
            assert calls == {"lean.prefill": 2, "lean.backward": 2} and grads.keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(grads[name], grad, atol=1e-4, rtol=1e-3)
