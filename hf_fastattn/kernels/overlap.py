"""Overlap: launches that begin before the launch ahead of them has ended.

With programmatic dependent launch (compute capability 9.0) the programs of a kernel are set up while the kernel ahead still runs,
and stand waiting in `wait_for_inputs`. Between two short kernels that hides a microsecond or more. The rules, for a kernel
launched with `early(device)`: it touches nothing that another kernel may write or read before that call, but for what is older
than a launch ahead that waited itself; and of its programs at least one waits, so that what comes after it comes after all.

Source: NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; "PTX ISA", griddepcontrol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import launch


def early(device: torch.device) -> dict:
    """Options of a launch on `device`: EARLY, which its kernel hands to the functions below, and what Triton must know."""
    return {"EARLY": True, "launch_pdl": True} if launch.arch(device) >= 90 else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until the launches ahead are done."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Have the programs of the next launch set up, once every program of this one has begun and said so or is done."""
    if EARLY:
        cuda.gdc_launch_dependents()
