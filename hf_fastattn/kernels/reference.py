"""Attention over spans and its gradients in plain torch, fp32: the specification of the kernels, which also serves CPU tensors.

Both have the kernels' signatures. The softmax of a query is computed over all its scores at once. Long inputs are processed in
chunks of queries, so the (q_len, kv_len) matrix is never materialised (Rabe and Staats, "Self-attention Does Not Need O(n^2)
Memory", 2021).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import checks, dropout
from .spans import CAUSAL, DROPPED, HOLES, KV_START, Q_START, WORDS, has_rows, width_of
from .spec import KV, Gradients, Spec
from .states import wide

__all__ = ["attention", "backward"]

SCORES_AT_ONCE = 1 << 20  # 4 MiB, about the size of a CPU's caches; a GPU needs larger chunks to be busy


def visible(
    q_len: int,
    kv_len: int,
    device: torch.device,
    spans: torch.Tensor | None,
    causal: bool,
    window: int | None,
    sinks: int = 0,
    some: range | None = None,
) -> torch.Tensor:
    """Which keys each query sees: bool (batch or 1, q_len, kv_len). some: a range of queries; None for all."""
    slots = torch.arange(kv_len, device=device, dtype=torch.int32)
    some = range(q_len) if some is None else some
    queries = torch.arange(some.start, some.stop, device=device, dtype=torch.int32)
    width: int | torch.Tensor = width_of(window)
    if spans is None:
        pos = (queries + kv_len - q_len)[None, :, None]
        distance = pos - slots
        seen = (distance < width) | (slots < sinks)
        return seen & (distance >= 0) if causal else seen & ((-distance < width) | (slots < sinks))

    q_start, kv_start, kv_stop, span_window, flags = spans[:, 0, 0, :DROPPED, None, None].unbind(1)
    distance = q_start + queries[:, None] - slots
    width = torch.clamp(span_window, max=width)
    is_causal = ((flags & CAUSAL) != 0) | causal
    is_sink = slots < kv_start.clamp(min=0) + sinks
    seen = (slots >= kv_start) & (slots < kv_stop) & ((distance < width) | is_sink)
    seen &= (distance >= 0) | (~is_causal & ((distance > -width) | is_sink))
    if has_rows(spans):
        lo, hi = spans[:, 0, :, WORDS:][..., queries, None].unbind(1)
        seen &= (slots >= lo) & (slots < hi)
    elif spans.shape[-1] > WORDS:
        live = ((spans[:, 0, 0, WORDS:][:, slots // 32] >> (slots % 32)) & 1) != 0
        seen = seen & (live[:, None, :] | ((flags & HOLES) == 0))
    return seen


def attention(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
):
    """softmax(scale * q k^T) v over the keys that each query sees, exact, in fp32.

    q: (batch, num_heads, q_len, head_dim). kv: K and V, (batch, num_kv_heads, kv_len, head_dim); the head_dim of V may differ.
    num_heads is a multiple of num_kv_heads. The dtype is fp16, bf16 or fp32, the strides are any with stride(-1) == 1. Query i is
    at slot kv_len - q_len + i (lower-right alignment) unless `spans` gives another slot.

    spans: int32, see `kernels.spans`. causal: query p sees key j only if j <= p; with False the flag in the spans decides.
    window: a query sees the nearest `window` keys, its own included (on both sides if not causal). softcap c: scores
    become c * tanh(score / c). scale: None for head_dim ** -0.5. sink_logits: (num_heads,), one additional logit in the softmax
    denominator of each head, without a value (GPT-OSS). The result of a query that sees no key is 0.

    sinks: every query also sees the first `sinks` slots of its row (from KV_START on), whatever the window; causality and holes
    still apply. With inv_freq, sinks are scored with the query re-rotated from its position p in the row to
    min(p, sinks + window - 1). inv_freq, fp32 (rotary_dim / 2,), and interleaved describe the rotary embedding
    (`kernels.decode.rotate`).

    dropout: the probability with which a weight is dropped, after the softmax; the others are scaled up. seed: int64, one number,
    that decides which (`kernels.dropout`).

    Returns out (batch, num_heads, q_len, head_dim of V) in q's dtype, a view of (batch, q_len, num_heads, head_dim of V); with
    `return_lse` also lse (batch, num_heads, q_len) fp32, the natural logarithm of the denominator (-inf if it is 0).
    Raises ValueError, TypeError or RuntimeError, with the reason, for arguments that it does not support.

    Sources: Vaswani et al. (2017), section 3.2.1; softcap: Gemma 2 (2024), section 2; sink logits: GPT-OSS (2025); sinks: Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
    """
    scale = checks.check(q, kv, spec, spans, sink_logits, inv_freq, seed, rows=True, dropout=True)
    bias = None if kv.form.bias is None else kv.form.bias(kv)
    k, v = (wide(x) for x in (kv.plain() if bias is None else (kv.k, kv.v)))
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    out, lse = checks.empty_outputs(q, value_dim, return_lse)
    # The query heads of a KV head are adjacent, so K and V need no expansion.
    grouped = (batch, kv_heads, num_heads // kv_heads, q_len)
    into = out.view(*grouped, value_dim), lse.view(grouped) if return_lse else None
    logits = None if sink_logits is None else wide(sink_logits).view(kv_heads, -1, 1, 1)
    q_sinks = is_sink = None
    if inv_freq is not None:
        q_rerotated = rerotated(
            q, kv_len, spans, inv_freq, window=spec.window, sinks=spec.sinks, interleaved=spec.interleaved
        )  # fmt: skip
        q_sinks = q_rerotated.view(*grouped, head_dim)
        first = torch.zeros(batch, 1, device=q.device) if spans is None else spans[:, 0, 0, KV_START, None].clamp(min=0)
        is_sink = torch.arange(kv_len, device=q.device) < first + spec.sinks
    sees = partial(visible, q_len, kv_len, q.device, causal=spec.causal, window=spec.window, sinks=spec.sinks)
    q = q.view(*grouped, head_dim)
    for of_q, of_kv, seen in _pieces(q, k, spans, sees):
        _attend(
            _part(into[0], of_q), _part(into[1], of_q), _part(q, of_q), _part(k, of_kv), _part(v, of_kv), seen,
            _part(logits, of_kv[1]), _part(q_sinks, of_q), _part(is_sink, (of_kv[0], of_kv[2])),
            _kept(spec.dropout, seed, grouped, kv_len, of_q, of_kv), _part(bias, of_kv),
            scale=scale, softcap=spec.softcap,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def backward(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> Gradients:
    """Gradients of `attention` with respect to (q, k, v, sink_logits), exact, summed in fp32.

    q, kv, spec, spans, sink_logits: the arguments of the forward pass, with plain K and V, or with a bias (`kernels.biased`);
    sinks, inv_freq and a bias have no gradients. out, lse: its results. dout, dlse: their gradients, of any strides; dlse is
    None if lse has no gradient. needs: whether the gradients of (q, K and V) are needed.

    Returns (dq, dk, dv, dsink_logits), each in the shape and dtype of its tensor; None if not needed or if there is no such
    tensor. dq, dk and dv are stored as (batch, length, heads, dim), as models expect. The gradient of a query that sees no key,
    and of a key that no query sees, is 0.

        P = exp(S - lse)      delta = rowsum(dO * O) - dlse      dS = P * (dO V^T - delta) * softcap'(S)
        dV = P^T dO      dQ = scale * dS K      dK = scale * dS^T Q      dsink = -sum(exp(sink - lse) * delta)

    The query heads of a KV head are summed in dK and dV. Source: Dao, "FlashAttention-2" (2023), algorithm 2.
    """
    scale = checks.check_backward(q, kv, spec, spans, out, lse, dout, dlse, sink_logits, seed)
    k, v, bias = wide(kv.k), wide(kv.v), None if kv.form.bias is None else kv.form.bias(kv)
    batch, num_heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    delta = (wide(dout) * out).sum(-1)
    if dlse is not None:
        delta -= dlse
    grouped = (batch, kv_heads, num_heads // kv_heads, q_len)
    dq, dk, dv = (torch.zeros_like(x, dtype=k.dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    by_row = [x.reshape(*grouped, *x.shape[3:]) for x in (dq, q, dout, lse, delta)]
    sees = partial(visible, q_len, kv_len, q.device, causal=spec.causal, window=spec.window)
    for of_q, of_kv, seen in _pieces(by_row[1], k, spans, sees):
        of_keys, of_rows = (x[of_kv] for x in (dk, dv, k, v)), (x[of_q] for x in by_row)
        kept = _kept(spec.dropout, seed, grouped, kv_len, of_q, of_kv)
        options = {"seen": seen, "kept": kept, "bias": _part(bias, of_kv), "softcap": spec.softcap}
        _add_gradients(*of_keys, *of_rows, scale=scale, **options)
    dsink = None if sink_logits is None else checks.sink_gradient(sink_logits, lse, delta)
    token_major = [checks.token_major(x).to(q.dtype) for x in (dq, dk, dv)]
    return token_major[0] if needs[0] else None, *(token_major[1:] if needs[1] else (None, None)), dsink


def _pieces(
    q: torch.Tensor, k: torch.Tensor, spans: torch.Tensor | None, sees: Callable[..., torch.Tensor]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, slice, slice], torch.Tensor]]:
    """Chunks of the scores that fit into memory: their indices in q (batch, num_kv_heads, group, q_len, head_dim) and in k, and
    the visible keys, bool (batch or 1, q_len, kv_len). A single chunk if all scores fit."""
    batch, kv_heads, group, q_len, _ = q.shape
    kv_len = k.shape[2]
    at_once = SCORES_AT_ONCE if q.device.type == "cpu" else 16 * SCORES_AT_ONCE
    everything = slice(None)
    if batch * kv_heads * group * q_len * kv_len <= at_once:
        yield (everything,) * 4, (everything,) * 3, sees(spans)
        return
    step = max(1, at_once // (group * kv_len))
    for row, start in itertools.product(range(batch), range(0, q_len, step)):
        some = range(start, min(start + step, q_len))
        seen = sees(None if spans is None else spans[row : row + 1], some=some)
        keys = _seen_by_any(seen)
        for head in range(kv_heads):
            here = slice(row, row + 1), slice(head, head + 1)
            yield (*here, everything, slice(some.start, some.stop)), (*here, keys), seen[:, :, keys]


def _kept(p: float, seed: torch.Tensor | None, grouped: tuple[int, int, int, int], kv_len: int, of_q, of_kv) -> Any:
    """The factor that dropout gives each weight of a piece, 0 where it is dropped; None without dropout.

    grouped: (batch, num_kv_heads, group, q_len).
    """
    if p == 0.0:
        return None
    assert seed is not None
    batch, kv_heads, group, q_len = grouped
    index = partial(torch.arange, device=seed.device)
    heads = index(kv_heads * group).view(kv_heads, group)[of_q[1]]
    found = dropout.kept(
        seed, p, kv_heads * group, index(batch)[of_q[0]], heads.reshape(-1), index(q_len)[of_q[3]], index(kv_len)[of_kv[2]]
    )
    return found.unflatten(1, heads.shape) * dropout.keep_scale(p)


def _add_gradients(dk, dv, k, v, dq, q, dout, lse, delta, *, seen, kept, bias, scale: float, softcap: float | None) -> None:
    """Write dq of q (batch, num_kv_heads, group, q_len, head_dim) over the keys `seen`, and add its part to dk and dv."""
    batch, kv_heads, group, q_len, _ = q.shape
    # A slot that no query sees may contain NaN.
    unseen = ~seen.any(1)[:, None, :, None]
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    q, dout = (wide(x).reshape(batch, kv_heads, group * q_len, -1) for x in (q, dout))
    scores = (q @ k.transpose(2, 3)).view(batch, kv_heads, group, q_len, -1).mul_(scale)
    slope: float | torch.Tensor = scale
    if softcap is not None:
        tanh = scores.div_(softcap).tanh_()
        slope = scale * (1.0 - tanh * tanh)
        scores = tanh * softcap
    if bias is not None:
        scores += bias[:, :, None, None]
    scores.masked_fill_(~seen[:, None, None], float("-inf"))
    # A row that sees nothing has lse = -inf, and weights of exp(-inf - 0) = 0.
    weights = scores.sub_(lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp_()
    applied = weights if kept is None else weights * kept
    dv += applied.view(batch, kv_heads, group * q_len, -1).transpose(2, 3) @ dout
    dscores = (dout @ v.transpose(2, 3)).view(weights.shape)
    if kept is not None:
        dscores.mul_(kept)
    dscores = dscores.sub_(delta[..., None]).mul_(weights).mul_(slope).view(batch, kv_heads, group * q_len, -1)
    dq.copy_((dscores @ k).view(dq.shape))
    dk += dscores.transpose(2, 3) @ q


def _part(x: torch.Tensor | None, where: Any) -> Any:
    return None if x is None else x[where]


def _attend(out, lse, q, k, v, seen, logits, q_sinks, is_sink, kept, bias, *, scale: float, softcap: float | None) -> None:
    """Attention of q (batch, num_kv_heads, group, q_len, head_dim) over the keys `seen`; writes out, and lse if not None."""
    batch, kv_heads, group, q_len, head_dim = q.shape

    def score(queries):
        rows = wide(queries).reshape(batch, kv_heads, group * q_len, head_dim)
        return (rows @ k.transpose(2, 3)).view(batch, kv_heads, group, q_len, -1).mul_(scale)

    scores = score(q)
    if q_sinks is not None:
        scores = torch.where(is_sink[:, None, None, None], score(q_sinks), scores)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias[:, :, None, None]
    scores.masked_fill_(~seen[:, None, None], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if logits is not None:
        top = torch.maximum(top, logits)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if logits is not None:
        total += torch.exp(logits - top)
    # A slot that no query sees may contain NaN, and 0 * NaN must not reach the output.
    values = v.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    if kept is not None:
        weights.mul_(kept)
    sums = weights.view(batch, kv_heads, group * q_len, -1) @ values
    out.copy_(sums.view(out.shape) / total.masked_fill(total == 0, 1.0))
    if lse is not None:
        lse.copy_((top + total.log_())[..., 0])


def _seen_by_any(seen: torch.Tensor) -> slice:
    """From the first key that a query sees to the last. On a GPU all keys: the bounds would need a synchronisation."""
    if seen.device.type != "cpu":
        return slice(None)
    keys = seen.any(0).any(0).nonzero()
    return slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(1)


def rerotated(
    q: torch.Tensor,
    kv_len: int,
    spans: torch.Tensor | None,
    inv_freq: torch.Tensor,
    *,
    window: int | None,
    sinks: int,
    interleaved: bool,
) -> torch.Tensor:
    """The re-rotated queries that score the sinks, in q's shape and dtype; `kernels.decode.rotate` has the formula."""
    q_len, pairs = q.shape[2], inv_freq.shape[0]
    token = torch.arange(q_len, device=q.device)
    if spans is None:
        token = (token + kv_len - q_len)[None]
    else:
        q_start, kv_start, dropped = (spans[:, 0, 0, i, None].long() for i in (Q_START, KV_START, DROPPED))
        token = token + q_start - kv_start.clamp(min=0) + dropped
    near = token.clamp(max=sinks + width_of(window) - 1)
    from_angle, to_angle = (x[..., None].float() * inv_freq for x in (token, near))
    angle = from_angle.double() - to_angle.double()
    angle = angle - 2 * math.pi * torch.round(angle / (2 * math.pi))
    cos, sin = angle.float().cos()[:, None], angle.float().sin()[:, None]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    out = torch.empty_like(q)
    out[..., 2 * pairs :] = q[..., 2 * pairs :]
    x, y = q[..., first].float(), q[..., second].float()
    out[..., first] = (x * cos + y * sin).to(q.dtype)
    out[..., second] = (y * cos - x * sin).to(q.dtype)
    return out


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with any mask: bool (True: attended) or additive, broadcastable to (batch, num_heads, q_len, kv_len).

    Runs torch's scaled_dot_product_attention with K/V expanded to all query heads, or plain torch for softcap or sink logits.
    """
    checks.check_factors(scale, softcap)
    mask = mask[..., : k.shape[2]]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap is None and sink_logits is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (q.float() @ k.float().transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    nothing = (scores == float("-inf")).all(-1, keepdim=True)  # the softmax of such a row is NaN, also its gradient
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)[..., : k.shape[2]]
    return (torch.dropout(weights, dropout, dropout > 0.0) @ v.float()).to(q.dtype)
