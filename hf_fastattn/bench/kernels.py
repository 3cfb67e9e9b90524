"""Kernel benchmark: our decode and prefill kernels beside torch's sdpa flash and cuDNN backends.

    python -m hf_fastattn.bench.kernels decode ragged prefill --out examples/results

Every result is checked against fp32 attention before it is timed. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels import TritonKernel, reference
from ..kernels.lean import lean
from ..kernels.prefill import prefill
from ..kernels.spans import build_spans
from ..kernels.split_kv import split_kv
from .timing import conditions, geometric_mean, num_sets, time_rivals

# batch, num_heads, num_kv_heads, head_dim, kv_len
DECODE = [
    (1, 32, 8, 128, 1 << 10),
    (1, 32, 8, 128, 4 << 10),
    (1, 32, 8, 128, 16 << 10),
    (1, 32, 8, 128, 64 << 10),
    (1, 32, 8, 128, 256 << 10),
    (1, 32, 8, 128, 512 << 10),
    (1, 32, 32, 128, 4 << 10),
    (1, 32, 32, 128, 64 << 10),
    (1, 56, 56, 64, 1 << 10),
    (1, 56, 56, 64, 8 << 10),
    (1, 56, 56, 64, 64 << 10),
    (4, 32, 8, 128, 4 << 10),
    (16, 32, 8, 128, 1 << 10),
    (16, 32, 8, 128, 8 << 10),
    (64, 32, 8, 128, 1 << 10),
    (64, 32, 8, 128, 8 << 10),
    (1, 9, 3, 64, 8 << 10),
    (1, 8, 1, 256, 32 << 10),
]
# batch, num_heads, num_kv_heads, head_dim, length, causal
PREFILL = [
    (batch, heads, kv_heads, head_dim, length, causal)
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 32, 8), (256, 16, 8))
    for batch, length in ((8, 2 << 10), (2, 8 << 10), (1, 16 << 10), (1, 64 << 10))
    for causal in (True, False)
]
# name, lengths of the rows; 32 heads over 8 KV heads, head_dim 128
RAGGED = [
    ("one 32k row and fifteen of 2k", [32 << 10] + 15 * [2 << 10]),
    ("one 256k row and seven of 1k", [256 << 10] + 7 * [1 << 10]),
    ("powers of two, 512 to 64k", [512 << i for i in range(8)]),
    ("32 rows, uniform between 1 and 16k", [1 + (7919 * i * i + 104729 * i) % (16 << 10) for i in range(1, 33)]),
]


def sdpa(backend: SDPBackend, q, k, v, causal: bool):
    """torch's scaled_dot_product_attention, one backend, grouped heads as they are."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def check(name: str, out: torch.Tensor, expected: torch.Tensor, peer_error: float) -> None:
    """Refuse to time a wrong result: at most twice the peer's error and 4 eps of the largest value."""
    error = (out.float() - expected).abs().max().item()
    allowed = 2 * peer_error + 4 * torch.finfo(out.dtype).eps * expected.abs().max().item()
    if not error <= allowed:
        raise RuntimeError(f"{name} is wrong: error {error:.2e}, allowed {allowed:.2e}.")


def make_inputs(batch, heads, kv_heads, head_dim, q_len, kv_len, sets, dtype):
    """`sets` independent (q, k, v) of normal noise on the GPU."""
    new = lambda h, n: torch.randn(batch, h, n, head_dim, device="cuda", dtype=dtype)  # noqa: E731
    return [(new(heads, q_len), new(kv_heads, kv_len), new(kv_heads, kv_len)) for _ in range(sets)]


def decode_row(batch, heads, kv_heads, head_dim, kv_len, *, dtype=torch.bfloat16, rounds=9) -> dict:
    """One decode shape: microseconds a call of lean, split_kv, fa2, sdpa flash and sdpa cuDNN."""
    kv_bytes = 2 * batch * kv_heads * kv_len * head_dim * dtype.itemsize
    sets = num_sets(kv_bytes)
    inputs = make_inputs(batch, heads, kv_heads, head_dim, 1, kv_len, sets, dtype)
    expected = reference.attention(*inputs[0]).float()
    flash = lambda i: sdpa(SDPBackend.FLASH_ATTENTION, *inputs[i], False)  # noqa: E731
    rivals = {
        "sdpa_flash": flash,
        "sdpa_cudnn": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i], False),
        "fa2": lambda i: prefill(*inputs[i]),
        "split_kv": lambda i: split_kv(*inputs[i]),
        "lean": lambda i: lean(*inputs[i]),
    }
    peer_error = (flash(0).float() - expected).abs().max().item()
    for name, call in rivals.items():
        check(name, call(0), expected, peer_error)
    times = time_rivals(rivals, sets, rounds)
    best = min(times["sdpa_flash"], times["sdpa_cudnn"])
    return {
        "batch": batch,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_len": kv_len,
        "kv_bytes": kv_bytes,
        "us": times,
        "lean_over_best_peer": best / times["lean"],
        "lean_tb_per_s": kv_bytes / times["lean"] / 1e6,
    }


def ragged_row(name, lengths, *, dtype=torch.bfloat16, rounds=9) -> dict:
    """One ragged batch in a left-padded buffer: microseconds a call of lean, split_kv and sdpa under a mask.

    `sdpa_masked` is what Transformers does with a padded batch on a static cache: K/V expanded to all heads, a boolean mask.
    """
    batch, heads, kv_heads, head_dim, kv_len = len(lengths), 32, 8, 128, max(lengths)
    live_bytes = 2 * sum(lengths) * kv_heads * head_dim * dtype.itemsize
    sets = max(2, min(8, num_sets(live_bytes)))
    inputs = make_inputs(batch, heads, kv_heads, head_dim, 1, kv_len, sets, dtype)
    mask = torch.arange(kv_len, device="cuda")[None] >= kv_len - torch.tensor(lengths, device="cuda")[:, None]
    spans = build_spans(batch, 1, kv_len, inputs[0][0].device, q_offset=kv_len - 1, attention_mask=mask)

    def sdpa_masked(i):
        q, k, v = inputs[i]
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])

    rivals = {
        "sdpa_masked": sdpa_masked,
        "split_kv": lambda i: split_kv(*inputs[i], spans),
        "lean": lambda i: lean(*inputs[i], spans),
    }
    expected = torch.cat(
        [reference.attention(*(x[b : b + 1] for x in inputs[0]), spans[b : b + 1]) for b in range(batch)]
    ).float()
    peer_error = (sdpa_masked(0).float() - expected).abs().max().item()
    for rival, call in rivals.items():
        check(rival, call(0), expected, peer_error)
    times = time_rivals({"sdpa_masked": rivals.pop("sdpa_masked")}, sets, 3, calls=2) | time_rivals(rivals, sets, rounds)
    return {
        "name": name,
        "lengths": lengths,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "live_kv_bytes": live_bytes,
        "us": times,
        "lean_over_sdpa_masked": times["sdpa_masked"] / times["lean"],
        "lean_tb_per_s": live_bytes / times["lean"] / 1e6,
    }


def prefill_row(batch, heads, kv_heads, head_dim, length, causal, *, dtype=torch.bfloat16, rounds=5) -> dict:
    """One prefill shape: TFLOP/s of what the backends run here, our portable kernel, sdpa flash and sdpa cuDNN."""
    inputs = make_inputs(batch, heads, kv_heads, head_dim, length, length, 1, dtype)
    q, k, v = inputs[0]
    ours = TritonKernel("prefill", hopper="prefill_hopper")
    flash = lambda i: sdpa(SDPBackend.FLASH_ATTENTION, *inputs[i], causal)  # noqa: E731
    rivals = {
        "sdpa_flash": flash,
        "sdpa_cudnn": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i], causal),
        "ours": lambda i: ours(*inputs[i], causal=causal),
        "portable": lambda i: prefill(*inputs[i], causal=causal),
    }
    # The fp32 reference holds all scores: the last queries of the first row are enough to judge by.
    tail = 64
    expected = reference.attention(q[:1, :, -tail:], k[:1], v[:1], causal=causal).float()
    peer_error = (flash(0)[:1, :, -tail:].float() - expected).abs().max().item()
    for name, call in rivals.items():
        check(name, call(0)[:1, :, -tail:], expected, peer_error)
    times = time_rivals(rivals, 1, rounds, calls=2)
    flops = 4 * batch * heads * length * length * head_dim / (2 if causal else 1)
    rates = {name: flops / us / 1e6 for name, us in times.items()}
    return {
        "batch": batch,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "length": length,
        "causal": causal,
        "tflops": rates,
        "ours_over_sdpa_cudnn": rates["ours"] / rates["sdpa_cudnn"],
        "ours_over_sdpa_flash": rates["ours"] / rates["sdpa_flash"],
        "portable_over_sdpa_flash": rates["portable"] / rates["sdpa_flash"],
    }


KINDS = {"decode": (decode_row, DECODE), "ragged": (ragged_row, RAGGED), "prefill": (prefill_row, PREFILL)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("examples/results"), help="folder for the JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark times CUDA kernels and there is no CUDA device.")
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    for what in args.what:
        make, shapes = KINDS[what]
        rows, path = [], args.out / f"kernels_{what}.json"
        for shape in shapes:
            row = make(*shape)
            rows.append(row)
            torch.cuda.empty_cache()
            figures = row.get("us") or row["tflops"]
            print(what, shape[0] if what == "ragged" else shape, *(f"{n} {x:.1f}" for n, x in figures.items()), flush=True)
            ratios = {name: [row[name] for row in rows] for name in row if "_over_" in name}
            result = {
                "conditions": conditions(),
                "unit": "TFLOP/s" if what == "prefill" else "us a call",
                "geometric_mean": {name: geometric_mean(values) for name, values in ratios.items()},
                "smallest": {name: min(values) for name, values in ratios.items()},
                "rows": rows,
            }
            path.write_text(json.dumps(result, indent=1) + "\n")  # after each row, so an interrupted run keeps what it has
        print(f"{what}: geometric mean {result['geometric_mean']}, smallest {result['smallest']} -> {path}", flush=True)


if __name__ == "__main__":
    main()
