"""Runs each kernel on a few small shapes, for NVIDIA's checkers:

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py

For prefill_hopper_kernel racecheck (2025.3) reports two false positives: an integer that one warp hands to others in the order of
mbarriers (`pipe.send_item`, `pipe.receive_item`), and the bytes by which Triton dispatches work to warps, beside named barriers.
"""

import os
from functools import partial

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # one allocation per tensor, so that accesses out of bounds are noticed

import torch
from cases import Case, cover, make
from test_kernels import LEAN, REFERENCE, RUNNABLE, never, run

from hf_fastattn.kernels.attention import prefill_hopper, schedule
from hf_fastattn.kernels.decode import append, linear, ring, rms_norm, rope, sample
from hf_fastattn.kernels.spec import KV, call

CASES = [
    Case(q_len=1, kv_len=300, dtype="bf16", head_dim=128, num_heads=8),
    Case(q_len=5, kv_len=77, dtype="fp16", head_dim=80, rows=((3, 77, 0.2), (0, 0, 0.0)), sinks=True, softcap=20.0, window=40),
    Case(q_len=1, kv_len=200, head_dim=64, q_offset=40, offset_on_device=True, layout="slices"),
    Case(q_len=1, kv_len=203, dtype="bf16", head_dim=64, first_tokens=4, turned=True, window=60),
    Case(q_len=3, kv_len=203, dtype="bf16", head_dim=128, first_tokens=20, turned=True, window=60),
    Case(q_len=130, kv_len=131, dtype="bf16", head_dim=64, causal=False, batch=1),
    Case(q_len=130, kv_len=130, dtype="fp16", head_dim=256, batch=1),
    Case(q_len=200, kv_len=200, dtype="bf16", head_dim=128, batch=2, rows=((3, 200, 0.1), (90, 200, 0.0)), window=70),
    Case(q_len=1, kv_len=1, dtype="fp16", head_dim=16, batch=1, num_heads=1, num_kv_heads=1),
    Case(q_len=1, kv_len=131, dtype="bf16", head_dim=64, batch=100, num_heads=4, num_kv_heads=4),  # a program a head
    Case(q_len=1, kv_len=131, dtype="bf16", head_dim=128, batch=100, num_heads=8, num_kv_heads=4),
    Case(q_len=2, kv_len=1000, dtype="bf16", head_dim=128, batch=1, num_heads=71, num_kv_heads=1),  # blocks of a head's rows
]


def attention() -> None:
    own, brief = schedule.shares_within_heads, schedule.brief
    for case in CASES:
        for kernel in RUNNABLE:
            if kernel is REFERENCE or kernel.fit(case) != case:
                continue
            for shares in (own, never) if kernel is LEAN else (own,):  # as it likes, and one line of tiles
                schedule.shares_within_heads, schedule.brief = shares, brief if shares is own else lambda *args: None
                x = make(case, torch.device("cuda"))
                out, _ = run(kernel, x.q, x.k, x.v, x.spans, x.options)
                torch.cuda.synchronize()
                assert out.isfinite().all(), (kernel.name, case.id)
                print("ran", kernel.name, case.id, flush=True)


def hopper_shares() -> None:
    """Shares of K and V, and heads that share a block, of the Hopper kernel."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    import test_prefill_hopper as cases

    prefill_hopper._prepare = prefill_hopper._prepare.__wrapped__
    for case in (*cover(cases.SHARED), *cover(cases.PACKED)):
        x = make(case, torch.device("cuda"))
        for plan in ((0, 1), (1, 2), (0, 5)):
            prefill_hopper.splits_of = lambda *args, plan=plan: plan
            out, lse = call(partial(prefill_hopper.prefill, shares=True), x.q, x.k, x.v, x.spans, **x.options)
            torch.cuda.synchronize()
            assert not out.isnan().any() and not lse.isnan().any(), (case.id, plan)
            print("ran prefill_hopper", case.id, "whole blocks and shares:", plan, flush=True)


def small() -> None:
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.float16)  # noqa: E731
    k, v = new(2, 4, 100, 80), new(2, 4, 100, 80)
    for slot in (0, 99):
        append.append(KV(k, v), new(2, 4, 1, 80), new(2, 4, 1, 80), torch.full((1,), slot, device="cuda"))
    seen = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(5):
        ring.ring_step(seen, None, 4, 2)
    rms_norm.rms_norm(new(3, 1000), new(1000), 1e-6)
    for size in (100, 5000):
        x, weight, bias = new(1, size), new(33, size), new(33)
        assert linear.linear(x, weight, bias) is not None and linear.gated_linear(x, weight, weight) is not None
    for settings in (sample.Settings(top_k=50, top_p=0.9), sample.Settings(2.0, top_p=0.5, min_p=0.01)):
        sample.Sampler()(new(3, 9001).float(), settings)
    rope.rope(new(2, 8, 3, 80), new(2, 2, 3, 80), new(2, 3, 80), new(2, 3, 80))
    torch.cuda.synchronize()
    print("ran the small kernels", flush=True)


if __name__ == "__main__":
    small()
    hopper_shares()
    attention()
