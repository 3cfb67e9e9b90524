"""The state that a decode graph depends on: after any change between two calls, a patched and an unpatched model agree."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import itertools
import sys
import types
import warnings
import weakref
from unittest.mock import Mock

import fake_graph
import models
import pytest
import torch
from calls import Averaged, as_kernel, attention, events_of
from cases import pairs, slow_unless
from models import COMMON, FAMILIES, prompts, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import MinLengthLogitsProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

import hf_fastattn
from hf_fastattn.kernels import HAS_TRITON
from hf_fastattn.patches.fused import linears, residual
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.graphs import verify
from hf_fastattn.patches.graphs.path import Path
from hf_fastattn.patches.graphs.snapshot import Last
from hf_fastattn.patches.graphs.state import Reader, Uncapturable, read

pytestmark = pytest.mark.usefixtures("captured_steps")
NEW = 8


@pytest.fixture
def inputs():
    return prompts("no_padding", "cpu", rows=1)


@pytest.fixture
def model():
    return tiny("llama", "sdpa")


twin = model
generate = functools.partial(models.generate, max_new_tokens=NEW)


class Steer(nn.Module):
    """Adds the result of `vector(self)` to its output."""

    def __init__(self, inner, vector, held):
        super().__init__()
        self.inner, self.vector, self.held = inner, vector, held

    def forward(self, x):
        return self.inner(x) + self.vector(self)


REPLACED = {
    "torch.rsqrt": lambda x, own=torch.rsqrt: 0.5 * own(x),
    "torch.cat": lambda x, dim=0, own=torch.cat: own(x, dim=dim) * (-1 if x[0].dim() == 4 and dim == -1 else 1),
    "torch.nn.functional.silu": lambda x, own=nn.functional.silu, **options: 2 * own(x, **options),
    "torch.nn.functional.linear": lambda *args, own=nn.functional.linear: 1.25 * own(*args),
    "torch.Tensor.pow": lambda x, by, own=torch.Tensor.pow: own(x, by) + 1.0,
    "transformers.activations.SiLUActivation.forward": lambda self, x: nn.functional.relu(x),
    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb": lambda q, k, *args, **options: (q, k),
    "transformers.models.llama.modeling_llama.rotate_half": lambda x, own=modeling_llama.rotate_half: -own(x),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward": lambda self, x: x * 0.5,
    "transformers.models.llama.modeling_llama.LlamaMLP.forward": lambda *args, own=modeling_llama.LlamaMLP.forward: -own(*args),
}


@pytest.mark.parametrize("name", slow_unless([*REPLACED][1::3].__contains__, REPLACED))
def test_a_function_of_a_library_replaced_between_two_calls(inputs, name, monkeypatch, model, twin):
    """torch's, that of a module within torch, a method of tensors, of a class, of a model's file; and put back."""
    with hf_fastattn.patch(model, "reference") as patch:
        before = generate(model, inputs)
        with monkeypatch.context() as replaced:
            replaced.setattr(name, REPLACED[name])
            expected = generate(twin, inputs)
            assert not torch.equal(before, expected), "the replacement has no effect"
            for _ in range(2):
                assert torch.equal(generate(model, inputs), expected)
        assert torch.equal(generate(model, inputs), before)
        assert patch.captures == 4 and not patch.reasons


def test_a_backend_registered_again(inputs):
    def make(sign):
        @as_kernel
        def run(q, k, v, spans=None, **options):
            return sign * attention(q, k, v, spans, **options)

        return hf_fastattn.Backend(name="mine", summary="", prefill=run)

    hf_fastattn.register(make(-1))
    model = tiny("llama", "mine")
    expected = generate(model, inputs)
    hf_fastattn.register(make(1))
    with hf_fastattn.patch(model, "mine") as patch:
        assert not torch.equal(generate(model, inputs), expected)
        hf_fastattn.register(make(-1))
        assert torch.equal(generate(model, inputs), expected)
        assert patch.captures == 2


SETTINGS = {
    "precision": (torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "inference mode": (None, None, None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_value_of_torchs_settings_has_its_own_graph(inputs, name, model):
    put, value, before = SETTINGS[name]
    with hf_fastattn.patch(model) as patch, contextlib.ExitStack() as stack:
        for _ in range(2):
            generate(model, inputs)
            if put is not None:
                stack.callback(put, before)
                put(value)
            with contextlib.nullcontext() if put else torch.inference_mode():
                generate(model, inputs)
            stack.close()
        assert patch.captures == 2


def test_dispatch_modes_are_not_bypassed(inputs, model):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += function is torch.ops.aten.mm.default
            return function(*args, **(kwargs or {}))

    with hf_fastattn.patch(model) as patch, Count(), pytest.warns(match="dispatch mode"):
        generate(model, inputs)
        assert Count.calls >= 15 * NEW and patch.captures == 0 and patch.uncaptured == NEW - 1


def qwen_vl():
    """A tiny Qwen2.5-VL, which stores rope_deltas at every prompt, and a prompt with an image."""
    text = {**COMMON, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 10000.0}}
    vision = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "depth": 2, "num_heads": 2, "patch_size": 14}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, **tokens)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 102, 100, 103
    image = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return model, {"input_ids": ids, "mm_token_type_ids": (ids == 100).int(), **image}


def test_values_that_no_step_reads_do_not_count():
    model, inputs = qwen_vl()
    output = getattr(modeling_qwen2_5_vl, "Qwen2_5_VLCausalLMOutputWithPast", None)
    if "rope_deltas" in getattr(output, "__annotations__", ()):
        with hf_fastattn.patch(model), pytest.warns(match="rope_deltas"):
            generate(model, inputs)
        pytest.skip("on this Transformers rope_deltas are part of each step's output")
    expected = generate(model, inputs)
    kept = []
    with hf_fastattn.patch(model) as patch:
        for _ in range(4):
            assert torch.equal(generate(model, inputs), expected)
            kept.append(model.model.rope_deltas)  # so that the next one has another address
        assert (patch.captures, patch.reasons) == (1, []) and len({delta.data_ptr() for delta in kept}) > 1


def test_values_that_change_in_every_call_are_named(inputs, model):
    attention = model.model.layers[0].self_attn
    with hf_fastattn.patch(model) as patch, pytest.warns(match=r"captured again.*layers\.0\.self_attn\.scaling"):
        for step in range(6):
            attention.scaling = 0.25 + step
            generate(model, inputs)
        assert patch.captures == 6


def test_a_model_that_cannot_be_captured_is_not_said_to_be_captured_again(inputs):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # its frequencies grow with the text
    model = tiny("llama", "sdpa", max_position_embeddings=64, rope_parameters=rope)
    with hf_fastattn.patch(model) as patch, warnings.catch_warnings(action="ignore"):
        for length in range(70, 96, 4):
            generate(model, {name: value[:, :length] for name, value in inputs.items()})
        assert not patch.captures and len(patch.reasons) == 1 and "captured again" not in patch.reasons[0]


def test_a_graph_keeps_no_part_of_the_model_alive(inputs, model, without_collector):
    with hf_fastattn.patch(model) as patch:
        mlp = model.model.layers[0].mlp
        old = mlp.forward
        mlp.forward = function = lambda x: 2 * old(x)
        generate(model, inputs)
        assert patch.captures == 1
        gone = [weakref.ref(function)]
        del mlp.forward, function
        generate(model, inputs)
        gone += [weakref.ref(model.model.layers[1].mlp.up_proj), weakref.ref(model.lm_head.bias or model.model.norm)]
        del model.model.layers[1].mlp.up_proj
        model.model.norm = None
        assert [each() for each in gone] == [None] * 3


def _rope(model):
    return model.model.rotary_emb


def _retarget(name):
    """Replace a function of Llama's file by an equal one."""
    own = getattr(modeling_llama, name)
    return modeling_llama, name, types.FunctionType(own.__code__, own.__globals__, name, own.__defaults__, own.__closure__)


# What may not be missed: a function of the model that changes it. Some return what monkeypatch has to set.
NOTICED = {
    "forward_hook": lambda m: m.model.layers[1].mlp.register_forward_hook(print) and None,
    "forward_pre_hook": lambda m: m.lm_head.register_forward_pre_hook(print) and None,
    "own_forward": lambda m: setattr(m.model.layers[1].mlp, "forward", m.model.layers[0].mlp.forward),
    "own_forward_in_place_of_an_attribute": lambda m: (
        vars(m.lm_head).pop("_is_hf_initialized") and setattr(m.lm_head, "forward", m.model.norm.forward)
    ),
    "train": lambda m: m.model.layers[1].self_attn.train() and None,
    "constant": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "constant_as_a_tensor": lambda m: setattr(m.model.norm, "variance_epsilon", torch.tensor(m.model.norm.variance_epsilon)),
    "new_attribute": lambda m: setattr(m.model.layers[0], "scale", 2.0),
    "attribute_removed": lambda m: delattr(m.model.norm, "variance_epsilon"),
    "attribute_of_the_model": lambda m: setattr(m, "scale", 2.0),
    "config_field": lambda m: setattr(m.config, "note", 1),
    "config_list": lambda m: m.config.rope_parameters.update(note=1),
    "config_in_a_tuple": lambda m: m.model.layers[1].mlp.held[0].update({"note": 1}),
    "another_config": lambda m: setattr(m.model.layers[1].mlp, "config", type(m.config)(**m.config.to_dict())),
    "parameter": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.clone())),
    "parameter_none": lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(128))),
    "parameter_removed": lambda m: setattr(m.lm_head, "weight", None),
    "strides": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.view(64, 128).t()),
    "shape": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.view(64, 128)),
    "part": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data[:60]),
    "dtype": lambda m: m.lm_head.half() and None,
    "bits": lambda m: setattr(_rope(m), "inv_freq", _rope(m).inv_freq.view(torch.int32)),
    "subclass": lambda m: setattr(m.lm_head, "weight", nn.Parameter(Negated(m.lm_head.weight.data), requires_grad=False)),
    "buffer": lambda m: m.model.norm.register_buffer("more", torch.zeros(2)),
    "renamed": lambda m: m.model.layers[1].mlp.add_module("other", vars(m.model.layers[1].mlp)["_modules"].pop("down_proj")),
    "swapped": lambda m: setattr(m.model, "layers", nn.ModuleList([m.model.layers[1], m.model.layers[0]])),
    "added": lambda m: m.model.layers[0].add_module("more", nn.Identity()),
    "removed": lambda m: m.model.layers.__delitem__(1),
    "class": lambda m: setattr(m.model.norm, "__class__", type("Other", (type(m.model.norm),), {})),
    "forward_of_the_class": lambda m: (type(m.model.norm), "forward", lambda self, x: x),
    "partial_as_forward_of_the_class": lambda m: ((cls := type(m.model.norm)), "forward", functools.partialmethod(cls.forward)),
    "method_of_the_class": lambda m: (modeling_llama.LlamaRMSNorm, "extra_repr", lambda self: ""),
    "attribute_of_the_class": lambda m: (modeling_llama.LlamaRMSNorm, "weight", 2.0),  # found before the parameter
    "function_of_the_file": lambda m: _retarget("rotate_half"),
    "function_called_by_another": lambda m: _retarget("repeat_kv"),
    "default_of_a_function": lambda m: (modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,)),
    "code_of_a_function": lambda m: (modeling_llama.rotate_half, "__code__", modeling_llama.repeat_kv.__code__),
}


def fused(model):
    """The model with the modules that patch() gives it on a GPU."""
    fuse.fuse(fuse.find(model.bfloat16(), runs=lambda device: True))
    linears.join(model)
    residual.join(model)
    return model


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def recorded(model) -> tuple[Path, list[str]]:
    """The code of one step of the model, and that of no trusted package."""
    path, ids = Path(), torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad(), path.recorded(model) as own:
        model(input_ids=ids, use_cache=False)
    return path, own


def test_the_functions_that_record_are_no_part_of_a_step():
    """Names that they look up would be compared, also those of another file."""
    path, own = recorded(tiny("llama", "eager"))
    files = {code.co_filename for code in path._codes}
    assert path._codes and not own and not any(file.endswith("path.py") and "graphs" in file for file in files)


def test_what_an_interrupted_rehearsal_has_found_is_dropped(model, monkeypatch):
    path = Path()
    monkeypatch.setattr(path, "_follow", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        path._collect(model)
    assert path.now() == 1 and path.now() == 1 and not path._classes


@pytest.mark.parametrize("name", NOTICED)
@pytest.mark.parametrize("prepared", [lambda model: model, pytest.param(fused, marks=needs_triton)], ids=["own", "fused"])
def test_each_change_is_noticed(name, prepared, monkeypatch):
    model, last = prepared(tiny("llama", "eager")), Last()
    model.model.layers[1].mlp.held = (type(model.config)(), 1)
    path, own = recorded(tiny("llama", "eager"))  # the fused modules run on GPUs only
    path._collect(model)
    first = last.current(model)[0]
    assert last.current(model)[0] is first and last.snapshot.tensors(model) and path.now() == 0 and not own
    change = NOTICED[name](model)
    if change:
        monkeypatch.setattr(*change, raising=False)
    with contextlib.suppress(Uncapturable):
        assert path.now() or (last.snapshot.tensors(model) is None and first.differs(last.current(model)[0]))


def test_a_number_on_the_host_is_compared_by_value(model, monkeypatch):
    """Launches on a GPU take it, so it is a part of a graph."""
    monkeypatch.setattr(Reader, "on_gpu", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr(Reader, "devices", property(lambda _: set(), lambda *_: None), raising=False)
    last, mlp = Last(), model.model.layers[0].mlp
    mlp.by, mlp.others = torch.tensor(1.0), [torch.tensor(2)]
    first = last.current(model)[0]
    assert last.current(model)[0] is first
    for number, name in ((mlp.by, "by"), (mlp.others[0], "others")):
        number.fill_(7)
        assert first.differs(last.current(model)[0]) == f"model.layers.0.mlp.{name}"
        number.fill_(1 if name == "by" else 2)
        first = last.current(model)[0]


@needs_triton
def test_the_description_of_a_launch_is_no_code_of_the_users(monkeypatch):
    """It runs a function that Triton has generated; the first launch of a kernel may be in a rehearsal."""
    import triton

    from hf_fastattn.kernels.ahead import describe

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    kernel = triton.jit(_kernel)

    class Launches(torch.nn.Module):
        def forward(self, **_):
            describe.describe(kernel, (torch.ones(1, device="meta"), 1), {"num_warps": 4}, 90)

    assert [each for each in recorded(Launches())[1] if "generated code" in each] == []


def _kernel(x, n):
    pass


def test_a_snapshot_keeps_nothing_of_the_model_alive(model, without_collector):
    last = Last()
    model.model.layers[0].mlp.held = [torch.ones(3)]
    last.current(model)
    gone = [weakref.ref(model.model.layers[1].mlp), weakref.ref(model.lm_head.weight.untyped_storage())]
    gone += [weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0].mlp.held[0])]
    del model.model.layers[1]
    model.lm_head = model.model.layers[0].mlp.held = None
    assert not any(ref() for ref in gone) and last.snapshot.tensors(model) is None


def test_an_unchanged_model_is_read_once(inputs, monkeypatch, model):
    reads, modules = [], Reader.modules
    monkeypatch.setattr(Reader, "modules", lambda *args: reads.append(1) or modules(*args))
    with hf_fastattn.patch(model) as patch:
        for _ in range(5):
            generate(model, inputs)
        assert len(reads) == 3 and patch.captures == 1  # before and after the rehearsal, too
        model.model.norm.variance_epsilon = 0.5
        generate(model, inputs)
        assert len(reads) == 6 and patch.captures == 2


def test_idle_buffers_are_no_part_of_a_model(inputs, model):
    """The hook that frees them for training refers to their pool."""
    with hf_fastattn.patch(model):
        last = Last()
        for rows in (1, 2):
            generate(model, {"inputs": inputs["input_ids"].expand(rows, -1)}, max_new_tokens=1)
            assert last.snapshot is None or last.snapshot.tensors(model)
            last.current(model)
        assert len(last.snapshot.memory) == len(read(model).tensors)


def test_tensors_of_subclasses_and_what_the_code_of_a_user_refers_to(model):
    held, layer, stored = {"by": 1.0}, model.model.layers[0], torch.randn(64, 64)
    layer.mlp = Steer(layer.mlp, lambda steer: held["by"], None)
    layer.self_attn.o_proj.weight = nn.Parameter(Negated(stored), requires_grad=False)
    first, last = read(model, of_user=True), Last()
    held["by"] = 2.0
    assert first.of_user != read(model, of_user=True).of_user
    held["by"] = 1.0
    assert first.of_user == read(model, of_user=True).of_user
    assert last.current(model)[0] is last.current(model)[0] and last.snapshot.tensors(model)
    layer.self_attn.o_proj.weight.stored = stored.clone()
    assert last.snapshot.tensors(model) is None
    assert first.state.differs(read(model, of_user=True).state) == "model.layers.0.self_attn.o_proj.weight"


def test_code_of_the_user_is_captured_in_each_call_and_said(inputs, model):
    held = {"by": 1.0}
    model.model.layers[0].mlp = Steer(model.model.layers[0].mlp, lambda steer: held["by"], None)
    with hf_fastattn.patch(model) as patch:
        with pytest.warns(match=r"captures its steps anew.*Steer\.forward\(\) of test_depends.*keep_graphs=True"):
            generate(model, inputs)
        for _ in range(2):
            generate(model, inputs)
        assert patch.captures == 3 and "Steer.forward() of test_depends" in str(patch) and not patch.reasons
        assert len([entry for held in patch._graphs.entries.values() for entry in held]) == 1
        with pytest.warns(match="valid for one call, and 2 tokens do not repay it"):
            generate(model, inputs, max_new_tokens=4)
        with pytest.warns(match="and other code runs between the steps"):
            generate(model, inputs, logits_processor=[lambda ids, scores: scores])
        assert patch.captures == 3
    with hf_fastattn.patch(model, keep_graphs=True) as patch, warnings.catch_warnings(action="error"):
        for _ in range(3):
            generate(model, inputs)
        generate(model, inputs, logits_processor=[lambda ids, scores: scores])
        assert patch.captures == 1


def test_a_subclass_whose_code_does_not_run_is_captured_once(inputs, model):
    class Named(modeling_llama.LlamaMLP):
        def describe(self):
            return "not run in a step"

    expected = generate(model, inputs)
    model.model.layers[0].mlp.__class__ = Named
    with hf_fastattn.patch(model) as patch:
        assert all(torch.equal(generate(model, inputs), expected) for _ in range(3))
        assert (patch.captures, patch.reasons) == (1, [])


def test_a_setting_of_torch_that_replaces_another(inputs, model, monkeypatch):
    """After a change of fp32_precision torch refuses to tell the older settings."""
    expected = generate(model, inputs)
    with hf_fastattn.patch(model) as patch:
        for precision in ("ieee", "tf32", "tf32"):
            monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
            assert torch.equal(generate(model, inputs), expected)
        assert patch.captures and not patch.reasons


def test_a_function_mode_is_not_passed_by(inputs, model, twin):
    class Half(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return 0.5 * out if function is torch.nn.functional.linear else out

    with hf_fastattn.patch(model) as patch:
        generate(model, inputs)
        with Half(), warnings.catch_warnings(action="ignore"):
            assert torch.equal(generate(model, inputs), generate(twin, inputs))
        assert patch.captures == 1 and "a function mode of torch is active" in patch.reasons[0]


def test_an_attribute_that_is_read_by_a_computed_name(inputs, monkeypatch):
    """And the code may change while no graph is valid."""
    model, twin = tiny("gemma3_text", "sdpa"), tiny("gemma3_text", "sdpa")
    with hf_fastattn.patch(model) as patch:
        generate(model, inputs)
        cls = type(model.model.rotary_emb)
        monkeypatch.setattr(cls, "full_attention_attention_scaling", property(lambda self: 0.2), raising=False)
        assert torch.equal(generate(model, inputs), generate(twin, inputs)) and patch.captures == 2
        path, version = patch._graphs.path, patch._graphs.path.now()
        monkeypatch.setattr(cls, "later", 1, raising=False)
        assert path.now() == path.now() == version + 1


def test_names_and_attributes_that_are_found_otherwise(inputs, monkeypatch, model, twin):
    """A function that a forward imports, and a Namespace that a module holds. Both forwards are code of a package."""
    import argparse

    held = argparse.Namespace(scale=1.0)

    def forward(self, x):
        from transformers_modules.of_a_test import act

        return held.scale * self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

    code = types.FunctionType(forward.__code__, vars(modeling_llama), "forward", None, forward.__closure__)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", code)
    for each in (model, twin):
        each.model.layers[0].mlp.held = held
    act = torch.nn.functional.silu
    module = types.ModuleType("transformers_modules.of_a_test")
    module.act = act
    monkeypatch.setitem(sys.modules, "transformers_modules", types.ModuleType("transformers_modules"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with hf_fastattn.patch(model, fuse=False) as patch:
        generate(model, inputs)
        module.act = torch.nn.functional.gelu
        assert torch.equal(generate(model, inputs), generate(twin, inputs))
        module.act = act
        generate(model, inputs)
        held.scale = 0.3
        assert torch.equal(generate(model, inputs), generate(twin, inputs))
        assert not patch.uncaptured


def test_a_refusal_ends_with_its_cause(inputs, monkeypatch, model):
    """A function of a library that reads a value on the host, and is put back."""
    silu = torch.nn.functional.silu
    with hf_fastattn.patch(model) as patch, warnings.catch_warnings(action="ignore"):
        with monkeypatch.context() as context:
            context.setattr(torch.nn.functional, "silu", lambda x, inplace=False: silu(x) + 0 * x.sum().item())
            generate(model, inputs)
        assert not patch.captures
        generate(model, inputs), generate(model, inputs)
        assert patch.captures == 1


def test_state_of_the_standard_library_is_no_code_of_a_step(inputs, monkeypatch, model):
    """A step that warns runs code of `warnings`, whose filters differ within the rehearsal."""
    rotate_half = modeling_llama.rotate_half

    def warns(x):
        with warnings.catch_warnings(action="ignore"):
            warnings.warn("of a library", stacklevel=2)
            return rotate_half(x)

    warns.__module__, code = modeling_llama.__name__, warns.__code__
    function = types.FunctionType(code, {**vars(modeling_llama), "warnings": warnings}, "rotate_half", None, warns.__closure__)
    monkeypatch.setattr(modeling_llama, "rotate_half", function)
    with hf_fastattn.patch(model) as patch:
        for _ in range(3):
            with warnings.catch_warnings():
                generate(model, inputs)
        assert (patch.captures, patch.reasons) == (1, [])


def test_callbacks_of_the_garbage_collector_are_no_code_of_a_step(inputs, model):
    threshold = gc.get_threshold()
    gc.callbacks.append(collected := lambda phase, info: None)
    gc.set_threshold(1)
    try:
        with hf_fastattn.patch(model) as patch:
            for _ in range(2):
                generate(model, inputs)
            assert (patch.captures, patch.reasons) == (1, []) and gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)


def test_a_profiler_of_the_caller_goes_on(inputs, model):
    def after_the_rehearsal():
        """Is seen by a profiler."""

    profile = cProfile.Profile()
    with hf_fastattn.patch(model) as patch:
        profile.enable()
        generate(model, inputs)
        after_the_rehearsal()
        profile.disable()
        assert patch.captures == 1 and any("after_the_rehearsal" in str(each.code) for each in profile.getstats())
        assert any(name == "generate" for _, name in events_of(lambda: generate(model, inputs)))


@pytest.mark.parametrize("where", ["class", "instance", "other_method"])
def test_a_wrapper_is_not_taken_for_the_library_function_that_it_wraps(where, inputs, monkeypatch, model, twin):
    held = {"by": 1.0}
    name = "extra_repr" if where == "other_method" else "forward"
    owner = model.model.norm if where == "instance" else modeling_llama.LlamaRMSNorm
    with hf_fastattn.patch(model) as patch:
        before = generate(model, inputs)
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.wraps(own)(lambda *args: own(*args) * held["by"]), raising=False)
        assert torch.equal(generate(model, inputs), before)
        held["by"] = 2.0
        if where == "instance":
            monkeypatch.setattr(twin.model.norm, "forward", lambda x, own=twin.model.norm.forward: 2 * own(x))
        assert torch.equal(generate(model, inputs), generate(twin, inputs))
        assert patch.captures == (2 if where == "other_method" else 3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_part_in_torchscript_that_a_patched_model_gets(inputs, model, twin):
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(generate(model, inputs), generate(twin, inputs))
        for each in (model, twin):
            each.model.layers[1].mlp.act_fn = torch.jit.script(nn.Tanh())
        more = {name: x.repeat(2, 1) for name, x in inputs.items()}  # of which one row is read
        assert torch.equal(generate(model, more), generate(twin, more)) and patch.captures == 1
        assert "act_fn is a torch.jit.ScriptModule" in patch.reasons[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_every_family_run_code_of_libraries(family):
    model_type, own = FAMILIES[family]
    model = tiny(model_type, **own)
    with hf_fastattn.patch(model):
        path, own = recorded(model)
        assert not own and path.now() == 0 and read(model).state.differs(read(model).state) is None


def test_other_bases_of_a_class_are_noticed(model):
    cls = modeling_llama.LlamaMLP
    (path, _), bases = recorded(model), cls.__bases__
    try:
        cls.__bases__ = (type("Unchanged", (nn.Module,), {}),)
        assert path.now() == 1
    finally:
        cls.__bases__ = bases


class Negated(torch.Tensor):
    """A weight stored as its negative, without an address, like quantised weights."""

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)

    def __init__(self, stored):
        self.stored = stored

    def __tensor_flatten__(self):
        return ["stored"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].stored)
        return function(*tree_map_only(cls, lambda weight: -weight.stored, args), **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.Tensor, Negated])
def test_a_weight_is_swapped_for_another(kind, model):
    """As by to() of a model with weights of a subclass; torch swaps no tensor to which there are weak references."""
    weights = [nn.Parameter(kind(torch.ones(128, 64) * n), requires_grad=False) for n in (1, 2)]
    model.lm_head.weight, last = weights.pop(), Last()
    before, _ = last.current(model)
    assert last.current(model)[0] is before and last.assumed(model) is before
    torch.utils.swap_tensors(model.lm_head.weight, weights[0])
    assert last.current(model)[0] is not before
    weights.clear()
    assert last.assumed(model) is last.state


COUNT = [0]
COUNTING = {
    "attribute": lambda self, x: (setattr(self, "calls", self.calls + 1), x * self.calls)[1],
    "list": lambda self, x: (self.held.append(1), x * len(self.held))[1],
    "global": lambda self, x: (COUNT.__setitem__(0, COUNT[0] + 1), x * COUNT[0])[1],
}


@pytest.mark.parametrize("forward", COUNTING.values(), ids=COUNTING)
def test_a_step_that_depends_on_how_often_it_ran_is_not_captured(inputs, forward):
    found = []
    for patched in (False, True):
        COUNT[0], model = 0, tiny("llama", "sdpa")
        norm = model.model.norm = type("Counting", (nn.Module,), {"forward": forward})()
        norm.calls, norm.held = 0, []
        with hf_fastattn.patch(model) if patched else contextlib.nullcontext() as patch, warnings.catch_warnings(action="ignore"):
            found += [generate(model, inputs), generate(model, inputs)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert patch.captures == 0 and patch.uncaptured == 2 * (NEW - 1)
    assert all("a step changes values that the next step reads" in reason for reason in patch.reasons)


def _other_scaling(model):
    model.model.layers[0].self_attn.scaling *= 0.3


def at(inputs, step, change):
    """A logits processor that calls change(ids) before this step."""
    return [lambda ids, scores: (ids.shape[1] == inputs["input_ids"].shape[1] + step and change(ids), scores)[1]]


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["one token", "several"])
def test_a_step_that_changes_a_tensor_in_place_is_not_captured(inputs, options, registered, model):
    """A graph is compared with Python, replayed in vain or padded, and each would change the tensor once too often."""

    def outputs(model):
        model.lm_head = Averaged(model.lm_head, model.config.hidden_size, registered)
        found = []
        for _ in range(2):
            model.lm_head.mean.zero_()
            found.append(generate(model, inputs, **options))
        return torch.stack(found)

    expected = outputs(tiny("llama", "sdpa"))
    with hf_fastattn.patch(model) as patch, warnings.catch_warnings(action="ignore"):
        assert torch.equal(outputs(model), expected)
        name = "lm_head.mean" if registered else "a tensor"
        assert patch.reasons == [f"a step changes values that the next step reads ({name})"] and not patch.captures


def _other_weight(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


CHANGES = {
    "scaling": _other_scaling,
    "weight": _other_weight,
    "hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 1.5 * out),
}
CODE = {
    "logits_processor": lambda run: [lambda ids, scores: run() or scores],
    "stopping_criteria": lambda run: [lambda ids, scores: run() or torch.zeros(len(ids), dtype=torch.bool)],
    "streamer": lambda run: types.SimpleNamespace(put=lambda ids: run(), end=lambda: None),
}


@pytest.mark.parametrize("change, place", slow_unless(pairs(CHANGES, CODE)[::2].__contains__, itertools.product(CHANGES, CODE)))
def test_code_between_two_steps_may_change_the_model(inputs, change, place, twin, model):
    def changed(model):
        left = [4]

        def run():
            left[0] -= 1
            if not left[0]:
                CHANGES[change](model)

        return generate(model, inputs, **{place: CODE[place](run)})

    before, expected = generate(twin, inputs), changed(twin)
    assert not torch.equal(before, expected), "the change has no effect"
    with hf_fastattn.patch(model) as patch, warnings.catch_warnings(action="ignore"):
        generate(model, inputs)
        assert torch.equal(changed(model), expected)
        assert bool(patch.reasons) == (change == "hook")


@pytest.mark.parametrize(
    "family, padding, more", [("llama", "no_padding", {"prompt_lookup_num_tokens": 3}), ("mistral", "left_padding", {})]
)
def test_attention_of_transformers_between_two_steps_runs_from_python(family, padding, more):
    """Its mask has the length that the host counts, and a step of several tokens in a graph attends to whole buffers."""
    inputs = prompts(padding, "cpu", rows=1 if more else 3)
    options = {"output_logits": True, "return_dict_in_generate": True, **more}

    def change(ids, scores):
        if len(calls) == 4:
            model.set_attn_implementation("sdpa")
        calls.append(ids)
        return scores

    found = []
    for graph in (False, True):
        model, calls = tiny(family, "sdpa"), []
        with hf_fastattn.patch(model, "reference", graph=graph) as patch, warnings.catch_warnings(action="ignore"):
            found.append(torch.stack(generate(model, inputs, **options, logits_processor=[change]).logits))
    torch.testing.assert_close(*found)
    assert patch.reasons == ["attn_implementation is 'sdpa', which cannot read a length from the device"]


def test_other_frequencies_between_two_steps_of_a_streaming_backend(inputs):
    found = []
    for graph in (False, True):
        model = tiny("llama", "sdpa")
        rope = model.model.rotary_emb
        change = lambda ids, rope=rope: setattr(rope, "inv_freq", 0.5 * rope.inv_freq)  # noqa: E731
        with hf_fastattn.patch(model, "streaming", window=8, graph=graph) as patch:
            found.append(generate(model, inputs, logits_processor=at(inputs, 4, change)))
    assert torch.equal(*found) and patch.captures == 2 and not patch.reasons


def test_a_model_is_surveyed_between_two_steps_only_if_other_code_runs(inputs, monkeypatch, model):
    found = []
    current = Last.current
    monkeypatch.setattr(Last, "current", lambda *args: found.append(1) or current(*args))
    counts = []
    with hf_fastattn.patch(model) as patch:
        for processor in (MinLengthLogitsProcessor(1, 2), lambda ids, scores: scores):
            generate(model, inputs, logits_processor=[processor])
            counts.append(len(found))
        assert counts == [1, NEW] and patch.captures == 1 and not patch.reasons


def test_the_model_is_compared_while_the_graph_runs(inputs, monkeypatch, model):
    order = []
    current, replay = Last.current, fake_graph.RecordedGraph.replay
    with hf_fastattn.patch(model):
        for _ in range(2):
            generate(model, inputs)
        monkeypatch.setattr(Last, "current", lambda *args: order.append("compare") or current(*args))
        monkeypatch.setattr(fake_graph.RecordedGraph, "replay", lambda graph: order.append("replay") or replay(graph))
        generate(model, inputs, logits_processor=[lambda ids, scores: scores])
    assert order == ["replay", "compare"] * (NEW - 1)


def watched(monkeypatch, patch, held, weight=lambda graph: None):
    """Append weight(graph) and the addresses of memory that the call keeps at each replay."""
    calls, replay = patch._generation._thread.calls, fake_graph.RecordedGraph.replay

    def kept(graph):
        held.append((weight(graph), {storage.data_ptr() for storage in calls[-1].forwards.present.memory}))
        replay(graph)

    monkeypatch.setattr(fake_graph.RecordedGraph, "replay", kept)


def test_a_graph_reads_no_memory_that_was_given_back_after_a_forward_without_one(inputs, monkeypatch, model):
    """The processor replaces a weight and runs the model itself, so that the next step has nothing to compare with."""
    held, read = [], {}  # read: by graph the address of the weight
    change = at(inputs, 3, lambda ids: (_other_weight(model), model(input_ids=ids)))
    with hf_fastattn.patch(model) as patch, warnings.catch_warnings(action="ignore"):
        watched(monkeypatch, patch, held, lambda graph: read.setdefault(graph, model.lm_head.weight.data_ptr()))
        for _ in range(2):
            generate(model, inputs)
        held.clear()
        generate(model, inputs, logits_processor=change, max_new_tokens=2 * NEW)
    assert len({weight for weight, _ in held}) == 2
    assert all(weight in memory for weight, memory in held if memory) and held[-1][1]


def test_a_model_that_changes_in_each_step_is_compared_before_it(inputs, model):
    """Two states, each with a graph: only the first change loses a replay."""

    def switch(ids, scores):
        model.model.layers[0].self_attn.scaling *= 2.0 if ids.shape[1] % 2 else 0.5
        return scores

    with hf_fastattn.patch(model) as patch:
        for _ in range(4):
            generate(model, inputs, logits_processor=[switch])
        before = patch.replays
        generate(model, inputs, logits_processor=[switch])
        assert patch.replays == before + NEW and patch.captures == 2


def test_a_graph_reads_no_memory_that_was_given_back(inputs, monkeypatch, model):
    """It may run once more after a tensor was dropped, and memory of a GPU without an owner may be unmapped."""
    held = []
    model.bias = [torch.zeros(64)]
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden + model.bias[0], model.lm_head.weight)
    read = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), model.bias[0])}

    def drop(ids, scores):
        if len(held) == 3:
            _other_weight(model)
            model.bias[0] = torch.ones(64)
        return scores

    with hf_fastattn.patch(model, keep_graphs=True) as patch:
        for _ in range(2):
            generate(model, inputs)
        watched(monkeypatch, patch, held)
        generate(model, inputs, logits_processor=[drop])
    memory = [each for _, each in held]
    assert len(memory) > 4 and all(read <= each for each in memory[1:4]) and not read <= memory[-1]


@pytest.mark.parametrize("compared", [True, False], ids=["a kernel of others", "no other kernel"])
def test_a_step_that_is_undone_draws_no_random_numbers(inputs, compared, monkeypatch):
    """Neither a replay for a model that has changed, nor the step from Python that a capture is compared with."""
    monkeypatch.setattr(verify, "needed", lambda model: compared)
    found = []
    for graph in (False, True):
        model = tiny("llama", "sdpa")
        model.lm_head = nn.Sequential(nn.Dropout(0.2), model.lm_head)
        change = at(inputs, 4, lambda ids, model=model: _other_scaling(model))
        with hf_fastattn.patch(model, "reference", graph=graph, keep_graphs=True) as patch:
            for _ in range(2):
                torch.manual_seed(3)
                found.append(generate(model, inputs, logits_processor=change))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert patch.captures == 3 and not patch.reasons
