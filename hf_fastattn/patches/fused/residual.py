"""Residual connections of decoder layers in a decode graph: the layer before a sum also computes the sum, in its launch.

A decoder layer whose code is that of LlamaDecoderLayer adds the results of attention and of the MLP to its hidden states. While
one of them runs, its last linear layer is given the hidden states, and computes its result and the sum. If attention or the MLP
returns this result unchanged, the sum is used. Otherwise the decoder layer adds them itself.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ... import hf
from ...attention import step as steps
from . import linears, subclass
from .subclass import Forward

# The arguments of LlamaDecoderLayer.forward() that it passes to attention.
_DEFAULTS = {
    "attention_mask": None,
    "position_ids": None,
    hf.CACHE: None,
    "use_cache": False,
    "position_embeddings": None,
}


def join(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let the decoder layers that have Llama's code and fused linear layers use their sums; returns these layers."""
    joined = [module for module in model.modules() if "forward" not in vars(module) and _takes(module)]
    for module in joined:
        subclass.replace(module, decoder_layer)
    return joined


def _takes(module: torch.nn.Module) -> bool:
    return hf.is_llamas_layer(type(module).forward) and any(map(subclass.is_fused, _last(module)))


def _last(module: Any) -> tuple[Any, Any]:
    """The last linear layers of attention and of the MLP; None for one that has another name."""
    return getattr(module.self_attn, "o_proj", None), getattr(module.mlp, "down_proj", None)


def decoder_layer(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def layer(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or torch.compiler.is_compiling() or not steps.captured():
            return forward(self, hidden_states, *args, **kwargs)
        o_proj, down_proj = _last(self)
        normed = self.input_layernorm(hidden_states)
        with linears.adding(o_proj, hidden_states) as added:
            out, _ = self.self_attn(hidden_states=normed, **{**_DEFAULTS, **kwargs})
        hidden_states = added.total(out)
        normed = self.post_attention_layernorm(hidden_states)
        with linears.adding(down_proj, hidden_states) as added:
            out = self.mlp(normed)
        return added.total(out)

    return layer
