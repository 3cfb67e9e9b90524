"""The step of a short causal convolution in one launch instead of ten: its state is shifted in place.

    x = before * x;  state = (state_1, ..., state_n-1, x);  y = act(sum_i weight_i state_i + bias);  out = after * y

before and after are the gates of LFM2, act is SiLU or the identity.

Rounds: as the model's code: x, the sum, the activation and the result, to x's dtype; the sum itself is fp32. Limits: `why_not`.
Oracle: `kernels.states.conv_update`, and causal_conv1d_update of Transformers.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .linear_rows import activated

MAX_WIDTH = 8  # of the convolution


class Ready(NamedTuple):
    """A step of a layer that is checked and not launched yet. tensors: of the launch, of which `out` is the result."""

    start: launch.Launch
    tensors: tuple[torch.Tensor | None, ...]
    out: torch.Tensor

    def launch(self) -> torch.Tensor:
        self.start(*self.tensors)
        return self.out


@triton.jit(do_not_specialize=["channels"])
def conv_update_kernel(
    X,  # (rows, channels)
    Before,  # (rows, channels), with X's strides, or None
    After,  # (rows, channels), with X's strides, or None
    State,  # (rows, channels, WIDTH), read and written
    Weight,  # (channels, WIDTH)
    Bias,  # (channels,) or None
    Out,  # (rows, channels), written
    stride_x, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK channels of a row."""
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    offs = tl.arange(0, BLOCK_W)[None, :]
    mask = live[:, None] & (offs < WIDTH)
    at = channel[:, None] * WIDTH + offs
    state = State + row * channels * WIDTH + at
    kept = tl.load(state + 1, mask=mask & (offs < WIDTH - 1), other=0.0)
    weight = tl.load(Weight + at, mask=mask, other=0.0)
    x = tl.load(X + row * stride_x + channel, mask=live, other=0.0)
    dtype = x.dtype
    if Before is not None:
        x = (tl.load(Before + row * stride_x + channel, mask=live, other=0.0).to(tl.float32) * x.to(tl.float32)).to(dtype)
    if After is not None:
        after = tl.load(After + row * stride_x + channel, mask=live, other=0.0)
    if Bias is not None:
        bias = tl.load(Bias + channel, mask=live, other=0.0)
    kept = tl.where(offs == WIDTH - 1, x[:, None], kept)
    y = tl.sum(kept.to(tl.float32) * weight.to(tl.float32), 1)
    if Bias is not None:
        y += bias.to(tl.float32)
    y = y.to(dtype)
    if ACT:
        y = activated(y.to(tl.float32), "silu").to(dtype)
    if After is not None:
        y = (after.to(tl.float32) * y.to(tl.float32)).to(dtype)
    tl.debug_barrier()  # a value is written to where another thread has read
    tl.store(state, kept, mask=mask)
    tl.store(Out + row * channels + channel, y, mask=live)


def why_not(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `prepared`."""
    if x.dim() != 2 or not 0 < x.shape[0] <= launch.MAX_GRID:
        return f"x is {tuple(x.shape)}; it must be (rows, channels), of 1 to {launch.MAX_GRID} rows."
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or not 2 <= weight.shape[1] <= MAX_WIDTH:
        return f"weight is {tuple(weight.shape)}; it must be ({x.shape[1]}, width) with a width of 2 to {MAX_WIDTH}."
    if state.shape != (*x.shape, weight.shape[1]) or not state.is_contiguous():
        return f"state is {tuple(state.shape)}; it must be {(*x.shape, weight.shape[1])}, contiguous."
    if bias is not None and bias.shape != x.shape[1:]:
        return f"bias is {tuple(bias.shape)}; it must be {tuple(x.shape[1:])}."
    for gate in (before, after):
        if gate is not None and (gate.shape, gate.stride()) != (x.shape, x.stride()):
            return f"x is {tuple(x.shape)} with strides {x.stride()}, and a gate {tuple(gate.shape)} with {gate.stride()}."
    for tensor in (x, state, weight, bias, before, after):
        if tensor is not None and (tensor.dtype != x.dtype or x.dtype not in checks.DTYPES):
            return f"All tensors must share one dtype out of float16, bfloat16 and float32; got {x.dtype} and {tensor.dtype}."
    return checks.why_not_inference(weight, bias, state) or checks.why_not_inference(x, weight, before, after, strided=True)


def prepared(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: bool = True,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> Ready | None:
    """The step for one token of each row, without its launch, which also shifts the state; None if `why_not` gives a reason.

    x: (rows, channels), its rows contiguous; before, after: of its shape and strides, or None; state: (rows, channels, width);
    weight: (channels, width); bias: (channels,) or None, all of x's dtype. act: SiLU. Its result is (rows, channels).
    """
    start = _prepare((x, before, after, state, weight, bias), act)
    if start is None:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Ready(start, (x, before, after, state, weight, bias, out), out)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor | None, ...], act: bool) -> launch.Launch | None:
    given: Any = tensors
    x, before, after, state, weight, bias = given
    if why_not(x, state, weight, bias, before, after):
        return None
    (rows, channels), width = x.shape, weight.shape[1]
    block = 256
    return launch.Launch(
        conv_update_kernel,
        (triton.cdiv(channels, block), rows),
        stride_x=x.stride(0),
        channels=channels,
        WIDTH=width,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(width),
        ACT=act,
        **early(x.device),
        num_warps=4,
        enable_fp_fusion=False,  # the model rounds each product before it adds to it
    )
