"""Fusion of the layers around attention, in the modules of one model:

- RMSNorm in one launch, and the rotation of queries and keys in one launch;
- the product in the MLP in place: two tensors of the MLP's width at once instead of three, the peak memory of a long prompt;
- in a decode graph of one row, linear layers by `kernels.decode.linear`, and a gated pair of them in one launch.

The fused code computes what the model's own code computes, with the same roundings. A norm or an MLP qualifies if the bytecode of
its forward() equals that of LlamaRMSNorm or LlamaMLP, an attention layer if its forward() calls Llama's apply_rotary_pos_emb(), a
linear layer if its forward() is that of torch.nn.Linear. Inputs that the fused code does not support (gradients, mixed dtypes)
run the model's own code.
"""

from __future__ import annotations

import builtins
import functools
import types
from typing import Any, NamedTuple

import torch

from .. import hf
from ..kernels import HAS_TRITON
from . import linears, subclass
from .subclass import Forward

_ROPE = "apply_rotary_pos_emb"


class Fusible(NamedTuple):
    """Modules of a model that can be fused."""

    norms: list[torch.nn.Module]
    layers: list[torch.nn.Module]  # attention layers
    mlps: list[torch.nn.Module]
    linears: list[torch.nn.Module]


def find(model: torch.nn.Module) -> Fusible:
    """The modules of `model` on GPUs that can be fused. An instance with a forward() of its own is not."""
    found = Fusible([], [], [], [])
    for module in model.modules() if HAS_TRITON else ():
        forward = type(module).forward
        weight = next(module.parameters(), None)
        if "forward" in vars(module) or weight is None or not subclass.runs_kernels(weight.device):
            continue
        if hf.is_llamas_norm(forward):
            found.norms.append(module)
        elif hf.is_llamas_mlp(forward):
            found.mlps.append(module)
        elif linears.is_plain(module):
            found.linears.append(module)
        elif _calls_llamas_rope(forward):
            found.layers.append(module)
    return found


def _calls_llamas_rope(forward: Any) -> bool:
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return _ROPE in names and not forward.__closure__ and hf.is_llamas_rope(forward.__globals__.get(_ROPE))


def fuse(found: Fusible) -> None:
    for modules, fused in zip(found, (_fused_norm, _with_fused_rope, linears.mlp, linears.linear), strict=True):
        for module in modules:
            subclass.replace(module, fused)


def _fused_norm(forward: types.FunctionType) -> Forward:
    from ..kernels.decode import rms_norm

    @functools.wraps(forward)
    def norm(self: Any, hidden_states: torch.Tensor) -> Any:
        out = rms_norm.run(hidden_states, self.weight, self.variance_epsilon) if subclass.has_kernels(hidden_states) else None
        return forward(self, hidden_states) if out is None else out

    return norm


class _Names(dict[str, Any]):
    """The global names of a module, looked up when they are used, except those that are overridden here."""

    def __init__(self, names: dict[str, Any], **ours: Any):
        super().__init__(ours, __builtins__=names.get("__builtins__", builtins))
        self.names = names

    def __missing__(self, name: str) -> Any:
        return self.names[name]


def _with_fused_rope(forward: types.FunctionType) -> Forward:
    """The same code with other globals, in which apply_rotary_pos_emb is fused. The module is not changed."""
    names = forward.__globals__
    llamas = _rotations(names)
    ours = types.FunctionType(forward.__code__, _Names(names, **{_ROPE: _rope}), forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__

    @functools.wraps(forward)
    def layer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile looks globals up by the name of their module, and would use ours for the whole module.
        theirs = torch.compiler.is_compiling() or _rotations(names) != llamas
        return (forward if theirs else ours)(self, *args, **kwargs)

    return layer


def _rotations(names: dict[str, Any]) -> tuple[object, object]:
    """The functions that currently rotate queries and keys in a module with these globals."""
    rotate = names.get(_ROPE)
    return rotate, getattr(rotate, "__globals__", {}).get("rotate_half")


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    from ..kernels.decode import rope

    out = rope.run(q, k, cos, sin) if subclass.has_kernels(q) and unsqueeze_dim == 1 else None
    return hf.llama_rope()(q, k, cos, sin, unsqueeze_dim) if out is None else out
