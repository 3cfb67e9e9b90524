"""Finds the attributes of a model's modules that a step does not read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .code import is_library
from .fingerprint import Fingerprint
from .walker import tree

_watch = threading.local()
classes_lock = threading.RLock()  # models may share modules, whose classes change while one is watched


@contextmanager
def unread_by(model: torch.nn.Module, fingerprint: Fingerprint) -> Iterator[set[tuple[str, str]]]:
    """The plain attributes of modules that the code inside the block does not read, as pairs (path, name).

    Besides the state that every step reads, models store state of one prompt (Qwen-VL its rope_deltas). During the block, the
    class of each module of Transformers and torch is a subclass with a property for each attribute.
    """
    attributes = {record.path: record.attributes for record in fingerprint.modules}
    changed: list[tuple[torch.nn.Module, type]] = []
    unread: set[tuple[str, str]] = set()
    paths: dict[int, str] = {}
    before = getattr(_watch, "now", None)
    classes_lock.acquire()
    try:
        for path, module in tree("", model):
            cls: type = type(module)
            names = tuple(name for name in attributes.get(path, ()) if not hasattr(cls, name))
            if not names or not is_library(cls.__module__):  # other code may read vars(self)[name], which bypasses the property
                continue
            try:
                module.__class__ = _watched(cls, names)
            except TypeError:  # no subclass of this class has the same layout
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
        classes_lock.release()


@functools.lru_cache(256)
def _watched(cls: type, names: tuple[str, ...]) -> type:
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members | {name: _attribute(name) for name in names})


def _attribute(name: str) -> property:
    def get(self: torch.nn.Module) -> Any:
        now = getattr(_watch, "now", None)
        if now is not None and id(self) in now[1]:
            now[0].discard((now[1][id(self)], name))
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: torch.nn.Module, value: Any) -> None:
        vars(self)[name] = value

    def delete(self: torch.nn.Module) -> None:
        del vars(self)[name]

    return property(get, put, delete)
