"""Python code: whose it is, what a member of a class runs, and the names that a function looks up."""

from __future__ import annotations

import dis
import functools
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import hf

LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "hf_fastattn", "triton", *sys.stdlib_module_names})
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_IMPORTS = frozenset({"modules", "import_module", "__import__"})
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


def is_library(module: object) -> bool:
    """module: its name. Of a class that is written in C it may be anything."""
    return module is not None and (not isinstance(module, str) or module.partition(".")[0] in LIBRARIES)


def is_of_library(function: types.FunctionType) -> bool:
    return is_library(function.__module__) and is_library(hf.module_of(function))


def is_installed(module: Any) -> bool:
    """Whether the module of this name is of a library or of another package that is installed, and not of the user's own code."""
    return is_library(module) or _is_in_folder(getattr(sys.modules.get(module), "__dict__", {}).get("__file__"))


@functools.lru_cache(4096)
def _is_in_folder(file: object) -> bool:
    return isinstance(file, str) and not _INSTALLED.isdisjoint(Path(file).parts)


def run_by(member: object) -> tuple[object, ...] | None:
    """What a descriptor or a wrapper of the standard library runs, and what it depends on; None for other objects."""
    if isinstance(member, property):
        return member.fget, member.fset
    if isinstance(member, (staticmethod, classmethod)):
        return (member.__func__,)
    if isinstance(member, functools.cached_property):
        return (member.func,)
    if isinstance(member, (functools.partial, functools.partialmethod)):
        return member.func, member.args, member.keywords
    if isinstance(member, functools.singledispatchmethod):
        return (member.dispatcher,)
    if isinstance(member, functools._lru_cache_wrapper):
        return member.__wrapped__, bool(member.cache_info().currsize)  # an emptied cache is filled anew
    bound = getattr(member, "__self__", None) if isinstance(member, _BUILTINS) else None
    return None if bound is None or isinstance(bound, (types.ModuleType, Iterator)) else (bound, member.__name__)  # type: ignore[attr-defined]


_BUILTINS = (types.BuiltinMethodType, types.MethodWrapperType)  # bound to an object: the get of a dict


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code of a function, and of functions nested in it, may look up."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def modules_within(space: dict[str, Any], names: Iterable[str]) -> list[tuple[Any, list[str]]]:
    """The modules of libraries to which names of a file refer (F.silu, nn.functional.silu), with the names that they have, and
    the class of tensors with all names."""
    names, todo, found, seen = [*names], [space], [], {id(space)}
    while todo:
        here = todo.pop()
        for value in map(here.get, names):
            if type(value) is types.ModuleType and id(vars(value)) not in seen and is_library(value.__name__):
                seen.add(id(vars(value)))
                todo.append(vars(value))
                found.append((vars(value), [name for name in names if name in vars(value)]))
    return [*found, (vars(torch.Tensor), names)]


@functools.lru_cache(4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """As names_in(), without names of attributes. It takes longer."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in globals_in(const))
    own = (each.argval for each in dis.get_instructions(code) if each.opname in _LOADS)
    return tuple(dict.fromkeys((*own, *inner)))


@functools.lru_cache(4096)
def _texts_in(code: types.CodeType) -> tuple[str, ...]:
    """The strings in the code of a function, and of functions nested in it."""
    inner = (text for const in code.co_consts if isinstance(const, types.CodeType) for text in _texts_in(const))
    return tuple(dict.fromkeys((*(const for const in code.co_consts if isinstance(const, str)), *inner)))


@functools.lru_cache(4096)
def words_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that the code of a function may look up in a module: global names, attributes, and strings for getattr()."""
    return *names_in(code), *_texts_in(code)


@functools.lru_cache(4096)
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of modules in the import statements of the code of a function, and of functions nested in it."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _imports_in(const))
    own = (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    return tuple(dict.fromkeys((*own, *inner)))


def imported_by(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """The user's modules that its import statements name, if they are imported: absolute names, and those within its package.

    If it may import by text, also those that its strings name.
    """
    package, code = function.__globals__.get("__package__") or "", function.__code__
    by_text = not _IMPORTS.isdisjoint(names_in(code))
    for name in (*_imports_in(code), *(_texts_in(code) if by_text else ())):
        within = package
        names = [name]
        while within:
            names.append(f"{within}.{name}".rstrip("."))
            within = within.rpartition(".")[0]
        for each in names:
            module = sys.modules.get(each)
            if isinstance(module, types.ModuleType) and not is_installed(each):
                yield module


def looked_up_by_text(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """(name, value) of what a function looks up by text: variables of the environment, and globals of its file by globals().

    Those that its code names in a string; if it names none, all of the environment, and all numbers and strings of the file.
    """
    names, texts, space = names_in(function.__code__), _texts_in(function.__code__), function.__globals__
    if not _ENVIRONMENT.isdisjoint(names):
        yield from [(name, os.environ[name]) for name in texts if name in os.environ] or sorted(os.environ.items())
    if "globals" in names or {"sys", "modules"} <= {*names}:
        plain = ((name, value) for name, value in space.items() if type(value) in (bool, int, float, str))
        yield from [(name, space[name]) for name in texts if name in space] or plain


def state_of(value: object) -> object:
    """The state of a generator of random numbers; None for other objects."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    numpy: Any = sys.modules.get("numpy.random")
    return None if numpy is None or not isinstance(value, numpy.Generator) else repr(value.bit_generator.state)


def bytes_of(value: Any) -> memoryview | None:
    """The content of an array of numpy, of ctypes or of the standard library; None for other objects."""
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        numpy = sys.modules.get("numpy")  # memoryview does not know all dtypes
        is_array = numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
        return memoryview(value.tobytes()) if is_array else None


def runs_own_code(member: object) -> bool:
    """Whether a member of a class of a library runs a function that is not of a library."""
    return any(isinstance(each, types.FunctionType) and not is_of_library(each) for each in run_by(member) or ())


def attributes_of(value: object) -> Iterator[tuple[str, object]]:
    """The names and values of an object's own attributes, in its dict and in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                name = f"_{base.__name__.lstrip('_')}{name}" if private else name
                yield name, getattr(value, name, None)


def is_of_package(cls: type) -> bool:
    """Whether a class is that of a library, or of another package and not of modules of a model."""
    return is_library(cls.__module__) or (is_installed(cls.__module__) and not issubclass(cls, torch.nn.Module))
