"""The Python code that the steps of a model ran, and the objects to which the names in that code refer."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, starmap
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch.utils import _python_dispatch

from ... import hf

OF_A_PROMPT = frozenset({"rope_deltas"})  # attributes in which models store what belongs to one prompt (Qwen-VL)
_REPLACED = frozenset({"__init__", "__setstate__"})  # of modules by the first torch.compile of a process; no step runs them
_NOTES = frozenset({"__annotations__", "__slotnames__", "__doc__"})  # on classes, which no step reads
# Run functions that Triton has generated, or are the modules of generated functions.
_GENERATED = ("triton.runtime.jit", "hf_fastattn.kernels.ahead.describe", "namedtuple_")
_TOOLS = 4, 3, 5, 2, 1, 0  # of sys.monitoring: debuggers, coverage and profilers have the others
_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_of_class = attrgetter("__mro__")
_END = object()  # after what was found: a list of another length is not the same


class Path:
    """The code of trusted packages that all steps of a model ran. version: changes if that code would find other objects."""

    def __init__(self) -> None:
        self.version = 0
        self._codes: dict[types.CodeType, set[int]] = {}  # with the ids of the globals of the functions that had it
        self._grown = False  # whether some of it was noted after the places where it looks names up were found
        self._files: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}  # by id: globals, names in them, and attributes
        self._imports: set[tuple[int, str, str | None]] = set()  # of modules within functions
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []  # of names that a file or a module within it has
        self._missing: list[tuple[dict[str, Any], set[str]]] = []  # names that it has not, but may be given
        self._absent: set[str] = set()  # modules that it imports, and that are not there
        self._lengths: dict[int, tuple[dict[str, Any], int]] = {}  # of the modules in which attributes were looked up, by id
        self._classes: list[type] = []
        self._members: list[frozenset[str]] = []  # the names of all that each class has
        self._functions: dict[types.FunctionType, None] = {}
        self._cells: list[types.CellType] = []
        self._found: list[object] = [_END]

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[list[str]]:
        """The time of a rehearsal in this thread. Yields a list of the functions of no trusted package that ran."""
        hidden, own = [], list[str]()
        for module in model.modules():  # a step that reads one of them fails, and is not captured
            hidden += [(vars(module), name, vars(module).pop(name)) for name in OF_A_PROMPT & vars(module).keys()]
        collects = gc.isenabled()
        gc.disable()  # callbacks and finalizers that it runs are not code of the step
        try:
            with _calls(lambda code, frame: self._ran(code, frame, own)):
                yield own
        finally:
            if collects:
                gc.enable()
            for values, name, value in hidden:
                values[name] = value
            kinds = {type(module) for module in model.modules()}
            if self._grown or not kinds.issubset(self._classes) or self._has_other_places() or not self._is_same():
                self._collect(model)

    def _ran(self, code: types.CodeType, frame: types.FrameType, own: list[str]) -> None:
        file = frame.f_globals
        if id(file) in self._codes.get(code, ()):  # most of the code of a later rehearsal
            return
        name = file.get("__name__")
        if not hf.is_trusted(name) and not _is_generated(name, frame.f_back):
            own.append(f"{code.co_qualname}() of {name or 'generated code, as of torch.compile'}")
            return
        if name == __name__ or hf.is_of_python(name):  # whose files hold what it counts (the filters of warnings)
            return
        self._grown = True
        self._codes.setdefault(code, set()).add(id(file))
        _, names, attributes = self._files.setdefault(id(file), (file, set(), set()))
        names.update(hf.globals_in(code))
        attributes.update(code.co_names)
        self._imports.update((level, module, file.get("__package__")) for level, module in _imports_in(code))

    def _collect(self, model: torch.nn.Module) -> None:
        """Find the places where the code looks its names up."""
        places: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._getters, self._missing, self._functions, self._cells = [], [], {}, []
        self._absent, self._lengths = set(), {}
        for file, names, attributes in self._files.values():
            self._look_up(places, file, names, attributes, {id(file)})
            self._look_up(places, vars(builtins), names, attributes, set())
            if names - file.keys():
                self._missing.append((file, names - file.keys()))
        attributes = set[str]().union(*(each for _, _, each in self._files.values()))
        for level, module, package in self._imports:
            with contextlib.suppress(ImportError):
                name = importlib.util.resolve_name("." * level + module, package)
                if (found := sys.modules.get(name)) is None:
                    self._absent.add(name)
                else:
                    self._look_up(places, vars(found), attributes, attributes, {id(vars(found))})
        bases = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
        self._classes = [torch.Tensor, *(base for base in dict.fromkeys((*self._classes, *bases)) if base is not object)]
        places.pop(id(vars(_python_dispatch)), None)  # torch notes there which modes are active; `settings_of` compares them
        for space, names in places.values():
            self._getters.append((all_of(names), space))
            for name in names:
                self._follow(space[name])
        self._members = [frozenset(vars(cls)) for cls in self._classes]
        for cls in self._classes:
            for value in vars(cls).values():
                self._follow(value)
            if names := vars(cls).keys() - _REPLACED:
                self._getters.append((all_of(names), vars(cls)))
        self._found, self._grown = [*self._now()], False

    def _look_up(
        self, places: dict[int, tuple[dict[str, Any], set[str]]], file: dict[str, Any], names: set[str], attributes: set[str],
        visited: set[int],
    ) -> None:  # fmt: skip
        """Note the names of a file, and those attributes that modules have to which they refer (F.silu)."""
        self._lengths[id(file)] = file, len(file)
        found = names & file.keys()
        if found:
            places.setdefault(id(file), (file, set()))[1].update(found)
        for name in found:
            value = file[name]
            if isinstance(value, types.ModuleType) and id(vars(value)) not in visited:
                visited.add(id(vars(value)))
                self._look_up(places, vars(value), attributes, attributes, visited)

    def _follow(self, value: object) -> None:
        """Note the code, the defaults and the closure of a function that ran, and those of functions that it wraps."""
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or value.__code__ not in self._codes or value in self._functions:
            return
        self._functions[value] = None
        for cell in value.__closure__ or ():
            self._cells.append(cell)
            self._follow(content_of(cell))

    def now(self) -> int:
        """The present version."""
        if not self._is_same():
            self.version += 1
            self._codes.clear()
            self._files.clear()
            self._imports.clear()
            self._getters, self._missing, self._classes, self._members = [], [], [], []
            self._functions, self._cells, self._found = {}, [], [_END]
        return self.version

    def _has_other_places(self) -> bool:
        """Whether known code that takes another branch may find a module or an attribute that was not there before."""
        return any(len(file) != length for file, length in self._lengths.values()) or not self._absent.isdisjoint(sys.modules)

    def _is_same(self) -> bool:
        """Whether the code would find the same objects as before."""
        try:
            # A list would take milliseconds where memory that it allocates is returned to the system.
            return all(map(is_, self._now(), self._found)) and not self._has_more()
        except KeyError:  # a name was deleted
            return False

    def _has_more(self) -> bool:
        """Whether a file or a class has another name that the code looks up."""
        if any(not file.keys().isdisjoint(names) for file, names in self._missing):
            return True
        grown = [each for each in zip(self._classes, self._members, strict=True) if len(vars(each[0])) > len(each[1])]
        new = {name for cls, names in grown for name in vars(cls).keys() - names}
        # Any other may be read by a name that is computed. torch.compile marks classes by "___...".
        return not all(name in _NOTES or name.startswith("___") for name in new)

    def _now(self) -> Iterator[object]:
        of_files, of_functions = starmap(call, self._getters), map(_of_function, self._functions)
        found = chain.from_iterable(chain(of_files, of_functions))
        return chain(found, map(_of_class, self._classes), map(content_of, self._cells), (_END,))


@contextmanager
def _calls(note: Callable[[types.CodeType, types.FrameType], None]) -> Iterator[None]:
    """Call `note` with the code and the frame of each function that runs in this thread, the first time that it does."""
    me, monitoring = threading.get_ident(), getattr(sys, "monitoring", None)  # from Python 3.12 on
    tool = next((each for each in _TOOLS if monitoring.get_tool(each) is None), None) if monitoring else None
    if monitoring is None or tool is None:
        with _profiled(note):
            yield
        return

    def starts(code: types.CodeType, _: int) -> object:
        if threading.get_ident() != me:
            return None
        note(code, sys._getframe(1))
        return monitoring.DISABLE  # of this code

    events = monitoring.events.PY_START, monitoring.events.PY_RESUME
    monitoring.use_tool_id(tool, __name__)
    try:
        for event in events:
            monitoring.register_callback(tool, event, starts)
        monitoring.set_events(tool, sum(events))
        monitoring.restart_events()
        yield
    finally:
        monitoring.set_events(tool, 0)
        for event in events:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _profiled(note: Callable[[types.CodeType, types.FrameType], None]) -> Iterator[None]:
    """See `_calls`. This takes four times as long, as it is told of all calls."""
    before, known = sys.getprofile(), set[types.CodeType]()
    if before is not None and not (callable(before) or hasattr(before, "enable")):
        raise RuntimeError("a profiler that is written in C would lose its events")

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            known.add(code)
            note(code, frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        if before is not None:  # before Python 3.12 that of cProfile, which is not called but enabled
            getattr(before, "enable", functools.partial(sys.setprofile, before))()


def content_of(cell: types.CellType) -> object:
    """What a variable of a closure refers to; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def all_of(names: Iterable[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """As itemgetter(*names), which does not return a tuple for one name."""
    names = [*names]
    return itemgetter(*names, names[-1]) if len(names) == 1 else itemgetter(*names)


def _is_generated(name: object, caller: types.FrameType | None) -> bool:
    """Whether a function of a module without a file was generated by a package."""
    if name is None and caller is not None:
        name = caller.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(_GENERATED)


def _imports_in(code: types.CodeType) -> set[tuple[int, str]]:
    """(level, name) of the modules from which code imports."""
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2]:
        return set()
    # The level is loaded two instructions before.
    found = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    return {(found[i - 2].argval or 0, each.argval) for i, each in enumerate(found) if each.opname == "IMPORT_NAME"}
