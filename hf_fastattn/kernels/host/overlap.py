"""Overlap: programmatic dependent launch, by which a kernel is set up before the previous one has ended.

On compute capability 9.0 the programs of a kernel are set up while the previous kernel still runs, and wait in
`wait_for_inputs`. Between two short kernels this hides a microsecond or more. The rules:

- A kernel launched with `early(device)` waits in every program, before it touches what another kernel may write or read.
- It may call `let_next_begin` after that wait. A kernel that was not launched early may call it at any point.
- Therefore tensors older than the previous launch may be read before the wait (in a decode graph the weights, which `linear`
  reads then), and a kernel that waits for the previous launch waits for all launches before it.
- Programs are placed where most of their kind still fit, and those of the previous launch still occupy room. A kernel that should
  have one or two programs on every multiprocessor limits its registers so that these do not decide how many fit (`maxnreg`).
  Otherwise some multiprocessors get twice their share and others none.

Source: NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; "PTX ISA", griddepcontrol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import gpu


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on `device`: EARLY, which its kernel hands to the functions below, and what Triton must know."""
    return {"EARLY": True, "launch_pdl": True} if gpu.arch(device) >= 90 else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until the previous launches are done."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Allow the next launch to be set up, once every program of this one has called this or is done."""
    if EARLY:
        cuda.gdc_launch_dependents()
