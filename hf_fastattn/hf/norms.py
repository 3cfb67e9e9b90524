"""Recognises RMSNorm and LayerNorm in modules of any class, by running their code on a few rows.

The order of roundings differs between families: Llama rounds the quotient and then multiplies it by its weight, OLMo-2 rounds
only the product, Gemma adds 1 to its weight in float32. A module is recognised if its code and one formula return the same bits,
in every dtype, for rows that tell the formulas apart. The sums in these rows are exact, so the order of summation does not
matter, and the rows are on the CPU, so the device of the model does not either.
"""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers.activations import ACT2FN

from ..kernels.states import gated_norm
from .llama import has_own, is_torchs, parameters_of
from .rotations import called
from .source import globals_in

_EPS = ("variance_epsilon", "eps")  # attributes
_PARAMETERS = ("weight", "bias")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SIMPLE = (bool, int, float, str, type(None))

Attributes = tuple[tuple[str, Any], ...]


class Norm(NamedTuple):
    """What a norm computes, in the terms of `kernels.decode.rms_norm.run`.

    eps: the name of an attribute. has: whether it has a weight, a bias. state: what else its code reads from it, and its methods.
    """

    eps: str
    has: tuple[bool, bool]
    centred: bool
    late: bool
    one: str
    state: Attributes = ()

    @property
    def options(self) -> tuple[bool, bool, str]:
        return self.centred, self.late, self.one

    def inputs(self, module: torch.nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None, float] | None:
        """The weight, bias and eps of a module; None if someone has changed what its formula depends on."""
        found, eps = parameters_of(module, *_PARAMETERS), getattr(module, self.eps, None)
        if found is None or not has_own("layer_norm"):
            return None
        weight, bias = found
        now = (getattr(module, name, None) for name, _ in self.state)
        same = all(getattr(x, "__func__", x) == value for x, (_, value) in zip(now, self.state, strict=True))
        return (weight, bias, eps) if same and self.has == (weight is not None, bias is not None) and type(eps) is float else None


class GatedNorm(NamedTuple):
    """What a norm with a gate computes, in the terms of `kernels.decode.gated_norm.run`. eps, state: as in Norm."""

    eps: str
    first: bool
    late: bool
    state: Attributes

    def inputs(self, module: torch.nn.Module) -> tuple[torch.Tensor, float, bool, bool, int] | None:
        """The arguments of a module after x and its gate; None if someone has changed what its formula depends on."""
        found = Norm(self.eps, (True, False), False, self.late, "", self.state).inputs(module)
        if found is None:
            return None
        weight: Any = found[0]
        read = dict(self.state)
        groups = read.get("n_groups") or weight.numel() // read.get("group_size", weight.numel())
        return weight, found[2], self.first, self.late, int(groups)


def gated_norm_of(module: torch.nn.Module) -> GatedNorm | None:
    """The formula of a module that also takes a gate; None if it is no such norm, or not one of the formulas."""
    cls: Any = type(module)
    eps = next((name for name in _EPS if type(vars(module).get(name)) is float), None)
    if eps is None or not isinstance(cls.forward, types.FunctionType) or cls.forward.__code__.co_varnames[2:3] != ("gate",):
        return None
    state = _state(module) if module._parameters.keys() == {"weight"} and _size(module) else None
    return None if state is None or called(cls.forward) else _recognise_gated(cls, cls.forward, eps, state)


@cache
def _recognise_gated(cls: type[torch.nn.Module], forward: Callable[..., Any], eps: str, state: Attributes) -> GatedNorm | None:
    generator = torch.Generator("cpu").manual_seed(0)
    draws = torch.randn(9, 64, generator=generator, device="cpu")
    groups = {"group_size": 32, "n_groups": 2}
    own = {name: groups.get(name, value) for name, value in state if not callable(value)}
    left = [GatedNorm(eps, first, late, state) for first in (False, True) for late in (False, True)]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for dtype in _DTYPES:
                x, gate, weight = (t.to(dtype) for t in (3 * draws[:4], draws[4:8], draws[8]))
                out = forward(_twin(cls, weight, None, {**own, eps: 0.3}), x.clone(), gate.clone())
                parts = 2 if groups.keys() & own.keys() else 1
                left = [each for each in left if _equal(out, gated_norm(x, gate, weight, 0.3, each.first, each.late, parts))]
    except Exception:  # anything that code of others may raise
        return None
    return left[0] if left else None


def norm_of(module: torch.nn.Module) -> Norm | None:
    """The formula of a module; None if it is not a norm, or not one of the formulas."""
    cls: Any = type(module)
    forward = cls.forward
    eps = next((name for name in _EPS if type(vars(module).get(name)) is float), None)
    size = None if eps is None else _size(module)
    if eps is None or size is None:
        return None
    has = tuple(module._parameters.get(name) is not None for name in _PARAMETERS)
    if is_torchs(forward, torch.nn.LayerNorm):
        return Norm("eps", has, True, True, "") if size else None  # type: ignore[arg-type]
    state = _state(module) if _takes_a_tensor(forward) else None
    if state is None:
        return None
    while size > 512 and size % 2 == 0 and all(callable(value) for _, value in state):  # no number may be the size
        size //= 2  # means are rounded alike
    return _recognise(cls, forward, eps, state, has, size or 64)


def _takes_a_tensor(forward: Any) -> bool:
    """Whether a Python function takes `self`, one more argument and nothing else, and calls no other by a global name."""
    if not isinstance(forward, types.FunctionType) or forward.__closure__ or called(forward):
        return False
    code, others = forward.__code__, inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return code.co_argcount == 2 and not code.co_kwonlyargcount and not code.co_flags & others and not forward.__defaults__


def _size(module: torch.nn.Module) -> int | None:
    """The length of a weight or bias; 0 without any; None if the module contains something else."""
    inside = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if parameters_of(module, *_PARAMETERS) is None or module._modules or module._buffers or not inside.keys() <= set(_PARAMETERS):
        return None
    shapes = {tensor.shape for tensor in inside.values()}
    if not shapes:
        return 0
    return shapes.pop()[0] if len(shapes) == 1 and len(next(iter(shapes))) == 1 else None


@cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code reads, but those of Python itself."""
    return tuple(globals_in(code) - vars(builtins).keys())


def _state(module: torch.nn.Module) -> Attributes | None:
    """The methods and attributes that forward() reads, besides eps and the parameters; None if they are not simple."""
    found: dict[str, Any] = {}
    waiting: list[Any] = [type(module).forward]
    while waiting:
        function = waiting.pop()
        read = (function.__globals__.get(name) for name in _global_names(function.__code__))
        if not all(isinstance(value, types.ModuleType) or value is ACT2FN for value in read):
            return None  # a value that may change
        for name in {*function.__code__.co_names} - {*_EPS, *_PARAMETERS, *found}:
            if name in vars(module):
                value = vars(module)[name]
                if not isinstance(value, _SIMPLE):
                    return None
            else:
                value = next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), None)
                if value is None or hasattr(torch.nn.Module, name):
                    continue  # an attribute of something else
                if not isinstance(value, types.FunctionType) or value.__closure__ or called(value):
                    return None
                waiting.append(value)
            found[name] = value
    return tuple(sorted(found.items()))


@cache
def _recognise(
    cls: type[torch.nn.Module], forward: Callable[..., Any], eps: str, state: Attributes, has: tuple[bool, bool], size: int
) -> Norm | None:
    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> object:
        own = {name: value for name, value in state if not callable(value)}
        return forward(_twin(cls, weight, bias, {**own, eps: epsilon}), x.clone())

    orders = [(late, one) for late, one in _ORDERS if (has[0] or not one) and (late or not has[1])]
    left = [
        (Norm(eps, has, centred, late, one, state), root) for centred, (late, one), root in product((False, True), orders, _ROOTS)
    ]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for row in _rows(size, *has):
                out = run(*row)
                left = [each for each in left if _equal(out, _compute(*each, row))]
    except Exception:  # anything that code of others may raise
        return None
    return left[0][0] if left else None


def _twin(cls: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, own: dict[str, Any]) -> Any:
    """A module of a class with other parameters and attributes."""
    twin = cls.__new__(cls)
    torch.nn.Module.__init__(twin)
    for name, tensor in zip(_PARAMETERS, (weight, bias), strict=True):
        twin.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
    vars(twin).update(own, training=False)
    return twin


_ORDERS = ((False, ""), (True, ""), (True, "fp32"), (False, "rounded"), (True, "rounded"))  # late, one
_ROOTS = (torch.rsqrt, lambda x: torch.pow(x, -0.5), lambda x: 1 / torch.sqrt(x))  # they differ in the last bit of float32


def _compute(norm: Norm, root: Callable[[torch.Tensor], torch.Tensor], row: tuple[Any, ...]) -> torch.Tensor:
    x, weight, bias, epsilon = row
    y: torch.Tensor = x.float()
    if norm.centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * root(y.pow(2).mean(-1, keepdim=True) + epsilon)
    if not norm.late:
        y = y.to(x.dtype)
    if weight is not None:
        weight = 1 + weight if norm.one == "rounded" else weight
        weight = weight.float() if norm.late else weight
        y = (1 + weight if norm.one == "fp32" else weight) * y
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _equal(out: object, right: torch.Tensor) -> bool:
    return isinstance(out, torch.Tensor) and out.dtype == right.dtype and torch.equal(out, right)


def _rows(size: int, has_weight: bool, has_bias: bool) -> Iterator[tuple[Any, ...]]:
    """(x, weight, bias, eps): rows with exact means and means of squares, over a wide range, in every dtype."""
    generator = torch.Generator("cpu").manual_seed(0)
    half = torch.randint(1, 7, (4, 2, 3, size // 2), generator=generator, device="cpu") / 2
    odd = torch.zeros(4, 2, 3, size % 2, device="cpu")
    scale = 2.0 ** torch.tensor([0, 5, 10, -12], device="cpu").view(4, 1, 1, 1)
    centre = torch.tensor([0.0, 0.5, -2.0], device="cpu").view(3, 1)
    rows = ((torch.cat([half, -half, odd], -1) + centre) * scale)[..., torch.randperm(size, generator=generator, device="cpu")]
    rows[0, 0, 0] = 0
    for dtype, epsilon in product(_DTYPES, (1e-5, 0.3)):
        weight = torch.randn(size, generator=generator, device="cpu").to(dtype) if has_weight else None
        bias = torch.randn(size, generator=generator, device="cpu").to(dtype) if has_bias else None
        for x in (rows, rows[0, 0, :1], rows[:, 0]):
            yield x.to(dtype), weight, bias, epsilon
