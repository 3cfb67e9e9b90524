"""Attention over spans in plain torch: the specification of every kernel here, and what CPU tensors run.

It shares the kernels' signature and holds the whole score matrix, so it is for short inputs and for being right.
"""

from __future__ import annotations

import math

import torch

from . import checks
from .spans import CAUSAL, DROPPED, HOLES, KV_START, NO_WINDOW, Q_START, WORDS
from .spec import KV, Spec


def visible(
    q_len: int, kv_len: int, device: torch.device, spans: torch.Tensor | None, causal: bool, window: int | None, sinks: int = 0
) -> torch.Tensor:
    """Which keys each query sees: bool (batch or 1, q_len, kv_len)."""
    slots = torch.arange(kv_len, device=device)
    queries = torch.arange(q_len, device=device)
    window = NO_WINDOW if window is None else window
    if spans is None:
        pos = (queries + kv_len - q_len)[None, :, None]
        distance = pos - slots
        seen = (distance < window) | (slots < sinks)
        return seen & (distance >= 0) if causal else seen & ((-distance < window) | (slots < sinks))

    q_start, kv_start, kv_stop, span_window, flags = spans[:, 0, 0, :DROPPED, None, None].unbind(1)
    distance = q_start + queries[:, None] - slots
    window = torch.clamp(span_window, max=window)
    is_causal = ((flags & CAUSAL) != 0) | causal
    is_sink = slots < kv_start.clamp(min=0) + sinks
    seen = (slots >= kv_start) & (slots < kv_stop) & ((distance < window) | is_sink)
    seen = seen & torch.where(is_causal, distance >= 0, (-distance < window) | is_sink)
    if spans.shape[-1] > WORDS:
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
    return_lse: bool = False,
):
    """softmax(scale * q k^T) v over the keys each query sees, exact, in fp32.

    q: (batch, num_heads, q_len, head_dim); kv: K and V, (batch, num_kv_heads, kv_len, head_dim), num_heads a multiple of
    num_kv_heads; fp16, bf16 or fp32, any strides with stride(-1) == 1. Query i stands at slot kv_len - q_len + i
    (lower-right alignment) unless `spans` says otherwise.

    spans: int32, see `kernels.spans`. causal: query p sees key j only if j <= p; False leaves it to the spans' flag.
    window: the query sees the nearest `window` keys, itself included (both sides where not causal). softcap c: scores
    become c * tanh(score / c). scale: head_dim ** -0.5 where None. sink_logits: (num_heads,), one more logit in each
    head's denominator that has no value (GPT-OSS). A query that sees nothing gets 0.

    sinks: every query sees the row's first `sinks` slots (from KV_START on; causality and holes still hold) whatever the window,
    and scores them, with inv_freq by the query re-rotated from its place p in the row to min(p, sinks + window - 1).
    inv_freq, fp32 (rotary_dim / 2,), and interleaved say how the rotary embedding turns (`kernels.decode.rotate`).

    Returns out (batch, num_heads, q_len, head_dim) in q's dtype, a view of (batch, q_len, num_heads, head_dim); with
    `return_lse` also lse (batch, num_heads, q_len) fp32, the natural logarithm of the denominator (-inf where it is 0).
    Raises ValueError, TypeError or RuntimeError, in a sentence, for what it cannot honour.

    Sources: Vaswani et al. (2017), section 3.2.1; softcap: Gemma 2 (2024), section 2; sink logits: GPT-OSS (2025); sinks: Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
    """
    scale = checks.check(q, kv, spec, spans, sink_logits, inv_freq)
    _, causal, window, softcap, sinks, interleaved = spec
    k, v = kv.plain()
    batch, num_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = num_heads // kv_heads

    def score(queries):
        # The query heads of one KV head become rows of one product, so K and V are not expanded.
        rows = queries.float().reshape(batch, kv_heads, group * q_len, head_dim)
        return (rows @ k.float().transpose(2, 3)).view(batch, kv_heads, group, q_len, kv_len) * scale

    scores = score(q)
    if inv_freq is not None:
        turned = turned_back(q, kv_len, spans, inv_freq, window=window, sinks=sinks, interleaved=interleaved)
        first = torch.zeros(1, 1, device=q.device) if spans is None else spans[:, 0, 0, KV_START, None].clamp(min=0)
        is_sink = torch.arange(kv_len, device=q.device) < first + sinks
        scores = torch.where(is_sink[:, None, None, None], score(turned), scores)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q_len, kv_len, q.device, spans, causal, window, sinks)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sink_logits is not None:
        extra = sink_logits.float().view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, q_len, 1)
        scores = torch.cat([scores, extra], -1)

    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    weights = weights[..., :kv_len] / total.masked_fill(total == 0, 1.0)
    # Slots nobody sees may hold anything, NaN too; 0 * NaN must not reach the output.
    values = v.float().masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    out = weights.reshape(batch, kv_heads, group * q_len, kv_len) @ values
    out = out.view(batch, num_heads, q_len, head_dim).to(q.dtype)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if not return_lse:
        return out
    lse = (top + torch.log(total)).view(batch, num_heads, q_len)
    return out, lse


def turned_back(
    q: torch.Tensor,
    kv_len: int,
    spans: torch.Tensor | None,
    inv_freq: torch.Tensor,
    *,
    window: int | None,
    sinks: int,
    interleaved: bool,
) -> torch.Tensor:
    """The queries that score the sinks, of q's shape and dtype: what `kernels.decode.rotate` computes, and says why."""
    q_len, pairs = q.shape[2], inv_freq.shape[0]
    token = torch.arange(q_len, device=q.device)
    if spans is None:
        token = (token + kv_len - q_len)[None]
    else:
        q_start, kv_start, dropped = (spans[:, 0, 0, i, None].long() for i in (Q_START, KV_START, DROPPED))
        token = token + q_start - kv_start.clamp(min=0) + dropped
    near = token if window is None else token.clamp(max=sinks + window - 1)
    there, here = (x[..., None].float() * inv_freq for x in (near, token))
    angle = here.double() - there.double()
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
) -> torch.Tensor:
    """Attention under any mask: bool (True where attended) or additive, broadcastable to (batch, num_heads, q_len, kv_len).

    torch's scaled_dot_product_attention with K/V expanded to all query heads; plain torch with softcap or sink logits.
    """
    mask = mask[..., : k.shape[2]]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap is None and sink_logits is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q.float() @ k.float().transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].nan_to_num(0.0)
    return (weights @ v.float()).to(q.dtype)
