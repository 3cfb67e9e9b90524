"""Linear attention in plain torch: the specification of `decode.linear_state`, and what prompts and CPU tensors run.

The weight of key j for query i is phi(q_i) . phi(k_j), divided by the sum of these over j <= i, in place of the softmax:

    out_i = phi(q_i) U_i / (phi(q_i) . z_i),    U_i = sum_{j <= i} phi(k_j) v_j^T,    z_i = sum_{j <= i} phi(k_j)

So a row keeps U (features, value_dim) and z (features,) for each KV head, in fp32, whatever its length. Where the denominator
is 0 the result is 0. Nothing here is exact attention: it approximates the softmax as well as phi does.

Sources: Katharopoulos et al., "Transformers are RNNs" (2020), section 3 (elu); Choromanski et al., "Rethinking Attention with
Performers" (2021), section 2.3; Zhang et al., "The Hedgehog & the Porcupine" (2024), sections 3 and 4 (hedgehog, taylor).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from .states import wide

MAPS = ("elu", "relu", "taylor", "hedgehog", "performer")
RANDOM = 256  # random features of "performer"
CHUNK = 256  # tokens of a prompt at once
Phi = Callable[[torch.Tensor, bool], torch.Tensor]  # (heads on axis 1, whether they are queries) -> features


def num_features(name: str, head_dim: int) -> int:
    """The width of phi(x)."""
    of_taylor = 1 + head_dim + head_dim * (head_dim + 1) // 2
    return {"taylor": of_taylor, "hedgehog": 2 * head_dim, "performer": RANDOM}.get(name, head_dim)


def features(
    name: str, x: torch.Tensor, scale: float, weight: torch.Tensor | None = None, of_queries: bool = False
) -> torch.Tensor:
    """phi(x) of queries or keys (..., heads, tokens, head_dim), in fp32, or in fp64 if that is the dtype of x.

    name: one of MAPS. scale: that of the scores; "taylor" and "performer" approximate exp(scale * q . k), and the others take x
    as it is. weight: (heads, head_dim, head_dim), of "hedgehog". of_queries: "performer" divides the features of a query by the
    largest, which cancels. Those of a key are at most exp(head_dim / 2), and 0 for one that is very long.
    """
    x = wide(x)
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "relu":
        return torch.relu(x)
    if name == "hedgehog":
        if weight is None:
            raise ValueError('The map "hedgehog" has weights, (heads, head_dim, head_dim); pass them as weight=.')
        x = x @ weight.to(x.dtype)
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    x = x * math.sqrt(scale)
    if name == "taylor":  # 1 + s + s^2 / 2 of s = q . k
        rows, columns, factor = _pairs(x.shape[-1], x.dtype, x.device)
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., rows] * x[..., columns] * factor], -1)
    exponents = x @ _directions(x.shape[-1], x.dtype, x.device) - x.square().sum(-1, keepdim=True) / 2
    if of_queries:
        exponents = exponents - exponents.amax(-1, keepdim=True).detach()
    return exponents.exp() / math.sqrt(RANDOM)


@lru_cache(32)
def _pairs(width: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The indices i <= j of the products x_i x_j, and what each is multiplied with."""
    with torch.inference_mode(False):
        rows, columns = torch.triu_indices(width, width, device=device)
        factor = torch.ones(len(rows), dtype=dtype, device=device).masked_fill_(rows == columns, math.sqrt(0.5))
        return rows, columns, factor


@lru_cache(32)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random directions (width, RANDOM) of length sqrt(width), orthogonal in blocks of `width`; the same in every process."""
    with torch.inference_mode(False), torch.device("cpu"):
        normal = torch.randn(-(-RANDOM // width), width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        blocks: torch.Tensor = torch.linalg.qr(normal)[0].mT.reshape(-1, width)[:RANDOM] * math.sqrt(width)
        return blocks.T.contiguous().to(device, dtype)


def weights(fq: torch.Tensor, fk: torch.Tensor) -> torch.Tensor:
    """The causal weights (batch, num_heads, tokens, tokens) of features (batch, num_heads or num_kv_heads, tokens, features):
    the definition, which takes the square of the tokens."""
    products = (fq @ fk.repeat_interleave(fq.shape[1] // fk.shape[1], 1).mT).tril()
    return _divided(products, products.sum(-1, keepdim=True))


def _divided(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return numerator / denominator.masked_fill(denominator == 0, 1.0)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    phi: Phi,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
    live: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Causal linear attention in chunks: the square of a chunk, and the state before it. Differentiable without a state.

    q: (batch, num_heads, tokens, head_dim); k, v: (batch, num_kv_heads, tokens, head_dim of each). state: U (batch,
    num_kv_heads, features, value_dim) and z (batch, num_kv_heads, features), which the tokens follow and are added to, in place;
    None if nothing precedes them. live: bool (batch, tokens), False for padding, which no query sees; None if all are.
    Returns (batch, num_heads, tokens, value_dim) in q's dtype, a view of (batch, tokens, num_heads, value_dim).
    """
    batch, heads, tokens, _ = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    u, z = (None, None) if state is None else state
    found = []
    for begin in range(0, tokens, chunk):
        some = slice(begin, min(begin + chunk, tokens))
        fk, fq, values = phi(k[:, :, some], False), phi(q[:, :, some], True), wide(v[:, :, some])
        if live is not None:
            there = live[:, None, some, None]
            fk, values = torch.where(there, fk, 0), torch.where(there, values, 0)
        grouped = fq.reshape(batch, kv_heads, -1, fq.shape[-1])  # the query heads of a KV head are adjacent
        products = (grouped @ fk.mT).view(*fq.shape[:3], -1).tril().view(*grouped.shape[:3], -1)
        out, total = products @ values, products.sum(-1, keepdim=True)
        if u is not None and z is not None:
            out, total = out + grouped @ u, total + grouped @ z[..., None]
        found.append(_divided(out, total).view(batch, heads, -1, value_dim).transpose(1, 2).to(q.dtype))
        added = fk.mT @ values, fk.sum(2)
        u, z = added if u is None or z is None else (u + added[0], z + added[1])
    if state is not None and u is not None and z is not None:
        state[0].copy_(u)
        state[1].copy_(z)
    return torch.cat(found, 1).transpose(1, 2)


def step(fq: torch.Tensor, fk: torch.Tensor, v: torch.Tensor, u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """One token of each row: the specification of `decode.linear_state`, with its arguments. u and z change in place."""
    u.add_(fk[..., None] * wide(v)[..., None, :])
    z.add_(fk)
    grouped = fq.view(*fk.shape[:2], -1, fq.shape[-1])
    out = _divided(grouped @ u, grouped @ z[..., None])
    return out.view(len(fq), -1, v.shape[-1]).to(v.dtype)
