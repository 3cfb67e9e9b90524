"""What a decode graph depends on besides its inputs: torch's settings, the state of the model, and the code that its step ran.

A graph replays launches without running Python, so it is valid only as long as Python would issue the same launches. `State` is
what a step finds in the model: modules and their order, attributes, configurations, hooks, addresses and layouts of tensors.
`Path` (path.py) is the Python code that ran in the rehearsal of a step, and the objects to which its names refer. Code of
trusted packages (`hf.is_trusted`) reads nothing else. Other code may read anything, so a graph of a step that runs such code is
valid for one call of generate().
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from ... import hf, registry
from ...caches import forward
from .path import OF_A_PROMPT, content_of

LIMIT = 20_000  # objects, besides modules, tensors and scalars, in one State
LARGEST = 1 << 20  # bytes of an array that are compared
MARK = "_hf_fastattn_patch"  # the attribute of a patched model that holds its Patch
SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_PROXIES: tuple[type, ...] = (weakref.ProxyType, weakref.CallableProxyType)
PLAIN = (torch.Tensor, torch.nn.Parameter)
_IGNORED = frozenset(vars(torch.nn.Module())) | OF_A_PROMPT
_OF_MODEL = _IGNORED | hf.bookkeeping() | {MARK}
# By class of a descriptor or a wrapper: the function that it runs.
_RUNS = {
    property: "fget",
    staticmethod: "__func__",
    classmethod: "__func__",
    functools.cached_property: "func",
    functools._lru_cache_wrapper: "__wrapped__",
}


_HOLDERS = (types.SimpleNamespace, threading.local, argparse.Namespace, collections.UserList)  # of the standard library


class Uncapturable(Exception):
    """The reason why a step runs uncaptured, a clause for "... runs uncaptured: "."""


class State(NamedTuple):
    """settings: of torch and the backend. values: of the model, with their names between them."""

    settings: tuple[object, ...]
    values: list[object]

    def differs(self, other: State) -> str | None:
        """The name of the first thing that has changed, or None."""
        if self.settings != other.settings:
            return "torch's settings or the backend"
        if self.values is other.values or self.values == other.values:
            return None
        path = name = ""
        for old, new in zip(self.values, other.values, strict=False):
            if type(old) is _Path:
                path = old
            elif type(old) is str:
                name = old
            if old != new:
                return f"{path}.{name}".strip(".") or "the model"
        return "the model's modules"


class _Path(str):
    """The path of a module, before its values."""


def read(model: hf.PreTrainedModel, of_user: bool = False) -> Reader:
    """A reader that has read the present state. Raises Uncapturable if no graph can be captured."""
    if reason := hf.why_not_captured(model):
        raise Uncapturable(reason)
    reader = Reader(model, of_user)
    try:
        reader.modules(model)
    except RecursionError:
        raise Uncapturable(f"{reader.where or 'the model'} refers to objects that are nested too deeply") from None
    if len(reader.devices) > 1:
        raise Uncapturable(f"its weights are on several devices ({', '.join(sorted(map(str, reader.devices)))})")
    return reader


def settings_of(model: hf.PreTrainedModel) -> tuple[object, ...]:
    """Settings of torch and the backend. Raises Uncapturable if they rule graphs out."""
    name = model.config._attn_implementation
    backend = registry.get(name) if name in registry.names() else None
    return *_settings_of_torch(model.device), name, backend, *hf.registered(name)


def ignored(module: torch.nn.Module) -> frozenset[str]:
    """The attributes of a module that no step reads, or that are no plain attributes."""
    return _OF_MODEL if isinstance(module, hf.PreTrainedModel) else _IGNORED


def _same(thing: object) -> object:
    """Equal for one object alone, which is kept alive only if it cannot be referred to weakly."""
    try:
        return id(thing), weakref.ref(thing)  # references are equal if their objects are
    except TypeError:
        return _Held(thing)


class _Held:
    """An object that is compared by identity."""

    def __init__(self, thing: object):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


class Reader:
    """Converts a model to a list of values that compares equal as long as it has not changed.

    found: its modules. tensors: all of them, of a subclass those that it consists of. of_user: what code of the user to which the
    model refers may read or change, as far as its names tell; empty unless `follows`.
    """

    def __init__(self, model: hf.PreTrainedModel, follows: bool = False):
        self.model = model
        self.follows = follows
        self.of_user: list[object] = []
        self.on_gpu = model.device.type != "cpu"
        self.values: list[object] = []
        self.found: list[torch.nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.devices: set[torch.device] = set()
        self.seen: dict[int, int] = {}  # numbers of objects that were visited
        self.kept: list[object] = []  # keeps them alive while their ids are in `seen`
        self.outside: list[torch.nn.Module] = []  # modules that only attributes refer to
        self.where = ""
        self.within = 0  # > 0: within a class, whose code a step may not run

    @property
    def state(self) -> State:
        return State(settings_of(self.model), self.values)

    def modules(self, model: torch.nn.Module) -> None:
        """Read all modules. This runs in every generate(), so it must be fast."""
        values, seen, stack = self.values, self.seen, [("", model)]
        while stack or self.outside:
            path, module = stack.pop() if stack else ("outside the model", self.outside.pop())
            own = vars(module)
            if type(module) in _PROXIES:
                raise Uncapturable(f"{path} is a weak proxy, and what it refers to cannot be compared")
            if isinstance(module, torch.jit.ScriptModule):
                raise Uncapturable(f"{path} is a torch.jit.ScriptModule, whose attributes cannot be compared")
            values += _Path(path), weakref.ref(module), type(module)
            if self.follows:
                self.value(type(module))
            if id(module) in seen:
                continue
            seen[id(module)] = len(seen)
            self.found.append(module)
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                check_hooks(module)
            values.append(module.training)
            if module.training and own.get("gradient_checkpointing"):
                raise Uncapturable("gradient checkpointing is on in training mode; call model.eval()")
            replaced = hf.replaced_in_forward(module)
            for group in (own["_parameters"], own["_buffers"]):
                for name, tensor in group.items():
                    if name not in replaced:
                        values += name, None if tensor is None else self.tensor(tensor)
            skipped = ignored(module)
            if replaced:
                skipped |= replaced
            for name, value in own.items():
                if name not in skipped:
                    if type(value) in SCALARS and value == value:
                        values += name, value
                    else:
                        self.where = f"{path}.{name}"
                        values += name, self.value(value)
            for name, child in own["_modules"].items():
                values.append(name)
                if child is not None:
                    stack.append((f"{path}.{name}" if path else name, child))

    def value(self, value: Any) -> object:
        kind = type(value)
        if kind in SCALARS:
            return value if value == value else "nan"
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        if kind is weakref.ReferenceType:
            return kind, None if value() is None else self.value(value())
        if kind in _PROXIES:
            raise Uncapturable(f"{self.where} is a weak proxy, and what it refers to cannot be compared")
        if isinstance(value, torch.nn.Module):
            self.outside.append(value)
            return _same(value)
        if isinstance(value, types.MethodType):
            return self.value(value.__self__), _same(value.__func__)
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        if len(self.kept) > LIMIT:
            raise Uncapturable(f"{self.where or 'the model'} refers to more objects than can be compared")
        if isinstance(value, (type, types.FunctionType)):
            if self.follows:
                self.within += isinstance(value, type)
                self.of_user += self._of_user(value)
                self.within -= isinstance(value, type)
            code = getattr(value, "__code__", None)
            return _same(value), _same(code), *(_same(content_of(cell)) for cell in getattr(value, "__closure__", None) or ())
        return _same(value) if isinstance(value, types.ModuleType) else self._inside(value)

    def _of_user(self, value: Any) -> Iterator[object]:
        """What a function or a class of the user refers to, by name: a step may change it for the next one."""
        if hf.is_trusted(hf.module_of(value) if isinstance(value, types.FunctionType) else value.__module__):
            return
        if isinstance(value, type):
            yield from map(self.value, value.__bases__)
            yield from ((name, self.value(item)) for name, item in vars(value).items())
            return
        yield from map(self.value, (value.__defaults__, value.__kwdefaults__, vars(value)))
        yield from (self.value(content_of(cell)) for cell in value.__closure__ or ())
        names = _names_in(value.__code__)
        for name in sorted(names & value.__globals__.keys()):
            item = value.__globals__[name]
            yield name, self.value(item)
            if isinstance(item, types.ModuleType) and not hf.is_trusted(item.__name__):
                yield from ((each, self.value(vars(item)[each])) for each in sorted(names & vars(item).keys()))

    def _inside(self, value: Any) -> object:
        kind = type(value)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return kind, *self._each(value)
        if isinstance(value, Mapping):
            return kind, *self._each(chain.from_iterable(value.items()))
        if isinstance(value, functools.partial):
            return self.value(value.func), self.value(value.args), self.value(value.keywords)
        if kind in _RUNS:
            return _same(value), self.value(getattr(value, _RUNS[kind]))
        if isinstance(value, Iterator):
            if self.within:
                return _same(value)
            raise Uncapturable(f"{self.where} refers to an iterator ({kind.__name__}), which a step may advance")
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if kind.__module__.startswith("numpy.random"):
            return _same(value), repr(getattr(getattr(value, "_bit_generator", value), "state", None))
        if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):  # the get of a dict
            owner = value.__self__
            return value.__name__, _same(owner) if isinstance(owner, (types.ModuleType, Iterator)) else self.value(owner)
        if (content := _bytes_of(value)) is not None:
            if len(content) > LARGEST:
                raise Uncapturable(f"{self.where} refers to {len(content)} bytes ({kind.__name__}), too many to compare")
            return _same(value), content
        known = kind.__module__.partition(".")[0] in sys.stdlib_module_names
        if (known and not isinstance(value, _HOLDERS)) or hf.is_mesh(value):
            return _same(value)
        inside = getattr(value, "__dict__", {})
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        found = [*inside.items(), *((name, getattr(value, name, None)) for name in slots)]
        if self.follows:
            self.value(kind)
        return _same(value), *self._each(chain.from_iterable(each for each in found if each[0] != "_name_or_path"))

    def _each(self, values: Iterable[Any]) -> list[object]:
        return [each if type(each) in SCALARS and each == each else self.value(each) for each in values]

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Whether launches take the value of a tensor on the host, not its address."""
        return self.on_gpu and not tensor.shape and tensor.device.type == "cpu"

    def tensor(self, tensor: Any) -> tuple[object, ...]:
        """The address and the layout of a tensor; of a subclass those of the tensors that it consists of."""
        plain = type(tensor) in PLAIN
        if not plain and hf.is_shard(tensor):
            if tensor.device_mesh != hf.tensor_parallel_mesh(self.model):
                raise Uncapturable("a weight is a DTensor that is not from Transformers' tensor parallelism")
            spec = tensor._spec
            return type(tensor), _same(spec), spec.placements, *self.tensor(tensor._local_tensor)  # to_local() takes far longer
        if not plain and hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            parts = [self.tensor(getattr(tensor, name)) for name in names]
            return type(tensor), tensor.shape, tensor.dtype, *parts, self.value(context)
        self.tensors.append(tensor)
        if self.is_number(tensor):
            return tensor.data_ptr(), tensor.dtype, tensor.item()
        self.devices.add(tensor.device)
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            pointer = 0
        if pointer == 0 and (tensor.numel() or tensor.layout != torch.strided):
            raise Uncapturable(f"a weight is a {type(tensor).__name__} on {tensor.device}, which has no address")
        found = pointer, tensor.shape, tensor.stride(), tensor.dtype
        if plain:
            return found
        return type(tensor), *found, *((name, self.value(item)) for name, item in vars(tensor).items())  # bitsandbytes


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that the code of a function, and of functions nested in it, looks up."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _bytes_of(value: Any) -> bytes | None:
    """The content of an array of NumPy, of ctypes or of the standard library; None for other objects."""
    try:
        return memoryview(value).tobytes()
    except (TypeError, ValueError, BufferError):
        return None


def check_hooks(module: torch.nn.Module) -> None:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if not forward.is_ours(hook) and not hf.is_inert_hook(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise Uncapturable(f"{type(module).__name__} has the forward hook {name}, and a graph would not run it")


def _settings_of_torch(device: torch.device) -> tuple[object, ...]:
    api, matmul, cudnn, cuda = torch.nn.modules.module, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    if api._global_forward_hooks or api._global_forward_pre_hooks:
        raise Uncapturable("a global forward hook is registered, and a graph would not run it")
    if torch.is_autocast_enabled(device.type):
        raise Uncapturable("autocast is on, and its copies of the weights are temporary")
    if torch._C._len_torch_dispatch_stack():
        raise Uncapturable("a dispatch mode of torch is active, and a graph would not pass through it")
    modes = torch.overrides._get_current_function_mode_stack()
    if not all(isinstance(mode, DeviceContext) for mode in modes):
        raise Uncapturable("a function mode of torch is active, and a graph would not pass through it")
    return (
        *(mode.device for mode in modes),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _mixed(torch.get_float32_matmul_precision),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _mixed(lambda: matmul.allow_tf32),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        cuda.preferred_blas_library(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        _mixed(lambda: cudnn.allow_tf32),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _mixed(get: Callable[[], object]) -> object:
    """A setting; where torch refuses to tell it, as one of `fp32_precision` was set, all of these."""
    try:
        return get()
    except RuntimeError:
        return [
            getattr(each, "fp32_precision", None) for each in (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn)
        ]
