"""Each kernel on a few small shapes, for NVIDIA's checker:

compute-sanitizer --tool memcheck python tests/sanitize.py
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # every tensor its own allocation, so that no bound hides in a pool

import torch
from cases import Case, make
from test_kernels import REFERENCE, RUNNABLE, run

CASES = [
    Case(q_len=1, kv_len=300, dtype="bf16", head_dim=128, num_heads=8),
    Case(q_len=5, kv_len=77, dtype="fp16", head_dim=80, rows=((3, 77, 0.2), (0, 0, 0.0)), sinks=True, softcap=20.0, window=40),
    Case(q_len=1, kv_len=200, head_dim=64, q_offset=40, offset_on_device=True, layout="slices"),
    Case(q_len=130, kv_len=131, dtype="bf16", head_dim=64, causal=False, batch=1),
    Case(q_len=130, kv_len=130, dtype="fp16", head_dim=256, batch=1),
    Case(q_len=1, kv_len=1, dtype="fp16", head_dim=16, batch=1, num_heads=1, num_kv_heads=1),
]

if __name__ == "__main__":
    for case in CASES:
        for kernel in RUNNABLE:
            if kernel is REFERENCE or kernel.fit(case) != case:
                continue
            x = make(case, torch.device("cuda"))
            out, _ = run(kernel, x.q, x.k, x.v, x.spans, x.options)
            torch.cuda.synchronize()
            assert out.isfinite().all(), (kernel.name, case.id)
            print("ran", kernel.name, case.id, flush=True)
