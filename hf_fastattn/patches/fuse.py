"""Fusion of the layers around attention, in the modules of one model:

- RMSNorm in one launch, and the rotation of queries and keys in one launch;
- the product in the MLP in place: two tensors of the MLP's width at once instead of three, the peak memory of a long prompt;
- in a decode graph of one row, linear layers by `kernels.decode.linear`, and a gated pair of them in one launch.

The fused code computes what the model's own code computes, with the same roundings. A norm or an MLP qualifies if the bytecode of
its forward() equals that of LlamaRMSNorm or LlamaMLP, an attention layer if its forward() calls Llama's apply_rotary_pos_emb(), a
linear layer if its forward() is that of torch.nn.Linear. Inputs that the fused code does not support (gradients, mixed dtypes)
run the model's own code.

The class of a fused module is replaced by a subclass. A method on the instance would refer to the instance: its weights would
stay on the GPU after the model is deleted, until Python's cycle collection runs, and all replicas of a DataParallel would run the
method of the first.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .. import hf
from .. import step as steps
from ..kernels import HAS_TRITON, INTERPRETED
from ..kernels.host import gpu

_ROPE = "apply_rotary_pos_emb"
_MARK = "_hf_fastattn_fused"

Forward = Callable[..., Any]  # of a module's class, with the module as its first argument
Fuse = Callable[[types.FunctionType], Forward]  # returns the fused version of one


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
        if "forward" in vars(module) or weight is None or not (INTERPRETED or gpu.on_gpu(weight.device)):
            continue
        if hf.is_llamas_norm(forward):
            found.norms.append(module)
        elif hf.is_llamas_mlp(forward):
            found.mlps.append(module)
        elif forward is torch.nn.Linear.forward and _is_plain(module._parameters.get("weight")):
            found.linears.append(module)
        elif _calls_llamas_rope(forward):
            found.layers.append(module)
    return found


def _is_plain(weight: torch.Tensor | None) -> bool:
    """Whether the kernel supports this weight: a stored parameter, not one that is computed for each call."""
    from ..kernels.decode import linear

    return type(weight) is torch.nn.Parameter and weight.dtype in linear.DTYPES


def _calls_llamas_rope(forward: Any) -> bool:
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return _ROPE in names and not forward.__closure__ and hf.is_llamas_rope(forward.__globals__.get(_ROPE))


def fuse(found: Fusible) -> None:
    for modules, fused in zip(found, (_fused_norm, _with_fused_rope, _mlp_in_place, _linear), strict=True):
        for module in modules:
            module.__class__ = _subclass(type(module), fused)


def is_fused(module: torch.nn.Module) -> bool:
    return hasattr(type(module), _MARK)


def restore(modules: list[torch.nn.Module]) -> None:
    """Undo fuse(), except for modules whose class others have changed since."""
    for module in modules:
        if is_fused(module):
            module.__class__ = type(module).__bases__[0]


def _subclass(cls: type[torch.nn.Module], fused: Fuse) -> type[torch.nn.Module]:
    """A subclass of `cls` with the same name and the forward() that `fused` returns."""
    return _fused_subclass(cls, fused, cls.forward)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _fused_subclass(cls: type[torch.nn.Module], fused: Fuse, forward: types.FunctionType) -> type[torch.nn.Module]:
    ours = fused(forward)

    @functools.wraps(forward)
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # the class may have another forward() since
        return (ours if cls.forward is forward else cls.forward)(self, *args, **kwargs)

    def reduce(
        self: torch.nn.Module, protocol: SupportsIndex
    ) -> tuple[Any, ...]:  # pickle finds a class by its name, which two classes share
        return _new, (cls, fused), *cls.__reduce_ex__(self, protocol)[2:]

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _MARK: True}
    return type(cls.__name__, (cls,), {**members, "__reduce_ex__": reduce, "forward": run})


def _new(cls: type[torch.nn.Module], fused: Fuse) -> torch.nn.Module:
    made = _subclass(cls, fused)
    return made.__new__(made)


def _has_kernels(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # a DTensor has no address
        return False
    return (tensor.is_cuda or INTERPRETED) and not torch.compiler.is_compiling()


def _fused_norm(forward: types.FunctionType) -> Forward:
    from ..kernels.decode import rms_norm

    @functools.wraps(forward)
    def norm(self: Any, hidden_states: torch.Tensor) -> Any:
        out = rms_norm.run(hidden_states, self.weight, self.variance_epsilon) if _has_kernels(hidden_states) else None
        return forward(self, hidden_states) if out is None else out

    return norm


def _mlp_in_place(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def mlp(self: Any, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled() or _global_forward_hooks or not _has_kernels(x) or not _returns_its_own(self.act_fn):
            return forward(self, x)
        hidden = _gated(self, x)
        if hidden is None:
            hidden, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
            hidden = hidden.mul_(up) if up.dtype == hidden.dtype else hidden * up
            del up
        return self.down_proj(hidden)

    return mlp


def _returns_its_own(act: torch.nn.Module) -> bool:
    """Whether an activation returns a new tensor that nothing else refers to."""
    return type(act) in hf.activations() and not getattr(act, "inplace", False) and not act._forward_hooks


def _linear(forward: types.FunctionType) -> Forward:
    from ..kernels.decode import linear

    @functools.wraps(forward)
    def layer(self: torch.nn.Linear, input: torch.Tensor) -> Any:
        out = None
        if not torch.compiler.is_compiling() and _runs_our_linear(input, self):
            out = linear.linear(input, self.weight, self.bias)
        return forward(self, input) if out is None else out

    return layer


def _runs_our_linear(x: torch.Tensor, *layers: torch.nn.Linear) -> bool:
    """Whether a decode graph is captured in which our kernel may read the weights of these layers; x's shape is not checked."""
    if not steps.captured() or torch.is_autocast_enabled(x.device.type) or not _has_kernels(x):
        return False
    for layer in layers:
        weight = layer._parameters.get("weight")  # None: it is computed for each call
        if weight is None or not _has_kernels(weight) or not (layer.bias is None or _has_kernels(layer.bias)):
            return False
    return True


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor | None:
    """act_fn(gate_proj(x)) * up_proj(x) of one token in one launch; None if the modules would compute something else."""
    from ..kernels.decode import linear

    gate, up, act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
    if not (is_fused(gate) and is_fused(up)) or type(act) not in hf.silus() or not _runs_our_linear(x, gate, up):
        return None
    if gate.bias is not None or up.bias is not None or _global_forward_pre_hooks:
        return None
    if any("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks for module in (gate, up, act)):
        return None
    return linear.gated_linear(x, gate.weight, up.weight)


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

    out = rope.run(q, k, cos, sin) if _has_kernels(q) and unsqueeze_dim == 1 else None
    return hf.llama_rope()(q, k, cos, sin, unsqueeze_dim) if out is None else out
