"""Python values that a user's forward reads: after a change of one, a patched and an unpatched model agree.

The functions that change a value are outside of the classes that read it: a class is followed as a whole.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dataclasses
import enum
import functools
import importlib
import itertools
import logging
import os
import random
import sys
import types
import warnings
import weakref

import fake_graph
import numpy as np
import pytest
import torch
from models import prompts, tiny
from torch import nn
from transformers import LlamaConfig

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.patches.graphs import state
from hf_fastattn.patches.graphs.state import Uncapturable, read

BY = 1.0  # read by code below
SETTINGS = types.ModuleType("settings_of_the_test")
VARIABLE = "SETTING_OF_THE_TEST"


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    fake_graph.use(monkeypatch, prompts=False)
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setenv(VARIABLE, "1")
    put_global(1.0)
    put_in_file(1.0)


def put_global(value):
    global BY
    BY = value


def put_in_file(value):
    SETTINGS.BY = value


class Scaled(nn.Module):
    """Multiplies the output of a module by what a subclass reads. held: an object that it may read."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.held = inner, self.new()

    def new(self):
        return None

    def forward(self, x):
        return self.inner(x) * self.read()


class Property(Scaled):
    @property
    def by(self):
        return BY

    def read(self):
        return self.by


class Static(Scaled):
    @staticmethod
    def read():
        return BY


class OfClass(Scaled):
    @classmethod
    def read(cls):
        return BY


class Descriptor:
    def __get__(self, instance, owner):
        return BY


class OwnDescriptor(Scaled):
    by = Descriptor()

    def read(self):
        return self.by


class Cached(Scaled):
    @functools.cached_property
    def by(self):
        return lambda: BY

    def read(self):
        return self.by()


class Config:
    by = 1.0


class ClassOfHeld(Scaled):
    def new(self):
        return Config()

    def read(self):
        return self.held.by


class Helper:
    def scale(self):
        return BY

    @property
    def by(self):
        return BY

    def __call__(self):
        return BY


class MethodOfHeld(ClassOfHeld):
    def new(self):
        return Helper()

    def read(self):
        return self.held.scale()


class PropertyOfHeld(ClassOfHeld):
    def new(self):
        return Helper()


class CallOfHeld(MethodOfHeld):
    def read(self):
        return self.held()


class Names(dict):
    def scale(self):
        return BY


class OwnDict(MethodOfHeld):
    def new(self):
        return Names()


class ReplacedMethod(MethodOfHeld):
    def new(self):
        class Local:
            def scale(self):
                return 1.0

        return Local()


class Meta(type):
    by = 1.0


class OfMeta(metaclass=Meta):
    pass


class Metaclass(Scaled):
    def read(self):
        return OfMeta.by


class Import(Scaled):
    def read(self):
        import settings_of_the_test

        return settings_of_the_test.BY


class ImportFrom(Scaled):
    def read(self):
        from settings_of_the_test import BY as by

        return by


class Environment(Scaled):
    def read(self):
        return float(os.environ[VARIABLE])


class Getenv(Scaled):
    def read(self):
        return float(os.getenv(VARIABLE))


@functools.lru_cache
def cached():
    return BY


class LruCache(Scaled):
    def read(self):
        return cached()


@functools.singledispatch
def dispatched(x):
    return BY


class Dispatch(Scaled):
    def read(self):
        return dispatched(0)


def with_attribute():
    return with_attribute.by


class OfFunction(Scaled):
    def read(self):
        return with_attribute()


class Globals(Scaled):
    def read(self):
        return globals()["BY"]


class UserList(Scaled):
    def new(self):
        return collections.UserList([1.0])

    def read(self):
        return self.held[0]


class Array(UserList):
    def new(self):
        return array.array("d", [1.0])


class Bytes(UserList):
    def new(self):
        return bytearray([1])


class NumPy(UserList):
    def new(self):
        return np.ones(5000)


class Objects(UserList):
    def new(self):
        return np.array([1.0, None], dtype=object)


class Mode(enum.Enum):
    ONE, FIVE = 1.0, 5.0


@dataclasses.dataclass
class Choice:
    mode: Mode = Mode.ONE


class EnumOfHeld(Scaled):
    """All members are reached by the class, too."""

    def new(self):
        return Choice()

    def read(self):
        return self.held.mode.value


TABLE = {"one": lambda: 1.0, "five": lambda: 5.0}


class FromTable(Scaled):
    def new(self):
        return TABLE["one"]

    def read(self):
        return self.held()


class RemoteConfig(LlamaConfig):
    model_type = "llama"
    by = 1.0


class OfConfig(Scaled):
    def new(self):
        return RemoteConfig(hidden_size=64, num_attention_heads=4)

    def read(self):
        return self.held.by


class ByText(Scaled):
    def read(self):
        return getattr(SETTINGS, "BY")  # noqa: B009


class ImportByText(Scaled):
    def read(self):
        return importlib.import_module("settings_of_the_test").BY


class CType(Scaled):
    def new(self):
        return ctypes.c_double(1.0)

    def read(self):
        return self.held.value


class Builtin(Scaled):
    def new(self):
        return DICT.get

    def read(self):
        return self.held("by")


DICT = {"by": 1.0}


def put_item(module, value):
    module.held[0] = int(value)


def put_lru(module, value):
    put_global(value)
    cached.cache_clear()


def put_method(module, value):
    type(module.held).scale = lambda self: value


READERS = {
    **dict.fromkeys(
        [Property, Static, OfClass, OwnDescriptor, Cached, MethodOfHeld, PropertyOfHeld, CallOfHeld, OwnDict, Dispatch, Globals],
        lambda module, value: put_global(value),
    ),
    ClassOfHeld: lambda module, value: setattr(Config, "by", value),
    ReplacedMethod: put_method,
    Metaclass: lambda module, value: setattr(Meta, "by", value),
    EnumOfHeld: lambda module, value: setattr(module.held, "mode", Mode(value)),
    FromTable: lambda module, value: setattr(module, "held", TABLE["one" if value == 1.0 else "five"]),
    OfConfig: lambda module, value: setattr(RemoteConfig, "by", value),
    **dict.fromkeys([Import, ImportFrom, ByText, ImportByText], lambda module, value: put_in_file(value)),
    **dict.fromkeys([Environment, Getenv], lambda module, value: os.environ.__setitem__(VARIABLE, str(value))),
    LruCache: put_lru,
    OfFunction: lambda module, value: setattr(with_attribute, "by", value),
    **dict.fromkeys([UserList, Array, Bytes, NumPy, Objects], put_item),
    CType: lambda module, value: setattr(module.held, "value", value),
    Builtin: lambda module, value: DICT.__setitem__("by", value),
}


def model_with(make):
    model = tiny("llama", "sdpa")
    module = model.model.layers[0].mlp = make(model.model.layers[0].mlp).eval()
    return model, module


def generate(model, inputs):
    return model.generate(**inputs, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_value_that_a_forward_reads(reader):
    inputs, put = prompts("no_padding", "cpu", rows=1), READERS[reader]
    twin, module_of_twin = model_with(reader)
    model, module = model_with(reader)
    put(module, 1.0), put(module_of_twin, 1.0)
    with hf_fastattn.patch(model) as patch, torch.no_grad():
        before = generate(twin, inputs)
        for _ in range(2):
            assert torch.equal(generate(model, inputs), before)
        assert (patch.captures, patch.reasons) == (2, []), "it is not captured in each call"
        put(module, 5.0), put(module_of_twin, 5.0)
        after = generate(twin, inputs)
        assert not torch.equal(after, before), "the change has no effect"
        assert torch.equal(generate(model, inputs), after)
        assert (patch.captures, patch.reasons) == (3, [])
    put(module, 1.0)


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


@functools.lru_cache
def by_length(tokens):
    return 1.0 + tokens


class ByLength(Scaled):
    def forward(self, x):
        return self.inner(x) * by_length(x.shape[1])


@dataclasses.dataclass(slots=True)
class Slots:
    a: int = 1


@contextlib.contextmanager
def nothing():
    yield


HELD = {
    "object with __getattr__": Attributes,
    "object whose class counts": Counted,
    "logger": lambda: logging.getLogger("of the test"),
    "slots": Slots,
    "context manager": lambda: nothing,
    "method of a file": lambda: sys.stderr.write,
    "types": lambda: [int, np.float32, Slots, enum.Enum, np.dtype("f4"), np.random.default_rng(0)],
}
steps = outputs = 0


@pytest.mark.parametrize("kind", HELD)
def test_steps_are_captured_once_whatever_a_module_holds(kind):
    """Of a class of Transformers: no code of the user runs."""
    global steps
    inputs = prompts("no_padding", "cpu", rows=1)
    model = tiny("llama", "sdpa")
    model.model.layers[0].mlp.held = HELD[kind]()
    want = generate(model, inputs)
    with hf_fastattn.patch(model) as patch:
        for _ in range(3):
            assert torch.equal(generate(model, inputs), want)
            steps += 1  # which no step reads
    assert (patch.captures, patch.reasons) == (1, [])


def test_a_function_that_caches_by_length():
    inputs = prompts("no_padding", "cpu", rows=1)
    model, _ = model_with(ByLength)
    want = generate(model, inputs)
    with hf_fastattn.patch(model) as patch:
        assert all(torch.equal(generate(model, inputs), want) for _ in range(3)) and not patch.reasons


def test_a_held_generator_of_random_numbers_is_not_frozen():
    inputs = prompts("no_padding", "cpu", rows=1)
    for make in (lambda: random.Random(1), lambda: np.random.default_rng(1)):
        model, module = model_with(Scaled)
        module.read = functools.partial(lambda module: 1.0 + module.held.random(), module)
        module.held = make()
        want = [generate(model, inputs) for _ in range(3)]
        module.held = make()
        with pytest.warns(match="changes values that the next step reads"), hf_fastattn.patch(model):
            assert torch.equal(generate(model, inputs), want[0])


def test_functions_read_different_names_of_one_file():
    class Two(Scaled):
        def read(self):
            return self.first() * self.second()

        def first(self):
            return SETTINGS.BY

        def second(self):
            return SETTINGS.OTHER

    SETTINGS.OTHER = 1.0
    model, _ = model_with(Two)
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


def test_whose_code_is_trusted():
    assert all(map(hf.is_trusted, ("torch.nn", np.__name__, "transformers_modules.of_a_repository", "functools", 1)))
    assert not any(map(hf.is_trusted, (__name__, "no module of this name", "", None, "__main__", "__mp_main__")))


def test_a_file_of_the_user_may_have_a_name_of_the_standard_library(monkeypatch, tmp_path):
    module = types.ModuleType("sched")
    module.__file__ = str(tmp_path / "sched.py")
    monkeypatch.setitem(sys.modules, "sched", module)
    assert not hf.is_trusted("sched") and hf.is_trusted("queue") and hf.is_of_python("queue")


COUNT = 0


def test_a_step_that_counts_in_a_global_is_not_captured():
    """Between two steps of a call no other code runs, but the step's own code may change what the next one reads."""

    class Counting(Scaled):
        def read(self):
            global COUNT
            COUNT += 1
            return float(COUNT)

    global COUNT
    inputs, found = prompts("no_padding", "cpu", rows=1), []
    for patched in (False, True):
        COUNT, (model, _) = 0, model_with(Counting)
        with hf_fastattn.patch(model) if patched else contextlib.nullcontext() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(generate(model, inputs))
    assert torch.equal(*found) and patch.captures == 0 and "changes values that the next step reads" in patch.reasons[0]


@pytest.mark.parametrize("wraps", ["layers", "mlp", "lm_head"])
def test_a_compiled_submodule(wraps):
    inputs = prompts("no_padding", "cpu", rows=1)
    model = tiny("llama", "sdpa")
    want = generate(model, inputs)
    if wraps == "layers":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    elif wraps == "mlp":
        model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    else:
        model.lm_head = torch.compile(model.lm_head, backend="eager")
    with hf_fastattn.patch(model):
        for _ in range(3):
            assert torch.equal(generate(model, inputs), want)


class Noisy(nn.Module):
    def __init__(self, inner, draw):
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, x):
        return self.inner(x) * (9 * self.draw() - 4)


def test_random_numbers_of_the_host_are_those_of_the_unpatched_model():
    inputs = prompts("no_padding", "cpu", rows=1)
    for draw, seed in ((random.random, random.seed), (np.random.rand, np.random.seed)):
        model = tiny("llama", "sdpa")
        model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp, draw)
        seed(1)
        want = [generate(model, inputs) for _ in range(2)]
        assert not torch.equal(*want), "the numbers have no effect"
        with pytest.warns(match="draws random numbers on the host"), hf_fastattn.patch(model):
            seed(1)
            assert all(torch.equal(generate(model, inputs), each) for each in want)


def test_a_prompt_that_is_padded_draws_no_other_random_numbers(monkeypatch):
    """The layers drop out in training mode, for tokens of padding too."""
    monkeypatch.undo()  # prompts are captured here
    fake_graph.use(monkeypatch)
    ids = prompts("no_padding", "cpu", rows=2)["input_ids"][:, :24]
    model = tiny("opt", "sdpa", dropout=0.3, num_key_value_heads=4, ffn_dim=96, word_embed_proj_dim=64, layerdrop=0.0).train()
    torch.manual_seed(7)
    want = generate(model, {"input_ids": ids})
    with hf_fastattn.patch(model) as patch:
        for _ in range(4):
            torch.manual_seed(7)
            assert torch.equal(generate(model, {"input_ids": ids}), want)
    assert patch.captures


def test_the_device_of_an_offloaded_model_is_that_of_its_hooks(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.undo()  # without the substitute for graphs
    inputs = prompts("no_padding", "cpu", rows=1)
    model = tiny("llama", "sdpa")
    want = generate(model, inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta" and hf.device_of(model).type == "cpu"
    with hf_fastattn.patch(model) as patch, pytest.warns(match="weights are offloaded"):
        assert torch.equal(generate(model, inputs), want)
    assert patch.reasons == ["the model's weights are offloaded, and graphs are for weights that stay on a CUDA device"]
