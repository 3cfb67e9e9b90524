"""Tells whether a model is as it was when its fingerprint was taken, without a new fingerprint.

A fingerprint is a walk over everything that a step may read. If each object of the walk refers to the same objects as then, a new
walk would find the same. A Watch compares these references, and the layouts of tensors, of all modules at once: a loop over the
modules takes several times as long. What remains is walked again: attributes of modules that are neither constants nor
configurations, tensors of subclasses, the fields of configurations, and classes with code that is not of a library. The weights
and most forwards of tensor parallelism, hundreds in a model, are compared at once too.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, compress, cycle, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import hf
from .closures import Closures, Dicts, contents_of, identical, looked_up, parts_of, spaces_of
from .code import is_library
from .unread import classes_lock
from .walker import (
    MODULE_ATTRIBUTES,
    PLAIN_TENSORS,
    SCALARS,
    Walker,
    check_hooks,
)

_flat = chain.from_iterable
_TENSORS, _HOOKS = ("_parameters", "_buffers"), ("_forward_hooks", "_forward_pre_hooks")
_GROUPS = ("_modules", *_TENSORS, *_HOOKS)
_groups = itemgetter(*_GROUPS)
_dtype = attrgetter("dtype")
_local = attrgetter("_local_tensor")  # of a DTensor: to_local() takes ten times as long
_spec = attrgetter("_spec")  # its mesh, placements and shape
_placements = attrgetter("placements")
_mro = attrgetter("__mro__")


class Watch:
    """What the walk of `walker`, which has just visited a model, depends on.

    It keeps constants, configurations and classes alive, but no module and no tensor. knows_memory: whether the tensors that it
    watches are all that a graph may read, and the code of the model is that of libraries.
    """

    def __init__(self, walker: Walker):
        modules = walker.found
        self.device = walker.device
        self.all = _Modules(modules, walker)
        self.readers = _Modules(_readers(modules), walker)
        self.walked_tables = bool(self.readers.groups.others) or any(map(_is_table, self.readers.walked_attributes()))
        self.memory: _Memory | None = _Memory(walker.tensors)  # None: to be read anew
        walkers = {cls: Walker(walker.device, lambda: walker.mesh) for cls in walker.classes}
        for cls, each in walkers.items():
            each.known(cls)
        self.own_classes = [cls for cls, each in walkers.items() if each.foreign]
        libraries = [each for each in walkers.values() if not each.foreign]
        self.code_of_readers = _Code(_flat(walkers[cls].bases for cls in dict.fromkeys(self.readers.classes)), ())
        self.code = _Code(_flat(each.bases for each in libraries), _flat(each.functions for each in libraries))
        self.knows_memory = not walker.foreign and not _Code(walker.bases, walker.functions).holds_tensors()
        self.walked, again = self._walk(*self.all.now(), lambda: walker.mesh)
        self.held = [*again.held, walker.held]  # the references whose ids the fingerprint and `walked` contain

    def tensors(self, mesh: Callable[[], Any] = lambda: None) -> list[torch.Tensor] | None:
        """All tensors of the model, if it has not changed; None if that is not certain. mesh: returns that of its ranks."""
        try:
            with classes_lock:
                modules, dicts = self.all.now()
                tensors = self.all.tensors(modules, dicts)
                if tensors is None or not self.code.same():
                    return None
                walked, walker = self._walk(modules, dicts, mesh)
                if walked != self.walked:
                    return None
                tensors += walker.tensors
                self.memory = self.memory or _Memory(tensors)
                return tensors
        except Exception:  # the walk over the whole model, which follows, raises it again
            return None

    def same_tables(self) -> bool:
        """Whether tables are read as before; False if only a walk can tell.

        Otherwise an input of the next step may be beyond the end of a table that a graph reads, which would end the process: a
        larger table has replaced it, or a new hook makes ids smaller.
        """
        try:
            with classes_lock:
                modules, dicts = self.readers.now()
                for index in self.readers.groups.hooked:
                    check_hooks(modules[index])
                return not self.walked_tables and self.readers.tensors(modules, dicts) is not None
        except Exception:
            return False

    def harmless(self) -> list[torch.UntypedStorage]:
        """The memory of all tensors, if a graph may be replayed although the model may have changed; else nothing.

        What it computes is then discarded, and what it writes is not read: K and V beyond those that are counted. But it must not
        read memory that was freed, nor a table beyond its end, for which the code that reads tables has to be as it was.
        """
        try:
            harmless = self.knows_memory and self.same_tables() and self.code_of_readers.same()
        except Exception:  # a class has values that cannot be compared
            return []
        if not harmless or self.memory is None:
            return []
        memory = self.memory.now()
        if not memory:  # weights that were freed may be back at the same addresses: the model is then unchanged
            self.memory = None
        return memory

    def _walk(self, modules: list[Any], dicts: Dicts, mesh: Callable[[], Any]) -> tuple[list[object], Walker]:
        """What a walk finds where one is needed, and the walker."""
        attributes, groups = self.all.attributes, self.all.groups
        for index in groups.hooked:
            check_hooks(modules[index])
        walker = Walker(self.device, mesh)
        found = [walker.value(dicts[index][name]) for index, name in attributes.others]
        found += map(walker.value, attributes.configs)
        found += [walker.tensor(dicts[index][group][name]) for index, group, name in groups.others]
        found += map(walker.known, self.own_classes)
        return [*found, *walker.configurations()], walker


class _Modules:
    """Some modules of a model: their classes, attributes, submodules, tensors and hooks."""

    def __init__(self, modules: list[torch.nn.Module], walker: Walker):
        self.references = [weakref.ref(module) for module in modules]
        self.classes = [*map(type, modules)]
        dicts = self.now()[1]
        self.attributes = _Attributes(dicts, [walker.classes[cls][1] for cls in self.classes])
        self.groups = _Groups(modules, dicts, walker)

    def now(self) -> tuple[list[Any], Dicts]:
        """The modules with their attributes. Raises AttributeError if one does not exist any more."""
        modules: list[Any] = [reference() for reference in self.references]
        return modules, [module.__dict__ for module in modules]

    def walked_attributes(self) -> list[object]:
        """The attributes that have to be walked over."""
        dicts = self.now()[1]
        return [dicts[index][name] for index, name in self.attributes.others]

    def tensors(self, modules: list[Any], dicts: Dicts) -> list[torch.Tensor] | None:
        """The tensors whose layouts are compared, if nothing has changed but what has to be walked over; else None."""
        if not (identical([*map(type, modules)], self.classes) and self.attributes.same(dicts)):
            return None
        return self.groups.tensors(modules, dicts)


class _Memory:
    """The memory of tensors, which it does not keep."""

    def __init__(self, tensors: list[torch.Tensor]):
        memory = [tensor.untyped_storage() for tensor in tensors]
        self.references = [*map(StorageWeakRef, memory)]
        self.pointers = [reference.cdata for reference in self.references]
        self.addresses = [*map(torch.UntypedStorage.data_ptr, memory)]

    def now(self) -> list[torch.UntypedStorage]:
        """All of it, to be kept; nothing if a part was freed or has moved."""
        memory = [*map(torch.UntypedStorage._new_with_weak_ptr, self.pointers)]
        held = all(map(is_not, memory, repeat(None)))
        return memory if held and [*map(torch.UntypedStorage.data_ptr, memory)] == self.addresses else []


class _Attributes:
    """The plain attributes of modules. skipped: for each module, the names that a walk ignores.

    Those that nn.Module itself sets are only counted.
    """

    def __init__(self, dicts: Dicts, skipped: list[frozenset[str]]):
        # Of a whole model, whose attributes generate() changes, the others are ignored.
        self.models = [(index, names) for index, names in enumerate(skipped) if not names <= MODULE_ATTRIBUTES]
        ignored = {**dict.fromkeys(range(len(dicts)), _OF_TORCH), **dict(self.models)}
        self.others: list[tuple[int, str]] = []  # (module, name) of those that are walked
        closures: list[tuple[int, str]] = []
        groups: dict[tuple[str, ...], list[int]] = {}  # modules by the names of their constants
        for index, attributes in enumerate(dicts):
            own = [name for name in attributes if name not in ignored[index]]
            constants = [name for name in own if _is_constant(attributes[name])]
            for name in (name for name in own if name not in constants):
                (closures if Closures.hold(attributes[name]) else self.others).append((index, name))
            names = tuple(name for name in ("training", *constants) if name in attributes)  # of a compiled module a property
            if names:
                groups.setdefault(names if names[1:] else names * 2, []).append(index)  # of one name, itemgetter returns no tuple
        self.groups = [(itemgetter(*names), indices) for names, indices in groups.items()]
        self.closures = Closures(closures, dicts)
        self.constants = self._constants(dicts)
        self.configs = [*{id(value): value for value in self.constants if isinstance(value, hf.PreTrainedConfig)}.values()]
        self.names = self._names(dicts)

    def same(self, dicts: Dicts) -> bool:
        same = self._names(dicts) == self.names and identical(self._constants(dicts), self.constants)
        return same and self.closures.same(dicts)

    def _constants(self, dicts: Dicts) -> list[object]:
        return [*_flat(_flat(map(names, map(dicts.__getitem__, indices)) for names, indices in self.groups))]

    def _names(self, dicts: Dicts) -> tuple[list[int], list[list[str]]]:
        counts = [*map(len, dicts)]
        for index, _ in self.models:
            counts[index] = 0
        return counts, [[name for name in dicts[index] if name not in ignored] for index, ignored in self.models]


class _Groups:
    """The dicts that each module has for its modules, its tensors and its hooks."""

    def __init__(self, modules: list[torch.nn.Module], dicts: Dicts, walker: Walker):
        groups = [*_flat(map(_groups, dicts))]
        self.empty = [not group for group in groups]
        self.filled = [bool(group) and name not in _HOOKS for group, name in zip(groups, cycle(_GROUPS))]
        self.hooked = [index for index, each in enumerate(dicts) if any(each[name] for name in _HOOKS)]
        filled = [*compress(groups, self.filled)]
        self.sizes, self.names = [*map(len, filled)], [*_flat(filled)]
        held, place = [*_flat(map(dict.values, filled))], {id(module): index for index, module in enumerate(modules)}
        tensors = [isinstance(thing, torch.Tensor) for thing in held]
        self.plain = [tensor and _has_layout(thing, walker.device) for thing, tensor in zip(held, tensors, strict=True)]
        self.sharded = [_is_plain_shard(thing, walker) for thing in held]
        self.rest = [thing is None or id(thing) in place for thing in held]  # those of `modules`, and no others
        self.places = [place.get(id(thing), -1) for thing in compress(held, self.rest)]  # -1: None
        self.layouts, (shards, self.specs) = _layouts([*compress(held, self.plain)]), _shards([*compress(held, self.sharded)])
        self.layouts_of_shards, self.placements = _layouts(shards), [*map(_placements, self.specs)]
        # (module, group, name) of tensors whose layout does not say all that a graph depends on
        self.others = [
            (index, group, name)
            for index, attributes in enumerate(dicts)
            for group in _TENSORS
            for name, tensor in attributes[group].items()
            if tensor is not None and not (_has_layout(tensor, walker.device) or _is_plain_shard(tensor, walker))
        ]

    def tensors(self, modules: list[Any], dicts: Dicts) -> list[torch.Tensor] | None:
        """The tensors whose layouts are compared, if all groups are as they were; else None."""
        groups = [*_flat(map(_groups, dicts))]
        if any(compress(groups, self.empty)):
            return None
        filled = [*compress(groups, self.filled)]
        held, known = [*_flat(map(dict.values, filled))], [*modules, None]
        tensors, (shards, specs) = [*compress(held, self.plain)], _shards([*compress(held, self.sharded)])
        same = (
            [*map(len, filled)] == self.sizes
            and [*_flat(filled)] == self.names
            and identical([*compress(held, self.rest)], [known[place] for place in self.places])
            and _layouts(tensors) == self.layouts
            and identical(specs, self.specs)
            and [*map(_placements, specs)] == self.placements
            and _layouts(shards) == self.layouts_of_shards
        )
        return tensors + shards if same else None


class _Code:
    """The code of libraries: members and bases of classes, and what functions refer to."""

    def __init__(self, bases: Iterable[type], functions: Iterable[types.FunctionType]):
        self.bases = [*dict.fromkeys(bases)]
        self.functions = [*dict.fromkeys(functions)]
        self.cells = [cell for function in self.functions for cell in function.__closure__ or ()]
        self.spaces = spaces_of(self.functions)
        self.members, self.objects = [dict(vars(base)) for base in self.bases], self._objects()

    def same(self) -> bool:
        return [*map(vars, self.bases)] == self.members and identical(self._objects(), self.objects)

    def holds_tensors(self) -> bool:
        """Whether a function or a class has a tensor, which nothing keeps when it is replaced."""
        held = [*self.objects, *_flat(members.values() for members in self.members)]
        held += _flat(each for each in held if type(each) is tuple)  # defaults of arguments
        return any(isinstance(each, torch.Tensor) for each in held)

    def _objects(self) -> list[object]:
        parts = [*_flat(map(parts_of, self.functions))]
        defaults = _flat(part.values() for part in parts[2::3] if part)
        return [*map(_mro, self.bases), *looked_up(self.spaces), *parts, *defaults, *map(contents_of, self.cells)]


_OF_TORCH = frozenset(vars(torch.nn.Module()))


def _readers(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules with tables, which their forward indexes by inputs of the step, and those around them."""
    found: set[int] = set()
    before = -1
    while len(found) > before:  # in one pass, unless a module has several parents
        before = len(found)
        for module in reversed(modules):
            if any(map(_is_table, _indexed(module))) or any(id(child) in found for child in module._modules.values()):
                found.add(id(module))
    return [module for module in modules if id(module) in found]


def _indexed(module: torch.nn.Module) -> list[object]:
    """What a module may index: in Transformers' decoders weights of embeddings, and buffers (positions of GPT-J)."""
    if isinstance(module, torch.nn.Linear):
        return []
    weights = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) or not is_library(type(module).__module__)
    return [*vars(module).values(), *module._buffers.values(), *(module._parameters.values() if weights else ())]


def _is_table(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1


def _is_constant(value: object) -> bool:
    """Whether a value cannot change, or is a configuration, whose fields are walked."""
    if type(value) is tuple:
        return all(type(item) in SCALARS for item in value)
    return isinstance(value, hf.PreTrainedConfig) or type(value) in SCALARS


def _has_layout(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the address and the layout of a tensor say all that a graph depends on."""
    return type(tensor) in PLAIN_TENSORS and (tensor.dim() > 0 or tensor.device.type == device.type)


def _is_plain_shard(tensor: object, walker: Walker) -> bool:
    """Whether this is a DTensor whose specification, and the layout of the part of this rank, say all that a graph depends on."""
    return hf.is_shard(tensor) and _spec(tensor).mesh == walker.mesh and _has_layout(_local(tensor), walker.device)


def _shards(tensors: list[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The parts of this rank, and the specifications."""
    return [*map(_local, tensors)], [*map(_spec, tensors)]


def _layouts(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """What `Walker.tensor` reads of plain tensors."""
    of = torch.Tensor
    return (
        [*map(type, tensors)],
        [*map(of.data_ptr, tensors)],
        [*map(of.size, tensors)],
        [*map(of.stride, tensors)],
        [*map(_dtype, tensors)],
    )
