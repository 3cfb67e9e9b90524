"""Recognises Llama's code in other models, by comparing bytecode."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from functools import cache
from typing import Any, Literal

import torch

_FUNCTIONS = {name: getattr(torch.nn.functional, name) for name in ("gelu", "layer_norm", "linear", "silu", "softplus")}


Mlp = Literal["llama", "phi3", "lfm2"]
_MLPS: dict[Mlp, tuple[str, str]] = {  # a name that the code reads, and its class
    "llama": ("gate_proj", "LlamaMLP"),
    "phi3": ("gate_up_proj", "Phi3MLP"),
    "lfm2": ("w3", "Lfm2MLP"),
}


def mlp_of(forward: object) -> Mlp | None:
    """The family with this forward() of an MLP: down(act(gate(x)) * up(x)). Phi-3 has one linear layer for gate and up; those of
    LFM2 are w1, w3 and w2, with SiLU."""
    for family, (name, cls) in _MLPS.items():
        if reads(forward, name):
            theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            if _is_same_code(forward, getattr(theirs, cls).forward):
                return family
    return None


def has_own(*names: str) -> bool:
    """Whether nobody has replaced these functions of torch.nn.functional."""
    return all(getattr(torch.nn.functional, name) is _FUNCTIONS[name] for name in names)


def is_llamas_layer(forward: object) -> bool:
    """Whether this is forward() of Llama's decoder layer: norm, attention, sum, norm, MLP, sum."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return is_same_wrapped(forward, LlamaDecoderLayer.forward)  # newer Transformers wraps it, for gradient checkpointing


def is_same_wrapped(function: object, theirs: object) -> bool:
    """Whether two Python functions have the same bytecode, and also those that they wrap."""
    while _is_same_code(function, theirs):
        function, theirs = getattr(function, "__wrapped__", None), getattr(theirs, "__wrapped__", None)
        if function is None or theirs is None:
            return function is theirs
    return False


def is_embedding(forward: object) -> bool:
    """Whether this is forward() of torch's Embedding, or of Gemma's, which multiplies the result by a number."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    return is_torchs(forward, torch.nn.Embedding) or _is_same_code(forward, Gemma3TextScaledWordEmbedding.forward)


def is_torchs(forward: object, cls: type[torch.nn.Module]) -> bool:
    """Whether this is forward() of a class of torch, which nobody has replaced."""
    return forward is cls.forward and module_of(forward) == cls.__module__


def parameters_of(module: torch.nn.Module, *names: str) -> tuple[torch.Tensor | None, ...] | None:
    """The parameters of these names, None for one that the module lacks. None in place of all if the module has something else
    under a name: another tensor, or one that is computed at each access."""
    own, cls = vars(module), type(module)
    for name in names:  # not in a generator: norms ask for each forward
        if getattr(cls, name, None) is not None:
            return None
        for group in (own, own["_buffers"], own["_modules"]):
            if group.get(name) is not None:
                return None
    return tuple(module._parameters.get(name) for name in names)


def module_of(function: object) -> str:
    """The name of the module whose globals a function reads, "" if unknown. functools.wraps() copies only __module__."""
    return getattr(function, "__globals__", {}).get("__name__", "")  # type: ignore[no-any-return]


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


def activation_name(act: torch.nn.Module) -> str | None:
    """ "silu", "gelu" or "gelu_tanh" if that is what this module computes, else None."""
    from transformers.activations import GELUActivation, GELUTanh

    if module_of(type(act).forward) != type(act).__module__ or not has_own("silu", "gelu"):
        return None
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


GELU_PARTS = ("bloom_gelu_forward", "GeLUFunction")  # functions of a file that its GELU is made of
_IN_PARTS = {
    ("transformers.activations", "NewGELUActivation"),
    ("transformers.activations", "FastGELUActivation"),
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"),
}


def is_gelu_in_parts(act: torch.nn.Module) -> bool:
    """Whether a module computes gelu(x, approximate="tanh") operation by operation, without parameters, in Transformers' code."""
    cls = type(act)
    if (cls.__module__, cls.__qualname__) not in _IN_PARTS:
        return False
    names = vars(sys.modules[cls.__module__])
    parts = [cls.forward, *(names[name] for name in GELU_PARTS if name in names)]
    return all(part.__module__ == cls.__module__ for part in parts)  # another's if someone has replaced it


SPARSE_GATES = "_gaussian_topk"  # method of an MLP that keeps the gates above a quantile (Gemma 3n)


def has_sparse_gates(mlp: Any) -> bool:
    """Whether a method of this MLP, in Transformers' code, computes `above_quantile`."""
    own, p = getattr(type(mlp), SPARSE_GATES, None), vars(mlp).get("activation_sparsity")
    if own is None or not isinstance(p, float) or not 0 < p < 1 or module_of(own) != type(mlp).__module__:
        return False
    with torch.device("cpu"):
        x = torch.linspace(-1, 2, 64).square()
        return torch.equal(own(mlp, x), above_quantile(x, p))


def above_quantile(x: torch.Tensor, p: float) -> torch.Tensor:
    """relu(x - c), where c is the quantile p of the normal distribution with the mean and the deviation of each row."""
    return torch.relu(x - (x.mean(-1, keepdim=True) + x.std(-1, keepdim=True, unbiased=False) * _quantile(p, x.dtype)))


@cache
def _quantile(p: float, dtype: torch.dtype) -> float:
    """Of the standard normal distribution, rounded to fp32 and then to `dtype`."""
    with torch.device("cpu"):
        return float(torch.distributions.Normal(0, 1).icdf(torch.tensor(p, dtype=torch.float32)).to(dtype))


def reads(function: object, name: str) -> bool:
    """Whether a Python function uses this name. To ask before the file of another model is imported, to compare with its code."""
    return name in getattr(getattr(function, "__code__", None), "co_names", ())


def _is_same_code(function: object, llamas: object) -> bool:
    """Whether two Python functions have the same bytecode; docstrings may differ."""
    own = module_of(llamas).startswith("transformers.")  # other packages replace Llama's functions
    return own and (ours := _code(function)) is not None and ours == _code(llamas)


def _code(function: object) -> tuple[object, ...] | None:
    """Bytecode, names and constants of a Python function, without its docstring; None for other callables."""
    code = getattr(function, "__code__", None)
    return None if code is None else _parts(code, function.__doc__)


@cache
def _parts(code: types.CodeType, doc: str | None) -> tuple[object, ...]:
    consts = [_parts(x, None) if isinstance(x, types.CodeType) else x for x in code.co_consts if x != doc]  # comprehensions
    return code.co_code, code.co_names, code.co_varnames, consts
