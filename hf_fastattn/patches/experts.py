"""The experts of one model by `kernels.decode.experts`, for at most 64 tokens: a registered implementation of Transformers.

Registered names end with the implementation that a model had, which runs whatever the kernel does not: more tokens, gradients,
autocast, torch.compile. A module qualifies if its class asks the registry and `hf.expert_layout` recognises its activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import hf
from .. import step as steps
from ..kernels import HAS_TRITON, mixture
from . import subclass

PREFIX = "hf_fastattn:"


def find(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with experts that the kernel supports."""
    return [module for module in model.modules() if HAS_TRITON and hf.asks_for_experts(module) and why_not(module) is None]


def why_not(module: torch.nn.Module) -> str | None:
    """The reason why a module with experts keeps its own implementation, or None."""
    layout = hf.expert_layout(module)
    if isinstance(layout, str):
        return layout
    name = hf.experts_implementation(module)
    if name.removeprefix(PREFIX) not in hf.STOCK_EXPERTS:
        return f"experts_implementation={name!r} was requested"
    weights = hf.expert_weights(module)
    if weights is None:
        return f"{type(module).__name__} computes its weights at each call"
    if weights.gate_up.dtype not in mixture.DTYPES:
        return f"the weights are {weights.gate_up.dtype}"
    if not subclass.runs_kernels(weights.gate_up.device):
        return f"the weights are on {weights.gate_up.device}"
    return None


def use(modules: list[torch.nn.Module]) -> str:
    """Let modules run the kernel; returns the names of the implementations that they had."""
    had = dict.fromkeys(hf.experts_implementation(module) for module in modules)
    for module in modules:
        name = hf.experts_implementation(module)
        hf.set_experts_implementation(module, PREFIX + name.removeprefix(PREFIX))
    return ", ".join(had)


def restore(model: torch.nn.Module) -> None:
    """Undo use(), except where another implementation has been set since."""
    for module in model.modules():
        if hf.asks_for_experts(module):
            name = hf.experts_implementation(module)
            hf.set_experts_implementation(module, name.removeprefix(PREFIX))


def _implementation(stock: str) -> Callable[..., torch.Tensor]:
    """The function that is registered under PREFIX + stock."""

    def experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = None if kwargs or len(args) != 3 else _by_kernel(module, *args)
        if out is not None:
            return out
        # As Transformers does in generate() with "grouped_mm"; a graph can capture neither the loop nor every grouped_mm.
        name = "batched_mm" if steps.captured() else stock
        return hf.stock_experts(module, name)(module, *args, **kwargs)

    return experts


def _by_kernel(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | None:
    if torch.compiler.is_compiling() or hidden_states.dim() != 2 or hidden_states.shape[0] > mixture.MAX_TOKENS:
        return None
    weights, layout, act = hf.expert_weights(module), hf.expert_layout(module), getattr(module, "act_fn", None)
    if weights is None or isinstance(layout, str) or torch.is_autocast_enabled(hidden_states.device.type):
        return None
    if not all(subclass.has_kernels(tensor) for tensor in (hidden_states, *weights) if tensor is not None):
        return None
    if act is not None and ("forward" in vars(act) or act._forward_hooks or act._forward_pre_hooks):
        return None
    from ..kernels.decode import experts as kernel

    return kernel.run(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous(), weights, layout)


for _stock in hf.STOCK_EXPERTS:
    hf.register_experts(PREFIX + _stock, _implementation(_stock))
