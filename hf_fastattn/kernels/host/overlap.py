"""Overlap: launches that begin before the launch ahead of them has ended.

With programmatic dependent launch (compute capability 9.0) the programs of a kernel are set up while the kernel ahead still runs,
and stand waiting in `wait_for_inputs`. Between two short kernels that hides a microsecond or more. The rules:

- A kernel launched with `early(device)` waits in every program, before it touches what another kernel may write or read.
- It may call `let_next_begin` after that; before it, or without, only a kernel that was not launched early may.
- So what is older than the launch ahead is there before the wait too (in a decode graph the weights, which `linear` reads then),
  and what comes after a launch comes after all before it.
- Programs go where the most of their kind still fit, and those of the launch ahead still take room. A kernel that is to have one
  or two programs on every multiprocessor keeps to so few registers that these do not decide how many fit (`maxnreg`), or some
  get twice their share and others none.

Source: NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; "PTX ISA", griddepcontrol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import gpu


def early(device: torch.device) -> dict:
    """Options of a launch on `device`: EARLY, which its kernel hands to the functions below, and what Triton must know."""
    return {"EARLY": True, "launch_pdl": True} if gpu.arch(device) >= 90 else {"EARLY": False}


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
