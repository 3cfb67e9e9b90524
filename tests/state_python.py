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

import torch
from state import PROCESS, action
from state_model import noise
from torch import nn

# Functions on instances


def negated(old):
    return lambda *args, **kwargs: -old(*args, **kwargs)


class Scaled:
    def __init__(self, old, by):
        self.old, self.by = old, by

    def __call__(self, x):
        return self.by * self.old(x)

    def method(self, x):
        return self.by * self.old(x)


def scaled(old, x, *, by):
    return by * old(x)


def _scale_forward(module, by, kind: int):
    """Set a forward() on an instance that multiplies by `by`, which is stored in one of several ways."""
    old = type(module).forward.__get__(module)
    if kind == 0:
        module.forward = lambda x: by * old(x)
    elif kind == 1:
        module.forward = functools.partial(scaled, old, by=by)
    elif kind == 2:
        module.forward = Scaled(old, by)
    elif kind == 3:
        module.forward = Scaled(old, by).method
    else:
        module.forward = types.MethodType(lambda self, x, by=by: by * old(x), module)


@action(10)
def set_forward(side, variant):
    """And delete it, so that the next function may get the same address."""
    layer = variant % 2
    _scale_forward(side.layers[layer].mlp, 3.0, variant // 2)

    def undo(side):
        vars(side.layers[layer].mlp).pop("forward", None)

    return undo


@action(10)
def set_another_forward(side, variant):
    """Deleted before the next one is created, as by the context manager of an ablation."""
    mlp = side.layers[1].mlp
    vars(mlp).pop("forward", None)
    factor = side.scratch["factor"] = side.scratch.get("factor", 1.0) + 2.0
    _scale_forward(mlp, factor, variant // 2)


@action(6)
def change_what_a_forward_reads(side, variant):
    mlp = side.layers[1].mlp
    key = ("list", "dict", "object", "partial", "tensor", "cell")[variant]
    old = type(mlp).forward.__get__(mlp)
    if key not in side.scratch:
        if key == "list":
            held = [1.0]
            mlp.forward = lambda x: held[0] * old(x)
        elif key == "dict":
            held = {"by": 1.0}
            mlp.forward = lambda x: held["by"] * old(x)
        elif key == "object":
            held = mlp.forward = Scaled(old, 1.0)
        elif key == "partial":
            held = mlp.forward = functools.partial(scaled, old, by=1.0)
        elif key == "tensor":
            held = {"by": torch.tensor(1.0)}
            mlp.forward = lambda x: held["by"] * old(x)
        else:
            by = 1.0

            def forward(x):
                return by * old(x)

            def held(value):
                nonlocal by
                by = value

            mlp.forward = forward
        side.scratch[key] = [held, 1.0]
        return
    entry = side.scratch[key]
    entry[1] += 1.5
    held, by = entry
    if key == "list":
        held[0] = by
    elif key == "dict":
        held["by"] = by
    elif key == "object":
        held.by = by
    elif key == "partial":
        held.keywords["by"] = by
    elif key == "tensor":
        held["by"] = torch.tensor(by)
    else:
        held(by)


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

    def undo(side):
        vars(side.model).pop("forward", None)

    return undo


@action(3)
def count_in_a_forward(side, variant):
    """The result of a step depends on the number of steps, which no graph can capture."""
    mlp = side.layers[1].mlp
    old = type(mlp).forward.__get__(mlp)
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


def _hook(side, variant):
    module = (side.layers[0].mlp, side.model.model.norm, side.model.lm_head)[variant % 3]
    kind = variant // 3
    if kind == 0:
        return module.register_forward_hook(_halve)
    if kind == 1:
        return module.register_forward_hook(_halve_with_kwargs, with_kwargs=True, prepend=True)
    if kind == 2:
        return module.register_forward_pre_hook(_halve_input)
    return module.register_forward_hook(functools.partial(_halve), always_call=True)


@action(12)
def register_a_hook(side, variant):
    handle = _hook(side, variant)
    return lambda side: handle.remove()


@action(2)
def register_a_global_hook(side, variant):
    def halve(module, args, out):
        return out / 2 if any(module is layer.mlp for layer in side.layers) else None

    def halve_input(module, args):
        return (args[0] / 2,) if any(module is layer.mlp for layer in side.layers) else None

    if variant:
        handle = nn.modules.module.register_module_forward_pre_hook(halve_input)
    else:
        handle = nn.modules.module.register_module_forward_hook(halve)
    return lambda side: handle.remove()


PROCESS.add("register_a_global_hook")


# Steering vectors, stored in many ways


@dataclass
class Held:
    v: object


class Slots:
    __slots__ = ("v",)


class Settings:
    v = torch.zeros(1)


class Behind:
    """v is a property over another attribute."""

    @property
    def v(self):
        return self._kept


VECTOR = torch.zeros(1)
FILE = types.ModuleType("file_of_settings")
VARIABLE: contextvars.ContextVar = contextvars.ContextVar("vector")
LOCAL = threading.local()


def _from_file():
    return FILE.v


def _from_class():
    return Settings.v


HOLDERS = (
    "dict", "list", "tuple", "dataclass", "attribute", "buffer", "closure", "partial", "nested", "namespace", "default",
    "number in a list", "number in an object", "method", "global", "numpy", "set of names", "file of settings",
    "class of settings", "context variable", "thread local", "weak reference", "own dict", "closure two deep", "property",
    "slots", "class attribute",
)  # fmt: skip


class Steer(nn.Module):
    """Adds a vector to the output of a module."""

    def __init__(self, inner, how: str):
        super().__init__()
        self.inner, self.how = inner, how
        self.enabled = True
        self.put(torch.zeros(64))

    def put(self, v):
        how = self.how
        if how == "dict":
            self.held = {"v": v}
        elif how == "list":
            self.held = [v]
        elif how == "tuple":
            self.held = (v, 1)
        elif how == "dataclass":
            self.held = Held(v)
        elif how == "nested":
            self.held = {"a": [{"b": (Held(v),)}]}
        elif how == "namespace":
            self.held = types.SimpleNamespace(v=v)
        elif how == "attribute":
            self.held = v
        elif how == "buffer":
            self.register_buffer("held", v)
        elif how == "closure":
            self.held = lambda x: x + v
        elif how == "default":
            self.held = lambda x, v=v: x + v
        elif how == "partial":
            self.held = functools.partial(torch.add, v)
        elif how == "method":
            self.held = v.add
        elif how == "number in a list":
            self.held = [v[0].item()]
        elif how == "number in an object":
            self.held = Held(v[0].item())
        elif how == "global":
            globals()["VECTOR"] = v
        elif how == "numpy":
            self.held = v.numpy()
        elif how == "set of names":
            self.held = {str(v[0].item())}
        elif how == "file of settings":
            FILE.v = v
        elif how == "class of settings":
            Settings.v = v
        elif how == "context variable":
            VARIABLE.set(v)
        elif how == "thread local":
            LOCAL.v = v
        elif how == "weak reference":
            self.owner, self.held = v, weakref.ref(v)
        elif how == "own dict":
            self.held = v
        elif how == "closure two deep":
            add = lambda x: x + v  # noqa: E731
            self.held = lambda x: add(x)
        elif how == "property":
            self.held = Behind()
            self.held._kept = v
        elif how == "slots":
            self.held = Slots()
            self.held.v = v
        elif how == "class attribute":
            type(self).of_all = v

    def forward(self, x):
        out, how = self.inner(x), self.how
        if how == "dict":
            return out + self.held["v"].to(out)
        if how in ("list", "tuple", "number in a list"):
            v = self.held[0]
        elif how in ("dataclass", "namespace", "number in an object", "property", "slots"):
            v = self.held.v
        elif how == "nested":
            v = self.held["a"][0]["b"][0].v
        elif how in ("attribute", "buffer"):
            v = self.held
        elif how == "global":
            v = VECTOR
        elif how == "file of settings":
            v = _from_file()
        elif how == "class of settings":
            v = _from_class()
        elif how == "context variable":
            v = VARIABLE.get()
        elif how == "thread local":
            v = LOCAL.v
        elif how == "weak reference":
            v = self.held()
        elif how == "own dict":
            v = vars(self)["held"]
        elif how == "class attribute":
            v = self.of_all
        elif how == "numpy":
            v = torch.from_numpy(self.held)
        elif how == "set of names":
            v = float(next(iter(self.held)))
        else:
            return self.held(out.float()).to(out)
        return out + (v.to(out) if isinstance(v, torch.Tensor) else v)


@action(len(HOLDERS))
def steer(side, variant):
    """A module that stores a vector in one of many ways, and then another vector."""
    layer = side.layers[0]
    if not isinstance(layer.mlp, Steer) or layer.mlp.how != HOLDERS[variant]:
        layer.mlp = Steer(layer.mlp, HOLDERS[variant]).eval()
        return
    seed = side.scratch["steered"] = side.scratch.get("steered", 0) + 1
    layer.mlp.put(noise(64, seed, 3.0))


@action(len(HOLDERS))
def replace_what_a_container_holds(side, variant):
    """Replace the content of a container by another tensor."""
    mlp = side.layers[0].mlp
    if not isinstance(mlp, Steer):
        return
    seed = side.scratch["steered"] = side.scratch.get("steered", 0) + 1
    v = noise(64, seed, 3.0)
    if mlp.how == "dict":
        mlp.held["v"] = v
    elif mlp.how == "list":
        mlp.held[0] = v
    elif mlp.how in ("dataclass", "namespace"):
        mlp.held.v = v
    elif mlp.how == "nested":
        mlp.held["a"][0]["b"][0].v = v
    elif mlp.how == "numpy":
        mlp.held[:] = v.numpy()
    elif mlp.how == "number in a list":
        mlp.held[0] = v[0].item()
    elif mlp.how == "number in an object":
        mlp.held.v = v[0].item()
    elif mlp.how in ("attribute", "buffer"):
        mlp.held.copy_(v)
