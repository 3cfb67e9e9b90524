"""The GPU of a tensor, and whether the kernels support it."""

from __future__ import annotations

import importlib.util
import os
import threading
from functools import cache
from typing import Any, NamedTuple

import torch

OLDEST = 80  # compute capability: Ampere
_CPU_SMS = 3  # number of SMs for interpreted kernels: few programs, with several tiles each


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # a placeholder in sys.modules, or a finder that refuses it
        return False


HAS_TRITON = _has_triton()
# Read once: Triton reads the variable when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Target(NamedTuple):
    """A kind of GPU. arch: its compute capability, as `arch`. sms: its number of multiprocessors."""

    arch: int
    sms: int


class _Thread(threading.local):
    target: Target | None = None  # the GPU that tensors without memory (meta) stand for, while launches are described
    calls: list[tuple[Any, ...]] | None = None  # the calls of attention kernels with such tensors, if they are noted


thread = _Thread()


def arch(device: torch.device) -> int:
    """Compute capability as one number, 90 for Hopper; 0 for the CPU, where kernels are interpreted.

    Raises RuntimeError for a GPU that the kernels do not support.
    """
    target = thread.target
    return target.arch if target is not None and device.type == "meta" else _arch(device)


@cache
def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    if torch.version.hip is not None:  # ROCm also names its devices "cuda"
        raise RuntimeError(
            f"These kernels need an NVIDIA GPU, and {device} is an AMD GPU (torch for ROCm). "
            'Use attn_implementation="sdpa" there.'
        )
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < OLDEST:
        raise RuntimeError(
            f"These kernels need a GPU of compute capability {OLDEST / 10} (Ampere) or higher; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. "
            'Use attn_implementation="sdpa" there.'
        )
    return 10 * major + minor


def on_gpu(device: torch.device) -> bool:
    """Whether Triton kernels run on this device; PyTorch operations run on the others."""
    if device.type not in ("cuda", "meta") or not HAS_TRITON:
        return False
    try:
        return arch(device) >= OLDEST
    except RuntimeError:
        return False


def holds(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or stands for one that is."""
    return tensor.is_cuda or (tensor.is_meta and thread.target is not None)


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor, by which code tells whether two are the same; of one without memory a number in its place."""
    return tensor.data_ptr() or storage_of(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; of one without memory a number in its place."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def autocast_type(device: torch.device) -> str:
    """The type of a device for torch's autocast, which knows none for tensors without memory."""
    return "cuda" if device.type == "meta" else device.type


def num_sms(device: torch.device) -> int:
    target = thread.target
    return target.sms if target is not None and device.type == "meta" else _num_sms(device)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
