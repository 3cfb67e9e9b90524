"""The choice of experts in the launch of gate and up: the same bits as in a launch of its own, whatever reads the choice."""

import copy
from itertools import product

import pytest
import torch
from calls import captured
from cases import slow_unless
from models import tiny
from small_layers import Launches
from test_experts import DEVICE, MOE, OSS, inputs, moe, runs_kernels
from tolerance import assert_close, largest

from hf_fastattn.kernels import HAS_TRITON
from hf_fastattn.kernels.mixture import PLAIN
from hf_fastattn.patches.fused import delayed as merged
from hf_fastattn.patches.fused import experts, linears, residual, subclass
from hf_fastattn.patches.fused import norms as fuse

if HAS_TRITON:
    from hf_fastattn.kernels.decode import experts as kernel
    from hf_fastattn.kernels.decode import route

pytestmark = runs_kernels
SIZE = 32
SHARED = {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "head_dim": 16}
GATES = product([1, 3], ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"])
CASES = {
    "softmax": {"form": "softmax", "normalise": True},
    "softmax, scores in float32": {"form": "softmax", "dtype": torch.float32},
    "choice": {"form": "choice"},
    "sigmoid": {"form": "sigmoid", "normalise": True, "scale": 2.5},
}


def model_with_a_norm() -> torch.nn.Module:
    """A model that runs in the mode of merged.py, which takes only models with fused modules."""
    norms = torch.nn.ModuleList([torch.nn.LayerNorm(SIZE)]).to(DEVICE, torch.float16)
    fuse.fuse(fuse.Fusible(list(norms), [], [], []))
    return norms


def logits_of(tokens=1, count=9):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, count, generator=generator).to(DEVICE, torch.float16)


def step(logits, form="softmax", choices=3, layout=PLAIN, bias=False, between=lambda *choice: choice, count=None, **options):
    """[scores, experts, result of the experts]. between: what happens to the choice before the experts run."""
    x, _, _, weights = inputs(logits.shape[0], SIZE, 16, count or logits.shape[1], choices, layout, bias, torch.float16)
    if form == "sigmoid":
        options["correction"] = torch.linspace(-1, 1, logits.shape[1], device=DEVICE)
    delayed = merged.current()
    choose, run = (route.route, kernel.run) if delayed is None else (delayed.route, delayed.experts)
    scores, chosen = choose(logits, choices, form, **options)
    return [scores, chosen, run(x, *between(chosen, scores), weights, layout)]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count, layout, bias", [(9, PLAIN, False), (128, OSS, True)])
def test_choice_and_gate_are_one_launch_with_the_same_bits(name, count, layout, bias):
    logits = logits_of(count=count)
    expected = step(logits, layout=layout, bias=bias, **CASES[name])
    with Launches() as launches, merged.merged(model_with_a_norm()):
        got = step(logits, layout=layout, bias=bias, **CASES[name])
    ours = {kernel: n for kernel, n in launches.count.items() if kernel.endswith("_kernel")}
    assert ours == {"gate_up_kernel": 1, "down_kernel": 1, "sum_kernel": 1}
    assert all(map(torch.equal, got, expected)) and got[2].abs().sum() > 0


BEFORE = torch.tensor([[4, 0, 2]], device=DEVICE), torch.full((1, 3), 0.25, device=DEVICE, dtype=torch.float16)
ALONE = {  # what the experts get, where the choice is a launch of its own
    "other experts": {"between": lambda chosen, scores: (chosen.flip(1), scores)},
    "other scores": {"between": lambda chosen, scores: (chosen, scores * 2)},
    "experts from before": {"between": lambda chosen, scores: (BEFORE[0], scores)},
    "scores from before": {"between": lambda chosen, scores: (chosen, BEFORE[1])},
    "the choice is read": {"between": lambda chosen, scores: (chosen + 1 - 1, scores)},
    "the choice is changed": {"between": lambda chosen, scores: (chosen.fill_(2), scores)},
    "a part": {"between": lambda chosen, scores: (chosen[:, :2], scores[:, :2])},
    "experts of several ranks": {"count": 5},
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*ALONE, "two tokens", "many experts"])
def test_otherwise_the_choice_is_a_launch_of_its_own(name):
    logits = logits_of(2 if name == "two tokens" else 1, 129 if name == "many experts" else 9)
    expected = step(logits, **ALONE.get(name, {}))
    with Launches() as launches, merged.merged(model_with_a_norm()):
        got = step(logits, **ALONE.get(name, {}))
    assert (launches.count["route_kernel"], launches.count["gate_up_kernel"]) == (1, 1)
    assert all(map(torch.equal, got, expected))


@torch.no_grad()
def test_the_choice_of_logits_that_are_delayed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "new_empty", torch._C.TensorBase.new_empty)  # that of tests fills, before which layers run
    x, weight = torch.randn(1, SIZE, device=DEVICE).half(), torch.randn(9, SIZE, device=DEVICE).half()
    with merged.merged(model_with_a_norm()):
        (logits,) = merged.current().linears(x, (weight,))
        got = merged.current().route(logits, 3, "softmax")
    assert logits.abs().sum() > 0 and all(map(torch.equal, got, route.route(logits, 3, "softmax")))


@torch.no_grad()
def test_a_choice_that_no_experts_get_runs_and_nan_in_a_logit():
    logits = logits_of()
    logits[0, 4] = float("nan")
    expected = step(logits)
    with merged.merged(model_with_a_norm()):
        got = step(logits)
    assert torch.equal(got[1], expected[1]) and all(t.isnan().all() for t in (got[0], expected[0], got[2], expected[2]))
    expected = route.route(logits_of(), 3, "softmax")
    with Launches() as launches, merged.merged(model_with_a_norm()):
        got = merged.current().route(logits_of(), 3, "softmax")
        before = launches.count["route_kernel"]
    assert (before, launches.count["route_kernel"]) == (0, 1) and all(map(torch.equal, got, expected))


@torch.no_grad()
@pytest.mark.parametrize("between", [None, "experts of several ranks"])
def test_a_choice_for_experts_that_are_refused_runs(between, monkeypatch):
    expected = step(logits_of())
    monkeypatch.setattr(kernel, "run", lambda *_: None)
    with merged.merged(model_with_a_norm()):
        got = step(logits_of(), **ALONE.get(between, {}))
    assert got[2] is None and all(map(torch.equal, got[:2], expected))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_a_step_of_a_model_has_no_launch_that_only_chooses(name):
    model, ids = moe(name).half(), torch.arange(3, 9, device=DEVICE)[None]
    past = model(ids, use_cache=True).past_key_values
    fuse.fuse(fuse.find(model))
    routers, layers = experts.find_routers(model), experts.find(model)
    for module in routers:
        subclass.replace(module, experts.router)
    experts.use(layers)
    linears.join(model), residual.join(model)
    with captured():
        expected = model(ids[:, :1], past_key_values=copy.deepcopy(past)).logits
        with Launches() as launches, merged.merged(model):
            logits = model(ids[:, :1], past_key_values=past).logits
    torch.testing.assert_close(logits, expected, atol=0 if DEVICE == "cpu" else 2e-2, rtol=0)
    assert launches.count["gate_up_kernel"] == len(layers) == len(routers) > 0 and not launches.count["route_kernel"]


@pytest.mark.usefixtures("seeded_without_gradients")
@pytest.mark.parametrize("rows, name", slow_unless([(1, "qwen2_moe"), (3, "qwen3_next")].__contains__, GATES))
def test_the_gate_of_a_shared_expert_has_no_launch_of_its_own(name, rows):
    """Its logit is computed with those of the router, its sigmoid and the product in the launch of the sum that follows."""
    whole = tiny(name, device=DEVICE, **MOE | SHARED)
    whole.set_experts_implementation("eager")
    block = whole.model.layers[0].mlp.half()
    x, other = torch.randn(2, rows, 1, 64, device=DEVICE).half()
    stock, right = other + block(x), other + copy.deepcopy(block).double()(x.double())
    fuse.fuse(fuse.find(block))
    subclass.replace(block.gate, experts.router)
    experts.use(experts.find(block))
    model, results, counts = torch.nn.ModuleList([block]), [], []
    for joined in (False, True):
        assert not joined or linears.join(model) == [block]
        with captured(), Launches() as launches, merged.merged(model):
            results.append(other + block(x))
        counts.append(launches.count)
    for got in results:
        assert_close(got, right, stock, torch.finfo(got.dtype).eps, largest(right), name)
    with captured():  # the router runs its own code for more tokens than its kernel supports
        assert [linears._project(block, x.new_zeros(tokens, 1, 64)) is None for tokens in (64, 65)] == [False, True]
    linear = "linear_kernel" if rows == 1 else "linear_rows_kernel"
    assert [count[linear] for count in counts] == ([3, 2] if rows == 1 else [4, 3])  # without the gated one, with one row
    assert all(count["residual_kernel"] == 1 and not count["sigmoid"] + count["mul"] + count["add"] for count in counts)
