"""Memory that the GPUs of one host can write to each other, from torch's symmetric memory."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from ..decode.all_reduce import PROGRAMS, Peers, memory_bytes
from . import gpu

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of CUDA's driver


def why_not(device: torch.device) -> str | None:
    """The reason why this process cannot share memory of this device, or None."""
    if not gpu.on_gpu(device):
        return f"the model is on {device}"
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"torch has no symmetric memory ({error})"
    return None


def identity(device: torch.device) -> str:
    """The identity of a GPU, the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def why_no_access(device: torch.device, others: Sequence[str]) -> str | None:
    """The reason why the kernels of this device do not write to the memory of GPUs with these identities, or None."""
    visible = {identity(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    here = visible[identity(device)]
    for other in others:
        if other not in visible:
            return f"this process does not see the GPU {other} of another rank (CUDA_VISIBLE_DEVICES)"
        if visible[other] != here and not _by_nvlink(here, visible[other]):
            return f"the GPUs {here} and {visible[other]} are not connected by NVLink"
    return None


def _by_nvlink(here: int, there: int) -> bool:
    """Whether NVLink connects two GPUs, given as numbers of visible devices: their atomic operations on each other's memory are
    atomic, which those over PCIe are not. The kernels need none, but were timed over NVLink only."""
    cuda, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    devices = [ctypes.c_int() for _ in range(2)]
    failed = any(cuda.cuDeviceGet(ctypes.byref(each), index) for each, index in zip(devices, (here, there), strict=True))
    return not (failed or cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *devices)) and value.value == 1


def host() -> str:
    """A name of this host and of the start of its kernel: processes that share memory have the same."""
    boot = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(boot):
        return socket.gethostname()
    with open(boot) as file:
        return file.read()


def allocate(world: int, block: int, device: torch.device) -> torch.Tensor:
    """Memory of this GPU that so many ranks can share, for blocks of so many bytes. Raises RuntimeError if there is none."""
    from torch._C._distributed_c10d import _SymmetricMemory

    # Not by empty(), whose pool may return a part of an earlier allocation, with the addresses of the whole.
    with torch.cuda.device(device):
        memory: torch.Tensor = _SymmetricMemory.empty_strided_p2p((memory_bytes(world, block),), (1,), torch.uint8, device)
    return memory


def connect(group: Any, block: int, memory: torch.Tensor) -> Peers:
    """The memory that the ranks of a process group share, made of what each of them allocated for blocks of so many bytes.

    Collective: all ranks must call it, and may use the memory when all of them have returned.
    Raises RuntimeError if the GPUs cannot access each other's memory.
    """
    from torch.distributed._symmetric_memory import rendezvous

    world, device = group.size(), memory.device
    with torch.cuda.device(device):
        handle = rendezvous(memory, group)
        addresses = list(handle.buffer_ptrs)
        if handle.world_size != world or addresses[handle.rank] != memory.data_ptr():
            raise RuntimeError("torch's symmetric memory has other addresses than its tensor.")
        peers = Peers(
            memory=memory,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
            counts=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            rank=handle.rank,
            world=world,
            block=block,
            stream=torch.cuda.Stream(device, priority=-1),  # not in the queue of a kernel that waits
            owner=handle,
        )
        torch.cuda.synchronize(device)
        peers.release()  # loads its kernel, which cannot be loaded while another one waits
        torch.cuda.synchronize(device)
        memory.zero_()
        torch.cuda.synchronize(device)
    return peers
