"""Recognises Llama's code in other models, by comparing bytecode."""

from __future__ import annotations

import functools
import sys
import types
from functools import cache

import torch

_FUNCTIONS = {name: getattr(torch.nn.functional, name) for name in ("gelu", "layer_norm", "linear", "silu", "softplus")}


def is_llamas_mlp(forward: object) -> bool:
    """Whether this is forward() of Llama's MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    return _is_same_code(forward, LlamaMLP.forward)


def is_phi3s_mlp(forward: object) -> bool:
    """Whether this is forward() of Phi-3's MLP: Llama's with one linear layer for gate and up."""
    if not reads(forward, "gate_up_proj"):
        return False
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    return _is_same_code(forward, Phi3MLP.forward)


def is_lfm2s_mlp(forward: object) -> bool:
    """Whether this is forward() of LFM2's MLP: w2(F.silu(w1(x)) * w3(x))."""
    if not reads(forward, "w3"):
        return False
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    return _is_same_code(forward, Lfm2MLP.forward)


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
