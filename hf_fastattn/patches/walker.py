"""Walks over a model's modules and the objects that they refer to, and converts them to values that can be compared."""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch

from .. import hf, registry
from ..caches import forward
from .code import (
    attributes_of,
    bytes_of,
    globals_in,
    imported_by,
    is_installed,
    is_library,
    is_of_library,
    is_of_package,
    looked_up_by_text,
    modules_within,
    names_in,
    run_by,
    runs_own_code,
    state_of,
    words_in,
)
from .fingerprint import Record, Uncapturable

LIMIT = 4000  # number of objects, besides modules, tensors and scalars, in one fingerprint
OF_A_WEIGHT = 16  # further ones for each tensor of a subclass: what describes a quantised weight
SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
LARGEST = 64 << 20  # bytes of an array, or of another object with memory of its own, that are read in each comparison
PROXIES: tuple[type, ...] = (weakref.ProxyType, weakref.CallableProxyType)
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | {"_is_hf_initialized"}
_BASES = frozenset({object, torch.nn.Module, hf.PreTrainedModel, *hf.PreTrainedModel.__mro__})
_MISSING = object()
MARK = "_hf_fastattn_patch"  # the attribute of a patched model that holds its Patch

Values = tuple[object, ...]


class Walker:
    """Converts objects to values that compare equal as long as the objects have not changed."""

    def __init__(self, device: torch.device, mesh: Callable[[], Any] = lambda: None):
        self.device = device
        self._mesh = mesh
        self.held: list[object] = []
        self.devices: set[torch.device] = set()
        self.seen: dict[int, str] = {}  # id of a visited object: where it was
        self.counts: collections.Counter[str] = collections.Counter()
        self.lenient = 0  # > 0: within the class of an object, whose methods a step may not run
        self.kept: list[object] = []  # keeps visited objects alive while their ids are in `seen`
        self.configs: list[hf.PreTrainedConfig] = []
        self.classes: dict[type, tuple[Values, frozenset[str]]] = {}  # results of known()
        self.outside: list[torch.nn.Module] = []  # modules that only attributes and functions refer to
        self.read: set[tuple[int, str]] = set()  # (id of a user's file, name) of values that functions look up
        self.left = LIMIT
        self.where = ""
        self.found: list[torch.nn.Module] = []  # all modules visited, in order
        self.tensors: list[torch.Tensor] = []  # all visited, of a subclass those that it consists of
        self.functions: list[types.FunctionType] = []  # of libraries
        self.bases: list[type] = []  # classes of libraries
        self.foreign = False  # whether a function or a class was visited that is not of a library

    @functools.cached_property
    def mesh(self) -> Any:
        """That of the ranks that share the model, or None."""
        return self._mesh()

    def same(self, thing: object) -> int:
        """A number unique to this object."""
        try:
            ref: object = weakref.ref(thing)
        except TypeError:  # no weak references: such small objects are kept alive
            ref = thing
        self.held.append(ref)
        return id(ref)

    def backend(self, name: str) -> Values:
        chosen = registry.get(name) if name in registry.names() else None
        return name, self.same(chosen), *(self.same(function) for function in hf.registered(name))

    # ---- modules ----

    def modules(self, model: torch.nn.Module) -> list[Record]:
        records = self._records("", model)
        while self.outside:
            records += self._records("outside the model", self.outside.pop())
        return records + self.configurations()

    def configurations(self) -> list[Record]:
        """A record of each configuration that was visited."""
        records: list[Record] = []
        while len(records) < len(self.configs):  # a configuration may hold others
            config = self.configs[len(records)]
            self.where = type(config).__name__
            fields = {name: self.value(value) for name, value in vars(config).items() if name != "_name_or_path"}
            records.append(Record(self.where, (len(records) + 1,), fields))
        return records

    def _records(self, root: str, top: torch.nn.Module) -> list[Record]:
        """A record of each module from `top` on. It runs for every module in every generate(), so it must be fast."""
        records, seen, held, classes = [], self.seen, self.held, self.classes
        for path, module in tree(root, top):
            values, cls = vars(module), type(module)
            if cls in PROXIES:
                raise Uncapturable(f"{path} is a weak proxy, and what it refers to cannot be compared")
            ref = weakref.ref(module)
            held.append(ref)
            if id(module) in seen:
                records.append(Record(path, (id(ref),), {}))  # visited at another path
                continue
            seen[id(module)] = path
            self.found.append(module)
            if cls not in classes:
                classes[cls] = self.known(cls)
            known, skipped = classes[cls]
            if values["_forward_hooks"] or values["_forward_pre_hooks"]:
                check_hooks(module)
            training = values.get("training")
            if training is None:
                training = module.training  # a property of a compiled module
            if training and values.get("gradient_checkpointing"):
                raise Uncapturable("gradient checkpointing is on in training mode; call model.eval()")
            fixed = [id(ref), known, training, *values["_modules"]]
            for group in (values["_parameters"], values["_buffers"]):
                for name, tensor in group.items():
                    fixed += name, None if tensor is None else self.tensor(tensor)
                    if tensor is not None:
                        self.devices.add(tensor.device)
            attributes = {name: value for name, value in values.items() if name not in skipped}
            for name, value in attributes.items():
                if type(value) not in SCALARS or value != value:
                    self.where = f"{path}.{name}".lstrip(".")
                    attributes[name] = self.value(value)
            records.append(Record(path, tuple(fixed), attributes))
        return records

    def known(self, cls: type) -> tuple[Values, frozenset[str]]:
        """(the values of a class, names of module attributes to ignore)."""
        self.where = cls.__name__
        ours = hf.bookkeeping() | {MARK} if issubclass(cls, hf.PreTrainedModel) else frozenset()
        return self._class(cls), MODULE_ATTRIBUTES | ours

    def _class(self, cls: type) -> Values:
        found: list[object] = [self.same(cls)]
        for base in cls.__mro__:
            if base in _BASES:
                continue
            ours = is_of_package(base)
            self.bases.append(base)
            self.foreign |= not ours
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    followed = name == "forward" or not (ours and is_of_library(value))
                    found += name, self.function(value) if followed else self.same(value)
                elif type(value) in SCALARS:
                    found += name, value
                elif not name.startswith("__"):
                    followed = not ours or runs_own_code(value)
                    found += name, self.value(value) if followed else self.same(value)
        if self.foreign and not is_installed(type(cls).__module__):
            found.append(self.value(type(cls)))
        return tuple(found)

    def _kind(self, value: object) -> Values:
        """The class of an object. That of a user's is followed, with the attributes of the object."""
        cls = type(value)
        if is_installed(cls.__module__):
            return (self.same(cls),)
        self.lenient += 1
        followed = self.value(cls)
        self.lenient -= 1
        return self.same(cls), followed, *((name, self.value(item)) for name, item in attributes_of(value))

    # ---- values ----

    def value(self, value: object) -> object:
        """A value for any object, equal to its earlier value if it has not changed."""
        kind = type(value)
        if kind in SCALARS:
            return value if value == value else "nan"
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        if kind in PROXIES:
            raise Uncapturable(f"{self.where} is a weak proxy, and what it refers to cannot be compared")
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, types.ModuleType) or (isinstance(value, type) and is_of_package(value)):
            return self.same(value)
        if isinstance(value, torch.nn.Module):
            self.outside.append(value)
            return self.same(value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        self._visited(value)
        if isinstance(value, hf.PreTrainedConfig):
            self.configs.append(value)
            return self.same(value) if is_installed(kind.__module__) else (self.same(value), self.value(kind))
        self.left -= 1
        if not self.left:
            raise Uncapturable(f"{self.where or 'the model'} has attributes that refer to more objects than can be compared")
        return self._inside(value)

    def _inside(self, value: Any) -> object:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return "method", self.value(value.__self__), self.value(value.__func__)
        if (parts := run_by(value)) is not None:
            return *self._kind(value), *map(self.value, parts)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList, collections.UserString)):
            return *self._kind(value), *(self.value(item) for item in value)
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            return self.same(value), *map(self.value, value)
        if (state := state_of(value)) is not None:  # that of random numbers
            return self.same(value), state
        if isinstance(value, Mapping):
            factory = self.value(value.default_factory if isinstance(value, collections.defaultdict) else None)
            return *self._kind(value), factory, *((self.value(key), self.value(item)) for key, item in value.items())
        if (content := bytes_of(value)) is not None:
            if content.nbytes > LARGEST and content.readonly:
                return *self._kind(value), self.same(value)
            if content.nbytes > LARGEST:
                raise Uncapturable(f"{self.where} refers to {content.nbytes} bytes ({type(value).__name__}), too many to compare")
            if content.format == "O":
                return *self._kind(value), self.value(value.tolist())
            return *self._kind(value), self.same(value), zlib.crc32(content if content.c_contiguous else content.tobytes("A"))
        if isinstance(value, contextvars.ContextVar):
            return self.same(value), self.value(value.get(None))
        if isinstance(value, Iterator):
            if self.lenient:
                return self.same(value)
            raise Uncapturable(f"{self.where} refers to an iterator ({type(value).__name__}), which a step may advance")
        if not is_installed(type(value).__module__):
            return *self._kind(value), self.same(value)
        found: list[object] = [self.same(type(value)), self.same(value)]
        if (
            isinstance(value, (types.SimpleNamespace, threading.local))
            or type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
        ):
            for name, item in attributes_of(value):
                found += name, self.value(item)
        return tuple(found)

    def tensor(self, tensor: torch.Tensor) -> Values:
        """The address and the layout of a tensor."""
        if type(tensor) not in PLAIN_TENSORS:
            return self._subclass(tensor)
        pointer, shape = self._address(tensor), tensor.shape
        if not shape and self.device.type != "cpu" and tensor.device.type == "cpu":
            return pointer, tensor.dtype, tensor.item()  # a launch takes its value, not its address
        return pointer, shape, tensor.stride(), tensor.dtype

    def _address(self, tensor: torch.Tensor) -> int:
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            pointer = 0
        if pointer == 0 and (tensor.numel() or tensor.layout != torch.strided):
            raise Uncapturable(f"a weight is a {type(tensor).__name__} on {tensor.device}, which has no address")
        self.tensors.append(tensor)
        return pointer

    def _subclass(self, tensor: torch.Tensor) -> Values:
        """A tensor of a subclass, by the tensors that it consists of."""
        found: list[object] = [self.same(type(tensor)), tensor.shape, tensor.dtype]
        if hf.is_shard(tensor):
            return self._shard(tensor)
        self.left += OF_A_WEIGHT
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            found += [self.tensor(getattr(tensor, name)) for name in names]
            return *found, self.value(context)
        found += [self._address(tensor), tensor.stride()]
        for name, item in vars(tensor).items():  # bitsandbytes stores the scales of a weight here
            found += name, self.value(item)
        return tuple(found)

    def _shard(self, tensor: Any) -> Values:
        """A DTensor of tensor parallelism, by the part that this rank holds."""
        if self.mesh is None or tensor.device_mesh != self.mesh:
            raise Uncapturable("a weight is a DTensor that is not from Transformers' tensor parallelism")
        with torch.no_grad():
            return self.same(type(tensor)), tensor.shape, str(tensor.placements), *self.tensor(tensor.to_local())

    # ---- functions ----

    def function(self, function: types.FunctionType) -> Values:
        """A function with its closure, its defaults and the globals that its code uses."""
        ours = is_of_library(function)
        self.foreign |= not ours
        if self._visited(function):
            return (self.same(function),)
        found: list[object] = [self.same(function), self.same(function.__code__)]
        self.functions.append(function)
        value_of = self._shallow if ours else self.value
        for cell in function.__closure__ or ():
            try:
                found.append(value_of(cell.cell_contents))
            except ValueError:  # an empty cell
                found.append(None)
        found += [value_of(value) for value in (function.__defaults__ or ())]
        found += [(name, value_of(value)) for name, value in (function.__kwdefaults__ or {}).items()]
        names = function.__globals__
        for name in names_in(function.__code__) if ours else globals_in(function.__code__):
            value = names.get(name, _MISSING)
            if value is not _MISSING:
                found += name, value_of(value)
            if isinstance(value, types.ModuleType) and not ours:
                found += self._file(value, words_in(function.__code__))
        if ours:
            for space, inner in modules_within(names, names_in(function.__code__)):
                found += [(name, self.same(space[name])) for name in inner if name in space]
        if not ours:
            for module in imported_by(function):
                found += self._file(module, words_in(function.__code__))
            found += [(name, self.value(value)) for name, value in (*vars(function).items(), *looked_up_by_text(function))]
        return tuple(found)

    def _file(self, module: types.ModuleType, names: tuple[str, ...]) -> list[object]:
        """The values of these names in a module of the user's."""
        found: list[object] = []
        if is_library(module.__name__) or (self.lenient and is_installed(module.__name__)):
            return found
        for name in names:
            if name in vars(module) and (id(module), name) not in self.read:
                self.read.add((id(module), name))
                value = vars(module)[name]
                found += name, self.value(value)
                if isinstance(value, types.ModuleType):
                    found += self._file(value, names)
        return found

    def _shallow(self, value: object) -> object:
        """An object that a function of a library refers to: functions are followed, other objects compared by identity."""
        if type(value) in SCALARS:
            return value if value == value else "nan"
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, torch.nn.Module):
            self.outside.append(value)
        return self.same(value)

    def _visited(self, thing: object) -> bool:
        """Whether this object was already visited in this walk; marks it as visited."""
        if id(thing) in self.seen:
            return True
        self.counts[self.where] += 1  # objects at one place are told apart by their order
        self.seen[id(thing)] = f"{self.where}#{self.counts[self.where]}"
        self.kept.append(thing)
        return False


def tree(root: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model and all its submodules with their paths. A module at two paths is returned twice."""
    stack = [(root, model)]
    visited = set()
    while stack:
        path, module = stack.pop()
        yield path, module
        children = vars(module)["_modules"]
        if children and id(module) not in visited:
            visited.add(id(module))
            prefix = path and path + "."
            stack += [(prefix + name, child) for name, child in children.items() if child is not None]


def check_hooks(module: torch.nn.Module) -> None:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if not forward.is_ours(hook) and not hf.is_inert_hook(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise Uncapturable(f"{type(module).__name__} has the forward hook {name}, and a graph would not run it")
