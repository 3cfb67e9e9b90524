"""Steps of tests/state.py that change the Python code of a model: functions, hooks, and the data that they read."""

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from functools import partial
from operator import setitem

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


def _reading(kind: int, old):
    """A forward() that multiplies by a number that it reads, and a function that changes the number."""
    if kind in (0, 1, 4):
        held, key = ([1.0], 0) if kind == 0 else ({"by": torch.tensor(1.0) if kind == 4 else 1.0}, "by")
        return lambda x: held[key] * old(x), lambda by: setitem(held, key, torch.tensor(by) if kind == 4 else by)
    if kind == 2:
        held = Scaled(old, 1.0)
        return held, partial(setattr, held, "by")
    if kind == 3:
        held = partial(scaled, old, by=1.0)
        return held, partial(setitem, held.keywords, "by")
    by = 1.0

    def change(value):
        nonlocal by
        by = value

    return lambda x: by * old(x), change


@action(6)
def change_what_a_forward_reads(side, variant):
    """A list, a dict, an object, a partial, a tensor in a dict, a cell."""
    mlp, number = side.layers[1].mlp, ("read", variant)
    if number not in side.scratch:
        mlp.forward, change = _reading(variant, _own(mlp))
        side.scratch[number] = [change, 1.0]
        return
    side.scratch[number][1] += 1.5
    change, by = side.scratch[number]
    change(by)


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


@action(3)
def count_in_a_forward(side, variant):
    """The result of a step depends on the number of steps, which no graph can capture."""
    mlp = side.layers[1].mlp
    old = _own(mlp)
    if variant == 0:
        mlp.calls = 0

        def forward(x):
            mlp.calls += 1
            return old(x) / mlp.calls
    elif variant == 1:
        calls = itertools.count(1)

        def forward(x):
            return old(x) / next(calls)
    else:
        calls = []

        def forward(x):
            calls.append(0)
            return old(x) if len(calls) % 3 else -old(x)

    mlp.forward = forward
    return lambda side: vars(side.layers[1].mlp).pop("forward", None)


@action(2)
def change_a_function_of_a_file(side, variant):
    """Replace a function of Transformers that a forward() finds by its name."""
    file = sys.modules[type(side.layers[0].self_attn).__module__]
    name = ("apply_rotary_pos_emb", "rotate_half")[variant]
    if hasattr(getattr(file, name), "before"):
        return lambda side: None
    before = getattr(file, name)

    def other(*args, **kwargs):
        out = before(*args, **kwargs)
        return -out if isinstance(out, torch.Tensor) else (out[0] * 2, out[1])

    other.before = before
    setattr(file, name, other)
    return lambda side: setattr(file, name, before)


PROCESS.add("change_a_function_of_a_file")

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


# Steering vectors, stored in many ways


@dataclass
class Held:
    v: object


@dataclass
class Slots:
    __slots__ = ("v",)
    v: object


class Settings:
    v = torch.zeros(1)


@dataclass
class Behind:
    """v is a property over another attribute."""

    _kept: object

    @property
    def v(self):
        return self._kept


def _two_deep(v):
    inner = lambda: v  # noqa: E731
    return lambda: inner()


VECTOR = torch.zeros(1)
FILE = types.ModuleType("file_of_settings")
VARIABLE: contextvars.ContextVar = contextvars.ContextVar("vector")
LOCAL = threading.local()
# How a module holds a vector: what it keeps (None if it is kept elsewhere), and how its forward() reads it.
HOLDERS = {
    "dict": (lambda self, v: {"v": v}, lambda self: self.held["v"]),
    "list": (lambda self, v: [v], lambda self: self.held[0]),
    "tuple": (lambda self, v: (v, 1), lambda self: self.held[0]),
    "dataclass": (lambda self, v: Held(v), lambda self: self.held.v),
    "attribute": (lambda self, v: v, lambda self: self.held),
    "buffer": (lambda self, v: self.register_buffer("held", v), lambda self: self.held),
    "closure": (lambda self, v: lambda: v, lambda self: self.held()),
    "partial": (lambda self, v: partial(torch.clone, v), lambda self: self.held()),
    "nested": (lambda self, v: {"a": [{"b": (Held(v),)}]}, lambda self: self.held["a"][0]["b"][0].v),
    "namespace": (lambda self, v: types.SimpleNamespace(v=v), lambda self: self.held.v),
    "default": (lambda self, v: lambda v=v: v, lambda self: self.held()),
    "number in a list": (lambda self, v: [v[0].item()], lambda self: self.held[0]),
    "number in an object": (lambda self, v: Held(v[0].item()), lambda self: self.held.v),
    "method": (lambda self, v: v.clone, lambda self: self.held()),
    "global": (lambda self, v: globals().update(VECTOR=v), lambda self: VECTOR),
    "numpy": (lambda self, v: v.numpy(), lambda self: torch.from_numpy(self.held)),
    "set of names": (lambda self, v: {str(v[0].item())}, lambda self: float(next(iter(self.held)))),
    "file of settings": (lambda self, v: setattr(FILE, "v", v), lambda self: FILE.v),
    "class of settings": (lambda self, v: setattr(Settings, "v", v), lambda self: Settings.v),
    "context variable": (lambda self, v: VARIABLE.set(v) and None, lambda self: VARIABLE.get()),
    "thread local": (lambda self, v: setattr(LOCAL, "v", v), lambda self: LOCAL.v),
    "weak reference": (lambda self, v: vars(self).update(owner=v) or weakref.ref(v), lambda self: self.held()),
    "own dict": (lambda self, v: v, lambda self: vars(self)["held"]),
    "closure two deep": (lambda self, v: _two_deep(v), lambda self: self.held()),
    "property": (lambda self, v: Behind(v), lambda self: self.held.v),
    "slots": (lambda self, v: Slots(v), lambda self: self.held.v),
    "class attribute": (lambda self, v: setattr(type(self), "of_all", v), lambda self: self.of_all),
}


class Steer(nn.Module):
    """Adds a vector to the output of a module."""

    def __init__(self, inner, how: str):
        super().__init__()
        self.inner, self.how = inner, how
        self.hold, self.read = HOLDERS[how]
        self.put(torch.zeros(64))

    def put(self, v):
        held = self.hold(self, v)
        if held is not None:
            self.held = held

    def forward(self, x):
        out, v = self.inner(x), self.read(self)
        return out + (v.to(out) if isinstance(v, torch.Tensor) else v)


def _next_vector(side):
    seed = side.scratch["steered"] = side.scratch.get("steered", 0) + 1
    return noise(64, seed, 3.0)


@action(len(HOLDERS))
def steer(side, variant):
    """A module that stores a vector in one of many ways, and then another vector."""
    layer, how = side.layers[0], [*HOLDERS][variant]
    if not isinstance(layer.mlp, Steer) or layer.mlp.how != how:
        layer.mlp = Steer(layer.mlp, how).eval()
    else:
        layer.mlp.put(_next_vector(side))


CHANGED = {  # in the content of a container: another tensor or number, and for a tensor alone its values
    "dict": lambda held, v: setitem(held, "v", v),
    "list": lambda held, v: setitem(held, 0, v),
    "dataclass": lambda held, v: setattr(held, "v", v),
    "namespace": lambda held, v: setattr(held, "v", v),
    "nested": lambda held, v: setattr(held["a"][0]["b"][0], "v", v),
    "numpy": lambda held, v: setitem(held, slice(None), v.numpy()),
    "number in a list": lambda held, v: setitem(held, 0, v[0].item()),
    "number in an object": lambda held, v: setattr(held, "v", v[0].item()),
    "attribute": lambda held, v: held.copy_(v),
    "buffer": lambda held, v: held.copy_(v),
}


@action(len(HOLDERS))
def replace_what_a_container_holds(side, variant):
    mlp = side.layers[0].mlp
    if isinstance(mlp, Steer) and mlp.how in CHANGED:
        CHANGED[mlp.how](mlp.held, _next_vector(side))
