"""Training with the real kernels: small models learn as with eager attention, and a training step compiles."""

import copy
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from models import COMMON, VOCAB
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_fastattn
from hf_fastattn.attention import training

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")

STEPS, LENGTH = 32, 128
SIZES = {**COMMON, "hidden_size": 128, "intermediate_size": 256}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "gemma2": {"head_dim": 32, "sliding_window": 48, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32},
    "gpt_oss": {"head_dim": 32, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def new(family: str) -> torch.nn.Module:
    set_seed(0)
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    return auto.from_config(CONFIG_MAPPING[family](**SIZES, **FAMILIES[family])).to(DEVICE).train()


def batch() -> dict[str, torch.Tensor]:
    """Rows of several lengths; padding is not predicted."""
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (4, LENGTH), generator=noise)
    live = torch.arange(LENGTH) < torch.tensor([LENGTH, 100, 77, 60])[:, None]
    ids = ids.masked_fill(~live, 0)
    found = {"input_ids": ids, "attention_mask": live.long(), "labels": ids.masked_fill(~live, -100)}
    return {name: x.to(DEVICE) for name, x in found.items()}


def losses(family: str, attention: str, dtype: torch.dtype | None) -> torch.Tensor:
    """The loss before each of STEPS steps of AdamW, with autocast to dtype if there is one."""
    model, inputs, found = new(family), batch(), []
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not None):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_in_bfloat16_converges_as_with_eager_attention(family):
    exact, rounded = losses(family, "eager", None), losses(family, "eager", torch.bfloat16)
    with hf_fastattn.count_calls() as calls:
        found = losses(family, "lean", torch.bfloat16)
    assert calls == {"lean.prefill": 2 * STEPS, "lean.backward": 2 * STEPS}
    assert exact[-1] < 0.1 * exact[0]
    assert (found - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 4 * torch.finfo(torch.bfloat16).eps * exact[0]


def test_a_compiled_training_step():
    model, inputs = new("llama"), batch()
    model.set_attn_implementation("lean")

    def gradients(forward) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            forward(**inputs, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(model.forward)
    torch._dynamo.reset()
    with hf_fastattn.count_calls() as calls:
        found = gradients(torch.compile(model.forward, fullgraph=True))
    assert calls == {"lean.prefill": 2, "lean.backward": 2}
    most = max(grad.abs().max() for grad in expected.values()).item()
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * most, name


def test_compiled_recomputation_drops_the_same_weights():
    """The output is linear in V: with the same weights in both passes, V times its gradient is the output times that of it."""
    q, k, v, dout = (torch.randn(2, 4, 200, 64, device=DEVICE, requires_grad=i < 3) for i in range(4))
    attend = lambda q, k, v: training.attention("lean", q + 1.0, k, v, dropout=0.5)[0]  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(partial(checkpoint, attend, use_reentrant=False), fullgraph=True)
    outs = []
    for _ in range(2):
        outs.append(compiled(q, k, v))
        (dv,) = torch.autograd.grad(outs[-1], v, dout)
        products = outs[-1] * dout
        assert ((v * dv).sum() - products.sum()).abs() < 1e-4 * products.abs().sum()
    assert not torch.equal(*outs)


@pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="needs NCCL")
def test_data_parallel_over_nccl():
    model, inputs = new("llama"), batch()
    model.set_attn_implementation("lean")
    alone = copy.deepcopy(model)
    alone(**inputs).loss.backward()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])(**inputs).loss.backward()
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    for (name, p), same in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, same.grad), name


LENGTHS = """
import torch
from hf_fastattn.attention import packed

good, short = (torch.tensor(x, device="cuda") for x in ([0, 8, 20], [0, 8, 19]))
torch.cuda.set_sync_debug_mode("error")
lo, hi = packed._segments_of_lengths(good, good, 20)
torch.cuda.set_sync_debug_mode("default")
print(lo[0, 7].item(), hi[0, 7].item(), flush=True)
packed._segments_of_lengths(short, short, 20)
torch.cuda.synchronize()
"""


def test_the_gpu_checks_lengths_without_synchronisation():
    done = subprocess.run([sys.executable, "-c", LENGTHS], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "8"] and done.returncode != 0
    assert "cu_seq_lens_q and cu_seq_lens_k must be equal" in done.stdout + done.stderr
