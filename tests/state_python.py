"""Steps of tests/state.py that change the Python code of a model: functions, hooks, and the data that they read."""

import functools
import threading
import types
import weakref
from functools import partial

import torch
from state import PROCESS, action
from state_model import noise
from torch import nn

# Functions on instances


class Scaled:
    def __init__(self, old, by):
        self.old, self.by = old, by

    def __call__(self, x):
        return self.by * self.old(x)

    def method(self, x):
        return self.by * self.old(x)


def scaled(old, x, *, by):
    return by * old(x)


def _own(module):
    return type(module).forward.__get__(module)


def _scale_forward(module, by, kind: int):
    """Set a forward() on an instance that multiplies by `by`, which is stored in one of several ways."""
    old = _own(module)
    module.forward = (
        lambda: lambda x: by * old(x),
        lambda: partial(scaled, old, by=by),
        lambda: Scaled(old, by),
        lambda: Scaled(old, by).method,
        lambda: types.MethodType(lambda self, x, by=by: by * old(x), module),
    )[kind]()


@action(10)
def set_forward(side, variant):
    """And delete it, so that the next function may get the same address."""
    _scale_forward(side.layers[variant % 2].mlp, 3.0, variant // 2)
    return lambda side: vars(side.layers[variant % 2].mlp).pop("forward", None)


@action(10)
def set_another_forward(side, variant):
    """Deleted before the next one is created, as by the context manager of an ablation."""
    mlp = side.layers[1].mlp
    vars(mlp).pop("forward", None)
    factor = side.scratch["factor"] = side.scratch.get("factor", 1.0) + 2.0
    _scale_forward(mlp, factor, variant // 2)


@action()
def set_forward_of_the_model(side, variant):
    model = side.model
    own = type(model).forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        out = own(model, *args, **kwargs)
        out.logits = -out.logits
        return out

    model.forward = forward

    return lambda side: vars(side.model).pop("forward", None)


# Hooks


def _halve(module, args, out):
    return out / 2


def _halve_with_kwargs(module, args, kwargs, out):
    return out / 2


def _halve_input(module, args):
    return (args[0] / 2,)


@action(12)
def register_a_hook(side, variant):
    module = (side.layers[0].mlp, side.model.model.norm, side.model.lm_head)[variant % 3]
    handle = (
        lambda: module.register_forward_hook(_halve),
        lambda: module.register_forward_hook(_halve_with_kwargs, with_kwargs=True, prepend=True),
        lambda: module.register_forward_pre_hook(_halve_input),
        lambda: module.register_forward_hook(partial(_halve), always_call=True),
    )[variant // 3]()
    return lambda side: handle.remove()


@action(2)
def register_a_global_hook(side, variant):
    is_mlp = lambda module: any(module is layer.mlp for layer in side.layers)  # noqa: E731
    if variant:
        halve_input = lambda module, args: _halve_input(module, args) if is_mlp(module) else None  # noqa: E731
        handle = nn.modules.module.register_module_forward_pre_hook(halve_input)
    else:
        halve = lambda module, args, out: out / 2 if is_mlp(module) else None  # noqa: E731
        handle = nn.modules.module.register_module_forward_hook(halve)
    return lambda side: handle.remove()


PROCESS.add("register_a_global_hook")


# A steering vector. Other ways to hold one are in test_depends.py and test_depends_python.py.


LOCAL = threading.local()
HOLDERS = (  # how a vector is held, and read
    (lambda self, v: self.held.update(v=v), lambda self: self.held["v"]),
    (lambda self, v: setattr(LOCAL, "v", v), lambda self: LOCAL.v),
    (lambda self, v: self.held.update(owner=v, v=weakref.ref(v)), lambda self: self.held["v"]()),
)


class Steer(nn.Module):
    def __init__(self, inner, variant: int):
        super().__init__()
        self.inner, self.held, self.variant = inner, {}, variant
        self.put, self.read = HOLDERS[variant]
        self.put(self, torch.zeros(64))

    def forward(self, x):
        out = self.inner(x)
        return out + self.read(self).to(out)


@action(len(HOLDERS))
def steer(side, variant):
    """A module that adds a vector, and then another vector."""
    layer = side.layers[0]
    if not isinstance(layer.mlp, Steer) or layer.mlp.variant != variant:
        layer.mlp = Steer(layer.mlp, variant).eval()
        return
    seed = side.scratch["steered"] = side.scratch.get("steered", 0) + 1
    layer.mlp.put(layer.mlp, noise(64, seed, 3.0))
