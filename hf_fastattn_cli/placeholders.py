"""Placeholders for modules that take seconds to import, while a benchmark is asked only for its help.

The options of a benchmark are made from tables in its module, which need none of these imports. A test compares each help text
with that of the module as it is.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

REPLACED = ("torch", "transformers", "triton", "hf_fastattn")
REAL = "hf_fastattn.model_shapes"  # names of options


class Placeholder(ModuleType):
    """A module, and every name in it: a function, a base class, a number or a table whose value has no effect on a help text."""

    __dataclass_fields__: ClassVar[dict[str, Any]] = {}  # for dataclasses.replace()

    def __init__(self, name: str = "", **fields: Any) -> None:
        super().__init__(name)

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(name)

    def __call__(self, *args: Any, **options: Any) -> "Placeholder":
        return self

    def __getitem__(self, other: Any) -> "Placeholder":
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __le__(self, other: Any) -> bool:
        return False

    __mul__ = __rmul__ = __or__ = __getitem__
    __lt__ = __gt__ = __ge__ = __le__


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in REPLACED and name != REAL else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = [str(Path(__file__).parents[1] / module.__name__)]  # where REAL is found


@contextmanager
def instead() -> Iterator[None]:
    """A context in which imports of these modules give placeholders. What is imported in it is forgotten at its end."""
    finder, before = _Finder(), {*sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(REAL)
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in {*sys.modules} - before:
            if name.partition(".")[0] in (*REPLACED, "hf_fastattn_benchmarks"):
                del sys.modules[name]
