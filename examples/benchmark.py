"""Milliseconds per token with sdpa and with lean on the same model, and the least possible time.

python examples/benchmark.py [MODEL [TOKENS]]

`hf-fastattn bench generate` is the complete benchmark: grids of batch and length, other implementations, peak memory, tables and
pictures.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM

import hf_fastattn

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 32
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(name).to(device).eval()
prompt = torch.randint(3, model.config.vocab_size, (1, 512), device=device, generator=torch.Generator(device).manual_seed(0))


def measure() -> float:
    """Milliseconds of a further token in the second run; the first one compiles kernels."""
    for _ in range(2):
        times = []
        for new in (1, 1 + tokens):
            start = time.perf_counter()
            model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return 1e3 * (times[1] - times[0]) / tokens


print(f"sdpa   {measure():8.2f} ms a token")
with hf_fastattn.patch(model, "lean", graph=device == "cuda"):
    print(f"patch  {measure():8.2f} ms a token")
floor = hf_fastattn.explain(model, length=512 + tokens)
print(f"floor  {floor.step.floor_ms:8.2f} ms a token on {floor.gpu.name}: {floor.gpu.source}")
