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

Modules = list[torch.nn.Module]
_NONE = object()


def fuse(model: torch.nn.Module, runs: Callable[[torch.device], bool] = subclass.runs_kernels) -> tuple[Modules, Modules]:
    """Fuse the activations of a model. Returns the GELUs, on devices that run kernels, and the MLPs with sparse gates."""
    weight = next(model.parameters(), None)
    own = [module for module in model.modules() if "forward" not in vars(module)]
    gelus = [module for module in own if hf.is_gelu_in_parts(module)] if weight is not None and runs(weight.device) else []
    sparse = [module for module in own if hf.has_sparse_gates(module)]
    for module in gelus:
        subclass.replace(module, gelu)
    for module in sparse:
        subclass.replace(module, _SparseGates(getattr(type(module), hf.SPARSE_GATES)))
    return gelus, sparse


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
