"""The choice of experts in one launch: comparison with the routers of models, and what patch() replaces."""

import copy
import importlib
import sys

import pytest
import torch
from calls import DEVICE, DTYPES, captured, runs_kernels
from models import tiny
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf import experts as hf_experts
from hf_fastattn.kernels import HAS_TRITON
from hf_fastattn.patches.fused import experts, subclass

if HAS_TRITON:
    from hf_fastattn.kernels.decode import route as kernel
    from hf_fastattn.kernels.decode.route import route, why_not

ROUTERS = {  # type of the configuration: (class of its router, how it gets scores)
    "gpt_oss": ("GptOssTopKRouter", hf.Routing("choice")),
    "mixtral": ("MixtralTopKRouter", hf.Routing("softmax", normalise=True, dtype=torch.float32)),
    "qwen3_moe": ("Qwen3MoeTopKRouter", hf.Routing("softmax")),
    "olmoe": ("OlmoeTopKRouter", hf.Routing("softmax", normalise=True)),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", hf.Routing("softmax", normalise=True)),
    "glm4_moe": ("Glm4MoeTopkRouter", hf.Routing("sigmoid", normalise=True, scale=1.5)),
    "deepseek_v3": ("DeepseekV3TopkRouter", None),  # the experts of the best groups
    "deepseek_v2": ("DeepseekV2TopkRouter", None),
}
SIZES = {"hidden_size": 32, "num_experts_per_tok": 3, "num_experts": 9, "num_local_experts": 9, "n_routed_experts": 9}
OWN = {"olmoe": {"norm_topk_prob": True}, "qwen3_moe": {"norm_topk_prob": False}, "deepseek_v3": {"n_group": 3, "topk_group": 2}}
OWN["glm4_moe"] = {"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}


def own_router(name: str) -> torch.nn.Module:
    """The router of one layer of a model with random weights."""
    config = CONFIG_MAPPING[name](**SIZES, **OWN.get(name, {}))
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    router = getattr(module, ROUTERS[name][0])(config)
    torch.manual_seed(0)
    for weight in (*router.parameters(), *router.buffers()):
        weight.data = torch.randn_like(weight) / 4
    return router.to(DEVICE).requires_grad_(False)


@pytest.fixture
def launched(monkeypatch):
    """A list with an item for each call of the kernel: whether it ran."""
    calls = []

    def counted(*args, **kwargs):
        out = route(*args, **kwargs)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(kernel, "route", counted)
    return calls


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_known_by_their_code(name):
    router = own_router(name)
    assert hf.routing(type(router).forward, router) == ROUTERS[name][1]


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"])
def test_a_known_router_is_found_without_the_files_of_the_others(name, monkeypatch):
    forward = type(own_router(name)).forward
    others = {f"transformers.models.{family}.modeling_{family}" for family, _ in hf_experts._ROUTERS} - {forward.__module__}
    for other in others:
        monkeypatch.delitem(sys.modules, other, raising=False)
    assert hf_experts._routing.__wrapped__(forward) is not None and others.isdisjoint(sys.modules)


@runs_kernels
@pytest.mark.parametrize("count", [9, 32])
@pytest.mark.parametrize("form", ["softmax", "choice", "sigmoid"])
def test_nan_in_a_logit_reaches_the_scores_of_its_token_and_experts_are_still_experts(form, count):
    logits = torch.zeros(4, count, device=DEVICE)
    logits[1, 4], logits[2] = float("nan"), float("nan")
    correction = torch.zeros(count, device=DEVICE) if form == "sigmoid" else None
    scores, chosen = route(logits, 3, form, correction=correction)
    assert scores.isnan().all(1).tolist() == [False, True, True, False] and not scores[::3].isnan().any()
    assert ((chosen >= 0) & (chosen < count)).all()


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, (_, kind) in ROUTERS.items() if kind is not None])
def test_scores_are_those_of_the_models_own_code(name, dtype, launched):
    router = own_router(name).to(dtype)
    x = torch.randn(7, 32, device=DEVICE).to(dtype)
    logits, scores, chosen = router(x)
    subclass.replace(router, experts.router)
    got = router(x)
    assert launched == [True] and torch.equal(got[0], logits)
    assert got[1].dtype == scores.dtype and got[2].dtype == chosen.dtype
    if name == "glm4_moe":  # it does not ask for an order
        chosen, order = chosen.sort(1)
        ours, its = got[2].sort(1)
        got, scores = (logits, got[1].gather(1, its), ours), scores.gather(1, order)
    assert torch.equal(got[2], chosen)
    torch.testing.assert_close(got[1], scores, rtol=4 * torch.finfo(scores.dtype).eps, atol=0)
    with captured():  # with one token the product also runs a kernel of the package
        one = router(x[:1])
    torch.testing.assert_close(one[0], logits[:1], rtol=0, atol=64 * torch.finfo(dtype).eps)
    subclass.restore([router])
    assert router(x)[1].shape == (7, 3) and len(launched) == 2


@runs_kernels
def test_of_equal_logits_the_first_is_chosen():
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[1, [7, 30, 38]] = 1.0
    for form in ("softmax", "choice"):
        scores, chosen = route(logits, 4, form, normalise=True)
        assert chosen.tolist() == [[0, 1, 2, 3], [7, 30, 38, 0]]
        torch.testing.assert_close(scores.sum(1), torch.ones(2, device=DEVICE))


@runs_kernels
@pytest.mark.parametrize("count", [5, 130])
def test_zeros_of_both_signs_are_equal_and_infinities_are_ordered(count):
    low = float("-inf")
    logits = torch.full((3, count), -3.0, device=DEVICE)
    logits[0, :5] = torch.tensor([-1e-38, -0.0, 0.0, -0.0, -2.0])
    logits[1, :5] = torch.tensor([-1.0, low, -2.0, 1.0, 0.5])
    logits[2] = low
    logits[2, 1] = 7.0
    scores, chosen = route(logits, 4, "choice")
    assert chosen.tolist() == [[1, 2, 3, 0], [3, 4, 0, 2], [1, 0, 2, 3]]
    torch.testing.assert_close(scores, logits.gather(1, chosen).softmax(1))


@runs_kernels
def test_dtypes_of_scores_do_not_share_a_launch():
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=DEVICE).half()
    for dtype in (torch.float32, None):
        scores, _ = route(logits, 2, "choice", dtype=dtype)
        want = torch.tensor([[3.0, 2.0]], device=DEVICE).softmax(1).to(dtype or torch.float16)
        torch.testing.assert_close(scores, want)


@runs_kernels
@pytest.mark.parametrize("why", ["65 tokens", "trained", "autocast"])
def test_otherwise_the_models_own_code_runs(why, launched):
    router = own_router("qwen3_moe")
    subclass.replace(router, experts.router)
    if why == "trained":
        router.weight.requires_grad_()
    x = torch.randn(65 if why == "65 tokens" else 4, 32, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=why == "autocast"):
        got = router(x)
        want = type(router).__bases__[0].forward(router, x)
    assert not any(launched) and all(map(torch.equal, got, want))
    assert got[1].requires_grad == (why == "trained")


@runs_kernels
def test_refusals_are_sentences():
    logits = torch.zeros(2, 8, device=DEVICE)
    wrong = {
        "(tokens, experts) and contiguous": (logits.t(), 2),
        "9 of 8 experts": (logits, 9),
        "at most 32 of 1024": (torch.zeros(1, 2000, device=DEVICE), 2),
        "float16, bfloat16 or float32": (logits.double(), 2),
        "require grad": (logits.clone().requires_grad_(), 2),
        "one element for each of 8": (logits, 2, torch.zeros(7, device=DEVICE)),
    }
    for said, arguments in wrong.items():
        assert said in why_not(*arguments)
        assert route(*arguments[:2], "softmax", correction=arguments[2] if len(arguments) > 2 else None) is None


@runs_kernels
def test_patch_replaces_routers_and_puts_them_back():
    model = tiny("mixtral", device=DEVICE, num_local_experts=4, num_hidden_layers=1)
    router = next(module for module in model.modules() if hf.routing(type(module).forward, module) is not None)
    cls = type(router)
    with hf_fastattn.patch(model, graph=False) as patch:
        assert "choice of experts, up to 64 tokens: seven launches -> one (1)" in str(patch)
        assert type(router) is not cls and type(router) is type(copy.deepcopy(router))
    assert type(router) is cls
