"""Python code: whose it is, what a member of a class runs, and the names that a function looks up."""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import hf

LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "hf_fastattn", "triton", *sys.stdlib_module_names})
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


def is_library(module: object) -> bool:
    """module: its name. Of a class that is written in C it may be anything."""
    return module is not None and (not isinstance(module, str) or module.partition(".")[0] in LIBRARIES)


def is_of_library(function: types.FunctionType) -> bool:
    return is_library(function.__module__) and is_library(hf.module_of(function))


def is_installed(module: Any) -> bool:
    """Whether the module of this name is of a library or of another package that is installed, and not of the user's own code."""
    return is_library(module) or _is_in_folder(getattr(sys.modules.get(module), "__file__", None))


@functools.lru_cache(4096)
def _is_in_folder(file: str | None) -> bool:
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


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
        return member.__wrapped__, member.cache_info().currsize  # an emptied cache is filled anew
    bound = getattr(member, "__self__", None) if isinstance(member, _BUILTINS) else None
    return None if bound is None or isinstance(bound, types.ModuleType) else (bound, member.__name__)  # type: ignore[attr-defined]


_BUILTINS = (types.BuiltinMethodType, types.MethodWrapperType)  # bound to an object: the get of a dict


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The global names that the code of a function, and of functions nested in it, may look up."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@functools.lru_cache(4096)
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of modules in the import statements of the code of a function, and of functions nested in it."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _imports_in(const))
    own = (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    return tuple(dict.fromkeys((*own, *inner)))


def imported_by(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """The modules that its import statements name, if they have been imported: absolute names, and those within its package."""
    package = function.__globals__.get("__package__") or ""
    for name in _imports_in(function.__code__):
        within = package
        names = [name]
        while within:
            names.append(f"{within}.{name}".rstrip("."))
            within = within.rpartition(".")[0]
        for each in names:
            module = sys.modules.get(each)
            if isinstance(module, types.ModuleType):
                yield module


def looks_up_any(names: tuple[str, ...]) -> bool:
    """Whether code that looks up these names may look up any other in its file."""
    return "globals" in names or {"sys", "modules"} <= {*names}


def environment(names: tuple[str, ...]) -> Mapping[str, str] | None:
    """The variables of the environment, if code that looks up these names may read them."""
    return None if _ENVIRONMENT.isdisjoint(names) else dict(os.environ)
