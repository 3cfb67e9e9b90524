"""The GPU that a tensor is on, and whether these kernels are made for it."""

from __future__ import annotations

from functools import cache

import torch

try:
    from triton.runtime import driver
except ImportError:  # CPU tensors need no Triton
    driver = None

OLDEST = 80  # compute capability: Ampere
_CPU_SMS = 3  # what the interpreter pretends to have: few programs, several tiles each


@cache
def arch(device: torch.device) -> int:
    """Compute capability as one number, 90 for Hopper; 0 where kernels are interpreted on the CPU.

    Raises RuntimeError for a GPU that these kernels are not made for.
    """
    if device.type != "cuda":
        return 0
    if torch.version.hip is not None:  # ROCm calls its devices "cuda" too
        raise RuntimeError(
            f"These kernels are made for NVIDIA GPUs, and {device} is an AMD GPU, which runs torch for ROCm. "
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
    """Whether Triton kernels run on this device. Elsewhere PyTorch operations run."""
    if device.type != "cuda" or driver is None:
        return False
    try:
        return arch(device) >= OLDEST
    except RuntimeError:
        return False


@cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
