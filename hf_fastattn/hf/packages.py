"""Whose code it is: that of packages which are trusted to read only the model and their own files, or the user's."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any

# `transformers_modules` has the code of models that was loaded with trust_remote_code=True.
PACKAGES = frozenset(
    {"torch", "transformers", "transformers_modules", "triton", "hf_fastattn", "hf_fastattn_autoload", "hf_fastattn_cli"}
)
_OF_PYTHON = tuple(path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders


def is_trusted(name: Any) -> bool:
    """Whether the Python module of this name is that of a package that is installed, or code that Transformers has loaded.

    A class that is written in C may have anything as the name of its module; an object without one is no code of the user's.
    """
    if not isinstance(name, str):
        return name is not None
    if name in ("__main__", "__mp_main__"):  # whose file may be that of an installed program, and its functions the user's
        return False
    return name.partition(".")[0] in PACKAGES or is_of_python(name) or _is_installed(_file_of(name))


def is_of_python(name: Any) -> bool:
    """Whether a module of this name is part of the standard library, and not a file of the user's of the same name."""
    return isinstance(name, str) and name.partition(".")[0] in sys.stdlib_module_names and _is_below(_file_of(name))


def _file_of(name: str) -> object:
    return getattr(sys.modules.get(name), "__file__", None)


@functools.lru_cache(4096)
def _is_below(file: object) -> bool:
    return not isinstance(file, str) or any(Path(file).is_relative_to(path) for path in _OF_PYTHON)


@functools.lru_cache(4096)
def _is_installed(file: object) -> bool:
    return isinstance(file, str) and not _INSTALLED.isdisjoint(Path(file).parts)
