"""Overlap: programmatic dependent launch, which starts a kernel before the previous kernel has ended.

From compute capability 9.0 on, the programs of a kernel are set up while the previous kernel still runs, and wait in
`wait_for_inputs`. Between two short kernels this hides a microsecond or more. The rules:

- In a kernel launched with `early(device)`, every program waits before it accesses memory that another kernel may write or read.
  So a kernel that waits for the previous launch waits for all earlier launches too. Their results become visible by this wait
  alone, also if they ended before the previous launch began: a load before it may find an older line in the L1 cache.
- In a decode graph no launch writes weights, so they may be read before the wait (`linear`).
- As a rule a kernel calls `let_next_begin` after its wait. It may call it before the wait (`residual`, before a linear layer) if
  the next launch reads nothing before its own wait but weights.
- What was written before a launch that does not begin early, or whose programs all wait before they call `let_next_begin`, the
  next launch may read before its own wait, past the L1 cache (the spans in the merges of `prefill_hopper` and `lean`; the
  states of `gated_delta` and `selective`, after `conv_update`). A launch that does not begin early may call `let_next_begin` at
  any point.
- The hardware places programs on the multiprocessor with the most free resources while programs of the previous launch still
  occupy some. A kernel that should have two programs on every multiprocessor limits its registers (`maxnreg`), so that registers
  do not decide how many programs fit. Otherwise some multiprocessors get twice their share and others none. A kernel that should
  have one needs so much shared memory that two do not fit (`tables.one_per_sm`).

Source: NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch; "PTX ISA", griddepcontrol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import gpu


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on `device`: the constant EARLY, for the functions below, and the launch option of Triton."""
    return {"EARLY": True, "launch_pdl": True} if gpu.arch(device) >= 90 else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all previous launches have finished."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def request(pointers):
    """Load the 128 bytes around each pointer into the L2 cache, without waiting for them."""
    addresses = pointers.to(tl.uint64, bitcast=True)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Allow the next launch to be set up as soon as every program of this launch has called this function or has ended."""
    if EARLY:
        cuda.gdc_launch_dependents()
