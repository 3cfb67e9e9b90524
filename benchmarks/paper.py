"""The LeanAttention paper's own comparison: FlashAttention-2, Flash-Decoding and LeanAttention in decode, here all ours.

Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers" (2024):
figures 7 and 9 (speed over context length, heads and batch at head_dim 64 and 128) and 4 (how full the GPU is), on an A100.
"""

from __future__ import annotations

import statistics

import torch

from hf_fastattn.kernels.attention.schedule import choose
from hf_fastattn.kernels.host import gpu, tables

from .shapes import DTYPE, LEAN, PORTABLE, READ, SPLIT_KV, Shape, compete, exact, make_inputs, ratios
from .timing import num_sets

PUBLISHED = {
    "device": "NVIDIA A100",
    "lean_over_fa2": {"average": 2.6, "largest": 8.33},
    "lean_over_split_kv": {"average": 1.27, "largest": 1.71},
}
LARGEST = 64 << 30
LENGTHS = tuple(n << 10 for n in (1, 4, 16, 64, 256, 512))
SHAPES = [
    shape
    for head_dim in (64, 128)
    for batch in (1, 4, 16)
    for heads in (12, 32, 56, 128)
    for length in LENGTHS
    if (shape := Shape(batch, heads, heads, head_dim, length)).kv_bytes <= LARGEST
]


def schedule(kernel: str, shape: Shape, device: torch.device) -> dict:
    """How a kernel's grid fills the GPU, from the grid and the tiles of K and V alone, as the kernel deals them: not measured.

    programs: those with work. sms_with_work: share of the SMs that get one, as they are dealt to the SMs in turn. balance: tiles
    in all over SMs x tiles of the busiest SM; what that costs depends on how many SMs it takes to keep the memory busy.
    """
    sms, outputs = gpu.num_sms(device), shape.batch * shape.num_kv_heads
    if kernel == "fa2":
        tiles = -(-shape.kv_len // tables.prefill(device, DTYPE, shape.head_dim, 1).BLOCK_N)
        shares = [tiles] * (shape.batch * shape.num_heads)  # one program per query head, however long K and V are
    else:
        shared = device, DTYPE, shape.head_dim, shape.num_heads // shape.num_kv_heads, outputs
        config, own = (tables.decode(*shared), True) if kernel == "split_kv" else choose(*shared, shape.kv_len, alike=True)
        tiles = -(-shape.kv_len // config.BLOCK_N)
        if own:
            splits = tables.num_splits(device, config, outputs, shape.kv_len)
            shares = [(s + 1) * tiles // splits - s * tiles // splits for s in range(splits)] * outputs
        else:
            total = tiles * outputs
            programs = min(sms * config.programs_per_sm, total, max(total // config.MIN_TILES, min(total, sms)))
            crew = -(-total // -(-total // programs))  # whoever does not shorten the longest share is left out
            shares = [total // crew + (member < total % crew) for member in range(crew)]
    busiest = max(sum(shares[sm::sms]) for sm in range(sms))
    return {
        "programs": len(shares),
        "sms_with_work": min(len(shares), sms) / sms,
        "balance": sum(shares) / (sms * busiest),
    }


def paper_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds a call of fa2, split_kv and lean, and the schedule of each."""
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    kernels = {"fa2": PORTABLE, "split_kv": SPLIT_KV, "lean": LEAN}
    rivals = {name: lambda i, kernel=kernel: kernel(*inputs[i]) for name, kernel in kernels.items()}
    found = compete({}, rivals, exact(*inputs[0]), sets=sets, us=max(7, shape.kv_bytes / READ))
    us = found["us"]
    return (
        shape.row()
        | found
        | {
            "lean_over_fa2": us["fa2"] / us["lean"],
            "lean_over_split_kv": us["split_kv"] / us["lean"],
            "schedule": {name: schedule(name, shape, device) for name in kernels},
        }
    )


def paper_summary(rows: list[dict]) -> dict:
    """The paper's averages (arithmetic, as averages of speedups usually are) and ours, beside geometric means."""
    found: dict = {"published": PUBLISHED}
    for name in ("lean_over_fa2", "lean_over_split_kv"):
        found[name] = ratios(rows, name) | {"average": statistics.mean(row[name] for row in rows)}
        for head_dim in sorted({row["head_dim"] for row in rows}):
            found[f"{name}_head_dim_{head_dim}"] = ratios([row for row in rows if row["head_dim"] == head_dim], name)
    found["mean_balance"] = {
        kernel: statistics.mean(row["schedule"][kernel]["balance"] for row in rows) for kernel in rows[0]["schedule"]
    }
    return found
