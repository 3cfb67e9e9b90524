"""The steps of linear layers: kernels against their twin in float64, and the layers of each family against their own code."""

import contextlib
import copy
import functools
import importlib
import itertools
import re

import pytest
import torch
from calls import DEVICE, DTYPES, captured, runs_kernels
from cases import slow_unless
from models import tiny
from small_layers import Launches
from tolerance import assert_close, largest
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.caches.states import HybridStorage
from hf_fastattn.kernels import HAS_TRITON, INTERPRETED
from hf_fastattn.kernels import states as twin
from hf_fastattn.kernels.host.gpu import Target
from hf_fastattn.patches.fused import delayed as merged
from hf_fastattn.patches.fused import linears, states, subclass
from hf_fastattn.patches.fused import norms as fuse

if HAS_TRITON:
    from hf_fastattn.kernels.ahead.describe import describing
    from hf_fastattn.kernels.decode import conv_update, gated_delta, gated_norm, reorder, selective

pytestmark = pytest.mark.usefixtures("seeded_without_gradients")

GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
GATED |= {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_expand": 2}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2}
ZAMBA = {"mamba_d_state": 24, "mamba_ngroups": 2, "n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"]}
ZAMBA |= {"num_mem_blocks": 1, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4}
GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
GRANITE |= {"shared_intermediate_size": 32}
CONV = {"layer_types": ["conv", "full_attention"]}
FAMILIES = {  # the configuration, and the kernels of its linear layers
    "qwen3_next": (GATED | EXPERTS, ("gated_delta", "gated_norm")),
    "qwen3_5_text": (GATED, ("gated_delta", "gated_norm")),
    "qwen3_5_moe_text": (GATED | EXPERTS, ("gated_delta", "gated_norm")),
    "bamba": (MAMBA | {"attn_layer_indices": [1]}, ("selective", "gated_norm")),
    "granitemoehybrid": (MAMBA | GRANITE, ("selective", "gated_norm")),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 128, "head_dim": 16}, ("selective",)),
    "falcon_h1, norm": (MAMBA | {"mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": True}, ("selective", "gated_norm")),
    "nemotron_h": (NEMOTRON | {"layers_block_type": ["mamba", "attention"], "head_dim": 16}, ("selective", "gated_norm")),
    "zamba2": (ZAMBA, ("selective", "gated_norm")),
    "lfm2": (CONV, ()),
    "lfm2_moe": (CONV | EXPERTS | {"num_dense_layers": 1}, ()),
}

STEPPED = [name for name in FAMILIES if name != "falcon_h1, norm"]  # of which the own code of 5.17 raises without generate()


def small(name):
    return tiny(name.partition(",")[0], device=DEVICE, **FAMILIES[name][0])


def modelling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float64)


def cases():
    """name: (twin, kernel, arguments in float64, index of the state)."""
    gates, wide = randn(3, 2, 4).split(2, -1), randn(3, 3 * 70)
    own = randn(4), randn(4), randn(4)
    modules = conv_update, gated_delta, selective
    conv, delta, scan = (lambda *args, module=module: module.prepared(*args).launch() for module in modules)
    yield "conv", twin.conv_update, conv, [wide[:, :70], randn(3, 70, 4), randn(70, 4), randn(70)], 1
    rest = [randn(3, 70, 3), randn(70, 3), None, False, wide[:, 70:140], wide[:, 140:]]
    yield "conv of gates", twin.conv_update, conv, [wide[:, :70], *rest], 1
    yield "delta", twin.gated_delta, delta, [randn(3, 2 * 2 * 24 + 4 * 40), *gates, *own[:2], randn(3, 4, 24, 40)], 5
    yield "selective", twin.selective, scan, [randn(3, 4 * 16 + 4 * 24), wide[:, :4], *own, randn(3, 4, 16, 24)], 5
    rest = [randn(3, 4), *own, randn(3, 4, 16, 24), wide[:, 70:134]]
    yield "selective of a gate", twin.selective, scan, [randn(3, 4 * 16 + 2 * 24), *rest], 5
    for first, late, groups in ((False, False, 1), (False, True, 3), (True, False, 3), (True, True, 1)):
        arguments = [randn(2, 3, 48), wide.view(2, -1)[:, :144].view(2, 3, 48), randn(48), 0.1, first, late, groups]
        yield f"norm {first} {late}", twin.gated_norm, gated_norm.run, arguments, None


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_are_as_exact_as_their_twin(dtype):
    eps, state_dtypes = torch.finfo(dtype).eps, {torch.float32, dtype}
    for name, function, kernel, given, at in cases():
        for state_dtype in state_dtypes if at == 5 else (dtype,):
            # A_log, D and dt_bias have the dtype of the state: models may keep them in fp32.
            wide = [i == at or (at == 5 and getattr(x, "ndim", 0) == 1) for i, x in enumerate(given)]
            dtypes = [state_dtype if each else dtype for each in wide]
            own = [x.to(to) if isinstance(x, torch.Tensor) else x for x, to in zip(given, dtypes, strict=True)]
            exact, peer, ours = ([x.clone() if i == at else x for i, x in enumerate(own)] for _ in range(3))
            exact = [x.double() if isinstance(x, torch.Tensor) else x for x in exact]
            expected, other, out = function(*exact), function(*peer), kernel(*ours)
            assert out.dtype == dtype
            assert_close(out.reshape(other.shape), expected, other, eps, largest(expected), name)
            if at is not None:
                assert_close(ours[at], exact[at], peer[at], torch.finfo(state_dtype).eps, largest(exact[at]), f"{name}, state")


@runs_kernels
def test_softplus_is_exact_for_small_and_large_arguments():
    """A sum 1 + exp(a) would round exp(a), and with a large factor the decay."""
    a, log = torch.tensor([[-30.0, -16.0, -9.0, 0.0, 19.0, 25.0], [10.0, 10.0, 5.0, 0.0, -3.0, -3.0]], device=DEVICE)
    state, zero = torch.ones(1, 6, 1, 1, device=DEVICE), torch.zeros(6, device=DEVICE)
    expected = (-log.double().exp() * torch.nn.functional.softplus(a.double())).exp()
    gated_delta.prepared(torch.zeros(1, 18, device=DEVICE), a.view(1, 6, 1), a.view(1, 6, 1), log, zero, state).launch()
    torch.testing.assert_close(state.flatten().double(), expected, atol=2e-6, rtol=1e-5)


def layers_of(past):
    return [x for layer in past.layers for kind in ("conv_states", "recurrent_states") for x in getattr(layer, kind, {}).values()]


def steps(model, past, ids):
    with Launches() as launches:
        logits = [model(ids[:, i : i + 1], **{hf.CACHE: past}).logits for i in range(ids.shape[1])]
    return torch.cat(logits, 1), [x.clone() for x in layers_of(past) if x is not None], launches.count


def begun(model, rows=2):
    ids = torch.randint(2, 128, (rows, 10), device=DEVICE)
    return model(ids[:, :7], use_cache=True)[hf.CACHE], ids[:, 7:]


QUICK = ("qwen3_next", "qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2")


@runs_kernels
@pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, STEPPED))
def test_a_family_steps_by_kernels(name):
    model = small(name)
    past, ids = begun(model)
    twin_past = copy.deepcopy(past)
    expected, expected_states, theirs = steps(model, past, ids)
    layers, norms = states.fuse(model)
    logits, after, ours = steps(model, twin_past, ids)
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=5e-5)
    for state, right in zip(after, expected_states, strict=True):
        torch.testing.assert_close(state, right, atol=1e-5 * largest(right), rtol=0)
    count = len(layers) * ids.shape[1]
    assert layers and {name.removesuffix("_kernel"): n for name, n in ours.items() if name.endswith("_kernel")} == dict.fromkeys(
        ("conv_update", *FAMILIES[name][1]), count
    )
    assert sum(theirs.values()) - sum(ours.values()) >= count * (20 if FAMILIES[name][1] else 4)
    prompt, past = model(ids, use_cache=True), model(ids, use_cache=True)[hf.CACHE]
    subclass.restore(layers + norms)
    assert not any(map(subclass.is_fused, model.modules()))
    torch.testing.assert_close(model(ids).logits, prompt.logits, atol=5e-5, rtol=5e-5)
    assert past.get_seq_length() == ids.shape[1]


def disturbed(change):
    """(logits, states) after a step with a change of the model and its cache, with and without fused layers."""
    model = small("qwen3_5_text")
    past, ids = begun(model)
    results = []
    for fused in (False, True):
        if fused:
            states.fuse(model)
        twin_past = copy.deepcopy(past)
        options = change(model, twin_past) or {}
        with Launches() as launches, options.pop("within", torch.no_grad)():
            logits = model(ids[:, :1], **{hf.CACHE: twin_past}, **options).logits
        results.append((logits.detach(), [x for x in layers_of(twin_past) if x is not None]))
    return *results, launches.count


def of_state(change):
    """A change of the first recurrent state."""
    return lambda model, past: (kept := past.layers[0].recurrent_states).__setitem__(0, change(kept[0]))


def set_attribute(of, name, value):
    """Another tensor in the place of a parameter of the first layer or of its convolution."""

    def change(model, past):
        module = of(model.model.layers[0].linear_attn)
        module._parameters.pop(name, None)
        vars(module)[name] = value.to(DEVICE)

    return change


CHANGES = {
    "a bias that is no parameter": set_attribute(lambda layer: layer.conv1d, "bias", torch.ones(160)),
    "a factor that is no parameter": set_attribute(lambda layer: layer, "A_log", torch.full((4,), 0.5)),
    "gradients": lambda model, past: {"within": torch.enable_grad},
    "autocast": lambda model, past: {"within": lambda: torch.autocast(DEVICE, torch.bfloat16)},
    "recording": lambda model, past: setattr(past.layers[0], "record_past", True),
    "a state in fp64": of_state(torch.Tensor.double),
    "a strided state": of_state(lambda state: state.transpose(2, 3).contiguous().transpose(2, 3)),
    "another activation": lambda model, past: setattr(model.model.layers[0].linear_attn, "activation", "gelu"),
}


@runs_kernels
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_kernels_do_not_support_runs_the_models_own_code(name):
    (expected, right), (logits, after), launches = disturbed(CHANGES[name])
    assert not {"conv_update_kernel", "gated_delta_kernel"} & launches.keys()
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, after, right))


@runs_kernels
@pytest.mark.parametrize("family, name", [("lfm2", "causal_conv1d_update"), ("qwen3_5_text", "l2norm")])
def test_a_function_replaced_in_a_models_file_is_used(family, name, monkeypatch):
    model, file = small(family), modelling(family.removesuffix("_text"))
    past, ids = begun(model)
    states.fuse(model)
    own, calls = getattr(file, name), []
    monkeypatch.setattr(file, name, lambda *args, **options: calls.append(1) or own(*args, **options))
    steps(model, past, ids)
    assert len(calls) >= ids.shape[1]


@runs_kernels
def test_rows_that_the_cache_does_not_have_are_refused_as_without_kernels():
    model = small("qwen3_5_text")
    past, ids = begun(model)
    states.fuse(model)
    kept = [x.clone() for x in layers_of(past)]
    with pytest.raises(RuntimeError):
        model(ids[:1].expand(3, -1)[:, :1], **{hf.CACHE: past})
    assert all(map(torch.equal, layers_of(past), kept))


@runs_kernels
def test_kernels_say_why_they_refuse():
    x, state, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(2, 8, 4, device=DEVICE), torch.zeros(8, 4, device=DEVICE)
    for change, reason in (
        ({"x": x[0]}, r"x is \(8,\)"),
        ({"weight": weight[:, :1]}, r"weight is \(8, 1\)"),
        ({"state": state[:, :, :3]}, r"state is \(2, 8, 3\)"),
        ({"bias": x}, r"bias is \(2, 8\)"),
        ({"before": x[:1]}, "a gate"),
        ({"state": state.half()}, "one dtype"),
        ({"weight": weight.clone().requires_grad_()}, "requires grad"),
    ):
        with torch.enable_grad():
            why = conv_update.why_not(**{"x": x, "state": state, "weight": weight} | change)
        assert why is not None and re.search(reason, why), why
    assert conv_update.prepared(x, state.half(), weight) is None


NORMS = {  # class, arguments: (gate first, late)
    "qwen3_next": ("Qwen3NextRMSNormGated", (64,), (False, False)),
    "qwen3_5": ("Qwen3_5RMSNormGated", (64,), (False, False)),
    "zamba2": ("Zamba2RMSNormGated", (64, 16), (True, False)),
    "falcon_h1": ("FalconH1RMSNormGated", (64, 1e-5, 2, True), (False, True)),
}


@pytest.mark.parametrize("family", NORMS)
def test_a_gated_norm_is_recognised_by_what_it_computes(family):
    name, arguments, formula = NORMS[family]
    norm = getattr(modelling(family), name)(*arguments)
    found = hf.gated_norm_of(norm)
    assert (found.first, found.late) == formula and hf.norm_of(norm) is None
    x, gate = torch.randn(3, 64), torch.randn(3, 64)
    assert torch.equal(twin.gated_norm(x, gate, *found.inputs(norm)), norm(x, gate))
    norm.activation = norm.norm_before_gate = norm.group_size = "other"  # of which each formula depends on one
    assert found.inputs(norm) is None


def test_linear_layers_are_recognised_by_their_code_and_other_gated_norms_left_alone(monkeypatch):
    assert hf.gated_norm_of(modelling("llama").LlamaRMSNorm(64)) is None
    norm = modelling("qwen3_next").Qwen3NextRMSNormGated(64)
    norm.activation = "sigmoid"
    assert hf.gated_norm_of(norm) is None
    file = modelling("qwen3_5_moe")
    forward = file.Qwen3_5MoeGatedDeltaNet.forward
    assert hf.mixer_of(forward) == "gated_delta"
    assert hf.mixer_of(modelling("nemotron_h").NemotronHMamba2Mixer.forward) == "mamba2"
    for name in ("olmo_hybrid", "jamba", "llama"):
        cls = {"olmo_hybrid": "OlmoHybridGatedDeltaNet", "jamba": "JambaMambaMixer", "llama": "LlamaAttention"}[name]
        assert hf.mixer_of(getattr(modelling(name), cls).forward) is None
    wrapped = functools.wraps(forward)(lambda self, *args, **options: forward(self, *args, **options))
    assert hf.mixer_of(wrapped) is None  # of another package
    monkeypatch.setattr(file, "l2norm", lambda x, dim=-1, eps=1e-6: x)  # a function that it calls by another
    assert hf.mixer_of(forward) is None
    monkeypatch.undo()
    assert hf.mixer_of(forward) == "gated_delta"


@runs_kernels
def test_launches_around_a_linear_layer_are_merged_in_a_graph(monkeypatch):
    """Also with code of its own that launches kernels which are not seen: nothing is delayed around it."""
    model, file = small("qwen3_5_text").half(), modelling("qwen3_5")
    past, ids = begun(model)
    projections = [each for each in model.model.layers[0].linear_attn.children() if isinstance(each, torch.nn.Linear)]
    fuse.fuse(fuse.find(model)._replace(linears=projections, mlps=[]))
    states.fuse(model)
    linears.join(model)
    results, launches = [], []
    own, modes = file.causal_conv1d_update, []

    def unseen(x, *args):
        modes.append(merged.current())
        return own(x, *args)

    for kernels, context in itertools.product((True, False), (contextlib.nullcontext, lambda: merged.merged(model))):
        twin_past = copy.deepcopy(past)
        monkeypatch.setattr(file, "causal_conv1d_update", own if kernels else unseen)
        with captured(), Launches() as counted, context():
            results.append(model(ids[:, :1], **{hf.CACHE: twin_past}).logits)
        launches.append(counted.count)
    assert modes == [None, None]
    alone, together, *_ = launches
    assert together["residual_kernel"] > alone["residual_kernel"] == 0 and sum(together.values()) <= sum(alone.values()) - 3
    assert alone["linear_rows_kernel"] == 2  # of five linear layers
    assert alone["conv_update_kernel"] == 1 and not any(count["conv_update_kernel"] for count in launches[2:])
    for logits in results:
        torch.testing.assert_close(logits, results[0], atol=0.05, rtol=0.01)


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="describes compiled kernels")
def test_kernels_are_described_without_a_gpu():
    """As `kernels_of` lists them: on tensors without memory."""
    layer = small("qwen3_5_text").model.layers[0].linear_attn.to("meta", torch.bfloat16)
    layers, norms = states.fuse(layer, lambda device: True)
    cache = DynamicCache(config=small("qwen3_5_text").config)
    past = cache.layers[0]
    past.conv_states[0] = torch.empty(2, layer.conv_dim, 4, device="meta", dtype=torch.bfloat16)
    past.recurrent_states[0], past.has_previous_state[0] = torch.empty(2, 4, 16, 24, device="meta"), True
    x, name = torch.empty(2, 1, 64, device="meta", dtype=torch.bfloat16), "cache" if hf.CACHE == "cache" else "cache_params"
    with describing(Target(90, 132)) as found:
        layer(x, **{name: cache})
    assert layers == [layer] and norms == [layer.norm]
    assert [kernel.name for kernel in found.values()] == ["conv_update_kernel", "gated_delta_kernel", "gated_norm_kernel"]


@runs_kernels
def test_patch_fuses_the_linear_layers_and_unpatch_restores_them():
    model = small("falcon_h1, norm")
    ids = {"input_ids": torch.arange(1, 12, device=DEVICE)[None], "max_new_tokens": 2, "do_sample": False}
    expected = model.generate(**ids)
    with hf_fastattn.patch(model, "lean", cache=None, graph=False) as patch:
        changes = {change.what: change.count for change in patch.changes}
        assert changes["steps of linear layers, of one token"] == changes["gated norms"] == 2
        with Launches() as launches:
            assert torch.equal(model.generate(**ids), expected)
        assert launches.count["selective_kernel"] == 2  # the prompt runs the model's own code
    assert not any(map(subclass.is_fused, model.modules()))


@runs_kernels
@pytest.mark.parametrize("rows", [2, 5])
def test_rows_of_states_are_permuted_in_place_by_a_launch_for_each_shape(rows, monkeypatch):
    kinds = [hf.Kind("state", states=1), hf.Kind("both", states=1), hf.Kind("full"), hf.Kind("none"), hf.Kind("state", states=2)]
    storage, launches = HybridStorage(kinds, 40), []
    for index in (1, 2):
        storage.layers[index].update(*torch.randn(2, rows, 2, 30, 16, device=DEVICE))
    for index, number in ((0, 0), (1, 0), (4, 0), (4, 1)):
        storage.layers[index].put(f"conv.{number}", torch.randn(rows, 24, 4, device=DEVICE))
        storage.layers[index].put(f"recurrent.{number}", torch.randn(rows, 2, 8, 10, device=DEVICE))
    run = reorder.reorder
    monkeypatch.setattr(reorder, "reorder", lambda *given: launches.append(len(given[0])) or run(*given))
    order = torch.randint(rows, (rows, 7), dtype=torch.int32, device=DEVICE)[:, 3]  # as beam search does
    parts = [*storage.memory()]
    before, version = [part.tensor.clone() for part in parts], storage.version
    storage.reorder(order)
    for part, held in zip(parts, before, strict=True):
        live = slice(None) if part.slots is None else (slice(None), slice(None), slice(part.slots))
        assert torch.equal(part.tensor[live], held[order.long()][live]), part.name
    assert launches == [4, 4, 4]  # K and V of two layers, convolutions, recurrences
    assert storage.version == version
    assert [part.tensor.data_ptr() for part in storage.memory()] == [part.tensor.data_ptr() for part in parts]
    held = torch.randn(rows * 96 + 1, device=DEVICE)[1:].view(rows, 24, 4)  # its address is no multiple of 16
    storage.layers[0].conv_states[0], content = held, held.clone()
    storage.reorder(order)
    assert torch.equal(held, content[order.long()])
