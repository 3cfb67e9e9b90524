"""Tells whether a model is as it was when its state was read, without reading it again.

The same objects at the same places have the same state, except for what is read again in each comparison: lists, configurations
and other objects that are neither constants, modules nor plain tensors. References are compared for all modules at once, by few
calls of C code: a loop over the modules takes several times as long. Nothing of the model is kept alive but constants. Nor is a
tensor referred to weakly: torch could not swap it (`torch.utils.swap_tensors`), as `to()` does with quantised weights.
"""

from __future__ import annotations

import weakref
from itertools import chain, compress
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch

from ... import hf
from ...caches import forward
from .path import all_of
from .state import PLAIN, SCALARS, Reader, State, Uncapturable, check_hooks, ignored, read, settings_of

_flat = chain.from_iterable
_GROUPS = itemgetter("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class Last:
    """The last state of a model, and whether the model is still in it. table: which the ids of a step index."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.state: State | None = None
        self.snapshot: _Snapshot | None = None
        self.table: object = None

    def current(self, model: hf.PreTrainedModel) -> tuple[State, list[torch.Tensor]]:
        """The present state and all tensors. Raises Uncapturable. If the model has not changed, the state is the same object."""
        settings, last, snapshot = settings_of(model), self.state, self.snapshot  # another thread may call forget()
        if last is not None and snapshot is not None and (tensors := snapshot.tensors(model)) is not None:
            if settings != last.settings:
                last = self.state = last._replace(settings=settings)
            return last, tensors
        self.snapshot = None  # if no graph can be captured, none is replayed before that is known
        reader = read(model)
        if self.state is None or self.state != reader.state:
            self.state = reader.state
        self.snapshot, self.table = _Snapshot(reader), _table(model)
        return self.state, reader.tensors

    def has_same_table(self, model: hf.PreTrainedModel) -> bool:
        """Whether the ids of a step index the same table as in the last state."""
        return self.table is not None and self.table == _table(model)

    def assumed(self, model: hf.PreTrainedModel) -> State | None:
        """The last state, if a graph may be replayed before the model is compared with it: the memory that it reads is there."""
        last, snapshot = self.state, self.snapshot
        if last is None or snapshot is None or settings_of(model) != last.settings or not snapshot.memory_is_there():
            return None
        return last


class _Snapshot:
    """References to what the reader has found."""

    def __init__(self, reader: Reader):
        self.modules = [weakref.ref(module) for module in reader.found]
        dicts = [vars(module) for module in reader.found]
        self.types = [*map(type, reader.found)]
        # Of a whole model, whose attributes generate() changes, some are ignored.
        self.whole = [
            (index, ignored(module)) for index, module in enumerate(reader.found) if isinstance(module, hf.PreTrainedModel)
        ]
        self.lengths = self._lengths(dicts)
        self.hooked = [index for index, each in enumerate(dicts) if each["_forward_hooks"] or each["_forward_pre_hooks"]]
        names: dict[tuple[str, ...], list[int]] = {}  # modules by the names of their attributes
        for index, (module, each) in enumerate(zip(reader.found, dicts, strict=True)):
            skipped = ignored(module) - {"training"}
            names.setdefault(tuple(name for name in each if name not in skipped), []).append(index)
        self.getters = [(all_of(own), all_of(indices)) for own, indices in names.items() if own]
        self.filled = [bool(group) for group in _groups(dicts)]
        self.empty = [not group for group in self.filled]
        values, groups = self._now(dicts, _groups(dicts))
        self.sizes = [*map(len, groups)]
        self.keys = [*_flat(groups)]
        self.plain = [type(value) in PLAIN and not reader.is_number(value) for value in values]
        self.fixed = [
            plain or type(value) in SCALARS or isinstance(value, torch.nn.Module) or forward.is_ours(value)
            for plain, value in zip(self.plain, values, strict=True)
        ]
        self.weak = [_has_weakref(value) for value in values]
        self.references = [weakref.ref(value) for value in compress(values, self.weak)]
        kinds = zip(self.weak, self.fixed, self.plain, strict=True)
        self.strong = [fixed and not weak and not plain for weak, fixed, plain in kinds]
        self.constants = [*compress(values, self.strong)]
        # An object that is compared by identity is read at one of its places.
        place = {id(value): index for index, value in enumerate(values)}
        self.again = [
            not fixed and not (weak and place[id(value)] != index)
            for index, (value, fixed, weak) in enumerate(zip(values, self.fixed, self.weak, strict=True))
        ]
        self.read = self._read(reader.model, values)[0]
        tensors = [*compress(values, self.plain)]
        self.layouts = _layouts(tensors)
        memory = [*map(torch.Tensor.untyped_storage, reader.tensors)]
        self.memory = [*map(weakref.ref, memory)]
        self.pointers = [*map(torch.UntypedStorage.data_ptr, memory)]

    def _lengths(self, dicts: list[dict[str, Any]]) -> list[object]:
        """How many attributes each module has, and the names of those of whole models."""
        lengths: list[object] = [*map(len, dicts)]
        for index, skipped in self.whole:
            lengths[index] = [name for name in dicts[index] if name not in skipped]
        return lengths

    def _now(self, dicts: list[dict[str, Any]], groups: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
        """The attributes, parameters, buffers, submodules and hooks of all modules, and the dicts of those that are not empty."""
        filled = [*compress(groups, self.filled)]
        attributes = _flat(map(own, of(dicts)) for own, of in self.getters)
        return [*_flat(attributes), *_flat(map(dict.values, filled))], filled

    def _read(self, model: hf.PreTrainedModel, values: list[Any]) -> tuple[list[object], list[torch.Tensor]]:
        """The values of what is read in each comparison, and the tensors among it."""
        reader = Reader(model)
        return [*map(reader.value, compress(values, self.again))], reader.tensors

    def tensors(self, model: hf.PreTrainedModel) -> list[torch.Tensor] | None:
        """All tensors of the model, if it has not changed; None if that is not certain."""
        try:
            modules: list[Any] = [*map(call, self.modules)]
            dicts = [module.__dict__ for module in modules]
            if [*map(type, modules)] != self.types or self._lengths(dicts) != self.lengths:
                return None
            for index in self.hooked:
                check_hooks(modules[index])
            groups = _groups(dicts)
            if any(compress(groups, self.empty)):
                return None
            values, groups = self._now(dicts, groups)
            if [*map(len, groups)] != self.sizes or [*_flat(groups)] != self.keys:
                return None
            if not all(map(is_, compress(values, self.strong), self.constants)):
                return None
            if not all(map(is_, compress(values, self.weak), map(call, self.references))):
                return None
            plain = [*compress(values, self.plain)]
            if _layouts(plain) != self.layouts:
                return None
            read, others = self._read(model, values)
            return [*plain, *others] if read == self.read else None
        except (AttributeError, KeyError, TypeError, RuntimeError, Uncapturable):  # reading the model raises it again, if need be
            return None

    def memory_is_there(self) -> bool:
        """Whether the memory of all tensors exists, at its place."""
        memory: list[Any] = [*map(call, self.memory)]
        try:
            return [*map(torch.UntypedStorage.data_ptr, memory)] == self.pointers
        except TypeError:  # one is gone
            return False


def _groups(dicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*_flat(map(_GROUPS, dicts))]


def _has_weakref(value: object) -> bool:
    if type(value) in SCALARS or isinstance(value, torch.Tensor):
        return False
    try:
        return weakref.ref(value) is not None
    except TypeError:
        return False


def _layouts(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    return (
        [*map(type, tensors)],
        [*map(torch.Tensor.data_ptr, tensors)],
        [*map(_shape, tensors)],
        [*map(torch.Tensor.stride, tensors)],
        [*map(_dtype, tensors)],
    )


def _table(model: hf.PreTrainedModel) -> object:
    """The table that the ids of a step index: its module, attributes, memory and size, and its hooks; None if there is none."""
    try:
        table: Any = model.get_input_embeddings()
        weight, own = table.weight, vars(table)
        hooks = len(table._forward_hooks) + len(table._forward_pre_hooks)
    except (AttributeError, NotImplementedError):
        return None
    attributes = [value if type(value) in SCALARS else id(value) for value in own.values()]
    return id(table), attributes, weight.data_ptr(), weight.shape, hooks
