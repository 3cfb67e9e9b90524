"""The experts of a mixture: layout of their weights, activation, and their reference in plain torch, which needs no Triton.

    h = act(x G_e^T) * (x U_e^T)        y = sum over the chosen experts e of  w_e * (h D_e^T)

Sources: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017), equation 1;
Shazeer, "GLU Variants Improve Transformer" (2020); for roundings and layouts `integrations/moe.py` and GPT-OSS of Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import checks

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_TOKENS = 64
MAX_CHOICES = 32  # experts per token


@dataclass(frozen=True)
class Layout:
    """The layout of experts' weights, and their activation.

    transposed: gate_up is (experts, hidden, 2 inner) and down (experts, inner, hidden); otherwise (experts, 2 inner, hidden) and
    (experts, hidden, inner). interleaved: gate and up alternate; otherwise all of gate comes first. act: "silu" or "gelu_tanh"
    for act(gate) * up, "sigmoid" for (up + 1) * (gate * sigmoid(alpha * gate)), as in GPT-OSS. limit: before that, gate is
    clamped to at most limit, and up to -limit to limit; None: neither is.
    """

    transposed: bool = False
    interleaved: bool = False
    act: str = "silu"
    alpha: float = 1.0
    limit: float | None = None


PLAIN = Layout()


class Weights(NamedTuple):
    """Weights of all experts in a `Layout`. gate_up_bias: (experts, 2 inner); down_bias: (experts, hidden); both or neither."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def gated(gate_up: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(..., 2 inner) -> (..., inner): the activation of gate times up, each operation in gate_up's dtype."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if layout.interleaved else gate_up.chunk(2, dim=-1)
    if layout.limit is not None:
        gate, up = gate.clamp(max=layout.limit), up.clamp(min=-layout.limit, max=layout.limit)
    if layout.act == "sigmoid":
        return (up + 1) * (gate * torch.sigmoid(gate * layout.alpha))
    if layout.act == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def reference(
    x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: Weights, layout: Layout = PLAIN
) -> torch.Tensor:
    """The specification of `decode.experts.run`, as a loop over tokens and their choices."""
    gate_up, down = weights.gate_up, weights.down
    if layout.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    rows = []
    for token, chosen, of in zip(x, experts.tolist(), scores, strict=True):
        total = torch.zeros_like(token, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert, score in zip(chosen, of, strict=True):
            if not 0 <= expert < len(gate_up):
                continue
            h = gate_up[expert] @ token
            if weights.gate_up_bias is not None:
                h = h + weights.gate_up_bias[expert]
            y = down[expert] @ gated(h, layout)
            if weights.down_bias is not None:
                y = y + weights.down_bias[expert]
            total += y * score
        rows.append(total.to(x.dtype))
    return torch.stack(rows)


def why_not(x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: Weights, layout: Layout = PLAIN) -> str | None:
    """The reason why the kernel does not support these inputs, or None."""
    return _why_not_shape(x, experts, scores, weights, layout) or _why_not_tensors(x, experts, scores, weights)


def _why_not_shape(x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: Weights, layout: Layout) -> str | None:
    gate_up, down, gate_up_bias, down_bias = weights
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        return f"x is {tuple(x.shape)}; it must be (tokens, hidden) with 1 to {MAX_TOKENS} tokens."
    if experts.dim() != 2 or experts.shape != scores.shape or experts.shape[0] != x.shape[0]:
        return f"experts are {tuple(experts.shape)} and scores {tuple(scores.shape)}; both must be (tokens, choices)."
    if not 1 <= experts.shape[1] <= MAX_CHOICES:
        return f"Every token has {experts.shape[1]} experts; 1 to {MAX_CHOICES} are supported."
    if gate_up.dim() != 3 or down.dim() != 3:
        return f"gate_up is {tuple(gate_up.shape)} and down {tuple(down.shape)}; both must have three dimensions."
    count, hidden, inner = gate_up.shape[0], x.shape[1], down.shape[1 if layout.transposed else 2]
    wanted = [(count, 2 * inner, hidden), (count, hidden, inner)]
    if layout.transposed:
        wanted = [(n, columns, rows) for n, rows, columns in wanted]
    if [tuple(gate_up.shape), tuple(down.shape)] != wanted or 0 in (count, hidden, inner):
        return f"gate_up is {tuple(gate_up.shape)} and down {tuple(down.shape)}; for this x they must be {wanted}."
    if gate_up[0].numel() >= 2**31:
        return f"gate_up has {gate_up[0].numel()} elements for each expert; addresses in an expert have 32 bits."
    if (gate_up_bias is None) != (down_bias is None):
        return "Either both projections need a bias or neither."
    if gate_up_bias is not None and gate_up_bias.shape != (count, 2 * inner):
        return f"The bias of gate_up is {tuple(gate_up_bias.shape)}; it must be {(count, 2 * inner)}."
    if down_bias is not None and down_bias.shape != (count, hidden):
        return f"The bias of down is {tuple(down_bias.shape)}; it must be {(count, hidden)}."
    return None


def _why_not_tensors(x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: Weights) -> str | None:
    if experts.dtype not in (torch.int32, torch.int64):
        return f"experts are {experts.dtype}; they must be int32 or int64."
    if scores.dtype not in (x.dtype, torch.float32):
        return f"scores are {scores.dtype}; they must be {x.dtype} or float32."
    for tensor in (x, *weights):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.dtype not in DTYPES):
            return f"x and all weights must share one dtype of 16 or 32 bits; got {x.dtype} and {tensor.dtype}."
    return checks.why_not_inference(x, experts, scores, *weights)
