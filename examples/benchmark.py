"""Milliseconds per token with sdpa and with lean on the same model, and the least possible time.

python examples/benchmark.py [MODEL [TOKENS]]

`hf-fastattn bench generate` is the complete benchmark: grids of batch and length, other implementations, peak memory, tables and
pictures.
"""

import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

import hf_fastattn

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 32
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(name).to(device).eval()
prompt = torch.randint(3, model.config.vocab_size, (1, 512), device=device, generator=torch.Generator(device).manual_seed(0))


class Clock(StoppingCriteria):
    """Never stops; records the time of each token."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        if device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=device)


def measure() -> float:
    """Median milliseconds between tokens in the second run; the first one compiles kernels."""
    for _ in range(2):
        clock = Clock()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, stopping_criteria=[clock])
    return 1e3 * statistics.median(b - a for a, b in zip(clock.times, clock.times[1:], strict=False))


print(f"sdpa   {measure():8.2f} ms a token")
with hf_fastattn.patch(model, "lean", graph=device == "cuda"):
    print(f"patch  {measure():8.2f} ms a token")
floor = hf_fastattn.explain(model, length=512 + tokens)
print(f"floor  {floor.step.floor_ms:8.2f} ms a token on {floor.gpu.name}: {floor.gpu.source}")
