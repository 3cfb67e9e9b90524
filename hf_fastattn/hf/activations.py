"""Recognises activations."""

from __future__ import annotations

import functools

import torch

from .llama import silus


def activation_name(act: torch.nn.Module) -> str | None:
    """ "silu", "gelu" or "gelu_tanh" if that is what this module computes, else None."""
    from transformers.activations import GELUActivation, GELUTanh

    if type(act) in silus():
        return "silu"
    if type(act) is torch.nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(act.approximate)
    function = getattr(act, "act", None)
    if type(act) is GELUActivation and function is torch.nn.functional.gelu:
        return "gelu"
    if type(act) is GELUTanh and isinstance(function, functools.partial):
        tanh = function.func is torch.nn.functional.gelu and function.keywords == {"approximate": "tanh"} and not function.args
        return "gelu_tanh" if tanh else None
    return None
