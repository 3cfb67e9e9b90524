"""Rows of the kernel benchmark that time decode: one or a few queries per row and long K/V."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from hf_fastattn import registry
from hf_fastattn.kernels.spans import build_spans
from hf_fastattn.kernels.spec import KV, Spec, call

from .shapes import (
    DTYPE,
    LEAN,
    READ,
    SPLIT_KV,
    Shape,
    best_peer,
    check,
    compete,
    exact,
    make_inputs,
    ratios,
    sdpa,
    sdpa_masked,
)
from .timing import LEAST, host_us, medians, num_sets

MIB, GIB = 1 << 20, 1 << 30
LARGEST = 64 * GIB  # K and V of one set
HEADS = ((32, 8, 128), (32, 32, 128), (28, 4, 128), (64, 8, 128), (56, 56, 64), (9, 3, 64), (8, 1, 256))
LENGTHS = tuple(n << 10 for n in (1, 4, 16, 64, 256))

# Ordered by heads: Triton compiles once for each of them, and consecutive shapes share what is compiled.
DECODE = [
    shape
    for heads in HEADS
    for length in LENGTHS
    for batch in (1, 4, 16, 64)
    if (shape := Shape(batch, *heads, length)).kv_bytes <= LARGEST
]
DECODE.append(Shape(1, 8, 1, 256, 32 << 10))  # eight query heads over one KV head: the merge takes the largest share
DECODE.append(Shape(2, 12, 12, 96, 20 << 10))
SPECULATION = [
    shape
    for q_len in (4, 16)
    for length in LENGTHS
    for batch in (1, 16)
    if (shape := Shape(batch, 32, 8, 128, length, q_len)).kv_bytes <= LARGEST
]


@dataclass(frozen=True)
class Ragged:
    """A left-padded batch of rows of these lengths; 32 heads over 8 KV heads, head_dim 128."""

    name: str
    lengths: list[int]

    def __str__(self) -> str:
        return self.name


RAGGED = [
    Ragged("one row of 512k, for the limit", [512 << 10]),
    Ragged("8 rows, uniform between 1 and 8k", [1 + (7919 * i * i + 104729 * i) % (8 << 10) for i in range(1, 9)]),
    Ragged("one 32k row and fifteen of 2k", [32 << 10] + 15 * [2 << 10]),
    Ragged("one 256k row and seven of 1k", [256 << 10] + 7 * [1 << 10]),
    Ragged("powers of two, 512 to 64k", [512 << i for i in range(8)]),
    Ragged("32 rows, uniform between 1 and 16k", [1 + (7919 * i * i + 104729 * i) % (16 << 10) for i in range(1, 33)]),
]


HOST_METHOD = "the host's clock over 200 eager calls, the device idle before, rivals alternating, median"
HOST = [Shape(1, 32, 8, 128, 1 << 10), Shape(1, 32, 8, 128, 4 << 10)]


def _figures(found: dict, kv_bytes: int) -> dict:
    """Bandwidths, and the ratios from which the summary is computed."""
    us, best = found["us"], best_peer(found["us"])
    figures = {
        "tb_per_s": {name: kv_bytes / time / 1e6 for name, time in us.items()},
        "lean_over_best_peer": best and best / us["lean"],
        "lean_over_split_kv": us["split_kv"] / us["lean"],
    }
    if "batch_invariant" in us:
        figures["lean_over_batch_invariant"] = us["batch_invariant"] / us["lean"]
    return figures


def decode_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds per call of lean, split_kv, batch_invariant, sdpa flash and sdpa cuDNN."""
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    batch_invariant = partial(call, registry.get("batch_invariant").decode)
    found = compete(
        {
            "sdpa_flash": lambda i: sdpa(SDPBackend.FLASH_ATTENTION, *inputs[i]),
            "sdpa_cudnn": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i]),
        },
        {
            "split_kv": lambda i: SPLIT_KV(*inputs[i]),
            "batch_invariant": lambda i: batch_invariant(*inputs[i]),
            "lean": lambda i: LEAN(*inputs[i]),
        },
        exact(*inputs[0]),
        sets=sets,
        us=max(7, shape.kv_bytes / READ),
    )
    return shape.row() | found | _figures(found, shape.kv_bytes)


def speculation_row(shape: Shape, device: torch.device) -> dict:
    """The same for several queries per row, causal among themselves.

    The public sdpa call aligns a causal mask with the first key, so flash is called through the private op that aligns it with
    the last; cuDNN gets a mask. `sdpa_masked` is what Transformers calls.
    """
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    slots = torch.arange(shape.kv_len, device=device)
    mask = (slots <= torch.arange(shape.kv_len - shape.q_len, shape.kv_len, device=device)[:, None])[None, None]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    found = compete(
        {
            "sdpa_flash": lambda i: flash(*inputs[i], 0.0, True)[0],
            "sdpa_cudnn": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i], mask=mask),
            "sdpa_masked": lambda i: sdpa_masked(*inputs[i], mask),
        },
        {"split_kv": lambda i: SPLIT_KV(*inputs[i]), "lean": lambda i: LEAN(*inputs[i])},
        exact(*inputs[0]),
        sets=sets,
        us=max(7, shape.kv_bytes / READ),
    )
    return shape.row() | found | _figures(found, shape.kv_bytes)


def ragged_row(case: Ragged, device: torch.device) -> dict:
    """Microseconds per call over rows of different lengths in a left-padded buffer; cuDNN only if no row is padded."""
    lengths = case.lengths
    shape = Shape(len(lengths), 32, 8, 128, max(lengths))
    live_bytes = 2 * sum(lengths) * shape.num_kv_heads * shape.head_dim * DTYPE.itemsize
    sets = num_sets(live_bytes)
    inputs = make_inputs(shape, sets, device)
    mask = torch.arange(shape.kv_len, device=device)[None] >= shape.kv_len - torch.tensor(lengths, device=device)[:, None]
    spans = build_spans(shape.batch, 1, shape.kv_len, inputs[0][0].device, q_offset=shape.kv_len - 1, attention_mask=mask)
    peers = {"sdpa_masked": lambda i: sdpa_masked(*inputs[i], mask[:, None, None])}
    if min(lengths) == max(lengths):
        peers["sdpa_cudnn"] = lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i])
    found = compete(
        peers,
        {"split_kv": lambda i: SPLIT_KV(*inputs[i], spans), "lean": lambda i: LEAN(*inputs[i], spans)},
        exact(*inputs[0], spans),
        sets=sets,
        us=max(7, live_bytes / READ),
    )
    us = found["us"]
    row = {
        "shape": case.name,
        "lengths": lengths,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "live_kv_bytes": live_bytes,
    }
    return row | found | _figures(found, live_bytes) | {"lean_over_sdpa_masked": us.get("sdpa_masked", 0) / us["lean"] or None}


def host_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds of host time per eager call: kernels, the backend as models call it, and torch's default sdpa.

    K and V are short, so that the device is faster than the host: with a full queue the host would wait.
    """
    ((q, k, v),) = make_inputs(shape, 1, device)
    expected = exact(q, k, v)
    kv, spec, backend = KV(k, v), Spec(), registry.get("lean")
    split_kv, lean = (kernel.args[0] for kernel in (SPLIT_KV, LEAN))  # without the wrapper for plain tensors
    calls = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "split_kv": lambda: split_kv(q, kv, spec),
        "lean": lambda: lean(q, kv, spec),
        "backend": lambda: backend.attend(q, KV(k, v), Spec(), None, sink_logits=None, inv_freq=None),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, run in calls.items():
        check(name, run(), expected)
    for _ in range(LEAST):
        for name, run in calls.items():
            times[name].append(host_us(run, device))
    return shape.row() | medians(times) | {"errors": {}}


def host_summary(rows: list[dict]) -> dict:
    return {"largest_us": {name: max(row["us"][name] for row in rows) for name in rows[0]["us"]}}


def decode_summary(rows: list[dict]) -> dict:
    """lean over its peers below and above 256 MiB of K/V; its bandwidth as a share of the highest one in its run."""
    best = max((tb, name, row["shape"]) for row in rows for name, tb in row["tb_per_s"].items())
    share = []
    for run in {row.get("run") for row in rows}:
        its = [row for row in rows if row.get("run") == run]
        most = max(tb for row in its for tb in row["tb_per_s"].values())
        share += [row | {"share": row["tb_per_s"]["lean"] / most} for row in its]
    size = lambda row: row.get("kv_bytes", row.get("live_kv_bytes"))  # noqa: E731
    return {
        "lean_over_best_peer": ratios(rows, "lean_over_best_peer"),
        "lean_over_best_peer_below_256_mib": ratios([r for r in rows if size(r) < 256 * MIB], "lean_over_best_peer"),
        "lean_over_best_peer_from_256_mib": ratios([r for r in rows if size(r) >= 256 * MIB], "lean_over_best_peer"),
        "lean_over_split_kv": ratios(rows, "lean_over_split_kv"),
        "lean_over_batch_invariant": ratios(rows, "lean_over_batch_invariant"),
        "best_tb_per_s": {"tb_per_s": best[0], "kernel": best[1], "shape": best[2]},
        "lean_share_of_best_bandwidth_64_to_256_mib": ratios([r for r in share if 64 * MIB <= size(r) < 256 * MIB], "share"),
        "lean_share_of_best_bandwidth_from_256_mib": ratios([r for r in share if size(r) >= 256 * MIB], "share"),
        "lean_share_of_best_bandwidth_from_1_gib": ratios([r for r in share if size(r) >= GIB], "share"),
    }


def ragged_summary(rows: list[dict]) -> dict:
    """The same, with the masked sdpa of Transformers instead of the peers that do not support padding."""
    ragged = [row for row in rows if len(set(row["lengths"])) > 1]
    return decode_summary(rows) | {"lean_over_sdpa_masked": ratios(ragged, "lean_over_sdpa_masked")}
