"""Plain K and V with a bias of each key and head, which is added to the scores of all queries: positions of ALiBi.

    scores[b, h, i, j] = scale q[b, h, i] k[b, h, j] + bias[b, h, j]

The bias is read, not computed from slopes: so it has the values and roundings of the model, and counts tokens as the model does
if there are holes. It is 2 or 4 bytes for each key, where K and V have some hundred. The softmax of a row does not change if all
of its biases do by the same number, so the bias need not depend on the query.

`lean`, `split_kv`, the portable prefill and backward kernels and the references take the `KV` of `biased`. It has no gradient.
Source: Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation" (2022).
"""

from __future__ import annotations

from typing import Any

import torch

from .host.gpu import HAS_TRITON
from .spec import KV, Form, is_plain

__all__ = ["biased"]


def biased(kv: KV, bias: torch.Tensor) -> KV:
    """Plain K and V with a bias.

    bias: (batch, num_heads, kv_len), or (1, num_heads, kv_len) for all rows, contiguous, in fp16, bf16 or fp32, on the same
    device. As many KV heads as query heads. Raises ValueError or TypeError, here or where attention is called.
    """
    if not is_plain(kv.form):
        raise ValueError(f"A bias of keys (ALiBi) needs plain K and V; got the form {kv.form.name!r}. Use another cache.")
    return KV(kv.k, kv.v, OF_ALL_ROWS if bias.shape[0] == 1 else BIASED, scales=bias)


def _check(q: torch.Tensor, kv: KV) -> None:
    bias, wanted = kv.scales, (q.shape[0] if kv.form is BIASED else 1, q.shape[1], kv.k.shape[2])
    if q.shape[1] != kv.k.shape[1]:
        raise ValueError(f"A bias of keys needs one KV head for each query head; got {kv.k.shape[1]} and {q.shape[1]}.")
    if bias is None or tuple(bias.shape) != wanted or not bias.is_contiguous():
        shape = None if bias is None else (tuple(bias.shape), bias.stride())
        raise ValueError(f"The bias must be (batch, num_heads, kv_len), here {wanted}, and contiguous; got {shape}.")
    if not bias.is_floating_point() or not q.dtype == kv.k.dtype == kv.v.dtype:
        raise TypeError(
            f"q, k and v must share one dtype, and the bias must be floating point; got {q.dtype}, {kv.k.dtype}, {kv.v.dtype} "
            f"and {bias.dtype}. Cast them."
        )


def _refuse(kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
    raise ValueError(
        'This kernel takes plain K and V, and would ignore the bias of these (ALiBi). Use "lean", "split_kv" or "fa2".'
    )


def _bias(kv: KV) -> torch.Tensor | None:
    return None if kv.scales is None else kv.scales.expand(kv.k.shape[0], -1, -1)


weights: Any = None
weights_of_all_rows: Any = None
if HAS_TRITON:
    import triton
    import triton.language as tl

    from .device.online import LOG2_E

    @triton.jit
    def weights(strides, slots, indices, extra, LOG2_E: tl.constexpr = LOG2_E):
        """The weights of a form (`device.tile`): a shift of the scores alone."""
        row, head, heads, kv_len = indices
        ptrs = extra[0] + (row * heads + head) * kv_len + slots
        shift = tl.load(ptrs, mask=(slots >= 0) & (slots < kv_len), other=0.0).to(tl.float32) * LOG2_E
        one = tl.full(slots.shape, 1.0, tl.float32)
        return one, shift, one

    @triton.jit
    def weights_of_all_rows(strides, slots, indices, extra):
        return weights(strides, slots, (indices[0] * 0, indices[1], indices[2], indices[3]), extra)


BIASED = Form("bias", unpack=_refuse, check=_check, weights=weights, bias=_bias)
OF_ALL_ROWS = BIASED._replace(name="bias of all rows", weights=weights_of_all_rows)
