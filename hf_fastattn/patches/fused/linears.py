"""Linear layers and MLPs of one model:

- the product in the MLP in place: two tensors of the MLP's width at once instead of three, the peak memory of a long prompt;
- in a decode graph of up to 64 tokens, linear layers by `kernels.decode.linear`, in one launch each; a gated pair, and
  projections of one input (`PROJECTIONS`), in one launch together, on Hopper also up to 128 tokens. A launch may also compute an
  operation on a result (merged.py).

The projections are computed together when their attention layer, linear layer or mixture begins. Each of them then returns its
result if it is called with the input of the layer; otherwise the layer's projections are computed one by one from then on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ... import hf
from ...attention import step as steps
from ...kernels import checks, mixture
from ...kernels.host import gpu, launch
from . import delayed as merged
from . import subclass
from .subclass import Forward

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # of the linear layers of Qwen3.5
    ("in_proj_qkvz", "in_proj_ba"),  # and of Qwen3-Next
    ("gate", "shared_expert_gate"),  # of the mixtures of Qwen: a router, and the layer with the logit of its shared expert
)


_SILU = torch.nn.SiLU()  # of MLPs that call the function


@dataclass(slots=True)
class _Projected:
    """Results of linear layers that are not called yet, by the id of the layer, for one input."""

    x: torch.Tensor
    version: object
    results: dict[int, torch.Tensor]


@dataclass(slots=True)
class Added:
    """The residual for a linear layer that is still to run, then the layer's result and their sum."""

    layer: object
    residual: torch.Tensor
    version: object
    out: torch.Tensor | None = None
    out_version: object = None
    sum: torch.Tensor | None = None

    def total(self, out: torch.Tensor) -> torch.Tensor:
        """residual + out. It is already computed if out is the layer's result and neither was written since."""
        unchanged = (_version(self.residual), _version(out)) == (self.version, self.out_version)
        return self.sum if out is self.out and self.sum is not None and unchanged else self.residual + out


class _Thread(threading.local):
    def __init__(self) -> None:
        self.projected: list[_Projected] = []  # for the attention layers whose forward() is running
        self.added: list[Added] = []  # for the layers around the linear layers that are to add


_thread = _Thread()
_apart: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # attention layers whose projections have other inputs


def is_plain(module: torch.nn.Module) -> bool:
    """Whether the kernel supports this linear layer: its weight is a stored parameter, not computed for each call, or the part of
    one that this rank holds."""
    weight = module._parameters.get("weight")
    if not hf.is_torchs(type(module).forward, torch.nn.Linear) or weight is None or weight.dtype not in checks.LINEAR_DTYPES:
        return False
    return type(weight) is torch.nn.Parameter or hf.inner_forward(module) is not None


def mlp(forward: types.FunctionType) -> Forward:
    return _packed_mlp(forward) if hf.mlp_of(forward) == "phi3" else _separate_mlp(forward)


def _separate_mlp(forward: types.FunctionType) -> Forward:
    is_lfm2s = hf.mlp_of(forward) == "lfm2"
    names = ("w1", "w3", "w2") if is_lfm2s else ("gate_proj", "up_proj", "down_proj")

    @functools.wraps(forward)
    def run(self: Any, x: torch.Tensor) -> Any:
        act = _SILU if is_lfm2s else self.act_fn
        if not _may_change(x, act) or (is_lfm2s and not hf.has_own("silu")):
            return forward(self, x)
        gate, up, down = (getattr(self, name) for name in names)
        hidden = _gated(x, act, gate, up)
        if hidden is None:
            hidden, other = act(gate(x)), up(x)
            hidden = hidden.mul_(other) if other.dtype == hidden.dtype else hidden * other
            del other
        return down(hidden)

    return run


def _packed_mlp(forward: types.FunctionType) -> Forward:
    """An MLP whose gate and up are one linear layer."""

    @functools.wraps(forward)
    def run(self: Any, hidden_states: torch.Tensor) -> Any:
        if not _may_change(hidden_states, self.activation_fn):
            return forward(self, hidden_states)
        hidden = _gated(hidden_states, self.activation_fn, self.gate_up_proj)
        if hidden is None:
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
            hidden = self.activation_fn(gate).mul_(up)
            del gate, up
        return self.down_proj(hidden)

    return run


def _may_change(x: torch.Tensor, act: torch.nn.Module) -> bool:
    """Whether an MLP may compute its product in place."""
    return not (torch.is_grad_enabled() or _global_forward_hooks) and subclass.has_kernels(x) and _returns_its_own(act)


def _returns_its_own(act: torch.nn.Module) -> bool:
    """Whether an activation returns a new tensor that nothing else refers to."""
    own = "forward" not in vars(act) and (hf.activation_name(act) is not None or hf.is_gelu_in_parts(act))
    return own and subclass.stock(type(act)) in hf.activations() and not getattr(act, "inplace", False) and not act._forward_hooks


def linear(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def layer(self: torch.nn.Linear, input: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, input)
        out = projected(self, input)
        if out is None and _runs_our_linear(input, self):
            out = _linear_and_sum(self, input)
            if out is None:
                weight, bias = hf.parts_of(self)
                outs = _linears(input, (weight,), () if bias is None else (bias,))
                out = None if outs is None else outs[0]
                if out is None and weight is self.weight and bias is self.bias and "forward" not in vars(self):
                    with launch.unseen(input):
                        return forward(self, input)
        return forward(self, input) if out is None else out

    return layer


def _linears(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    """kernel.linears. In a decode graph it may be delayed, to compute an operation on the first result in the same launch."""
    from ...kernels.decode import linear as kernel

    delayed = merged.current()
    return (kernel.linears if delayed is None else delayed.linears)(x, weights, biases)


def _runs_our_linear(x: torch.Tensor, *layers: torch.nn.Linear) -> bool:
    """Whether a decode graph is captured in which our kernel may read the weights of these layers; x's shape is not checked."""
    if not steps.captured() or subclass.is_autocast(x) or not subclass.has_kernels(x) or not hf.has_own("linear"):
        return False
    for layer in layers:
        weight, bias = hf.parts_of(layer)  # no weight: one of them is computed for each call
        if weight is None or not subclass.has_kernels(weight) or not (bias is None or subclass.has_kernels(bias)):
            return False
    return True


def _is_ours(layer: torch.nn.Module) -> bool:
    """Whether a linear layer is fused, and its result is the product of its whole input and the weight of `hf.parts_of`."""
    return subclass.runs_fused(layer) or subclass.is_fused_part(layer)


def _gated(x: torch.Tensor, act: torch.nn.Module, *layers: Any) -> torch.Tensor | None:
    """act(gate) * up of a decode step in one launch; None if the modules would compute something else.

    layers: gate and up, or one layer of both.
    """
    from ...kernels.decode import linear as kernel

    name = hf.activation_name(act)
    if name is None or not all(map(_is_ours, layers)) or not _runs_our_linear(x, *layers):
        return None
    if any(layer.bias is not None for layer in layers) or _global_forward_pre_hooks:
        return None
    if any(module._forward_hooks or module._forward_pre_hooks for module in (*layers, act)):
        return None
    # One layer of both: the part of a rank is not a half of each.
    shared = [module for module in (*layers, act) if "forward" in vars(module)]
    if shared and (len(layers) == 1 or not all(map(subclass.is_fused_part, shared))):
        return None
    weights = [hf.parts_of(layer)[0] for layer in layers]
    gate, up = weights if len(layers) == 2 else weights[0].chunk(2)
    with launch.unseen(x):
        return kernel.gated_linear(x, gate, up, name)


def join(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let the attention layers whose projections are fused compute them together; returns these layers."""
    joined = [module for module in model.modules() if "forward" not in vars(module) and _projections(module)]
    for module in joined:
        subclass.replace(module, attention)
        _apart.discard(module)
    return joined


def _projections(attention: torch.nn.Module) -> list[Any]:
    """The fused projections of an attention layer, a linear one or a mixture; none if another module takes the place of one."""
    for names in PROJECTIONS:
        found = [attention._modules.get(name) for name in names]
        layers: list[Any] = [layer for layer in found if layer is not None and _is_ours(layer)]
        if len(layers) == len(found):
            return layers
    return []


def attention(forward: types.FunctionType) -> Forward:
    @functools.wraps(forward)
    def layer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = None
        if not torch.compiler.is_compiling() and steps.captured() and self not in _apart:
            given = _project(self, args[0] if args else kwargs.get("hidden_states"))
        if given is None:
            return forward(self, *args, **kwargs)
        _thread.projected.append(given)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _thread.projected.pop()
            if given.results:
                _apart.add(self)

    return layer


def _project(attention: torch.nn.Module, x: Any) -> _Projected | None:
    """The projections of an attention layer's input in one launch; None if they cannot be computed together."""
    layers = _projections(attention)
    if not layers or not isinstance(x, torch.Tensor) or not _runs_our_linear(x, *layers):
        return None
    if not isinstance(layers[0], torch.nn.Linear) and x.numel() > mixture.MAX_TOKENS * x.shape[-1]:
        return None  # a router with so many tokens runs its own code
    parts = [hf.parts_of(layer) for layer in layers]
    biases = tuple(bias for _, bias in parts if bias is not None)
    if len(biases) not in (0, len(layers)):
        return None
    results = _linears(x, tuple(weight for weight, _ in parts), biases)
    if results is None:
        return None
    return _Projected(x, _version(x), {id(layer): out for layer, out in zip(layers, results, strict=True)})


def projected(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The result of this layer for x, in any shape, if it is already computed. It is returned once."""
    given = _thread.projected[-1] if _thread.projected else None
    if given is None or not _is_same(given.x, x) or given.version != _version(x):
        return None
    out = given.results.pop(id(layer), None)
    with launch.unseen():
        return None if out is None else out.view(*x.shape[:-1], -1)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, of which a is contiguous, have the same elements in rows of the same length."""
    same = (gpu.address_of(a), a.dtype, a.numel(), a.shape[-1]) == (gpu.address_of(b), b.dtype, b.numel(), b.shape[-1])
    return a is b or (same and b.is_contiguous())


def _version(x: torch.Tensor) -> object:
    """A number that changes with every operation that writes x. Tensors of inference mode do not count: None if the model has
    known code alone, which writes none, else an object that equals no other."""
    if not x.is_inference():
        return x._version
    return None if merged.current() is not None else object()


@contextlib.contextmanager
def adding(layer: torch.nn.Module, residual: torch.Tensor) -> Iterator[Added]:
    """A context in which a linear layer also adds its result to a residual."""
    added = Added(layer, residual, _version(residual))
    _thread.added.append(added)
    try:
        yield added
    finally:
        _thread.added.pop()


def _linear_and_sum(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor | None:
    """The layer's result, with its sum with the residual kept aside; None if no sum is wanted, or the kernel refuses it."""
    from ...kernels.decode import linear as kernel

    added = _thread.added[-1] if _thread.added else None
    if added is None or added.layer is not layer or added.out is not None or not subclass.has_kernels(added.residual):
        return None
    if "forward" in vars(layer):  # its result on this rank is not all of it
        return None
    with launch.unseen(x, added.residual):
        results = kernel.linear_and_sum(x, layer.weight, layer.bias, added.residual)
    if results is None:
        return None
    added.out, added.sum = results
    added.out_version = _version(added.out)
    return added.out
