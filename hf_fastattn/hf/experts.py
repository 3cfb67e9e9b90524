"""Transformers' registry of implementations of experts, and the layout and the activation of the modules that use it.

Such a module stores the weights of all experts of a layer as 3-D tensors. Its forward(hidden_states, top_k_index, top_k_weights)
calls the entry of the registry under the name in its configuration, or, under "eager", the loop over experts of its own class.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from ..kernels import mixture
from .llama import _is_same_code, activation_name, activations, has_own, parameters_of, reads

STOCK_EXPERTS = ("eager", "batched_mm", "grouped_mm")  # what a model runs if no other kernel is requested
_REGISTERED = {name: ALL_EXPERTS_FUNCTIONS.get(name) for name in STOCK_EXPERTS[1:]}
Experts = Callable[..., torch.Tensor]
_layouts: dict[tuple[object, ...], mixture.Layout | str] = {}


def experts_of(config: Any) -> tuple[int, int]:
    """(experts of a token, all experts of a layer) of a text configuration; the most of layers that differ; or (1, 1)."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count, chosen = (
        next((max(n) if isinstance(n, list | tuple) else n for name in names if (n := getattr(config, name, None))), None)
        for names in (counts, ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    )
    return (chosen or count, count) if count else (1, 1)


def register_experts(name: str, function: Experts) -> None:
    """Register `experts_implementation=name`: function(module, hidden_states, top_k_index, top_k_weights)."""
    ExpertsInterface.register(name, function)


def experts_implementation(module: Any) -> str:
    """The name in the configuration of an `asks_for_experts` module."""
    return str(module.config._experts_implementation)


def set_experts_implementation(module: Any, name: str) -> None:
    """Set it for all modules with the configuration of this one, but not for its sub-configurations."""
    module.config._experts_implementation_internal = name


def is_stock_experts(name: str) -> bool:
    """Whether this is one of STOCK_EXPERTS, and nobody has registered another function under its name."""
    return name in STOCK_EXPERTS and (name not in _REGISTERED or ALL_EXPERTS_FUNCTIONS.get(name) is _REGISTERED[name])


def stock_experts(module: torch.nn.Module, name: str) -> Experts:
    """The implementation in Transformers with this name, one of STOCK_EXPERTS."""
    own: Any = type(module).forward
    function: Experts = own.__wrapped__ if name == "eager" else ALL_EXPERTS_FUNCTIONS[name]
    return function


def asks_for_experts(module: torch.nn.Module) -> bool:
    """Whether forward() of this module calls the registry. (Quantised experts have a registry of their own.)"""
    return _asks(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _asks(cls: type[torch.nn.Module]) -> bool:
    forward = getattr(cls, "forward", None)  # of a ScriptModule it cannot be read
    if not inspect.isfunction(forward) or not hasattr(forward, "__wrapped__"):
        return False
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface") is ALL_EXPERTS_FUNCTIONS


def expert_weights(module: torch.nn.Module) -> mixture.Weights | None:
    """The weights of `asks_for_experts` modules; None if they are not stored parameters but computed at each call."""
    names = ["gate_up_proj", "down_proj"] + ["gate_up_proj_bias", "down_proj_bias"] * bool(module.has_bias)
    found = parameters_of(module, *names) or (None,)
    return None if any(tensor is None for tensor in found) else mixture.Weights(*found)  # type: ignore[arg-type]


def expert_layout(module: torch.nn.Module) -> mixture.Layout | str:
    """Layout and activation of an `asks_for_experts` module, or the reason why the kernel does not support them."""
    act = getattr(module, "act_fn", None)
    # By getattr(): a decode graph notices which attributes a step reads.
    numbers = tuple((name, getattr(module, name)) for name, value in vars(module).items() if type(value) in (int, float))
    if act is not None and ("forward" in vars(act) or act._forward_hooks or act._forward_pre_hooks):
        return f"the activation of {type(module).__name__} has a hook or a forward() of its own"
    if "_apply_gate" in vars(module) or _global_forward_hooks or _global_forward_pre_hooks:
        return f"{type(module).__name__} has a function of its own for its gate, or there are hooks of all modules"
    if not has_own("silu", "gelu"):
        return "someone has replaced a function of torch.nn.functional"
    functions: tuple[Any, ...] = getattr(type(module), "_apply_gate", None), getattr(type(act), "forward", None)
    functions += (None if act is None else activation_name(act) or getattr(act, "act", None),)
    key = type(module), type(act), str(act), functions, numbers
    if key not in _layouts:
        _layouts[key] = _examine(module, act, [number for _, number in numbers])
    return _layouts[key]


def _examine(module: Any, act: torch.nn.Module | None, numbers: list[float]) -> mixture.Layout | str:
    name = type(module).__name__
    if not module.has_gate:
        return f"{name} has no gate"
    if getattr(module, "has_post_expert_norm", False):
        return f"{name} has a norm after each expert"
    if act is not None and type(act) not in activations():
        return f"{name} has the activation {type(act).__name__}"
    linear, far = torch.linspace(-30, 30, 21, device="cpu"), torch.tensor([-1e4, -1e3, -1e2, 1e2, 1e3, 1e4], device="cpu")
    values = torch.cat([linear, far]).double()
    gate, up = torch.cartesian_prod(values, values).unbind(1)
    for layout in _candidates(bool(module.is_transposed), numbers):
        both = torch.stack([gate, up], 1).flatten() if layout.interleaved else torch.cat([gate, up])
        try:
            got = module._apply_gate(both[None])[0]
        except (RuntimeError, TypeError, ValueError):
            break
        if torch.allclose(got, mixture.gated(both, layout), rtol=1e-9, atol=1e-9):  # computed in fp64, and not in another dtype
            return layout
    return f"the activation of {name} is not one that the kernel supports"


def _candidates(transposed: bool, numbers: list[float]) -> Iterator[mixture.Layout]:
    """The layouts and activations that the kernel supports, with the module's own numbers as alpha and limit."""
    limits = [None, *dict.fromkeys(float(n) for n in numbers if 0 < n < 1e4)]
    for interleaved in (False, True):
        for limit in limits:
            for act in ("silu", "gelu_tanh"):
                yield mixture.Layout(transposed, interleaved, act, limit=limit)
            for alpha in (1.0, *(n for n in limits if n is not None and n != 1.0)):
                yield mixture.Layout(transposed, interleaved, "sigmoid", alpha, limit)


class Routing(NamedTuple):
    """How a router gets the scores of a token's experts from its logits: arguments of `decode.route.route`."""

    form: str
    normalise: bool = False
    scale: float = 1.0
    dtype: torch.dtype | None = None


def routing(forward: object, module: Any) -> Routing | None:
    """The routing of a module whose class has this forward(), if it has the code of a known router, else None.

    Such a module has weight, perhaps bias, and top_k, and returns (logits, scores, experts) for hidden states (tokens, hidden).
    With the form "sigmoid" its logits are a product in fp32, and e_score_correction_bias is added to scores for the choice.
    """
    kind = _routing(forward)
    if kind is None or kind.normalise:
        return kind
    if kind.form == "sigmoid":
        if module.topk_group < module.num_group:
            return None  # only experts of the best groups are chosen
        kind = kind._replace(scale=float(module.routed_scaling_factor))
    return kind._replace(normalise=bool(getattr(module, "norm_topk_prob", False)))


_ROUTERS = {
    ("gpt_oss", "GptOssTopKRouter"): Routing("choice"),
    ("mixtral", "MixtralTopKRouter"): Routing("softmax", normalise=True, dtype=torch.float32),
    ("qwen3_moe", "Qwen3MoeTopKRouter"): Routing("softmax"),
    ("deepseek_v3", "DeepseekV3TopkRouter"): Routing("sigmoid"),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"): Routing("softmax", normalise=True),
}


@cache
def _routing(forward: object) -> Routing | None:
    if not reads(forward, "top_k"):
        return None
    files = [f"transformers.models.{family}.modeling_{family}" for family, _ in _ROUTERS]
    known = zip(files, _ROUTERS.items(), strict=True)
    for file, ((_, name), kind) in sorted(known, key=lambda each: each[0] not in sys.modules):  # an import takes up to 0.4 s
        if _is_same_code(forward, getattr(importlib.import_module(file), name).forward):
            return kind
    return None
