"""The README and the package say the same."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_fastattn
from hf_fastattn import compat, interface, registry
from hf_fastattn.bench import report as bench_report
from hf_fastattn.kernels import checks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_backends_table_is_the_registry():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", README.partition("## Backends")[2].partition("\n## ")[0], re.MULTILINE))
    assert rows == {name: hf_fastattn.get(name).summary for name in hf_fastattn.names() if name in rows}
    assert set(rows) >= {"fa2", "lean", "reference", "split_kv"}


def test_every_public_name_is_explained():
    assert [name for name in hf_fastattn.__all__ if not re.search(rf"\b{name}\b", README)] == []


def test_stated_versions_and_limits_are_the_packages():
    oldest = ".".join(map(str, compat.OLDEST))
    assert f"Transformers {oldest}" in README and f"transformers>={oldest}" in (ROOT / "pyproject.toml").read_text()
    assert f"head_dim | up to {checks.MAX_HEAD_DIM}" in README
    assert f'version = "{hf_fastattn.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_example_of_a_new_backend_works(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(interface, "_runners", dict(interface._runners))
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "register(" in block]
    exec(code, {})
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("mine")
    with hf_fastattn.count_calls() as calls:
        assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected.tolist()
    assert calls == {"mine.prefill": 8 * 2}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_named_files_and_targets_exist(document):
    text = (ROOT / document).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert f"\n{target}:" in makefile, target
    for path in re.findall(r"`((?:hf_fastattn|tests|examples|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


def test_measured_tables_are_the_jsons():
    assert bench_report.MARKS.search(README) and bench_report.rewrite(README, ROOT / "examples" / "results") == README


def test_every_picture_shown_is_there():
    shown = re.findall(r"!\[\w*\]\(([^)]+)\)", README)
    assert shown and all((ROOT / path).is_file() for path in shown)


def test_results_are_of_a_gpu_and_say_how_they_were_made():
    for name, file, _ in bench_report.SECTIONS:
        path = ROOT / "examples" / "results" / file
        if path.exists():
            result = json.loads(path.read_text())
            assert "NVIDIA" in result["conditions"]["device"], name
            assert all("bench" in command for command in result["commands"]), name
