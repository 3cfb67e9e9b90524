"""Residual additions merged with the norms around them: the same results as without, for any order of operations."""

import copy
import functools
import random
import types
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from calls import captured
from small_layers import Launches, small_model
from test_fuse import DEVICE, DTYPES, runs_kernels
from test_small_layers import ROTATIONS, norm_of_family, rotation_of_family
from tolerance import assert_close, largest
from torch import nn
from transformers.models.llama import modeling_llama

import hf_fastattn
from hf_fastattn import registry
from hf_fastattn.hf.rotations import reached
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.host import launch
from hf_fastattn.kernels.spec import KV
from hf_fastattn.patches.fused import delayed as merged
from hf_fastattn.patches.fused import linears, subclass
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.graphs import graphs as graph

pytestmark = [runs_kernels, pytest.mark.usefixtures("seeded_without_gradients")]
SIZE = 96


@pytest.fixture(autouse=True)
def code_of_tests_is_known(monkeypatch):
    monkeypatch.setattr(subclass, "_CODE", (*subclass._CODE, __name__))


def same(a, b):
    """Whether two results are equal. On a GPU kernels of a norm may sum in other orders, which moves few roundings."""
    if DEVICE == "cpu":
        return torch.equal(a, b)
    return a.shape == b.shape and (a != b).float().mean() < 0.01 and torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.eps = 1e-5

    def forward(self, x):
        x32 = x.float()
        return (self.weight.float() * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


RMSNorm.__module__ = "transformers.models.test"


def fused_norms(dtype):
    """Two norms and two linear layers."""
    norms, layers = [RMSNorm(), nn.LayerNorm(SIZE)], [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)]
    model = nn.ModuleList([*norms, *layers]).to(DEVICE, dtype)
    fuse.fuse(fuse.Fusible(norms, [], [], layers))
    return model


OPERATIONS = {  # of the last result, another one of its shape, a number below 1, and a model of two norms and two linear layers
    "add": lambda one, other, b, model: one + other if b < 0.5 else other + one,
    "norm": lambda one, other, b, model: model[int(b * 2)](one),
    "linear": lambda one, other, b, model: model[2 + int(b * 2)](one),
    "relu": lambda one, other, b, model: torch.relu(one),
    "mul": lambda one, other, b, model: one * 0.3,
    "view": lambda one, other, b, model: one.reshape(-1, SIZE) if one.dim() == 3 else one.view(2, -1, SIZE),
    "add a slice": lambda one, other, b, model: one + other[..., :1],
    "mean": lambda one, other, b, model: one - other.mean(-1, keepdim=True),
    "add one": lambda one, other, b, model: one + 1,
}
IN_PLACE = {"in place": lambda out: out[0].add_(1), "relu in place": lambda out: out[-1].relu_()}
NAMES = [*OPERATIONS, *IN_PLACE, "add", "add", "norm", *["linear, relu"] * 2]


def program(generator, length=12):
    """A random order of operations on the results so far: (operation, which results)."""
    return [(generator.choice(NAMES), generator.random(), generator.random()) for _ in range(length)]


def execute(steps, model, x):
    """All results of a program. Most steps take the last result, as in a model."""
    out = [x.clone()]
    for names, a, b in steps:
        one, other = out[-1] if a < 0.7 else out[int(a * 7) % len(out)], out[int(b * len(out))]
        if names in IN_PLACE:
            IN_PLACE[names](out)
            continue
        for name in names.split(", "):
            one = OPERATIONS[name](one, other.reshape(one.shape), b, model)
            out.append(one)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_order_of_operations_has_the_same_results(dtype):
    generator = random.Random(0)
    model, merges, saved = fused_norms(dtype), 0, Counter()
    for _ in range(20):  # every new chain is a compilation on a GPU
        steps, x = program(generator), torch.randn(2, 2, SIZE, device=DEVICE).to(dtype)
        with captured():
            with Launches() as separate:
                alone = execute(steps, model, x)
            with Launches() as launches, merged.merged(model):
                together = execute(steps, model, x)
            with merged.merged(model):  # alone, it does not see all operations (`launch.unseen`)
                assert launch.thread.watched
                unseen = execute(steps, model, x)
        merges += launches.count["residual_kernel"]
        saved += separate.count - launches.count
        for a, b, c in zip(together, alone, unseen, strict=True):
            assert a.shape == b.shape == c.shape and same(a, b) and same(c, b), steps
    assert merges > 12
    assert (saved["relu"] > 3) == (dtype != torch.float32)  # our linear layers are of 16 bits


def test_a_chain_is_one_launch_and_all_its_results_are_stored():
    model = fused_norms(torch.float16)
    x, a, b = (torch.randn(1, 3, SIZE, device=DEVICE).half() for _ in range(3))
    before = model[0](x)
    scaled = before * 0.5
    first = a + scaled
    second = first + b
    with Launches() as launches, merged.merged(model):
        ours = [model[0](x)]
        ours.append(ours[-1] * 0.5)
        ours.append(a + ours[-1])
        ours.append(ours[-1] + b)
        ours.append(model[1](ours[-1]))
    assert launches.count == {"residual_kernel": 1}
    assert all(map(same, ours, [before, scaled, first, second, model[1](second)]))


def test_what_operations_that_are_not_seen_read_is_computed_before_them():
    model, x = fused_norms(torch.float16), torch.randn(1, 3, SIZE, device=DEVICE).half()
    expected = model[0](x) + 1
    with merged.merged(model):
        out = model[0](x)
        assert launch.thread.watched
        with launch.unseen(out):
            ours = out + 1
        with merged.apart():
            assert not launch.thread.watched
    assert same(ours, expected) and not launch.thread.watched
    with Launches(), merged.merged(model):
        assert not launch.thread.watched  # another mode sees all operations


class Doubled(torch.Tensor):
    """A tensor whose operations see twice what it stores, as those of a quantised one see other values."""

    @staticmethod
    def __new__(cls, stored):
        made = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=stored.device)
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(2 * x.stored if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def test_a_kernel_of_another_package_computes_with_subclasses_of_tensors():
    model, half = fused_norms(torch.float16), Doubled(torch.full((1,), 0.5, device=DEVICE).half())
    q, k, v = (torch.randn(1, 2, 3, 16, device=DEVICE).half() for _ in range(3))
    backend = replace(registry.get("reference"), prefill=lambda q, kv, spec, spans, **_: q * half)
    with merged.merged(model):
        ours = backend.attend(q, KV(k, v))
    assert same(ours, q)


# Launches that a step of two layers saves: one for each addition behind or ahead of a norm, and for each product with a number.
SAVED = {"cohere2": 4, "gemma2": 8, "glm4": 8, "gpt_neox": 4, "granite": 8, "olmo2": 4, "opt": 5}


@pytest.mark.parametrize("family", ["llama", *SAVED])
def test_a_family_computes_the_same_bits(family):
    model, ids = small_model(family, DEVICE).half(), torch.arange(3, 9, device=DEVICE)[None]
    fuse.fuse(fuse.find(model)._replace(mlps=[], linears=[]))
    past = model(ids, use_cache=True).past_key_values
    with Launches() as alone:
        expected = model(ids[:, :1], past_key_values=copy.deepcopy(past)).logits
    past = copy.deepcopy(past)
    with Launches() as together, merged.merged(model):
        logits = model(ids[:, :1], past_key_values=past).logits
    torch.testing.assert_close(logits, expected, atol=0 if DEVICE == "cpu" else 2e-2, rtol=0)
    saved = sum(alone.count[name] - together.count[name] for name in ("add", "mul", "rms_norm_kernel", "residual_kernel"))
    assert saved >= SAVED.get(family, 4)


def norms_and_rotation(norm, family, count=2):
    """Fused norms of heads, of which a third one has another epsilon, and the fused rotation of a family."""
    norms = nn.ModuleList([norm_of_family(norm, 64) for _ in range(count)]).to(DEVICE, torch.float16)
    for other in norms[2:]:
        other.variance_epsilon = 0.5
    fuse.fuse(fuse.Fusible(list(norms), [], [], []))
    return norms, fuse._fused_rotation(reached(rotation_of_family(family)))


@pytest.mark.parametrize("family", ROTATIONS)
@pytest.mark.parametrize("norm", ["gemma3", "cohere2"])
def test_norms_of_heads_are_one_launch_with_the_rotation(family, norm):
    (width, formula), (norms, rotate) = ROTATIONS[family], norms_and_rotation(norm, family)
    q, k = torch.randn(2, 3, 9, 100, device=DEVICE).half()[..., 36:], torch.randn(2, 3, 2, 64, device=DEVICE).half()
    cos, sin = (torch.randn(2, 3, width, device=DEVICE, dtype=torch.float16) for _ in range(2))
    heads = lambda x: x.transpose(1, 2)  # noqa: E731
    normed = [norms[0](q), norms[1](k)]
    expected = rotate(*map(heads, normed), cos, sin)
    with Launches() as launches, merged.merged(norms):
        ours = [norms[0](q), norms[1](k)]
        turned = rotate(*map(heads, ours), cos, sin)
    assert launches.count == ({"rope_kernel": 1, "residual_kernel": 2, "clone": 1} if formula[1] else {"rope_kernel": 1})
    assert all(map(same, [*ours, *turned], [*normed, *expected]))


@pytest.mark.parametrize(("family", "normed"), [("llama", True), ("glm4", True), ("deepseek_v3", False)])
def test_keys_and_values_are_appended_in_the_launch_of_the_rotation(family, normed):
    (width, _), (norms, rotate) = ROTATIONS[family], norms_and_rotation("llama", family)
    q, k, v, long_v = (
        torch.randn(2, 2, heads, size, device=DEVICE).half().transpose(1, 2)
        for heads, size in ((7, 64), (2, 64), (2, 32), (2, 128))
    )
    cos, sin = (torch.randn(2, 2, width, device=DEVICE, dtype=torch.float16) for _ in range(2))
    one, each = torch.tensor([4], device=DEVICE), torch.tensor([6, -1], device=DEVICE)  # tokens past the end and before slot 0

    def step(v, slot, read=lambda k: k, live=None):
        keys, values = (torch.zeros(2, 2, 7, x.shape[-1], dtype=x.dtype, device=DEVICE) for x in (k, v))
        turned = rotate(*([norms[0](q), norms[1](k)] if normed else [q, k]), cos, sin)
        append(KV(keys, values), read(turned[1]), turned[1] if v is k else v, slot, live)
        return [*turned, keys, values]

    cases = {
        "one slot": (1, lambda: step(v, one)),
        "a slot for each row": (1, lambda: step(v, each)),
        "padding": (1, lambda: step(v, one, live=torch.tensor([1], device=DEVICE))),
        "a view": (1, lambda: step(v, one, lambda k: k.transpose(1, 2).transpose(1, 2))),
        "longer values": (2, lambda: step(long_v, one)),
        "values are the rotated keys": (2, lambda: step(k, one)),
        "read before": (2, lambda: step(v, one, lambda k: (k + 1, k)[1])),
        "other keys": (2, lambda: step(v, one, lambda k: k * 2)),
        "a part": (2, lambda: step(v, one, lambda k: k.flip(2))),
    }
    for name, (number, case) in cases.items() if family == "llama" else list(cases.items())[:2]:
        expected = case()
        with Launches() as launches, merged.merged(norms):
            got = case()
        assert launches.count["rope_kernel"] + launches.count["append_kernel"] == number, name
        assert all(map(same, got, expected)), name
    assert expected[2].abs().sum() > 0


def test_norms_that_the_rotation_cannot_take_run_before_it():
    norms, rotate = norms_and_rotation("llama", "llama", 3)
    q, k = (torch.randn(1, heads, 1, 64, device=DEVICE).half() for heads in (4, 2))
    wide = torch.randn(1, 3, 4, 128, device=DEVICE).half()[..., :64]
    cos = torch.randn(1, 1, 64, device=DEVICE, dtype=torch.float16)
    cases = {
        "other eps": lambda: rotate(norms[0](q), norms[2](k), cos, cos),
        "keys first": lambda: rotate(*reversed((norms[1](k), norms[0](q))), cos, cos),
        "only queries": lambda: rotate(norms[0](q), k, cos, cos),
        "a part": lambda: rotate(norms[0](q)[:, :2], norms[1](k), cos, cos),
        "keys of queries": lambda: (a := norms[0](q), *rotate(a, norms[1](a), cos, cos)),
        "read before": lambda: (a := norms[0](q), b := norms[1](k), a + 1, *rotate(a, b, cos, cos)),
        "a part of wider heads, not transposed": lambda: rotate(
            norms[0](wide), norms[1](k.repeat(1, 1, 4, 1)), *[cos.repeat(1, 4, 1)] * 2
        ),
        "added": lambda: norms[0](wide) + q.view(1, 1, 4, 64).expand(1, 3, 4, 64).contiguous(),
        "alone": lambda: norms[0](wide),
        "of a transposed sum": lambda: norms[0]((wide.contiguous() + 1.5 * wide.contiguous()).transpose(1, 2)),
    }
    for name, case in cases.items():
        expected = case()
        with merged.merged(norms):
            got = case()
        assert all(map(same, got, expected)), name


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_in_a_decode_graph_a_layer_has_one_launch_for_norms_and_rotation(family):
    model, ids = small_model(family, DEVICE).half(), torch.arange(3, 9, device=DEVICE)[None]
    past = model(ids, use_cache=True).past_key_values
    fuse.fuse(fuse.find(model))
    linears.join(model)
    with captured():
        expected = model(ids[:, :1], past_key_values=copy.deepcopy(past)).logits
        with Launches() as launches, merged.merged(model):
            logits = model(ids[:, :1], past_key_values=past).logits
    torch.testing.assert_close(logits, expected, atol=0 if DEVICE == "cpu" else 2e-2, rtol=0)
    layers = model.config.num_hidden_layers
    assert (launches.count["rope_kernel"], launches.count["residual_kernel"]) == (layers, 2 * layers + 1)


@pytest.fixture
def steps_run(monkeypatch):
    """Captures run the step. Yields the launches of each captured step."""
    steps = []

    class Graph:
        def __init__(self, *args):
            self.rehearse, self.replay = lambda body: body(), lambda: None

        def capture(self, body):
            with Launches() as launches:
                out = body()
            steps.append(launches.count)
            return out

    monkeypatch.setattr(graph, "new_graph", Graph)
    monkeypatch.setattr(graph, "why_no_graph", lambda device: None)
    return steps


@pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of steps that run, and a graph's do not")
def test_a_layer_of_opt_has_nine_launches(steps_run):
    """Two norms with a sum, the projections of q, k and v and the product of q, the append, attention and its merge, three linear
    layers, of which one has the activation."""
    model, ids = small_model("opt", DEVICE).half(), torch.arange(3, 5, device=DEVICE)[None]
    with hf_fastattn.patch(model):
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    (count,), layers = steps_run, model.config.num_hidden_layers
    launches = {"residual_kernel": 2, "linear_kernel": 4, "append_kernel": 1, "lean_kernel": 1, "lean_merge_kernel": 1}
    outside = {"residual_kernel": 1, "linear_kernel": 1}
    ours = {name: number for name, number in count.items() if name.endswith("_kernel")}
    assert ours == {name: layers * number + outside.get(name, 0) for name, number in launches.items()}
    assert not count["relu"] and not count["mul"]


@pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of steps that run, and a graph's do not")
def test_a_step_of_a_patched_model_has_no_launch_that_only_appends(monkeypatch, steps_run):
    names, call = [], launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *t: (names.append(self.kernel.fn.__name__), call(self, *t)))
    model, ids = small_model("llama", DEVICE).half(), torch.arange(3, 5, device=DEVICE)[None]
    with hf_fastattn.patch(model, keep_graphs=True) as patch:  # the launches of this test are its own code
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    layers = model.config.num_hidden_layers
    assert patch.captures == 1 and "append_kernel" not in names
    assert names.count("rope_kernel") == 3 * layers  # of the prompt, of a rehearsal and of a capture


@pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of steps that run, and a graph's do not")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_over_pages_has_no_more_launches_than_over_plain_tensors(family, steps_run, monkeypatch):
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: None)  # they are counted, and none runs
    model, ids = small_model(family, DEVICE).half(), torch.arange(3, 9, device=DEVICE).view(2, 3)
    with hf_fastattn.patch(model, keep_graphs=True):
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        model.generate_batch(ids.tolist(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    plain, paged = steps_run
    kernels = [Counter({name: n for name, n in each.items() if name.endswith("_kernel")}) for each in (paged, plain)]
    assert paged["rope_kernel"] == model.config.num_hidden_layers
    assert kernels[0] <= kernels[1] and paged.total() <= plain.total()


def test_only_modules_of_torch_and_transformers_qualify():
    """A module of another package may launch kernels that the mode does not see."""
    model = small_model("llama")
    assert not merged.qualifies(model)
    fuse.fuse(fuse.find(model, lambda device: True))
    if not any(map(subclass.is_fused, model.modules())):
        pytest.skip("needs Triton")
    assert merged.qualifies(model)
    changes = [
        lambda model, mlp: setattr(mlp, "act_fn", type("Kernel", (nn.Module,), {"__module__": "package"})()),
        lambda model, mlp: setattr(mlp, "forward", lambda x: x),
        lambda model, mlp: setattr(mlp, "extra", nn.Conv1d(2, 2, 1)),
        lambda model, mlp: model.model.layers[1].compile(backend="eager"),
    ]
    for change in changes:
        changed = copy.deepcopy(model)
        change(changed, changed.model.layers[0].mlp)
        assert not merged.qualifies(changed)


@pytest.mark.skipif(DEVICE == "cuda", reason="reads memory without an operation of torch")
def test_what_is_delayed_runs_before_a_launch_of_this_package():
    class Kernel:
        arg_names = ("X",)

        def __getitem__(self, grid):
            return lambda x, **options: read.append(x.numpy().copy())

    read = []
    a, b = torch.randn(2, SIZE), torch.randn(2, SIZE)
    with merged.merged(fused_norms(torch.float32)):
        total = a + b
        launch.Launch(Kernel(), (1,))(total)
    assert (read[0] == (a + b).numpy()).all()


def test_what_is_delayed_runs_before_queries_are_rotated_for_sinks():
    from hf_fastattn.kernels.decode.rotate import rotate

    model, x = fused_norms(torch.float16), torch.randn(1, 2, 3, SIZE, device=DEVICE).half()
    rotated = partial(rotate, kv_len=9, spans=None, inv_freq=torch.ones(4, device=DEVICE), window=4, sinks=2, interleaved=False)
    expected = rotated(model[0](x))
    with merged.merged(model):
        assert torch.equal(rotated(model[0](x)), expected)


sigmoid = torch.sigmoid
GATED = {  # operations on x, y, a gate for each row and one for each element, and the launches that they save
    "of rows": (2, lambda x, y, row, wide: y + sigmoid(row) * x),
    "of elements": (2, lambda x, y, row, wide: x * sigmoid(wide) + y),
    "without a sum": (1, lambda x, y, row, wide: (x * sigmoid(row)).sum(-1)),
    "used again": (1, lambda x, y, row, wide: (gate := sigmoid(wide), x * gate + gate)[1]),
    "read before": (0, lambda x, y, row, wide: (gate := sigmoid(row), gate.abs(), y + gate * x)[2]),
    "gate changed before": (0, lambda x, y, row, wide: (gate := sigmoid(row), row.add_(1), y + gate * x)[2]),
    "twice": (2, lambda x, y, row, wide: y + sigmoid(sigmoid(row)) * x),
    "its square": (0, lambda x, y, row, wide: (gate := sigmoid(wide), gate * gate + y)[1]),
    "of one token for all": (0, lambda x, y, row, wide: y + sigmoid(row[:1].contiguous()) * x),
    "of another tensor": (0, lambda x, y, row, wide: (gate := sigmoid(row), x * y.mean(-1, keepdim=True) + gate)[1]),
    "a part": (0, lambda x, y, row, wide: y + sigmoid(wide)[..., :1] * x),
    "with a number": (0, lambda x, y, row, wide: sigmoid(wide) * 0.5 + y.abs()),
    "added": (0, lambda x, y, row, wide: sigmoid(wide) + x),
    "not used": (0, lambda x, y, row, wide: (sigmoid(wide), x + y)[1]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATED)
def test_a_sigmoid_and_the_product_with_it_begin_a_chain(name, dtype):
    (saved, function), model = GATED[name], fused_norms(dtype)
    given = [torch.randn(2, 3, size, device=DEVICE).to(dtype) for size in (SIZE, SIZE, 1, SIZE)]
    right, (stock, got) = function(*(x.double() for x in given)), ([x.clone() for x in given] for _ in range(2))
    with Launches() as separate:
        stock = function(*stock)
    with Launches() as launches, merged.merged(model):
        got = function(*got)
    assert separate.count.total() - launches.count.total() == saved
    assert_close(got, right, stock, torch.finfo(dtype).eps, largest(right), name)


def test_a_gated_product_is_one_launch_with_sums_and_a_norm_and_all_its_results_are_stored():
    model, (x, a, b) = fused_norms(torch.float16), (torch.randn(1, 3, SIZE, device=DEVICE).half() for _ in range(3))
    gate = torch.randn(1, 3, 1, device=DEVICE).half()
    with Launches() as launches, merged.merged(model):
        ours = [sigmoid(gate)]
        ours.append(ours[0] * x)
        ours.append(a + ours[1])
        ours.append(b + ours[2])
        ours.append(model[0](ours[3]))
    assert launches.count == {"residual_kernel": 1}
    assert_close(ours[0], gate.double().sigmoid(), sigmoid(gate), torch.finfo(gate.dtype).eps, 1.0, "sigmoid")
    assert all(map(same, ours[1:], [ours[0] * x, a + ours[1], b + ours[2], model[0](ours[3])]))


LINEAR = {  # operations after a linear layer, and whether its launch computes one of them
    "relu": (True, lambda y: torch.relu(y)),
    "a product": (True, lambda y: y * 0.3),
    "a product from the left": (True, lambda y: 3 * y),
    "a view": (True, lambda y: torch.relu(y.view(-1, SIZE)).view(2, 2, SIZE)),
    "read before": (False, lambda y: (y.abs(), torch.relu(y))[1]),
    "read after": (True, lambda y: (torch.relu(y) + 1, y.sum())),
    "twice": (True, lambda y: (y * 0.3, torch.relu(y), y)),
    "activation in place": (False, lambda y: (nn.functional.relu(y, inplace=True), y)),
    "then in place": (True, lambda y: (torch.relu(y).add_(1), y)),
    "a part": (False, lambda y: torch.relu(y[:1])),
    "transposed": (False, lambda y: torch.relu(y.transpose(0, 1))),
    "a tensor": (False, lambda y: y * y),
    "a tensor without dimensions": (False, lambda y: y * torch.ones((), device=y.device, dtype=y.dtype)),
    "of another tensor": (False, lambda y: (torch.relu(torch.ones(2, 2, SIZE, device=DEVICE)), y)),
    "not used": (False, lambda y: torch.ones(3, device=DEVICE)),
    "norm": (False, lambda y: nn.functional.layer_norm(y, (SIZE,))),
}


@pytest.mark.parametrize("case", LINEAR)
def test_a_linear_layer_computes_the_operation_that_follows(case):
    together, after = LINEAR[case]
    model, x = fused_norms(torch.float16), torch.randn(2, 2, SIZE, device=DEVICE).half()
    with captured():
        with Launches() as separate:
            expected = after(model[2](x))
        with Launches() as launches, merged.merged(model):
            got = after(model[2](x))
    assert launches.count["linear_rows_kernel"] == separate.count["linear_rows_kernel"] == 1
    assert separate.count.total() - launches.count.total() == together
    assert all(map(torch.equal, *((out if isinstance(out, tuple) else (out,)) for out in (got, expected))))


def test_hooks_between_a_linear_layer_and_its_activation_are_kept():
    x = torch.randn(2, 2, SIZE, device=DEVICE).half()
    for place in ("after the layer", "before the activation"):
        layer = nn.Linear(SIZE, SIZE, device=DEVICE, dtype=torch.float16)
        model = nn.Sequential(layer, nn.ReLU())
        fuse.fuse(fuse.Fusible([], [], [], [layer]))
        if place == "after the layer":
            layer.register_forward_hook(lambda module, args, out: out - 1)
        else:
            model[1].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
        with captured():
            expected = model(x)
            with Launches() as launches, merged.merged(model):
                got = model(x)
        assert torch.equal(got, expected) and launches.count["relu"] == 1


def test_an_error_ends_the_mode():
    model = fused_norms(torch.float32)
    x = torch.randn(2, SIZE, device=DEVICE)
    with pytest.raises(ZeroDivisionError), merged.merged(model):
        total = x + x
        _ = 1 / 0
    assert merged.current() is None
    assert torch.equal(total, 2 * x) and torch.equal(model[0](x), model[0](x.clone()))


def other(function):
    """A function of another package that does the same."""
    run = lambda *args, **options: function(*args, **options)  # noqa: E731
    return types.FunctionType(run.__code__, {"__name__": "package.ops"}, closure=run.__closure__)


@pytest.mark.parametrize("what", ["a function", "a function of a function", "forward of a class", "its wrapper"])
def test_a_model_that_calls_functions_of_other_packages_is_not_merged(what, monkeypatch):
    """They may launch kernels, which are not seen: a delayed launch would come after them."""
    model = small_model("llama", DEVICE)
    fuse.fuse(fuse.find(model, lambda device: True))
    assert merged.qualifies(model)
    if what.startswith("a function"):
        name = "apply_rotary_pos_emb" if what == "a function" else "rotate_half"
        monkeypatch.setattr(modeling_llama, name, other(getattr(modeling_llama, name)))
    else:
        own = modeling_llama.LlamaMLP.forward
        theirs = functools.wraps(own)(other(own)) if what == "its wrapper" else other(own)
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", theirs)
    assert not merged.qualifies(model)
