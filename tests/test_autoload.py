"""`attn_implementation="lean"` without an import of hf_fastattn, in new processes in which the package is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from importlib.machinery import NamespaceLoader
from importlib.util import spec_from_loader
from pathlib import Path

import pytest

import hf_fastattn
import hf_fastattn_autoload

ROOT = Path(__file__).parent.parent
GROUP = "torch.backends"
USE = """
import torch, transformers
from models import prompts, tiny
inputs = prompts('left_padding', 'cpu', length=24)
def tokens(model):
    return model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
"""

WAITS = """
import sys
def waits():
    found = [finder.awaited for finder in sys.meta_path if type(finder).__module__ == 'hf_fastattn_autoload']
    return [awaited for awaited in found if not awaited.startswith('transformers.models.')]  # files that refuse the names
"""


def run(where: Path, script: str, fails: str | None = None, **environment) -> None:
    """Run a script in a new process in which this package is installed, whatever is installed in this environment."""
    metadata = where / "hf_fastattn-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hf-fastattn\nVersion: 0\n")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entries[GROUP].items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join(map(str, (where, ROOT, ROOT / "tests")))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", script], cwd=where, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (fails is None), done.stderr
    assert fails is None or fails in done.stderr.strip().splitlines()[-1], done.stderr


def test_names_are_those_of_the_exact_backends():
    exact = {name for name in hf_fastattn.names() if hf_fastattn.get(name).exact}
    assert set(hf_fastattn_autoload.NAMES) <= exact and {"lean", "fa2", "split_kv"} <= set(hf_fastattn_autoload.NAMES)
    for name in hf_fastattn_autoload.NAMES:  # the functions have replaced the stubs, if there were any
        assert all(f.func.__module__.startswith("hf_fastattn.") for f in hf_fastattn.hf.registered(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "from transformers import PreTrainedModel",
        "from transformers.modeling_utils import PreTrainedModel",
        "import transformers",
    ],
)
def test_whatever_imports_torch_first(first, tmp_path):
    script = f"""
{first}
from models import tiny
assert tiny('llama', 'lean').config._attn_implementation == 'lean'
"""
    run(tmp_path, script + WAITS + "assert waits() == ['lm_eval.models'], waits()")


@pytest.mark.slow
def test_torch_alone_loads_one_small_module(tmp_path):
    script = """
import torch, sys
loaded = set(sys.modules)
torch._import_device_backends()
new = {name.partition('.')[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)
assert new == {'hf_fastattn_autoload'}, new
assert not {'transformers', 'triton', 'hf_fastattn'} & set(sys.modules)
assert type(sys.meta_path[0]).__module__ == 'hf_fastattn_autoload'
"""
    run(tmp_path, script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.slow
def test_lean_without_an_import(tmp_path):
    script = """
import torch
assert 'transformers.modeling_utils' in waits()
from importlib.util import find_spec
find_spec('transformers.modeling_utils')  # looks, and imports nothing
import transformers.modeling_utils as modeling
import hf_fastattn_autoload
assert waits() == ['lm_eval.models']
assert 'exec_module' not in vars(modeling.__spec__.loader)
names = set(modeling.AttentionInterface._global_mapping)
"""
    use = """
model = tiny('llama', 'lean')
assert 'hf_fastattn' not in sys.modules
assert tokens(model) == tokens(tiny('llama', 'eager'))
import hf_fastattn
assert not {'hf_fastattn.evaluation', 'hf_fastattn.explanation'} & {*sys.modules}
with hf_fastattn.count_calls() as calls:
    tokens(model)
assert calls['lean.decode']
assert set(modeling.AttentionInterface._global_mapping) - names == {'linear', 'streaming'}
from transformers import AttentionInterface, AttentionMaskInterface
for name in hf_fastattn_autoload.NAMES:
    for registry in (AttentionInterface(), AttentionMaskInterface()):
        assert registry[name].func.__module__.startswith('hf_fastattn.')
"""
    run(tmp_path, WAITS + script + USE + use)


@pytest.mark.slow
def test_compiled_in_one_graph(tmp_path):
    script = """
import sys
with torch.no_grad():
    compiled = torch.compile(tiny('llama', 'lean'), fullgraph=True, backend='eager')
    assert 'hf_fastattn' not in sys.modules
    live = inputs['attention_mask'].bool()
    logits, expected = (model(**inputs).logits[live] for model in (compiled, tiny('llama', 'sdpa')))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
"""
    run(tmp_path, USE + script)


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["HF_FASTATTN_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_switched_off(tmp_path, switch):
    run(tmp_path, USE + "tiny('llama', 'lean')", fails='ValueError: Specified `attn_implementation="lean"`', **{switch: "0"})


@pytest.mark.slow
def test_a_broken_package_does_not_break_transformers(tmp_path):
    (tmp_path / "hf_fastattn.py").write_text("raise RuntimeError('broken')")
    run(tmp_path, USE + "tokens(tiny('llama', 'sdpa'))\ntokens(tiny('llama', 'lean'))", fails="RuntimeError: broken")


@pytest.mark.slow
def test_another_transformers_breaks_nothing(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "modeling_utils.py").write_text("import torch\nloaded = True")
    run(tmp_path, "import torch, transformers.modeling_utils as modeling\nassert modeling.loaded")


@pytest.mark.slow
def test_names_of_other_packages_are_kept(tmp_path):
    """Registered before the names are, or after; with a mask function, or without."""
    script = """
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
masks = []
def attention(module, q, k, v, mask, **options):
    masks.append(mask)
    return sdpa_attention_forward(module, q, k, v, mask, **options)
AttentionInterface.register('fa2', attention)
AttentionMaskInterface.register('split_kv', transformers.masking_utils.sdpa_mask)
del os.environ['HF_FASTATTN_AUTOLOAD']
import hf_fastattn_autoload
hf_fastattn_autoload.autoload()
assert AttentionInterface()['fa2'] is attention and 'fa2' not in AttentionMaskInterface()
assert 'split_kv' not in AttentionInterface()
AttentionInterface.register('reference', attention)

for name in ('fa2', 'reference'):  # no mask function: Transformers makes no mask
    tokens(tiny('llama', name))
assert masks and all(mask is None for mask in masks)
assert 'hf_fastattn' not in sys.modules
ids, own = inputs['input_ids'], torch.ones(1, 1, 24, 24).bool().tril()  # with the caller's own mask, attention is asked first
logits, expected = (tiny('llama', name)(ids, attention_mask=own).logits for name in ('lean', 'sdpa'))
torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
import hf_fastattn
assert AttentionInterface()['fa2'] is AttentionInterface()['reference'] is attention
assert AttentionMaskInterface()['split_kv'] is transformers.masking_utils.sdpa_mask
"""
    run(tmp_path, "import os, sys\nos.environ['HF_FASTATTN_AUTOLOAD'] = '0'\n" + USE + script)


def test_no_import_fails_when_a_finder_leaves(monkeypatch):
    """Python's loop over the finders passes over the one behind a finder that has left."""

    class Next:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_loader(name, NamespaceLoader(name, [], None)) if name == "found_by_the_next" else None

    called = []
    finder = hf_fastattn_autoload._Finder("json", lambda: called.append("json"))  # which is imported already
    monkeypatch.setattr(sys, "meta_path", [finder, Next])
    monkeypatch.delitem(sys.modules, "found_by_the_next", raising=False)
    importlib.import_module("found_by_the_next")
    assert called == ["json"] and sys.meta_path == [Next]
    del sys.modules["found_by_the_next"]


@pytest.mark.slow
def test_lm_eval_alone_finds_its_model_type(tmp_path):
    """It imports torch to set the seed, before it looks for the model type."""
    pytest.importorskip("lm_eval")
    script = """
import sys, lm_eval.evaluator
assert not {'torch', 'lm_eval.models', 'hf_fastattn'} & set(sys.modules)
lm_eval.evaluator.simple_evaluate(model='hf-fastattn', model_args='pretrained=nowhere,backend=fast', tasks=['none'])
"""
    run(tmp_path, script, fails="ValueError: Unknown attention backend 'fast'; known backends: ")


@pytest.mark.slow
def test_lm_evals_model_types_imported_before_torch(tmp_path):
    pytest.importorskip("lm_eval")
    script = """
import lm_eval.models, torch
from lm_eval.api.registry import model_registry
assert 'hf' in model_registry and 'hf-fastattn' in model_registry
assert waits() == ['transformers.modeling_utils'] and 'hf_fastattn' not in sys.modules
"""
    run(tmp_path, WAITS + script)


def test_the_model_type_of_another_package_is_kept(monkeypatch):
    registry = pytest.importorskip("lm_eval.api.registry")
    for before, after in ((None, hf_fastattn_autoload.LM_CLASS), ("their.module:Class", "their.module:Class")):
        monkeypatch.setattr(registry, "model_registry", registry.Registry("model"))
        if before is not None:
            registry.model_registry.register("hf-fastattn", target=before)
        hf_fastattn_autoload.register_lm()
        assert dict(registry.model_registry.items()) == {"hf-fastattn": after}
    monkeypatch.setattr(registry, "model_registry", None)  # as in an lm-eval with another registry
    hf_fastattn_autoload.register_lm()
