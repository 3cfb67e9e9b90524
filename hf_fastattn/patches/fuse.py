"""The small launches around attention, fused: RMSNorm in one, the rotation of queries and keys in one, on one model's modules.

Both compute what the model's own code computes, with the same roundings, and stand in for nothing else: a norm qualifies if its
class has LlamaRMSNorm's forward(), instruction for instruction, and an attention layer if the apply_rotary_pos_emb() that its
forward() calls is Llama's. What the kernels cannot take (gradients, mixed dtypes) runs as the model wrote it.
"""

from __future__ import annotations

import types

import torch

from .. import compat
from ..kernels import HAS_TRITON, INTERPRETED

_ROPE = "apply_rotary_pos_emb"


def find(model: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """(norms, attention layers) of `model` on GPUs that can be fused; those with a forward() of their own are left alone."""
    norms, layers = [], []
    for module in model.modules() if HAS_TRITON else ():
        forward = type(module).forward
        weight = next(module.parameters(), None)
        if "forward" in vars(module) or weight is None or not _has_kernels(weight):
            continue
        if compat.is_same_code(forward, compat.llama_norm()):
            norms.append(module)
        elif _ROPE in getattr(getattr(forward, "__code__", None), "co_names", ()):
            called = forward.__globals__.get(_ROPE)
            if compat.is_same_code(called, compat.llama_rope()) and not forward.__closure__:
                layers.append(module)
    return norms, layers


def fuse(norms: list[torch.nn.Module], layers: list[torch.nn.Module]) -> None:
    for module in norms:
        vars(module)["forward"] = types.MethodType(_norm, module)
    for module in layers:
        vars(module)["forward"] = types.MethodType(_with_fused_rope(type(module).forward), module)


def is_fused(forward) -> bool:
    """Whether fuse() put this forward() on its module."""
    function = getattr(forward, "__func__", None)
    return function is _norm or getattr(function, "__globals__", {}).get(_ROPE) is _rope


def restore(modules: list[torch.nn.Module]) -> None:
    """Undo fuse(), but for a forward() that someone has replaced since: it is theirs to take back."""
    for module in modules:
        if is_fused(vars(module).get("forward")):
            del vars(module)["forward"]


def _has_kernels(tensor: torch.Tensor) -> bool:
    return (tensor.is_cuda or INTERPRETED) and not torch.compiler.is_compiling()


def _norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    from ..kernels import rms_norm

    if not _has_kernels(hidden_states) or rms_norm.why_not(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return rms_norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _with_fused_rope(forward: types.FunctionType) -> types.FunctionType:
    """The same code over a copy of its module's names, in which apply_rotary_pos_emb is ours: the module stays as it is."""
    names = {**forward.__globals__, _ROPE: _rope}
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rope(q, k, cos, sin, unsqueeze_dim=1):
    from ..kernels import rope

    if not _has_kernels(q) or unsqueeze_dim != 1 or rope.why_not(q, k, cos, sin):
        return compat.llama_rope()(q, k, cos, sin, unsqueeze_dim)
    return rope.rope(q, k, cos, sin)
