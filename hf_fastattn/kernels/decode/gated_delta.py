"""The step of the gated delta rule in one launch instead of thirty, with one pass over the state, in place.

    q, k = q / |q| / sqrt(K), k / |k|;  S = exp(-exp(a_log) softplus(a + dt_bias)) S
    S = S + k (sigmoid(b) (v - k^T S))^T;  out = q^T S

A program has a block of the columns of a head's state, which it loads while conv_update, the launch before it, still runs: no
launch since the one before conv_update may write the state. It computes q^T S and k^T S before the update, and from them out, so
no sum waits for another.

Rounds: sigmoid(b) and out, to their dtype, and S to the dtype of the state; all else is fp32. Limits: `why_not`.
Oracle: `kernels.states.gated_delta`, and torch_recurrent_gated_delta_rule of Transformers.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import checks
from ..host import gpu, launch
from ..host.overlap import early, let_next_begin, wait_for_inputs
from .conv_update import Ready

MAX_DIM = 256  # of a key: a program has whole columns of the state
TILE = 4096  # elements of a state in a program


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32, as torch has it: x itself above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    lost = u == 1.0
    y = tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0)))  # without the rounding of 1 + e
    return tl.where(x > 20.0, x, y)


@triton.jit
def gated_delta_kernel(
    Mixed,  # (rows, 2 * heads / GROUP * K_DIM + heads * V_DIM): q, k and v
    A,  # (rows, heads / GROUP, GROUP)
    B,  # (rows, heads / GROUP, GROUP), with A's strides
    ALog,  # (heads,)
    DtBias,  # (heads,)
    State,  # (rows, heads, K_DIM, V_DIM), read and written
    Out,  # (rows, heads, V_DIM), written
    stride_ar, stride_ag, heads,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_V columns of the state of a row and head."""
    blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0) // blocks
    key_head = head // GROUP
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = offs_k < K_DIM, offs_v < V_DIM
    states = State + (row * heads + head) * (K_DIM * V_DIM) + offs_k[:, None] * V_DIM + offs_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.load(states, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)  # before the wait
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)
    keys = heads // GROUP * K_DIM
    mixed = Mixed + row * (2 * keys + heads * V_DIM)
    q = tl.load(mixed + key_head * K_DIM + offs_k, mask=in_k, other=0.0).to(tl.float32)
    k = tl.load(mixed + keys + key_head * K_DIM + offs_k, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(mixed + 2 * keys + head * V_DIM + offs_v, mask=in_v, other=0.0).to(tl.float32)
    gates = row * stride_ar + key_head * stride_ag + head % GROUP
    a = tl.load(A + gates).to(tl.float32) + tl.load(DtBias + head).to(tl.float32)
    b = tl.load(B + gates)
    decay = tl.exp(-tl.exp(tl.load(ALog + head).to(tl.float32)) * softplus(a))
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    # Two sums, which do not wait for each other: of products of vectors, and of the old state with both.
    squares, products = tl.split(tl.sum(tl.join(tl.join(q * q, k * k), tl.join(q * k, q * k)), 0))
    of_q, of_k = tl.split(squares)
    q_k, _ = tl.split(products)
    read_q, read_k = tl.split(tl.sum(tl.join(state * q[:, None], state * k[:, None]), 0))
    of_q, of_k = tl.rsqrt(of_q + 1e-6) * K_DIM**-0.5, tl.rsqrt(of_k + 1e-6)
    delta = beta * (v - decay * of_k * read_k)
    out = decay * of_q * read_q + of_q * of_k * q_k * delta
    state = decay * state + (of_k * k)[:, None] * delta[None, :]
    tl.store(states, state.to(State.dtype.element_ty), mask=mask)
    tl.store(Out + (row * heads + head) * V_DIM + offs_v, out.to(Out.dtype.element_ty), mask=in_v)


def why_not(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor
) -> str | None:
    """The reason why these inputs need another path, or None. Arguments as in `prepared`."""
    if state.dim() != 4 or state.numel() == 0 or state.shape[0] > launch.MAX_GRID or state.shape[2] > MAX_DIM:
        return f"state is {tuple(state.shape)}; it must be (rows, heads, key_dim, value_dim), key_dim at most {MAX_DIM}."
    rows, heads, key_dim, value_dim = state.shape
    if a.dim() != 3 or a.shape[0] != rows or a.shape[1] * a.shape[2] != heads or (a.stride(2) != 1 and a.shape[2] > 1):
        return f"a is {tuple(a.shape)}; it must be ({rows}, key heads, group) of {heads} heads in all, each group contiguous."
    if (b.shape, b.stride()) != (a.shape, a.stride()):
        return f"a is {tuple(a.shape)} with strides {a.stride()}, and b {tuple(b.shape)} with {b.stride()}."
    if mixed.shape != (rows, 2 * a.shape[1] * key_dim + heads * value_dim):
        return f"mixed is {tuple(mixed.shape)}; it must have the queries, keys and values of {rows} rows."
    if a_log.shape != (heads,) or dt_bias.shape != (heads,):
        return f"a_log is {tuple(a_log.shape)} and dt_bias {tuple(dt_bias.shape)}; both must be ({heads},)."
    if not {mixed.dtype, a.dtype, b.dtype, a_log.dtype, dt_bias.dtype, state.dtype} <= {*checks.DTYPES} or a.dtype != b.dtype:
        return (
            f"mixed is {mixed.dtype}, a {a.dtype}, b {b.dtype} and state {state.dtype}; a and b must share one of 16 or 32 bits."
        )
    reason = checks.why_not_inference(state, mixed, a_log, dt_bias)
    return reason or checks.why_not_inference(state, a[:, 0], b[:, 0], strided=True)


def prepared(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor
) -> Ready | None:
    """The step for one token of each row, without its launch, which also updates the state; None if `why_not` gives a reason.

    mixed: (rows, queries | keys | values), contiguous; a, b: (rows, key heads, value heads of each); a_log, dt_bias: (heads,);
    state: (rows, heads, key_dim, value_dim), contiguous. Its result is (rows, heads, value_dim) in mixed's dtype.
    """
    start = _prepare((mixed, a, b, a_log, dt_bias, state))
    if start is None:
        return None
    out = torch.empty(*state.shape[:2], state.shape[3], dtype=mixed.dtype, device=mixed.device)
    return Ready(start, (mixed, a, b, a_log, dt_bias, state, out), out)


def lines(state: torch.Tensor, count: int, least: int) -> int:
    """How many of the `count` columns or lines of a head's state a program has: few, until all multiprocessors have two programs.

    Of at most TILE elements, which leave registers for eight programs on a multiprocessor.
    """
    block: int = triton.next_power_of_2(min(count, max(least, TILE * count // (state.shape[2] * state.shape[3]))))
    while block > least and state.shape[0] * state.shape[1] * triton.cdiv(count, block) < 2 * gpu.num_sms(state.device):
        block //= 2
    return block


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...]) -> launch.Launch | None:
    given: Any = tensors
    _, a, _, _, _, state = given
    if why_not(*given):
        return None
    rows, heads, key_dim, value_dim = state.shape
    block_v = lines(state, value_dim, 16)  # 64 bytes of each line of the state
    return launch.Launch(
        gated_delta_kernel,
        (heads * triton.cdiv(value_dim, block_v), rows),
        stride_ar=a.stride(0),
        stride_ag=a.stride(1),
        heads=heads,
        GROUP=a.shape[2],
        K_DIM=key_dim,
        V_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        **early(state.device),
        num_warps=launch.warps_of(triton.next_power_of_2(key_dim) * block_v),
    )
