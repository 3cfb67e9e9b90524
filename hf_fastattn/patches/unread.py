"""Which attributes of a model's modules a step reads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .fingerprint import Fingerprint
from .walker import is_library, tree

_watch = threading.local()
classes_lock = threading.RLock()  # models may share modules, whose classes are others while one is watched


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
    classes_lock.acquire()
    try:
        for path, module in tree("", model):
            cls: type = type(module)
            names = tuple(name for name in attributes.get(path, ()) if not hasattr(cls, name))
            if not names or not is_library(cls.__module__):  # others may read them past the property, as vars(self)[name]
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
