"""Attention in fp64, implemented from the written contract: no code is shared with the package.

The visible keys of a query are computed element by element from positions, and independently from the integers of spans.
"""

import numpy as np
import torch


def visible(batch, q_len, kv_len, *, q_offset, kv_offset=0, causal=True, window=None, attention_mask=None, sinks=0) -> np.ndarray:
    """bool (batch, q_len, kv_len): whether query i, at position q_offset + i, sees slot j, which has position kv_offset + j.

    attention_mask: bool (batch, positions seen), True where a position is live; positions past its end are not.
    """
    query = q_offset + np.arange(q_len)[None, :, None]
    key = kv_offset + np.arange(kv_len)[None, None, :]
    seen = np.ones((batch, q_len, kv_len), dtype=bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (abs(query - key) < window) | sink_slots(batch, kv_len, kv_offset, attention_mask, sinks)[:, None]
    if attention_mask is not None:
        for b in range(batch):
            known = [key < attention_mask.shape[1] and attention_mask[b, key] for key in key.ravel().tolist()]
            seen[b] &= np.array(known, dtype=bool)
    return seen


def sink_slots(batch, kv_len, kv_offset, attention_mask, sinks) -> np.ndarray:
    """bool (batch, kv_len): whether slot j is one of the `sinks` slots from the first live slot of the row on."""
    found = np.zeros((batch, kv_len), dtype=bool)
    for b in range(batch):
        live = range(kv_len)
        if attention_mask is not None:
            live = [j for j in live if kv_offset + j < attention_mask.shape[1] and attention_mask[b, kv_offset + j]]
        if live:
            found[b, live[0] : live[0] + sinks] = True
    return found


def visible_from_spans(spans: torch.Tensor, q_len, kv_len, *, causal=False, window=None, sinks=0) -> np.ndarray:
    """The same from spans, by their docstring: a query sees a key if every condition allows it."""
    rows = spans.cpu().numpy().reshape(spans.shape[0], -1).astype(np.int64)
    p, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = np.zeros((len(rows), q_len, kv_len), dtype=bool)
    for b, (q_start, kv_start, kv_stop, row_window, flags, _, *words) in enumerate(rows):
        distance = q_start + p - j
        near = abs(distance) < (row_window if window is None else min(row_window, window))
        sees = (j >= kv_start) & (j < kv_stop) & (near | (j < max(kv_start, 0) + sinks))
        if causal or flags & 1:
            sees &= distance >= 0
        if flags & 2:
            sees &= np.array([bool(words[slot // 32] >> (slot % 32) & 1) for slot in range(kv_len)])
        seen[b] = sees
    return seen


def rerotated(q, tokens, inv_freq, *, window, sinks, interleaved) -> torch.Tensor:
    """`q` (batch, heads, q_len, head_dim) at the positions `tokens` (batch or 1, q_len), re-rotated to score the sinks, in fp64.

    The new position is at most sinks + window - 1. Angles are products in fp32, as in models.
    """
    near = tokens if window is None else np.minimum(tokens, sinks + window - 1)
    frequencies = inv_freq.cpu().numpy()
    here, there = (x.astype(np.float32)[..., None] * frequencies for x in (tokens, near))
    angle = torch.as_tensor(here.astype(np.float64) - there.astype(np.float64), device=q.device)[:, None]
    out, pairs = q.double().clone(), len(frequencies)
    for pair in range(pairs):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
        cos, sin = angle[..., pair].cos(), angle[..., pair].sin()
        x, y = q[..., i].double(), q[..., j].double()
        out[..., i], out[..., j] = x * cos + y * sin, y * cos - x * sin
    return out


def attention(q, k, v, seen: np.ndarray, *, scale=None, softcap=None, sink_logits=None, q_sinks=None, is_sink=None):
    """(out, lse) in fp64 on q's device; `seen` as above. A query that sees no key gets 0 and, without a sink logit, lse -inf.

    Slots in is_sink, bool (batch, kv_len), are scored with q_sinks instead of q.
    """
    group = q.shape[1] // k.shape[1]
    seen = torch.as_tensor(seen, device=q.device)
    # Slots that no query sees may contain anything.
    unseen = ~seen.any(1)[:, None, :, None]
    k64 = k.double().masked_fill(unseen, 0.0).repeat_interleave(group, 1)
    v64 = v.double().masked_fill(unseen, 0.0).repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k64)
    if q_sinks is not None:
        turned = torch.einsum("bhqd,bhkd->bhqk", q_sinks.double(), k64)
        scores = torch.where(torch.as_tensor(is_sink, device=q.device)[:, None, None], turned, scores)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores).masked_fill(~seen[:, None], 0.0)  # test scores are far from overflowing fp64
    total = weights.sum(-1)
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.double())[None, :, None]
    out = torch.einsum("bhqk,bhkd->bhqd", weights, v64) / torch.where(total == 0, 1.0, total)[..., None]
    return out, torch.log(total)
