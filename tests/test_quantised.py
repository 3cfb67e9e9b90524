"""Models with quantised weights under patch(): their own kernels run, captured, with the same tokens; explain() says so.

bitsandbytes and torchao run where they are installed. GPTQ, AWQ and MXFP4 have substitutes here: layers that look like theirs.
"""

import importlib.util
import logging
import warnings

import fake_graph
import pytest
import torch
from models import prompts, sizes, tiny

import hf_fastattn
from benchmarks import quantised
from hf_fastattn import hf
from hf_fastattn.explanation import costs, explain
from hf_fastattn.hf.quantised import _tensors
from hf_fastattn.patches.fused import delayed as merged
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.fused import subclass
from hf_fastattn.patches.graphs import state, verify

ON_THE_CPU = ("bnb-nf4", "bnb-nf4-double", "bnb-int8", "ao-int8", "ao-fp8", "ao-int8-dynamic")  # which need no GPU
ROUNDED = ("bnb-int8", "ao-int8-dynamic")  # whose activations are rounded to 8 bits: another order of sums may change a token
BYTES = {"bnb-nf4": 0.5 + 4 / 64, "bnb-nf4-double": 0.5 + 1 / 64}  # for each weight; the others: 1, and a scale for each row


def small(**own):
    return tiny("llama", **{"intermediate_size": 128, **own})


def load(scheme: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **own):
    if not importlib.util.find_spec(quantised.SCHEMES[scheme][0]):
        pytest.skip(f"{quantised.SCHEMES[scheme][0]} is not installed")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return quantised.quantised(small(**own).to(device, dtype), scheme, torch.device(device))


def generate(model, inputs, new: int = 12, **options):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)


def projections(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("_proj")]


def check_tokens(model, inputs, expected, scheme: str) -> None:
    """That the tokens are the expected ones, with the same logits up to rounding, if that may change a token, up to there."""
    found = generate(model, inputs, output_logits=True, return_dict_in_generate=True)
    same = (found.sequences == expected.sequences)[:, inputs["input_ids"].shape[1] :]
    assert scheme in ROUNDED or same.all()
    for row, equal in enumerate(same):
        for step in range(min(len(equal), int(equal.long().cumprod(0).sum()) + 1)):
            given, wanted = found.logits[step][row], expected.logits[step][row]
            torch.testing.assert_close(given, wanted, atol=0.1 * wanted.abs().max().item(), rtol=0.0)


@pytest.mark.parametrize("scheme", ON_THE_CPU)
def test_steps_are_captured_and_tokens_are_those_of_the_unpatched_model(captured, scheme):
    model, inputs = load(scheme), prompts("left_padding", "cpu")
    classes = [type(module) for module in projections(model)]
    expected = generate(model, inputs, output_logits=True, return_dict_in_generate=True)
    with hf_fastattn.patch(model, graph=False):
        check_tokens(model, inputs, expected, scheme)
    with warnings.catch_warnings(action="error"), hf_fastattn.patch(model) as patch:
        for _ in range(3):
            check_tokens(model, inputs, expected, scheme)
        assert patch.captures == 2 and patch.replays == 33 and not patch.uncaptured  # of steps, and of the third prompt
        assert [type(module) for module in projections(model)] == classes


@pytest.mark.parametrize("kind", ["PerTensor", "PerRow"])
def test_tokens_with_one_scale_are_not_padded(captured, kind):
    """A graph of several tokens has padding, which would change the scale of the others."""
    pytest.importorskip("torchao", minversion="0.18")
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, granularity
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    each, model, inputs = getattr(granularity, kind)(), small().bfloat16(), prompts("no_padding", "cpu", rows=1)
    options = {"act_quant_kwargs": QuantizeTensorToFloat8Kwargs(granularity=each), "mm_config": Float8MMConfig()}
    for layer in projections(model):
        layer.weight = torch.nn.Parameter(Float8Tensor.from_hp(layer.weight.detach(), granularity=each, **options), False)

    whole = kind == "PerTensor"
    with hf_fastattn.patch(model) as patch:
        for _ in range(3):
            generate(model, inputs, new=3)
        assert sizes(patch) == ({1} if whole else {1, 128}) and not patch.reasons  # prompts run from Python without a word
        generate(model, inputs | {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})
        assert [reason[:49] for reason in patch.reasons] == ["a layer quantises the inputs of all tokens by one"] * whole
        assert (sizes(patch) == {1}) == whole


@pytest.mark.parametrize("scheme", ON_THE_CPU)
def test_quantised_layers_are_left_alone_and_their_launches_are_seen(monkeypatch, scheme):
    model = load(scheme, torch.float16)
    assert fuse.find(model, lambda device: True).linears == [model.lm_head]
    monkeypatch.setattr(subclass, "INTERPRETED", True)  # as on a GPU
    with hf_fastattn.patch(model):
        assert subclass.is_fused(model.lm_head) and not any(map(subclass.is_fused, projections(model)))
        assert merged.qualifies(model) and not verify.needed(model)


@pytest.mark.parametrize("scheme", ON_THE_CPU)
def test_explain_counts_what_is_stored(scheme):
    model, source = load(scheme), costs.count(small())
    facts = costs.count(model)
    layers = projections(model)
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    rows = sum(layer.out_features for layer in layers)
    saved = source.weight_bytes - facts.weight_bytes
    stored = 4 * weights - saved  # unquantised weights are in fp32
    least, tables = (BYTES[scheme] * weights, 1100) if scheme in BYTES else (weights + 4 * rows, 4 * rows / len(layers))
    assert least <= stored <= least + tables * len(layers)
    assert facts.parameters == source.parameters and facts.flops(9) == source.flops(9)
    ((kind, count),) = facts.quantised
    assert count == len(layers) == 14
    text = str(explain(model, length=16, device="cuda", gpu="h200"))
    assert f"14 layers of {kind}" in text and "their own kernels" in text and "one CUDA graph" in text


@pytest.mark.parametrize("scheme", ON_THE_CPU)
def test_another_address_of_a_quantised_weight_is_noticed(scheme):
    model = load(scheme)
    generate(model, prompts("no_padding", "cpu", rows=1), 2)
    found = state.read(model).state
    assert found.differs(state.read(model).state) is None
    scale = next(t for t in _tensors(vars(projections(model)[3]), 6) if t.dim() and t.is_floating_point())
    scale.data = scale.data.clone()
    assert found.differs(state.read(model).state)  # another address


def test_outliers_of_8_bit_layers_are_looked_for_on_the_host(captured):
    model, inputs = load("bnb-int8-outliers"), prompts("no_padding", "cpu")
    with hf_fastattn.patch(model, graph=False):
        expected = generate(model, inputs)
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="llm_int8_threshold=0.0"):
        assert "decode graph: off, as the 8-bit layers" in str(patch) and "one CUDA graph" not in str(patch)
        assert torch.equal(generate(model, inputs), expected) and patch.captures == 0
    assert "llm_int8_threshold=0.0" in str(explain(model, length=16, device="cuda", gpu="h200"))
    for layer in projections(model):
        layer.state.threshold = 0.0
    with hf_fastattn.patch(model) as patch:
        generate(model, inputs)
        assert patch.captures == 1


# ---- substitutes for other packages ----


class Packed(torch.nn.Module):
    """A linear layer in 8 bits, as integers of 32 bits: four outputs in one."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8).view(torch.int32))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.qweight.view(torch.int8).to(x.dtype) * self.scales)


def packed(module: str, name: str):
    """A model with such layers, whose class seems to be of another package."""
    cls = type(name, (Packed,), {"__module__": module})
    model = small()
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for child, linear in list(parent.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(parent, child, cls(linear))
    return model


OTHERS = [
    ("gptqmodel.nn_modules.qlinear.marlin", "MarlinQuantLinear"),
    ("awq.modules.linear.gemm", "WQLinear_GEMM"),
    ("transformers.integrations.mxfp4", "Mxfp4Linear"),
]


BACKENDS = [(*other, "lean", {}) for other in OTHERS] + [(*OTHERS[0], "streaming", {"window": 32})]


@pytest.mark.parametrize("module, name, backend, options", BACKENDS)
def test_layers_of_other_packages_are_captured_and_verified(captured, monkeypatch, module, name, backend, options):
    compared = []
    differs = verify.differs
    monkeypatch.setattr(verify, "differs", lambda *logits: compared.append(logits) or differs(*logits))
    model, inputs = packed(module, name), prompts("left_padding", "cpu")
    with hf_fastattn.patch(model, backend, graph=False, **options):
        expected = generate(model, inputs)
    with hf_fastattn.patch(model, backend, keep_graphs=True, **options) as patch:  # their code is of this file
        for _ in range(2):
            assert torch.equal(generate(model, inputs), expected)
        assert patch.captures == len(compared) == 1 and not patch.uncaptured
        assert all(type(layer).__name__ == name for layer in projections(model))
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    with hf_fastattn.patch(model):
        assert not merged.qualifies(model)  # its kernels may not be operations of torch
    facts = costs.count(model)
    assert facts.quantised == ((f"{module.partition('.')[0]} {name}", 14),)
    assert facts.parameters == costs.count(small()).parameters


@pytest.mark.parametrize(("backend", "options"), [("lean", {}), ("streaming", {"window": 32})])
def test_a_graph_that_lacks_a_kernel_is_not_used(captured, monkeypatch, backend, options):
    """A kernel on another stream is not in the graph; the logits of a replay are then others."""
    replay = fake_graph.RecordedGraph.replay
    model, inputs = packed(*OTHERS[0]), prompts("no_padding", "cpu")
    with hf_fastattn.patch(model, backend, graph=False, **options):
        expected = generate(model, inputs)

    def wrong(self):
        replay(self)
        for held in graphs.entries.values():
            for entry in held:
                if entry.graph is not None or entry.tokens == 1:  # not that of the prompt, which has only been rehearsed
                    entry.logits.mul_(torch.linspace(0, 2, entry.logits.shape[-1]))

    with hf_fastattn.patch(model, backend, **options) as patch:
        graphs = patch._graphs
        monkeypatch.setattr(fake_graph.RecordedGraph, "replay", wrong)
        with pytest.warns(UserWarning, match="launched on another stream"):
            assert torch.equal(generate(model, inputs), expected)
        assert patch.captures == patch.replays == 0 and patch.uncaptured == 10  # and a rehearsal
        monkeypatch.setattr(verify, "needed", lambda model: False)
        graphs.clear()
        assert not torch.equal(generate(model, inputs), expected)  # what the comparison prevents


def test_a_weight_of_an_unknown_class_is_not_merged(monkeypatch):
    Other = type("Other", (torch.Tensor,), {"__module__": "another_package"})
    model = small()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Other))
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    with hf_fastattn.patch(model):
        assert not merged.qualifies(model) and verify.needed(model)


def test_logits_are_compared_up_to_the_order_of_sums_and_a_configuration_says_what_is_not_counted():
    logits = torch.randn(2, 1, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 3] = float("-inf")
    assert not verify.differs(logits + 0.01 * torch.ones(50), logits)
    assert verify.differs(logits.roll(1, -1), logits) and verify.differs(torch.zeros_like(logits), logits)
    assert verify.differs(logits * float("nan"), logits)
    config = small().config
    config.quantization_config = {"quant_method": "mxfp4"}
    found = explain(config, length=16, device="cuda", gpu="h200")
    assert any("counted here as if they were not" in note for note in found.notes)


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}  # multiples of the tiles of int4


def steps(model, inputs, new: int = 6):
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits).float()


@needs_gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scheme", [name for name in quantised.SCHEMES if name not in ("bnb-int8-outliers", "ao-int8-dynamic")])
def test_captured_logits_are_the_uncaptured_ones(scheme, rows):
    model, inputs = load(scheme, torch.bfloat16, "cuda", **WIDE), prompts("no_padding", "cuda", rows=rows)
    with hf_fastattn.patch(model, graph=False):
        expected = steps(model, inputs)
    with warnings.catch_warnings(action="error"), hf_fastattn.patch(model) as patch:
        for _ in range(2):
            found = steps(model, inputs)
        assert patch.captures and not patch.uncaptured and patch.replays >= 9  # of 10 steps; prompts may be captured too
    assert (found[:3] - expected[:3]).norm() < 0.05 * expected[:3].norm()  # later tokens may differ


@needs_gpu
def test_int8_of_torchao_reads_its_input_on_the_host():
    model, inputs = load("ao-int8-dynamic", torch.bfloat16, "cuda", **WIDE), prompts("no_padding", "cuda")
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="reads a value on the host"):
        steps(model, inputs)
    assert patch.captures == 0


@needs_gpu
def test_the_search_for_outliers_reads_a_value_on_the_host(monkeypatch):
    model, inputs = load("bnb-int8-outliers", torch.bfloat16, "cuda", **WIDE), prompts("no_padding", "cuda")
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="llm_int8_threshold=0.0"):
        steps(model, inputs)
    monkeypatch.setattr(hf, "why_not_captured", lambda model: None)
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="reads a value on the host"):
        steps(model, inputs)
    assert patch.captures == 0


class Elsewhere(torch.nn.Module):
    """A layer whose last kernel is launched on the default stream."""

    def __init__(self, linear: torch.nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        x = self.linear(x)
        with torch.cuda.stream(torch.cuda.default_stream()):
            return 2 * x


@needs_gpu
def test_a_kernel_on_another_stream_is_noticed():
    model, inputs = small().cuda(), prompts("no_padding", "cuda")
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Elsewhere(mlp.down_proj)
    with hf_fastattn.patch(model, graph=False):
        expected = generate(model, inputs)
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="runs uncaptured"):
        assert torch.equal(generate(model, inputs), expected)
    assert patch.captures == 0


def test_weights_that_their_package_unpacks_are_reported():
    """As compressed-tensors marks its layers."""
    model = small()
    before = str(hf_fastattn.explain(model))
    for layer in model.model.layers:
        layer.mlp.up_proj.quantization_scheme = None
    says = f"compressed-tensors unpacks the weights of {len(model.model.layers)} layers to 16 bits at the first forward"
    with pytest.warns(UserWarning, match=f"linear layers of this LlamaForCausalLM are not replaced, as {says}"):
        patch = hf_fastattn.patch(model)
    assert f"linear layers: not replaced, as {says}" in str(patch)
    patch.undo()
    assert says[1:] in str(hf_fastattn.explain(model)) and says[1:] not in before
