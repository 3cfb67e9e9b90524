"""Recognises Llama's code in other models, by comparing bytecode."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def is_llamas_norm(forward: object) -> bool:
    """Whether this is forward() of Llama's RMSNorm, which many models copy into a class of their own."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _is_same_code(forward, LlamaRMSNorm.forward)


def is_llamas_mlp(forward: object) -> bool:
    """Whether this is forward() of Llama's MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    return _is_same_code(forward, LlamaMLP.forward)


@cache
def activations() -> tuple[type, ...]:
    """Classes of activations in gated MLPs that return a new tensor."""
    from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation

    return *silus(), torch.nn.GELU, GELUActivation, GELUTanh, NewGELUActivation


@cache
def silus() -> tuple[type, ...]:
    """Classes of silu(x) = x sigmoid(x)."""
    from transformers.activations import SiLUActivation

    return torch.nn.SiLU, SiLUActivation


def llama_rope() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Llama's apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1), which many models copy into their own module."""
    from transformers.models.llama import modeling_llama

    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]] = modeling_llama.apply_rotary_pos_emb
    return rope


def is_llamas_rope(function: object) -> bool:
    """Whether this is Llama's apply_rotary_pos_emb(), and calls Llama's rotate_half().

    Some models call a rotate_half() of their own, which rotates in the other direction (NanoChat) or other pairs (BLT).
    """
    llamas = llama_rope()
    halves = [getattr(f, "__globals__", {}).get("rotate_half") for f in (function, llamas)]
    defaults = [getattr(f, "__defaults__", None) for f in (function, llamas)]
    return _is_same_code(function, llamas) and _is_same_code(*halves) and defaults[0] == defaults[1]


def _is_same_code(function: object, llamas: object) -> bool:
    """Whether two Python functions have the same bytecode; docstrings may differ."""
    ours, theirs = _code(function), _code(llamas)
    if ours is None or not llamas.__module__.startswith("transformers."):  # other packages replace Llama's functions
        return False
    return ours == theirs


def _code(function: object) -> tuple[object, ...] | None:
    """Bytecode, names and constants of a Python function, without its docstring; None for other callables."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, code.co_varnames, [x for x in code.co_consts if x != function.__doc__]
