"""The quick part of `make matrix`: one model of each shape of attention; every class is found and can be built."""

import dataclasses

import every_model
import fake_graph
import matrix
import model_table
import pytest
import torch
from calls import as_kernel, attention
from cases import slow_unless
from models import tiny

from hf_fastattn import kernels, registry
from hf_fastattn.kernels import spans
from hf_fastattn.patches.calls import forwards

pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="a recorded graph holds no interpreted kernel")


@pytest.fixture
def recorded(monkeypatch, device, one_thread):
    """Graphs on any device: real ones on a GPU, recorded ones elsewhere."""
    if device.type == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    else:
        fake_graph.use(monkeypatch)


QUICK = (
    "GptOssForCausalLM",
    "Gemma4ForCausalLM@shared_kv",
    "DeepseekV3ForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
)


@pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, matrix.SHAPES))
def test_one_model_of_each_shape(recorded, device, name):
    row = run(name, device)
    assert "unbuilt" not in row, row["unbuilt"]
    wrong = {way: cell for way, cell in row["cells"].items() if cell["result"] == matrix.WRONG}
    assert not wrong, matrix.line(row)
    assert any(cell["path"] != "stock" for cell in row["cells"].values()) or all(
        cell["result"] == matrix.REFUSED for way, cell in row["cells"].items() if way.startswith(("forward", "lean", "patch"))
    )


def run(name: str, device: torch.device | str = "cpu") -> dict:
    cls, _, variant = name.partition("@")
    entry = next((entry for entry in every_model.find() if entry.name == cls), None)
    if entry is None:
        pytest.skip(f"this Transformers has no {cls}")
    return matrix.run_model(entry, f"@{variant}" if variant else "", str(device))


def test_fused_modules_are_counted():
    layers = {"norms": 9, "rotations": 2}  # of a layer, of its queries and its keys, and the last one
    assert matrix.fused(tiny("qwen3", head_dim=16)) == layers | {"MLPs": 2}
    mixture = tiny("qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert matrix.fused(mixture) == layers | {"mixtures": 2, "routers": 2}


@as_kernel
def _blind(q, k, v, s=None, **options):
    """Sees padding and holes."""
    if s is not None:
        s = s.clone()
        s[..., spans.KV_START] = 0
        s[..., spans.FLAGS] &= ~spans.HOLES
    return attention(q, k, v, s, **options)


@as_kernel
def _raw(q, k, v, s=None, **options):
    return q @ k  # sizes that do not fit


@pytest.fixture
def lean_by(monkeypatch):
    """Make "lean" run another function."""
    lean = registry.get("lean")
    yield lambda attention: registry.register(dataclasses.replace(lean, prefill=attention, decode=None))
    registry.register(lean)


def test_a_wrong_mask_and_a_raw_error_are_detected(captured, lean_by):
    lean_by(_blind)
    cells = run("Qwen3ForCausalLM")["cells"]
    assert cells["forward.no_padding"]["result"] == cells["lean.no_padding"]["result"] == matrix.EQUAL
    for way in ("forward.left_padding", "lean.holes", "patch.left_padding"):
        assert cells[way]["result"] == matrix.WRONG
    lean_by(_raw)
    cells = run("BertForMaskedLM")["cells"]
    assert {cell["result"] for cell in cells.values()} == {matrix.WRONG} and "RuntimeError" in cells["forward.holes"]["said"][0]


def test_a_backend_that_is_never_called_and_a_graph_that_is_not_captured_are_detected(captured, monkeypatch):
    monkeypatch.setattr(forwards.Forwards, "__call__", lambda self, **given: self.run(**given))
    cells = run("Qwen3ForCausalLM")["cells"]
    assert cells["patch.no_padding"]["result"] == matrix.WRONG and cells["lean.no_padding"]["result"] == matrix.EQUAL
    ignored = matrix.must_run_ours(matrix.attempt(lambda: None))
    assert ignored.result == matrix.WRONG and "silently ignored" in ignored.said[0]


@pytest.mark.slow
def test_every_class_is_found_and_at_most_ten_cannot_be_built():
    found = every_model.find()
    asking = {module for module, source in every_model.sources().items() if "get_interface(" in source}
    modules = {entry.module for entry in found if entry.asks}
    assert len(modules) > 200 and modules <= asking
    for module in asking - modules:  # excluded classes neither generate nor fill in masked tokens
        assert "GenerationMixin" not in every_model.sources()[module], module
    unbuilt = {}
    for entry in found:
        try:
            with torch.device("meta"):
                model = every_model.build(entry)
        except Exception as error:
            unbuilt[entry.name] = matrix.describe(error)
            continue
        assert sum(p.numel() for p in model.parameters()) < 40e6, f"{entry.name} is not tiny"
    assert len(unbuilt) <= 10, unbuilt


def test_the_table_has_each_model_and_each_message_once():
    cell = {"path": "kernel", "said": [], "graph": "", "result": "equal"}
    refused = {**cell, "result": "refused", "path": "stock", "said": ["A cannot stream 16 tokens."]}
    fails = {"path": "stock", "graph": "", "result": "absent"}
    own = {f"preallocated.{i}": fails | {"said": [f"no: logits of row {i} differ by {i}e-05 (scale 4.{i})"]} for i in (1, 2)}
    rows = [
        {"name": "AForCausalLM", "model_type": "a", "kind": "causal", "cells": {"lean.holes": cell, "streaming": refused} | own},
        {"name": "CModel", "model_type": "c", "kind": "encoder", "cells": {"patch.holes": refused}, "fused": {"norms": 3}},
        {"name": "DModel", "model_type": "d", "kind": "causal", "cells": {"patch.holes": cell}, "fused": {"norms": 4, "MLPs": 1}},
        {"name": "BForCausalLM", "model_type": "b", "kind": "causal", "cells": {}, "unbuilt": "no such thing [some.py:12]"},
    ]
    rows[0]["unset"] = True
    document = {"transformers": "5.0", "models": [model_table.put_together(row) for row in rows]}
    text = model_table.markdown([document, {**document, "transformers": "4.0"}])
    assert text.count("| AForCausalLM | kernel | not tested [1] | - | - | - | refused [2] |") == 1
    assert text.count("| CModel | - | - | refused [3] | refused [3] | - | - |") == 1
    assert text.count("| DModel | - | - | yes | no | 4 norms, 1 MLP | - |") == 1
    assert text.count("1. no: logits of row … differ\n") == 1  # figures, which differ between machines, are left out
    assert text.count("2. The model cannot stream … tokens.") == 1 and "BForCausalLM: no such thing\n" in text
    assert "On 4.0, `set_attn_implementation()` changes nothing in a loaded AForCausalLM," in text
