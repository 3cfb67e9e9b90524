"""Linear layers of a decode graph: the kernels, and the modules that use them."""

import copy
import pickle
import re
from functools import partial
from itertools import product

import pytest
import torch
import transformers
from calls import DEVICE, captured, runs_kernels
from cases import slow_unless
from models import tiny
from small_layers import Launches, small_model
from test_fuse import Wrapped
from torch.nn.functional import linear as torchs
from transformers.activations import SiLUActivation
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from hf_fastattn.kernels import HAS_TRITON
from hf_fastattn.kernels.host import gpu
from hf_fastattn.patches.fused import activations, residual, subclass
from hf_fastattn.patches.fused import delayed as merged
from hf_fastattn.patches.fused import linears as projections
from hf_fastattn.patches.fused import norms as fuse

if HAS_TRITON:
    from hf_fastattn.kernels.decode import linear_rows
    from hf_fastattn.kernels.decode.linear import Then, gated_linear, linear, linear_and_sum, linears, prepared, why_not
    from hf_fastattn.kernels.host.counters import counters_of


pytestmark = pytest.mark.usefixtures("seeded_without_gradients")


def new(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_as_torchs_own(got, stock, right):
    """The error is at most twice that of torch's own, plus 4 units of rounding at the scale of the result."""
    assert got.dtype == stock.dtype and got.shape == stock.shape
    unit = 4 * torch.finfo(got.dtype).eps * right.abs().max()
    assert (got.double() - right).abs().max() <= 2 * (stock.double() - right).abs().max() + unit


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
ONE_TOKEN = [(5, 16), (96, 64), (33, 100), (40, 1024), (7, 2049), (6, 5000)]
TOKENS = [(2, 5, 16), (17, 70, 144), (3, 33, 1040), (64, 24, 528), (3, 40, 1664)]  # the last split of the last is shorter
CASES = [
    *((1, *shape, kind) for shape in ONE_TOKEN for kind in ("plain", "bias", "silu")),
    *((*shape, kind) for shape in TOKENS for kind in ("plain", "bias", "silu")),
    *((tokens, 33, 80, kind) for tokens in (1, 3) for kind in ("relu", "gelu", "gelu_tanh")),
    *((tokens, 70, 1040, "silu") for tokens in (65, 128)),
]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens, rows, size, kind", CASES)
def test_a_linear_layers_error_is_that_of_torchs_own(tokens, rows, size, kind, dtype):
    if tokens > 1 and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies no matrices in bfloat16")
    x, weight, up = new(tokens, 1, size, dtype=dtype), *(new(rows, size) / size**0.5 for _ in range(2))
    weight, up = weight.to(dtype), up.to(dtype)
    bias = new(rows, dtype=dtype) if kind == "bias" else None
    if act := ACTIVATIONS.get(kind):
        got, stock = gated_linear(x, weight, up, kind), act(torchs(x, weight)) * torchs(x, up)
        right = act(torchs(x.double(), weight.double())) * torchs(x.double(), up.double())
    else:
        got, stock = linear(x, weight, bias), torchs(x, weight, bias)
        right = torchs(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_torchs_own(got, stock, right)


@runs_kernels
@pytest.mark.parametrize("rows", [(70, 33), (16, 64, 7), (24, 1), (40, 16, 7, 33)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_several_weights_at_once(rows, bias, tokens):
    x, weights = new(1, tokens, 1040), tuple(new(n, 1040) / 32 for n in rows)
    biases = tuple(new(n) for n in rows) if bias else ()
    got = linears(x, weights, biases)
    for out, weight, own in zip(got, weights, biases or (None,) * len(rows), strict=True):
        right = torchs(x.double(), weight.double(), None if own is None else own.double())
        assert_as_torchs_own(out, torchs(x, weight, own), right)


@runs_kernels
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_sum_with_a_residual_has_the_roundings_of_two_operations(tokens):
    x, weight, bias, residual = new(tokens, 1040), new(33, 1040), new(33), new(tokens, 33)
    out, total = linear_and_sum(x, weight, bias, residual)
    assert torch.equal(out, linear(x, weight, bias)) and torch.equal(total, residual + out)
    assert linear_and_sum(x, weight, bias, residual[:, :1]) is None


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(33,), (33, 70, 7)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_an_operation_on_the_first_result_has_the_roundings_of_two_operations(tokens, rows, dtype):
    x, weights = new(tokens, 1040, dtype=dtype), tuple(new(n, 1040, dtype=dtype) / 8 for n in rows)
    biases = tuple(new(n, dtype=dtype) for n in rows)
    weights[0][2], biases[0][3:6] = 0, torch.tensor([float("inf"), float("-inf"), float("nan")])
    alone = linears(x, weights, biases)
    for name, function in (ACTIVATIONS | {"mul": lambda y: y * 0.3}).items():
        layers, after = prepared(x, weights, biases), torch.empty_like(alone[0])
        assert layers.launch_with(Then(name, factor=0.3 if name == "mul" else None), after)
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(layers.outs, alone, strict=True))
        y, right = alone[0], function(alone[0].double())
        if name in ("relu", "mul"):
            assert torch.equal(after.nan_to_num(9), function(y).nan_to_num(9))
        else:
            finite = y.isfinite()
            assert torch.equal(after.nan_to_num(9)[~finite], right.to(dtype).nan_to_num(9)[~finite])
            assert_as_torchs_own(after[finite], function(y)[finite], right[finite])


@runs_kernels
def test_a_row_does_not_depend_on_the_others_and_repeats():
    """Also where a sum is split, of which any program may be the last."""
    x, weight = new(6, 2064), new(33, 2064)
    assert linear_rows.tiles(gpu.arch(x.device), gpu.num_sms(x.device), 6, [33], 2064, False).splits > 1
    first = linear(x, weight)
    x[3:] = float("nan")
    again = linear(x, weight)
    assert torch.equal(first[:3], again[:3]) and again[3:].isnan().all()
    assert not counters_of(x.device).any()


@runs_kernels
@torch.enable_grad()
def test_a_linear_layer_takes_up_to_64_tokens_in_16_bits(monkeypatch):
    x, weight = torch.ones(1, 32, device=DEVICE, dtype=torch.float16), torch.ones(8, 32, device=DEVICE, dtype=torch.float16)
    assert torch.equal(linear(x[0], weight), torch.full((8,), 32.0, device=DEVICE, dtype=torch.float16))
    for wrong, said in {
        (x.repeat(65, 1), weight): "1 to 64 tokens",
        (x[:0], weight): "1 to 64 tokens",
        (x.repeat(2, 1)[:, :8].contiguous(), weight[:, :8].contiguous()): "multiple of 16",
        (x.expand(2, 32), weight): "contiguous",
        (x[:, :16], weight): r"\(1, 16\) and weight \(8, 32\)",
        (x.float(), weight.float()): "got torch.float32",
        (x, weight.bfloat16()): "float16 and torch.bfloat16",
        (x, weight.t().contiguous().t()): r"contiguous; got strides \(1, 8\)",
        (x, weight, weight[0]): r"bias is \(32,\)",
        (x, weight.clone().requires_grad_()): "requires grad",
    }.items():
        assert linear(*wrong) is None
        assert re.search(said, why_not(wrong[0], wrong[1:2], wrong[2:]))
    assert gated_linear(x, weight, weight[:4]) is None and "one shape" in why_not(x, (weight, weight[:4]), gated=True)
    assert linears(x, (weight,) * 5) is None and "5 weights" in why_not(x, (weight,) * 5)
    assert "1 to 64" in why_not(x.repeat(65, 1), (weight,))
    for arch, most in ((80, 64), (90, 128), (100, 64)):  # of several weights
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "arch", lambda device, arch=arch: arch)
            assert why_not(x.repeat(most, 1), (weight,) * 2) is None
            assert f"1 to {most}" in why_not(x.repeat(most + 1, 1), (weight,) * 2)
    unaligned = torch.ones(8 * 32 + 1, device=DEVICE, dtype=torch.float16)[1:].view(8, 32)
    assert linear(x.repeat(2, 1), unaligned) is None
    assert torch.equal(linear(x, unaligned), linear(x, weight))


@pytest.fixture
def linear_calls(monkeypatch):
    """For every launch of our kernels the activation of a gated pair, an operation on the result, or the number of weights."""
    module = pytest.importorskip("hf_fastattn.kernels.decode.linear")
    calls, prepare = [], module._prepare

    def recorded(tensors, count, act, then, factor):
        start = prepare(tensors, count, act, then, factor)
        return start and (lambda *tensors: (calls.append(act or then or count), start(*tensors)))

    monkeypatch.setattr(module, "_prepare", recorded)
    return calls


# Launches in each layer: gated pairs, layers of projections, other linear layers.
PER_LAYER = {"llama": (1, 1, 2), "qwen2": (1, 1, 2), "gemma2": (1, 1, 2), "phi": (0, 1, 3), "phi3": (1, 0, 3)}


@runs_kernels
@pytest.mark.parametrize("family, tokens", slow_unless([("llama", 3), ("phi", 1)].__contains__, product(PER_LAYER, (1, 3))))
def test_a_decode_graph_runs_our_linear_layers(family, tokens, linear_calls):
    model = tiny(family, **({"num_key_value_heads": 4} if family == "phi" else {})).to(DEVICE, torch.float16)
    ids = torch.arange(1, tokens + 1, device=DEVICE)[:, None]
    before = model(ids).logits
    found = fuse.find(model)
    fuse.fuse(fuse.Fusible([], [], found.mlps, found.linears))
    joined = projections.join(model)
    gated, projected, single = PER_LAYER[family]
    assert len(joined) == projected * model.config.num_hidden_layers
    assert torch.equal(model(ids).logits, before) and not linear_calls  # outside of a graph
    with captured():
        model(ids.repeat(129, 1))
        assert not linear_calls  # too many tokens
        many = model(ids.repeat(128 // tokens, 1)).logits
        joint = linear_calls.copy()
        linear_calls.clear()
        during = model(ids).logits
    expected = ["gelu_tanh" if family == "gemma2" else "silu"] * gated + [3] * projected
    layers = model.config.num_hidden_layers
    torch.testing.assert_close(many, before.repeat(128 // tokens, 1, 1), atol=2e-3, rtol=1e-2)
    assert sorted(joint, key=str) == sorted(expected * layers * (gpu.arch(ids.device) in (0, 90)), key=str)
    assert sorted(linear_calls, key=str) == sorted((expected + [1] * single) * layers + [1], key=str)  # and the head
    torch.testing.assert_close(during, before, atol=2e-3, rtol=1e-2)
    subclass.restore([*joined, *found.mlps, *found.linears])
    assert not any(subclass.is_fused(module) for module in model.modules())


@runs_kernels
@torch.no_grad()
def test_lfm2s_mlp_is_fused_as_long_as_silu_is_torchs(linear_calls, monkeypatch):
    config = transformers.Lfm2Config(hidden_size=32, intermediate_size=48, block_auto_adjust_ff_dim=False)
    mlp, x, silu = Lfm2MLP(config).to(DEVICE, torch.float16), new(2, 32), torch.nn.functional.silu
    before = mlp(x)
    fuse.fuse(fuse.Fusible([], [], [mlp], [mlp.w1, mlp.w2, mlp.w3]))
    assert torch.equal(mlp(x), before)
    with captured():
        torch.testing.assert_close(mlp(x), before, atol=2e-3, rtol=1e-2)
        assert linear_calls == ["silu", 1]
        monkeypatch.setattr(torch.nn.functional, "silu", lambda x: -2 * silu(x))
        torch.testing.assert_close(mlp(x), -2 * before, atol=2e-3, rtol=1e-2)
        assert linear_calls == ["silu", 1, 1, 1, 1]


class Projections(torch.nn.Module):
    """The outline of an attention layer; `change` may change what its values are computed from."""

    def __init__(self, change=torch.nn.Identity()):  # noqa: B008
        super().__init__()
        for name in projections.PROJECTIONS[0]:
            setattr(self, name, torch.nn.Linear(32, 16, bias=False, dtype=torch.float16, device=DEVICE))
        self.change = change

    def forward(self, hidden_states):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states.view(-1, 32)).view(2, -1)
        return q, k, self.v_proj(self.change(hidden_states))

    def joined(self):
        """A copy whose projections are computed together."""
        ours = copy.deepcopy(self)
        fuse.fuse(fuse.Fusible([], [], [], [ours.q_proj, ours.k_proj, ours.v_proj]))
        assert projections.join(ours) == [ours]
        return ours


@runs_kernels
@pytest.mark.parametrize("change", [torch.clone, lambda x: x.add_(1), torch.neg], ids=["a copy", "in place", "another"])
def test_projections_of_other_inputs_are_not_computed_together(change, linear_calls):
    stock, x = Projections(change), new(2, 32)
    ours, expected = stock.joined(), stock(x.clone())
    with captured():
        for calls in ([3, 1], [1, 1, 1]):  # the second time each on its own
            torch.testing.assert_close(ours(x.clone()), expected, atol=2e-3, rtol=1e-2)
            assert linear_calls == calls
            linear_calls.clear()


bias = lambda of: setattr(of, "bias", torch.nn.Parameter(new(len(of.weight)) * 0 + 1))  # noqa: E731
pre_hook = lambda of: of.register_forward_pre_hook(lambda module, args: (args[0] * 2,))  # noqa: E731
hook = lambda of: of.register_forward_hook(lambda module, args, out: out * 2)  # noqa: E731
CHANGES = {
    "another": lambda layer: setattr(layer, "k_proj", torch.nn.Sequential(layer.k_proj, torch.nn.ReLU())),
    "own forward": lambda layer: setattr(layer.k_proj, "forward", lambda x: 2 * x[..., :16]),
    "no linear layer": lambda layer: setattr(layer, "k_proj", torch.nn.Identity()),
    "bias": lambda layer: bias(layer.k_proj),
    "pre_hook": lambda layer: pre_hook(layer.k_proj),
    "hook": lambda layer: hook(layer.k_proj),
}


@runs_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_projections_that_someone_changed_are_computed_one_by_one(linear_calls, change):
    stock, x = Projections(), new(2, 32)
    ours = stock.joined()
    CHANGES[change](stock), CHANGES[change](ours)
    with captured():
        for _ in range(2):
            torch.testing.assert_close(ours(x), stock(x), atol=2e-3, rtol=1e-2)


def fused_for_graphs(model):
    found = fuse.find(model)
    fuse.fuse(found)
    joined = projections.join(model), residual.join(model), activations.fuse(model)
    return [module for modules in (*found, *joined) for module in modules]


RESIDUAL = product(["llama", "qwen3", "gemma2"], [1, 2])


@runs_kernels
@pytest.mark.parametrize("family, tokens", slow_unless([("llama", 2), ("gemma2", 1)].__contains__, RESIDUAL))
def test_the_layer_before_a_residual_connection_adds(family, tokens, linear_calls):
    """Gemma 2 has norms in between."""
    stock = tiny(family).to(DEVICE, torch.float16)
    model = copy.deepcopy(stock)
    fused = fused_for_graphs(model)
    ids = torch.arange(1, tokens + 1, device=DEVICE)[None]
    with captured(), merged.merged(model):  # as in a graph
        during = model(ids).logits
    sums = 0 if family == "gemma2" else 2 * model.config.num_hidden_layers
    assert linear_calls.count("add") == sums
    torch.testing.assert_close(during, stock(ids).logits, atol=2e-3, rtol=1e-2)
    subclass.restore(fused)
    assert not any(subclass.is_fused(module) for module in model.modules())


# Launches of linear layers in a decoder layer: projections, o_proj, and the MLP's.
AFTER = {
    "opt": ["mul", 1, "relu", 1],
    "gpt_neox": [1, 1, "gelu", 1],
    "starcoder2": [3, "add", "gelu_tanh", 1],
    "phi": [3, 1, "gelu_tanh", 1],
    "llama": [3, "add", "silu", "add"],
}


@runs_kernels
@pytest.mark.parametrize("family, tokens", slow_unless([("opt", 1), ("phi", 2)].__contains__, product(AFTER, (1, 2))))
def test_linear_layers_compute_the_operations_after_them(family, tokens, linear_calls):
    model, ids = small_model(family, DEVICE).half(), torch.arange(1, tokens + 1, device=DEVICE)[None]
    fused_for_graphs(model)
    with captured():
        expected = model(ids).logits
        linear_calls.clear()
        with Launches() as launches, merged.merged(model):
            during = model(ids).logits
    torch.testing.assert_close(during, expected, atol=0 if DEVICE == "cpu" and "opt" in family else 2e-3, rtol=1e-2)
    assert linear_calls == AFTER[family] * model.config.num_hidden_layers + [1]  # the head
    assert not any(launches.count[name] for name in ("relu", "gelu", "silu"))


RESULT_CHANGES = {
    "another": ("mlp", lambda module, args, out: out * 2),
    "in place": ("mlp", lambda module, args, out: out.mul_(2)),
    "a copy": ("self_attn.o_proj", lambda module, args, out: out.clone()),
    "residual": ("mlp", lambda module, args, out: (module.residual.mul_(2), None)[1]),
}


@runs_kernels
@pytest.mark.parametrize("change", RESULT_CHANGES)
def test_a_result_that_is_changed_on_its_way_is_added_again(change):
    name, hook = RESULT_CHANGES[change]
    stock = tiny("llama").to(DEVICE, torch.float16)
    results = []
    for model in (stock, copy.deepcopy(stock)):
        layer = model.model.layers[0]

        keep = lambda norm, args, mlp=layer.mlp: setattr(mlp, "residual", args[0])  # noqa: E731
        layer.post_attention_layernorm.register_forward_pre_hook(keep)
        layer.get_submodule(name).register_forward_hook(hook)
        if model is not stock:
            fused_for_graphs(model)
        with captured():
            results.append(model(torch.arange(1, 3, device=DEVICE)[None]).logits)
    torch.testing.assert_close(*results, atol=2e-3, rtol=1e-2)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_fused_and_joined_layers_are_copied_and_pickled():
    """They may be fused twice."""
    model = tiny("llama")
    layer = model.model.layers[0].self_attn
    fuse.fuse(fuse.Fusible([], [layer], [], [layer.q_proj, layer.k_proj, layer.v_proj]))
    assert projections.join(model) == [layer]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer) and torch.equal(twin.q_proj.weight, layer.q_proj.weight)
        assert type(twin.q_proj) is type(layer.q_proj) is not torch.nn.Linear
        subclass.restore([twin, twin.q_proj])
        assert type(twin).__bases__ == (torch.nn.Module,) and type(twin.q_proj) is torch.nn.Linear


def make_the_weight_an_attribute(layer):
    """No longer a parameter, like a weight that is computed for each call."""
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight * 2


def test_a_linear_layer_that_someone_changed_is_left_alone(linear_calls, monkeypatch):
    """Weights computed for each call, code of other classes, wrapped tensors, autocast."""
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    model = tiny("llama").to(DEVICE, torch.float16)
    first, second = (layer.mlp for layer in model.model.layers[:2])
    torch.nn.utils.parametrize.register_parametrization(first.down_proj, "weight", torch.nn.Identity())
    first.up_proj = type("Other", (torch.nn.Linear,), {"forward": lambda self, x: x})(64, 96).half()
    found = fuse.find(model).linears
    assert second.down_proj in found and second.up_proj in found
    assert first.down_proj not in found and first.up_proj not in found

    def changed(change, x=torch.ones(1, 8, dtype=torch.float16, device=DEVICE)):  # noqa: B008
        layer = torch.nn.Linear(8, 8, dtype=torch.float16, device=DEVICE)
        fuse.fuse(fuse.Fusible([], [], [], [layer]))
        change(layer)
        layer(x)

    wrap = lambda tensor: torch.nn.Parameter(tensor.detach().as_subclass(Wrapped))  # noqa: E731
    with captured():
        changed(lambda layer: setattr(layer, "weight", wrap(layer.weight)))
        changed(lambda layer: setattr(layer, "bias", wrap(layer.bias)))
        changed(lambda layer: None, torch.ones(1, 8, dtype=torch.float16, device=DEVICE).as_subclass(Wrapped))
        changed(make_the_weight_an_attribute)
        with torch.autocast(DEVICE, torch.bfloat16):
            changed(lambda layer: None)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


BIASES = {
    "an attribute": lambda module: setattr(module, "bias", 2 * module._parameters.pop("bias").detach()),
    "a buffer": lambda module: module.register_buffer("bias", 2 * module._parameters.pop("bias").detach()),
    "computed": lambda module: torch.nn.utils.parametrize.register_parametrization(module, "bias", Doubled()),
    "before the parameter": lambda module: vars(module).__setitem__("bias", 2 * module.bias.detach()),
}


@runs_kernels
@pytest.mark.parametrize("change", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("before", [True, False])
def test_a_bias_that_is_no_parameter_is_added(change, before, linear_calls, monkeypatch):
    """For one layer, a norm, and three layers of one launch; changed before patch() and afterwards."""
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    model = small_model("opt", DEVICE).to(torch.float16)
    layers = model.model.decoder.layers
    changed = [getattr(layers[0], name) for name in ("fc1", "final_layer_norm")]
    changed += [getattr(layers[1].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    for module in changed:
        torch.nn.init.normal_(module.bias)
    ids = torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    for module in changed if before else ():
        change(module)
    twin = copy.deepcopy(model)
    fuse.fuse(fuse.find(model))
    for module in () if before else changed:
        change(module)
    for module in () if before else (twin.get_submodule(name) for name, each in model.named_modules() if each in changed):
        change(module)
    with captured():
        found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, twin(ids, use_cache=False).logits, atol=2e-2, rtol=2e-2)
    assert linear_calls  # the other layers have their kernel


class Thrice(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def thrice(of, name):
    """A change of a function of a class or of torch, which its code calls by its name."""

    def change(mlp, monkeypatch):
        own = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args, **options: 3 * own(*args, **options))

    return change


def derive(mlp, monkeypatch):
    own = type(mlp.gate_proj)
    mlp.gate_proj.__class__ = type("Mine", (own,), {"forward": lambda self, x: 3 * own.forward(self, x)})


REPLACED = {
    "the class of the gate": derive,
    "another class": lambda mlp, monkeypatch: setattr(mlp.gate_proj, "__class__", Thrice),
    "forward() of torch's class": thrice(torch.nn.Linear, "forward"),
    "forward() of the activation's class": thrice(SiLUActivation, "forward"),
    "F.silu": thrice(torch.nn.functional, "silu"),
    "F.linear": thrice(torch.nn.functional, "linear"),
}


@runs_kernels
@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_code_that_someone_replaced_below_a_fused_mlp_runs(change, monkeypatch):
    stock = tiny("llama").to(DEVICE, torch.float16).model.layers[0].mlp
    fused, x = copy.deepcopy(stock), torch.randn(1, 1, 64, device=DEVICE, dtype=torch.float16)
    fuse.fuse(fuse.find(fused))
    before = stock(x)
    change(stock, monkeypatch)
    if change in (derive, REPLACED["another class"]):
        change(fused, monkeypatch)
    right = stock(x)
    assert not torch.allclose(right, before)
    with captured():
        torch.testing.assert_close(fused(x), right, atol=1e-3, rtol=1e-2)


@runs_kernels
def test_a_product_in_place_spares_what_an_activation_keeps():
    mlp, kept = tiny("llama").to(DEVICE).model.layers[0].mlp, torch.full((1, 1, 96), 2.0, device=DEVICE)
    fuse.fuse(fuse.find(mlp))
    mlp.act_fn.forward = lambda x: kept
    mlp(torch.randn(1, 1, 64, device=DEVICE))
    assert (kept == 2).all()


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_that_code_of_others_changes_in_place_are_added_as_they_are(mode):
    """Tensors of inference mode do not count their changes."""

    class Mine(type(small_model("llama").model.layers[0].mlp)):
        def forward(self, x):
            out = super().forward(x)
            out.mul_(3)
            return out

    stock = small_model("llama", DEVICE).to(torch.float16)
    for layer in stock.model.layers:
        layer.mlp.__class__ = Mine
    fused, ids = copy.deepcopy(stock), torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    fuse.fuse(fuse.find(fused))
    projections.join(fused)
    residual.join(fused)
    with mode():
        right = stock(ids, use_cache=False).logits
        with captured(), merged.merged(fused):
            torch.testing.assert_close(fused(ids, use_cache=False).logits, right, atol=2e-2, rtol=2e-2)


@runs_kernels
def test_a_gate_that_someone_changed_is_left_alone(linear_calls):
    """Hooks and forward() of an instance, biases, weights computed for each call, layers of other classes."""
    model = tiny("llama").to(DEVICE, torch.float16)
    stock, fused = model.model.layers[0].mlp, copy.deepcopy(model.model.layers[0].mlp)
    fuse.fuse(fuse.find(fused))
    x = torch.randn(1, 1, 64, device=DEVICE, dtype=torch.float16)

    def other_class(layer):
        subclass.restore([layer])
        layer.__class__ = type("Twice", (torch.nn.Linear,), {"forward": lambda self, x: 2 * torch.nn.Linear.forward(self, x)})

    own_forward = lambda layer: setattr(layer, "forward", lambda x: torchs(x, 2 * layer.weight))  # noqa: E731
    of_layers = (bias, own_forward, make_the_weight_an_attribute, other_class)
    layers = [(name, change) for name in ("gate_proj", "up_proj") for change in of_layers]
    layers.append(("act_fn", lambda act: setattr(act, "forward", torch.relu)))
    hooks = [(name, change) for name in ("gate_proj", "up_proj", "act_fn") for change in (hook, pre_hook)]
    with captured():
        torch.testing.assert_close(fused(x), stock(x), atol=1e-3, rtol=1e-2)
        assert linear_calls == ["silu", 1]  # the gate, and the layer after it
        for name, change in [*layers, *hooks]:
            theirs, ours = copy.deepcopy(stock), copy.deepcopy(fused)
            change(getattr(theirs, name)), change(getattr(ours, name))
            linear_calls.clear()
            torch.testing.assert_close(ours(x), theirs(x), atol=1e-3, rtol=1e-2)
            assert "silu" not in linear_calls, (name, change)
