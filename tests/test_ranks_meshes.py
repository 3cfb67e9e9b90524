"""Models that several ranks share by more or by other means than tensor parallelism."""

import re
import warnings

import processes
import pytest
import torch
import transformers
from models import prompts
from test_ranks import generate, of_family, outcome, results, shared

import hf_fastattn

OLDEST = transformers.__version__.startswith("5.17.")
pytestmark = [processes.HIDDEN, pytest.mark.slow, pytest.mark.xdist_group("ranks")]


def in_stages(rank: int) -> str:
    return outcome(lambda: hf_fastattn.patch(shared(of_family("llama"), pp_size=2), "lean"))


def test_stages_of_a_pipeline_are_refused(tmp_path):
    of_family("llama")
    for found in results(processes.run(tmp_path, 2, in_stages)):
        assert re.match("ValueError: .*a part of its layers .pipeline parallelism.*tp_size=N", found)


def in_two_groups(rank: int) -> tuple:
    """Two groups of two ranks, each with rows of its own. Weights are also divided between the groups."""
    one, row = of_family("llama"), rank // 2
    inputs = {name: value[row : row + 1] for name, value in prompts("left_padding", "cpu").items()}
    model, want = shared(one, fsdp_size=2, tp_size=2), generate(one, inputs)
    with hf_fastattn.patch(model, "lean") as patch, warnings.catch_warnings(action="ignore"):
        same = [torch.equal(generate(model, inputs), want) for _ in range(2)]
        other = outcome(lambda: generate(model, inputs | {"input_ids": inputs["input_ids"] + rank % 2}))
        torch.manual_seed(rank)
        return same, other, generate(model, inputs, do_sample=True).tolist(), patch.reasons


@pytest.mark.skipif(OLDEST, reason="Transformers 5.17 cannot load a model that is divided twice")
def test_ranks_compare_their_calls_within_their_group(tmp_path):
    of_family("llama")
    found = results(processes.run(tmp_path, 4, in_two_groups))
    for rank, (same, other, tokens, reasons) in enumerate(found):
        first = rank // 2 * 2
        assert same == [True, True] and "forward hook FSDPState" in reasons[0]
        assert f"has other values on rank {first + 1} than on rank {first}" in other
        assert tokens == found[first][2]
    assert found[0][2] != found[2][2]
