"""RMSNorm, rotation and linear layers in one launch: comparison with the model's own code, and the modules they replace."""

import copy
import functools
import itertools
import pickle
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from calls import DEVICE, DTYPES, runs_kernels
from models import tiny
from small_layers import Launches
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf import experts, norms
from hf_fastattn.hf.llama import is_embedding
from hf_fastattn.kernels import HAS_TRITON, INTERPRETED
from hf_fastattn.patches.fused import activations, linears, subclass
from hf_fastattn.patches.fused import norms as fuse

if HAS_TRITON:
    from hf_fastattn.kernels.decode import rms_norm as rms_norm_kernel
    from hf_fastattn.kernels.decode import rope as rope_kernel
    from hf_fastattn.kernels.decode.rms_norm import rms_norm
    from hf_fastattn.kernels.decode.rope import rope


def exact(x, weight, eps):
    x = x.double()
    return weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 100), (5, 4096), (3, 2, 7, 16), (1, 1, 5000), (4, 6, 32)], ids=str)
def test_error_is_that_of_llamas_own(shape, dtype):
    """Also of strided input, and of a row of zeros."""
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    x = x.transpose(0, 1) if shape == (4, 6, 32) else x
    x[0, 0] = 0
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1]))
        got, stock = rms_norm(x, norm.weight, 1e-5), norm(x)
    assert got.dtype == dtype and got.shape == x.shape and (got[0, 0] == 0).all() == (x[0, 0] == 0).all()
    right = exact(x, norm.weight.detach(), 1e-5)
    unit = 4 * torch.finfo(dtype).eps * right.abs().max()
    assert (got.double() - right).abs().max() <= 2 * (stock.double() - right).abs().max() + unit


@runs_kernels
def test_refusals_have_messages():
    new = partial(torch.ones, device=DEVICE)
    x, q, k, cos = new(2, 32), new(2, 4, 3, 16), new(2, 2, 3, 16), new(2, 3, 16)
    for run, arguments, sentence in (
        (rms_norm, (x, new(32, requires_grad=True), 1e-6), "requires grad"),
        (rms_norm, (x, new(32, dtype=torch.float16), 1e-6), r"weight torch\.float16"),
        (rms_norm, (x, new(16), 1e-6), r"\(2, 32\)"),
        (rms_norm, (x, new(1).expand(32), 1e-6), "weight has stride 0"),
        (rope, (q, k, cos, cos.mT.contiguous().mT), "last dimension"),
        (rope, (q.double(), k.double(), cos.double(), cos.double()), r"torch\.float64"),
        (rope, (q.clone().requires_grad_(), k, cos, cos), "requires grad"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(*arguments)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_bitwise_llamas_own(dtype):
    torch.manual_seed(0)
    for batch, heads, kv_heads, tokens, dim, cos_rows in ((1, 4, 2, 1, 64, 1), (3, 6, 1, 5, 80, 3), (2, 9, 3, 7, 32, 1)):
        q, k = (torch.randn(batch, tokens, n, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in (heads, kv_heads))
        cos, sin = (torch.randn(cos_rows, tokens, dim, device=DEVICE).to(dtype) for _ in range(2))
        for got, stock in zip(rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(got, stock)


@runs_kernels
def test_cached_launches_are_distinguished():
    """By eps, by layout, and by grad mode."""
    x, weight = torch.randn(6, 6, 32, device=DEVICE), torch.ones(32, device=DEVICE, requires_grad=True)
    q, k = torch.randn(2, 4, 4, 16, device=DEVICE), torch.randn(2, 4, 4, 16, device=DEVICE)
    cos, sin = torch.randn(2, 4, 16, device=DEVICE), torch.randn(2, 4, 16, device=DEVICE)
    layouts = [lambda t: t, lambda t: t.transpose(-3, -2)]
    with torch.no_grad():
        for eps, layout in [(eps, layout) for eps in (1e-6, 1.0) for layout in layouts]:
            expected = exact(layout(x), weight, eps)
            torch.testing.assert_close(rms_norm_kernel.run(layout(x), weight, None, eps).double(), expected, atol=1e-5, rtol=1e-5)
        for q_layout, k_layout, rows in itertools.product(layouts, layouts, (1, 2)):
            args = q_layout(q), k_layout(k), cos[:rows], sin[:rows]
            for got, stock in zip(rope_kernel.run(*args), apply_rotary_pos_emb(*args), strict=True):
                assert torch.equal(got, stock)
    assert rms_norm_kernel.run(x, weight.detach(), None, 1.0) is not None and rms_norm_kernel.run(x, weight, None, 1.0) is None
    assert rope_kernel.run(q, k, cos, sin) is not None and rope_kernel.run(q.requires_grad_(), k, cos, sin) is None


# Norms, rotations and MLPs in each layer.
PER_LAYER = {**dict.fromkeys(("llama", "mistral", "qwen2"), (2, 1, 1)), "qwen3": (4, 1, 1), "phi": (1, 1, 0)}
PER_LAYER |= {"gemma2": (4, 1, 1), "opt": (2, 0, 0)}


@runs_kernels
@pytest.mark.parametrize("family", PER_LAYER)
def test_a_model_computes_the_same(family):
    model = tiny(family, **({"num_key_value_heads": 4} if family == "phi" else {})).to(DEVICE)
    ids = torch.arange(1, 12, device=DEVICE)[None]
    with torch.no_grad():
        before = model(ids).logits
        found = fuse.find(model)
        fuse.fuse(found)
        assert fuse.find(model) == ([], [], [], [])
        during = model(ids).logits
    model(ids).logits.sum().backward()  # gradients flow through the model's own code
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    with torch.no_grad():
        twin = copy.deepcopy(model)
        fused = list(itertools.chain(*found))
        subclass.restore(fused)
        after = model(ids).logits
    expected = [n * model.config.num_hidden_layers for n in PER_LAYER[family]]
    expected[0] += expected[0] > 0  # the last norm
    expected.append(0)  # linear layers, in float32
    assert list(map(len, found)) == expected
    torch.testing.assert_close(during, before, atol=1e-5, rtol=1e-5)
    assert torch.equal(after, before)
    for module, copied in zip(model.modules(), twin.modules(), strict=True):
        assert not subclass.is_fused(module)
        assert subclass.is_fused(copied) == (module in fused)


class Wrapped(torch.Tensor):
    """A tensor subclass with other behaviour, like quantised and distributed tensors."""


class Allocated(TorchDispatchMode):
    """Current and peak bytes of the tensors that operations create in this mode; `known` tensors are not counted."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, address, size):
        self.known.discard(address)
        self.now -= size


@pytest.fixture
def mlp(monkeypatch):
    """(a Llama MLP that is fused on any device, one with the same weights that is not fused)."""
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    torch.manual_seed(0)
    stock = tiny("llama").model.layers[0].mlp.to(DEVICE)
    fused = copy.deepcopy(stock)
    fuse.fuse(fuse.Fusible([], [], [fused], []))
    return fused, stock


@torch.no_grad()
def test_the_mlp_allocates_one_tensor_less(mlp):
    x = torch.randn(50, 64, device=DEVICE)
    width = 50 * 96 * 4
    results, peaks = [], []
    for module in mlp:
        with Allocated([x, *module.parameters()]) as allocated:
            results.append(module(x))
        peaks.append(allocated.peak)
    assert torch.equal(*results)
    assert peaks == [2 * width, 3 * width]


def test_an_mlp_with_hooks_is_not_fused(mlp):
    fused, stock = mlp
    x = torch.randn(5, 64, device=DEVICE)
    assert torch.equal(fused(x), stock(x))  # also with gradients
    fused(x).sum().backward()
    assert all(p.grad is not None for p in fused.parameters())
    with torch.no_grad():
        kept = []

        keep = lambda module, args, out: kept.append((out, out.clone()))  # noqa: E731
        add_global = torch.nn.modules.module.register_module_forward_hook
        for add in (fused.act_fn.register_forward_hook, fused.gate_proj.register_forward_hook, add_global):
            with add(keep):
                assert torch.equal(fused(x), stock(x))
        assert all(torch.equal(*pair) for pair in kept)
        fused.up_proj.double(), stock.up_proj.double()
        fused.up_proj.register_forward_pre_hook(lambda module, args: args[0].double())
        stock.up_proj.register_forward_pre_hook(lambda module, args: args[0].double())
        fused.down_proj.double(), stock.down_proj.double()
        assert torch.equal(fused(x), stock(x)) and fused(x).dtype == torch.float64


class View(torch.nn.Module):
    def forward(self, x):
        return x.view_as(x)


@torch.no_grad()
@pytest.mark.parametrize("act", [torch.nn.Identity(), View(), torch.nn.SiLU(inplace=True), torch.nn.Sequential(torch.nn.SiLU())])
def test_an_mlp_with_another_activation_is_not_fused(mlp, act):
    """An activation that may return its input, or keep a reference to its output."""
    fused, stock = mlp
    x = torch.randn(5, 64, device=DEVICE)
    for module in mlp:
        module.act_fn, module.gate_proj, module.up_proj, module.down_proj = act, *(torch.nn.Identity() for _ in range(3))
    y = x.clone()
    assert torch.equal(fused(x), stock(y)) and torch.equal(x, y)


def test_wrapped_code_of_llama_is_not_taken_for_llamas(monkeypatch):
    """A class whose forward() somebody has wrapped: the wrapper is its own, whatever functools.wraps() copies."""
    for cls, known in ((LlamaMLP, hf.mlp_of), (LlamaDecoderLayer, hf.is_llamas_layer)):
        own = cls.forward
        assert known(own)
        monkeypatch.setattr(cls, "forward", functools.wraps(own)(lambda *args, own=own, **kwargs: own(*args, **kwargs)))
        assert not known(cls.forward)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_replaced_code_of_torch_and_tensors_without_an_address_are_not_taken_for_torchs(monkeypatch):
    """For example a DTensor, which is recognised by its type, because its device is the GPU."""
    with monkeypatch.context() as interpreted:
        interpreted.setattr(subclass, "INTERPRETED", True)
        assert subclass.has_kernels(torch.ones(2)) and subclass.has_kernels(torch.nn.Parameter(torch.ones(2)))
        assert not subclass.has_kernels(torch.ones(2).as_subclass(Wrapped))
    linear, norm = torch.nn.Linear(64, 64).half(), torch.nn.LayerNorm(64)
    assert linears.is_plain(linear) and hf.norm_of(norm) and is_embedding(torch.nn.Embedding.forward)
    for cls in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Embedding):
        own = cls.forward
        monkeypatch.setattr(cls, "forward", functools.wraps(own)(lambda self, x, own=own: own(self, x) * 2))
    assert not linears.is_plain(linear) and not hf.norm_of(norm) and not is_embedding(torch.nn.Embedding.forward)


def fuse_all(model) -> None:
    """Fuse everything, as on a GPU, on any device."""
    named = lambda name: [m for m in model.modules() if type(m).__name__ == name]  # noqa: E731
    layers = [m for m in model.modules() if hf.is_attention(m)]
    fuse.fuse(fuse.Fusible(named("LlamaRMSNorm"), layers, named("LlamaMLP"), named("Linear")))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_fused_model_compiles_to_the_models_own_code():
    model = tiny("llama").to(DEVICE)
    ids = torch.arange(1, 12, device=DEVICE)[None]
    with torch.no_grad():
        expected = model(ids).logits
        fuse_all(model)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, expected)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_fused_model_is_freed_with_its_last_reference(without_collector):
    model = tiny("llama")
    fuse_all(model)
    weights = [weakref.ref(module.weight) for module in model.modules() if hasattr(module, "weight")]
    del model
    assert not any(weight() is not None for weight in weights)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_rotation_is_found_in_a_forward_whose_arguments_transformers_renames(monkeypatch):
    model, ids = tiny("llama").to(DEVICE), torch.arange(1, 12, device=DEVICE)[None]
    cls = type(model.model.layers[0].self_attn)
    own, calls = cls.forward, []
    renamed = deprecate_kwarg("mask", "99.0", new_name="attention_mask")(own)
    with torch.no_grad():
        expected = model(ids).logits
        monkeypatch.setattr(cls, "forward", renamed)
        assert list(hf.rotations_in(renamed)) == list(hf.rotations_in(own)) == ["apply_rotary_pos_emb"]
        assert hf.rotations_in(functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))) == {}  # of another package
        rotation = fuse._fused_rotation
        monkeypatch.setattr(
            fuse, "_fused_rotation", lambda functions: lambda *args: calls.append(1) or rotation(functions)(*args)
        )
        layers = [layer.self_attn for layer in model.model.layers]
        fuse.fuse(fuse.Fusible([], layers, [], []))
        bound = 1e-3 if INTERPRETED or DEVICE == "cuda" else 0.0  # elsewhere no kernel runs
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=bound)
        assert len(calls) == len(layers)
        attention, x = layers[0], torch.randn(1, 3, model.config.hidden_size, device=DEVICE)
        position_embeddings, mask = model.model.rotary_emb(x, ids[:, :3]), torch.zeros(1, 1, 3, 3, device=DEVICE)
        with pytest.warns(FutureWarning, match="mask"):
            old = attention(x, position_embeddings=position_embeddings, mask=mask)[0]
        new = attention(x, position_embeddings=position_embeddings, attention_mask=mask)[0]
        torch.testing.assert_close(old, new, rtol=0, atol=bound)


def test_transformers_is_not_changed_and_the_cache_is_found_among_arguments():
    """The globals of a model's module are copied, not changed."""
    cache = object()
    assert hf.cache_in({"past_key_values": cache, "input_ids": None}) is hf.cache_in({hf.CACHE: cache}) is cache
    assert hf.cache_in({}) is hf.cache_in({hf.CACHE: None}) is None
    assert fuse._with_fused_rope(modeling_llama.LlamaAttention.forward) is not modeling_llama.LlamaAttention.forward
    assert modeling_llama.apply_rotary_pos_emb is apply_rotary_pos_emb
    assert not subclass.is_fused(tiny("llama").model.layers[0].self_attn)


@runs_kernels
def test_patch_fuses_and_unpatch_restores():
    model = tiny("llama").to(DEVICE)
    ids = {"input_ids": torch.arange(1, 12, device=DEVICE)[None], "max_new_tokens": 2 if INTERPRETED else 6, "do_sample": False}
    expected = model.generate(**ids)
    with hf_fastattn.patch(model, "lean") as patch:
        layers = model.config.num_hidden_layers
        assert {c.what: c.count for c in patch.changes}.items() >= {
            "RMSNorm and LayerNorm": 2 * layers + 1,
            "rotation of queries and keys": layers,
            "product in the MLP": layers,
        }.items()
        assert torch.equal(model.generate(**ids), expected)
        twin = copy.deepcopy(model)
    assert not any(subclass.is_fused(module) for module in model.modules())
    assert any(subclass.is_fused(module) for module in twin.modules())
    assert torch.equal(twin.generate(**ids), expected)
    hf_fastattn.unpatch(twin)
    assert not any(subclass.is_fused(module) for module in twin.modules())
    with hf_fastattn.patch(model, "lean", fuse=False) as patch:
        assert not any(subclass.is_fused(module) for module in model.modules())
        assert "RMSNorm" not in str(patch)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="about CPU tensors")
def test_nothing_is_fused_on_the_cpu():
    with hf_fastattn.patch(tiny("llama"), "lean") as patch:
        assert "RMSNorm" not in str(patch) and not patch._fused


@runs_kernels
def test_a_function_replaced_in_a_models_file_is_used(monkeypatch):
    model, ids = tiny("llama", device=DEVICE), torch.arange(3, 9, device=DEVICE)[None]
    real, turn, calls = modeling_llama.ALL_ATTENTION_FUNCTIONS, modeling_llama.apply_rotary_pos_emb, []
    counting = SimpleNamespace(get_interface=lambda *args: calls.append(args) or real.get_interface(*args))
    with torch.no_grad():
        hf_fastattn.patch(model, "reference").undo()
        with hf_fastattn.patch(model, "reference") as patch:
            assert patch._fused
            monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", counting)
            right = model(ids).logits
            assert len(calls) == 2
            monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *rest: turn(-q, k, *rest))
            assert not torch.allclose(model(ids).logits, right)
            monkeypatch.undo()
            torch.testing.assert_close(model(ids).logits, right)
            monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: 2 * x)
            assert not torch.allclose(model(ids).logits, right)


class OfAWidth(LlamaRMSNorm):
    def __init__(self, width):
        super().__init__(width, eps=1e-6)
        self.width = width

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) / self.width + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


def test_a_wide_norm_is_known_by_short_rows_unless_its_code_may_read_its_width(monkeypatch):
    sizes, recognise, here = [], norms._recognise, threading.get_ident()  # another thread lists the kernels of patched models

    def counted(*args):
        if threading.get_ident() == here:
            sizes.append(args[-1])
        return recognise(*args)

    monkeypatch.setattr(norms, "_recognise", counted)
    made = LlamaRMSNorm(4096), LlamaRMSNorm(2880), LlamaRMSNorm(1001), OfAWidth(4096)
    assert len({hf.norm_of(norm)[:5] for norm in made}) == 1 and sizes == [512, 360, 1001, 4096]


def test_other_models_are_not_imported_to_compare_with_their_code(monkeypatch):
    for name in ("phi3", "deepseek_v3", "qwen3_5_moe", "lfm2", "bamba"):
        monkeypatch.setitem(sys.modules, f"transformers.models.{name}.modeling_{name}", None)
    experts._routing.cache_clear()
    model = tiny("llama")
    kinds = (hf.mlp_of, hf.mixer_of, functools.partial(hf.routing, module=model))
    assert {kind(type(module).forward) for module in model.modules() for kind in kinds} == {None, "llama"}


@runs_kernels
def test_a_gelu_in_parts_is_one_operation_but_for_gradients_and_replaced_functions(monkeypatch):
    from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation
    from transformers.models.bloom import modeling_bloom

    model = torch.nn.Sequential(
        torch.nn.Linear(1, 1), NewGELUActivation(), FastGELUActivation(), modeling_bloom.BloomGelu(), GELUTanh()
    ).to(DEVICE)
    fused = activations.fuse(model)
    assert fused == [*model[1:4]]
    x = torch.linspace(-6, 6, 300, device=DEVICE)
    for act in fused:
        stock = type(act).__mro__[1]()
        with Launches() as launches, torch.no_grad():
            out = act(x)
        assert launches.count == {"gelu": 1}
        torch.testing.assert_close(out, stock(x), atol=1e-6, rtol=1e-5)
        of, by = (x.clone().requires_grad_() for _ in range(2))
        act(of).sum().backward()
        stock(by).sum().backward()
        assert torch.equal(of.grad, by.grad)
    monkeypatch.setattr(modeling_bloom, "bloom_gelu_forward", lambda x: x + 1)
    with torch.no_grad():
        assert torch.equal(model[3](x), x + 1)
    subclass.restore(fused)
    assert [type(act) for act in fused] == [NewGELUActivation, FastGELUActivation, modeling_bloom.BloomGelu]


def test_a_gelu_that_someone_has_replaced_is_not_fused(monkeypatch):
    from transformers.activations import NewGELUActivation
    from transformers.models.bloom import modeling_bloom

    monkeypatch.setattr(NewGELUActivation, "forward", lambda self, x: x)
    monkeypatch.setattr(modeling_bloom, "bloom_gelu_forward", lambda x: x)
    own = type("NewGELUActivation", (NewGELUActivation,), {})
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), NewGELUActivation(), modeling_bloom.BloomGelu(), own())
    assert activations.fuse(model, lambda device: True) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gates_read_nothing_on_the_host_unless_their_code_is_another(dtype, monkeypatch):
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    config = SimpleNamespace(hidden_size=64, intermediate_size=[96] * 3, hidden_activation="gelu_pytorch_tanh")
    config.activation_sparsity_pattern = [0.95, 0.0, 0.5]
    model = torch.nn.Sequential(*(Gemma3nTextMLP(config, layer) for layer in range(3))).to(DEVICE, dtype)
    x, own = torch.randn(2, 5, 64, device=DEVICE, dtype=dtype), Gemma3nTextMLP._gaussian_topk
    expected = [mlp(x) for mlp in model]
    assert activations.fuse_sparse_gates(model) == [model[0], model[2]]
    found = [mlp(x) for mlp in model]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # a quantile of a GPU differs in the last bit of fp32
    with monkeypatch.context() as m:  # it checks its argument on the host
        m.setattr(torch.distributions, "Normal", None)
        m.setattr(torch.distributions.normal, "Normal", None)
        assert all(torch.equal(mlp(x), out) for mlp, out in zip(model, found, strict=True))
    model[0].activation_sparsity = 0.5
    assert not torch.equal(model[0](x), expected[0])
    assert torch.equal(pickle.loads(pickle.dumps(model[2]))(x), found[2])
    model[0]._gaussian_topk = torch.zeros_like
    monkeypatch.setattr(Gemma3nTextMLP, "_gaussian_topk", lambda self, gates: own(self, gates) * 0)
    assert not model[0](x).any() and not model[2](x).any()
    subclass.restore([*model])
    assert {type(mlp) for mlp in model} == {Gemma3nTextMLP} and not activations.fuse_sparse_gates(model)
