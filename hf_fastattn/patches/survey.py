"""What a decode graph depends on besides its inputs: a fingerprint of the model and of torch's settings.

A graph replays launches without running Python, so it is valid only while Python would launch the same. The fingerprint decides
this without running the model: modules and their order, classes and the functions that their forward() reaches,
addresses and layouts of tensors, values of attributes and configurations, and torch's settings. It is taken once per generate().

Nothing is remembered by id() alone: a fingerprint holds a weak reference to each object that it tells apart by identity, so that
a new object at an old address is not taken for the old one. It keeps alive only what has no weak references.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .. import hf, registry
from ..caches import forward

LIMIT = 4000  # objects beside modules, tensors and scalars that one fingerprint looks at
SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "hf_fastattn", "triton", *sys.stdlib_module_names})
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | {"_is_hf_initialized"}
_BASES = frozenset({object, torch.nn.Module, hf.PreTrainedModel, *hf.PreTrainedModel.__mro__})
_MISSING = object()
MARK = "_hf_fastattn_patch"  # the attribute of a patched model that holds its Patch


class Uncapturable(Exception):
    """Why a step runs uncaptured, as a clause that follows "runs uncaptured: "."""


class Record(NamedTuple):
    """One module: its path, what always counts, and its plain attributes, which count where a step reads them."""

    path: str
    fixed: tuple
    attributes: dict[str, object]


class Fingerprint(NamedTuple):
    """What a graph depends on. Two are of the same model in the same state where `differences` finds none."""

    settings: tuple
    modules: list[Record]
    held: list  # weak references whose ids stand in the other two

    def differences(self, other: Fingerprint, unread: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
        """What has changed, by name; attributes in `unread`, pairs of path and name, do not count."""
        found = [] if self.settings == other.settings else ["torch's settings or the backend"]
        if self.modules == other.modules:
            return found
        if [record.path for record in self.modules] != [record.path for record in other.modules]:
            return [*found, "the model's modules"]
        for old, new in zip(self.modules, other.modules, strict=True):
            if old == new:
                continue
            if old.fixed != new.fixed:
                found.append(old.path or "the model")
            for name in old.attributes.keys() | new.attributes.keys():
                changed = old.attributes.get(name, _MISSING) != new.attributes.get(name, _MISSING)
                if changed and (old.path, name) not in unread:
                    found.append(f"{old.path}.{name}".lstrip("."))
        return found


def survey(model: hf.PreTrainedModel) -> Fingerprint:
    """The model's fingerprint now. Raises Uncapturable for what no graph can hold."""
    module_api = torch.nn.modules.module
    if module_api._global_forward_hooks or module_api._global_forward_pre_hooks:
        raise Uncapturable("a global forward hook is registered, and a graph would not run it")
    if torch.is_autocast_enabled(model.device.type):
        raise Uncapturable("autocast is on, and its copies of the weights do not outlive it")
    if torch._C._len_torch_dispatch_stack():
        raise Uncapturable("a dispatch mode of torch is active, and a graph would not pass through it")
    walker = _Walker(model.device)
    with _lock:
        modules = walker.modules(model)
    if len(walker.devices) > 1:
        raise Uncapturable(f"its weights are on several devices ({', '.join(sorted(map(str, walker.devices)))})")
    return Fingerprint((*_settings(), *walker.backend(model.config._attn_implementation)), modules, walker.held)


def _settings() -> tuple:
    """Torch's settings that choose kernels or dtypes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        torch.backends.cuda.preferred_blas_library(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


class _Walker:
    """Turns what it meets into values that compare equal as long as nothing has changed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.held: list = []
        self.devices: set[torch.device] = set()
        self.seen: dict[int, str] = {}  # id of what was looked at: where
        self.kept: list = []  # what has no other owner while ids of it are in `seen`
        self.configs: list = []
        self.classes: dict[type, tuple] = {}  # (what is known of it, attributes of its modules that do not count)
        self.outside: list[torch.nn.Module] = []  # modules that attributes and functions refer to
        self.left = LIMIT
        self.where = ""

    def same(self, thing) -> int:
        """A number unique to this object."""
        try:
            ref = weakref.ref(thing)
        except TypeError:  # it has no weak references: what is so small is held instead
            ref = thing
        self.held.append(ref)
        return id(ref)

    def backend(self, name: str) -> tuple:
        chosen = registry.get(name) if name in registry.names() else None
        return name, self.same(chosen), *(self.same(function) for function in hf.registered(name))

    # ---- modules ----

    def modules(self, model: torch.nn.Module) -> list[Record]:
        records = self._records("", model)
        while self.outside:
            records += self._records("outside the model", self.outside.pop())
        done = 0
        while done < len(self.configs):  # a configuration may hold others
            config = self.configs[done]
            done += 1
            self.where = type(config).__name__
            fields = {name: self.value(value) for name, value in vars(config).items() if name != "_name_or_path"}
            records.append(Record(self.where, (done,), fields))
        return records

    def _records(self, root: str, top: torch.nn.Module) -> list[Record]:
        """A record of each module from `top` on; this runs once per module and generate(), and is kept short."""
        records, seen, held, classes = [], self.seen, self.held, self.classes
        for path, module in _tree(root, top):
            values, cls = vars(module), type(module)
            ref = weakref.ref(module)
            held.append(ref)
            if id(module) in seen:
                records.append(Record(path, (id(ref),), {}))  # at a second place
                continue
            seen[id(module)] = path
            if cls not in classes:
                classes[cls] = self._known(cls)
            known, skipped = classes[cls]
            if values["_forward_hooks"] or values["_forward_pre_hooks"]:
                _check_hooks(module)
            training = values["training"]
            if training and values.get("gradient_checkpointing"):
                raise Uncapturable("gradient checkpointing is on in training mode, which drops the cache; call model.eval()")
            fixed = [id(ref), known, training, *values["_modules"]]
            for group in (values["_parameters"], values["_buffers"]):
                for name, tensor in group.items():
                    fixed += name, None if tensor is None else self.tensor(tensor)
                    if tensor is not None:
                        self.devices.add(tensor.device)
            attributes = {name: values[name] for name in values.keys() - skipped}
            for name, value in attributes.items():
                if type(value) not in SCALARS or value != value:
                    self.where = f"{path}.{name}".lstrip(".")
                    attributes[name] = self.value(value)
            records.append(Record(path, tuple(fixed), attributes))
        return records

    def _known(self, cls: type) -> tuple[tuple, frozenset[str]]:
        """(a class, attributes of its modules that do not count)."""
        self.where = cls.__name__
        ours = hf.bookkeeping() | {MARK} if issubclass(cls, hf.PreTrainedModel) else frozenset()
        return self._class(cls), _MODULE_ATTRIBUTES | ours

    def _class(self, cls: type) -> tuple:
        found: list = [self.same(cls)]
        for base in cls.__mro__:
            if base in _BASES:
                continue
            ours = _is_library(base.__module__)
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    found += name, self.function(value) if name == "forward" or not ours else self.same(value)
                elif type(value) in SCALARS:
                    found += name, value
                elif not (ours or name.startswith("__")):
                    found += name, self.value(value)
        return tuple(found)

    # ---- values ----

    def value(self, value):
        """Something equal to what the same value gave before, whatever it is."""
        kind = type(value)
        if kind in SCALARS:
            return value if value == value else "nan"
        if id(value) in self.seen:
            return "met", self.seen[id(value)]
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, types.ModuleType) or (isinstance(value, type) and _is_library(value.__module__)):
            return self.same(value)
        if isinstance(value, torch.nn.Module):
            self.outside.append(value)
            return self.same(value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        self._met(value)
        if isinstance(value, hf.PreTrainedConfig):
            self.configs.append(value)
            return self.same(value)
        self.left -= 1
        if not self.left:
            raise Uncapturable(f"{self.where or 'the model'} has attributes that reach more objects than can be watched")
        return self._inside(value)

    def _inside(self, value):
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return "method", self.value(value.__self__), self.value(value.__func__)
        if isinstance(value, functools.partial):
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self.same(type(value)), *(self.value(item) for item in value)
        if isinstance(value, Mapping):
            return self.same(type(value)), *((self.value(key), self.value(item)) for key, item in value.items())
        if _is_array(value):
            return self.same(value), value.tobytes() if value.nbytes <= 4096 else None
        if isinstance(value, contextvars.ContextVar):
            return self.same(value), self.value(value.get(None))
        if isinstance(value, Iterator):
            raise Uncapturable(f"{self.where} refers to an iterator ({type(value).__name__}), which a step may advance")
        found = [self.same(type(value)), self.same(value)]
        if (
            isinstance(value, (types.SimpleNamespace, threading.local))
            or type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
        ):
            for name, item in getattr(value, "__dict__", {}).items():
                found += name, self.value(item)
            for name in _slots(type(value)):
                found += name, self.value(getattr(value, name, None))
        return tuple(found)

    def tensor(self, tensor: torch.Tensor) -> tuple:
        """Where a tensor lies and how."""
        if type(tensor) not in _PLAIN_TENSORS:
            return self._strange(tensor)
        pointer, shape = _pointer(tensor), tensor.shape
        if not shape and self.device.type != "cpu" and tensor.device.type == "cpu":
            return pointer, tensor.dtype, tensor.item()  # a launch takes its value, not its address
        return pointer, shape, tensor.stride(), tensor.dtype

    def _strange(self, tensor: torch.Tensor) -> tuple:
        """A tensor of a class of its own, by the tensors that it is made of."""
        found = [self.same(type(tensor)), tensor.shape, tensor.dtype]
        if type(tensor).__name__ == "DTensor":
            raise Uncapturable("a weight is a DTensor, whose steps communicate")
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            found += [self.tensor(getattr(tensor, name)) for name in names]
            found.append(self.value(context))
        else:
            found += [_pointer(tensor), tensor.stride()]
        for name, item in vars(tensor).items():  # bitsandbytes keeps a weight's scales so
            found += name, self.value(item)
        return tuple(found)

    # ---- functions ----

    def function(self, function: types.FunctionType) -> tuple:
        """A function, what it closes over, and what its code finds in its file."""
        if self._met(function):
            return (self.same(function),)
        found: list = [self.same(function)]
        ours = _is_library(function.__module__)
        look = self._shallow if ours else self.value
        for cell in function.__closure__ or ():
            try:
                found.append(look(cell.cell_contents))
            except ValueError:  # not filled yet
                found.append(None)
        found += [look(value) for value in (function.__defaults__ or ())]
        found += [(name, look(value)) for name, value in (function.__kwdefaults__ or {}).items()]
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name, _MISSING)
            if value is not _MISSING:
                found += name, look(value)
            if isinstance(value, types.ModuleType) and not ours:
                found += self._file(value, _names(function.__code__))
        return tuple(found)

    def _file(self, module: types.ModuleType, names: tuple[str, ...]) -> list:
        """What code of these names may find in a file of the user's."""
        found: list = []
        if _is_library(module.__name__) or self._met(module):
            return found
        for name in names:
            if name in vars(module):
                value = vars(module)[name]
                found += name, self.value(value)
                if isinstance(value, types.ModuleType):
                    found += self._file(value, names)
        return found

    def _shallow(self, value):
        """What a library's function refers to: functions are followed, objects told apart."""
        if type(value) in SCALARS:
            return value if value == value else "nan"
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, torch.nn.Module):
            self.outside.append(value)
        return self.same(value)

    def _met(self, thing) -> bool:
        """Whether this object was looked at before in this walk; from now on it was."""
        if id(thing) in self.seen:
            return True
        self.seen[id(thing)] = self.where
        self.kept.append(thing)
        return False


def _tree(root: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model and all modules below it, each with its path; one at two places comes twice."""
    stack = [(root, model)]
    met = set()
    while stack:
        path, module = stack.pop()
        yield path, module
        children = vars(module)["_modules"]
        if children and id(module) not in met:
            met.add(id(module))
            prefix = path and path + "."
            stack += [(prefix + name, child) for name, child in children.items() if child is not None]


def _check_hooks(module: torch.nn.Module) -> None:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if not forward.is_ours(hook) and not hf.is_inert_hook(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise Uncapturable(f"{type(module).__name__} has the forward hook {name}, and a graph would not run it")


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


def _is_array(value) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


@functools.lru_cache(4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function's code, and that of functions within it, may look up in its file."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _pointer(tensor: torch.Tensor) -> int:
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        pointer = 0
    if pointer == 0 and (tensor.numel() or tensor.layout != torch.strided):
        raise Uncapturable(f"a weight is a {type(tensor).__name__} on {tensor.device}, which has no address of its own")
    return pointer


# ---- what a step reads ----

_watch = threading.local()
_lock = threading.RLock()  # models may share modules, whose classes are others while one is watched


@contextmanager
def unread_by(model: torch.nn.Module, fingerprint: Fingerprint) -> Iterator[set[tuple[str, str]]]:
    """The plain attributes of modules that nobody reads inside, as pairs of path and name; all of them at first.

    Models keep beside what every step reads what one prompt taught them (Qwen-VL its rope_deltas). Each module of Transformers
    and torch gets for the time a subclass of its class, with a property for each attribute.
    """
    attributes = {record.path: record.attributes for record in fingerprint.modules}
    changed: list[tuple[torch.nn.Module, type]] = []
    unread: set[tuple[str, str]] = set()
    paths: dict[int, str] = {}
    before = getattr(_watch, "now", None)
    _lock.acquire()
    try:
        for path, module in _tree("", model):
            cls = type(module)
            names = tuple(name for name in attributes.get(path, ()) if not hasattr(cls, name))
            if not names or not _is_library(cls.__module__):  # others may read them past the property, as vars(self)[name]
                continue
            try:
                module.__class__ = _watched(cls, names)
            except TypeError:  # a class that has no subclass of the same layout
                continue
            paths[id(module)] = path
            changed.append((module, cls))
            unread.update((path, name) for name in names)
        _watch.now = (unread, paths)
        yield unread
    finally:
        _watch.now = before
        for module, cls in reversed(changed):
            module.__class__ = cls
        _lock.release()


@functools.lru_cache(256)
def _watched(cls: type, names: tuple[str, ...]) -> type:
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members | {name: _attribute(name) for name in names})


def _attribute(name: str) -> property:
    def get(self):
        now = getattr(_watch, "now", None)
        if now is not None and id(self) in now[1]:
            now[0].discard((now[1][id(self)], name))
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self, value):
        vars(self)[name] = value

    def delete(self):
        del vars(self)[name]

    return property(get, put, delete)
