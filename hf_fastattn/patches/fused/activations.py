"""Activations of Transformers in another form.

- The GELU with tanh that is computed operation by operation: one operation of torch. In a decode graph it is part of the launch
  of the linear layer before it (delayed.py).
- Sparse gates, whose quantile each forward copies to the device and checks on the host, which no graph can repeat: a number.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import hf
from . import subclass
from .subclass import Forward

_NONE = object()


def fuse(model: torch.nn.Module, runs: Callable[[torch.device], bool] = subclass.runs_kernels) -> list[torch.nn.Module]:
    """Fuse the activations of a model that is on a device that runs kernels; returns them."""
    weight = next(model.parameters(), None)
    if weight is None or not runs(weight.device):
        return []
    found = [module for module in model.modules() if "forward" not in vars(module) and hf.is_gelu_in_parts(module)]
    for module in found:
        subclass.replace(module, gelu)
    return found


def fuse_sparse_gates(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Replace the quantile in MLPs with sparse gates; returns them."""
    found = [module for module in model.modules() if "forward" not in vars(module) and hf.has_sparse_gates(module)]
    for module in found:
        subclass.replace(module, _SparseGates(getattr(type(module), hf.SPARSE_GATES)))
    return found


@dataclass(frozen=True)
class _SparseGates:
    """Fuses an MLP whose method `own` computes its sparse gates."""

    own: types.FunctionType

    def __call__(self, forward: types.FunctionType) -> Forward:
        @functools.wraps(forward)
        def mlp(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(getattr(module, hf.SPARSE_GATES), "__func__", None) is not self.own or torch.compiler.is_compiling():
                return forward(module, *args, **kwargs)
            copied = object.__new__(type(module))  # as other threads may run the module
            vars(copied).update(vars(module))
            vars(copied)[hf.SPARSE_GATES] = functools.partial(hf.above_quantile, p=float(module.activation_sparsity))
            return forward(copied, *args, **kwargs)

        return mlp


def gelu(forward: types.FunctionType) -> Forward:
    """The forward() of such a GELU."""
    names = forward.__globals__
    known = {name: names.get(name, _NONE) for name in hf.GELU_PARTS}

    @functools.wraps(forward)
    def act(self: Any, x: torch.Tensor) -> Any:
        # A function that someone has replaced in the model's file is used. Gradients are the model's own.
        same = hf.has_own("gelu") and all(names.get(name, _NONE) is function for name, function in known.items())
        if same and not torch.is_grad_enabled() and subclass.has_kernels(x) and not subclass.is_autocast(x):
            return torch.nn.functional.gelu(x, approximate="tanh")
        return forward(self, x)

    return act
