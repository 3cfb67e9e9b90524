"""Activations that Transformers computes operation by operation: the GELU with tanh, in one operation of torch.

In a decode graph this operation is part of the launch of the linear layer before it (delayed.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
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
