"""Fusion of the layers around attention, in the modules of one model:

- RMSNorm and LayerNorm in one launch, and the rotation of queries and keys in one launch;
- the product in the MLP in place: two tensors of the MLP's width at once instead of three, the peak memory of a long prompt;
- in a decode graph, linear layers and what surrounds them (linears.py, residual.py, merged.py).

The fused code computes what the model's own code computes, with the same roundings. A norm and a rotation qualify if their code
returns the same bits as a known formula (`hf/norms.py`, `hf/rotations.py`), an MLP if the bytecode of its forward() equals that
of LlamaMLP, a linear layer if its forward() is that of torch.nn.Linear. Inputs that the fused code does not support (gradients,
mixed dtypes) run the model's own code.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ... import hf
from ...kernels import HAS_TRITON
from . import delayed as merged
from . import linears, subclass
from .subclass import Forward


class Fusible(NamedTuple):
    """Modules of a model that can be fused."""

    norms: list[torch.nn.Module]
    layers: list[torch.nn.Module]  # attention layers
    mlps: list[torch.nn.Module]
    linears: list[torch.nn.Module]


def find(model: torch.nn.Module, runs: Callable[[torch.device], bool] = subclass.runs_kernels) -> Fusible:
    """The modules of `model` that can be fused, on devices that run kernels.

    An instance with a forward() of its own is not, except one of a layer that ranks share (`hf.inner_forward`).
    """
    found = Fusible([], [], [], [])
    ours = {device for device in {parameter.device for parameter in model.parameters()} if runs(device)}
    rotates: dict[object, bool] = {}  # by forward() of an attention layer
    first = next(model.parameters(), None)
    for module in model.modules() if HAS_TRITON and ours else ():
        forward: object = type(module).forward
        if "forward" in vars(module) and hf.inner_forward(module) is None:
            continue
        if hf.norm_of(module) is not None:
            kind = found.norms
        elif hf.mlp_of(forward) is not None:
            kind = found.mlps
        elif linears.is_plain(module):
            kind = found.linears
        else:
            if forward not in rotates:
                rotates[forward] = any(map(hf.is_rotation, hf.rotations_in(forward).values()))
            if not rotates[forward]:
                continue
            kind = found.layers
        weight = next(module.parameters(), first)
        if weight is not None and weight.device in ours:
            kind.append(module)
    return found


def fuse(found: Fusible) -> None:
    for module in found.norms:
        formula = hf.norm_of(module)
        if formula is not None:
            subclass.replace(module, _FusedNorm(formula))
    for modules, fused in zip(found[1:], (_with_fused_rope, linears.mlp, linears.linear), strict=True):
        for module in modules:
            subclass.replace(module, fused)


@dataclass(frozen=True)
class _FusedNorm:
    """Fuses norms of one formula; modules of one class may have several."""

    formula: hf.Norm

    def __call__(self, forward: types.FunctionType) -> Forward:
        formula, options = self.formula, self.formula.options

        @functools.wraps(forward)
        def norm(self: Any, x: torch.Tensor) -> Any:
            inputs = formula.inputs(self) if subclass.has_kernels(x) and not subclass.is_autocast(x) else None
            out = None
            if inputs is not None and all(t is None or subclass.has_kernels(t) for t in inputs[:2]):
                from ...kernels.decode import rms_norm

                delayed = merged.current()
                out = (rms_norm.run if delayed is None else delayed.norm)(x, *inputs, *options)
            return forward(self, x) if out is None else out

        return norm


class _Names(dict[str, Any]):
    """The global names of a module, looked up when they are used, except those that are overridden here."""

    def __init__(self, names: dict[str, Any], **ours: Any):
        super().__init__(ours, __builtins__=names.get("__builtins__", builtins), __name__=names.get("__name__", ""))
        self.names = names

    def __missing__(self, name: str) -> Any:
        return self.names[name]


def _with_fused_rope(forward: types.FunctionType) -> Forward:
    """The same code with other globals, in which the rotation is fused. The module is not changed."""
    inner, old_names = hf.without_renaming(forward)
    assert isinstance(inner, types.FunctionType)
    names, rotations = inner.__globals__, hf.rotations_in(inner)
    fused = {name: _fused_rotation(functions) for name, functions in rotations.items()}
    ours = types.FunctionType(inner.__code__, _Names(names, **fused), inner.__name__, inner.__defaults__)
    ours.__kwdefaults__ = inner.__kwdefaults__
    known = [(names, name, functions[0]) for name, functions in rotations.items()]
    for each in itertools.chain(*rotations.values()):
        known += [(each.__globals__, name, function) for name, function in hf.called(each).items()]

    @functools.wraps(forward)
    def layer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile looks globals up by the name of their module, and would use ours for the whole module.
        theirs = torch.compiler.is_compiling() or any(space.get(name) is not function for space, name, function in known)
        return (forward if theirs or not old_names.isdisjoint(kwargs) else ours)(self, *args, **kwargs)

    return layer


def _fused_rotation(functions: hf.Functions) -> Callable[..., Any]:
    theirs = functions[0]

    @functools.wraps(theirs)
    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = None
        if subclass.has_kernels(q) and not args and not kwargs:
            formula = hf.rotation_of(functions, q.shape[-1], cos.shape[-1], q.dtype, cos.dtype)
            delayed = merged.current()
            if formula is not None:
                from ...kernels.decode import rope

                out = rope.run(q, k, cos, sin, *formula) if delayed is None else delayed.rotate(q, k, cos, sin, formula)
        return theirs(q, k, cos, sin, *args, **kwargs) if out is None else out

    return rotate
