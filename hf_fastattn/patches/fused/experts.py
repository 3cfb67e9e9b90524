"""The experts of one model, and the choice among them, for at most 64 tokens.

Experts run `kernels.decode.experts` as a registered implementation of Transformers. Its name ends with the implementation that
the model had, which runs whatever the kernel does not: more tokens, gradients, autocast, torch.compile. A module qualifies if its
class asks the registry and `hf.expert_layout` recognises its activation.

Routers run `kernels.decode.route` after their product, if their forward() has the code of a router that `hf.routing` knows.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from ... import hf
from ...attention import step as steps
from ...kernels import HAS_TRITON, mixture
from . import delayed as merged
from . import linears, subclass
from .subclass import Forward

PREFIX = "hf_fastattn:"


def find(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with experts that the kernel supports."""
    return [module for module in model.modules() if HAS_TRITON and hf.asks_for_experts(module) and why_not(module) is None]


def why_not(module: torch.nn.Module) -> str | None:
    """The reason why a module with experts keeps its own implementation, or None."""
    if reason := why_not_kind(module):
        return reason
    weight: torch.Tensor = module._parameters["gate_up_proj"]  # type: ignore[assignment]
    if weight.dtype not in mixture.DTYPES:
        return f"the weights are {weight.dtype}"
    return None if subclass.runs_kernels(weight.device) else f"the weights are on {weight.device}"


def why_not_kind(module: torch.nn.Module) -> str | None:
    """`why_not`, on any device and in any dtype."""
    layout, name = hf.expert_layout(module), had(module)
    if isinstance(layout, str):
        return layout
    if not hf.is_stock_experts(name):
        return f"experts_implementation={name!r} was requested"
    return f"{type(module).__name__} computes its weights at each call" if hf.expert_weights(module) is None else None


def had(module: torch.nn.Module) -> str:
    """The implementation that a module has, or had before use()."""
    return hf.experts_implementation(module).removeprefix(PREFIX)


def is_used(module: torch.nn.Module) -> bool:
    """Whether a module runs the kernel where it can."""
    return hf.asks_for_experts(module) and hf.experts_implementation(module).startswith(PREFIX)


def use(modules: list[torch.nn.Module]) -> str:
    """Let modules run the kernel; returns the names of the implementations that they had."""
    for module in modules:
        hf.set_experts_implementation(module, PREFIX + had(module))
    return ", ".join(dict.fromkeys(map(had, modules)))


def restore(model: torch.nn.Module) -> None:
    """Undo use(), except where another implementation has been set since."""
    for module in model.modules():
        if hf.asks_for_experts(module):
            hf.set_experts_implementation(module, had(module))


def _implementation(stock: str) -> Callable[..., torch.Tensor]:
    """The function that is registered under PREFIX + stock."""

    def experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = hf.is_stock_experts(stock)
        out = None if kwargs or len(args) != 3 or not own else _by_kernel(module, *args)
        if out is not None:
            return out
        # As Transformers does in generate() with "grouped_mm"; a graph can capture neither the loop nor every grouped_mm.
        name = "batched_mm" if own and not torch.compiler.is_compiling() and steps.captured() else stock
        return hf.stock_experts(module, name)(module, *args, **kwargs)

    return experts


def _by_kernel(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | None:
    many = hidden_states.shape[0] > mixture.MAX_TOKENS
    if torch.compiler.is_compiling() or hidden_states.dim() != 2 or (many and not steps.captured()):
        return None
    weights, layout = hf.expert_weights(module), hf.expert_layout(module)
    if weights is None or isinstance(layout, str) or subclass.is_autocast(hidden_states):
        return None
    if not all(subclass.has_kernels(tensor) for tensor in (hidden_states, *weights) if tensor is not None):
        return None
    from ...kernels.decode import experts as kernel

    if (real := steps.no_padding(len(hidden_states))) is not None:
        top_k_index = torch.where(real, top_k_index, -1)  # padding has no expert
    # In a graph, more tokens run in parts: batched_mm would copy the weights of an expert for each of its tokens.
    inputs = (tensor.contiguous().split(mixture.MAX_TOKENS) for tensor in (hidden_states, top_k_index, top_k_weights))
    delayed = merged.current()
    run = kernel.run if delayed is None else delayed.experts
    found = [run(x, chosen, scores, weights, layout) for x, chosen, scores in zip(*inputs, strict=True)]
    parts = [out for out in found if out is not None]
    if len(parts) < len(found):
        return None
    return torch.cat(parts) if many else parts[0]


def find_routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that choose experts by a code that the kernel supports."""
    known = (module for module in model.modules() if HAS_TRITON and hf.routing(type(module).forward, module) is not None)
    return [module for module in known if _is_stored(module)]


def _is_stored(router: torch.nn.Module) -> bool:
    weight, _ = hf.parameters_of(router, "weight", "bias") or (None, None)
    return weight is not None and subclass.runs_kernels(weight.device) and "forward" not in vars(router)


def router(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def route(self: Any, hidden_states: torch.Tensor) -> Any:
        out = _routed(self, hidden_states, hf.routing(forward, self))
        return forward(self, hidden_states) if out is None else out

    return route


def _routed(router: Any, x: torch.Tensor, kind: hf.Routing | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(logits, scores, experts), or None where the module's own code has to run."""
    if kind is None or torch.compiler.is_compiling() or subclass.is_autocast(x):
        return None
    if kind.form != "choice":  # GPT-OSS alone keeps the shape of its input
        x = x.reshape(-1, x.shape[-1])
    (weight, bias), correction = hf.parameters_of(router, "weight", "bias") or (None, None), None
    if kind.form == "sigmoid":
        correction = router.e_score_correction_bias
    unread = bias is not None and kind.form != "choice"  # the others' code reads no bias
    if weight is None or unread or x.dim() != 2 or x.shape[0] > mixture.MAX_TOKENS:
        return None
    if not all(subclass.has_kernels(tensor) for tensor in (x, weight, bias, correction) if tensor is not None):
        return None
    from ...kernels.decode import linear as product
    from ...kernels.decode import route

    logits = None
    if kind.form == "sigmoid":
        x, weight = x.float(), weight.float()
    elif steps.captured() and (logits := linears.projected(router, x)) is None:
        logits = product.linear(x, weight, bias)
    if logits is None:
        logits = linear(x, weight, bias)
    delayed = merged.current()
    choose = route.route if delayed is None else delayed.route
    chosen = choose(logits, router.top_k, correction=correction, **kind._asdict())
    return None if chosen is None else (logits, *chosen)


for _stock in hf.STOCK_EXPERTS:
    hf.register_experts(PREFIX + _stock, _implementation(_stock))
