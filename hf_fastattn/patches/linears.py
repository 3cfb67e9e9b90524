"""Linear layers and MLPs of one model:

- the product in the MLP in place: two tensors of the MLP's width at once instead of three, the peak memory of a long prompt;
- in a decode graph of one row, linear layers by `kernels.decode.linear`, and a gated pair of them in one launch.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .. import hf
from .. import step as steps
from . import subclass
from .subclass import Forward


def is_plain(module: torch.nn.Module) -> bool:
    """Whether the kernel supports this linear layer: its weight is a stored parameter, not computed for each call."""
    from ..kernels.decode import linear as kernel

    weight = module._parameters.get("weight")
    return (
        type(module).forward is torch.nn.Linear.forward and type(weight) is torch.nn.Parameter and weight.dtype in kernel.DTYPES
    )


def mlp(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def run(self: Any, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled() or _global_forward_hooks or not subclass.has_kernels(x) or not _returns_its_own(self.act_fn):
            return forward(self, x)
        hidden = _gated(self, x)
        if hidden is None:
            hidden, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
            hidden = hidden.mul_(up) if up.dtype == hidden.dtype else hidden * up
            del up
        return self.down_proj(hidden)

    return run


def _returns_its_own(act: torch.nn.Module) -> bool:
    """Whether an activation returns a new tensor that nothing else refers to."""
    return type(act) in hf.activations() and not getattr(act, "inplace", False) and not act._forward_hooks


def linear(forward: types.FunctionType) -> Forward:
    from ..kernels.decode import linear as kernel

    @functools.wraps(forward)
    def layer(self: torch.nn.Linear, input: torch.Tensor) -> Any:
        out = None
        if not torch.compiler.is_compiling() and _runs_our_linear(input, self):
            out = kernel.linear(input, self.weight, self.bias)
        return forward(self, input) if out is None else out

    return layer


def _runs_our_linear(x: torch.Tensor, *layers: torch.nn.Linear) -> bool:
    """Whether a decode graph is captured in which our kernel may read the weights of these layers; x's shape is not checked."""
    if not steps.captured() or torch.is_autocast_enabled(x.device.type) or not subclass.has_kernels(x):
        return False
    for layer in layers:
        weight = layer._parameters.get("weight")  # None: it is computed for each call
        if weight is None or not subclass.has_kernels(weight) or not (layer.bias is None or subclass.has_kernels(layer.bias)):
            return False
    return True


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor | None:
    """act_fn(gate_proj(x)) * up_proj(x) of one token in one launch; None if the modules would compute something else."""
    from ..kernels.decode import linear as kernel

    gate, up, act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
    if (
        not (subclass.is_fused(gate) and subclass.is_fused(up))
        or type(act) not in hf.silus()
        or not _runs_our_linear(x, gate, up)
    ):
        return None
    if gate.bias is not None or up.bias is not None or _global_forward_pre_hooks:
        return None
    if any("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks for module in (gate, up, act)):
        return None
    return kernel.gated_linear(x, gate.weight, up.weight)
