"""RMSNorm in one launch: the kernel against float64, and which norms of a model it stands in for."""

import copy

import pytest
import torch
from models import tiny
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_fastattn.kernels import HAS_TRITON, INTERPRETED
from hf_fastattn.patches import norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (INTERPRETED or DEVICE == "cuda")), reason="needs a GPU or TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def exact(x, weight, eps):
    x = x.double()
    return weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 100), (5, 4096), (3, 2, 7, 16), (1, 1, 5000)], ids=str)
def test_error_is_that_of_llamas_own(shape, dtype):
    from hf_fastattn.kernels.rms_norm import rms_norm

    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1]))
        got, stock = rms_norm(x, norm.weight, 1e-5), norm(x)
    assert got.dtype == dtype and got.shape == x.shape
    right = exact(x, norm.weight.detach(), 1e-5)
    unit = 4 * torch.finfo(dtype).eps * right.abs().max()
    assert (got.double() - right).abs().max() <= 2 * (stock.double() - right).abs().max() + unit


@runs_kernels
def test_strided_input_and_zero_rows():
    from hf_fastattn.kernels.rms_norm import rms_norm

    x = torch.randn(4, 6, 32, device=DEVICE).transpose(0, 1)
    weight = torch.ones(32, device=DEVICE)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact(x, weight, 1e-6), atol=1e-5, rtol=1e-5)
    assert (rms_norm(torch.zeros(3, 32, device=DEVICE), weight, 1e-6) == 0).all()


@runs_kernels
def test_refusals_are_sentences():
    from hf_fastattn.kernels.rms_norm import rms_norm

    x = torch.randn(2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="requires grad"):
        rms_norm(x, torch.ones(32, device=DEVICE, requires_grad=True), 1e-6)
    with pytest.raises(ValueError, match=r"weight torch\.float16"):
        rms_norm(x, torch.ones(32, device=DEVICE, dtype=torch.float16), 1e-6)
    with pytest.raises(ValueError, match=r"\(2, 32\)"):
        rms_norm(x, torch.ones(16, device=DEVICE), 1e-6)


@runs_kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "opt"])
def test_a_model_computes_the_same(family):
    model = tiny(family).to(DEVICE)
    ids = torch.arange(1, 12, device=DEVICE)[None]
    with torch.no_grad():
        before = model(ids).logits
        found = norms.find(model)
        for norm in found:
            norms.fuse(norm)
        assert norms.find(model) == []
        during = model(ids).logits
        twin = copy.deepcopy(model)
        for norm in found:
            norms.restore(norm)
        after = model(ids).logits
    layers = model.config.num_hidden_layers
    per_model = {"llama": 2 * layers + 1, "mistral": 2 * layers + 1, "qwen2": 2 * layers + 1, "qwen3": 4 * layers + 1}
    assert len(found) == per_model.get(family, 0)  # Gemma's norms and OPT's LayerNorms are other formulas
    torch.testing.assert_close(during, before, atol=1e-5, rtol=1e-5)
    assert torch.equal(after, before)
    assert all(vars(b)["forward"].__self__ is b for a, b in zip(model.modules(), twin.modules(), strict=True) if a in found)
