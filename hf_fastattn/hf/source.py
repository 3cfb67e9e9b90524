"""The source and the code of models."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

_LOADS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}  # and the bits below the number of the name


def globals_in(code: types.CodeType) -> set[str]:
    """The names that code looks up in its file. `dis` describes each instruction in full, which took 0.2 s of a first call."""
    found, high = set(), 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number = high | low
        high = number << 8 if op == dis.EXTENDED_ARG else 0
        if op in _LOADS:
            found.add(code.co_names[number >> _LOADS[op]])
    return found


def _file(config_class: type) -> Path | None:
    path = Path(getattr(sys.modules.get(config_class.__module__), "__file__", None) or "")
    path = path.with_name(path.name.replace("configuration_", "modeling_")) if path.name else path
    return path if path.suffix == ".py" and path.is_file() else None


def modeling_source(config_class: type) -> str:
    """The file with the models of a config class, modeling_*.py beside configuration_*.py; "" if there is none."""
    path = _file(config_class)
    return "" if path is None else path.read_text(encoding="utf-8")


def modeling_code(config_class: type) -> Iterator[types.CodeType]:
    """The code of the functions and classes in that file, and in these: from Python's cache on disk, if it has been imported."""
    path = _file(config_class)
    waiting = [] if path is None else [SourceFileLoader(path.stem, str(path)).get_code(path.stem)]
    for code in waiting:
        inner = [each for each in code.co_consts if isinstance(each, types.CodeType)] if code is not None else []
        yield from inner
        waiting += inner
