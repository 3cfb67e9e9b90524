"""The experts of a mixture in one read of their weights: comparison with the models' own, and what patch() does with them."""

import copy
import dataclasses
import importlib

import fake_graph
import pytest
import torch
from calls import DEVICE, DTYPES, captured, runs_kernels
from models import tiny
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.hf import experts as hf_experts
from hf_fastattn.hf import packages
from hf_fastattn.kernels import HAS_TRITON, mixture
from hf_fastattn.kernels.mixture import PLAIN, Layout, Weights
from hf_fastattn.patches.fused import experts, subclass

if HAS_TRITON:
    from hf_fastattn.kernels.decode import experts as kernel

OSS = Layout(transposed=True, interleaved=True, act="sigmoid", alpha=1.702, limit=1.0)
GELU = Layout(act="gelu_tanh")


def inputs(tokens, hidden, inner, count, choices, layout=PLAIN, bias=False, dtype=torch.float32):
    """(x, experts, scores, weights) in a layout."""
    generator = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    gate_up, down = new(count, 2 * inner, hidden) / hidden**0.5, new(count, hidden, inner) / inner**0.5
    if layout.transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (new(count, 2 * inner), new(count, hidden)) if bias else (None, None)
    x, scores, chosen = new(tokens, hidden), new(tokens, choices).softmax(1), new(tokens, count).topk(choices, 1).indices
    to = lambda t: None if t is None else t.to(DEVICE, dtype)  # noqa: E731
    return to(x), chosen.to(DEVICE), to(scores), Weights(*map(to, (gate_up, down, *biases)))


def check(x, chosen, scores, weights, layout=PLAIN):
    """Compare the kernel with the reference in float64: at most twice the error of the reference in this dtype, plus 4 units."""
    got, stock = kernel.run(x, chosen, scores, weights, layout), mixture.reference(x, chosen, scores, weights, layout)
    assert got is not None and got.dtype == x.dtype and got.shape == x.shape
    doubles = Weights(*(None if t is None else t.double() for t in weights))
    right = mixture.reference(x.double(), chosen, scores.double(), doubles, layout)
    unit = 4 * torch.finfo(x.dtype).eps * right.abs().max()
    assert (got.double() - right).abs().max() <= 2 * (stock.double() - right).abs().max() + unit
    return got


CASES = [  # tokens, hidden, inner, count, choices, layout, bias
    (1, 64, 48, 8, 2, PLAIN, False),  # a slot for each choice
    (1, 32, 600, 4, 1, OSS, True),  # in two splits
    (3, 72, 40, 16, 4, OSS, True),
    (20, 64, 32, 4, 3, Layout(act="gelu_tanh", limit=0.5), False),  # a slot for each expert
    (40, 32, 24, 5, 1, dataclasses.replace(GELU, transposed=True), True),
    (64, 32, 16, 3, 2, dataclasses.replace(OSS, transposed=False), True),
]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_that_of_the_reference(case, dtype):
    check(*inputs(*case, dtype), case[5])


@runs_kernels
@pytest.mark.parametrize("tokens", [2, 18])
def test_routing_that_is_not_even(tokens):
    x, chosen, scores, weights = inputs(tokens, 32, 16, 6, 3)
    everyone = torch.tensor([4, 1, 5], device=DEVICE).expand(tokens, 3).contiguous()  # experts 0, 2 and 3 have no token
    check(x, everyone, scores, weights)
    nowhere = chosen.clone()
    nowhere[0, 1], nowhere[1] = 6, 9  # the experts of other ranks; token 1 has no expert here
    assert (check(x, nowhere, scores, weights)[1] == 0).all()
    twice = chosen.clone()
    twice[1, 2] = twice[1, 0]
    twice[0] = twice[0, 0]
    check(x, twice.int(), scores, weights)


@runs_kernels
def test_one_token_with_an_expert_of_another_rank_and_one_twice_and_experts_that_no_token_has_chosen():
    """Whose weights are not read."""
    for inner in (16, 600):  # in one and in two splits
        x, chosen, scores, weights = inputs(1, 32, inner, 3, 3, bias=True)
        chosen[0, 1], chosen[0, 2] = 3, chosen[0, 0]
        check(x, chosen, scores, weights)
    x, chosen, scores, weights = inputs(2, 32, 16, 8, 2)
    for tensor in weights[:2]:
        tensor[[e for e in range(8) if e not in chosen]] = float("nan")
    check(x, chosen, scores, weights)


@runs_kernels
@pytest.mark.parametrize("inner", [16, 512])  # in one and in two splits
@pytest.mark.parametrize("bias", [None, 1.0])
def test_results_are_rounded_as_by_batched_mm(inner, bias):
    """With values whose sums are far from a tie, only roundings remain; a product with a score in float32 is not rounded."""
    new = lambda *shape: torch.full(shape[:-1], shape[-1], device=DEVICE, dtype=torch.float16)  # noqa: E731
    x, chosen = new(1, 16, 1.0), torch.tensor([[0, 1]], device=DEVICE)
    biases = () if bias is None else (new(2, 2 * inner, 0.0), new(2, 16, bias))
    weights = Weights(new(2, 2 * inner, 16, 1 / 16), new(2, 16, inner, 1 / inner), *biases)
    weights.down[1, :, inner // 2 :] *= 1 + 3 * 2**-7  # the second split
    for scores in (torch.tensor([[0.3, 0.7]], device=DEVICE), torch.tensor([[0.3, 0.7]], device=DEVICE).half()):
        h = torch.nn.functional.silu(torch.ones(1, device=DEVICE).half())  # gate and up are 1
        y = torch.stack([h, (h.float() * (1 + 3 * 2**-8)).half()], 1) + (bias or 0.0)
        want = (y * scores).sum(1).half()
        assert torch.equal(kernel.run(x, chosen, scores, weights), want.expand(1, 16))


@runs_kernels
def test_refusals_are_sentences():
    x, chosen, scores, weights = inputs(2, 32, 16, 4, 2)
    many = lambda *sizes: tuple(each.repeat(*sizes) for each in (chosen, scores))  # noqa: E731
    biased = lambda *shapes: Weights(*weights[:2], *(x.new_zeros(shape) for shape in shapes))  # noqa: E731
    wrong = {
        "1 to 64 tokens": (x.repeat(40, 1), *many(40, 1), weights),
        "both must be (tokens, choices)": (x, chosen[:1], scores[:1], weights),
        "must be [(4, 32, 32), (4, 32, 16)]": (x, chosen, scores, weights._replace(gate_up=weights.down)),
        "three dimensions": (x, chosen, scores, weights._replace(gate_up=weights.gate_up[0])),
        "int32 or int64": (x, chosen.short(), scores, weights),
        "scores are torch.float16": (x, chosen, scores.half(), weights),
        "got torch.float32 and torch.float16": (x, chosen, scores, weights._replace(down=weights.down.half())),
        "contiguous": (x.t().contiguous().t(), chosen, scores, weights),
        "requires grad": (x.clone().requires_grad_(), chosen, scores, weights),
        "need a bias or neither": (x, chosen, scores, weights._replace(down_bias=x.new_zeros(4, 32))),
        "bias of gate_up is (4, 16)": (x, chosen, scores, biased((4, 16), (4, 32))),
        "bias of down is (4, 16)": (x, chosen, scores, biased((4, 32), (4, 16))),
        "1 to 32 are supported": (x, *many(1, 20), weights),
    }
    for said, arguments in wrong.items():
        assert said in mixture.why_not(*arguments) and kernel.run(*arguments) is None


# ---- the modules of models ----
FAMILIES = {  # type of the configuration: (class of its experts, its layout)
    "gpt_oss": ("GptOssExperts", dataclasses.replace(OSS, limit=7.0)),
    "mixtral": ("MixtralExperts", PLAIN),
    "qwen3_moe": ("Qwen3MoeExperts", PLAIN),
    "olmoe": ("OlmoeExperts", PLAIN),
    "deepseek_v3": ("DeepseekV3Experts", PLAIN),
    "gemma4_text": ("Gemma4TextExperts", GELU),
    "aria_text": ("AriaExperts", Layout(transposed=True)),
    "minimax_m3_vl_text": ("MiniMaxM3VLExperts", Layout(act="sigmoid", alpha=1.702, limit=7.0)),
    "nemotron_h": ("NemotronHExperts", "NemotronHExperts has no gate"),
    "step3p7_text": ("Step3p7Experts", "the activation of Step3p7Experts is not one that the kernel supports"),
}
NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SIZES = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, **dict.fromkeys(NAMES, 4)}


def own_experts(name: str, **options) -> torch.nn.Module:
    """The experts of one layer of a model with large random weights."""
    config = CONFIG_MAPPING[name](**SIZES)
    config._experts_implementation = "eager"
    cls = getattr(importlib.import_module(type(config).__module__.replace("configuration", "modeling")), FAMILIES[name][0])
    module = cls(config, **options).to(DEVICE)
    torch.manual_seed(0)
    for weight in module.parameters():
        weight.data = torch.randn_like(weight) / weight.shape[-1] ** 0.5
    return module.requires_grad_(False)


def routed(module, tokens, choices=2):
    torch.manual_seed(1)
    x = torch.randn(tokens, 32, device=DEVICE)
    scores, chosen = torch.rand(tokens, 4, device=DEVICE).topk(choices, 1)
    return x.to(module.down_proj.dtype), chosen, scores.to(module.down_proj.dtype)


@pytest.fixture
def launched(monkeypatch):
    """A list of the results of each call of the kernel: whether it ran."""
    run, calls = kernel.run, []
    monkeypatch.setattr(packages, "PACKAGES", packages.PACKAGES | {__name__})  # what counts is no code of the model
    monkeypatch.setattr(kernel, "run", lambda *args: (out := run(*args), calls.append(out is not None))[0])
    return calls


@pytest.mark.parametrize("name", FAMILIES)
def test_layouts_are_recognised_by_behaviour(name):
    if name not in CONFIG_MAPPING:
        pytest.skip("this Transformers does not have this model")
    module = own_experts(name, **({"swiglu_limit": 7.0} if name == "step3p7_text" else {}))
    if not hf.asks_for_experts(module):
        pytest.skip("in this Transformers its experts do not ask the registry")
    assert hf.expert_layout(module) == FAMILIES[name][1]


def test_changed_numbers_precisions_and_hooks_are_noticed_and_say_nothing_of_other_modules(monkeypatch):
    module = own_experts("gpt_oss")
    module.limit = 3.0
    assert hf.expert_layout(module) == dataclasses.replace(OSS, limit=3.0)
    module.alpha = -1.0
    assert "not one that the kernel supports" in hf.expert_layout(module)

    class InFloat(type(own_experts("mixtral"))):
        def _apply_gate(self, gate_up):
            return super()._apply_gate(gate_up.float()).to(gate_up.dtype)

    module = own_experts("mixtral")
    module.__class__ = InFloat
    assert "InFloat" in hf.expert_layout(module)
    monkeypatch.setattr(hf_experts, "_layouts", {})
    hooked = own_experts("mixtral")
    hooked.act_fn.register_forward_hook(lambda module, args, out: out * 2)
    assert isinstance(hf.expert_layout(hooked), str)
    assert not isinstance(hf.expert_layout(own_experts("mixtral")), str)

    class SiLUActivation(torch.nn.Module):  # printed as Transformers' own
        def forward(self, x):
            return 3 * torch.nn.functional.silu(x)

    for name, value in (("act_fn", SiLUActivation()), ("_apply_gate", lambda x: x.chunk(2, -1)[0])):
        changed = own_experts("mixtral")
        setattr(changed, name, value)
        assert isinstance(hf.expert_layout(changed), str)
    with monkeypatch.context() as replaced:
        replaced.setattr(torch.nn.functional, "silu", torch.relu)
        assert "replaced a function" in hf.expert_layout(own_experts("mixtral"))
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None):
        assert isinstance(hf.expert_layout(own_experts("mixtral")), str)
    assert not isinstance(hf.expert_layout(own_experts("mixtral")), str)


@runs_kernels
@pytest.mark.parametrize("later", [False, True])
def test_an_implementation_that_someone_registered_under_a_name_of_transformers_runs(later, launched):
    module, mine = own_experts("mixtral"), lambda module, x, *args: torch.full_like(x, 7.0)
    hf.set_experts_implementation(module, "batched_mm")
    try:
        if later:
            experts.use([module])
        hf_experts.ALL_EXPERTS_FUNCTIONS["batched_mm"] = mine
        assert "was requested" in experts.why_not_kind(module)
        assert (module(*routed(module, 2)) == 7).all() and not launched
    finally:
        del hf_experts.ALL_EXPERTS_FUNCTIONS["batched_mm"]
    assert experts.why_not_kind(module) is None


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gemma4_text"])
def test_experts_of_models_equal_their_own(name, dtype, launched):
    module = own_experts(name).to(dtype)
    x, chosen, scores = routed(module, 5)
    stock, right = module(x, chosen, scores), copy.deepcopy(module).double()(x.double(), chosen, scores.double())
    assert experts.use([module]) == "eager" and not launched
    got = module(x, chosen, scores)
    assert launched == [True] and got.dtype == dtype
    unit = 4 * torch.finfo(dtype).eps * right.abs().max()
    assert (got.double() - right).abs().max() <= 2 * (stock.double() - right).abs().max() + unit


WHY = ["65 tokens", "autocast", "hooked", "trained", "keywords", "a weight computed at each call", "another limit"]


@runs_kernels
@pytest.mark.parametrize("why", WHY)
def test_otherwise_the_models_own_runs(why, launched):
    module = own_experts("gpt_oss" if why == "another limit" else "mixtral")
    arguments, keywords = routed(module, 65 if why == "65 tokens" else 3), {}
    if why == "hooked":
        module.act_fn.register_forward_hook(lambda module, args, out: out * 2)
    elif why == "keywords":
        arguments, keywords = (), dict(zip(("hidden_states", "top_k_index", "top_k_weights"), arguments, strict=True))
    elif why == "a weight computed at each call":
        torch.nn.utils.parametrize.register_parametrization(module, "down_proj", Doubled())
    module.requires_grad_(why == "trained")
    with torch.autocast(DEVICE, torch.bfloat16, enabled=why == "autocast"):
        want = module(*arguments, **keywords)
        experts.use([module])
        if why == "another limit":
            module.alpha = -1.0
            want = hf.stock_experts(module, "eager")(module, *arguments)
        got = module(*arguments, **keywords)
    assert not any(launched) and torch.equal(got, want) and got.requires_grad == (why == "trained")


@pytest.mark.parametrize("stock", ["batched_mm", "grouped_mm"])
def test_torch_compile_traces_the_models_own(stock):
    module = own_experts("mixtral")
    module.config._experts_implementation = stock
    arguments = routed(module, 5)
    want = module(*arguments)
    experts.use([module])
    got = torch.compile(module, fullgraph=True, backend="eager")(*arguments)
    torch.testing.assert_close(got, want)


@runs_kernels
def test_in_a_graph_more_tokens_run_in_parts(launched):
    module = own_experts("mixtral")
    arguments = routed(module, 70)
    want = module(*arguments)
    experts.use([module])
    with captured():
        got = module(*arguments)
    assert launched == [True, True]
    torch.testing.assert_close(got, want)


@runs_kernels
def test_padding_of_a_graph_has_no_expert(launched):
    module = own_experts("mixtral")
    x, chosen, scores = routed(module, 70)  # two rows
    real = torch.arange(70, device=DEVICE) % 35 < 3
    chosen = torch.where(real[:, None], chosen % 2, 3)
    want = torch.where(real[:, None], module(x, chosen, scores), 0.0)
    module.gate_up_proj.data[3] = float("nan")
    experts.use([module])
    with captured(35, rows=2, real_tokens=torch.tensor([3], device=DEVICE)):
        got = module(x, chosen, scores)
    assert launched == [True, True]
    torch.testing.assert_close(got, want)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("stock", hf.STOCK_EXPERTS)
def test_in_a_graph_the_fallback_is_batched_mm(stock, monkeypatch):
    """The loop over experts reads on the host which are chosen; generate() replaces grouped_mm in decode steps as well."""
    module = own_experts("mixtral")
    module.config._experts_implementation = stock
    arguments, asked = routed(module, 70), []
    experts.use([module])
    monkeypatch.setattr(hf, "stock_experts", lambda module, name: lambda *_: asked.append(name))
    monkeypatch.setattr(subclass, "has_kernels", lambda tensor: False)
    module(*arguments)
    with captured():
        module(*arguments)
    assert asked == [stock, "batched_mm"]


# ---- patch() ----
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4}
DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS = {
    "gpt_oss": {"head_dim": 16},
    "mixtral": {},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **DEEPSEEK},
}


def moe(name: str, **own):
    model = tiny(name, device=DEVICE, **{**MOE, **MODELS[name], **own})
    model.set_experts_implementation("eager")
    return model


@runs_kernels
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_tokens_are_those_of_eager(name, launched):
    model = moe(name)
    ids = torch.tensor([[5, 9, 70, 8, 33], [7, 7, 90, 2, 64]], device=DEVICE)
    options = {"max_new_tokens": 2, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, **options)
    experts.use(layers := experts.find(model))
    assert torch.equal(model.generate(ids, **options), want)
    assert launched == [True] * 2 * len(layers)


@runs_kernels
def test_patched_model_runs_them(launched, monkeypatch):
    fake_graph.only_steps(monkeypatch)  # captures after the reply depend on its time
    model = moe("gpt_oss", num_hidden_layers=1)
    ids = torch.tensor([[5, 9, 70, 8, 33]], device=DEVICE)
    new = 4 if DEVICE == "cuda" else 2
    want = model.generate(ids, max_new_tokens=new, do_sample=False)
    with hf_fastattn.patch(model, graph=DEVICE == "cuda") as patch:
        assert "experts, up to 64 tokens: eager -> one read of each chosen expert (1)" in str(patch)
        assert torch.equal(model.generate(ids, max_new_tokens=new, do_sample=False), want)
    assert launched == [True] * (3 if DEVICE == "cuda" else 2)  # of three steps in a graph one is a replay


@runs_kernels
def test_undone_with_the_patch_unless_set_since_and_a_requested_kernel_of_others_is_kept(monkeypatch):
    model, other = moe("mixtral"), None
    names = lambda: {module.config._experts_implementation for module in model.modules() if hf.asks_for_experts(module)}  # noqa: E731
    with hf_fastattn.patch(model, graph=False):
        assert names() == {"hf_fastattn:eager"}
        other = copy.deepcopy(model)
    assert names() == {"eager"} == {model.config._experts_implementation}
    hf_fastattn.unpatch(other)
    assert other.config._experts_implementation == "eager"
    with hf_fastattn.patch(model, graph=False):
        model.set_experts_implementation("batched_mm")
    assert names() == {"batched_mm"}
    with hf_fastattn.patch(model, graph=False, fuse=False):
        assert names() == {"batched_mm"}
    model = moe("mixtral")
    monkeypatch.setitem(hf.experts.ALL_EXPERTS_FUNCTIONS._global_mapping, "theirs", lambda *_: None)
    model.set_experts_implementation("theirs")
    with hf_fastattn.patch(model, graph=False) as patch:
        assert model.config._experts_implementation == "theirs"
        assert "experts, up to" not in str(patch).replace("choice of experts", "")


@pytest.mark.skipif(DEVICE == "cuda", reason="the substitute for a graph records no launches of kernels")
@pytest.mark.parametrize("stock", ["eager", "grouped_mm"])
def test_steps_are_captured_where_the_kernel_cannot_run(stock, monkeypatch):
    fake_graph.use(monkeypatch)
    if not HAS_TRITON:
        pytest.skip("without Triton nothing is replaced")
    model = moe("mixtral")
    ids = torch.tensor([[5, 9, 70, 8, 33]], device=DEVICE)
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.set_experts_implementation(stock)
    monkeypatch.setattr(subclass, "runs_kernels", lambda device: True)
    with hf_fastattn.patch(model) as patch:
        got = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, want) and patch.captures == 1 and not patch.uncaptured


# ---- explain() ----
def test_explain_says_what_runs_experts():
    def found(name, what, device="cuda", rows="runs", **own):
        small = {"num_hidden_layers": 2, "num_experts": 4, "num_local_experts": 4, "hidden_size": 64}
        said = hf_fastattn.explain(hf.make_config(name, **small, **own), device=device)
        return [row for row in getattr(said, rows) if row["what"] == what]

    (row,) = found("qwen3_moe", "experts")
    assert row["how"] == "one read of each chosen expert" and "at most 64 tokens; grouped_mm runs more" in row["why"]
    (row,) = found("qwen3_moe", "experts in one read", "cpu", "refused")
    assert row["why"] == "The model is on cpu, and the kernel is for CUDA devices."
    (row,) = found("qwen3_moe", "experts in one read", rows="refused", hidden_act="relu")
    assert row["why"] == "Qwen3MoeExperts has the activation ReLU."
    (row,) = found("qwen3_moe", "choice of experts")
    assert (row["how"], row["why"]) == ("one launch each", "with patch(): Qwen3MoeTopKRouter")
    assert not [row for row in hf_fastattn.explain(hf.make_config("qwen3", num_hidden_layers=2)).runs if row["what"] == "experts"]
