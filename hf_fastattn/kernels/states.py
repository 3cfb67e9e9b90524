"""The steps of linear layers in PyTorch, for one new token of each row: the specification of conv_update, gated_delta, selective
and gated_norm in decode/.

Tensors are those of the kernels; states are replaced in place. Results have the roundings of Transformers' code.
"""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 if that is its dtype."""
    return x if x.dtype == torch.float64 else x.float()


def conv_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: bool = True,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x if before is None else before * x
    state.copy_(torch.cat([state[..., 1:], x[..., None]], -1))
    y = (wide(state) * wide(weight)).sum(-1)
    y = (y if bias is None else y + wide(bias)).to(x.dtype)
    y = torch.nn.functional.silu(y) if act else y
    return y if after is None else after * y


def gated_delta(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    rows, heads, key_dim, value_dim = state.shape
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    q, k, v = wide(mixed).split([keys, keys, heads * value_dim], -1)
    group = heads * key_dim // keys
    q, k = (t.view(rows, -1, key_dim).repeat_interleave(group, 1) for t in (q, k))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g = -wide(a_log).exp() * torch.nn.functional.softplus(wide(a.reshape(rows, heads)) + wide(dt_bias))
    beta = wide(b.reshape(rows, heads).sigmoid())
    old = wide(state) * g.exp()[..., None, None]
    delta = (v.view(rows, heads, value_dim) - (old * k[..., None]).sum(-2)) * beta[..., None]
    new = old + k[..., None] * delta[..., None, :]
    state.copy_(new)
    out: torch.Tensor = (new * q[..., None]).sum(-2).mul(key_dim**-0.5).to(mixed.dtype)
    return out


def selective(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, heads, head_dim, size = state.shape
    shared = (mixed.shape[-1] - heads * head_dim) // 2
    x, b, c = mixed.split([heads * head_dim, shared, shared], -1)
    x = x.view(rows, heads, head_dim)
    b, c = (t.reshape(rows, -1, size).repeat_interleave(heads * size // shared, 1) for t in (b, c))
    dt = torch.nn.functional.softplus(dt + dt_bias.to(dt.dtype))
    decay = torch.exp(wide(dt) * -wide(a_log).exp())[..., None, None]
    new = state * decay + (dt[..., None] * b)[..., None, :] * x[..., None]
    state.copy_(new)
    y = (wide(new.to(c.dtype)) * wide(c)[..., None, :]).sum(-1).to(x.dtype)
    out: torch.Tensor = (y + x * d[:, None]).to(x.dtype).flatten(1)
    return out if gate is None else out * torch.nn.functional.silu(gate)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, first: bool, late: bool, groups: int = 1
) -> torch.Tensor:
    act, y = torch.nn.functional.silu(wide(gate)), wide(x)
    y = (y * act if first else y).unflatten(-1, (groups, -1))
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    y = wide(weight) * y if late else weight * y.to(x.dtype)
    out: torch.Tensor = (y if first else y * act).to(x.dtype)
    return out
