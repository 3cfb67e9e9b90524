"""The step of Mamba-2's selective state space in one launch instead of thirty, with one pass over the state, in place.

    dt = softplus(dt + dt_bias);  S = exp(-exp(a_log) dt) S + x (dt B)^T;  y = S C + D x;  out = y * silu(gate)

A program has a block of the lines of a head's state, and loads it as gated_delta does. The gate is optional. As in Transformers'
step, dt has no limits: those of a configuration (time_step_limit) hold in prompts.

Rounds: as the model's code: dt, its products with B and x, the S of the product with C, this product, D x, and each factor and
sum after it, to their dtype; S to that of the state. Limits: `why_not`.
Oracle: `kernels.states.selective`, and mamba2_selective_state_update of Transformers.

Source: Dao and Gu, "Transformers are SSMs" (2024), sections 2 and 7.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .conv_update import Ready
from .gated_delta import MAX_DIM, lines, softplus
from .linear_rows import activated


@triton.jit
def selective_kernel(
    Mixed,  # (rows, heads * HEAD_DIM + 2 * heads / GROUP * SIZE): x, B and C
    Dt,  # (rows, heads)
    ALog,  # (heads,)
    D,  # (heads,)
    DtBias,  # (heads,)
    State,  # (rows, heads, HEAD_DIM, SIZE), read and written
    Gate,  # (rows, heads * HEAD_DIM), or None
    Out,  # (rows, heads * HEAD_DIM), written
    stride_dt, stride_gate, heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_P lines of the state of a row and head."""
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0) // blocks
    offs_p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    in_p, in_n = offs_p < HEAD_DIM, offs_n < SIZE
    states = State + ((row * heads + head) * HEAD_DIM + offs_p[:, None]) * SIZE + offs_n[None, :]
    mask = in_p[:, None] & in_n[None, :]
    state = tl.load(states, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)  # before the wait
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    shared = heads // GROUP * SIZE
    mixed = Mixed + row * (heads * HEAD_DIM + 2 * shared)
    x = tl.load(mixed + head * HEAD_DIM + offs_p, mask=in_p, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    b = tl.load(mixed + heads * HEAD_DIM + head // GROUP * SIZE + offs_n, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(mixed + heads * HEAD_DIM + shared + head // GROUP * SIZE + offs_n, mask=in_n, other=0.0).to(tl.float32)
    d = tl.load(D + head)
    dt = tl.load(Dt + row * stride_dt + head).to(tl.float32) + tl.load(DtBias + head).to(dtype).to(tl.float32)
    dt = softplus(dt.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    a = -tl.exp(tl.load(ALog + head).to(tl.float32))
    if Gate is not None:
        gate = tl.load(Gate + row * stride_gate + head * HEAD_DIM + offs_p, mask=in_p, other=0.0).to(tl.float32)
    new = ((dt * b).to(dtype).to(tl.float32)[None, :] * x[:, None]).to(dtype).to(tl.float32)
    state = state * tl.exp(dt * a) + new
    y = tl.sum(state.to(dtype).to(tl.float32) * c[None, :], 1).to(dtype).to(tl.float32)
    skip = x * d.to(tl.float32)
    if d.dtype == dtype:
        skip = skip.to(dtype).to(tl.float32)
    y = (y + skip).to(dtype)
    if Gate is not None:
        y = (y.to(tl.float32) * activated(gate, "silu").to(dtype).to(tl.float32)).to(dtype)
    tl.store(states, state.to(State.dtype.element_ty), mask=mask)
    tl.store(Out + (row * heads + head) * HEAD_DIM + offs_p, y, mask=in_p)


def why_not(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `prepared`."""
    if state.dim() != 4 or state.numel() == 0 or state.shape[0] > launch.MAX_GRID or state.shape[3] > MAX_DIM:
        return f"state is {tuple(state.shape)}; it must be (rows, heads, head_dim, size), size at most {MAX_DIM}."
    rows, heads, head_dim, size = state.shape
    groups, rest = divmod(mixed.shape[-1] - heads * head_dim, 2 * size)
    if mixed.shape[:-1] != (rows,) or rest or groups < 1 or heads % groups:
        return f"mixed is {tuple(mixed.shape)}; it must have x, B and C of {rows} rows, for a state {tuple(state.shape)}."
    if dt.shape != (rows, heads) or not a_log.shape == d.shape == dt_bias.shape == (heads,):
        return f"dt is {tuple(dt.shape)}, a_log {tuple(a_log.shape)}, d {tuple(d.shape)} and dt_bias {tuple(dt_bias.shape)}."
    if gate is not None and (gate.shape != (rows, heads * head_dim) or gate.dtype != mixed.dtype):
        return f"gate is {gate.dtype} {tuple(gate.shape)}; it must be {mixed.dtype} {(rows, heads * head_dim)}."
    if dt.dtype != mixed.dtype or not {mixed.dtype, a_log.dtype, d.dtype, dt_bias.dtype, state.dtype} <= {*checks.DTYPES}:
        return f"mixed is {mixed.dtype}, dt {dt.dtype} and state {state.dtype}; the first two must share one of 16 or 32 bits."
    return checks.why_not_inference(state, mixed, a_log, d, dt_bias) or checks.why_not_inference(dt, gate, state, strided=True)


def prepared(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> Ready | None:
    """The step for one token of each row, without its launch, which also updates the state; None if `why_not` gives a reason.

    mixed: (rows, x | B | C), contiguous, x of heads * head_dim and the others of groups * size elements; dt: (rows, heads) and
    gate: (rows, heads * head_dim) or None, their rows contiguous; a_log, d, dt_bias: (heads,); state: (rows, heads, head_dim,
    size), contiguous. Its result is (rows, heads * head_dim) in mixed's dtype.
    """
    start = _prepare((mixed, dt, a_log, d, dt_bias, state, gate))
    if start is None:
        return None
    out = torch.empty(state.shape[0], state.shape[1] * state.shape[2], dtype=mixed.dtype, device=mixed.device)
    return Ready(start, (mixed, dt, a_log, d, dt_bias, state, gate, out), out)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor | None, ...]) -> launch.Launch | None:
    given: Any = tensors
    mixed, dt, _, _, _, state, gate = given
    if why_not(*given):
        return None
    rows, heads, head_dim, size = state.shape
    block_p = lines(state, head_dim, 8)
    return launch.Launch(
        selective_kernel,
        (heads * triton.cdiv(head_dim, block_p), rows),
        stride_dt=dt.stride(0),
        stride_gate=0 if gate is None else gate.stride(0),
        heads=heads,
        GROUP=heads * 2 * size // (mixed.shape[1] - heads * head_dim),
        HEAD_DIM=head_dim,
        SIZE=size,
        BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(size),
        **early(state.device),
        num_warps=launch.warps_of(block_p * triton.next_power_of_2(size)),
        enable_fp_fusion=False,  # the model rounds each product before it adds to it
    )
