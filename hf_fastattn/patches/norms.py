"""RMSNorm in one launch: on the norms of one model, in place of the forward() that their class has.

Only classes whose forward() is Llama's, instruction for instruction, are touched: other norms (Gemma's adds 1 to its weight)
compute something else.
"""

from __future__ import annotations

import types

import torch

from .. import compat
from ..kernels import HAS_TRITON, INTERPRETED


def find(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms of `model` that rms_norm can stand in for: of Llama's forward(), on a GPU, and with no forward() of their own."""
    if not HAS_TRITON:
        return []
    return [
        module
        for module in model.modules()
        if compat.is_llama_norm(module) and "forward" not in vars(module) and (module.weight.is_cuda or INTERPRETED)
    ]


def fuse(module: torch.nn.Module) -> None:
    vars(module)["forward"] = types.MethodType(_forward, module)


def restore(module: torch.nn.Module) -> None:
    """Undo fuse(), unless someone has replaced the forward() since; then it is theirs to take back."""
    if getattr(vars(module).get("forward"), "__func__", None) is _forward:
        del vars(module)["forward"]


def _forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
    from ..kernels import rms_norm

    if torch.compiler.is_compiling() or rms_norm.why_not(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return rms_norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)
