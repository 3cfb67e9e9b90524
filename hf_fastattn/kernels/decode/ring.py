"""Ring: the slot of the next token of each row in a rolling cache, and its spans, in one launch.

    slot(t) = t if t < sinks, else sinks + (t - sinks) % window

A token overwrites the one that leaves the window. The buffer then contains exactly the tokens that the new token sees, so the
spans only give the number of filled slots. Rounds: nothing. Limits: one token of each row. Oracle: `_ring_step_torch`.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch
from ..spans import CAUSAL, NO_WINDOW, WORDS, pack_spans


def ring_step(counts: torch.Tensor, pads: torch.Tensor | None, window: int, sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, spans) of one new token of each row; adds the token to `counts`.

    counts: int64 (batch,), tokens of each row, updated in place. pads: int64 (batch,), 1 if the new token is padding: it is
    not counted, and its slot is sinks + window, past the end. slots: int64 (batch,); spans: see `kernels.spans`.
    """
    if triton is None or torch.compiler.is_compiling() or not (INTERPRETED or gpu.on_gpu(counts.device)):
        return _ring_step_torch(counts, pads, window, sinks)
    slots = torch.empty_like(counts)
    spans = torch.empty(counts.shape[0], 1, 1, WORDS, dtype=torch.int32, device=counts.device)
    _prepare((counts, pads), window, sinks)(counts, counts if pads is None else pads, slots, spans)
    return slots, spans


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, torch.Tensor | None], window: int, sinks: int) -> launch.Launch:
    counts, pads = tensors
    return launch.Launch(
        ring_step_kernel,
        (1,),
        batch=counts.shape[0],
        window=window,
        sinks=sinks,
        HAS_PADS=pads is not None,
        BLOCK_B=triton.next_power_of_2(counts.shape[0]),
        **early(counts.device),
        CAUSAL=CAUSAL,
        NO_WINDOW=NO_WINDOW,
        WORDS=WORDS,
        num_warps=1,
    )


def _ring_step_torch(
    counts: torch.Tensor, pads: torch.Tensor | None, window: int, sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch."""
    slots = torch.where(counts < sinks, counts, sinks + (counts - sinks) % window)
    if pads is not None:
        slots = torch.where(pads == 0, slots, sinks + window)
    counts.add_(1 if pads is None else 1 - pads)
    stop = counts.clamp(max=sinks + window)
    return slots, pack_spans(stop - 1, torch.zeros_like(stop), stop, counts - stop)


if triton is not None:
    from ..host.overlap import early, wait_for_inputs
    from .build_spans import store_spans

    @triton.jit(do_not_specialize=["batch", "window", "sinks"])
    def ring_step_kernel(
        Counts,  # (batch,), int64, read and written
        Pads,  # (batch,), int64, read with HAS_PADS
        Slots,  # (batch,), int64, written
        Spans,  # (batch, 1, 1, WORDS), int32, written
        batch, window, sinks,
        HAS_PADS: tl.constexpr, BLOCK_B: tl.constexpr, EARLY: tl.constexpr, CAUSAL: tl.constexpr, NO_WINDOW: tl.constexpr,
        WORDS: tl.constexpr,
    ):  # fmt: skip
        wait_for_inputs(EARLY)  # the next launch is the first of the model, which is of torch and does not begin early
        row = tl.arange(0, BLOCK_B)
        mask = row < batch
        count = tl.load(Counts + row, mask=mask, other=0)
        slot = tl.where(count < sinks, count, sinks + tl.maximum(count - sinks, 0) % window)
        after = count + 1
        if HAS_PADS:
            pad = tl.load(Pads + row, mask=mask, other=0)
            slot = tl.where(pad == 0, slot, sinks + window)
            after -= pad
        tl.store(Slots + row, slot, mask=mask)
        tl.store(Counts + row, after, mask=mask)
        stop = tl.minimum(after, sinks + window)
        zeros = tl.zeros_like(row)
        store_spans(
            Spans + row * WORDS, stop - 1, zeros, stop, zeros + NO_WINDOW, zeros + CAUSAL, after - stop, mask
        )  # fmt: skip
