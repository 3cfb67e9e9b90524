"""The comparison of the LeanAttention paper in decode: FlashAttention-2, Flash-Decoding and LeanAttention, of the package.

Sanovar et al., "Lean Attention: Hardware-Aware Scalable Attention Mechanism for the Decode-Phase of Transformers" (2024):
figures 7 (speed over context length, heads and batch at head_dim 64), 9 (at head_dim 128), 4 (occupancy of the GPU), there on an
A100, and 8 (heads divided among 8 of them, each of which computes its own: one GPU has the time of all); the sweeps of tiles and
grids in section 4.
"""

from __future__ import annotations

import random
import statistics
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from hf_fastattn import registry
from hf_fastattn.kernels import INTERPRETED, reference
from hf_fastattn.kernels.attention import lean
from hf_fastattn.kernels.attention.plan import Call, Plan
from hf_fastattn.kernels.attention.schedule import choose, stream_k_config
from hf_fastattn.kernels.host import gpu, launch, tables
from hf_fastattn.kernels.spec import KV, Form, Spec, call

from .shapes import DTYPE, GPUS, LEAN, PORTABLE, READ, SPLIT_KV, Shape, compete, exact, kernel_of_lean, make_inputs, ratios
from .timing import num_sets

PUBLISHED = {
    "device": "NVIDIA A100",
    "lean_over_fa2": {"average": 2.6, "largest": 8.33, "largest_at": 512 << 10},
    "lean_over_split_kv": {"average": 1.27, "largest": 1.71},
    "later_text": {"lean_over_split_kv": {"average": 1.73, "largest": 2.18, "largest_at": 256 << 10}},
}
GOALS = {"lean_over_fa2": 2.4, "stream_k_over_split_kv": 1.05, "smallest": 0.97}
LARGEST = 64 << 30
LENGTHS = tuple(n << 10 for n in (1, 4, 16, 64, 256, 512))
SHAPES = [
    shape
    for head_dim in (64, 128)
    for batch in (1, 4, 16)
    for heads in (12, 16, 24, 32, 56, 64, 128)
    for length in LENGTHS
    if (shape := Shape(batch, heads, heads, head_dim, length)).kv_bytes <= LARGEST
]
random.Random(0).shuffle(SHAPES)  # so that an interrupted run is a fair sample
LONGEST = 256 << 10
FIGURE_8 = list(  # batch, heads and tokens
    dict.fromkeys(
        [
            *((4, 192, length) for length in LENGTHS),
            *((4, heads, LONGEST) for heads in (64, 96, 128, 160, 192)),
            *((batch, 128, LONGEST) for batch in (1, 2, 4, 8, 16)),
        ]
    )
)
SHARED = [Shape(batch, heads // GPUS, heads // GPUS, 64, length) for batch, heads, length in FIGURE_8]  # the heads of one GPU
SWEEP = [
    Shape(1, heads, heads, head_dim, n << 10) for head_dim in (64, 128) for heads in (32, 56) for n in (4, 64, 256)
]  # fmt: skip
TILES, PROGRAMS = (32, 64, 128, 256), (1, 2, 4)  # keys per tile; programs per SM
IN_FLIGHT = 160 << 10  # bytes of shared memory per SM for the programs of the sweep
A100 = (80, 108)  # compute capability, SMs


@launch.remember
def prepare(tensors, form: Form, spec: Spec, return_lse: bool, config: tables.Config | None) -> Plan:
    """The launches of a call with few query rows by stream-K; config None: that of `lean`."""
    asked = Call.of(tensors, form, spec, return_lse, decode=True)
    heads = asked.batch * asked.num_kv_heads
    usual = stream_k_config(asked.q.device, asked.q.dtype, asked.width, asked.rows, heads, asked.uniform)
    return lean.stream_k(asked, config or usual)


def stream_k(q: torch.Tensor, kv: KV, spec: Spec, spans: None = None, *, config: tables.Config | None = None, **options):
    """Exact attention by stream-K, also where `lean` would use fixed splits; CPU tensors run the reference."""
    if q.device.type == "cpu" and not INTERPRETED:
        return reference.attention(q, kv, spec, spans, **options)
    plan = prepare((q, *kv.tensors, spans, None, None), kv.form, spec, False, config)
    return plan.run(q, kv, spec, spans, None, None, False)


def as_if(arch: int, sms: int) -> AbstractContextManager:
    """Inside, tables and schedules are those of a GPU with this compute capability and number of SMs."""
    return mock.patch.multiple(gpu, arch=lambda device: arch, num_sms=lambda device: sms)


def schedule(kernel: str, shape: Shape, device: torch.device) -> dict:
    """How evenly a kernel's schedule uses the SMs, computed from its grid and its tiles of K and V; not measured.

    programs: those with work. sms_with_work: share of the SMs with a program, if programs are assigned round-robin. balance: all
    tiles / (number of SMs x tiles of the busiest SM). The cost of imbalance depends on how many SMs saturate the memory.
    """
    sms, outputs = gpu.num_sms(device), shape.batch * shape.num_kv_heads
    if kernel == "fa2":
        tiles = -(-shape.kv_len // tables.prefill(device, DTYPE, shape.head_dim, 1).BLOCK_N)
        shares = [tiles] * (shape.batch * shape.num_heads)  # one program per query head, whatever the length of K and V
    else:
        shared = device, DTYPE, shape.head_dim, shape.num_heads // shape.num_kv_heads, outputs
        keys = shape.kv_len
        config, fixed = (tables.fixed(*shared, keys), True) if kernel == "split_kv" else choose(*shared, keys, uniform=True)
        tiles = -(-shape.kv_len // config.BLOCK_N)
        if fixed:
            splits = tables.num_splits(device, config, outputs, shape.kv_len, shape.head_dim)
            shares = [(s + 1) * tiles // splits - s * tiles // splits for s in range(splits)] * outputs
        else:
            total = tiles * outputs
            programs = min(sms * config.programs_per_sm, total, max(total // config.MIN_TILES, min(total, sms)))
            used = -(-total // -(-total // programs))  # more programs would not shorten the longest share
            shares = [total // used + (program < total % used) for program in range(used)]
    busiest = max(sum(shares[sm::sms]) for sm in range(sms))
    return {
        "programs": len(shares),
        "sms_with_work": min(len(shares), sms) / sms,
        "balance": sum(shares) / (sms * busiest),
    }


def schedules(shape: Shape, device: torch.device) -> dict[str, dict]:
    return {kernel: schedule(kernel, shape, device) for kernel in ("fa2", "split_kv", "lean")}


def paper_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds per call of fa2 (without splits), split_kv, lean, and stream-K for every shape; the schedules."""
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    kernels = {"fa2": PORTABLE, "split_kv": SPLIT_KV, "lean": LEAN, "stream_k": partial(call, stream_k)}
    rivals = {name: lambda i, kernel=kernel: kernel(*inputs[i]) for name, kernel in kernels.items()}
    found = compete({}, rivals, exact(*inputs[0]), sets=sets, us=max(7, shape.kv_bytes / READ))
    us = found["us"]
    with as_if(*A100):
        on_a100 = schedules(shape, device)
    return (
        shape.row()
        | found
        | {
            "kernel_of_lean": kernel_of_lean(shape, inputs[0][0], inputs[0][1], registry.get("lean")),
            "lean_over_fa2": us["fa2"] / us["lean"],
            "lean_over_split_kv": us["split_kv"] / us["lean"],
            "stream_k_over_split_kv": us["split_kv"] / us["stream_k"],
            "schedule": schedules(shape, device),
            "schedule_108_sms": on_a100,
        }
    )


def sweep_configs(shape: Shape, device: torch.device) -> dict[str, tables.Config]:
    """Configurations of stream-K by name, for keys per tile and programs per SM, with as many stages as fit."""
    heads = shape.batch * shape.num_kv_heads
    usual = stream_k_config(device, DTYPE, shape.head_dim, shape.num_heads // shape.num_kv_heads, heads, uniform=True)
    configs = {}
    for tile in TILES:
        for programs in PROGRAMS:
            buffers = IN_FLIGHT // (
                programs * 2 * tile * shape.head_dim * DTYPE.itemsize
            )  # Triton allocates one buffer less than stages
            stages = min(4, buffers + 1)
            changed = {"BLOCK_N": tile, "programs_per_sm": programs, "num_stages": stages, "MIN_TILES": 1}
            if stages > 1:
                configs[f"{tile} x {programs}"] = replace(usual, **changed)
    return configs


def sweep_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds per call of stream-K by keys per tile x programs per SM, and of lean."""
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    variants = {
        name: lambda i, config=config: call(partial(stream_k, config=config), *inputs[i])
        for name, config in sweep_configs(shape, device).items()
    }
    ours = {"lean": lambda i: LEAN(*inputs[i])}
    found = compete(variants, ours, exact(*inputs[0]), sets=sets, us=max(7, shape.kv_bytes / READ))
    best = min((name for name in found["us"] if name != "lean"), key=found["us"].get)
    return shape.row() | found | {"best": best, "lean_over_best": found["us"][best] / found["us"]["lean"]}


def _averages(rows: list[dict], name: str) -> dict:
    """The arithmetic mean, as is usual for speedups, and the geometric mean."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return ratios(rows, name) | ({"average": statistics.mean(values)} if values else {})


def paper_summary(rows: list[dict]) -> dict:
    """The averages of the paper and of this run; "schedules_differ": rows in which lean and split_kv have different schedules.

    "fastest": in how many rows each kernel is the fastest; "lean_is_split_kv": in how many lean runs split_kv's kernel.
    """
    found: dict = {"published": PUBLISHED, "goals": GOALS}
    for name in ("lean_over_fa2", "lean_over_split_kv"):
        found[name] = _averages(rows, name)
        for head_dim in sorted({row["head_dim"] for row in rows}):
            found[f"{name}_head_dim_{head_dim}"] = ratios([row for row in rows if row["head_dim"] == head_dim], name)
    differ = [row for row in rows if row["schedule"]["lean"] != row["schedule"]["split_kv"]]
    found["stream_k_over_split_kv"] = _averages(rows, "stream_k_over_split_kv")
    found["schedules_differ"] = _averages(differ, "stream_k_over_split_kv")
    for key in ("schedule", "schedule_108_sms"):
        its = [row[key] for row in rows if key in row]
        name = "mean_balance" + key.removeprefix("schedule")
        found[name] = {kernel: statistics.mean(each[kernel]["balance"] for each in its) for kernel in (its or [{}])[0]}
    fastest = [min(row["us"], key=row["us"].get) for row in rows]
    found["fastest"] = {name: fastest.count(name) for name in dict.fromkeys(name for row in rows for name in row["us"])}
    found["lean_is_split_kv"] = sum(row["kernel_of_lean"] == "split_kv" for row in rows)
    return found


def sweep_summary(rows: list[dict]) -> dict:
    """How often each tile x grid is fastest, and lean over the best of the sweep."""
    best = [(row["head_dim"], row["best"]) for row in rows]
    return {
        "fastest": {
            f"head_dim {dim}": {b: best.count((dim, b)) for d, b in best if d == dim} for dim in sorted({d for d, _ in best})
        },
        "lean_over_best": ratios(rows, "lean_over_best"),
    }
