"""Functions of libraries that are attributes of modules, and what they refer to, compared without a walk over each (watch.py)."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from .code import is_of_library, modules_within, names_in
from .walker import SCALARS

Dicts = list[dict[str, Any]]  # the attributes of each module
Spaces = list[tuple[dict[str, object], list[str]]]
MISSING, _GONE = object(), object()
parts_of = attrgetter("__code__", "__defaults__", "__kwdefaults__")  # of a function
_flat = chain.from_iterable


class Closures:
    """Functions of libraries that are attributes of modules, as the forwards of tensor parallelism, and what they refer to.

    It keeps none of them alive. places: (module, name).
    """

    def __init__(self, places: list[tuple[int, str]], dicts: Dicts):
        self.places = places
        functions = self._functions(dicts)
        self.references = [*filter(None, map(_reference, functions))]
        self.codes = [*map(parts_of, functions)]
        self.contents = [*filter(None, map(_reference, self._contents(functions)))]
        self.spaces = spaces_of(functions)
        self.looked_up = looked_up(self.spaces)

    @staticmethod
    def hold(value: object) -> bool:
        """Whether this is such a function, and refers to no other."""
        if type(value) is not types.FunctionType or parts_of(value)[1:] != (None, None) or not is_of_library(value):
            return False
        contents = [*map(contents_of, value.__closure__ or ())]
        found = [*contents, *map(value.__globals__.get, names_in(value.__code__))]
        if not contents or any(isinstance(each, types.FunctionType) for each in found):
            return False
        return all(map(_reference, contents))

    def same(self, dicts: Dicts) -> bool:
        functions = self._functions(dicts)
        return (
            identical(functions, [reference() for reference in self.references])
            and [*map(parts_of, functions)] == self.codes
            and identical(self._contents(functions), [reference() for reference in self.contents])
            and identical(looked_up(self.spaces), self.looked_up)
        )

    def _functions(self, dicts: Dicts) -> list[Any]:
        return [dicts[index][name] for index, name in self.places]

    def _contents(self, functions: list[Any]) -> list[object]:
        return [*map(contents_of, _flat(function.__closure__ for function in functions))]


def _reference(value: object) -> Callable[[], object] | None:
    """Returns the object, which it does not keep alive unless that is a constant; None if it would have to."""
    if type(value) in SCALARS:
        return lambda: value
    try:
        reference = weakref.ref(value)
    except TypeError:
        return None
    return lambda: _GONE if (now := reference()) is None else now  # None may be in its place


def spaces_of(functions: Iterable[types.FunctionType]) -> Spaces:
    """The globals of each file of these functions, and the names that the functions look up there."""
    spaces: dict[int, dict[str, object]] = {}
    names: dict[int, dict[str, None]] = {}
    for function in functions:
        key = id(function.__globals__)
        spaces[key] = function.__globals__
        names.setdefault(key, {}).update(dict.fromkeys(names_in(function.__code__)))
    within = [each for key, space in spaces.items() for each in modules_within(space, names[key])]
    return [(space, [*names[key]]) for key, space in spaces.items()] + within


def looked_up(spaces: Spaces) -> list[object]:
    """What the names refer to now."""
    return [*_flat(map(space.get, names, repeat(MISSING)) for space, names in spaces)]


def contents_of(cell: types.CellType) -> object:
    """What a cell of a closure holds, or MISSING."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def identical(found: list[Any], expected: list[Any]) -> bool:
    """Whether two lists have the same objects, which need not be comparable."""
    return len(found) == len(expected) and all(map(is_, found, expected))
