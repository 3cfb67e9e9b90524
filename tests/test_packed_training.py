"""Training with several documents in a row: the gradients of separate rows, and nothing compiled for another length."""

import re
from pathlib import Path

import checkpoint
import models
import pytest
import torch
from test_training import agree, trainable
from torch._dynamo.utils import counters
from transformers import DataCollatorWithFlattening

import hf_fastattn

LENGTHS = [7, 12, 5]
GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "training.md"


def documents(device, lengths: list[int]) -> list[torch.Tensor]:
    return list(models.prompts("no_padding", device, rows=1)["input_ids"][0, : sum(lengths)].split(lengths))


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lengths_too", [False, True])
def test_the_rows_of_transformers_collator(lengths_too, device):
    model = trainable("llama", device)
    texts = documents(device, LENGTHS)
    count = sum(len(text) - 1 for text in texts)
    alone = sum(model(text[None], labels=text[None]).loss * (len(text) - 1) for text in texts) / count
    expected = gradients(model, alone)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths_too)
    row = collate([{"input_ids": text.tolist()} for text in texts])
    row = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in row.items()}
    assert ("cu_seq_lens_q" in row) == lengths_too
    model.set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        agree(gradients(model, model(**row, use_cache=False).loss), expected)
    assert calls == {"lean.prefill": 2, "lean.backward": 2}


def test_nothing_is_compiled_for_another_length(device):
    model = trainable("llama", device, num_hidden_layers=1)
    model.set_attn_implementation("lean")
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    graphs = []
    for length in range(21, 41):
        ids = torch.cat(documents(device, [length]))[None]
        positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None].to(device)
        compiled(ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 2  # the second has the length as a symbol


def test_the_example_with_trl(device, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "SFTTrainer(" in block]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repo = "HuggingFaceTB/SmolLM2-135M"
    assert f'"{repo}"' in code and "packing=True," in code
    if device.type == "cpu":
        code = code.replace("packing=True,", "packing=True, use_cpu=True,")
    found: dict = {}
    with hf_fastattn.count_calls() as calls:
        exec(code.replace(repo, str(checkpoint.save(tmp_path / "tiny"))), found)
    batch = next(iter(found["trainer"].get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1 and (batch["position_ids"] == 0).sum() == 2  # two documents in one row
    assert calls["lean.backward"] > 0 and set(calls) == {"lean.prefill", "lean.backward"}
