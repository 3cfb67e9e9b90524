"""The GPU of a tensor, and whether the kernels support it."""

from __future__ import annotations

from functools import cache

import torch

try:
    from triton.runtime import driver
except ImportError:  # CPU tensors need no Triton
    driver = None

OLDEST = 80  # compute capability: Ampere
_CPU_SMS = 3  # number of SMs for interpreted kernels: few programs, with several tiles each


@cache
def arch(device: torch.device) -> int:
    """Compute capability as one number, 90 for Hopper; 0 for the CPU, where kernels are interpreted.

    Raises RuntimeError for a GPU that the kernels do not support.
    """
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
