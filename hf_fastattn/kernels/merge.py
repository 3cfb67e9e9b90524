"""Merge: attention over several parts of the keys, combined into attention over all of them.

The parts are splits of a long context (Flash-Decoding), shares of several GPUs (Ring and Tree Attention), or a prefix that many
rows share, and the rest. Learned sink logits belong to one part alone.

Sources: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023); Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context" (2023), section 3; Shyam et al., "Tree Attention" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, (out, lse), of attention over parts of them that have no key in common::

        lse = log(sum_i exp(lse_i))      out = sum_i exp(lse_i - lse) out_i

    Up to rounding this is associative and commutative: parts may be merged in any order and any grouping, and what merge()
    returns is again a part. Its identity is out 0 with lse -inf, attention over no keys: a part that is merged with it does not
    change.

    outs: one tensor (batch, num_heads, q_len, head_dim) for each part, all of one dtype, or one stacked tensor. lses: one tensor
    (batch, num_heads, q_len) for each part, float32, the natural logarithm of the softmax denominator, as kernels return it with
    return_lse=True, or one stacked tensor. Where a query sees no key of a part, that part has out 0 and lse -inf and does not
    contribute. A query that sees no key at all gets out 0 and lse -inf. Sums are float32.

    Returns out (batch, num_heads, q_len, head_dim) in the dtype of outs and lse (batch, num_heads, q_len) float32. Gradients flow
    to outs and lses. Raises ValueError or TypeError, with the reason, for parts that do not match.

    Sources: Dao et al., "Flash-Decoding" (2023); Shyam et al., "Tree Attention" (2024), section 4.
    """
    _check(outs, lses)
    denominators = lses if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    top = denominators.detach().amax(0)
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf - (-inf) would be NaN
    weights = torch.exp(denominators - top)
    total = weights.sum(0)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, weight in zip(outs, weights / total, strict=True):
        out = out + weight[..., None] * part.float()
    lse = (top + torch.log(total)).masked_fill(nothing, float("-inf"))
    return out.to(outs[0].dtype), lse


def _check(outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor) -> None:
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"merge() takes one lse for each out, and at least one of each; got {len(outs)} outs and {len(lses)} lses."
        )
    first = outs[0]
    for out, lse in zip(outs, lses, strict=True):
        if out.dim() != 4 or out.shape != first.shape or lse.shape != out.shape[:3]:
            raise ValueError(
                "merge() takes outs of one shape (batch, num_heads, q_len, head_dim) with lses (batch, num_heads, q_len); got an "
                f"out {tuple(out.shape)} with an lse {tuple(lse.shape)}, and the first out is {tuple(first.shape)}."
            )
        if not out.is_floating_point() or out.dtype != first.dtype or lse.dtype != torch.float32:
            raise TypeError(
                f"merge() takes outs of one floating-point dtype and lses in float32; got an out in {out.dtype} with an lse in "
                f"{lse.dtype}, and the first out is in {first.dtype}. Cast them."
            )
        if out.device != first.device or lse.device != first.device:
            raise ValueError(
                f"merge() takes tensors of one device; got an out on {out.device} with an lse on {lse.device}, and the first out "
                f"is on {first.device}."
            )
