"""Norms and rotations of every family: which are recognised, what the kernels compute, and which launches are left."""

import importlib

import pytest
import torch
from small_layers import FAMILIES, TABLE, Launches, small_model, table
from test_fuse import DEVICE, DTYPES, runs_kernels
from torch import nn

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf.rotations import reached
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.fused import subclass


def modelling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


# (centred, late, one)
NORMS = {
    "llama": ("LlamaRMSNorm", (False, False, "")),
    "llama4": ("Llama4TextRMSNorm", (False, False, "")),
    "t5": ("T5LayerNorm", (False, False, "")),
    "olmo2": ("Olmo2RMSNorm", (False, True, "")),
    "gpt_oss": ("GptOssRMSNorm", (False, True, "")),
    "helium": ("HeliumRMSNorm", (False, True, "")),
    "gemma4": ("Gemma4RMSNorm", (False, True, "")),
    "gemma3": ("Gemma3RMSNorm", (False, True, "fp32")),
    "qwen3_next": ("Qwen3NextRMSNorm", (False, True, "fp32")),
    "cohere2": ("Cohere2LayerNorm", (True, True, "")),
}


def norm_of_family(family, size=96):
    norm = getattr(modelling(family), NORMS[family][0])(size, eps=1e-5)
    nn.init.normal_(norm.weight)
    return norm


class Norm(nn.Module):
    """Llama's norm, in parts that subclasses replace."""

    def __init__(self, size=96):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = 1e-5

    def quotient(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * self.quotient(x).to(x.dtype)


def variant(**own):
    """A norm with other methods; `bias`, `weight` or `scale` change what it has."""
    parts = {name: own.pop(name) for name in ("bias", "weight", "scale") if name in own}
    norm = type("Norm", (Norm,), own)()
    for name, value in parts.items():
        if value is None:
            delattr(norm, name)
        else:
            setattr(norm, name, value)
    return norm


def one_rounded():
    return variant(forward=lambda self, x: (self.quotient(x) * (1.0 + self.weight).float()).to(x.dtype))


def with_bias():
    forward = lambda self, x: (self.quotient(x) * self.weight.float() + self.bias.float()).to(x.dtype)  # noqa: E731
    return variant(forward=forward, bias=nn.Parameter(torch.randn(96)))


def without_weight():
    return variant(forward=lambda self, x: self.quotient(x).to(x.dtype), weight=None)


def test_a_norm_is_recognised_by_what_it_computes():
    for family, (_, options) in NORMS.items():
        assert hf.norm_of(norm_of_family(family)).options == options, family
    assert hf.norm_of(Norm()).options == (False, False, "")
    assert hf.norm_of(one_rounded()).options == (False, True, "rounded")
    assert hf.norm_of(with_bias()).options == (False, True, "") and hf.norm_of(with_bias()).has == (True, True)
    assert hf.norm_of(without_weight()).has == (False, False)
    assert hf.norm_of(nn.LayerNorm(96)).options == (True, True, "")


def helper(x):
    return x


def raises(self, x):
    raise OSError(x)


OTHERS = {
    "eps outside": {"quotient": lambda self, x: x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + self.eps)},
    "variance in 16 bits": {"quotient": lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)},
    "scale rounded": {
        "quotient": lambda self, x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)
    },
    "in groups": {"quotient": lambda self, x: Norm.quotient(self, x.unflatten(-1, (-1, 32))).flatten(-2)},
    "one missing": {
        "forward": lambda self, x: self.weight * torch.cat([self.quotient(x)[..., :-1], x[..., -1:]], -1).to(x.dtype)
    },
    "clamped": {"quotient": lambda self, x: Norm.quotient(self, x.clamp(-4000, 4000))},
    "of two arguments": {"forward": lambda self, x, gate=None: self.weight * self.quotient(x).to(x.dtype)},
    "calls a function": {"forward": lambda self, x: helper(self.weight * self.quotient(x).to(x.dtype))},
    "with a tensor": {
        "forward": lambda self, x: self.weight * self.quotient(x).to(x.dtype) * self.scale,
        "scale": torch.ones(96),
    },
    "raises": {"forward": raises},
    "a wide weight": {"weight": nn.Parameter(torch.ones(2, 48))},
}


def test_other_code_and_what_a_norm_contains_beside_its_weight_is_left_alone():
    for name, own in OTHERS.items():
        assert hf.norm_of(variant(**own)) is None, name
    parts, computed = Norm(), Norm()
    parts.inner = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(computed, "weight", nn.Identity())
    assert hf.norm_of(parts) is hf.norm_of(computed) is None


def both(norm, x):
    """(output of the fused norm, of its own code)."""
    with torch.no_grad():
        own = norm(x)
        fuse.fuse(fuse.Fusible([norm], [], [], []))
        assert subclass.is_fused(norm)
        out = norm(x)
        subclass.restore([norm])
    return out, own


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_norms_have_the_models_roundings(dtype):
    """An element differs only if the order of a sum changes its rounding; another formula changes every tenth element."""
    torch.manual_seed(0)
    norms = [*map(norm_of_family, ("llama", "olmo2", "gemma3", "cohere2", "gemma4"))]
    norms += [one_rounded(), with_bias(), without_weight(), nn.LayerNorm(96)]
    nn.init.normal_(norms[-1].weight), nn.init.normal_(norms[-1].bias)
    for norm in norms:
        norm.to(DEVICE, dtype)
        x = (3 * torch.randn(4, 5, 96, device=DEVICE) + 1).to(dtype)
        out, own = both(norm, x)
        if dtype == torch.float32:
            torch.testing.assert_close(out, own, atol=1e-5, rtol=1e-5)
        else:
            assert out.dtype == dtype and (out != own).float().mean() < 0.01, type(norm)


@runs_kernels
def test_a_norm_that_someone_changed_runs_its_own_code(monkeypatch):
    x = torch.randn(2, 96, device=DEVICE)

    def changed(norm, change):
        norm.to(DEVICE)
        fuse.fuse(fuse.Fusible([norm], [], [], []))
        change(norm)
        with torch.no_grad():
            out = norm(x)
            return out, type(norm).__bases__[0].forward(norm, x)

    def weight(norm):
        value = 2 * norm.weight.detach()
        del norm.weight
        norm.weight = value

    gemma3 = type(norm_of_family("gemma3"))
    changes = [
        ("gemma3", weight),
        ("gemma3", lambda norm: setattr(norm, "_norm", lambda x: 2 * x)),
        ("gemma3", lambda norm: setattr(norm, "eps", 0.5)),
        ("gemma4", lambda norm: setattr(norm, "with_scale", False)),
        ("gemma3", lambda norm: monkeypatch.setattr(gemma3, "_norm", lambda self, x: 3 * x)),
    ]
    for family, change in changes:
        torch.testing.assert_close(*changed(norm_of_family(family), change))
    layer_norm = nn.LayerNorm(96, device=DEVICE, dtype=torch.float16)
    fuse.fuse(fuse.Fusible([layer_norm], [], [], []))
    with torch.no_grad(), torch.autocast(DEVICE, torch.float16):
        assert layer_norm(x.half()).dtype == nn.functional.layer_norm(x.half(), (96,)).dtype


# (interleaved, apart, of_pair, doubled, late) of `width` cosines for heads of 64 dimensions
NEOX, PAIRS = (0, 0, 0, 0, 0), (1, 0, 1, 0, 0)
ROTATIONS = {
    **{"llama": (64, NEOX), "gpt_neox": (32, NEOX), "phi3": (48, NEOX), "olmo2": (64, (0, 0, 0, 0, 1))},
    **{"cohere2": (64, (1, 0, 0, 0, 1)), "glm4": (32, PAIRS), "helium": (64, PAIRS), "ernie4_5": (64, (1, 0, 1, 0, 1))},
    **{"blt": (64, (1, 0, 0, 0, 0)), "deepseek_v3": (64, (1, 1, 1, 0, 0)), "gpt_oss": (32, (0, 0, 1, 1, 0))},
}


def rotation_of_family(family):
    names = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
    return next(getattr(modelling(family), name) for name in names if hasattr(modelling(family), name))


@pytest.mark.parametrize("family", ROTATIONS)
def test_a_rotation_is_recognised_by_what_it_computes(family):
    width, flags = ROTATIONS[family]
    functions = reached(rotation_of_family(family))
    cosines = torch.float32 if family == "olmo2" else torch.float16
    assert hf.is_rotation(functions)
    assert hf.rotation_of(functions, 64, width, torch.float16, cosines) == flags
    assert hf.rotation_of(functions, 64, 2 * width, torch.float16, cosines) in (None, flags)


def test_other_rotations_are_left_alone(monkeypatch):
    """NanoChat's rotate_half() rotates in the other direction; Gemma 4 rotates one tensor; Llama's own may be replaced."""
    assert not hf.is_rotation(reached(rotation_of_family("nanochat")))
    assert not hf.is_rotation(reached(rotation_of_family("gemma4")))
    llamas = rotation_of_family("llama")
    assert hf.is_rotation(reached(llamas))
    monkeypatch.setattr(modelling("llama"), "rotate_half", lambda x: x.flip(-1))
    assert not hf.is_rotation(reached(llamas))


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ROTATIONS)
def test_a_fused_rotation_is_bit_for_bit_the_models_own(family, dtype):
    torch.manual_seed(0)
    width, _ = ROTATIONS[family]
    own, cosines = rotation_of_family(family), torch.float32 if family == "olmo2" else dtype
    q, k = (torch.randn(2, 3, heads, 64, device=DEVICE).to(dtype).transpose(1, 2) for heads in (5, 2))
    cos, sin = (torch.randn(2, 3, width, device=DEVICE).to(cosines) for _ in range(2))
    fused = fuse._fused_rotation(reached(own))
    fused(q, k, cos, sin)  # recognises it
    with Launches() as launches:
        out = fused(q, k, cos, sin)
    assert launches.count == {"rope_kernel": 1}
    assert all(map(torch.equal, out, own(q, k, cos, sin)))


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_in_fewer_launches(family):
    model, ids = small_model(family, DEVICE), torch.arange(3, 9, device=DEVICE)[None]

    def step():
        past = model(ids, use_cache=True).past_key_values
        with Launches() as launches:
            return model(ids[:, :1], past_key_values=past).logits, launches.count

    before, theirs = step()
    found = fuse.find(model)._replace(mlps=[], linears=[])
    fuse.fuse(found)
    after, ours = step()
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)
    assert ours["rms_norm_kernel"] == len(found.norms) and ours["rope_kernel"] == len(found.layers)
    assert not ours.keys() & {"rsqrt", "mean", "neg", "native_layer_norm"}  # parts of norms and rotations
    saved = sum(theirs.values()) - sum(ours.values())
    assert saved >= 9 * len(found.layers) + (0 if "native_layer_norm" in theirs else 5 * len(found.norms))


def test_the_table_of_the_guide_is_current():
    guide = TABLE.read_text(encoding="utf-8")
    assert table() in guide, f"Put this table into {TABLE.name}:\n{table()}"


ROTATION = "rotation of queries and keys"


@pytest.mark.parametrize("family, own", {"gemma3_text": (), "nemotron": ("norms",), "nanochat": (ROTATION,)}.items())
def test_explain_says_which_small_layers_are_fused(family, own):
    found = hf_fastattn.explain(small_model(family), device="cuda", gpu="h100")
    fused = {row["what"] for row in found.runs}
    refused = {row["what"]: row["why"] for row in found.refused}
    for what in ("norms", ROTATION):
        assert (what in fused) == (what not in own) == (f"fused {what}" not in refused)
    assert all("is not a known formula" in refused[f"fused {what}"] for what in own)
