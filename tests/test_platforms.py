"""Other machines: without Triton (macOS, Windows), with an old GPU, or with a GPU of AMD, Intel or Apple."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICE
from models import prompts, tiny
from torch._subclasses import FakeTensorMode

import hf_fastattn
import hf_fastattn_cli as cli
from hf_fastattn import kernels
from hf_fastattn.attention import function
from hf_fastattn.explanation import explain
from hf_fastattn.hf import experts as hf_experts
from hf_fastattn.kernels.host import gpu as host_gpu

ROOT = Path(__file__).parent.parent

# Two ways in which `import triton` fails. The last is that of a machine without Triton.
BLOCKS = {
    "a name set to None": "sys.modules['triton'] = None",
    "not installed": """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition('.')[0] == 'triton' else find(name, *rest)
)
""",
}
USE = """
import os, sys, warnings
os.environ['HF_HUB_OFFLINE'] = '1'
{block}
sys.path.insert(0, {tests!r})
import torch
import hf_fastattn
import hf_fastattn_cli as cli
from hf_fastattn import kernels
from models import prompts, tiny

assert not kernels.HAS_TRITON
q = torch.randn(1, 4, 3, 16)
for name in set(hf_fastattn.names()) - {{'streaming', 'linear'}}:
    out = hf_fastattn.get(name)(q, q, q)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
"""
GENERATE = """
model, twin = tiny('llama', 'lean'), tiny('llama', 'eager')
inputs = prompts('left_padding', 'cpu', length=24)
ask = dict(max_new_tokens=6, do_sample=False)
expected = twin.generate(**inputs, **ask)
assert torch.equal(model.generate(**inputs, **ask), expected)
with warnings.catch_warnings(action='ignore'):
    with hf_fastattn.patch(model) as patch:
        assert torch.equal(model.generate(**inputs, **ask), expected)
    with hf_fastattn.patch(model, 'streaming', window=64):
        assert torch.equal(model.generate(**inputs, **ask), expected)
assert cli.main(['backends']) == 0 and cli.main(['explain', '8b', '--gpu', 'h200']) == 0
try:
    kernels.TritonKernel('lean').where('cuda')
except RuntimeError as error:
    print(error)
import benchmarks.generate, benchmarks.stream, benchmarks.report
assert not [name for name, module in sys.modules.items() if name.partition('.')[0] == 'triton' and module is not None]
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_without_triton_the_reference_runs(block):
    use = USE.format(block=BLOCKS[block], tests=str(ROOT / "tests"))
    if block != "not installed":
        run(use)
    else:
        assert "needs Triton, which is not installed" in run(use + GENERATE)


@pytest.fixture
def gpu(monkeypatch):
    """Simulate another GPU; tensors on it have no memory."""
    host_gpu._arch.cache_clear()

    def set_up(capability=(7, 5), hip=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
        monkeypatch.setattr(torch.version, "hip", hip)
        return "cuda"

    yield set_up
    host_gpu._arch.cache_clear()


OLD = r"need a GPU of compute capability 8.0 \(Ampere\) or higher; Tesla T4 has 7.5. Use attn_implementation=\"sdpa\" there"
AMD = r"need an NVIDIA GPU, and cuda.* is an AMD GPU.* Use attn_implementation=\"sdpa\" there"
MACHINES = {"T4": ({}, OLD), "V100": ({"capability": (7, 0)}, "Tesla T4 has 7.0"), "ROCm": ({"hip": "6.3"}, AMD)}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_entry_point_says_which_gpus_it_supports(gpu, monkeypatch, capsys, machine):
    options, says = MACHINES[machine]
    gpu(**options)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
    model = tiny("llama", "sdpa", num_hidden_layers=1)
    with FakeTensorMode():
        # A shape that no other test uses: launches are cached, together with the result of the check.
        q = torch.empty(1, 4, 3, 56, dtype=torch.float16, device="cuda")
        short = torch.empty(1, 4, 1, 56, dtype=torch.float16, device="cuda")
        for name in set(hf_fastattn.names()) - {"reference", "linear"}:
            for queries in (q, short):
                with pytest.raises(RuntimeError, match=says):
                    hf_fastattn.get(name)(queries, q, q)
                if name != "streaming":
                    with pytest.raises(RuntimeError, match=says):  # set_attn_implementation() followed by a forward
                        function.attention_forward(name, model, queries, q, q, None)
            assert re.search(says, hf_fastattn.get(name).why_not(**shape))
        assert hf_fastattn.get("reference").why_not(**shape) is None
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=says):
        hf_fastattn.patch(model)
    assert model.config._attn_implementation == "sdpa"
    assert cli.main(["backends"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("no: These kernels") == len(hf_fastattn.names()) - 2
    found = explain(model, device="cuda", gpu="h200")
    assert not found.runs and re.search(says, str(found))
    assert not host_gpu.on_gpu(torch.device("cuda"))  # functions with a torch version use it: a mask has spans before a refusal
    gpu((8, 0))
    assert host_gpu.on_gpu(torch.device("cuda")) == kernels.HAS_TRITON and host_gpu.arch(torch.device("cuda")) == 80


def test_two_gpus_of_one_machine_may_differ(gpu, monkeypatch):
    """A T4 and an H100: the result of a check on one is not used for the other."""
    gpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (7, 5))
    monkeypatch.setattr(kernels, "HAS_TRITON", True)  # also where it is not installed
    kernel = hf_fastattn.get("lean").prefill
    assert kernel.where("cuda:0") == "the Triton kernel"
    with pytest.raises(RuntimeError, match=r"Tesla T4 has 7\.5"):
        kernel.where("cuda:1")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_are_named(monkeypatch, device):
    says = rf"kernel runs on CUDA devices .* got a tensor on '{device}'. Use attn_implementation=\"sdpa\" there"
    why_not = hf_fastattn.get("lean").why_not
    assert re.search(says, why_not(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=device))
    model = tiny("llama", "sdpa", num_hidden_layers=1)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    with pytest.raises(ValueError, match=says):
        hf_fastattn.patch(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, which then is taken for a T4")
def test_generate_on_an_old_gpu(gpu):
    model = tiny("llama", "lean", device="cuda")
    inputs = prompts("left_padding", "cuda")
    gpu()
    for cache in (None, hf_fastattn.PreallocatedCache(model)):
        with pytest.raises(RuntimeError, match=OLD):
            model.generate(**inputs, max_new_tokens=4, past_key_values=cache)
    with pytest.raises(ValueError, match=OLD):
        hf_fastattn.patch(model)
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    cache = hf_fastattn.PreallocatedCache(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False, past_key_values=cache), expected)
    with hf_fastattn.patch(model, "reference"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)


def test_torchs_default_device_is_not_that_of_the_model(monkeypatch):
    """As after torch.set_default_device("cuda"), here "meta": what the package computes on the CPU, it also creates there."""
    monkeypatch.setattr(hf_experts, "_layouts", {})
    llama, mixture = tiny("llama"), tiny("mixtral", num_local_experts=4)
    inputs = prompts("left_padding", "cpu")
    for model, backend, options in (llama, "streaming", {"window": 40}), (llama, "lean", {}), (mixture, "lean", {}):
        with torch.device("meta"), hf_fastattn.patch(model, backend, **options):
            out = model.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
            out.past_key_values.batch_repeat_interleave(2)
            assert isinstance(out.past_key_values, (hf_fastattn.PreallocatedCache, hf_fastattn.RollingCache))
    assert [layout for layout in hf_experts._layouts.values() if not isinstance(layout, str)]
