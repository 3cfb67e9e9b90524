"""Python values that a user's forward reads: after a change of one, a patched and an unpatched model agree.

The functions that change a value are outside of the classes that read it: a class is followed as a whole.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import dis
import enum
import functools
import importlib
import itertools
import logging
import os
import random
import sys
import types
import weakref

import fake_graph
import models
import numpy as np
import pytest
import torch
from models import OPT, prompts, tiny
from torch import nn
from transformers import LlamaConfig
from transformers.generation import utils

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf import packages
from hf_fastattn.patches.graphs import path, state
from hf_fastattn.patches.graphs.state import Uncapturable, read

BY = 1.0  # read by code below
SETTINGS = types.ModuleType("settings_of_the_test")
VARIABLE = "SETTING_OF_THE_TEST"
CONTEXT = contextvars.ContextVar("by")
INPUTS = prompts("no_padding", "cpu", rows=1)


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    fake_graph.use(monkeypatch, prompts=False)
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setenv(VARIABLE, "1")
    put_global(1.0)
    SETTINGS.BY = 1.0


def put_global(value):
    global BY
    BY = value


class Scaled(nn.Module):
    """Multiplies the output of a module by what a subclass reads. held: an object that it may read."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.held = inner, self.new()

    def new(self):
        return None

    def forward(self, x):
        return self.inner(x) * self.read()


def by(*_):
    return BY


class Config:
    by = 1.0


class Helper:
    by, scale, __call__ = property(by), by, by


Descriptor, Names = type("Descriptor", (), {"__get__": by}), type("Names", (dict,), {"scale": by})
OfMeta = type("Meta", (type,), {"by": 1.0})("OfMeta", (), {})
cached, dispatched = functools.lru_cache(lambda: BY), functools.singledispatch(by)


def with_attribute():
    return with_attribute.by


def default(self, by=[1.0]):  # noqa: B006
    return by[0]


class Mode(enum.Enum):
    """All members are reached by the class, too."""

    ONE, FIVE = 1.0, 5.0


@dataclasses.dataclass(slots=True)
class Slots:
    by: object = 1.0


class RemoteConfig(LlamaConfig):
    model_type = "llama"
    by = 1.0


DICT = {"by": 1.0}
ONE = torch.tensor(1.0)
BY_PROPERTY = {"read": lambda self: self.by}
BY_ITEM = {"read": lambda self: self.held[0]}
BY_NAME = {"read": lambda self: self.held["by"][0][0]}
BY_METHOD = {"read": lambda self: self.held.scale()}
BY_CALL = {"read": lambda self: self.held()}
OF_HELD = {"read": lambda self: self.held.by}
READERS = {  # name: what the class of the module has
    "property": BY_PROPERTY | {"by": property(lambda self: BY)},
    "static method": {"read": staticmethod(lambda: BY)},
    "class method": {"read": classmethod(lambda cls: BY)},
    "descriptor": BY_PROPERTY | {"by": Descriptor()},
    "cached property": {"read": lambda self: self.by(), "by": functools.cached_property(lambda self: lambda: BY)},
    "default": {"read": default},
    "method of held": BY_METHOD | {"new": lambda self: Helper()},
    "property of held": OF_HELD | {"new": lambda self: Helper()},
    "call of held": BY_CALL | {"new": lambda self: Helper()},
    "own dict": BY_METHOD | {"new": lambda self: Names()},
    "class of held": OF_HELD | {"new": lambda self: Config()},
    "enum of held": {"read": lambda self: self.held.by.value, "new": lambda self: Slots(Mode.ONE)},
    "configuration": OF_HELD | {"new": lambda self: RemoteConfig(hidden_size=64, num_attention_heads=4)},
    "file": {"read": lambda self: SETTINGS.BY},
    "lru_cache": {"read": lambda self: cached()},
    "attribute of a function": {"read": lambda self: with_attribute()},
    "dict": BY_NAME | {"new": lambda self: {"by": [(1.0,)]}},
    "list": BY_ITEM | {"new": lambda self: [ONE]},
    "slots": OF_HELD | {"new": lambda self: Slots()},
    "namespace": OF_HELD | {"new": lambda self: types.SimpleNamespace(by=ONE)},
    "partial": BY_CALL | {"new": lambda self: functools.partial(torch.mul, ONE, 1.0)},
    "method of a tensor": {"read": lambda self: self.held(1.0), "new": lambda self: ONE.mul},
    "UserList": BY_ITEM | {"new": lambda self: collections.UserList([1.0])},
    "array": BY_ITEM | {"new": lambda self: array.array("d", [1.0])},
    "bytes": BY_ITEM | {"new": lambda self: bytearray([1])},
    "NumPy": BY_ITEM | {"new": lambda self: np.ones(5000)},
    "ctypes": {"read": lambda self: self.held.value, "new": lambda self: ctypes.c_double(1.0)},
    "builtin": {"read": lambda self: self.held("by"), "new": lambda self: DICT.get},
}
PUT = {  # how a value is changed, where it is not the global BY
    "default": lambda module, value: default.__defaults__[0].__setitem__(0, value),
    "class of held": lambda module, value: setattr(Config, "by", value),
    "enum of held": lambda module, value: setattr(module.held, "by", Mode(value)),
    "configuration": lambda module, value: setattr(RemoteConfig, "by", value),
    "file": lambda module, value: setattr(SETTINGS, "BY", value),
    "attribute of a function": lambda module, value: setattr(with_attribute, "by", value),
    "dict": lambda module, value: module.held["by"].__setitem__(0, (value,)),
    **dict.fromkeys(("slots", "namespace"), lambda module, value: setattr(module.held, "by", torch.tensor(value))),
    "partial": lambda module, value: setattr(module, "held", functools.partial(torch.mul, torch.tensor(value), 1.0)),
    "method of a tensor": lambda module, value: setattr(module, "held", torch.tensor(value).mul),
    "list": lambda module, value: module.held.__setitem__(0, torch.tensor(value)),
    "ctypes": lambda module, value: setattr(module.held, "value", value),
    "builtin": lambda module, value: DICT.__setitem__("by", value),
}
ITEMS = ("UserList", "array", "bytes", "NumPy")
PUT |= dict.fromkeys(ITEMS, lambda module, value: module.held.__setitem__(0, int(value)))


def model_with(make):
    model = tiny("llama", "sdpa")
    module = model.model.layers[0].mlp = make(model.model.layers[0].mlp).eval()
    return model, module


def generate(model):
    return model.generate(**INPUTS, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", READERS)
def test_a_value_that_a_forward_reads(name):
    """A step that changes it is noticed: what the model reads is equal as long as nothing changes, and differs then."""
    put = PUT.get(name, lambda module, value: (put_global(value), cached.cache_clear()))
    model, module = model_with(type("Reader", (Scaled,), READERS[name]))
    put(module, 1.0)
    assert float(module.read()) == 1.0
    before, again = (read(model, of_user=True) for _ in range(2))
    assert before.state.differs(again.state) is None and before.of_user == again.of_user
    put(module, 5.0)
    assert float(module.read()) == 5.0
    after = read(model, of_user=True)
    assert before.state.differs(after.state) or before.of_user != after.of_user
    put(module, 1.0)


def read_otherwise(self):
    """By ways that a reader of the model does not follow."""
    import settings_of_the_test

    of_file = settings_of_the_test.BY * getattr(SETTINGS, "BY") * importlib.import_module("settings_of_the_test").BY  # noqa: B009
    return of_file * float(os.environ[VARIABLE]) * CONTEXT.get() * globals()["BY"] * dispatched(0) * OfMeta.by * self.held[0]


def test_each_call_reads_anew_whatever_a_forward_reads(monkeypatch):
    reader = {"read": read_otherwise, "new": lambda self: np.array([1.0, None], dtype=object)}
    (twin, module_of_twin), (model, module) = (model_with(type("Reader", (Scaled,), reader)) for _ in range(2))
    CONTEXT.set(1.0)
    with hf_fastattn.patch(model) as patch, torch.no_grad():
        before = generate(twin)
        assert torch.equal(generate(model), before) and torch.equal(generate(model), before)
        for value, put in enumerate((put_global, CONTEXT.set, lambda value: monkeypatch.setenv(VARIABLE, str(value))), 3):
            put(float(value))
        SETTINGS.BY = module.held[0] = module_of_twin.held[0] = 0.4
        after = generate(twin)
        assert not torch.equal(after, before), "the change has no effect"
        assert torch.equal(generate(model), after) and (patch.captures, patch.reasons) == (3, [])


class Attributes:
    def __init__(self):
        vars(self)["_values"] = {"a": 1}

    def __getattr__(self, name):
        return self._values[name]


class Counted:
    ids = itertools.count()

    def log(self):
        import pandas  # not installed, perhaps

        return pandas.DataFrame(), BY, next(self.ids)

    def read(self):
        return self.steps, self.outputs


HELD = {
    "object with __getattr__": Attributes,
    "object whose class counts": Counted,
    "logger": lambda: logging.getLogger("of the test"),
    "slots": Slots,
    "context manager": lambda: contextlib.contextmanager(lambda: iter([None])),
    "method of a file": lambda: sys.stderr.write,
    "types": lambda: [int, np.float32, Slots, enum.Enum, np.dtype("f4"), np.random.default_rng(0)],
}
steps = outputs = 0


@pytest.mark.parametrize("kind", HELD)
def test_steps_are_captured_once_whatever_a_module_holds(kind):
    """Of a class of Transformers: no code of the user runs."""
    global steps
    model = tiny("llama", "sdpa")
    model.model.layers[0].mlp.held = HELD[kind]()
    want = generate(model)
    with hf_fastattn.patch(model) as patch:
        for _ in range(3):
            assert torch.equal(generate(model), want)
            steps += 1  # which no step reads
    assert (patch.captures, patch.reasons) == (1, [])


def test_a_function_that_caches_by_length():
    by_length = functools.lru_cache(lambda tokens: 1.0 + tokens)
    model, _ = model_with(type("ByLength", (Scaled,), {"forward": lambda self, x: self.inner(x) * by_length(x.shape[1])}))
    want = generate(model)
    with hf_fastattn.patch(model) as patch:
        assert all(torch.equal(generate(model), want) for _ in range(3)) and not patch.reasons


def test_a_held_generator_of_random_numbers_is_not_frozen():
    for make in (lambda: random.Random(1), lambda: np.random.default_rng(1)):
        model, module = model_with(Scaled)
        module.read = functools.partial(lambda module: 1.0 + module.held.random(), module)
        module.held = make()
        want = [generate(model) for _ in range(3)]
        module.held = make()
        with pytest.warns(match="changes values that the next step reads"), hf_fastattn.patch(model):
            assert torch.equal(generate(model), want[0])


def test_functions_read_different_names_of_one_file():
    SETTINGS.OTHER = 1.0
    both = {"first": lambda self: SETTINGS.BY, "second": lambda self: SETTINGS.OTHER}
    model, _ = model_with(type("Two", (Scaled,), both | {"read": lambda self: self.first() * self.second()}))
    before = read(model, of_user=True).of_user
    SETTINGS.OTHER = 2.0
    assert before != read(model, of_user=True).of_user


def test_an_array_that_is_too_large_to_compare_and_a_weak_proxy_are_refused(monkeypatch):
    monkeypatch.setattr(state, "LARGEST", 1000)
    model, module = model_with(Scaled)
    module.held = np.ones(200)
    with pytest.raises(Uncapturable, match=r"mlp\.held refers to 1600 bytes \(ndarray\), too many to compare"):
        read(model)
    kept = Helper()
    for of in (kept, model.model.norm):
        module.held = None
        module.held = weakref.proxy(of)
        with pytest.raises(Uncapturable, match=r"mlp\.held is a weak proxy"):
            read(model)
        del module.held


def test_whose_code_is_trusted(monkeypatch, tmp_path):
    """A file of the user may have a name of the standard library."""
    assert all(map(hf.is_trusted, ("torch.nn", np.__name__, "transformers_modules.of_a_repository", "functools", 1)))
    assert not any(map(hf.is_trusted, (__name__, "no module of this name", "", None, "__main__", "__mp_main__")))
    module = types.ModuleType("sched")
    module.__file__ = str(tmp_path / "sched.py")
    monkeypatch.setitem(sys.modules, "sched", module)
    assert not hf.is_trusted("sched") and hf.is_trusted("queue") and hf.is_of_python("queue")


def test_the_names_in_code_are_those_that_dis_finds():
    many = (
        "def many():\n    import os.path\n" + "".join(f"    name{i} = own{i}\n" for i in range(600)) + "    from ..x import y\n"
    )
    codes, found = [compile(many, "many", "exec")], []
    codes += [each.__code__ for file in (torch.nn.functional, torch.nn.modules.module, utils, path) for each in functions(file)]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        steps = [*dis.get_instructions(code)]
        assert hf.globals_in(code) == {each.argval for each in steps if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        found += path._imports_in(code)
    assert {(0, "os.path"), (2, "x")} <= {*found}


def functions(file):
    return [each for each in vars(file).values() if isinstance(each, types.FunctionType)]


CODE = """
import helper
SCALE = 1.0
def first(): return SCALE
def second(): return helper.by(first())
def late():
    try: import helper_of_helper
    except ImportError: pass
def other(): return second
"""


def test_a_later_rehearsal_adds_the_code_that_it_runs_first(monkeypatch):
    """Where it runs no other, the places of names are not looked up again; what has changed since is found in both cases."""
    helper, file = types.ModuleType("helper"), types.ModuleType("file_of_a_package")
    exec("def by(x): return x", vars(helper))
    monkeypatch.setitem(sys.modules, "helper", helper)
    exec(CODE, vars(file))
    monkeypatch.setattr(packages, "PACKAGES", packages.PACKAGES | {"helper", "file_of_a_package", __name__})
    model, known, looked_up = tiny("llama"), path.Path(), []
    collect = path.Path._collect
    monkeypatch.setattr(path.Path, "_collect", lambda self, model: looked_up.append(1) or collect(self, model))

    def rehearse(name):
        with known.recorded(model) as own:
            getattr(file, name)()
        assert not own
        return known.now(), len(looked_up)

    assert (rehearse("first"), rehearse("first"), rehearse("second")) == ((0, 1), (0, 1), (0, 2))
    helper.more = 1.0  # an attribute that known code may now find
    assert (rehearse("second"), rehearse("second")) == ((0, 3), (0, 3))
    assert rehearse("late") == (0, 4)  # it imports a module, which is not there
    monkeypatch.setitem(sys.modules, "helper_of_helper", types.ModuleType("helper_of_helper"))
    assert (rehearse("late"), rehearse("late")) == ((0, 5), (0, 5))
    monkeypatch.setattr(helper, "by", lambda x: 2 * x)
    assert known.now() == 1  # and all is forgotten
    assert (rehearse("second"), rehearse("first")) == ((1, 6), (1, 6))
    file.SCALE = 2.0
    assert rehearse("first") == (1, 7)  # found at once, as before the rehearsal
    file.SCALE = 3.0
    assert known.now() == 2
    rehearse("first")
    model.model.norm = nn.Identity()  # of a class that no rehearsal has met
    assert rehearse("first") == (2, 9)
    del file.SCALE
    assert known.now() == 3


@pytest.mark.parametrize("name", ["model.layers.0", "model.layers.0.mlp", "lm_head"])
def test_a_compiled_submodule(name):
    model = tiny("llama", "sdpa")
    want = generate(model)
    model.set_submodule(name, torch.compile(model.get_submodule(name), backend="eager"))
    with hf_fastattn.patch(model):
        for _ in range(3):
            assert torch.equal(generate(model), want)


def test_random_numbers_of_the_host_are_those_of_the_unpatched_model():
    for draw, seed in ((random.random, random.seed), (np.random.rand, np.random.seed)):
        model, module = model_with(Scaled)
        module.read = lambda draw=draw: 9 * draw() - 4
        seed(1)
        want = [generate(model) for _ in range(2)]
        assert not torch.equal(*want), "the numbers have no effect"
        with pytest.warns(match="draws random numbers on the host"), hf_fastattn.patch(model):
            seed(1)
            assert all(torch.equal(generate(model), each) for each in want)


def test_a_prompt_that_is_padded_draws_no_other_random_numbers(monkeypatch):
    """The layers drop out in training mode, for tokens of padding too."""
    monkeypatch.undo()  # prompts are captured here
    fake_graph.use(monkeypatch)
    model = tiny("opt", "sdpa", **{**OPT, "dropout": 0.3}).train()
    given = prompts("no_padding", "cpu", rows=2, length=24)
    want = models.generate(model, given, max_new_tokens=6)  # which sets the seed
    with hf_fastattn.patch(model) as patch:
        assert all(torch.equal(models.generate(model, given, max_new_tokens=6), want) for _ in range(4))
    assert patch.captures


def test_the_device_of_an_offloaded_model_is_that_of_its_hooks(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.undo()  # without the substitute for graphs
    model = tiny("llama", "sdpa")
    want = generate(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta" and hf.device_of(model).type == "cpu"
    with hf_fastattn.patch(model) as patch, pytest.warns(match="weights are offloaded"):
        assert torch.equal(generate(model), want)
    assert patch.reasons == ["the model's weights are offloaded, and graphs are for weights that stay on a CUDA device"]
