"""The types of the public functions: mypy accepts right arguments and refuses others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each `type: ignore` is for an error that mypy must report: one that is not needed is an error itself.
CALLS = """
import torch
from peft import PeftModel
from transformers import PreTrainedModel, TextGenerationPipeline

import hf_fastattn
from hf_fastattn.context_parallel import positions


def right(model: PreTrainedModel, pipe: TextGenerationPipeline, adapted: PeftModel) -> None:
    with hf_fastattn.patch(model, "lean", cache="preallocated", kv_sharding="sequence") as patched:
        print(patched.captures)
    hf_fastattn.patch(pipe, cache=None, graph=False)
    hf_fastattn.patch(adapted)
    hf_fastattn.unpatch(adapted)
    hf_fastattn.explain(model, gpu="h100")
    hf_fastattn.evaluate(model, caches=["preallocated"])
    positions("zigzag", 0, 2, 8)


def wrong(model: PreTrainedModel, layer: torch.nn.Linear) -> None:
    hf_fastattn.patch(42)  # type: ignore[arg-type]
    hf_fastattn.patch("gpt2")  # type: ignore[arg-type]
    hf_fastattn.patch(layer)  # type: ignore[arg-type]
    hf_fastattn.unpatch(None)  # type: ignore[arg-type]
    hf_fastattn.patch(model, "lean", cache="stat")  # type: ignore[arg-type]
    hf_fastattn.patch(model, "lean", cache="static")  # type: ignore[arg-type]
    hf_fastattn.patch(model, kv_sharding="tokens")  # type: ignore[arg-type]
    hf_fastattn.patch(model, kv="sequence")  # type: ignore[call-arg]
    hf_fastattn.patch(model, kv_dtype="int4")  # type: ignore[arg-type]
    hf_fastattn.explain(model, gpu="h1000")  # type: ignore[arg-type]
    hf_fastattn.evaluate(model, caches=["static"])  # type: ignore[list-item]
    positions("zigzag zag", 0, 2, 8)  # type: ignore[arg-type]
"""


@pytest.mark.slow
def test_mypy_refuses_wrong_arguments(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS)
    ran = subprocess.run([sys.executable, "-m", "mypy", tmp_path / "calls.py"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
